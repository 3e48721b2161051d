/* SPDX-License-Identifier: Apache-2.0 */
/* convert.h -- the conversions of ptx.cuh for kernels that are played on the CPU. */
#ifndef CONVERT_H
#define CONVERT_H

#include "fibers.h"

#include <math.h>

static inline float cvt_f32_f16(uint16_t h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const float x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24);
    return h & 0x8000 ? -x : x;
}

/* To nearest even. */
static inline uint16_t to_f16(float x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs((double)x);
    if (isnan(x)) return sign | 0x7fff;
    if (a >= 65520.0) return sign | 0x7c00;
    int e;
    frexp(a, &e);
    if (a == 0) return sign;
    const int unit = (e - 11 < -24 ? -24 : e - 11);             /* of the last place */
    const double n = nearbyint(ldexp(a, -unit));
    if (unit == -24) return sign | (uint16_t)n;                 /* subnormal, or just normal */
    return sign | (uint16_t)((unit + 24) * 1024 + (int)n);      /* n in [1024, 2048]: its 1024 carries into the exponent, which counts one less */
}

static inline uint16_t to_bf16(float x)
{
    const uint32_t u = __float_as_uint(x);
    return isnan(x) ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline uint32_t cvt_rn_f16x2(float lo, float hi) { return to_f16(lo) | (uint32_t)to_f16(hi) << 16; }
static inline uint32_t cvt_rn_bf16x2(float lo, float hi) { return to_bf16(lo) | (uint32_t)to_bf16(hi) << 16; }

#endif
