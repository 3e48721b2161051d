/* SPDX-License-Identifier: Apache-2.0 */
/* rope.c -- frequency i of a rotary embedding of width dim is base^(-2i / dim), stretched for
 * contexts longer than those of the training:
 *
 *   linear      frequency / factor
 *   Llama-3.1   a wave that turns more than high_freq_factor times in the original context stays,
 *   one that turns less than low_freq_factor times
 *               is divided by factor, and between them the two are mixed linearly in the number of
 *               turns */
#include "rope.h"

#include <math.h>
#include <stdio.h>

static const double two_pi = 6.283185307179586476925286766559;

static fv_status refuse(const char *where, const char *name, double value, const char *rule,
                        fv_error *err)
{
    char field[48];
    snprintf(field, sizeof field, "%s.%s", where, name);
    return fv__fail(err, FV_E_INVALID, field, fabs(value) < 1e18 ? (int64_t)value : 0, 0,
                    "%s is %g; %s", field, value, rule);
}

static fv_status check(const fv__rope_numbers *n, const char *where, fv_error *err)
{
    const double low = n->low_freq_factor, high = n->high_freq_factor;
    if (!(n->base > 0) || !isfinite(n->base))
        return refuse(where, "base", n->base, "it must be finite and positive (0: 10000)", err);
    if (!(n->factor > 0) || !isfinite(n->factor))
        return refuse(where, "factor", n->factor, "it must be finite and positive (0: 1)", err);
    if (low == 0 && high == 0) return FV_OK;
    if (!(low > 0) || !isfinite(low))
        return refuse(where, "low_freq_factor", low,
                      "it must be positive where high_freq_factor is given", err);
    if (!(high > low) || !isfinite(high))
        return refuse(where, "high_freq_factor", high, "it must be greater than low_freq_factor",
                      err);
    if (!(n->original_context > 0) || !isfinite(n->original_context))
        return refuse(where, "original_context", n->original_context,
                      "low_freq_factor and high_freq_factor need it (Llama-3.1: 8192)", err);
    return FV_OK;
}

static double stretch(const fv__rope_numbers *n, double frequency)
{
    const double low = n->low_freq_factor, high = n->high_freq_factor;
    if (low == 0 && high == 0) return frequency / n->factor;
    const double turns = n->original_context * frequency / two_pi;
    if (turns > high) return frequency;
    if (turns < low) return frequency / n->factor;
    const double kept = (turns - low) / (high - low);
    return (1 - kept) * frequency / n->factor + kept * frequency;
}

fv_status fv__rope_frequencies(const fv__rope_numbers *numbers, int32_t dim, const char *where,
                               float *frequencies, fv_error *err)
{
    fv__rope_numbers n = *numbers;
    if (n.base == 0) n.base = 10000;
    if (n.factor == 0) n.factor = 1;
    FV_TRY(check(&n, where, err));
    for (int32_t i = 0; i < dim / 2; i++)
        frequencies[i] = (float)stretch(&n, pow(n.base, -2.0 * i / dim));
    return FV_OK;
}
