/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h -- the CPU backend: one table of functions per instruction set level, compiled from the same *_tmpl.c texts.
 *
 * ONE FILE IN src/cpu/isa/ = ONE LEVEL. The build reads two comment lines of it (` * arch:` and ` * cflags:`), compiles every *_tmpl.c once for it
 * and lists the levels in gen/isas.inc as FV_ISA(name) lines. Tables are chosen at run time: the highest rank that the machine has,
 * masked by fv_open_desc.cpu_isa or FV_CPU. */
#ifndef FV__CPU_H
#define FV__CPU_H

#include "../run.h"
#include "hooks_abi.h"

/* What a level may need of the machine: bits of fv__cpu_features. */
#define FV__CPU_HAS_AVX2        1u
#define FV__CPU_HAS_FMA         2u
#define FV__CPU_HAS_F16C        4u
#define FV__CPU_HAS_AVX512      8u          /* F, BW, DQ, VL */
#define FV__CPU_HAS_AVX512BF16  16u
#define FV__CPU_HAS_AVX512FP16  32u
#define FV__CPU_HAS_AMX_BF16    64u
#define FV__CPU_HAS_AMX_INT8    128u
uint32_t fv__cpu_features(void);        /* what the machine has and the system has switched on */

/* Append, rope and merge jobs, split over threads by row (cpu_ops.h declares their descriptors). */
struct fv__append_job;
struct fv__rope_job;
struct fv__merge_job;
/* The companions (cpu_companions.h), likewise. */
struct fv__norm_job;
struct fv__act_job;
struct fv__filter_job;
struct fv__sample_job;
struct fv__verify_job;

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
    void (*norm_rows)(const struct fv__norm_job *job, int64_t first, int64_t last);
    void (*act_rows)(const struct fv__act_job *job, int64_t first, int64_t last);
    void (*filter_rows)(const struct fv__filter_job *job, int64_t first, int64_t last);
    void (*sample_rows)(const struct fv__sample_job *job, int64_t first, int64_t last);
    void (*verify_rows)(const struct fv__verify_job *job, int64_t first, int64_t last);
    const fv__cpu_hooks *hooks;         /* [fv__variant_count()] of the built-ins, in registry order */
} fv__cpu_isa;

int fv__cpu_isa_count(void);
const fv__cpu_isa *fv__cpu_isa_at(int i);               /* ascending rank; listed whether or not the machine has it */
/* The best level of the machine, or the one named. NULL and an error when it is unknown or missing. */
const fv__cpu_isa *fv__cpu_isa_choose(const char *name, fv_error *err);

#endif
