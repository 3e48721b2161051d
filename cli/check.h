/* SPDX-License-Identifier: Apache-2.0 */
/* check.h -- is what was served right? Rows are drawn in every step and compared with the
 * definition; outputs can be summed up in a digest.
 *
 * For a drawn row of a drawn layer:
 *   - its turned query, its own new key and value, and some older keys and values are compared with
 *     what they were made from. A page that went to two owners, was evicted in use or matched the
 *     wrong prefix shows up here;
 *   - its output and LSE, for two query heads, with the definition read from the pages.
 * The digest adds up a hash of every row that hands out a token, in every layer: two runs with the
 * same bits have the same digest, however they were scheduled.
 */
#ifndef CHECK_H
#define CHECK_H

#include "definition.h"
#include "serve.h"

typedef struct checker {
    const trace *trace;
    int64_t rows_per_step;              /* 0: none */
    bool digesting;
    uint64_t random;
    int layer;                          /* drawn for this step */
    uint64_t digest;
    int64_t rows, heads, keys;          /* compared so far */
    double step_error;                  /* of this step; -1: nothing was compared */
    double max_error;                   /* largest |o - definition| */
    double max_share;                   /* the same as a share of what rounding allows */
    int64_t failures;
    char failure[240];                  /* the first one in words */
} checker;

void check_begin(checker *c, const serve *s);           /* before each step */
void check_layer(void *checker, serve *s, int layer);   /* a serve_watch */

#endif
