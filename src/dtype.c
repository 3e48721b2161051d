/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.c -- the table of element types from the files in src/dtypes/, and the definition of their
 * small floats in integer arithmetic. */
#include "dtype.h"

#include <math.h>
#include <string.h>

/* Codes of a float with few bits: sign, exponent, fraction from the top. Largest and the specials
 * are without the sign bit; 0: there is none. */
typedef struct minifloat {
    int exponent_bits, fraction_bits, bias;
    uint32_t largest;                   /* largest finite magnitude */
    uint32_t infinity;                  /* magnitudes above it are NaN */
    uint32_t nan;                       /* the one that is written; 0 with infinity: sign and upper
                                           payload bits are kept, and made quiet */
    bool saturates;                     /* what is too large, infinity too, becomes the largest */
} minifloat;

static double minifloat_decode(const minifloat *f, uint32_t code)
{
    const uint32_t sign_bit = 1u << (f->exponent_bits + f->fraction_bits);
    const uint32_t magnitude = code & (sign_bit - 1);
    const double sign = code & sign_bit ? -1.0 : 1.0;
    if (f->infinity && magnitude == f->infinity) return sign * (double)INFINITY;
    if (magnitude > f->largest) return copysign((double)NAN, sign);
    const uint32_t exponent = magnitude >> f->fraction_bits;
    const uint32_t fraction = magnitude & ((1u << f->fraction_bits) - 1);
    if (!exponent) return sign * ldexp((double)fraction, 1 - f->bias - f->fraction_bits);
    return sign * ldexp((double)(fraction + (1u << f->fraction_bits)),
                        (int)exponent - f->bias - f->fraction_bits);
}

static uint32_t minifloat_nan(const minifloat *f, uint32_t sign, uint64_t fraction)
{
    if (f->nan) return f->nan;
    if (!f->infinity) return 0;
    const uint32_t quiet = 1u << (f->fraction_bits - 1);
    return sign | f->infinity | quiet | (uint32_t)(fraction >> (52 - f->fraction_bits));
}

/* Nearest even. The fraction with its leading 1 is shifted to the target's unit; the carry of a
 * rounding moves into the exponent by itself. */
static uint32_t minifloat_encode(const minifloat *f, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (uint32_t)(bits >> 63) << (f->exponent_bits + f->fraction_bits);
    const uint64_t fraction = bits & (((uint64_t)1 << 52) - 1);
    const int biased = (int)(bits >> 52 & 0x7FF);
    if (biased == 0x7FF && fraction) return minifloat_nan(f, sign, fraction);
    if (!biased) return sign; /* zero, and what is far below any type here */
    const int least = 1 - f->bias;                      /* exponent of the smallest normal number */
    const int exponent = biased - 1023 < least ? least : biased - 1023;
    int shift = 52 - f->fraction_bits + (exponent - (biased - 1023));
    if (shift > 60) shift = 60;
    const uint64_t whole = fraction | (uint64_t)1 << 52;
    const uint64_t half = (uint64_t)1 << (shift - 1), rest = whole & (2 * half - 1);
    uint64_t code = whole >> shift;
    if (rest > half || (rest == half && (code & 1))) code++;
    code += (uint64_t)(exponent - least) << f->fraction_bits;
    if (code > f->largest) code = f->saturates ? f->largest : f->infinity;
    return sign | (uint32_t)code;
}

#define FV_DTYPE_SPEC
#include "dtype_files.inc"
#undef FV_DTYPE_SPEC

const fv__dtype_info fv__dtypes[FV__NUM_DTYPES] = {
#define FV_DTYPE_META
#define FV_DTYPE_INFO(name, bits, largest, has_inf, has_nan) \
    [FV__DTYPE_##name] = { #name, bits, largest, has_inf, has_nan, name##_decode, name##_encode },
#include "dtype_files.inc"
#undef FV_DTYPE_INFO
#undef FV_DTYPE_META
};

fv__dtype fv__dtype_find(const char *name)
{
    for (int i = 0; name && i < FV__NUM_DTYPES; i++)
        if (!strcmp(name, fv__dtypes[i].name)) return (fv__dtype)i;
    return FV__DTYPE_NONE;
}

double fv__dtype_load(fv__dtype type, const void *base, int64_t index)
{
    const fv__dtype_info *t = &fv__dtypes[type];
    const unsigned char *at = (const unsigned char *)base + index * t->bits / 8;
    uint32_t code = 0;
    if (t->bits == 4) return t->decode(index & 1 ? *at >> 4 : *at & 15);
    memcpy(&code, at, (size_t)t->bits / 8);             /* little-endian: the low bytes */
    return t->decode(code);
}

void fv__dtype_store(fv__dtype type, void *base, int64_t index, double x)
{
    const fv__dtype_info *t = &fv__dtypes[type];
    unsigned char *at = (unsigned char *)base + index * t->bits / 8;
    const uint32_t code = t->encode(x);
    if (t->bits == 4)
        *at = (unsigned char)(index & 1 ? (*at & 0x0F) | code << 4 : (*at & 0xF0) | code);
    else
        memcpy(at, &code, (size_t)t->bits / 8);
}
