/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.c -- checks of tensors and index arrays. Every refusal names the field, what was given and what was expected. */
#include "tensor.h"

#include <stdio.h>
#include <string.h>

static fv_status wrong_dtype(const fv_tensor *t, const char *field, fv__dtype expected, fv_error *err)
{
    return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s has element type %s; expected %s", field, t->dtype,
                    fv__dtypes[expected].name);
}

enum { REACH_BITS = 54 };               /* no memory holds elements farther apart; arithmetic on them cannot overflow */

/* Does x (n - 1) reach out of what arithmetic holds? n >= 1. */
static bool reaches_out(int64_t x, int64_t n)
{
    const int64_t limit = (int64_t)1 << REACH_BITS;
    return x < -limit || x > limit || (n > 1 && (x < 0 ? -x : x) > limit / (n - 1));
}

/* Strides that kernels can use: the last axis dense; whole bytes between the starts of rows; nothing out of reach. */
static fv_status check_strides(const fv_tensor *t, const char *field, fv__dtype dtype, fv_error *err)
{
    const int last = t->ndim - 1;
    for (int i = 0; i < last; i++)
        if (t->shape[i] > 1 && reaches_out(t->stride[i], t->shape[i]))
            return fv__fail(err, FV_E_INVALID, field, t->stride[i], (int64_t)1 << REACH_BITS,
                            "axis %d of %s has %lld entries %lld elements apart: out of reach of any memory", i, field, (long long)t->shape[i],
                            (long long)t->stride[i]);
    if (t->shape[last] > 1 && t->stride[last] != 1)
        return fv__fail(err, FV_E_INVALID, field, t->stride[last], 1, "the last axis of %s has stride %lld; it must be contiguous (1)", field,
                        (long long)t->stride[last]);
    for (int i = 0; i < last; i++)
        if (fv__dtypes[dtype].bits < 8 && t->shape[i] > 1 && t->stride[i] % 2)
            return fv__fail(err, FV_E_INVALID, field, t->stride[i], 2,
                            "axis %d of %s has stride %lld; with 4-bit elements strides must be even (two elements a byte)", i, field,
                            (long long)t->stride[i]);
    return FV_OK;
}

static fv_status check_shape(const fv_tensor *t, const char *field, int ndim, const int64_t *shape, fv_error *err)
{
    if (t->ndim != ndim)
        return fv__fail(err, FV_E_INVALID, field, t->ndim, ndim, "%s has %d axes; expected %d", field, t->ndim, ndim);
    for (int i = 0; i < ndim; i++) {
        if (t->shape[i] < 0)
            return fv__fail(err, FV_E_INVALID, field, t->shape[i], 0, "axis %d of %s has the negative extent %lld", i, field,
                            (long long)t->shape[i]);
        if (shape[i] != FV__ANY && t->shape[i] != shape[i])
            return fv__fail(err, FV_E_INVALID, field, t->shape[i], shape[i], "axis %d of %s has extent %lld; expected %lld", i, field,
                            (long long)t->shape[i], (long long)shape[i]);
    }
    return FV_OK;
}

fv_status fv__aligned_check(const void *data, int64_t bytes, const char *field, fv_error *err)
{
    const int64_t off = (int64_t)((uintptr_t)data % (uintptr_t)bytes);
    if (!off) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, off, bytes, "%s lies %lld bytes behind a multiple of its element size, %lld bytes; it must be aligned",
                    field, (long long)off, (long long)bytes);
}

fv_status fv__tensor_view(const fv_tensor *t, const char *field, fv__dtype dtype, int ndim, const int64_t *shape, fv__view *out,
                          fv_error *err)
{
    if (t->reserved)
        return fv__fail(err, FV_E_INVALID, field, t->reserved, 0, "the reserved word of %s must be 0", field);
    if (!t->data)
        return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is missing (data is NULL)", field);
    if (t->dtype && strcmp(t->dtype, fv__dtypes[dtype].name) != 0) return wrong_dtype(t, field, dtype, err);
    FV_TRY(fv__aligned_check(t->data, fv__div_up(fv__dtypes[dtype].bits, 8), field, err));
    FV_TRY(check_shape(t, field, ndim, shape, err));
    FV_TRY(check_strides(t, field, dtype, err));

    *out = (fv__view){ .data = t->data, .extent = t->shape[0], .dtype = dtype, .width = (int32_t)t->shape[ndim - 1] };
    for (int i = 0; i < ndim - 1; i++) out->stride[i] = t->shape[i] > 1 ? t->stride[i] : 0;
    return FV_OK;
}

fv_status fv__block_scale_shape(const fv_tensor *t, const char *field, fv__dtype type, int32_t dim, fv__dtype *scale, int32_t *width, fv_error *err)
{
    *scale = type == FV__DTYPE_int4 ? FV__DTYPE_f16 : FV__DTYPE_fp8_e4m3;
    *width = dim / 16;                                                          /* int4: a pair for 32 */
    if (type != FV__DTYPE_int4 || !t->data || t->ndim < 1 || t->ndim > FV_MAX_DIMS) return FV_OK;       /* fv__tensor_view has words for that */
    const int64_t given = t->shape[t->ndim - 1];
    if (dim % 64 == 0 && given == dim / 32) *width = dim / 32;
    if (given == *width) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, given, *width, dim % 64 ?
                    "the last axis of %s has extent %lld; int4 rows of %d elements have pairs (scale, zero) for groups of 32: %d" :
                    "the last axis of %s has extent %lld; int4 rows of %d elements have pairs (scale, zero) for groups of 32: %d, or of 64: %d",
                    field, (long long)given, dim, dim / 16, dim / 32);
}

fv_status fv__tensor_written(const fv_tensor *t, const char *field, fv_error *err)
{
    const int last = t->ndim - 1;
    if (!t->data || t->ndim < 1 || t->ndim > FV_MAX_DIMS) return FV_OK;         /* fv__tensor_view has words for that */
    for (int i = 0; i <= last; i++)
        if (t->shape[i] == 0) return FV_OK;                                     /* nothing is written */
    for (int i = 0; i < last; i++)
        if (t->shape[i] > 1 && t->stride[i] > -t->shape[last] && t->stride[i] < t->shape[last])
            return fv__fail(err, FV_E_INVALID, field, t->stride[i], t->shape[last],
                            "axis %d of %s has stride %lld; it is written, and its rows of %lld elements may not overlap", i, field,
                            (long long)t->stride[i], (long long)t->shape[last]);
    return FV_OK;
}

fv_status fv__index_check(const fv_index *x, const char *field, int64_t count, bool exact, bool host, fv_error *err)
{
    if (x->type != FV_INDEX_I32 && x->type != FV_INDEX_I64)
        return fv__fail(err, FV_E_INVALID, field, x->type, FV_INDEX_I64, "%s is missing, or its type %d is neither FV_INDEX_I32 nor FV_INDEX_I64",
                        field, (int)x->type);
    if (x->reserved) return fv__fail(err, FV_E_INVALID, field, x->reserved, 0, "the reserved word of %s must be 0", field);
    const int64_t bytes = x->type == FV_INDEX_I32 ? 4 : 8;
    FV_TRY(fv__aligned_check(x->host, bytes, field, err));
    FV_TRY(fv__aligned_check(x->device, bytes, field, err));
    if (x->stride < 1)
        return fv__fail(err, FV_E_INVALID, field, x->stride, 1, "%s has stride %lld; entries lie 1 or more apart", field, (long long)x->stride);
    if (reaches_out(x->stride, x->count > 1 ? x->count : 1))
        return fv__fail(err, FV_E_INVALID, field, x->stride, (int64_t)1 << REACH_BITS, "%s has entries %lld apart: out of reach of any memory", field,
                        (long long)x->stride);
    if (x->count < 0 || x->count < count || (exact && x->count != count))
        return fv__fail(err, FV_E_INVALID, field, x->count, count, "%s has %lld entries; expected %s%lld", field, (long long)x->count,
                        exact ? "" : "at least ", (long long)count);
    if (host && !x->host && count > 0)
        return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s has no host pointer; this call reads it on the host", field);
    return FV_OK;
}
