/* SPDX-License-Identifier: Apache-2.0 */
/* attend_turn.h -- a square of numbers, V_LANES vectors of V_LANES lanes, turned over its diagonal in registers.
 *
 * Part of attend_tmpl.c. */

#if V_LANES == 16
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#elif V_LANES == 8
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15
#define LOW_2 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_1 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH_1 1, 9, 3, 11, 5, 13, 7, 15
#elif V_LANES == 4
#define LOW_2 0, 1, 4, 5
#define HIGH_2 2, 3, 6, 7
#define LOW_1 0, 4, 2, 6
#define HIGH_1 1, 5, 3, 7
#endif
#define TURN_STEP(h)                                                                                                                   \
    V_UNROLL                                                                                                                           \
    for (int i = 0; i < V_LANES / 2; i++) {                                                                                            \
        const int at = i / h * 2 * h + i % h;                                                                                          \
        const v_i32 a = x[at], b = x[at + h];                                                                                          \
        x[at] = V_PICK(a, b, LOW_##h);                                                                                                 \
        x[at + h] = V_PICK(a, b, HIGH_##h);                                                                                            \
    }

/* x[i] lane j becomes x[j] lane i. */
VFN void turn(v_i32 *x)
{
    (void)x;
#if V_LANES >= 16
    TURN_STEP(8)
#endif
#if V_LANES >= 8
    TURN_STEP(4)
#endif
#if V_LANES >= 4
    TURN_STEP(2)
    TURN_STEP(1)
#endif
}

/* A square of floats at `from`, rows `from_step` floats apart, to `to`: to[i * to_step + j] = from[j * from_step + i]. */
VFN void turn_square(const float *from, int64_t from_step, float *to, int64_t to_step)
{
    v_i32 x[V_LANES];
    V_UNROLL
    for (int i = 0; i < V_LANES; i++) x[i] = (v_i32)v_bits_of(v_load(from + i * from_step));
    turn(x);
    V_UNROLL
    for (int i = 0; i < V_LANES; i++) v_store(to + i * to_step, v_of_bits((v_u32)x[i]));
}
