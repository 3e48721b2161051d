/* SPDX-License-Identifier: Apache-2.0 */
/* problem.h -- an fv_problem once it has been checked: names resolved, defaults filled in. */
#ifndef FV__PROBLEM_H
#define FV__PROBLEM_H

#include "dtype.h"
#include "variant.h"

typedef enum fv__scale_kind { FV__SCALE_NONE, FV__SCALE_TENSOR, FV__SCALE_HEAD, FV__SCALE_TOKEN_HEAD } fv__scale_kind;

typedef struct fv__problem {
    fv__dtype q, k, v, o;
    int32_t num_q_heads, num_kv_heads, group;           /* group = q heads per kv head */
    int32_t dim_qk, dim_v, qk_tail;
    float scale;
    bool v_in_k, lse_base2;
    bool tiled;                         /* pages in the order "tiles" */
    int32_t alignment;
    fv__scale_kind k_scale, v_scale;
    int32_t num_uses;
    fv__use uses[FV__MAX_VARIANTS];
    uint32_t hooks;                     /* union of the uses' hook bits */
} fv__problem;

/* Room for the frequencies that rotary variants leave to their defaults. */
typedef float fv__frequencies[FV__MAX_VARIANTS][FV__MAX_DIM / 2];

/* The second one allocates nothing: `room` lives as long as the problem. After a failure there is nothing to free. */
fv_status fv__problem_init(const fv_problem *given, fv__problem *out, fv_error *err);
fv_status fv__problem_init_in(const fv_problem *given, fv__frequencies *room, fv__problem *out, fv_error *err);
void fv__problem_free(fv__problem *problem);

/* The order of pages that `name` (`field` of a call) asks for; and whether pages of K and V that lie in tiles can be of these types, widths
 * (0: absent) and size (0: ragged). */
fv_status fv__page_order_read(const char *name, const char *field, bool *tiled, fv_error *err);
fv_status fv__page_order_types(const char *field, fv__dtype k, int32_t dim_k, fv__dtype v, int32_t dim_v, fv_error *err);
fv_status fv__page_order_size(const char *field, int32_t page_size, fv_error *err);

/* Binds one argument list (`where`: "problem.variants[2].args", "batch.args", "tensors.args"). Binding an argument that is due later is
 * early binding; one that was due earlier is refused. Names that no variant and none of `others` takes are refused. */
typedef struct fv__bind_shape {         /* what arrays are checked against */
    int64_t num_requests, total_rows, total_keys, max_rows;
    const int64_t *bits_offsets;        /* [num_requests + 1] of FV_BITS parameters, in bits; NULL before the batch is known */
    int64_t mask_rows, mask_keys;       /* of the only request, for messages; -1: several requests */
} fv__bind_shape;

fv_status fv__problem_bind(fv__problem *problem, fv__binding when, const char *where, const fv_arg *args, int num_args,
                           const char *const *others, int num_others, const fv__bind_shape *shape, fv_error *err);

/* The parts of fv__problem_init: defaults of one variant's parameters, and the arguments that the problem itself gives it. */
void fv__use_defaults(fv__use *use);
fv_status fv__use_bind(fv__problem *problem, int use, const char *where, const fv_arg *args, int num_args, fv_error *err);

/* Every parameter due at `when` or before has a value: else refused by name. */
fv_status fv__problem_bound(const fv__problem *problem, fv__binding when, fv_error *err);

/* The values of range lists, where they lie on the host: offsets within the list, ranges ascending. Kernels and planner rely on it. */
fv_status fv__problem_check_ranges(const fv__problem *problem, int64_t num_requests, fv_error *err);

/* Likewise the rows that those of a request name as their parents: -1, or one before. */
fv_status fv__problem_check_parents(const fv__problem *problem, int64_t request, int64_t first_row, int64_t num_rows, fv_error *err);

/* The larger of these is what a batch's bits need: `request` rows x keys, from a byte border. */
bool fv__problem_has_bits(const fv__problem *problem);

#endif
