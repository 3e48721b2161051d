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
