/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn.h -- the tool's own boxes: numbers, areas of guarded memory, stored data, the set-up of
 * one way, its run.
 *
 *     case_row --(stored)--> bytes of K, V, Q --(setup)--> memory, tables, descriptors
 *              --(run)--> result
 *
 * Only the public header of the engine is used here; element types are decoded by code of our own.
 */
#ifndef FOVEAL_TESTS_CHECKATTN_H
#define FOVEAL_TESTS_CHECKATTN_H

#include "cases.h"
#include "foveal/foveal.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* -------------------------------------------------------------------- numbers (checkattn_num.c) */

enum {
    NUM_F16,
    NUM_BF16,
    NUM_F32,
    NUM_E4M3,
    NUM_E5M2,
    NUM_FP4,
    NUM_INT8,
    NUM_INT4,
    NUM_TYPES
}; /* the first three as CASE_DTYPE_ */

typedef struct num_info {
    const char *name;                   /* as the public header spells it */
    int bits;
} num_info;

extern const num_info num_types[NUM_TYPES];

double num_decode(int type, uint32_t code);
uint32_t num_encode(int type, double x);            /* nearest even; 8 and 4 bits saturate */
uint32_t num_poison(int type, int poison);          /* CASE_POISON_ as far as the type has it,
                                                       see the format page */

/* Element `i` of packed memory. */
double num_load(int type, const void *base, int64_t i);
void num_store(int type, void *base, int64_t i, double x);
uint32_t num_code(int type, const void *base, int64_t i);
void num_put(int type, void *base, int64_t i, uint32_t code);

static inline int64_t num_bytes(int type, int64_t elements)
{
    return (elements * num_types[type].bits + 7) / 8;
}

/* How many representable values lie between two codes of a float type. */
int64_t num_ulps(int type, uint32_t a, uint32_t b);

/* ---------------------------------------------------------------------- areas (checkattn_mem.c) */

/* Memory between two inaccessible stretches. Its end lies as near to the second one as the asked
 * alignment allows. A sparse area is inaccessible but for what area_back() made real. Everything
 * real holds the fill pattern. */
typedef struct area {
    uint8_t *map;
    size_t map_bytes;
    uint8_t *base;                      /* the payload: 256-aligned plus `offset` */
    int64_t bytes;
    bool sparse;
    uint32_t pattern;                   /* in every element */
    int pattern_bytes;
    uint8_t *device;                    /* GPU: the twin of everything between the guards, else
                                           NULL */
    size_t *real;                       /* sparse, GPU: pairs of offsets of the stretches that
                                           are real */
    int num_real;
} area;

/* False: no memory. */
bool area_make(area *a, int64_t bytes, int offset, int num_type, uint32_t pattern, bool sparse);
bool area_back(area *a, int64_t first, int64_t bytes);
void area_fill(area *a, uint32_t pattern);          /* not for sparse ones */
bool area_freeze(area *a);                          /* read-only from now on */
bool area_slack_is_clean(const area *a);            /* what lies around the payload still holds
                                                       the pattern */
void *area_address(const area *a, int64_t first);   /* of a byte of the payload, where the engine
                                                       looks for it */
bool area_push(area *a);                            /* GPU: host to device; else nothing */
bool area_pull(area *a);                            /* GPU: device to host */
void area_free(area *a);

/* ------------------------------------------------------------------- stored (checkattn_store.c) */

/* The bytes of a row's K, V and Q in one choice of types, dense, before any placing. */
typedef struct stored {
    int q_type, kv_type;
    int64_t k_row, v_row, q_row;        /* bytes of one (token, head) */
    uint8_t *k, *v;                     /* [total_kv][hk][..]; v NULL: mla */
    uint8_t *k_block, *v_block;         /* [total_kv][hk][stored_blocks] of block_type */
    int block_type;                     /* -1: elements have no scales of their groups */
    int group;                          /* elements of a group */
    uint8_t *q;                         /* [total_q][hq][..] */
} stored;

/* False: `why` says which value is not exact, or that memory is short. */
bool stored_make(const case_row *row, int dtype, stored *out, char *why, size_t size);
int stored_blocks(const stored *s, int width);          /* elements of block_type that a row of so many elements has */
void stored_free(stored *s);

/* ------------------------------------------------------------------- set-up (checkattn_setup.c) */

/* Keys [lo, hi) and rows [row_lo, row_hi) of a request of the row: a request of the batch. */
typedef struct slice {
    int request;
    int64_t lo, hi;
    int64_t row_lo, row_hi;
} slice;

slice whole_slice(const case_row *row, int request);

enum { MAX_VARIANTS = 10, MAX_ARGS = 16 };

/* Strides in elements; base: where the first element lies in the area. */
typedef struct geometry {
    int64_t base, page, token, head;
} geometry;

/* What is the same for all ways of a row. */
typedef struct shared {
    const case_row *row;
    const case_answer *answer;
    const uint8_t *seen;                /* case_seen */
    const uint8_t *bits;                /* the dense mask of all requests, packed as the engine
                                           wants it; NULL: no mask */
    const int64_t *bits_at;             /* [num_requests + 1] first bit of each request,
                                           multiples of 8 */
} shared;

typedef struct setup {
    const shared *sh;
    const case_row *row;
    const stored *st;
    case_way way;
    const slice *slices;
    int num_slices;
    bool whole;                         /* the slices are the row's requests as they are */
    int64_t total_rows, total_keys;

    int page;                           /* tokens per page; 0: ragged */
    int64_t num_pages;                  /* of the pool */
    int64_t *page_at;                   /* [num_slices + 1] first entry of each slice in page_ids */
    int64_t *page_ids, *v_page_ids;     /* ids of the pages of all slices, one after another; V's
                                           may be others */
    int64_t bad_entries;                /* of tables: that name no page (x_bad) */
    int64_t *token_at;                  /* [num_slices + 1] ragged: first token of each slice,
                                           room included */

    geometry kg, vg, tg;                /* K, V, the tail of K */
    bool joint;                         /* V lies in K's area */
    int64_t q_stride, o_stride;         /* from row to row */
    int64_t lse_row, lse_head, lse_lines, lse_line;     /* strides; lines of `lse_line` elements */
    area k, v, k_tail, k_scale, v_scale, k_block, v_block, q, q_tail, o, lse, sums, ids, v_ids,
        work;
    int64_t sums_stride;                /* of key sums, from one KV head to the next */
    void *lists[64];                    /* index arrays and argument memory, to be freed */
    int num_lists;
    void *twins[64];                    /* GPU: device copies of them */
    int num_twins;

    fv_variant_use uses[MAX_VARIANTS];
    fv_arg use_args[MAX_ARGS], batch_args[MAX_ARGS], run_args[MAX_ARGS];
    fv_tensor arg_tensors[3 * MAX_ARGS];
    int num_uses, num_use_args, num_batch_args, num_run_args, num_arg_tensors;
    fv_segment *segments;

    fv_problem problem;
    fv_plan_desc limits;
    fv_batch batch;
    fv_tensors tensors;
    char why[200];                      /* why it cannot be set up */
} setup;

/* False: not run, `s->why` says why. */
bool setup_make(setup *s, const shared *sh, const stored *st, const case_way *way,
                const slice *slices, int num_slices);
void setup_free(setup *s);

/* Fresh O and LSE: NaN where they must be written, 12345 where not. Poisoned scratch memory.
 * False: the GPU fails. */
bool setup_reset(setup *s);

/* Position of row `k` of slice `i`. */
int64_t setup_position(const setup *s, int i, int64_t k);

/* Memory that lives as long as the set-up. NULL: none left. */
void *setup_list(setup *s, size_t bytes);

/* Where the engine finds a copy of these bytes: themselves, or on the GPU. NULL: no memory. */
void *setup_twin(setup *s, void *bytes, size_t count);

/* Brings O, LSE and key sums back from the GPU. */
bool setup_fetch(setup *s);

/* checkattn_args.c: variants and their arguments, by the row's rules. */
bool setup_variants(setup *s);

/* ----------------------------------------------------------------------- runs (checkattn_run.c) */

typedef enum verdict { PASS, FAIL, REFUSED, NOT_RUN, VERDICTS } verdict;
extern const char *const verdict_names[VERDICTS];

typedef struct result {
    verdict verdict;
    char text[700];                     /* what went wrong, in words */
    double worst;                       /* largest error as a share of what is allowed */
    double mo;                          /* mean of abs(O) over the compared rows */
    double us;                          /* time of the run */
    double bytes, flops;                /* what the plan says it reads and computes */
    uint64_t o_bits, lse_bits;          /* hashes of all of O, of all of LSE */
    bool broken;                        /* the device is in an error state: nothing can run on it
                                           any more */
    bool requests_agree;                /* all requests of the row have the same bits */
    char kernel[64];
} result;

/* Runs one way. `seconds` > 0: times it for about so long. */
/* Plans and runs a set-up; everything that can be said without a reference is checked. False:
 * `r` says why. */
bool run_setup(fv_ctx *ctx, setup *s, double seconds, result *r);

/* Hashes of the bits of O and LSE of rows [first, last) of the batch. */
void hash_rows(const setup *s, int64_t first, int64_t last, uint64_t *o, uint64_t *lse);

/* Properties of the invariant mode (checkattn_props.c). */
void run_property(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way,
                  result *out);

/* Text of the `index`-th random row of a seed, as a case row (with keys x_NAME). */
void random_row(unsigned seed, int index, char *out, size_t size);

void run_way(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way, double seconds,
             result *out);

/* One merge row with states of one type; the LSE base and layout are those of the way. */
void run_merge(fv_ctx *ctx, const shared *sh, const case_way *way, result *out);

double now(void);                       /* seconds */

#endif
