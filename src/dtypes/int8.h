/* SPDX-License-Identifier: Apache-2.0 */
/* int8.h -- two's complement, -128 to 127. Rounds to nearest even, saturates, NaN becomes 0. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(int8, 8, 127.0, false, false)
#endif

#ifdef FV_DTYPE_SPEC
static double int8_decode(uint32_t code)
{
    return (double)(code & 0x7F) - (double)(code & 0x80);
}

static uint32_t int8_encode(double x)
{
    if (!(x >= -128)) return x < -128 ? 0x80 : 0;       /* the second: NaN */
    if (x >= 127) return 0x7F;
    int whole = (int)x;                                 /* towards zero */
    const double rest = x < whole ? whole - x : x - whole;
    if (rest > 0.5 || (rest == 0.5 && (whole & 1))) whole += x < 0 ? -1 : 1;
    return (uint32_t)whole & 0xFF;
}
#endif
