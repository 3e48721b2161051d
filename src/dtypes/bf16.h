/* SPDX-License-Identifier: Apache-2.0 */
/* bf16.h -- bfloat16: the upper half of binary32. */

#ifdef FV_DTYPE_META
FV_DTYPE_INFO(bf16, 16, 0x1.fep127, true, true)
#endif

#ifdef FV_DTYPE_SPEC
static const minifloat bf16_format = { .exponent_bits = 8, .fraction_bits = 7, .bias = 127, .largest = 0x7F7F, .infinity = 0x7F80 };

static double bf16_decode(uint32_t code)
{
    return minifloat_decode(&bf16_format, code);
}

static uint32_t bf16_encode(double x)
{
    return minifloat_encode(&bf16_format, x);
}
#endif

#ifdef FV_DTYPE_CPU
VFN v_f32 v_load_bf16(const void *base, int64_t i) { return v_of_bits(v_load_u16((const char *)base + 2 * i) << 16); }

VFN void v_store_bf16(void *base, int64_t i, v_f32 x)
{
    const v_u32 u = v_bits_of(x);
    const v_u32 near = (u + 0x7FFF + (u >> 16 & 1)) >> 16, quiet = u >> 16 | 0x40;
    v_store_u16((char *)base + 2 * i, v_uselect(v_ne(x, x), quiet, near));
}
#endif
