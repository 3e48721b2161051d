/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h -- what append, rope, merge and copies share: argument checks, and rows split over the
 * context's threads. */
#ifndef FV__OPS_H
#define FV__OPS_H

#include "cpu/cpu.h"
#include "cpu/cpu_ops.h"
#include "ctx.h"

/* The type that a tensor names (these calls have no problem that could). `narrow`: types of 8 and 4
 * bits are allowed. */
fv_status fv__ops_dtype(const fv_tensor *t, const char *field, bool narrow, fv__dtype *out,
                        fv_error *err);

/* [rows, heads, width] of a type that the tensor names; heads and width of 1 up to the library's
 * limits, or FV__ANY's place taken. */
fv_status fv__ops_rows(const fv_tensor *t, const char *field, int64_t heads, int64_t width,
                       fv__view *out, fv_error *err);

/* fv_rope_desc (NULL: none) for rows of `width` elements. */
fv_status fv__rotary_init(const fv_rope_desc *desc, const char *field, int32_t width,
                          fv__rotary *out, fv_error *err);

/* Is this array read by kernels, where the caller has it on the device? */
static inline bool fv__ops_on_device(const fv_ctx *ctx, const fv_index *x)
{
    return ctx->cuda && x->device;
}

/* Positions lie within +-2^30 where the host can see them; the array has an entry for each of
 * `rows`. On a GPU the device's copy will do. */
fv_status fv__positions_check(const fv_ctx *ctx, const fv_index *positions, const char *field,
                              int64_t rows, fv_error *err);

/* rows(job, first, last) over [0, n), cut so that each part is worth a thread; bytes: that one row
 * moves. */
void fv__ops_split(fv_ctx *ctx, void (*rows)(const void *job, int64_t first, int64_t last),
                   const void *job, int64_t n, int64_t bytes);

#endif
