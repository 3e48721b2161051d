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
