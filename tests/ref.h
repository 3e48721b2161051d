/* SPDX-License-Identifier: Apache-2.0 */
/* ref.h -- THE DEFINITION of what the engine computes: slow, obvious, in double.
 *
 * Every kernel is a claim about this file. It shares no code with the engine and knows nothing of
 * pages, strides, element types or splits: whoever uses it gathers and dequantises first.
 *
 *   row i of a request sits at position   p(i) = row_position[i],
 *                                         or first_position + keys - rows + i
 *   key j of a request sits at position   c(j) = first_position + j
 *
 *     s       = scale * dot(rope(Q[i,h], p), rope(K[j,g], c))          g = h / (hq / hk)
 *     s       = softcap * tanh(s / softcap)                            if softcap > 0
 *     s       = s - slope[h] * (p - c)                                 if there are slopes
 *     s       = score(s)                                               if the caller has a hook
 *     m       = max of the visible s and of sink[h];  l = sum exp(s - m) + exp(sink[h] - m)
 *     O[i,h]  = sum exp(s - m) V[j,g] / l;  LSE[i,h] = m + ln l        nothing at all: 0 and -inf
 *
 * All LSE here are natural. Arrays are dense, last index fastest; the caller owns all of them.
 */
#ifndef FOVEAL_TESTS_REF_H
#define FOVEAL_TESTS_REF_H

#include <stdbool.h>
#include <stdint.h>

/* Rotary embedding of the first `rotary_dim` elements. Pair i turns by position *
 * (double)freq[i]; it is (x[i], x[i + rotary_dim/2]), or (x[2i], x[2i+1]) when interleaved. */
typedef struct ref_rope {
    int rotary_dim;
    bool interleaved;
    const float *freq;                  /* [rotary_dim / 2] */
    double (*kept)(double);             /* how a turned row's elements are stored until they are
                                           multiplied; NULL: as they are */
} ref_rope;

typedef struct ref_range {
    int64_t lo, hi;                     /* half-open */
} ref_range;

typedef struct ref_at {
    int64_t row, key;                   /* indices within the request */
    int64_t row_position, key_position;
    int head;                           /* query head */
} ref_at;

typedef struct ref_problem {
    int hq, hk, dk, dv;
    double scale;
    int causal;                         /* 0 none; 1 key position <= row position; 2 key index <=
                                           row index */
    int64_t window_left, window_right;  /* keys beside the diagonal; -1: no bound */
    double softcap;                     /* 0: none */
    const double *slope;                /* [hq] or NULL */
    const double *sink;                 /* [hq] or NULL */
    const ref_rope *rope;               /* or NULL */
    double (*score)(void *user, double s, const ref_at *at);    /* or NULL */
    bool (*visible)(void *user, const ref_at *at);              /* or NULL; ANDed with the rest */
    void *user;
} ref_problem;

/* Everything that is NULL or 0 is absent, except where it says otherwise. */
typedef struct ref_request {
    int64_t rows, keys;
    const double *q;                    /* [rows][hq][dk], or NULL and `query` writes one row of
                                           dk elements */
    void (*query)(void *user, int64_t row, int head, double *out);
    void *query_user;
    const double *k;                    /* [keys][hk][dk] */
    const double *v;                    /* [keys][hk][dv] */
    int64_t first_position;
    const int64_t *row_position;        /* [rows] */

    const uint8_t *bits;                /* [rows][keys]: non-zero is visible */
    const uint8_t *absent;              /* [keys]: non-zero is a key that is not there: no row sees it */
    bool diag;                          /* only c = p */
    const ref_range *ranges;            /* only keys at these positions */
    int num_ranges;
    const ref_range *bidir;             /* positions: lifts the causal bound where p and c share
                                           a range */
    int num_bidir;
    const int64_t *items;               /* a prefix, then item lengths: positions from 0 on */
    int num_items;
    const uint8_t *block_map;           /* [num_block_rows][num_block_cols] over row indices and
                                           key positions */
    const int64_t *block_rows, *block_cols;
    int num_block_rows, num_block_cols;
    const int32_t *parent;              /* [rows]: the last `rows` keys are the rows' own; a row
                                           sees every key before these, itself, its parent (a row of
                                           the request, -1 none), and so on */
} ref_request;

int64_t ref_row_position(const ref_request *r, int64_t row);

/* Is key `key` visible to row `row`? The same for all heads unless `p->visible` looks at the
 * head. */
bool ref_visible(const ref_problem *p, const ref_request *r, int64_t row, int64_t key, int head);

/* O [n][hq][dv] and LSE [n][hq] of the rows named by `rows` (NULL: row 0 to n-1). Uses up to
 * `threads` threads; the result does not depend on how many. Returns false when memory runs out. */
bool ref_attend(const ref_problem *p, const ref_request *r, const int64_t *rows, int64_t n,
                int threads, double *o, double *lse);

/* sums[keys][hk]: over all rows and the query heads of the group, exp(s - LSE). Rows with LSE
 * -inf add nothing. */
bool ref_key_sums(const ref_problem *p, const ref_request *r, double *sums);

/* Turns x[dim] in place for a token at `position`. */
void ref_turn(const ref_rope *rope, int64_t position, double *x);

/* One item of a merge: state s is (o[s][dv], lse[s]). Writes out[dv] and *out_lse. */
void ref_merge(int states, int dv, const double *const *o, const double *lse, double *out,
               double *out_lse);

#endif
