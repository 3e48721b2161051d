/* SPDX-License-Identifier: Apache-2.0 */
/* rows.cuh -- usual rows (one type of 16 bits; rows, heads and pairs in vectors of 16 bytes; what says so is called wide) from registers to registers, in
 * pieces: two vectors of 8 elements that hold 8 pairs, or, behind the pairs, one that is copied. Beside 64 bytes of memory traffic a piece costs 48
 * operations, 16 conversions in and 8 out, some 30 others: 250 cycles of a warp's share of an SM for 32 pieces, of which memory takes 600. */
#ifndef FV_ROWS_CUH
#define FV_ROWS_CUH

#include "ptx.cuh"


/* The heads of a row, in bytes. */
struct d_heads { char *first; int64_t stride; };
struct d_piece_of_row { uint4 a, b; };

FV_DEVICE d_heads d_heads_of(const d_tensor &t, int64_t row) { return { t.data + 2 * row * t.stride[0], 2 * t.stride[1] }; }

template <bool BF16> FV_DEVICE void d_to_floats(const uint4 &v, float *x)
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = BF16 ? __uint_as_float(word[i] << 16) : cvt_f32_f16((uint16_t)word[i]);
        x[2 * i + 1] = BF16 ? __uint_as_float(word[i] & 0xffff0000) : cvt_f32_f16((uint16_t)(word[i] >> 16));
    }
}

template <bool BF16> FV_DEVICE uint4 d_from_floats(const float *x)
{
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = BF16 ? cvt_rn_bf16x2(x[2 * i], x[2 * i + 1]) : cvt_rn_f16x2(x[2 * i], x[2 * i + 1]);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Pairs [first, first + 8). */
template <bool BF16, bool INTERLEAVED> FV_DEVICE void d_turn_piece(const d_turns &turns, int first, d_piece_of_row &v)
{
    float x[16], c[8], s[8];
    d_to_floats<BF16>(v.a, x);
    d_to_floats<BF16>(v.b, x + 8);
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
    v.a = d_from_floats<BF16>(x);
    v.b = d_from_floats<BF16>(x + 8);
}

/* All heads of a row, the first `turned` elements of each in pairs: by `threads` threads, of which this is one. Each asks for its next piece before it turns
 * the one it has, and for its first before it calls `make`, which has turns made. */
template <bool BF16, bool INTERLEAVED, class MAKE>
FV_DEVICE void d_move_pieces(int turned, const d_turns &turns, int width, const d_heads &from, const d_heads &to, int heads, int thread, int threads, const MAKE &make)
{
    const int pairs = turned / 16, each = pairs + (width - turned) / 8, all = each * heads;
    const auto place = [&](int i, int64_t stride, int &second) {
        const int head = i / each, j = i - head * each;
        second = j >= pairs ? 0 : INTERLEAVED ? 16 : turned;
        return head * stride + 2 * (j >= pairs ? turned + 8 * (j - pairs) : INTERLEAVED ? 16 * j : 8 * j);
    };
    const auto load = [&](int i) {
        int second;
        const char *at = from.first + place(i, from.stride, second);
        d_piece_of_row x = { *(const uint4 *)at, { 0, 0, 0, 0 } };
        if (second) x.b = *(const uint4 *)(at + second);
        return x;
    };
    d_piece_of_row now = {}, next = {};
    if (thread < all) now = load(thread);
    make();
#pragma unroll 1
    for (int i = thread; i < all; i += threads) {
        if (i + threads < all) next = load(i + threads);
        int second;
        char *at = to.first + place(i, to.stride, second);
        if (second) d_turn_piece<BF16, INTERLEAVED>(turns, 8 * (i % each), now);
        *(uint4 *)at = now.a;
        if (second) *(uint4 *)(at + second) = now.b;
        now = next;
    }
}

template <class MAKE>
FV_DEVICE void d_move_row(int type, const d_rotary &rotary, int turned, const d_turns &turns, int width, const d_heads &from, const d_heads &to, int heads,
                          int thread, int threads, const MAKE &make)
{
    const bool bf16 = type == D_BF16, interleaved = rotary.interleaved && turned;
    if (interleaved && bf16) d_move_pieces<true, true>(turned, turns, width, from, to, heads, thread, threads, make);
    else if (interleaved) d_move_pieces<false, true>(turned, turns, width, from, to, heads, thread, threads, make);
    else if (bf16) d_move_pieces<true, false>(turned, turns, width, from, to, heads, thread, threads, make);
    else d_move_pieces<false, false>(turned, turns, width, from, to, heads, thread, threads, make);
}

#endif
