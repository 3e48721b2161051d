/* SPDX-License-Identifier: Apache-2.0 */
/* run.h -- what all pieces of one fv_run share: checked views, scales, bound arguments, scratch. Made by fv_run on its stack, read by a backend's kernel. */
#ifndef FV__RUN_H
#define FV__RUN_H

#include "plan.h"
#include "problem.h"
#include "tensor.h"

/* The error word, updated by kernels with atomics: the first fault wins, all are counted. */
typedef struct fv__faults {
    int32_t what, request;
    int64_t slot, value, count;
} fv__faults;

/* Page ids as the batch gave them. entry e: ids[e * stride], compared with num_pages where it is loaded. */
typedef struct fv__ids {
    const void *data;                   /* NULL: ragged */
    int64_t stride;
    bool is64;
} fv__ids;

typedef struct fv__scale {              /* K or V scale of a run */
    fv__scale_kind kind;
    float number;                       /* FV__SCALE_TENSOR */
    const float *data;                  /* FV__SCALE_HEAD: [num_kv_heads] with stride[0]; FV__SCALE_TOKEN_HEAD: strides as the view's axes */
    int64_t stride[3];
} fv__scale;

typedef struct fv__run {
    const fv__problem *problem;
    const fv__plan_head *plan;
    fv__view q, q_tail, k, k_tail, v, o, lse;
    fv__view k_block_scale, v_block_scale;              /* fp4: e4m3 [.., dim / 16]; int4: f16 [.., 2 dim / group] */
    fv__scale k_scale, v_scale;
    fv__ids ids, v_ids;
    const fv_index *row_positions;      /* host values, or NULL */
    const void *args[FV__MAX_VARIANTS]; /* argument structs of problem->uses, all bindings filled in */
    int32_t max_key_span;               /* unused by kernels; for checks */
    bool checked;
    float *partials;                    /* num_slots slots of kernel_shape.partial_bytes */
    int32_t *tickets;                   /* [num_records], 0 before and after a run */
    int32_t *queue;                     /* CPU: pieces taken so far, where the plan is a queue */
    fv__faults *faults;
    void *scratch;                      /* workers x scratch_bytes */
    size_t scratch_bytes;               /* per worker */
    float *key_sums;                    /* second output or NULL */
} fv__run;

#endif
