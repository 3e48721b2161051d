/* SPDX-License-Identifier: Apache-2.0 */
/* element.cuh -- element types in device code: one element to and from f32, and packed fields of a word to pairs of 16-bit numbers.
 *
 * A word of a narrow type holds 2 F elements, F = 16 / bits. Field t (t < F) is the pair of elements (t, t + F): a shift and a mask bring it to the two
 * halves of a word, a few bit operations make it two 16-bit floats. No field needs a byte permutation, because the tile code chooses which
 * element is which row of the matrix product (tile.cuh).
 *
 *   type      bits of 16-bit float                       then times
 *   e4m3      sign, 4 + 3 bits at the exponent's end     2^8 (f16), 2^120 (bf16): exact, subnormals too
 *   e5m2      its byte is an f16's upper half            1 (f16), 2^112 (bf16)
 *   int8      u = x + 128 behind 1024 (f16) or 128       minus the offset
 *   e2m1      sign, 2 + 1 bits                           2^14 (f16), 2^126 (bf16)
 *
 * NaN codes of 8-bit types come out finite in this path, which is fine: a key that some row sees is finite. */
#ifndef FV_ELEMENT_CUH
#define FV_ELEMENT_CUH

#include "ptx.cuh"

#define FV_F16  0
#define FV_BF16 1
#define FV_F32  2
#define FV_E4M3 3
#define FV_E5M2 4
#define FV_INT8 5
#define FV_E2M1 6

static __device__ constexpr int fv_bits(int type) { return type == FV_F32 ? 32 : type <= FV_BF16 ? 16 : type == FV_E2M1 ? 4 : 8; }

template <int TYPE> FV_DEVICE uint32_t fv_pack(float lo, float hi)
{
    return TYPE == FV_F16 ? cvt_rn_f16x2(lo, hi) : cvt_rn_bf16x2(lo, hi);
}

template <int TYPE> FV_DEVICE uint32_t fv_fma2(uint32_t a, uint32_t b, uint32_t c)
{
    return TYPE == FV_F16 ? fma_rn_f16x2(a, b, c) : fma_rn_bf16x2(a, b, c);
}

/* Minus zero is the neutral addend: it keeps the sign of a zero product. */
template <int TYPE> FV_DEVICE uint32_t fv_mul2(uint32_t a, uint32_t b) { return fv_fma2<TYPE>(a, b, 0x80008000u); }

/* By what power of two a field comes out too small where it is not multiplied: 0 where it always is. */
static __device__ constexpr int fv_raw_exponent(int from, int to)
{
    return from == FV_E4M3 ? (to == FV_F16 ? 8 : 120) : from == FV_E5M2 && to == FV_BF16 ? 112 : 0;
}

/* Field t of `w` times 2^-fv_raw_exponent, in type TO (f16 or bf16): for whoever can put that factor elsewhere. t is a constant where loops are
 * unrolled. The smallest are subnormal, which the matrix unit multiplies as they are. */
template <int FROM, int TO> FV_DEVICE uint32_t fv_raw_field(uint32_t w, int t)
{
    const uint32_t z = t ? w : w << 8;
    if (FROM == FV_E4M3) return (z & 0x80008000u) | (TO == FV_F16 ? z >> 1 & 0x3f803f80u : z >> 4 & 0x07f007f0u);
    return (z & 0x80008000u) | (z >> 3 & 0x0fe00fe0u);
}

/* Field t of `w`, in type TO. */
template <int FROM, int TO> FV_DEVICE uint32_t fv_field(uint32_t w, int t)
{
    if (FROM == FV_E5M2 && TO == FV_F16) return t ? w & 0xff00ff00u : (w & 0x00ff00ffu) << 8;
    if (FROM == FV_E4M3 || FROM == FV_E5M2)
        return fv_mul2<TO>(fv_raw_field<FROM, TO>(w, t), FROM == FV_E5M2 ? 0x77807780u : TO == FV_F16 ? 0x5c005c00u : 0x7b807b80u);
    if (FROM == FV_INT8) {
        const uint32_t x = (w >> (8 * t) & 0x00ff00ffu) ^ 0x00800080u;
        if (TO == FV_F16) return fv_fma2<TO>(x | 0x64006400u, 0x3c003c00u, 0xe480e480u);       /* 1024 + u - 1152 */
        /* bf16 has 7 fraction bits: 128 + low 7 bits of u, minus 256 or 128 */
        return fv_fma2<TO>((x & 0x007f007fu) | 0x43004300u, 0x3f803f80u, 0xc380c380u ^ (x & 0x00800080u));
    }
    if (FROM == FV_E2M1) {
        const uint32_t x = w >> (4 * t);
        if (TO == FV_F16) return fv_mul2<TO>((x & 0x00080008u) << 12 | (x & 0x00070007u) << 9, 0x74007400u);
        return fv_mul2<TO>((x & 0x00080008u) << 12 | (x & 0x00070007u) << 6, 0x7e807e80u);
    }
    return w;
}

/* Two e4m3 codes as a pair of TO. */
template <int TO> FV_DEVICE uint32_t fv_scale_pair(uint32_t lo, uint32_t hi) { return fv_field<FV_E4M3, TO>(lo | hi << 16, 0); }

/* One element as f32, from its bits. */
template <int TYPE> FV_DEVICE float fv_decode(uint32_t code)
{
    if (TYPE == FV_F32) return __uint_as_float(code);
    if (TYPE == FV_F16) return cvt_f32_f16((uint16_t)code);
    if (TYPE == FV_BF16) return __uint_as_float(code << 16);
    if (TYPE == FV_INT8) return (float)(int8_t)code;
    return cvt_f32_f16((uint16_t)fv_field<TYPE, FV_F16>(code, 0));
}

/* One element of f32, f16 or bf16, at element `index`. */
template <int TYPE> FV_DEVICE void fv_store(char *p, int64_t index, float x)
{
    if (TYPE == FV_F32) ((float *)p)[index] = x;
    else ((uint16_t *)p)[index] = (uint16_t)fv_pack<TYPE>(x, 0.0f);
}

#endif
