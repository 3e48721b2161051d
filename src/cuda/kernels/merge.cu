/* SPDX-License-Identifier: Apache-2.0 */
/* merge.cu -- partial states of the same rows over disjoint keys into one: a warp for each row and head, states in the order given, sums in f32. The
 * output may be state 0: a warp has read all of its row before it writes. A row that one state alone has is that state, bit for bit.
 *
 * Bytes decide: (states + 1) x heads x width, each read or written once.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../ops.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"

enum { QUADS = (D_MAX_DIM + 127) / 128 };               /* of a lane */

FV_DEVICE float lse_of(const d_state &x, int64_t row, int head) { return x.lse[row * x.lse_stride[0] + head * x.lse_stride[1]]; }

FV_DEVICE d_tensor view_of(const d_state &x, int width)
{
    const d_tensor t = { x.o, { x.o_stride[0], x.o_stride[1], 0 }, x.type, width };
    return t;
}

extern "C" __global__ void __launch_bounds__(D_THREADS) merge(const __grid_constant__ d_merge p)
{
    const int64_t item = (int64_t)blockIdx.x * D_WARPS + threadIdx.x / 32, row = item / p.num_heads;
    const int head = (int)(item - row * p.num_heads), lane = threadIdx.x % 32, n = p.o.width;
    const d_state *states = p.many ? p.many : p.states;
    if (row >= p.num_rows) return;

    int count = 0, last = 0;
    float most = -fv_inf(), lse = -fv_inf();
    for (int s = 0; s < p.num_states; s++) {
        const float x = lse_of(states[s], row, head);
        if (x == -fv_inf()) continue;
        count++;
        last = s;
        if (x > most) most = x;
    }
    const int64_t to = row * p.o.stride[0] + head * p.o.stride[1];
    if (count == 1) lse = lse_of(states[last], row, head);
    if (count == 1 && states[last].type == p.o.type) {
        const d_tensor from = view_of(states[last], n);
        d_copy_row(from, row * from.stride[0] + head * from.stride[1], p.o, to, lane);
    } else {
        float sum = 0.0f, out[QUADS][4] = {};
        for (int s = 0; s < p.num_states && count; s++) {
            const float x = lse_of(states[s], row, head);
            if (x == -fv_inf()) continue;
            const float w = p.base2 ? exp2f(x - most) : expf(x - most);
            const d_tensor from = view_of(states[s], n);
            const char *at = d_at(from, row * from.stride[0] + head * from.stride[1]);
            const int bits = d_bits(from.type);
            const bool aligned = d_aligned(at, bits);
            sum += w;
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const int i = 128 * q + 4 * lane;
                float y[4];
                if (i >= n) continue;
                d_load_quad(from.type, at + i * bits / 8, n - i, aligned && i + 4 <= n, y);
                for (int k = 0; k < 4; k++) out[q][k] = count == 1 ? y[k] : out[q][k] + y[k] * w;
            }
        }
        const float inverse = __fdiv_rn(1.0f, sum);
        char *at = d_at(p.o, to);
        const int bits = d_bits(p.o.type);
        const bool aligned = d_aligned(at, bits);
        if (count > 1) lse = most + (p.base2 ? log2f(sum) : logf(sum));
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int i = 128 * q + 4 * lane;
            if (i >= n) continue;
            if (count > 1)
                for (int k = 0; k < 4; k++) out[q][k] = out[q][k] * inverse;
            d_store_quad(p.o.type, at + i * bits / 8, n - i, aligned && i + 4 <= n, out[q]);
        }
    }
    __syncwarp();
    if (lane == 0 && p.lse) p.lse[row * p.lse_stride[0] + head * p.lse_stride[1]] = lse;
}
#else
typedef int fv__merge_has_no_host_code;
#endif
