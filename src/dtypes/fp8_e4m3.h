/* SPDX-License-Identifier: Apache-2.0 */
/* fp8_e4m3.h -- OCP 8-bit float with 4 exponent and 3 fraction bits: no infinity, 0x7F and 0xFF are NaN, largest 448. Saturates. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(fp8_e4m3, 8, 448.0, false, true)
#endif

#ifdef FV_DTYPE_SPEC
static const minifloat fp8_e4m3_format = { .exponent_bits = 4, .fraction_bits = 3, .bias = 7, .largest = 0x7E, .nan = 0x7F, .saturates = true };

static double fp8_e4m3_decode(uint32_t code)
{
    return minifloat_decode(&fp8_e4m3_format, code);
}

static uint32_t fp8_e4m3_encode(double x)
{
    return minifloat_encode(&fp8_e4m3_format, x);
}
#endif

#ifdef FV_DTYPE_CPU
#ifdef V_FROM_F16
/* The bits at their places in a binary16, whose exponents are 8 larger. The NaN's get the exponent of a NaN. */
VFN v_f32 v_load_fp8_e4m3(const void *base, int64_t i)
{
    const v_i16h code = (v_i16h)(v_load_u8_u16((const char *)base + i) << 8) >> 1;
    const v_i16h nan = (v_i16h)((code & 0x3F80) == 0x3F80) & 0x4000;
    return V_FROM_F16((code & (short)0xBFFF) | nan) * 256.0f;
}
#else
/* Subnormals borrow an exponent and give it back. */
VFN v_f32 v_load_fp8_e4m3(const void *base, int64_t i)
{
    const v_u32 code = v_load_u8((const char *)base + i), u = (code & 0x7F) << 20;
    const v_f32 small = v_of_bits(u + (121u << 23)) - v_set(0x1p-6f);
    v_u32 r = v_uselect(V_TRUTH(u < (1u << 23)), v_bits_of(small), u + (120u << 23));
    r = v_uselect(V_TRUTH(u == 0x7F00000), (v_u32)v_seti(0x7FC00000), r);
    return v_of_bits(r | (code & 0x80) << 24);
}
#endif

VFN void v_store_fp8_e4m3(void *base, int64_t i, v_f32 x)
{
    const v_f32 y = v_min(v_abs(x), v_set(448.0f));
    const v_u32 u = v_bits_of(y);
    const v_u32 normal = (u - (120u << 23) + 0x7FFFF + (u >> 20 & 1)) >> 20;
    const v_u32 small = v_bits_of(y + v_set(0x1p14f)) - 0x46800000;     /* in units of 2^-9 */
    const v_u32 r = v_uselect(v_lt(y, v_set(0x1p-6f)), small, normal) | (v_bits_of(x) >> 24 & 0x80);
    v_store_u8((char *)base + i, v_uselect(v_ne(x, x), (v_u32)v_seti(0x7F), r));
}
#endif
