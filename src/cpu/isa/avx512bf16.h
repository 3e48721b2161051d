/* SPDX-License-Identifier: Apache-2.0 */
/* avx512bf16.h -- AVX-512 beside dot products of pairs of bf16 (AVX512_BF16: Cooper Lake, Zen 4 and later).
 * arch: x86_64|AMD64
 * cflags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx2 -mfma -mf16c -mtune=skylake-avx512 -mprefer-vector-width=512
 */
#ifndef V_DOT_BF16
#include "avx512.h"
#undef V_ISA_RANK
#undef V_ISA_NEEDS
#define V_ISA_RANK      70
#define V_ISA_NEEDS     (FV__CPU_HAS_AVX2 | FV__CPU_HAS_FMA | FV__CPU_HAS_F16C | FV__CPU_HAS_AVX512 | FV__CPU_HAS_AVX512BF16)

/* An instruction by name: compilers disagree on the builtin's types. */
#define V_DOT_BF16(a, b, c) v_avx512_dot(a, b, c)
typedef int v_avx512_pairs __attribute__((vector_size(64)));
typedef float v_avx512 __attribute__((vector_size(64)));
static inline __attribute__((always_inline, unused)) v_avx512 v_avx512_dot(v_avx512_pairs a, v_avx512_pairs b, v_avx512 c)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "vm"(b));
    return c;
}
#endif
