/* SPDX-License-Identifier: Apache-2.0 */
/* attend_turn.h -- a square of numbers, V_LANES vectors of V_LANES lanes, turned over its diagonal in registers.
 *
 * First within 16 bytes, four rows at a time: shuffles that need no indices from memory or registers. Then blocks of 16 bytes change places.
 *
 * Part of attend_tmpl.c. */

#if V_LANES > 1
enum { TURN_PARTS = V_LANES / 4 };      /* blocks of 16 bytes in a vector */

#if V_LANES == 16
#define TURN_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define TURN_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define TURN_FIRST 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define TURN_SECOND 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif V_LANES == 8
#define TURN_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define TURN_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define TURN_FIRST 0, 1, 8, 9, 4, 5, 12, 13
#define TURN_SECOND 2, 3, 10, 11, 6, 7, 14, 15
#else
#define TURN_LOW 0, 4, 1, 5
#define TURN_HIGH 2, 6, 3, 7
#define TURN_FIRST 0, 1, 4, 5
#define TURN_SECOND 2, 3, 6, 7
#endif

/* Block j of out[i] is block i of x[j * step]. */
VFN void turn_blocks(const v_i32 *x, int step, v_i32 *out)
{
#if V_LANES == 16
#define EVEN_BLOCKS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_BLOCKS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
    const v_i32 even = V_PICK(x[0], x[step], EVEN_BLOCKS), odd = V_PICK(x[0], x[step], ODD_BLOCKS);
    const v_i32 even2 = V_PICK(x[2 * step], x[3 * step], EVEN_BLOCKS), odd2 = V_PICK(x[2 * step], x[3 * step], ODD_BLOCKS);
    out[0] = V_PICK(even, even2, EVEN_BLOCKS);
    out[1] = V_PICK(odd, odd2, EVEN_BLOCKS);
    out[2] = V_PICK(even, even2, ODD_BLOCKS);
    out[3] = V_PICK(odd, odd2, ODD_BLOCKS);
#elif V_LANES == 8
    const v_i32 a = x[0], b = x[step];
    out[0] = V_PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    out[1] = V_PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#else
    (void)step;
    out[0] = x[0];
#endif
}
#endif

/* x[i] lane j becomes x[j] lane i. */
VFN void turn(v_i32 *x)
{
#if V_LANES == 1
    (void)x;
#else
    v_i32 y[V_LANES];                   /* y[4 m + c]: columns c, c + 4, .. of rows 4 m to 4 m + 3, 16 bytes each */
    V_UNROLL
    for (int m = 0; m < V_LANES; m += 4) {
        const v_i32 a = V_PICK(x[m], x[m + 1], TURN_LOW), b = V_PICK(x[m], x[m + 1], TURN_HIGH);
        const v_i32 c = V_PICK(x[m + 2], x[m + 3], TURN_LOW), d = V_PICK(x[m + 2], x[m + 3], TURN_HIGH);
        y[m] = V_PICK(a, c, TURN_FIRST);
        y[m + 1] = V_PICK(a, c, TURN_SECOND);
        y[m + 2] = V_PICK(b, d, TURN_FIRST);
        y[m + 3] = V_PICK(b, d, TURN_SECOND);
    }
    V_UNROLL
    for (int c = 0; c < 4; c++) {
        v_i32 z[TURN_PARTS];
        turn_blocks(y + c, 4, z);
        V_UNROLL
        for (int part = 0; part < TURN_PARTS; part++) x[4 * part + c] = z[part];
    }
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
