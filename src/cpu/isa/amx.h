/* SPDX-License-Identifier: Apache-2.0 */
/* amx.h -- AVX-512 beside matrix tiles that multiply pairs of bf16 (AMX-BF16: Sapphire Rapids and later).
 * arch: x86_64|AMD64
 * cflags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mavx2 -mfma -mf16c -mtune=skylake-avx512 -mprefer-vector-width=512
 *
 * Everything but the products of many rows (attend_tiles.h) is AVX-512's. With V_EMULATE_TILES (CMake: FV_EMULATE_TILES) vectors of 16 and tiles are
 * plain C, so that the level's logic is tested on machines that lack it. */
#ifndef V_TILES
#define V_TILES         1               /* the level has tile_* words, attend_tiles.h */
#ifdef V_EMULATE_TILES
#define V_LANES         16
#define V_QK_VECS       4
#define V_QK_KEYS       4
#define V_PV_ROWS       4
#define V_PV_VECS       4
#define V_FEW_ACCS      16
#define V_SQRT(a)       v_emulated_sqrt(a)
#define V_ISA_RANK      10              /* below all but scalar: only for those who ask */
#define V_ISA_NEEDS     (FV__CPU_HAS_AVX2 | FV__CPU_HAS_FMA | FV__CPU_HAS_F16C)
typedef float v_emulated __attribute__((vector_size(64)));
static inline __attribute__((always_inline, unused)) v_emulated v_emulated_sqrt(v_emulated x)
{
    for (int i = 0; i < 16; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}
#else
#include "avx512bf16.h"
#undef V_ISA_RANK
#undef V_ISA_NEEDS
/* attend_tiles.h: x - floor(x); x 2^floor(y); is a lane of a above that of b, or no number? 4: the rounding mode of the machine. */
#ifdef __clang__
#define V_FRACTION(x)   __builtin_ia32_reduceps512_mask(x, 9, (v_f32){ 0 }, (unsigned short)-1, 4)
#else
#define V_FRACTION(x)   __builtin_ia32_reduceps512_mask(x, 9, (v_f32){ 0 }, (unsigned short)-1)
#endif
#define V_SCALE(x, y)   __builtin_ia32_scalefps512_mask(x, y, (v_f32){ 0 }, (unsigned short)-1, 4)
#define V_ANY_ABOVE(a, b) (__builtin_ia32_cmpps512_mask(a, b, 0x16, (unsigned short)-1, 4) != 0)
#define V_ISA_RANK      80
#define V_ISA_NEEDS     (FV__CPU_HAS_AVX2 | FV__CPU_HAS_FMA | FV__CPU_HAS_F16C | FV__CPU_HAS_AVX512 | FV__CPU_HAS_AVX512BF16 | \
                         FV__CPU_HAS_AMX_BF16)
#endif
#endif
