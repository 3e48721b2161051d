/* SPDX-License-Identifier: Apache-2.0 */
/* f32.h -- IEEE binary32: 1 sign, 8 exponent and 23 fraction bits. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(f32, 32, 0x1.fffffep127, true, true)
#endif

#ifdef FV_DTYPE_SPEC
static const minifloat f32_format = { .exponent_bits = 8, .fraction_bits = 23, .bias = 127, .largest = 0x7F7FFFFF, .infinity = 0x7F800000 };

static double f32_decode(uint32_t code)
{
    return minifloat_decode(&f32_format, code);
}

static uint32_t f32_encode(double x)
{
    return minifloat_encode(&f32_format, x);
}
#endif

#ifdef FV_DTYPE_CPU
VFN v_f32 v_load_f32(const void *base, int64_t i) { return v_load((const float *)base + i); }
VFN void v_store_f32(void *base, int64_t i, v_f32 x) { v_store((float *)base + i, x); }
#endif
