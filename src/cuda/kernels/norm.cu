/* SPDX-License-Identifier: Apache-2.0 */
/* norm.cu -- rmsnorm, with an addition before it, and layernorm. Narrow rows (heads) are a warp's, wide ones a block's. A row is read once for each
 * sum and once to be written, from the caches after the first time; y and residual are written where all of the row's sums are known, element by
 * element behind the read, so they may be the inputs.
 *
 * Squares of f32 leave its range long before the elements do: a row whose sum says so is summed again times a power of two that brings its largest
 * element to 1. A mean is rounded to f32, and what it lacks is a sum of the same pass as the squares.
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

struct part { float *room; int warps, warp, lane; };     /* where this thread stands among an item's */

/* The sum, or the largest, over an item's threads, to all of them. */
template <bool LARGEST> FV_DEVICE float all_of(float x, const part &t)
{
    for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_xor_sync(D_ALL, x, by);
        x = LARGEST ? fmaxf(x, other) : x + other;
    }
    if (t.warps == 1) return x;
    __syncthreads();
    if (t.lane == 0) t.room[t.warp] = x;
    __syncthreads();
    x = 0.0f;
    for (int w = 0; w < D_WARPS; w++) x = LARGEST ? fmaxf(x, t.room[w]) : x + t.room[w];
    return x;
}

/* y = (z * scale - mean - rest) * inverse * weight. */
struct measure { float scale, mean, rest, square; };

FV_DEVICE measure measure_row(const item &t, const part &thread, int first, int step, int n, bool centred, float scale)
{
    measure m = { scale, 0.0f, 0.0f, 0.0f };
    float z[4], sum = 0.0f, square = 0.0f;
    if (centred) {
        for (int i = first; i < n; i += step) {
            z_of(t, i, z);
            sum += (z[0] * scale + z[1] * scale) + (z[2] * scale + z[3] * scale);       /* behind the end they are 0 */
        }
        m.mean = all_of<false>(sum, thread) / (float)n;
        sum = 0.0f;
    }
    for (int i = first; i < n; i += step) {
        z_of(t, i, z);
        for (int k = 0; k < 4; k++) {
            const float d = i + k < n ? z[k] * scale - m.mean : 0.0f;
            sum += d;
            square += d * d;
        }
    }
    m.square = all_of<false>(square, thread) / (float)n;
    if (!centred) return m;
    m.rest = all_of<false>(sum, thread) / (float)n;
    m.square = fmaxf(m.square - m.rest * m.rest, m.square * 0.0f);      /* NaN stays */
    return m;
}

/* The power of two that brings a row's largest element next to 1; 1 where none does. */
FV_DEVICE float scale_of(const item &t, const part &thread, int first, int step, int n)
{
    float z[4], most = 0.0f;
    for (int i = first; i < n; i += step) {
        z_of(t, i, z);
        for (int k = 0; k < 4; k++) most = fmaxf(most, fabsf(z[k]));
    }
    most = all_of<true>(most, thread);
    if (most == 0.0f || most > 3.402823466e38f) return 1.0f;
    const int e = (int)(__float_as_uint(most) >> 23);                   /* 127: 1 */
    return __uint_as_float((uint32_t)(e > 253 ? 1 : e < 1 ? 253 : 254 - e) << 23);
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

    const part thread = { room, p.warps, warp, lane };
    measure m = measure_row(t, thread, first, step, n, p.centred, 1.0f);
    float inverse = __fdiv_rn(1.0f, sqrtf(m.square + p.eps));
    if (!(m.square + p.eps >= 1e-30f && m.square + p.eps <= 1e30f)) {
        const float scale = scale_of(t, thread, first, step, n);
        if (scale != 1.0f) m = measure_row(t, thread, first, step, n, p.centred, scale);
        inverse = (float)(1.0 / sqrt((double)m.square + (double)p.eps * (double)scale * (double)scale));
    }

    const d_row weight = d_row_of(p.weight, 0), bias = d_row_of(p.bias, 0);
    const float one = p.plus_one ? 1.0f : 0.0f;
    for (int i = first; i < n; i += step) {
        float z[4], w[4], b[4] = {};
        z_of(t, i, z);
        d_get(weight, i, w);
        if (p.bias.data) d_get(bias, i, b);
        if (t.added) d_put(t.residual, i, z);
        for (int k = 0; k < 4; k++) z[k] = (z[k] * m.scale - m.mean - m.rest) * inverse * (w[k] + one) + b[k];
        d_put(t.y, i, z);
    }
}
#else
typedef int fv__norm_has_no_host_code;
#endif
