/* SPDX-License-Identifier: Apache-2.0 */
/* ceiling.cu -- what a GPU can do at most, for `foveal bench` and `foveal replay` to divide by: how fast it reads, how fast it multiplies.
 *
 *   read        a streaming read: each thread has eight loads of 16 bytes in flight, nothing is kept
 *   multiply    mma.sync of 16-bit numbers from registers alone, sixteen independent sums a warp: 16 x 4096 operations a turn and warp
 *   multiply32  the same with tf32 (16 x 2048): three of its products make one of f32
 *
 * What they compute goes nowhere unless it comes out as a number that the inputs cannot give, so that no compiler may leave anything out. */
#ifdef __CUDACC_RTC__                   /* the host half is cli/gpu.c */
#include "base.cuh"

extern "C" __global__ void __launch_bounds__(256) read(const uint4 *from, uint64_t count, uint32_t *nowhere)
{
    enum { IN_FLIGHT = 8 };
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t all = 0;
    for (; i + (IN_FLIGHT - 1) * step < count; i += IN_FLIGHT * step) {
        uint4 x[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) x[k] = __ldcs(from + i + k * step);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) all |= x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
    }
    for (; i < count; i += step) {
        const uint4 x = __ldcs(from + i);
        all |= x.x ^ x.y ^ x.z ^ x.w;
    }
    if (all == 0x9e3779b9u) *nowhere = all;
}

enum { SUMS = 16 };

/* The operands are the caller's numbers: multiplying zeros takes less power, and is faster, than multiplying anything else. */
template <bool WIDE> FV_DEVICE void multiply_for(const uint32_t *numbers, uint32_t *nowhere, int turns)
{
    float c[SUMS][4] = {};
    uint32_t a[2][4], b[SUMS / 2][2];
    for (int i = 0; i < 8; i++) a[i / 4][i % 4] = numbers[threadIdx.x + 128 * i];
    for (int i = 0; i < SUMS; i++) b[i / 2][i % 2] = numbers[threadIdx.x + 128 * (8 + i)];
#pragma unroll 1
    for (int t = 0; t < turns; t++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            if (WIDE)
                asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                             : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                             : "r"(a[i & 1][0]), "r"(a[i & 1][1]), "r"(a[i & 1][2]), "r"(a[i & 1][3]), "r"(b[i / 2][0]), "r"(b[i / 2][1]));
            else
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                             : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                             : "r"(a[i & 1][0]), "r"(a[i & 1][1]), "r"(a[i & 1][2]), "r"(a[i & 1][3]), "r"(b[i / 2][0]), "r"(b[i / 2][1]));
        }
    float sum = 0;
    for (int i = 0; i < 4 * SUMS; i++) sum += c[i / 4][i % 4];
    if (sum == 1.5f) *nowhere = 1;
}

extern "C" __global__ void __launch_bounds__(128, 2) multiply(const uint32_t *numbers, uint32_t *nowhere, int turns)
{
    multiply_for<false>(numbers, nowhere, turns);
}

extern "C" __global__ void __launch_bounds__(128, 2) multiply32(const uint32_t *numbers, uint32_t *nowhere, int turns)
{
    multiply_for<true>(numbers, nowhere, turns);
}
#else
typedef int fv__ceiling_has_no_host_code;
#endif
