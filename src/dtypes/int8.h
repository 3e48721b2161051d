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

#ifdef FV_DTYPE_CPU
VFN v_f32 v_load_int8(const void *base, int64_t i) { return v_float(v_load_s8((const char *)base + i)); }

VFN void v_store_int8(void *base, int64_t i, v_f32 x)
{
    const v_f32 magic = v_set(12582912.0f);                             /* 1.5 * 2^23: leaves whole numbers, nearest even */
    const v_f32 y = v_min(v_max(x, v_set(-128.0f)), v_set(127.0f)) + magic;
    v_store_u8((char *)base + i, v_uselect(v_ne(x, x), (v_u32)v_seti(0), v_bits_of(y) & 0xFF));
}
#endif
