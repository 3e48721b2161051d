/* SPDX-License-Identifier: Apache-2.0 */
/* avx512bf16.h -- AVX-512 beside dot products of pairs of bf16, of 16-bit integers and of four bytes (AVX512_BF16, AVX512_VNNI: Cooper Lake, Zen 4
 * and later).
 * arch: x86_64|AMD64
 * cflags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mavx2 -mfma -mf16c -mtune=skylake-avx512 -mprefer-vector-width=512
 */
#ifndef V_DOT_BF16
#include "avx512.h"
#undef V_ISA_RANK
#undef V_ISA_NEEDS
#define V_ISA_RANK      70
#define V_ISA_NEEDS     (FV__CPU_HAS_AVX2 | FV__CPU_HAS_FMA | FV__CPU_HAS_F16C | FV__CPU_HAS_AVX512 | FV__CPU_HAS_AVX512BF16)

/* Compilers disagree on the builtins' names, and newer ones want vectors of __bf16. */
#if defined __clang__ ? __clang_major__ >= 16 : __GNUC__ >= 13
typedef __bf16 v_avx512_bf16 __attribute__((vector_size(64)));
#elif defined __clang__
typedef int v_avx512_bf16 __attribute__((vector_size(64)));
#else
typedef short v_avx512_bf16 __attribute__((vector_size(64)));
#endif
typedef char v_avx512_s8 __attribute__((vector_size(32)));
typedef short v_avx512_s16 __attribute__((vector_size(64)));
/* V_DOT_BYTES: as in avx512.h. V_WIDEN_S8_16: 32 bytes with signs to words. V_DOT_S16: c + the products of two words in each lane, in integers. */
#undef V_DOT_BYTES
#ifdef __clang__
#define V_DOT_BYTES(a, b, c) ((v_i32)__builtin_ia32_vpdpbusd512(c, a, b))
#define V_DOT_BF16(a, b, c)     __builtin_ia32_dpbf16ps_512(c, (v_avx512_bf16)(a), (v_avx512_bf16)(b))
#define V_JOIN_BF16(low, high)  ((v_i32)__builtin_ia32_cvtne2ps2bf16_512(high, low))
#define V_WIDEN_S8_16(x)        ((v_i32)__builtin_convertvector((v_avx512_s8)(x), v_avx512_s16))
#define V_DOT_S16(a, b, c)      ((v_i32)__builtin_ia32_vpdpwssd512(c, a, b))
#else
#define V_DOT_BYTES(a, b, c) ((v_i32)__builtin_ia32_vpdpbusd_v16si(c, a, b))
#define V_DOT_BF16(a, b, c)     __builtin_ia32_dpbf16ps_v16sf(c, (v_avx512_bf16)(a), (v_avx512_bf16)(b))
#if __GNUC__ >= 13
#define V_JOIN_BF16(low, high)  ((v_i32)__builtin_ia32_cvtne2ps2bf16_v32bf(high, low))
#else
#define V_JOIN_BF16(low, high)  ((v_i32)__builtin_ia32_cvtne2ps2bf16_v32hi(high, low))
#endif
#define V_WIDEN_S8_16(x)        ((v_i32)__builtin_ia32_pmovsxbw512_mask((v_avx512_s8)(x), (v_avx512_s16){ 0 }, (unsigned)-1))
#define V_DOT_S16(a, b, c)      ((v_i32)__builtin_ia32_vpdpwssd_v16si(c, a, b))
#endif
#endif
