/* SPDX-License-Identifier: Apache-2.0 */
/* definition.h -- attention of one row and one query head as its formula says, in double, one key
 * at a time, read from the pages. */
#ifndef DEFINITION_H
#define DEFINITION_H

#include "element.h"

/* K and V of one layer: [page][token][kv head][dim], each piece contiguous. */
typedef struct definition_cache {
    const element_type *type;
    const char *k, *k_tail, *v;       /* k_tail NULL: none. v NULL: the first dim_v elements of k */
    int64_t page_size, kv_heads;
    int64_t dim_k, tail, dim_v;         /* dim_k without the tail */
    double k_scale, v_scale;            /* stored values times this are the values */
} definition_cache;

typedef struct definition_row {
    const double *q;                    /* [dim_k + tail], as turned */
    double scale;
    int64_t kv_head;
    const int32_t *pages;               /* of its request, from key 0 */
    int64_t position;                   /* its own; keys 0..position are visible, ... */
    int64_t window;                     /* ... of which at most this many before it; -1: all */
} definition_row;

/* K of one key and KV head: out[dim_k + tail]. */
void definition_key(const definition_cache *c, const int32_t *pages, int64_t key, int64_t kv_head,
                    double *out);
void definition_value(const definition_cache *c, const int32_t *pages, int64_t key, int64_t kv_head,
                      double *out);

/* o[dim_v], and magnitude[dim_v] = sum of weight x |v|, what rounding errors are measured
 * against. */
void definition_attend(const definition_cache *c, const definition_row *r, double *o,
                       double *magnitude, double *lse);

/* Turns x's first 2 * pairs elements for a token at `position`. */
void definition_turn(double *x, int pairs, bool interleaved, const float *frequencies,
                     int64_t position);

#endif
