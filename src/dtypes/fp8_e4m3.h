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
