/* SPDX-License-Identifier: Apache-2.0 */
/* fp4_e2m1.h -- OCP 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two to a byte, low half first. Saturates, NaN becomes 0. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(fp4_e2m1, 4, 6.0, false, false)
#endif

#ifdef FV_DTYPE_SPEC
static const minifloat fp4_e2m1_format = { .exponent_bits = 2, .fraction_bits = 1, .bias = 1, .largest = 0x7, .saturates = true };

static double fp4_e2m1_decode(uint32_t code)
{
    return minifloat_decode(&fp4_e2m1_format, code);
}

static uint32_t fp4_e2m1_encode(double x)
{
    return minifloat_encode(&fp4_e2m1_format, x);
}
#endif

#ifdef FV_DTYPE_CPU
/* Element i is the low (even i) or the high half of byte i / 2. Any i may begin a vector. */
VFN v_f32 v_fp4_value(v_u32 code)
{
    const v_u32 u = (code & 7) << 22;
    const v_f32 small = v_of_bits(u + (127u << 23)) - v_set(1.0f);
    const v_u32 r = v_uselect(V_TRUTH(u < (1u << 23)), v_bits_of(small), u + (126u << 23));
    return v_of_bits(r | (code & 8) << 28);
}

VFN v_f32 v_load_fp4_e2m1(const void *base, int64_t i)
{
    const uint8_t *p = base;
    int32_t code[V_LANES];
    for (int l = 0; l < V_LANES; l++) code[l] = p[(i + l) >> 1] >> ((i + l) & 1) * 4 & 15;
    return v_fp4_value((v_u32)v_loadi(code));
}

VFN void v_store_fp4_e2m1(void *base, int64_t i, v_f32 x)
{
    uint8_t *p = base;
    int32_t code[V_LANES];
    const v_f32 y = v_min(v_abs(x), v_set(6.0f));
    const v_u32 u = v_bits_of(y);
    const v_u32 normal = (u - (126u << 23) + 0x1FFFFF + (u >> 22 & 1)) >> 22;
    const v_u32 small = v_bits_of(y + v_set(0x1p22f)) - 0x4A800000;     /* in units of 1/2 */
    const v_u32 r = v_uselect(v_lt(y, v_set(1.0f)), small, normal) | (v_bits_of(x) >> 28 & 8);
    v_storei(code, (v_i32)v_uselect(v_ne(x, x), (v_u32)v_seti(0), r));
    for (int l = 0; l < V_LANES; l++) {
        uint8_t *at = &p[(i + l) >> 1];
        *at = (uint8_t)((i + l) & 1 ? (*at & 0x0F) | code[l] << 4 : (*at & 0xF0) | code[l]);
    }
}
#endif
