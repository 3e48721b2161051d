/* SPDX-License-Identifier: Apache-2.0 */
/* avx2.h -- 8 floats: AVX2, FMA, F16C (x86-64-v3).
 * arch: x86_64|AMD64
 * cflags: -mavx2 -mfma -mf16c -mtune=haswell
 */
#ifndef V_LANES
#define V_LANES         8
#define V_ISA_RANK      40
#define V_ISA_NEEDS     (FV__CPU_HAS_AVX2 | FV__CPU_HAS_FMA | FV__CPU_HAS_F16C)

#define V_QK_VECS       2
#define V_QK_KEYS       4
#define V_PV_ROWS       4
#define V_PV_VECS       2
#define V_FEW_ACCS      8

/* Neighbours' products fit into 16 bits: 2 * 127 * 128. */
#define V_DOT_BYTES(a, b, c) \
    ((c) + (v_i32)__builtin_ia32_pmaddwd256(__builtin_ia32_pmaddubsw256((v_b32)(a), (v_b32)(b)), (v_s16)((v_i32){ 0 } + 0x10001)))
typedef char v_b32 __attribute__((vector_size(32)));
typedef short v_s16 __attribute__((vector_size(32)));

/* Builtins, not <immintrin.h>: a user's variant includes this file and must compile in an instant. */
#define V_FMA(a, b, c)  __builtin_ia32_vfmaddps256(a, b, c)
#define V_MAX(a, b)     __builtin_ia32_maxps256(a, b)
#define V_MIN(a, b)     __builtin_ia32_minps256(a, b)
#define V_SQRT(a)       __builtin_ia32_sqrtps256(a)
#define V_MOVEMASK(m)   ((uint32_t)__builtin_ia32_movmskps256((v_f32)(m)))
#define V_FROM_F16(h)   __builtin_ia32_vcvtph2ps256((v_i16h)(h))
#define V_TO_F16(x)     ((v_u16)__builtin_ia32_vcvtps2ph256(x, 0))
#ifndef __clang__       /* gcc 12 makes four instructions of a widening __builtin_convertvector */
#if __GNUC__ >= 12
#define V_LOW8(x)       ((v_i8q)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1))
#else
#define V_LOW8(x)       ((v_i8q)(v_i64h){ (long long)(x), 0 })
typedef long long v_i64h __attribute__((vector_size(16)));
#endif
#define V_WIDEN8(x)     ((v_u32)__builtin_ia32_pmovzxbd256(V_LOW8(x)))
#define V_WIDEN_S8(x)   ((v_i32)__builtin_ia32_pmovsxbd256(V_LOW8(x)))
#define V_WIDEN8_16(x)  ((v_u16)__builtin_ia32_pmovzxbw128(V_LOW8(x)))
#define V_WIDEN16(x)    ((v_u32)__builtin_ia32_pmovzxwd256((v_i16h)(x)))
#endif
typedef short v_i16h __attribute__((vector_size(16)));
typedef char v_i8q __attribute__((vector_size(16)));
#endif
