/* SPDX-License-Identifier: Apache-2.0 */
/* tile.cuh -- rows of K, V and Q in shared memory, and their fragments for mma.sync.
 *
 * A row lies in chunks of 16 bytes; two chunks are a unit, 32 bytes, which is what one ldmatrix.x4 takes of 16 rows. Where a row has a multiple of 8
 * chunks, chunk c of row r lies at c ^ (r % 8); else rows are an odd number of chunks apart. Either way the 8 rows of an 8x8 matrix
 * touch all 32 banks once.
 *
 * What a unit holds, and what its columns are to the matrix product (F = 16 / bits of the type; a lane is 4 i + j):
 *
 *   type     elements   K: k steps of 16   V: tiles of 8 columns        element of (chunk, field t, column 2 j + e)
 *   16-bit   16         1                  2 (one a chunk)              8 chunk + 2 j + e
 *   8-bit    32         2 (one a chunk)    4 (two a chunk: t = 0, 1)    16 chunk + 2 (2 j + e) + t
 *   4-bit    64         4 (two a chunk)    8 (four a chunk)             32 chunk + 4 (2 j + e) + t
 *   f32      8          1 of 8             1                            2 j + e
 *
 * For K the order of elements along k is free as long as Q has the same: fv_q_place says where element d of Q goes. For V the order of columns is free
 * as long as the output undoes it: fv_v_column. So narrow types are never reordered, only widened in registers (element.cuh). */
#ifndef FV_TILE_CUH
#define FV_TILE_CUH

#include "element.cuh"

static __device__ constexpr int fv_units(int type, int dim) { return fv_div_up(dim * fv_bits(type), 256); }
static __device__ constexpr int fv_fields(int type) { return type == FV_F32 ? 1 : 16 / fv_bits(type); }
static __device__ constexpr int fv_unit_elements(int type) { return 256 / fv_bits(type); }
static __device__ constexpr int fv_unit_tiles(int type) { return type == FV_F32 ? 1 : 2 * fv_fields(type); }

/* Rows of UNITS units. */
template <int UNITS> struct fv_rows {
    enum { chunks = 2 * UNITS, swizzled = chunks % 8 == 0, stride = swizzled ? 16 * chunks : 16 * (chunks | 1) };

    static FV_DEVICE_INLINE uint32_t at(int row, int chunk) { return row * stride + ((swizzled ? chunk ^ (row & 7) : chunk) << 4); }
    /* Chunk 2 unit + half of a row with row % 8 == low, relative to the row. `unit` is a constant in unrolled loops: of the swizzled places, only
     * four differ by more than a constant. */
    static FV_DEVICE_INLINE uint32_t in_row(int low, int half, int unit)
    {
        return swizzled ? ((((2 * unit) & 6) ^ (half ^ low)) << 4) + (((2 * unit) & ~7) << 4) : (2 * unit + half) << 4;
    }
};

/* Where element d of a Q row goes when K is of type KT: its place in the row. */
template <int KT> FV_DEVICE int fv_q_place(int d)
{
    enum { F = fv_fields(KT) };
    if (F == 1) return d;
    const int r = d % (2 * F);
    return d / (8 * F) * (8 * F) + 8 * (r % F) + d % (8 * F) / (2 * F) * 2 + r / F;
}

/* The element of Q at a place. */
template <int KT> FV_DEVICE int fv_q_element(int place)
{
    enum { F = fv_fields(KT) };
    if (F == 1) return place;
    const int p = place % (8 * F), t = p / 8, j = p % 8 / 2, e = p % 2;
    return place / (8 * F) * (8 * F) + 2 * F * j + t + F * e;
}

/* The element of a V row at column 2 j + e of tile `tile` of a unit, relative to the unit. */
template <int VT> FV_DEVICE int fv_v_column(int tile, int j, int e)
{
    enum { F = fv_fields(VT) };
    return tile / F * (8 * F) + F * (2 * j + e) + tile % F;
}

/* One product step: 16 rows, 8 columns, 16 elements (f32: 8). f32 operands are split into two tf32 each; what is left out is below 2^-21. */
template <int TYPE> struct fv_mma;
template <> struct fv_mma<FV_F16> {
    static FV_DEVICE_INLINE void step(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_m16n8k16_f16(c, a, b0, b1); }
};
template <> struct fv_mma<FV_BF16> {
    static FV_DEVICE_INLINE void step(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_m16n8k16_bf16(c, a, b0, b1); }
};
template <> struct fv_mma<FV_F32> {
    static FV_DEVICE_INLINE uint32_t rest(uint32_t x) { return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffffe000u)); }
    /* The matrix unit adds with fewer bits than f32 has, so each step starts at zero and is added here. */
    static FV_DEVICE_INLINE void step(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
    {
        const uint32_t al[4] = { rest(a[0]), rest(a[1]), rest(a[2]), rest(a[3]) };
        float d[4] = { 0, 0, 0, 0 };
        mma_m16n8k8_tf32(d, al, b0 & 0xffffe000u, b1 & 0xffffe000u);
        const uint32_t ah[4] = { a[0] & 0xffffe000u, a[1] & 0xffffe000u, a[2] & 0xffffe000u, a[3] & 0xffffe000u };
        mma_m16n8k8_tf32(d, ah, rest(b0), rest(b1));
        mma_m16n8k8_tf32(d, ah, b0 & 0xffffe000u, b1 & 0xffffe000u);
        for (int i = 0; i < 4; i++) c[i] += d[i];
    }
};

/* A field times 2^-fv_raw_exponent. */
template <int FROM, int TO> FV_DEVICE uint32_t fv_operand_field(uint32_t w, int t)
{
    return fv_raw_exponent(FROM, TO) ? fv_raw_field<FROM, TO>(w, t) : fv_field<FROM, TO>(w, t);
}

/* Operand B, times 2^-fv_raw_exponent, for step r of a unit of K, of the 8 keys of group g (0, 1), from the four words that ldmatrix gave: w[2 g] is
 * the first chunk, w[2 g + 1] the second. */
template <int KT, int CT> FV_DEVICE void fv_k_operand(const uint32_t (&w)[4], int g, int r, uint32_t &b0, uint32_t &b1)
{
    enum { F = fv_fields(KT) };
    if (F == 1) {
        b0 = w[2 * g];
        b1 = w[2 * g + 1];
        return;
    }
    const uint32_t x = w[2 * g + (F == 2 ? r : r >> 1)];
    const int t = F == 2 ? 0 : 2 * (r & 1);
    b0 = fv_operand_field<KT, CT>(x, t);
    b1 = fv_operand_field<KT, CT>(x, t + 1);
}

/* Operand B, times 2^-fv_raw_exponent, for tile `tile` of a unit of V: 16 keys, from the four words of a transposing ldmatrix: keys 0-7 and 8-15 of the
 * first chunk, then of the second. */
template <int VT, int CT> FV_DEVICE void fv_v_operand(const uint32_t (&w)[4], int tile, uint32_t &b0, uint32_t &b1)
{
    enum { F = fv_fields(VT) };
    b0 = fv_operand_field<VT, CT>(w[2 * (tile / F)], tile % F);
    b1 = fv_operand_field<VT, CT>(w[2 * (tile / F) + 1], tile % F);
}

#endif
