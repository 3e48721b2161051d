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
