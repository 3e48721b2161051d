/* SPDX-License-Identifier: Apache-2.0 */
/* fp8_e5m2.h -- OCP 8-bit float with 5 exponent and 2 fraction bits: a short binary16. Saturates when written (infinity reads as such). */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(fp8_e5m2, 8, 57344.0, true, true)
#endif

#ifdef FV_DTYPE_SPEC
static const minifloat fp8_e5m2_format = { .exponent_bits = 5, .fraction_bits = 2, .bias = 15, .largest = 0x7B, .infinity = 0x7C, .nan = 0x7F,
                                         .saturates = true };

static double fp8_e5m2_decode(uint32_t code)
{
    return minifloat_decode(&fp8_e5m2_format, code);
}

static uint32_t fp8_e5m2_encode(double x)
{
    return minifloat_encode(&fp8_e5m2_format, x);
}
#endif

#ifdef FV_DTYPE_CPU
#ifdef V_FROM_F16
VFN v_f32 v_load_fp8_e5m2(const void *base, int64_t i)                  /* the upper byte of a binary16 */
{
    return V_FROM_F16(v_load_u8_u16((const char *)base + i) << 8);
}
#else
VFN v_f32 v_load_fp8_e5m2(const void *base, int64_t i)
{
    const v_u32 code = v_load_u8((const char *)base + i), u = (code & 0x7F) << 21;
    const v_f32 small = v_of_bits(u + (113u << 23)) - v_set(0x1p-14f);
    v_u32 r = v_uselect(V_TRUTH(u < (1u << 23)), v_bits_of(small), u + (112u << 23));
    r = v_uselect(V_TRUTH(u >= (31u << 23)), u + (224u << 23), r);
    return v_of_bits(r | (code & 0x80) << 24);
}
#endif

VFN void v_store_fp8_e5m2(void *base, int64_t i, v_f32 x)
{
    const v_f32 y = v_min(v_abs(x), v_set(57344.0f));
    const v_u32 u = v_bits_of(y);
    const v_u32 normal = (u - (112u << 23) + 0xFFFFF + (u >> 21 & 1)) >> 21;
    const v_u32 small = v_bits_of(y + v_set(0x1p7f)) - 0x43000000;      /* in units of 2^-16 */
    const v_u32 r = v_uselect(v_lt(y, v_set(0x1p-14f)), small, normal) | (v_bits_of(x) >> 24 & 0x80);
    v_store_u8((char *)base + i, v_uselect(v_ne(x, x), (v_u32)v_seti(0x7F), r));
}
#endif
