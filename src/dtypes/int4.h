/* SPDX-License-Identifier: Apache-2.0 */
/* int4.h -- codes 0 to 15, two to a byte, low half first; each group of 32 or 64 elements of a row has a scale and a zero, f16 side by side:
 * an element is (code - zero) * scale. Here are the codes: nearest even, saturating, NaN becomes 0. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(int4, 4, 15.0, false, false)
#endif

#ifdef FV_DTYPE_SPEC
static double int4_decode(uint32_t code)
{
    return code & 15;
}

static uint32_t int4_encode(double x)
{
    if (!(x > 0)) return 0;                             /* NaN too */
    if (x >= 15) return 15;
    const uint32_t whole = (uint32_t)x;                 /* towards zero */
    const double rest = x - whole;
    return rest > 0.5 || (rest == 0.5 && (whole & 1)) ? whole + 1 : whole;
}
#endif

#ifdef FV_DTYPE_CPU
/* Element i is the low (even i) or the high half of byte i / 2. Any i may begin a vector. */
VFN v_f32 v_load_int4(const void *base, int64_t i)
{
    const uint8_t *p = base;
    int32_t code[V_LANES];
    for (int l = 0; l < V_LANES; l++) code[l] = p[(i + l) >> 1] >> ((i + l) & 1) * 4 & 15;
    return v_float(v_loadi(code));
}

/* The even and the odd ones of 2 * V_LANES elements, from a byte on. */
VFN void v_split_int4(const void *base, v_f32 *even, v_f32 *odd)
{
    const v_u32 two = v_load_u8(base);
    *even = v_float((v_i32)(two & 15));
    *odd = v_float((v_i32)(two >> 4));
}

VFN void v_store_int4(void *base, int64_t i, v_f32 x)
{
    uint8_t *p = base;
    int32_t code[V_LANES];
    const v_f32 magic = v_set(12582912.0f);             /* 1.5 * 2^23: leaves whole numbers, nearest even */
    const v_f32 y = v_min(v_max(x, v_set(0.0f)), v_set(15.0f)) + magic;
    v_storei(code, (v_i32)v_uselect(v_ne(x, x), (v_u32)v_seti(0), v_bits_of(y) & 15));
    for (int l = 0; l < V_LANES; l++) {
        uint8_t *at = &p[(i + l) >> 1];
        *at = (uint8_t)((i + l) & 1 ? (*at & 0x0F) | code[l] << 4 : (*at & 0xF0) | code[l]);
    }
}
#endif
