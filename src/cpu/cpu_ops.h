/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ops.h -- the jobs of append, rope and merge: checked, ready to be split over threads by row. */
#ifndef FV__CPU_OPS_H
#define FV__CPU_OPS_H

#include "../run.h"

/* Tells the error word: the first fault is described, all are counted. */
static inline void fv__fault_add(fv__faults *faults, fv_fault what, int64_t request, int64_t slot, int64_t value, int64_t count)
{
    if (__atomic_fetch_add(&faults->count, count, __ATOMIC_RELAXED)) return;
    faults->request = (int32_t)request;
    faults->slot = slot;
    faults->value = value;
    __atomic_store_n(&faults->what, (int32_t)what, __ATOMIC_RELEASE);
}

typedef struct fv__rotary {             /* fv_rope_desc once checked; frequencies are the job's */
    int32_t dim;                        /* rotary_dim; 0: none */
    bool interleaved;
    float frequencies[FV__MAX_DIM / 2];
} fv__rotary;

typedef struct fv__rope_job {           /* rows of x into y */
    fv__view x, y;                      /* [rows, heads, dim] */
    int32_t num_heads;
    const fv_index *positions;          /* [rows] */
    fv__rotary rotary;
} fv__rope_job;

typedef struct fv__merge_job {
    fv__view o, lse;                    /* [rows, heads, dim], [rows, heads] (stride[0], stride[1]) */
    const fv__view *o_states, *lse_states;      /* [num_states] */
    int32_t num_states, num_heads;
    bool base2;
} fv__merge_job;

typedef struct fv__append_job {
    fv__view new_k, new_v, new_k_tail;  /* data NULL: absent */
    fv__view k, v, k_tail;              /* the cache: paged [page, token, head, dim] or ragged [token, head, dim] */
    fv__view k_block_scale, v_block_scale;
    fv__scale k_scale, v_scale;         /* token_head: data is written */
    fv__view q, q_out;
    int32_t num_kv_heads, num_q_heads;
    fv__rotary rotary;
    const int64_t *slots;               /* [rows] token slot of each row; -1: skip (made on the host by fv_append, or the caller's) */
    const int64_t *v_slots;             /* V's, where its pages differ from K's; NULL: the same */
    const int32_t *positions;           /* [rows] to turn by; NULL without rotation */
    const int32_t *requests;            /* [rows] for the error word; NULL */
    int32_t page_size;                  /* 0: ragged */
    int64_t num_slots;                  /* capacity in tokens */
    bool tiled;                         /* pages in the order "tiles" of fv_problem */
    bool checked;
    fv__faults *faults;
} fv__append_job;

#endif
