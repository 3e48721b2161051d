/* SPDX-License-Identifier: Apache-2.0 */
/* rope.cu -- rows of x turned into y, which may be x itself. A block has one row: its sines are made once, its warps take heads in turn.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../ops.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"

extern "C" __global__ void __launch_bounds__(D_THREADS) rope(const __grid_constant__ d_rope p)
{
    __shared__ d_turns turns;
    __shared__ float rows[D_WARPS][D_MAX_DIM];
    const int64_t row = p.row_first + blockIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (p.rotary.dim) d_make_turns(p.rotary, (int)d_read(p.positions, row), turns);
    __syncthreads();
    for (int h = blockIdx.y * D_WARPS + warp; h < p.num_heads; h += gridDim.y * D_WARPS)
        d_turn_head(p.rotary, turns, p.x, p.y, row, h, rows[warp], lane);
}
#else
typedef int fv__rope_has_no_host_code;
#endif
