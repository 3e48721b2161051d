/* SPDX-License-Identifier: Apache-2.0 */
/* companions.h -- checks that the functions of foveal/ops.h share. */
#ifndef FV__COMPANIONS_H
#define FV__COMPANIONS_H

#include "cpu/cpu_companions.h"
#include "foveal/ops.h"
#include "ops.h"

#define FV__MAX_WIDTH (1 << 24)         /* of a row that is normed or activated */

/* A tensor of 16 or 32 bits with ndim axes of the given extents (FV__ANY: any) and a last axis of 1 to max_width. */
fv_status fv__rows_view(const fv_tensor *t, const char *field, int ndim, const int64_t *shape, int64_t max_width, fv__view *out, fv_error *err);

/* i32 or i64 of these extents (ndim 1 or 2; FV__ANY: any). */
fv_status fv__ints_view(const fv_tensor *t, const char *field, int ndim, const int64_t *shape, fv__ints *out, fv_error *err);

/* A number, or a tensor [rows]: i32 or i64 when `whole`, else f32. NULL: the number `missing`. A number lies in [low, high]. */
typedef struct fv__range {
    double low, high, missing;
    bool whole;
} fv__range;

fv_status fv__setting_of(const fv_arg *arg, const char *field, int64_t rows, const fv__range *range, fv__setting *out, fv_error *err);

/* As many as a launch has blocks for. */
fv_status fv__rows_check(const fv_tensor *t, const char *field, fv_error *err);

static inline bool fv__given(const fv_tensor *t) { return t->data != NULL; }

#endif
