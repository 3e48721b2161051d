/* SPDX-License-Identifier: Apache-2.0 */
/* spec.h -- kernels against the definitions that variants' texts carry (#ifdef FV_SPEC): any variants, any CPU level or GPU, one row, key and element
 * at a time in double. Inputs, and arguments for every parameter that the texts declare, are made here.
 *
 *     s = each FV_SCORE of scale * dot(each FV_QUERY of q, each FV_KEY of k_j)          visible: every FV_VISIBLE says yes
 *     o = sum exp(s_j - lse) FV_VALUE(v_j), or sum FV_WEIGHT(s_j) FV_VALUE(v_j); then each FV_OUTPUT
 *     key sums = sum over rows and the heads of a group of FV_KEY_SUM(exp(s_j - lse))
 *     row max = FV_ROW_MAX(max of the visible s_j)
 *
 * Bounds (FV_FIRST_KEY and so on) are not used: that they agree with FV_VISIBLE is a part of what is checked. */
#ifndef FOVEAL_TESTS_SPEC_H
#define FOVEAL_TESTS_SPEC_H

#include "foveal/foveal.h"

enum { SPEC_MAX_REQUESTS = 8, SPEC_MAX_USES = 4 };

typedef struct spec_shape {
    const char *name;
    const char *type, *kv_type;         /* of q and o; of k and v, NULL: the same */
    int q_heads, kv_heads, dim_qk, dim_v;
    int num_requests;
    int rows[SPEC_MAX_REQUESTS], keys[SPEC_MAX_REQUESTS];       /* rows may be more than keys */
    int first_position;
    int page;                           /* 0: ragged */
    int shared_pages;                   /* the first so many pages are those of request 0, found by the planner */
    int splits;
    bool invariant, lse_base2;
} spec_shape;

/* Decode, prefill, pages, ragged, splits, shared prefixes, invariant; 16-bit and 8-bit types. The last has no name. */
extern const spec_shape spec_shapes[];

typedef struct spec_result {
    double error;                       /* largest |o - definition| */
    double share;                       /* largest error of o, lse or key sums as a share of what rounding allows: fine up to 1 */
    double lse_error, sums_error;
    int64_t values;                     /* compared */
    int64_t seen;                       /* rows and heads that see a key, of all that were compared */
    char worst[160];                    /* where the largest share is, in words */
    char kernel[64];
} spec_result;

/* One run of `uses`, by any thread (by name or handle, in this order; their args are not used) on `shape`. A status that is not FV_OK: no result. */
fv_status spec_compare(fv_ctx *ctx, const fv_variant_use *uses, int num_uses, const spec_shape *shape, spec_result *out, fv_error *err);

/* Median milliseconds of one run, measured for about `seconds`. */
fv_status spec_time(fv_ctx *ctx, const fv_variant_use *uses, int num_uses, const spec_shape *shape, double seconds, double *ms, fv_error *err);

/* Compiles the definition alone: a fault in it is told as by fv_variant_create. */
fv_status spec_compile(fv_ctx *ctx, const fv_variant *variant, fv_error *err);

/* CPU level i, ascending, of those that this library has; NULL: there is none. *available: the machine has it. */
const char *spec_level(int i, bool *available);

/* Is there a built-in variant of this name? */
bool spec_is_builtin(const char *name);

/* Hooks of a variant in words, "score, visible"; its formula. */
const char *spec_formula(const fv_variant *variant);
void spec_hooks(const fv_variant *variant, char *words, size_t size);

#endif
