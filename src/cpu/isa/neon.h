/* SPDX-License-Identifier: Apache-2.0 */
/* neon.h -- 4 floats: Advanced SIMD, which every 64-bit ARM has.
 * arch: aarch64|arm64
 * cflags:
 */
#ifndef V_LANES
#define V_LANES         4
#define V_ISA_RANK      40
#define V_ISA_NEEDS     0

#define V_QK_VECS       4
#define V_QK_KEYS       4
#define V_PV_ROWS       4
#define V_PV_VECS       4
#define V_FEW_ACCS      16

/* One instruction each, in words that gcc and clang share; <arm_neon.h> takes longer to read than a variant to compile. */
#define V_FMA(a, b, c)  v_neon_fma(a, b, c)
#define V_MAX(a, b)     v_neon_max(a, b)
#define V_MIN(a, b)     v_neon_min(a, b)
#define V_SQRT(a)       v_neon_sqrt(a)
typedef float v_neon __attribute__((vector_size(16)));
static inline __attribute__((always_inline)) v_neon v_neon_fma(v_neon a, v_neon b, v_neon c)
{
    __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
static inline __attribute__((always_inline)) v_neon v_neon_max(v_neon a, v_neon b)
{
    v_neon r;
    __asm__("fmax %0.4s, %1.4s, %2.4s" : "=w"(r) : "w"(a), "w"(b));
    return r;
}
static inline __attribute__((always_inline)) v_neon v_neon_min(v_neon a, v_neon b)
{
    v_neon r;
    __asm__("fmin %0.4s, %1.4s, %2.4s" : "=w"(r) : "w"(a), "w"(b));
    return r;
}
static inline __attribute__((always_inline)) v_neon v_neon_sqrt(v_neon a)
{
    v_neon r;
    __asm__("fsqrt %0.4s, %1.4s" : "=w"(r) : "w"(a));
    return r;
}
#endif
