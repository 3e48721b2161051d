/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h -- the CPU backend: one table of functions per instruction set level, compiled from the same *_tmpl.c texts.
 *
 * ONE FILE IN src/cpu/isa/ = ONE LEVEL. The build reads two comment lines of it (` * arch:` and ` * cflags:`), compiles every *_tmpl.c once for it
 * and lists the levels in gen/isas.inc as FV_ISA(name) lines. Tables are chosen at run time: the highest rank that the machine has,
 * masked by fv_open_desc.cpu_isa or FV_CPU. */
#ifndef FV__CPU_H
#define FV__CPU_H

#include "../run.h"

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
} fv__cpu_hooks;

/* Append, rope and merge jobs, split over threads by row (cpu_ops.h declares their descriptors). */
struct fv__append_job;
struct fv__rope_job;
struct fv__merge_job;

typedef struct fv__cpu_isa {
    const char *name;
    int rank;
    bool (*available)(void);            /* on this machine */

    /* What the planner needs to know for this problem; workers: threads available. FV_E_UNSUPPORTED with reasons in err->text. */
    fv_status (*shape)(const fv__problem *problem, const fv_plan_desc *limits, int workers, fv__kernel_shape *out, fv_error *err);
    size_t (*scratch_bytes)(const fv__problem *problem, const fv__kernel_shape *shape);      /* per worker */
    /* Does all pieces of `worker`, and the merges whose last piece it is. */
    void (*attend)(const fv__run *run, const fv__kernel_shape *shape, int worker, void *scratch);
    /* Second pass of FV_KEY_SUM: lse has been written; part `part` of `num_parts` of the keys, fixed order. */
    void (*key_sums)(const fv__run *run, const fv__kernel_shape *shape, int part, int num_parts, void *scratch);

    void (*append_rows)(const struct fv__append_job *job, int64_t first, int64_t last);
    void (*rope_rows)(const struct fv__rope_job *job, int64_t first, int64_t last);
    void (*merge_rows)(const struct fv__merge_job *job, int64_t first, int64_t last);
    const fv__cpu_hooks *hooks;         /* [fv__variant_count()] of the built-ins, in registry order */
} fv__cpu_isa;

int fv__cpu_isa_count(void);
const fv__cpu_isa *fv__cpu_isa_at(int i);               /* ascending rank; listed whether or not the machine has it */
/* The best level of the machine, or the one named. NULL and an error when it is unknown or missing. */
const fv__cpu_isa *fv__cpu_isa_choose(const char *name, fv_error *err);

#endif
