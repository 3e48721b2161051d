/* SPDX-License-Identifier: Apache-2.0 */
/* vocabulary.h -- the v_* words: what kernels and variants are written in.
 *
 * A v_f32 is one float at the scalar level (and in a CUDA thread), 4 on NEON, 8 on AVX2, 16 on AVX-512. Every word works lane by lane, so a text
 * that uses only these words means the same everywhere. FV_ISA_HEADER names the level's file, which says how many lanes there are and which
 * instructions to use; all the rest is here, in vector extensions that gcc and clang share. No system header is included: a variant's text and this
 * file compile in an instant.
 *
 * Types     v_f32  v_i32  v_mask (a condition)   v_pair { v_f32 lo, hi; }
 * Numbers   v_set(float) v_seti(int)   v_float(v_i32) v_int(v_f32: towards zero)   + - * / and unary - on v_f32; + - * on v_i32
 *           v_add v_sub v_mul v_div v_neg v_abs v_sqrt v_min v_max v_fma(a, b, c: a * b + c)
 *           v_exp v_exp2 v_log v_log2 v_tanh v_sin v_cos
 *           v_iadd v_isub v_imul v_imin v_imax v_iand v_ior v_ixor
 * Conditions  v_lt v_le v_gt v_ge v_eq v_ne of v_f32; v_ilt v_ile v_igt v_ige v_ieq v_ine of v_i32; v_and v_or v_not; v_true() v_false()
 *           v_select(mask, a, b) v_iselect(mask, a, b): a where the condition holds
 * Arguments v_read(fv_floats, v_i32) v_readi(fv_ints, v_i32): an index outside reads the nearest element; absent arrays read 0
 *           v_bit(fv_bits, at): the bit of (at.request, at.row, at.key); false where at.key is no key of the request
 *           v_in_range(fv_ranges, at, x): position x lies in a range of the request's list
 *           v_share_range(fv_ranges, at, x, y): one range holds both      v_before_ranges(fv_ranges, at, x): x is below the first range
 *           v_is_ancestor(fv_ints parents, at): at.key is context, the row itself or one that its parents lead to (see variants/tree.h)
 * Pairs     v_pair_of(lo, hi)
 * Rotary    v_rotate(v_pair, v_i32 position, v_f32 frequency): turns by position * frequency, exact for every position below 2^30
 *
 * A hook's body sees `a`, the argument struct, and `at`, where it is (struct v_at below).
 */
#ifndef FV__VOCABULARY_H
#define FV__VOCABULARY_H

#include <stdbool.h>
#include <stdint.h>
#include FV_ISA_HEADER

#define VFN static inline __attribute__((always_inline, unused))

/* Names of what a template defines once per level. */
#define V_PASTE_(a, b) a##_##b
#define V_PASTE(a, b) V_PASTE_(a, b)
#define V_NAME(name) V_PASTE(name, FV_ISA_NAME)
#define V_TEXT_(x) #x
#define V_TEXT(x) V_TEXT_(x)

/* Unrolls the next loop; its trip count is a constant. */
#ifdef __clang__
#define V_UNROLL _Pragma("clang loop unroll(full)")
#else
#define V_UNROLL _Pragma("GCC unroll 64")
#endif

/* ------------------------------------------------------------------------------------------------ lanes and types */

#if V_LANES == 1
typedef float v_f32;
typedef int32_t v_i32;
typedef uint32_t v_u32;
typedef v_i32 v_mask;                   /* -1 or 0 */
typedef double v_f64;

VFN v_f32 v_set(float x) { return x; }
VFN v_i32 v_seti(int32_t x) { return x; }
VFN float v_lane(v_f32 x, int i) { (void)i; return x; }
VFN int32_t v_lanei(v_i32 x, int i) { (void)i; return x; }
VFN v_f32 v_load(const float *p) { return *p; }
VFN v_i32 v_loadi(const int32_t *p) { return *p; }
VFN void v_store(float *p, v_f32 x) { *p = x; }
VFN void v_storei(int32_t *p, v_i32 x) { *p = x; }
VFN v_f32 v_float(v_i32 x) { return (float)x; }
VFN v_i32 v_int(v_f32 x) { return (int32_t)x; }
VFN v_u32 v_bits_of(v_f32 x) { v_u32 r; __builtin_memcpy(&r, &x, 4); return r; }
VFN v_f32 v_of_bits(v_u32 x) { v_f32 r; __builtin_memcpy(&r, &x, 4); return r; }
VFN v_i32 v_iota(void) { return 0; }
#define V_TRUTH(condition) (-(v_i32)(condition))
#define V_CONVERT(x, type) ((type)(x))

/* Elements as they lie in memory, to one unsigned integer a lane and back. */
VFN v_u32 v_load_u8(const void *p) { return *(const uint8_t *)p; }
VFN v_i32 v_load_s8(const void *p) { return *(const int8_t *)p; }
VFN v_u32 v_load_u16(const void *p) { uint16_t r; __builtin_memcpy(&r, p, 2); return r; }
VFN void v_store_u8(void *p, v_u32 x) { *(uint8_t *)p = (uint8_t)x; }
VFN void v_store_u16(void *p, v_u32 x) { const uint16_t r = (uint16_t)x; __builtin_memcpy(p, &r, 2); }
VFN uint32_t v_movemask(v_mask m) { return (uint32_t)m & 1; }
#else
typedef float v_f32 __attribute__((vector_size(4 * V_LANES)));
typedef int32_t v_i32 __attribute__((vector_size(4 * V_LANES)));
typedef uint32_t v_u32 __attribute__((vector_size(4 * V_LANES)));
typedef v_i32 v_mask;                   /* -1 or 0 in each lane */
typedef double v_f64 __attribute__((vector_size(8 * V_LANES)));
typedef int8_t v_s8 __attribute__((vector_size(V_LANES)));
typedef uint8_t v_u8 __attribute__((vector_size(V_LANES)));
typedef uint16_t v_u16 __attribute__((vector_size(2 * V_LANES)));
/* The same in memory, where any byte may begin one. */
typedef float v_f32_any __attribute__((vector_size(4 * V_LANES), aligned(1), may_alias));
typedef int32_t v_i32_any __attribute__((vector_size(4 * V_LANES), aligned(1), may_alias));
typedef uint8_t v_u8_any __attribute__((vector_size(V_LANES), aligned(1), may_alias));
typedef uint16_t v_u16_any __attribute__((vector_size(2 * V_LANES), aligned(1), may_alias));

#if V_LANES == 4
#define V_LIST(f) { f(0), f(1), f(2), f(3) }
#elif V_LANES == 8
#define V_LIST(f) { f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7) }
#elif V_LANES == 16
#define V_LIST(f) { f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15) }
#endif

#define V_SAME(i) x
VFN v_f32 v_set(float x) { return (v_f32)V_LIST(V_SAME); }
VFN v_i32 v_seti(int32_t x) { return (v_i32)V_LIST(V_SAME); }
#undef V_SAME
#define V_COUNT(i) i
VFN v_i32 v_iota(void) { return (v_i32)V_LIST(V_COUNT); }
#undef V_COUNT
VFN float v_lane(v_f32 x, int i) { return x[i]; }
VFN int32_t v_lanei(v_i32 x, int i) { return x[i]; }
VFN v_f32 v_load(const float *p) { return *(const v_f32_any *)p; }
VFN v_i32 v_loadi(const int32_t *p) { return *(const v_i32_any *)p; }
VFN void v_store(float *p, v_f32 x) { *(v_f32_any *)p = x; }
VFN void v_storei(int32_t *p, v_i32 x) { *(v_i32_any *)p = x; }
VFN v_f32 v_float(v_i32 x) { return __builtin_convertvector(x, v_f32); }
VFN v_i32 v_int(v_f32 x) { return __builtin_convertvector(x, v_i32); }
VFN v_u32 v_bits_of(v_f32 x) { return (v_u32)x; }
VFN v_f32 v_of_bits(v_u32 x) { return (v_f32)x; }
#define V_TRUTH(condition) ((v_i32)(condition))
#define V_CONVERT(x, type) __builtin_convertvector(x, type)

/* A vector of the numbered lanes of a and, counted on, of b: the numbers are constants. */
#if defined __clang__ || __GNUC__ >= 12
#define V_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define V_PICK(a, b, ...) __builtin_shuffle(a, b, (v_i32){ __VA_ARGS__ })
#endif

#ifndef V_WIDEN16
#define V_WIDEN8(x) __builtin_convertvector(x, v_u32)
#define V_WIDEN_S8(x) __builtin_convertvector((v_s8)(x), v_i32)
#define V_WIDEN8_16(x) __builtin_convertvector(x, v_u16)
#define V_WIDEN16(x) __builtin_convertvector(x, v_u32)
#endif
VFN v_u32 v_load_u8(const void *p) { return V_WIDEN8(*(const v_u8_any *)p); }
VFN v_i32 v_load_s8(const void *p) { return V_WIDEN_S8(*(const v_u8_any *)p); }
VFN v_u32 v_load_u16(const void *p) { return V_WIDEN16(*(const v_u16_any *)p); }
VFN v_u16 v_load_u8_u16(const void *p) { return V_WIDEN8_16(*(const v_u8_any *)p); }
#if V_LANES == 8 && !defined __clang__
VFN void v_store_u8(void *p, v_u32 x)   /* as a shuffle: gcc's conversion takes the lanes out one by one */
{
    typedef uint8_t bytes __attribute__((vector_size(32)));
    const bytes low = { 0, 4, 8, 12, 16, 20, 24, 28 };
    const bytes r = __builtin_shuffle((bytes)x, low);
    __builtin_memcpy(p, &r, 8);
}
#else
VFN void v_store_u8(void *p, v_u32 x) { *(v_u8_any *)p = __builtin_convertvector(x, v_u8); }
#endif
VFN void v_store_u16(void *p, v_u32 x) { *(v_u16_any *)p = __builtin_convertvector(x, v_u16); }

#ifdef V_MOVEMASK
VFN uint32_t v_movemask(v_mask m) { return V_MOVEMASK(m); }
#else
VFN uint32_t v_movemask(v_mask m)       /* lane i to bit i */
{
    uint32_t bits = 0;
    for (int i = 0; i < V_LANES; i++) bits |= ((uint32_t)m[i] & 1) << i;
    return bits;
}
#endif
#endif

/* 2 * V_LANES elements of bf16 from memory: those at even places and those at odd places, without a shuffle. */
VFN void v_split_bf16(const void *p, v_f32 *even, v_f32 *odd)
{
#if V_LANES == 1
    uint32_t u;
    __builtin_memcpy(&u, p, 4);
#else
    const v_u32 u = (v_u32)*(const v_i32_any *)p;
#endif
    *even = v_of_bits(u << 16);
    *odd = v_of_bits(u & 0xFFFF0000u);
}

typedef struct v_pair {
    v_f32 lo, hi;
} v_pair;

VFN v_pair v_pair_of(v_f32 lo, v_f32 hi) { return (v_pair){ lo, hi }; }

/* Where a hook is. Every member is a vector: no hook may assume which axis the lanes run along. */
struct v_at {
    v_i32 request;
    v_i32 row, batch_row;               /* in the request; in the batch */
    v_i32 head;                         /* q head; in FV_KEY and FV_VALUE the first of the kv head's group */
    v_i32 key, k_pos;                   /* index in the request; position */
    v_i32 q_pos;
    v_i32 num_rows, num_keys;           /* of the request */
    v_i32 num_q_heads;
    v_i32 index;                        /* pair (FV_QUERY, FV_KEY) or element (FV_VALUE, FV_OUTPUT) */
    bool consecutive;                   /* lanes run along keys and key, k_pos count up by one: a word may use it, a variant need not */
};

/* -------------------------------------------------------------------------------------------- numbers, conditions */

VFN v_f32 v_add(v_f32 a, v_f32 b) { return a + b; }
VFN v_f32 v_sub(v_f32 a, v_f32 b) { return a - b; }
VFN v_f32 v_mul(v_f32 a, v_f32 b) { return a * b; }
VFN v_f32 v_div(v_f32 a, v_f32 b) { return a / b; }
VFN v_f32 v_neg(v_f32 a) { return -a; }
VFN v_i32 v_iadd(v_i32 a, v_i32 b) { return a + b; }
VFN v_i32 v_isub(v_i32 a, v_i32 b) { return a - b; }
VFN v_i32 v_imul(v_i32 a, v_i32 b) { return a * b; }
VFN v_i32 v_iand(v_i32 a, v_i32 b) { return a & b; }
VFN v_i32 v_ior(v_i32 a, v_i32 b) { return a | b; }
VFN v_i32 v_ixor(v_i32 a, v_i32 b) { return a ^ b; }

VFN v_mask v_lt(v_f32 a, v_f32 b) { return V_TRUTH(a < b); }
VFN v_mask v_le(v_f32 a, v_f32 b) { return V_TRUTH(a <= b); }
VFN v_mask v_gt(v_f32 a, v_f32 b) { return V_TRUTH(a > b); }
VFN v_mask v_ge(v_f32 a, v_f32 b) { return V_TRUTH(a >= b); }
VFN v_mask v_eq(v_f32 a, v_f32 b) { return V_TRUTH(a == b); }
VFN v_mask v_ne(v_f32 a, v_f32 b) { return V_TRUTH(a != b); }
VFN v_mask v_ilt(v_i32 a, v_i32 b) { return V_TRUTH(a < b); }
VFN v_mask v_ile(v_i32 a, v_i32 b) { return V_TRUTH(a <= b); }
VFN v_mask v_igt(v_i32 a, v_i32 b) { return V_TRUTH(a > b); }
VFN v_mask v_ige(v_i32 a, v_i32 b) { return V_TRUTH(a >= b); }
VFN v_mask v_ieq(v_i32 a, v_i32 b) { return V_TRUTH(a == b); }
VFN v_mask v_ine(v_i32 a, v_i32 b) { return V_TRUTH(a != b); }
VFN v_mask v_and(v_mask a, v_mask b) { return a & b; }
VFN v_mask v_or(v_mask a, v_mask b) { return a | b; }
VFN v_mask v_not(v_mask a) { return ~a; }
VFN v_mask v_true(void) { return v_seti(-1); }
VFN v_mask v_false(void) { return v_seti(0); }
VFN v_i32 v_iselect(v_mask m, v_i32 a, v_i32 b) { return (m & a) | (~m & b); }
VFN v_u32 v_uselect(v_mask m, v_u32 a, v_u32 b) { return ((v_u32)m & a) | (~(v_u32)m & b); }
VFN v_f32 v_select(v_mask m, v_f32 a, v_f32 b) { return v_of_bits(v_uselect(m, v_bits_of(a), v_bits_of(b))); }
VFN v_f32 v_abs(v_f32 a) { return v_of_bits(v_bits_of(a) & 0x7FFFFFFF); }
VFN v_i32 v_imin(v_i32 a, v_i32 b) { return v_iselect(v_ilt(a, b), a, b); }
VFN v_i32 v_imax(v_i32 a, v_i32 b) { return v_iselect(v_ilt(a, b), b, a); }
VFN bool v_any(v_mask m) { return v_movemask(m) != 0; }

/* v_fma fuses where the machine can. v_max and v_min answer b when a or b is NaN, except on NEON: the NaN. */
#ifdef V_FMA
VFN v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) { return V_FMA(a, b, c); }
#else
VFN v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) { return a * b + c; }
#endif
#ifdef V_MAX
VFN v_f32 v_max(v_f32 a, v_f32 b) { return V_MAX(a, b); }
VFN v_f32 v_min(v_f32 a, v_f32 b) { return V_MIN(a, b); }
#else
VFN v_f32 v_max(v_f32 a, v_f32 b) { return v_select(v_gt(a, b), a, b); }
VFN v_f32 v_min(v_f32 a, v_f32 b) { return v_select(v_lt(a, b), a, b); }
#endif
#ifdef V_SQRT
VFN v_f32 v_sqrt(v_f32 a) { return V_SQRT(a); }
#else
VFN v_f32 v_sqrt(v_f32 a) { return __builtin_sqrtf(a); }
#endif

/* 2 * V_LANES elements of bf16 as they lie: pairs, one a lane. */
VFN v_i32 v_pairs_bf16(const void *p)
{
#if V_LANES == 1
    v_i32 r;
    __builtin_memcpy(&r, p, 4);
    return r;
#else
    return *(const v_i32_any *)p;
#endif
}

/* The same made of two vectors of floats, low elements and high ones, rounded to nearest even. No NaN. */
VFN v_i32 v_join_bf16(v_f32 low, v_f32 high)
{
#ifdef V_JOIN_BF16
    return V_JOIN_BF16(low, high);
#else
    const v_f32 both[2] = { low, high };
    uint16_t out[2 * V_LANES];
    for (int i = 0; i < 2 * V_LANES; i++) {
        const float x = v_lane(both[i / V_LANES], i % V_LANES);
        uint32_t u;
        __builtin_memcpy(&u, &x, 4);
        out[i] = (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
    }
    return v_pairs_bf16(out);
#endif
}

/* c + a's first times b's first + a's second times b's second in each lane, each sum rounded. V_DOT_BF16: one instruction, which takes subnormal
 * elements for zero. */
VFN v_f32 v_dot_bf16(v_i32 a, v_i32 b, v_f32 c)
{
#ifdef V_DOT_BF16
    return V_DOT_BF16(a, b, c);
#else
    const v_u32 x = (v_u32)a, y = (v_u32)b;
    c = v_fma(v_of_bits(x & 0xFFFF0000u), v_of_bits(y & 0xFFFF0000u), c);
    return v_fma(v_of_bits(x << 16), v_of_bits(y << 16), c);
#endif
}

/* c + the products of a's four bytes (0 to 127) and b's (signed) in each lane. V_DOT_BYTES: a few instructions. */
VFN v_i32 v_dot_bytes(v_i32 a, v_i32 b, v_i32 c)
{
#ifdef V_DOT_BYTES
    return V_DOT_BYTES(a, b, c);
#else
    c += (a & 255) * ((v_i32)((v_u32)b << 24) >> 24) + (a >> 8 & 255) * ((v_i32)((v_u32)b << 16) >> 24);
    return c + (a >> 16 & 255) * ((v_i32)((v_u32)b << 8) >> 24) + (a >> 24 & 255) * (b >> 24);
#endif
}

/* ----------------------------------------------------------------------------------------------- transcendentals
 * Polynomials are minimax over the reduced range (Remez, double precision), the rest is exact arithmetic on exponents. */

#define V_LOG2E 1.44269504088896341f
#define V_LN2   0.693147180559945309f

/* 2^f for f in [-1/2, 1/2]: relative error 2e-9 before rounding; 2^0 is exactly 1. */
VFN v_f32 v_exp2_core(v_f32 f)
{
    v_f32 p = v_set(0.000153458121587f);
    p = v_fma(p, f, v_set(0.00133999312095f));
    p = v_fma(p, f, v_set(0.00961848895652f));
    p = v_fma(p, f, v_set(0.05550328777f));
    p = v_fma(p, f, v_set(0.240226468906f));
    p = v_fma(p, f, v_set(0.693147205737f));
    return v_fma(p, f, v_set(1.0f));
}

/* 2^x for the kernels' x <= 0: below -126 it may be 0; -inf is 0, 0 is 1, NaN stays. Adding 1.5 * 2^23 + 127 leaves the biased exponent in the
 * low bits, so one shift makes the power of two. */
VFN v_f32 v_exp2_neg(v_f32 x)
{
    const v_f32 magic = v_set(12583039.0f);
    x = v_max(v_set(-127.0f), x);
    const v_f32 t = x + magic;
    const v_f32 f = x - (t - magic);
    return v_exp2_core(f) * v_of_bits(v_bits_of(t) << 23);
}

/* 2^x: overflow to infinity, gradual underflow. Two factors, as neither half of the exponent can leave the range. */
VFN v_f32 v_exp2(v_f32 x)
{
    const v_f32 magic = v_set(12582912.0f);
    x = v_max(v_set(-252.0f), v_min(v_set(252.0f), x));
    const v_f32 t = x + magic;
    const v_f32 f = x - (t - magic);
    const v_i32 n = (v_i32)v_bits_of(t) - v_seti(0x4B400000);
    const v_i32 half = n >> 1;
    const v_f32 one = v_of_bits((v_u32)(half + 127) << 23), two = v_of_bits((v_u32)(n - half + 127) << 23);
    return v_exp2_core(f) * one * two;
}

/* e^x: the product x * log2(e) in two parts, so that large x stay accurate. */
VFN v_f32 v_exp(v_f32 x)
{
    const v_f32 magic = v_set(12582912.0f);
    x = v_max(v_set(-170.0f), v_min(v_set(170.0f), x));
    const v_f32 t = v_fma(x, v_set(V_LOG2E), magic);
    const v_f32 whole = t - magic;
    v_f32 r = v_fma(whole, v_set(-0.693145751953125f), x);              /* ln 2, its upper 17 bits */
    r = v_fma(whole, v_set(-1.42860682030941723e-6f), r);
    const v_i32 n = (v_i32)v_bits_of(t) - v_seti(0x4B400000);
    const v_i32 half = n >> 1;
    const v_f32 one = v_of_bits((v_u32)(half + 127) << 23), two = v_of_bits((v_u32)(n - half + 127) << 23);
    return v_exp2_core(r * v_set(V_LOG2E)) * one * two;
}

/* Splits x = m * 2^n with m in [sqrt(1/2), sqrt(2)); returns ln(m). Subnormal x are scaled first. */
VFN v_f32 v_log_core(v_f32 x, v_f32 *n)
{
    const v_mask tiny = v_lt(x, v_set(1.17549435e-38f));
    x = v_select(tiny, x * v_set(16777216.0f), x);
    const v_u32 bits = v_bits_of(x) - 0x3F3504F3;
    const v_i32 exponent = (v_i32)bits >> 23;
    const v_f32 t = v_of_bits((bits & 0x7FFFFF) + 0x3F3504F3) - v_set(1.0f);
    *n = v_float(exponent) - v_select(tiny, v_set(24.0f), v_set(0.0f));
    v_f32 p = v_set(0.0872235672788f);
    p = v_fma(p, t, v_set(-0.143668429354f));
    p = v_fma(p, t, v_set(0.149522661585f));
    p = v_fma(p, t, v_set(-0.165623930674f));
    p = v_fma(p, t, v_set(0.199568336108f));
    p = v_fma(p, t, v_set(-0.250020740718f));
    p = v_fma(p, t, v_set(0.33334185624f));
    p = v_fma(p, t, v_set(-0.499999879641f));
    return v_fma(p * t, t, t);
}

/* What a logarithm is of x that are no positive finite number. */
VFN v_f32 v_log_ends(v_f32 x, v_f32 r)
{
    r = v_select(v_eq(x, v_set(0.0f)), v_set(-__builtin_inff()), r);
    r = v_select(v_eq(x, v_set(__builtin_inff())), x, r);
    return v_select(v_ge(x, v_set(0.0f)), r, v_set(__builtin_nanf("")));
}

VFN v_f32 v_log(v_f32 x)
{
    v_f32 n;
    const v_f32 r = v_log_core(x, &n);
    return v_log_ends(x, v_fma(n, v_set(0.693145751953125f), v_fma(n, v_set(1.42860682030941723e-6f), r)));
}

VFN v_f32 v_log2(v_f32 x)
{
    v_f32 n;
    const v_f32 r = v_log_core(x, &n);
    return v_log_ends(x, v_fma(r, v_set(V_LOG2E), n));
}

/* e / (e + 2) with e = e^2|x| - 1, which loses nothing where x is small: |x| = n ln 2 / 2 + r, e = 2^n (e^2r - 1) + 2^n - 1. From 10 on it is 1. */
VFN v_f32 v_tanh_far(v_f32 x)
{
    const v_f32 magic = v_set(12583039.0f), y = v_min(v_set(10.0f), v_abs(x));     /* as in v_exp2_neg */
    const v_f32 t = v_fma(y, v_set(2.88539008177792681f), magic);
    const v_f32 r = v_fma(magic - t, v_set(0.346573590279972655f), y);
    const v_f32 power = v_of_bits(v_bits_of(t) << 23);
    v_f32 p = v_set(0.088848027892f);
    p = v_fma(p, r, v_set(0.267728688611f));
    p = v_fma(p, r, v_set(0.666675201739f));
    p = v_fma(p, r, v_set(1.33332348889f));
    p = v_fma(p, r, v_set(1.99999992613f));
    p = v_fma(p, r * r, r + r);
    const v_f32 e = v_fma(power, p, power - v_set(1.0f)), z = e / (e + v_set(2.0f));
    return v_of_bits(v_bits_of(z) | (v_bits_of(x) & 0x80000000u));
}

/* A polynomial where |x| < 1/2, alone where that is so in all lanes: scores far below a cap are what models have. What a lane gives depends on it
 * alone. */
VFN v_f32 v_tanh(v_f32 x)
{
    const v_f32 z = x * x;
    v_f32 p = v_set(0.0172414920355f);
    p = v_fma(p, z, v_set(-0.0530454945345f));
    p = v_fma(p, z, v_set(0.133258789614f));
    p = v_fma(p, z, v_set(-0.333331438964f));
    const v_f32 near = v_fma(p * z, x, x);
    const v_mask far = v_not(v_lt(z, v_set(0.25f)));
    if (__builtin_expect(!v_any(far), 1)) return near;
    return v_select(far, v_tanh_far(x), near);
}

/* Sine and cosine of n * x, |n * x| < 2^31. The product and the quarter turns that are taken off are in double; what is left needs 24 bits.
 * pi/2 is in two parts; the first has 33 bits, so that its product with up to 2^20 quarters is exact (beyond: 2^-22 at worst). */
VFN void v_sincos(v_i32 n, v_f32 x, v_f32 *s, v_f32 *c)
{
    const double magic = 6755399441055744.0;                            /* 1.5 * 2^52 */
    const v_f64 angle = V_CONVERT(n, v_f64) * V_CONVERT(x, v_f64);
    const v_f64 quarters = (angle * 0.63661977236758134308 + magic) - magic;
    const v_f64 rest = (angle - quarters * 1.5707963267341256142) - quarters * 6.0771005065061922e-11;
    const v_f32 r = V_CONVERT(rest, v_f32), z = r * r;
    const v_u32 q = (v_u32)V_CONVERT(quarters, v_i32);
    v_f32 ps = v_fma(v_set(-0.000195040220144f), z, v_set(0.0083320368753f));
    ps = v_fma(ps, z, v_set(-0.166666506992f));
    ps = v_fma(ps * z, r, r);
    v_f32 pc = v_fma(v_set(2.43799293709e-5f), z, v_set(-0.00138866192102f));
    pc = v_fma(pc, z, v_set(0.0416666167392f));
    pc = v_fma(pc * z, z, v_fma(z, v_set(-0.5f), v_set(1.0f)));
    const v_mask odd = V_TRUTH((q & 1) != 0);
    *s = v_of_bits(v_bits_of(v_select(odd, pc, ps)) ^ (q & 2) << 30);
    *c = v_of_bits(v_bits_of(v_select(odd, ps, pc)) ^ ((q + 1) & 2) << 30);
}

VFN v_f32 v_sin(v_f32 x)
{
    v_f32 s, c;
    v_sincos(v_seti(1), x, &s, &c);
    return s;
}

VFN v_f32 v_cos(v_f32 x)
{
    v_f32 s, c;
    v_sincos(v_seti(1), x, &s, &c);
    return c;
}

VFN v_pair v_rotate(v_pair x, v_i32 position, v_f32 frequency)
{
    v_f32 s, c;
    v_sincos(position, frequency, &s, &c);
    return (v_pair){ x.lo * c - x.hi * s, v_fma(x.hi, c, x.lo * s) };
}

/* -------------------------------------------------------------------------------------------------------- arguments
 * The structs are those of variant.h, the same bytes on host and device; a text compiled alone gets them from here. */
#ifndef FV__VARIANT_H
typedef struct fv_floats { const float *data; int64_t count; } fv_floats;
typedef struct fv_ints { const int32_t *data; int64_t count; } fv_ints;
typedef struct fv_bits { const uint8_t *bits; const int64_t *offsets; } fv_bits;
typedef struct fv_ranges { const int32_t *ranges; const int32_t *indptr; int64_t count; int64_t reserved; } fv_ranges;
typedef struct fv_sums { float *data; int64_t stride; } fv_sums;
typedef struct fv_maxes { float *data; int64_t stride; } fv_maxes;
#endif

VFN int64_t v_clamp_index(int64_t i, int64_t count) { return i < 0 ? 0 : i < count ? i : count - 1; }

/* A list of lanes, not a loop through memory: lanes of one value, which is what most are, become one load. */
#if V_LANES == 1
#define V_READ(type) x.data[v_clamp_index(index, x.count)]
#else
#define V_READ_LANE(i) x.data[v_clamp_index(index[i], x.count)]
#define V_READ(type) (type)V_LIST(V_READ_LANE)
#endif
VFN v_f32 v_read(fv_floats x, v_i32 index)
{
    if (!x.data || x.count <= 0) return v_set(0.0f);
    return V_READ(v_f32);
}

VFN v_i32 v_readi(fv_ints x, v_i32 index)
{
    if (!x.data || x.count <= 0) return v_seti(0);
    return V_READ(v_i32);
}

VFN uint32_t v_bit_at(fv_bits m, int64_t bit) { return (uint32_t)m.bits[bit >> 3] >> (bit & 7) & 1; }

/* Lane i: bit i of the word. */
VFN v_mask v_expand(uint32_t word)
{
#if V_LANES == 1
    return -(v_i32)(word & 1);
#else
    return V_TRUTH((v_seti((int32_t)word) & (v_seti(1) << v_iota())) != 0);
#endif
}

/* The bits of V_LANES keys that follow one another, all of the request: only bytes that hold one of them are read. */
VFN v_mask v_bit_run(fv_bits m, int64_t first)
{
    const uint8_t *p = m.bits + (first >> 3);
    const int bytes = (int)((first & 7) + V_LANES + 7) / 8;
    uint32_t word = 0;
    V_UNROLL
    for (int i = 0; i < (V_LANES + 14) / 8; i++) word |= i < bytes ? (uint32_t)p[i] << 8 * i : 0;
    return v_expand(word >> (first & 7));
}

VFN v_mask v_bit(fv_bits m, struct v_at at)
{
    int32_t out[V_LANES];
    const int64_t n = v_lanei(at.num_keys, 0), k = v_lanei(at.key, 0);
    if (at.consecutive && k >= 0 && k + V_LANES <= n)
        return v_bit_run(m, m.offsets[v_lanei(at.request, 0)] + v_lanei(at.row, 0) * n + k);
    for (int i = 0; i < V_LANES; i++) {
        const int64_t keys = v_lanei(at.num_keys, i), key = v_lanei(at.key, i);
        const int64_t first = m.offsets[v_lanei(at.request, i)] + v_lanei(at.row, i) * keys;
        out[i] = key >= 0 && key < keys ? -(int32_t)v_bit_at(m, first + key) : 0;
    }
    return v_loadi(out);
}

/* The ranges of the request (of lane 0: on a CPU all lanes are of one request). */
VFN const int32_t *v_range_list(fv_ranges x, v_i32 request, int64_t *n)
{
    const int64_t r = v_lanei(request, 0);
    const int64_t lo = x.indptr ? x.indptr[r] : 0, hi = x.indptr ? x.indptr[r + 1] : x.count;
    *n = x.ranges ? hi - lo : 0;
    return x.ranges + 2 * lo;
}

VFN v_mask v_within(v_i32 x, int32_t lo, int32_t hi) { return v_and(v_ige(x, v_seti(lo)), v_ilt(x, v_seti(hi))); }

VFN v_mask v_in_range(fv_ranges list, struct v_at at, v_i32 x)
{
    int64_t n;
    const int32_t *r = v_range_list(list, at.request, &n);
    v_mask in = v_false();
    for (int64_t i = 0; i < n; i++) in |= v_within(x, r[2 * i], r[2 * i + 1]);
    return in;
}

VFN v_mask v_share_range(fv_ranges list, struct v_at at, v_i32 x, v_i32 y)
{
    int64_t n;
    const int32_t *r = v_range_list(list, at.request, &n);
    v_mask in = v_false();
    for (int64_t i = 0; i < n; i++) in |= v_within(x, r[2 * i], r[2 * i + 1]) & v_within(y, r[2 * i], r[2 * i + 1]);
    return in;
}

VFN v_mask v_before_ranges(fv_ranges list, struct v_at at, v_i32 x)
{
    int64_t n;
    const int32_t *r = v_range_list(list, at.request, &n);
    return n > 0 ? v_ilt(x, v_seti(r[0])) : v_true();
}

/* Rows are the request's last keys. Follows parents at most num_rows times, so that a list that runs in a circle ends. */
VFN v_mask v_is_ancestor(fv_ints parents, struct v_at at)
{
    const int32_t rows = v_lanei(at.num_rows, 0), row = v_lanei(at.row, 0);
    const int64_t first = (int64_t)v_lanei(at.batch_row, 0) - row;
    const v_i32 node = at.key - (at.num_keys - at.num_rows);
    v_mask seen = v_ilt(node, v_seti(0));
    int32_t r = row;
    for (int32_t steps = 0; steps < rows && r >= 0 && r < rows; steps++) {
        seen |= v_ieq(node, v_seti(r));
        if (first + r >= parents.count) break;
        r = parents.data[first + r];
    }
    return seen;
}

#endif
