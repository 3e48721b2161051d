/* SPDX-License-Identifier: Apache-2.0 */
/* variant.h -- what a variant's text declares, and its arguments bound to memory that kernels read.
 *
 * A variant is a text (ONE FILE IN src/variants/ = ONE BUILT-IN; a user's variant is the text of such a file). It is read twice: by the
 * parser here, which understands only the declarations (they never run user code), and by a compiler, which sees the declarations as macros
 * (cpu/hooks_open.h, cuda/hooks.cuh; in double cpu/spec_open.h). It includes nothing. docs/variants.md is the manual.
 *
 *     FV_META("cap * tanh(s / cap)")                       the formula, for people
 *     FV_PARAMS(                                           the argument struct, in order
 *         FV_NUMBER(cap, run, required, 5)                 name, binding, default (a number, inf, or required; none for arrays), example for tests
 *     )
 *     FV_REQUIRE(cap > 0)                                  NAME > | >= | < | <= NUMBER, checked when the number is bound
 *     FV_FIRST_KEY(position - left)                        keys before are never visible: position [+|- int parameter]; restates FV_VISIBLE
 *     FV_LAST_KEY(position + right)                        keys behind are never visible
 *     FV_LIFTED(lift)                                      ... except up to the end (from the start) of the range of `lift` that holds position
 *     FV_EXACT                                             within the bounds every key is visible (unless a FV_LIFTED list is given)
 *     FV_PAIRS(rotary_dim, interleaved)                    int parameters that say which pairs the query and key hooks get
 *     FV_TURNS(frequencies)                                FV_KEY turns pair i by k_pos * frequencies[i], and does nothing else; restates FV_KEY
 *     #ifdef FV_SPEC  ... the hooks in double ... #else ... the hooks in v_* words ... #endif
 *
 * Kinds of parameters, their C field and its size in the argument struct (16-byte slots):
 *     FV_NUMBER(name, binding, default, example)           float            16
 *     FV_INT(name, binding, default, example)              int32_t          16      inf is FV__NO_BOUND
 *     FV_FLOATS(name, binding, count, default)             fv_floats        16      f32 array; count: heads, requests, rows, any, a number, or an
 *                                                                                    int parameter divided by 2 (`rotary_dim/2`); default: required,
 *                                                                                    none (data NULL) or frequencies (of base, factor, ...)
 *     FV_INTS(name, binding, count, default)               fv_ints          16      i32 array
 *     FV_BITS(name, binding)                               fv_bits          16      dense mask: per request [rows][keys] bits, low first, each
 *                                                                                    request from a byte border
 *     FV_RANGES(name, binding, default)                    fv_ranges        32      half-open [lo, hi) position ranges, ascending; argument `name` i32 [n, 2]
 *                                                                                    and `name`_indptr i32 [num_requests + 1] (absent: one list for all)
 *     FV_SUMS(name, binding)                               fv_sums          16      output: f32 [num_kv_heads][keys of all requests]
 *     FV_MAXES(name, binding)                              fv_maxes         16      output: f32 [rows of all requests][num_q_heads]
 * Bindings: problem, batch, run.
 *
 * Hooks. `a` is the argument struct, `at` says where (struct v_at, src/cpu/vocabulary.h): request, row (in its request), batch_row, head (q head), key (index
 * in its request), q_pos, k_pos, num_rows, num_keys, index (pair or dim), all v_i32: no hook may assume which axis the lanes run along.
 *     FV_SCORE    { v_f32 s -> v_f32 }       FV_VISIBLE  { -> v_mask }           FV_SINK   { -> v_f32: joins the denominator as exp(sink) }
 *     FV_QUERY    { v_pair x -> v_pair }     FV_KEY      { v_pair x -> v_pair }
 *     FV_VALUE    { v_f32 v -> v_f32 }       FV_OUTPUT   { v_f32 o, v_f32 lse -> v_f32 }
 *     FV_WEIGHT   { v_f32 s -> v_f32: instead of the softmax; partials add; lse, sinks and fv_merge are refused with it }
 *     FV_KEY_SUM  { v_f32 p -> v_f32: summed over rows and group heads into the FV_SUMS parameter, p = exp(s - lse), in a second pass }
 *     FV_ROW_MAX  { v_f32 m -> v_f32: written to the FV_MAXES parameter, m = the largest score that the row sees, -inf where it sees none }
 */
#ifndef FV__VARIANT_H
#define FV__VARIANT_H

#include "status.h"

typedef enum fv__binding { FV__BIND_PROBLEM, FV__BIND_BATCH, FV__BIND_RUN } fv__binding;

typedef enum fv__param_kind {
    FV__NUMBER, FV__INT, FV__FLOATS, FV__INTS, FV__BITS, FV__RANGES, FV__SUMS, FV__MAXES,
} fv__param_kind;

typedef enum fv__hook {
    FV__HOOK_SCORE, FV__HOOK_VISIBLE, FV__HOOK_SINK, FV__HOOK_QUERY, FV__HOOK_KEY, FV__HOOK_VALUE, FV__HOOK_OUTPUT, FV__HOOK_WEIGHT,
    FV__HOOK_KEY_SUM, FV__HOOK_ROW_MAX,
    FV__NUM_HOOKS,
} fv__hook;

typedef enum fv__count_of { FV__COUNT_ANY, FV__COUNT_HEADS, FV__COUNT_REQUESTS, FV__COUNT_ROWS, FV__COUNT_NUMBER, FV__COUNT_HALF } fv__count_of;
typedef enum fv__default { FV__DEFAULT_REQUIRED, FV__DEFAULT_VALUE, FV__DEFAULT_NONE, FV__DEFAULT_FREQUENCIES } fv__default;

/* The argument struct's members, the same bytes on host and device. */
typedef struct fv_floats { const float *data; int64_t count; } fv_floats;
typedef struct fv_ints { const int32_t *data; int64_t count; } fv_ints;
typedef struct fv_bits { const uint8_t *bits; const int64_t *offsets; } fv_bits;            /* offsets[request], in bits */
typedef struct fv_ranges { const int32_t *ranges; const int32_t *indptr; int64_t count; int64_t reserved; } fv_ranges;  /* indptr NULL: all `count` */
typedef struct fv_sums { float *data; int64_t stride; } fv_sums;                            /* stride: from one kv head to the next */
typedef struct fv_maxes { float *data; int64_t stride; } fv_maxes;                          /* stride: from one row to the next */

typedef struct fv__param {
    char name[24];
    fv__param_kind kind;
    fv__binding binding;
    fv__default dflt;
    double value;                       /* default of a number */
    double example;                     /* for tests */
    fv__count_of count_of;
    int32_t count;                      /* FV__COUNT_NUMBER; FV__COUNT_HALF: index of the int parameter */
    int32_t offset;                     /* of the field, in the argument struct */
    bool has_min, has_max, min_open, max_open;          /* FV_REQUIRE */
    double min, max;
} fv__param;

/* first or last visible key = position + sign * parameter; present: the variant states this bound */
typedef struct fv__bound { bool present; int8_t sign; int16_t param; } fv__bound;

typedef struct fv__variant_meta {
    char name[32];
    char formula[160];
    int num_params;
    fv__param params[FV__MAX_PARAMS];
    int args_bytes;                     /* size of the argument struct */
    uint32_t hooks;                     /* bit FV__HOOK_* */
    fv__bound first, last;
    int lifted;                         /* parameter index of FV_LIFTED, -1: none */
    bool exact;
    int pairs_dim, pairs_interleaved;   /* parameter indices of FV_PAIRS, -1: none */
    int turns;                          /* of FV_TURNS, -1: none */
} fv__variant_meta;

struct fv__cpu_hooks;                   /* cpu/hooks_abi.h */
struct fv__cpu_code;                    /* cpu/compile.h */

/* A variant that can be used: declarations, text, and compiled hooks. */
struct fv_variant {
    fv__variant_meta meta;
    const char *text;
    int builtin;                        /* place in the registry, -1: a user's */
    struct fv__cpu_code *code;          /* a user's: its hooks for the CPU level of ctx; NULL where ctx is a GPU's */
    fv_ctx *ctx;                        /* NULL: built in */
    int users;                          /* plans that use it; atomic */
};

/* The variant's hooks for a CPU level; NULL: it is not compiled for this one. */
const struct fv__cpu_hooks *fv__variant_hooks(const fv_variant *variant, const char *isa);

/* Reads the declarations of `text`. err->value is the line. */
fv_status fv__variant_parse(const char *name, const char *text, fv__variant_meta *out, fv_error *err);

/* The next name that the text #defines, from *at on; false: there is none. Texts that are compiled together must not see each other's names. */
bool fv__variant_next_define(const char **at, char name[64]);

int fv__variant_count(void);                            /* built-ins, sorted by name */
const fv_variant *fv__variant_builtin(int i);
const fv_variant *fv__variant_find(const char *name);   /* NULL: unknown */

/* A variant of one problem with its arguments bound so far. */
typedef struct fv__use {
    const fv_variant *variant;
    bool given[FV__MAX_PARAMS];         /* bound so far (not by default) */
    double planned[FV__MAX_PARAMS];     /* number that the planner counts with; a run may ask for a tighter window, never a wider one */
    _Alignas(16) unsigned char args[256];       /* the argument struct */
    float *owned;                       /* frequencies made here; freed with the problem */
} fv__use;

#endif
