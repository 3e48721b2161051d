/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.h -- a checked view: what is left of an fv_tensor once it has been validated against the shape that a call expects. */
#ifndef FV__TENSOR_H
#define FV__TENSOR_H

#include "dtype.h"
#include "status.h"

/* Element [i0, i1, i2, d] is at element i0*stride[0] + i1*stride[1] + i2*stride[2] + d of `data`. Strides of axes of extent 1 are 0.
 * Ragged K, and Q, O: stride[0] row or token, stride[1] head, stride[2] 0. Paged K: page, token in the page, head. */
typedef struct fv__view {
    char *data;                         /* NULL: absent */
    int64_t stride[3];                  /* in elements */
    int64_t extent;                     /* of axis 0: rows, tokens or pages; what an index is clamped to */
    fv__dtype dtype;
    int32_t width;                      /* of the last axis */
} fv__view;

#define FV__ANY (-1)

/* Checks `t` (named `field`): present, aligned to its elements, `ndim` axes of the extents in `shape` (FV__ANY: any, and then >= 0), last axis contiguous, dtype `dtype`
 * (t->dtype NULL or equal). shape[ndim - 1] is the width. */
fv_status fv__tensor_view(const fv_tensor *t, const char *field, fv__dtype dtype, int ndim, const int64_t *shape, fv__view *out,
                          fv_error *err);

/* The type and the width of the block scales of rows of `dim` elements; int4: `t` is as wide as its groups say. dim is a whole number of groups of 16
 * (fp4_e2m1) or 32 (int4). */
fv_status fv__block_scale_shape(const fv_tensor *t, const char *field, fv__dtype type, int32_t dim, fv__dtype *scale, int32_t *width, fv_error *err);

/* Elements of `bytes` bytes (a power of two) must lie at multiples of that: kernels load them as such. */
fv_status fv__aligned_check(const void *data, int64_t bytes, const char *field, fv_error *err);

/* What a call writes: its rows (of the last axis) may not overlap. Absent is fine. */
fv_status fv__tensor_written(const fv_tensor *t, const char *field, fv_error *err);

/* One entry of an index array on the host. Type and stride were checked. */
static inline int64_t fv__index_at(const fv_index *x, int64_t i)
{
    return x->type == FV_INDEX_I32 ? ((const int32_t *)x->host)[i * x->stride] : ((const int64_t *)x->host)[i * x->stride];
}

/* With a pointer but no type it is given, and fv__index_check refuses it. */
static inline bool fv__index_given(const fv_index *x) { return x->type != FV_INDEX_NONE || x->host || x->device; }

/* Type, alignment, stride, count (>= `count` entries; exactly when `exact`), a host pointer when `host`. */
fv_status fv__index_check(const fv_index *x, const char *field, int64_t count, bool exact, bool host, fv_error *err);

#endif
