/* SPDX-License-Identifier: Apache-2.0 */
/* isa_tmpl.c -- a level's table: what the other templates define for it. Data only: no code of the level runs before it is chosen. */
#include "cpu.h"
#include "vocabulary.h"

bool V_NAME(fv__available)(void);       /* cpu.c: the machine has what V_ISA_NEEDS says */
fv_status V_NAME(fv__attend_shape)(const fv__problem *, const fv_plan_desc *, int, fv__kernel_shape *, fv_error *);
size_t V_NAME(fv__attend_scratch)(const fv__problem *, const fv__kernel_shape *);
void V_NAME(fv__attend)(const fv__run *, const fv__kernel_shape *, int, void *);
void V_NAME(fv__key_sums)(const fv__run *, const fv__kernel_shape *, int, int, void *);
void V_NAME(fv__append_rows)(const struct fv__append_job *, int64_t, int64_t);
void V_NAME(fv__rope_rows)(const struct fv__rope_job *, int64_t, int64_t);
void V_NAME(fv__merge_rows)(const struct fv__merge_job *, int64_t, int64_t);
void V_NAME(fv__norm_rows)(const struct fv__norm_job *, int64_t, int64_t);
void V_NAME(fv__act_rows)(const struct fv__act_job *, int64_t, int64_t);
void V_NAME(fv__filter_rows)(const struct fv__filter_job *, int64_t, int64_t);
void V_NAME(fv__sample_rows)(const struct fv__sample_job *, int64_t, int64_t);
void V_NAME(fv__verify_rows)(const struct fv__verify_job *, int64_t, int64_t);
extern const fv__cpu_hooks V_NAME(fv__cpu_hooks)[];

extern const uint32_t V_NAME(fv__isa_needs);
extern const fv__cpu_isa V_NAME(fv__cpu_isa);
const uint32_t V_NAME(fv__isa_needs) = V_ISA_NEEDS;
const fv__cpu_isa V_NAME(fv__cpu_isa) = {
    .name = V_TEXT(FV_ISA_NAME),
    .rank = V_ISA_RANK,
    .available = V_NAME(fv__available),
    .shape = V_NAME(fv__attend_shape),
    .scratch_bytes = V_NAME(fv__attend_scratch),
    .attend = V_NAME(fv__attend),
    .key_sums = V_NAME(fv__key_sums),
    .append_rows = V_NAME(fv__append_rows),
    .rope_rows = V_NAME(fv__rope_rows),
    .merge_rows = V_NAME(fv__merge_rows),
    .norm_rows = V_NAME(fv__norm_rows),
    .act_rows = V_NAME(fv__act_rows),
    .filter_rows = V_NAME(fv__filter_rows),
    .sample_rows = V_NAME(fv__sample_rows),
    .verify_rows = V_NAME(fv__verify_rows),
    .hooks = V_NAME(fv__cpu_hooks),
};
