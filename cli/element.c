/* SPDX-License-Identifier: Apache-2.0 */
/* element.c -- see element.h. */
#include "element.h"
#include "cli.h"

#include <math.h>
#include <string.h>

/* A float of `exponent` and `mantissa` bits, in double. ieee: the top exponent holds inf and NaN;
 * else only all ones is NaN. */
static double small_float(uint32_t code, int exponent, int mantissa, bool ieee)
{
    const uint32_t top = (1u << exponent) - 1, m = code & ((1u << mantissa) - 1),
                   e = code >> mantissa & top;
    const double sign = code >> (exponent + mantissa) & 1 ? -1 : 1;
    const int bias = (1 << (exponent - 1)) - 1;
    if (ieee && e == top)
        return m ? NAN : sign * INFINITY;
    if (!ieee && e == top && m == (1u << mantissa) - 1)
        return NAN;
    return e ? sign * ldexp(1 + ldexp(m, -mantissa), (int)e - bias)
             : sign * ldexp(m, 1 - bias - mantissa);
}

static double load_f32(const void *at)
{
    float x;
    memcpy(&x, at, sizeof x);
    return (double)x;
}

static void store_f32(void *at, double x)
{
    const float y = (float)x;
    memcpy(at, &y, sizeof y);
}

static double load_f16(const void *at)
{
    uint16_t code;
    memcpy(&code, at, sizeof code);
    return small_float(code, 5, 10, true);
}

/* Normal numbers only, which is what element_fill makes: smaller ones become 0. Rounds to nearest,
 * ties away. */
static void store_f16(void *at, double x)
{
    int e;
    const double m = frexp(fabs(x), &e);        /* |x| = m 2^e, 0.5 <= m < 1 */
    uint32_t code = 0;
    if (x != 0 && e - 1 >= -14)
        code = (uint32_t)((e - 1 + 15) * 1024 + lround((2 * m - 1) * 1024));
    if (code > 0x7bff)
        code = 0x7bff;
    const uint16_t half = (uint16_t)(code | (signbit(x) ? 0x8000u : 0));
    memcpy(at, &half, sizeof half);
}

static double load_bf16(const void *at)
{
    uint16_t code;
    memcpy(&code, at, sizeof code);
    const uint32_t bits = (uint32_t)code << 16;
    return load_f32(&bits);
}

static void store_bf16(void *at, double x)
{
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);          /* finite values only */
    const uint16_t code = (uint16_t)(bits >> 16);
    memcpy(at, &code, sizeof code);
}

static double load_e4m3(const void *at) { return small_float(*(const uint8_t *)at, 4, 3, false); }
static double load_e5m2(const void *at) { return small_float(*(const uint8_t *)at, 5, 2, true); }
static double load_int8(const void *at) { return *(const int8_t *)at; }

static const element_type types[] = {
    { "f32", 4, 0x1p-24, 3.4028234663852886e38, 0, load_f32, store_f32 },
    { "f16", 2, 0x1p-11, 65504, 0x1p-24, load_f16, store_f16 },
    { "bf16", 2, 0x1p-8, 3.3895313892515355e38, 0, load_bf16, store_bf16 },
    { "fp8_e4m3", 1, 0x1p-4, 448, 0x1p-9, load_e4m3, NULL },
    { "fp8_e5m2", 1, 0x1p-3, 57344, 0x1p-16, load_e5m2, NULL },
    { "int8", 1, 0, 127, 1, load_int8, NULL },
    { "int4", 0, 0, 15, 1, NULL, NULL },
};

const element_type *element_find(const char *name)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (!strcmp(types[i].name, name))
            return &types[i];
    return NULL;
}

void element_fill(const element_type *type, void *memory, int64_t count, double spread,
                  uint64_t seed)
{
    char *at = memory;
    for (int64_t i = 0; i < count; i++, at += type->bytes) {
        const uint64_t r = mix64(seed, (uint64_t)i);
        double sum = -2;                        /* four uniforms: mean 2, variance 1/3 */
        for (int j = 0; j < 64; j += 16)
            sum += (double)(r >> j & 0xffff) / 65536;
        type->store(at, spread * sum * 1.7320508075688772);
    }
}
