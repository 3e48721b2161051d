/* SPDX-License-Identifier: Apache-2.0 */
/* f16.h -- IEEE binary16: 1 sign, 5 exponent and 10 fraction bits. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(f16, 16, 65504.0, true, true)
#endif

#ifdef FV_DTYPE_SPEC
static const minifloat f16_format = { .exponent_bits = 5, .fraction_bits = 10, .bias = 15, .largest = 0x7BFF, .infinity = 0x7C00 };

static double f16_decode(uint32_t code)
{
    return minifloat_decode(&f16_format, code);
}

static uint32_t f16_encode(double x)
{
    return minifloat_encode(&f16_format, x);
}
#endif

#ifdef FV_DTYPE_CPU
#ifdef V_FROM_F16
VFN v_f32 v_load_f16(const void *base, int64_t i) { return V_FROM_F16(*(const v_u16_any *)((const char *)base + 2 * i)); }
VFN void v_store_f16(void *base, int64_t i, v_f32 x) { *(v_u16_any *)((char *)base + 2 * i) = V_TO_F16(x); }
#else
/* Subnormals borrow an exponent and give it back, so that no subnormal float is ever an operand (a host may flush them). */
VFN v_f32 v_f16_value(v_u32 code)
{
    const v_u32 u = (code & 0x7FFF) << 13;
    const v_f32 small = v_of_bits(u + (113u << 23)) - v_set(0x1p-14f);
    const v_u32 normal = u + (112u << 23);
    const v_u32 special = u + (224u << 23);
    v_u32 r = v_uselect(V_TRUTH(u < (1u << 23)), v_bits_of(small), normal);
    r = v_uselect(V_TRUTH(u >= (31u << 23)), special, r);
    return v_of_bits(r | (code & 0x8000) << 16);
}

VFN v_u32 v_f16_code(v_f32 x)
{
    const v_u32 u = v_bits_of(x) & 0x7FFFFFFF, sign = v_bits_of(x) >> 16 & 0x8000;
    const v_u32 normal = (u - (112u << 23) + 0xFFF + (u >> 13 & 1)) >> 13;
    const v_u32 small = v_bits_of(v_abs(x) + v_set(0.5f)) - 0x3F000000;
    v_u32 r = v_uselect(V_TRUTH(u < 0x38800000), small, normal);
    r = v_uselect(V_TRUTH(u >= 0x477FF000), (v_u32)v_seti(0x7C00), r);
    r = v_uselect(V_TRUTH(u > 0x7F800000), 0x7E00 | (u >> 13 & 0x3FF), r);
    return r | sign;
}

VFN v_f32 v_load_f16(const void *base, int64_t i) { return v_f16_value(v_load_u16((const char *)base + 2 * i)); }
VFN void v_store_f16(void *base, int64_t i, v_f32 x) { v_store_u16((char *)base + 2 * i, v_f16_code(x)); }
#endif
#endif
