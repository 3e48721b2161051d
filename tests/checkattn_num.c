/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_num.c -- element types by definition, written apart from the engine's so that they
 * cannot err together. */
#include "checkattn.h"

#include <math.h>
#include <string.h>

const num_info num_types[] = {
    { "f16", 16 },     { "bf16", 16 },    { "f32", 32 }, { "fp8_e4m3", 8 },
    { "fp8_e5m2", 8 }, { "fp4_e2m1", 4 }, { "int8", 8 },     { "int4", 4 },
};

/* Sign, exponent, mantissa. has_inf: the top exponent is Inf and NaN; else it is ordinary, and
 * only `nan` (if any) is not. */
typedef struct layout {
    int mantissa, exponent, bias;
    bool has_inf;
    uint32_t nan;                       /* a NaN; 0: none */
    uint32_t largest;                   /* largest finite code */
} layout;

static const layout layouts[] = {
    { 10, 5, 15, true, 0x7E00, 0x7BFF },
    { 7, 8, 127, true, 0x7FC0, 0x7F7F },
    { 23, 8, 127, true, 0x7FC00000, 0x7F7FFFFF },
    { 3, 4, 7, false, 0x7F, 0x7E },
    { 2, 5, 15, true, 0x7E, 0x7B },
    { 1, 2, 1, false, 0, 7 },
    { 0, 0, 0, false, 0, 127 },         /* int8 is not a float: only `largest` counts */
    { 0, 0, 0, false, 0, 15 },          /* nor is int4 */
};

double num_decode(int type, uint32_t code)
{
    const layout *t = &layouts[type];
    const uint32_t magnitude = code & ((1u << (num_types[type].bits - 1)) - 1);
    const uint32_t m = magnitude & ((1u << t->mantissa) - 1);
    const int e = (int)(magnitude >> t->mantissa);
    double x;

    if (type == NUM_INT8)
        return (int8_t)code;
    if (type == NUM_INT4)
        return code;
    if (t->has_inf && e == (1 << t->exponent) - 1)
        x = m ? NAN : INFINITY;
    else if (!t->has_inf && t->nan && magnitude == t->nan)
        x = NAN;
    else if (e == 0)
        x = ldexp(m, 1 - t->bias - t->mantissa);
    else
        x = ldexp(m + (1u << t->mantissa), e - t->bias - t->mantissa);
    return code >> (num_types[type].bits - 1) ? -x : x;
}

static uint32_t overflow(const layout *t)
{
    return t->has_inf && t->mantissa > 2 ? t->largest + 1 : t->largest; /* 8 bits saturate, also
                                                                           with an Inf */
}

uint32_t num_encode(int type, double x)
{
    const layout *t = &layouts[type];
    const uint32_t sign = signbit(x) ? 1u << (num_types[type].bits - 1) : 0;
    int e;

    if (type == NUM_INT8)
        return (uint8_t)(int8_t)(x > 127 ? 127 : x < -128 ? -128 : isnan(x) ? 0 : nearbyint(x));
    if (type == NUM_INT4)
        return (uint32_t)(x > 15 ? 15 : x > 0 ? nearbyint(x) : 0);
    x = fabs(x);
    if (isnan(x))
        return sign | t->nan;
    if (isinf(x))
        return sign | overflow(t);
    if (x == 0)
        return sign;
    frexp(x, &e);                       /* x = f * 2^e, f in [0.5, 1) */
    if (e < 2 - t->bias)
        e = 2 - t->bias;                /* subnormal: the exponent of the smallest normal */
    const double units = nearbyint(ldexp(x, t->mantissa + 1 - e));
    const double code = units + ldexp(e - 2 + t->bias, t->mantissa); /* a carry moves into the
                                                                        exponent by itself */
    return sign | (code > t->largest ? overflow(t) : (uint32_t)code);
}

uint32_t num_poison(int type, int poison)
{
    const layout *t = &layouts[type];

    if (poison == CASE_POISON_NAN)
        return t->nan ? t->nan : t->largest;
    if (poison == CASE_POISON_INF)
        return t->has_inf ? t->largest + 1 : t->largest;
    return num_encode(type, 1e4);
}

uint32_t num_code(int type, const void *base, int64_t i)
{
    uint16_t half;
    uint32_t word;

    switch (num_types[type].bits) {
    case 4: return ((const uint8_t *)base)[i / 2] >> (i % 2 * 4) & 15;
    case 8: return ((const uint8_t *)base)[i];
    case 16: memcpy(&half, (const uint8_t *)base + 2 * i, 2); return half;
    default: memcpy(&word, (const uint8_t *)base + 4 * i, 4); return word;
    }
}

void num_put(int type, void *base, int64_t i, uint32_t code)
{
    uint8_t *at = base;
    const uint16_t half = (uint16_t)code;

    switch (num_types[type].bits) {
    case 4: at[i / 2] = (uint8_t)((at[i / 2] & (i % 2 ? 0x0F : 0xF0)) | code << (i % 2 * 4)); break;
    case 8: at[i] = (uint8_t)code; break;
    case 16: memcpy(at + 2 * i, &half, 2); break;
    default: memcpy(at + 4 * i, &code, 4); break;
    }
}

double num_load(int type, const void *base, int64_t i)
{
    const uint32_t code = num_code(type, base, i);
    float f;

    if (type != NUM_F32)
        return num_decode(type, code);
    memcpy(&f, &code, sizeof f);
    return f;
}

void num_store(int type, void *base, int64_t i, double x)
{
    const float f = (float)x;
    uint32_t code;

    memcpy(&code, &f, sizeof code);
    num_put(type, base, i, type == NUM_F32 ? code : num_encode(type, x));
}

/* Codes in the order of their values. */
static int64_t ordered(int type, uint32_t code)
{
    const uint32_t sign = 1u << (num_types[type].bits - 1);

    return code & sign ? -(int64_t)(code & (sign - 1)) : (int64_t)code;
}

int64_t num_ulps(int type, uint32_t a, uint32_t b)
{
    const int64_t d = ordered(type, a) - ordered(type, b);

    return d < 0 ? -d : d;
}
