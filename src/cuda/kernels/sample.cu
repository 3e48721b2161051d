/* SPDX-License-Identifier: Apache-2.0 */
/* sample.cu -- one sample a block. Passes over the row: the largest value, the sum, a chunk of it for the draw; with top k or top p one more for
 * each draw, of which the first is most often the last.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../companions.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "companions.cuh"
#include "sample.cuh"

struct limits { float least; int count; double sum; uint64_t total; };

/* The pass that added weights last had the threshold `least`. */
FV_DEVICE limits limits_of(const d_sample &p, const s_source &s, int64_t i, s_room &room)
{
    limits l = { S_LEAST, 0x7fffffff, (double)fv_inf(), 0 };
    l.total = s_survey<true, false>(s, S_LEAST, room).sum;
    const float share = p.filters & D_TOP_P ? s_share(p.top_p, i) : 1.0f;
    uint64_t mass = l.total;
    if (p.filters & D_TOP_K) l.count = s_count(p.top_k, i);
    if (p.filters & D_TOP_K && p.filters & D_TOP_K_FIRST && l.count < s.x.width) {
        l.least = s_top_k(s, l.count, S_LEAST, room);
        l.total = mass = s_survey<true, false>(s, l.least, room).sum;
    }
    if (share < 1.0f) l.sum = (double)share * (double)mass;
    if (p.filters & D_MIN_P) {
        const float least = s_share(p.min_p, i) * s.top;
        if (least > l.least) l.total = s_survey<true, false>(s, l.least = least, room).sum;
    }
    return l;
}

FV_DEVICE int draw(const d_sample &p, const s_source &s, int64_t i, s_room &room)
{
    const limits l = limits_of(p, s, i, room);
    float t = l.least, value;
    uint64_t total = l.total;
    for (uint32_t number = 0;; number++) {
        const int id = s_find(s, t, __umul64hi(s_draw(p.random, i, number), total), room, value);
        if (l.count >= s.x.width && l.sum == (double)fv_inf()) return id;
        t = s_float(s_key(value) + 1);
        const s_tally larger = s_survey<true, false>(s, t, room);
        if (larger.sum == 0 || (larger.count < l.count && (double)larger.sum < l.sum)) return id;
        total = larger.sum;
    }
}

extern "C" __global__ void __launch_bounds__(D_SAMPLE_THREADS, 1) sample(const __grid_constant__ d_sample p)
{
    __shared__ s_room room;
    const int64_t i = blockIdx.x, row = p.rows.data ? s_read(p.rows, i, 0) : i;
    s_source s;
    s.top = 0.0f;
    if (row >= 0 && row < p.num_rows) s_open(s, d_row_of(p.x, row * p.x.stride[0]), p.logits ? S_LOGITS : S_PROBABILITIES, 1.0f, room);
    const int id = s.top > 0.0f ? draw(p, s, i, room) : 0;
    if (threadIdx.x) return;
    s_write(p.ids, i, 0, id);
    if (p.valid) p.valid[i * p.valid_stride] = s.top > 0.0f;
}
#else
typedef int fv__sample_has_no_host_code;
#endif
