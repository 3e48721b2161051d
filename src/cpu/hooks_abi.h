/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_abi.h -- what a variant's compiled hooks look like to the kernels that call them. Includes nothing but integers: a variant that is compiled
 * alone sees this file, the vocabulary, its level's file and its own text. */
#ifndef FV__HOOKS_ABI_H
#define FV__HOOKS_ABI_H

#include <stdbool.h>
#include <stdint.h>

/* Where a block of keys lies, for hooks: keys of one request (or of a shared segment) seen by one row. */
typedef struct fv__at {
    int32_t request, row, batch_row, head, q_pos, num_rows, num_keys, num_q_heads;
    const int32_t *key;                 /* [n] index in the request */
    const int32_t *k_pos;               /* [n] position */
    bool consecutive;                   /* key[i] = key[0] + i and k_pos[i] = k_pos[0] + i */
} fv__at;

/* A variant's hooks compiled for one level, over blocks of up to FV__KEY_BLOCK keys (score, visible, weight) or a row's elements (query,
 * key, value, output). NULL: the variant has no such hook. Buffers are padded to a multiple of 16 floats. */
typedef struct fv__cpu_hooks {
    void (*score)(float *s, int n, const void *args, const fv__at *at);
    uint64_t (*visible)(int n, const void *args, const fv__at *at);     /* bit i: key i is visible */
    float (*sink)(const void *args, const fv__at *at);
    void (*query)(float *q, int dim, const void *args, const fv__at *at);       /* one row of one head, in place */
    void (*key)(float *k, int dim, const void *args, const fv__at *at);         /* one key (at->key[0], at->k_pos[0]) of at->head's kv head, in place */
    void (*value)(float *v, int dim, const void *args, const fv__at *at);
    void (*output)(float *o, int dim, float lse, const void *args, const fv__at *at);
    void (*weight)(float *s, int n, const void *args, const fv__at *at);        /* scores to weights */
    void (*key_sum)(float *p, int n, const void *args, const fv__at *at);
    float (*row_max)(float m, const void *args, const fv__at *at);
} fv__cpu_hooks;

#endif
