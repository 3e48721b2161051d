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
