/* SPDX-License-Identifier: Apache-2.0 */
/* rope.h -- frequencies of rotary embeddings: one function for fv_rope_frequencies, for appends and
 * for the default of a variant's parameter. */
#ifndef FV__ROPE_H
#define FV__ROPE_H

#include "status.h"

typedef struct fv__rope_numbers {       /* 0: the default that fv_rope_desc states */
    double base, factor, low_freq_factor, high_freq_factor, original_context;
} fv__rope_numbers;

/* Writes dim / 2 frequencies, computed in double and rounded once. `where` names the owner of the
 * fields for messages ("rope", "problem.variants[0]"). dim is even and not negative. */
fv_status fv__rope_frequencies(const fv__rope_numbers *numbers, int32_t dim, const char *where,
                               float *frequencies, fv_error *err);

#endif
