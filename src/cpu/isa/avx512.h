/* SPDX-License-Identifier: Apache-2.0 */
/* avx512.h -- 16 floats: AVX-512 F, BW, DQ, VL (x86-64-v4).
 * arch: x86_64|AMD64
 * cflags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mtune=skylake-avx512 -mprefer-vector-width=512
 */
#ifndef V_LANES
#define V_LANES         16
#define V_ISA_RANK      60
#define V_ISA_NEEDS     (FV__CPU_HAS_AVX2 | FV__CPU_HAS_FMA | FV__CPU_HAS_F16C | FV__CPU_HAS_AVX512)

#define V_QK_VECS       4
#define V_QK_KEYS       4
#define V_PV_ROWS       4
#define V_PV_VECS       4
#define V_FEW_ACCS      16

/* Neighbours' products fit into 16 bits: 2 * 127 * 128. */
#ifdef __clang__
#define V_DOT_BYTES(a, b, c) \
    ((c) + (v_i32)__builtin_ia32_pmaddwd512(__builtin_ia32_pmaddubsw512((v_b64)(a), (v_b64)(b)), (v_s32)((v_i32){ 0 } + 0x10001)))
#else
#define V_PRODUCTS(a, b) __builtin_ia32_pmaddubsw512_mask((v_b64)(a), (v_b64)(b), (v_s32){ 0 }, ~0u)
#define V_DOT_BYTES(a, b, c) \
    ((c) + (v_i32)__builtin_ia32_pmaddwd512_mask(V_PRODUCTS(a, b), (v_s32)((v_i32){ 0 } + 0x10001), (v_i32){ 0 }, (unsigned short)-1))
#endif
typedef char v_b64 __attribute__((vector_size(64)));
typedef short v_s32 __attribute__((vector_size(64)));

/* Builtins, not <immintrin.h>: a user's variant includes this file and must compile in an instant. gcc and clang name them
 * differently; 4: the rounding mode of the machine. */
#ifdef __clang__
#define V_MAX(a, b)     __builtin_ia32_maxps512(a, b, 4)
#define V_MIN(a, b)     __builtin_ia32_minps512(a, b, 4)
#define V_SQRT(a)       __builtin_ia32_sqrtps512(a, 4)
#else
#define V_MAX(a, b)     __builtin_ia32_maxps512_mask(a, b, (v_f32){ 0 }, (unsigned short)-1, 4)
#define V_MIN(a, b)     __builtin_ia32_minps512_mask(a, b, (v_f32){ 0 }, (unsigned short)-1, 4)
#define V_SQRT(a)       __builtin_ia32_sqrtps512_mask(a, (v_f32){ 0 }, (unsigned short)-1, 4)
/* gcc 12 makes five instructions of a widening __builtin_convertvector */
#define V_WIDEN8(x)     ((v_u32)__builtin_ia32_pmovzxbd512_mask((v_i8q)(x), (v_i32){ 0 }, (unsigned short)-1))
#define V_WIDEN_S8(x)   ((v_i32)__builtin_ia32_pmovsxbd512_mask((v_i8q)(x), (v_i32){ 0 }, (unsigned short)-1))
#define V_WIDEN8_16(x)  ((v_u16)__builtin_ia32_pmovzxbw256((v_i8q)(x)))
#define V_WIDEN16(x)    ((v_u32)__builtin_ia32_pmovzxwd512_mask((v_i16h)(x), (v_i32){ 0 }, (unsigned short)-1))
#endif
#define V_FMA(a, b, c)  __builtin_ia32_vfmaddps512_mask(a, b, c, (unsigned short)-1, 4)
#define V_MOVEMASK(m)   ((uint32_t)(unsigned short)__builtin_ia32_cvtd2mask512(m))
#define V_FROM_F16(h)   __builtin_ia32_vcvtph2ps512_mask((v_i16h)(h), (v_f32){ 0 }, (unsigned short)-1, 4)
#define V_TO_F16(x)     ((v_u16)__builtin_ia32_vcvtps2ph512_mask(x, 0, (v_i16h){ 0 }, (unsigned short)-1))
typedef short v_i16h __attribute__((vector_size(32)));
typedef char v_i8q __attribute__((vector_size(16)));
#endif
