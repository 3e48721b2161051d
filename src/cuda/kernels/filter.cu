/* SPDX-License-Identifier: Apache-2.0 */
/* filter.cu -- softmax, renormalised top k and top p, masked top k: a block a row. The row is read once for its largest value, once for its sum, a
 * few times where a threshold is looked for (until its 4096 candidates are in shared memory), and once to be written; y may be x.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../companions.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "companions.cuh"
#include "sample.cuh"

FV_DEVICE float threshold_of(const d_filter &p, const s_source &s, int64_t row, s_room &room)
{
    if (p.what == D_TOP_K_RENORM) return s_top_k(s, s_count(p.param, row), S_LEAST, room);
    const float share = p.what == D_TOP_P_RENORM ? s_share(p.param, row) : 1.0f;
    if (share >= 1.0f) return S_LEAST;
    const double sum = (double)share * (double)s_survey<true, false>(s, S_LEAST, room).sum;
    return s_threshold<true>(s, 0, sum, S_LEAST, room);
}

extern "C" __global__ void __launch_bounds__(D_SAMPLE_THREADS, 1) filter(const __grid_constant__ d_filter p)
{
    __shared__ s_room room;
    const int64_t row = blockIdx.x;
    const bool raw = p.what == D_TOP_K_MASK, softmax = p.what == D_SOFTMAX;
    const d_row y = d_row_of(p.y, row * p.y.stride[0]);
    s_source s;
    s_open(s, d_row_of(p.x, row * p.x.stride[0]), raw ? S_RAW : softmax ? S_LOGITS : S_PROBABILITIES, softmax ? s_number(p.param, row) : 1.0f, room);
    /* A row without a weight becomes zeros. Sums of the largest values are no f32: they and their values are taken 2^-32 times, as which what becomes
     * subnormal is 0 as a quotient; the sum is negative then, as a register for that is one too many. */
    float t = fv_inf(), sum = 1.0f;
    if (raw) {
        t = s_top_k(s, s_count(p.param, row), -fv_inf(), room);
    } else if (s.top > 0.0f) {
        t = threshold_of(p, s, row, room);
        sum = (float)((double)s_survey<true, false>(s, t, room).sum * ((s.top >= 0x1p100f ? -0x1p-32 : 1.0) / (double)s.scale));
    }
    for (int i = 4 * threadIdx.x; i < s.x.width; i += 4 * D_SAMPLE_THREADS) {
        float x[4];
        s_get(s, i, x);
        for (int k = 0; k < 4; k++) {
            const bool in = x[k] >= t;
            x[k] = raw ? (in ? x[k] : -fv_inf()) : in ? (sum < 0.0f ? __fdiv_rn(__fmul_rn(x[k], -0x1p-32f), sum) : __fdiv_rn(x[k], sum)) : 0.0f;
        }
        d_put(y, i, x);
    }
}
#else
typedef int fv__filter_has_no_host_code;
#endif
