/* SPDX-License-Identifier: Apache-2.0 */
/* rope.cu -- rows of x turned into y, which may be x itself. A block has one row, whose sines are made once. Usual rows go from registers to registers
 * (d_move_row), by as many warps as have equally much to do; all others through shared memory as floats, a head a warp.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../ops.c */
#include "base.cuh"
#include "plan.cuh"
#include "ops.cuh"
#include "rows.cuh"

typedef const d_rope &args;

FV_DEVICE void turn_wide_row(args p, d_turns &turns, int64_t row)
{
    const d_heads from = d_heads_of(p.x, row), to = d_heads_of(p.y, row);
    const auto make = [&] {
        if (p.rotary.dim) d_make_turns(p.rotary, (int)d_read(p.positions, row), turns, threadIdx.x, blockDim.x);
        __syncthreads();
    };
    d_move_row(p.x.type, p.rotary, p.rotary.dim, turns, p.x.width, from, to, p.num_heads, blockIdx.y * blockDim.x + threadIdx.x, gridDim.y * blockDim.x, make);
}

FV_DEVICE void turn_row(args p, d_turns &turns, int64_t row)
{
    __shared__ float rows[D_WARPS][D_MAX_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (p.rotary.dim) d_make_turns(p.rotary, (int)d_read(p.positions, row), turns, threadIdx.x, blockDim.x);
    __syncthreads();
    for (int h = blockIdx.y * D_WARPS + warp; h < p.num_heads; h += gridDim.y * D_WARPS)
        d_turn_head(p.rotary, turns, p.x, p.y, row, h, rows[warp], lane);
}

extern "C" __global__ void __launch_bounds__(D_THREADS, 5) rope(const __grid_constant__ d_rope p)
{
    __shared__ d_turns turns;
    const int64_t row = p.row_first + blockIdx.x;
    if (p.wide) turn_wide_row(p, turns, row);
    else turn_row(p, turns, row);
}
#else
typedef int fv__rope_has_no_host_code;
#endif
