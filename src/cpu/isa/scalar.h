/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.h -- the level that every machine has: one float at a time, plain C. The others are compared with it.
 * arch: any
 * cflags:
 */
#ifndef V_LANES
#define V_LANES         1
#define V_ISA_RANK      0
#define V_ISA_NEEDS     0               /* FV__CPU_HAS_* bits, cpu.h */

/* Shapes of the register tiles of attend_*.h: accumulators must fit the register file. */
#define V_QK_VECS       4               /* vectors of packed rows ... */
#define V_QK_KEYS       4               /* ... x keys */
#define V_PV_ROWS       4               /* packed rows ... */
#define V_PV_VECS       4               /* ... x vectors of dim_v */
#define V_FEW_ACCS      8               /* accumulators of the path for few rows */
#endif
