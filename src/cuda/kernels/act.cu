/* SPDX-License-Identifier: Apache-2.0 */
/* act.cu -- y = f(first half of x) * second half, four elements a thread at a time. A thread has read what it overwrites, so y may be the first half.
 *
 * Bytes decide: x read and y written once. */
#ifdef __CUDACC_RTC__                   /* the host half is ../companions.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "companions.cuh"

/* z / (1 + e^-z); where the exponential overflows the quotient is 0. */
FV_DEVICE float silu(float z) { return z == -fv_inf() ? 0.0f : __fdividef(z, 1.0f + expf(-z)); }

FV_DEVICE float gate(int act, float z)
{
    if (act == D_SILU) return silu(z);
    if (act == D_GELU) return z == -fv_inf() ? 0.0f : z * 0.5f * erfcf(-0.707106781186548f * z);
    const float twice = 1.59576912160573f * z * (1.0f + 0.044715f * z * z);
    return z == -fv_inf() ? 0.0f : __fdividef(z, 1.0f + expf(-twice));
}

extern "C" __global__ void __launch_bounds__(D_THREADS) act(const __grid_constant__ d_act p)
{
    const int64_t row = blockIdx.x;
    const int n = p.y.width;
    const d_row y = d_row_of(p.y, row * p.y.stride[0]);
    d_row left = d_row_of(p.x, row * p.x.stride[0]), right = d_row_of(p.x, row * p.x.stride[0] + n);
    left.width = right.width = n;
#pragma unroll 1
    for (int i = 4 * (blockIdx.y * D_THREADS + threadIdx.x); i < n; i += 4 * gridDim.y * D_THREADS) {
        float a[4], b[4];
        d_get(left, i, a);
        d_get(right, i, b);
        for (int k = 0; k < 4; k++) a[k] = gate(p.act, a[k]) * b[k];
        d_put(y, i, a);
    }
}
#else
typedef int fv__act_has_no_host_code;
#endif
