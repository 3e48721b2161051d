/* SPDX-License-Identifier: Apache-2.0 */
/* rope.cu -- rows of x turned into y, which may be x itself. A block has one row, whose sines are made once.
 *
 * Usual rows (`wide`) go from registers to registers in pieces: two vectors of 8 elements that hold 8 pairs, or, behind the pairs, one that is copied.
 * A thread asks for its next piece before it turns the one it has, and for its first before the sines are made. What that costs beside 64 bytes of
 * memory traffic: 48 operations, 16 conversions in and 8 out, some 30 others; 250 cycles of a warp's share of an SM for 32 pieces, of which memory
 * takes 600. All other rows go through shared memory as floats, a head a warp.
 *
 * checkjit: --fmad=false */
#ifdef __CUDACC_RTC__                   /* the host half is ../ops.c */
#include "base.cuh"
#include "ptx.cuh"
#include "plan.cuh"
#include "ops.cuh"

typedef const d_rope &args;

struct pieces { int turned, each, all; };       /* of a head: that are turned, all; of the row */
struct piece { uint4 a, b; };                   /* one that is copied: a */

FV_DEVICE pieces count_pieces(args p)
{
    const int turned = p.rotary.dim / 16, each = turned + (p.x.width - p.rotary.dim) / 8;
    return { turned, each, each * p.num_heads };
}

/* Where piece i of the row lies in t: its first vector, and how many bytes behind that its second. */
FV_DEVICE uint4 *piece_at(args p, const pieces &n, const d_tensor &t, int64_t row, int i, int &second)
{
    const int head = i / n.each, j = i - head * n.each, pair = p.rotary.interleaved ? 16 * j : 8 * j;
    const int element = j < n.turned ? pair : p.rotary.dim + 8 * (j - n.turned);
    second = j < n.turned ? p.rotary.interleaved ? 16 : p.rotary.dim : 0;
    return (uint4 *)(t.data + 2 * (row * t.stride[0] + head * t.stride[1] + element));
}

FV_DEVICE piece load_piece(args p, const pieces &n, int64_t row, int i)
{
    int second;
    const uint4 *at = piece_at(p, n, p.x, row, i, second);
    piece x = { *at, { 0, 0, 0, 0 } };
    if (second) x.b = *(const uint4 *)((const char *)at + second);
    return x;
}

template <bool BF16> FV_DEVICE void to_floats(const uint4 &v, float *x)
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = BF16 ? __uint_as_float(word[i] << 16) : cvt_f32_f16((uint16_t)word[i]);
        x[2 * i + 1] = BF16 ? __uint_as_float(word[i] & 0xffff0000) : cvt_f32_f16((uint16_t)(word[i] >> 16));
    }
}

template <bool BF16> FV_DEVICE uint4 from_floats(const float *x)
{
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = BF16 ? cvt_rn_bf16x2(x[2 * i], x[2 * i + 1]) : cvt_rn_f16x2(x[2 * i], x[2 * i + 1]);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Pairs [first, first + 8). */
template <bool BF16, bool INTERLEAVED> FV_DEVICE void turn_piece(const d_turns &turns, int first, piece &v)
{
    float x[16], c[8], s[8];
    to_floats<BF16>(v.a, x);
    to_floats<BF16>(v.b, x + 8);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 cs = *(const float4 *)&turns.c[first + i], ss = *(const float4 *)&turns.s[first + i];
        c[i] = cs.x, c[i + 1] = cs.y, c[i + 2] = cs.z, c[i + 3] = cs.w;
        s[i] = ss.x, s[i + 1] = ss.y, s[i + 2] = ss.z, s[i + 3] = ss.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float &lo = x[INTERLEAVED ? 2 * i : i], &hi = x[INTERLEAVED ? 2 * i + 1 : i + 8];
        const float a = lo * c[i] - hi * s[i], b = hi * c[i] + lo * s[i];
        lo = a, hi = b;
    }
    v.a = from_floats<BF16>(x);
    v.b = from_floats<BF16>(x + 8);
}

template <bool BF16, bool INTERLEAVED> FV_DEVICE void turn_wide_row(args p, d_turns &turns, int64_t row)
{
    const pieces n = count_pieces(p);
    const int step = gridDim.y * D_THREADS;
    int i = blockIdx.y * D_THREADS + threadIdx.x;
    piece now = {}, next = {};
    if (i < n.all) now = load_piece(p, n, row, i);
    if (p.rotary.dim) d_make_turns(p.rotary, (int)d_read(p.positions, row), turns);
    __syncthreads();
#pragma unroll 1
    for (; i < n.all; i += step) {
        if (i + step < n.all) next = load_piece(p, n, row, i + step);
        int second;
        uint4 *to = piece_at(p, n, p.y, row, i, second);
        if (second) turn_piece<BF16, INTERLEAVED>(turns, 8 * (i % n.each), now);
        *to = now.a;
        if (second) *(uint4 *)((char *)to + second) = now.b;
        now = next;
    }
}

FV_DEVICE void turn_row(args p, d_turns &turns, int64_t row)
{
    __shared__ float rows[D_WARPS][D_MAX_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (p.rotary.dim) d_make_turns(p.rotary, (int)d_read(p.positions, row), turns);
    __syncthreads();
    for (int h = blockIdx.y * D_WARPS + warp; h < p.num_heads; h += gridDim.y * D_WARPS)
        d_turn_head(p.rotary, turns, p.x, p.y, row, h, rows[warp], lane);
}

extern "C" __global__ void __launch_bounds__(D_THREADS, 5) rope(const __grid_constant__ d_rope p)
{
    __shared__ d_turns turns;
    const int64_t row = p.row_first + blockIdx.x;
    const bool bf16 = p.x.type == D_BF16;
    if (!p.wide) turn_row(p, turns, row);
    else if (p.rotary.interleaved && bf16) turn_wide_row<true, true>(p, turns, row);
    else if (p.rotary.interleaved) turn_wide_row<false, true>(p, turns, row);
    else if (bf16) turn_wide_row<true, false>(p, turns, row);
    else turn_wide_row<false, false>(p, turns, row);
}
#else
typedef int fv__rope_has_no_host_code;
#endif
