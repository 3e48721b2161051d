/* SPDX-License-Identifier: Apache-2.0 */
/* norm.cu -- rmsnorm, with an addition before it, and layernorm. Narrow rows (heads) are a warp's, wide ones a block's. A row is read once for each
 * sum and once to be written, from the caches after the first time; y and residual are written where all of the row's sums are known, element by
 * element behind the read, so they may be the inputs.
 *
 * Bytes decide: x (and residual) read and y (and residual) written once. */
#ifdef __CUDACC_RTC__                   /* the host half is ../companions.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "companions.cuh"

struct item { d_row x, residual, y; bool added; };

FV_DEVICE void z_of(const item &t, int i, float (&z)[4])
{
    float r[4];
    d_get(t.x, i, z);
    if (!t.added) return;
    d_get(t.residual, i, r);
    for (int k = 0; k < 4; k++) z[k] += r[k];
}

/* The sum over an item's threads, to all of them. */
FV_DEVICE float sum_up(float x, int warps, float *room, int warp, int lane)
{
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(D_ALL, x, by);
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = 0.0f;
    for (int w = 0; w < D_WARPS; w++) x += room[w];
    return x;
}

extern "C" __global__ void __launch_bounds__(D_THREADS, 4) norm_rows(const __grid_constant__ d_norm p)
{
    __shared__ float room[D_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = p.x.width;
    const int first = 4 * (threadIdx.x % (32 * p.warps)), step = 128 * p.warps;
    const int64_t at = (int64_t)blockIdx.x * (D_WARPS / p.warps) + warp / p.warps;
    if (at >= p.num_items) return;      /* a whole block where blocks have barriers */
    const int64_t row = at / p.num_heads, head = at - row * p.num_heads;
    item t;
    t.added = p.residual.data != 0;
    t.x = d_row_of(p.x, row * p.x.stride[0] + head * p.x.stride[1]);
    t.y = d_row_of(p.y, row * p.y.stride[0] + head * p.y.stride[1]);
    t.residual = d_row_of(p.residual, row * p.residual.stride[0] + head * p.residual.stride[1]);

    float z[4], sum = 0.0f, mean = 0.0f;
    if (p.centred) {
        for (int i = first; i < n; i += step) {
            z_of(t, i, z);
            sum += (z[0] + z[1]) + (z[2] + z[3]);       /* behind the end they are 0 */
        }
        mean = sum_up(sum, p.warps, room, warp, lane) / (float)n;
        sum = 0.0f;
    }
    for (int i = first; i < n; i += step) {
        z_of(t, i, z);
        for (int k = 0; k < 4; k++) sum += i + k < n ? (z[k] - mean) * (z[k] - mean) : 0.0f;
    }
    const float inverse = __fdiv_rn(1.0f, sqrtf(sum_up(sum, p.warps, room, warp, lane) / (float)n + p.eps));

    const d_row weight = d_row_of(p.weight, 0), bias = d_row_of(p.bias, 0);
    const float one = p.plus_one ? 1.0f : 0.0f;
    for (int i = first; i < n; i += step) {
        float w[4], b[4] = {};
        z_of(t, i, z);
        d_get(weight, i, w);
        if (p.bias.data) d_get(bias, i, b);
        if (t.added) d_put(t.residual, i, z);
        for (int k = 0; k < 4; k++) z[k] = (z[k] - mean) * inverse * (w[k] + one) + b[k];
        d_put(t.y, i, z);
    }
}
#else
typedef int fv__norm_has_no_host_code;
#endif
