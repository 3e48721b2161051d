/* SPDX-License-Identifier: Apache-2.0 */
/* norm.c -- fv_rmsnorm, fv_layernorm, fv_act_and_mul and the checks of foveal/ops.h: arguments checked, a job made, its rows split over threads
 * or launched on the GPU (cuda/companions.c). */
#include "companions.h"
#include "cuda/companions.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------------------- checks */

fv_status fv__rows_check(const fv_tensor *t, const char *field, fv_error *err)
{
    if (t->shape[0] <= INT32_MAX) return FV_OK;
    return fv__fail(err, FV_E_CAPACITY, field, t->shape[0], INT32_MAX, "%s has %lld rows; at most %d in a call", field, (long long)t->shape[0],
                    INT32_MAX);
}

fv_status fv__rows_view(const fv_tensor *t, const char *field, int ndim, const int64_t *shape, int64_t max_width, fv__view *out, fv_error *err)
{
    fv__dtype dtype;
    if (!fv__given(t)) return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is missing (data is NULL)", field);
    FV_TRY(fv__ops_dtype(t, field, false, &dtype, err));
    FV_TRY(fv__tensor_view(t, field, dtype, ndim, shape, out, err));
    const int64_t width = t->shape[ndim - 1];
    if (width < 1 || width > max_width)
        return fv__fail(err, FV_E_INVALID, field, width, max_width, "rows of %s have %lld elements; 1 to %lld", field, (long long)width,
                        (long long)max_width);
    return fv__rows_check(t, field, err);
}

fv_status fv__ints_view(const fv_tensor *t, const char *field, int ndim, const int64_t *shape, fv__ints *out, fv_error *err)
{
    const bool wide = t->dtype && !strcmp(t->dtype, "i64");
    if (t->reserved) return fv__fail(err, FV_E_INVALID, field, t->reserved, 0, "the reserved word of %s must be 0", field);
    if (!fv__given(t)) return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is missing (data is NULL)", field);
    if (!wide && (!t->dtype || strcmp(t->dtype, "i32") != 0))
        return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is %.24s; it must be i32 or i64", field, t->dtype ? t->dtype : "of no type");
    FV_TRY(fv__aligned_check(t->data, wide ? 8 : 4, field, err));
    if (t->ndim != ndim) return fv__fail(err, FV_E_INVALID, field, t->ndim, ndim, "%s has %d axes; expected %d", field, t->ndim, ndim);
    *out = (fv__ints){ .data = t->data, .wide = wide };
    for (int i = 0; i < ndim; i++) {
        if (shape[i] != FV__ANY && t->shape[i] != shape[i])
            return fv__fail(err, FV_E_INVALID, field, t->shape[i], shape[i], "axis %d of %s has extent %lld; expected %lld", i, field,
                            (long long)t->shape[i], (long long)shape[i]);
        out->stride[i] = t->shape[i] > 1 ? t->stride[i] : 0;
    }
    return FV_OK;
}

static fv_status param_tensor(const fv_tensor *t, const char *field, int64_t rows, bool whole, fv__setting *out, fv_error *err)
{
    if (whole) {
        fv__ints x = { 0 };
        FV_TRY(fv__ints_view(t, field, 1, &rows, &x, err));
        *out = (fv__setting){ .data = x.data, .stride = x.stride[0], .kind = x.wide ? FV__SETTING_I64 : FV__SETTING_I32 };
        return FV_OK;
    }
    if (t->reserved) return fv__fail(err, FV_E_INVALID, field, t->reserved, 0, "the reserved word of %s must be 0", field);
    if (!fv__given(t)) return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is missing (data is NULL)", field);
    if (!t->dtype || strcmp(t->dtype, "f32") != 0)
        return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is %.24s; it must be f32", field, t->dtype ? t->dtype : "of no type");
    FV_TRY(fv__aligned_check(t->data, 4, field, err));
    if (t->ndim != 1) return fv__fail(err, FV_E_INVALID, field, t->ndim, 1, "%s has %d axes; expected 1", field, t->ndim);
    if (t->shape[0] != rows)
        return fv__fail(err, FV_E_INVALID, field, t->shape[0], rows, "%s has %lld entries; expected %lld, one a row", field, (long long)t->shape[0],
                        (long long)rows);
    *out = (fv__setting){ .data = t->data, .stride = rows > 1 ? t->stride[0] : 0, .kind = FV__SETTING_F32 };
    return FV_OK;
}

fv_status fv__setting_of(const fv_arg *arg, const char *field, int64_t rows, const fv__range *range, fv__setting *out, fv_error *err)
{
    *out = (fv__setting){ .number = arg ? arg->number : range->missing };
    if (!arg) return FV_OK;
    if (arg->reserved) return fv__fail(err, FV_E_INVALID, field, (int64_t)arg->reserved, 0, "the reserved word of %s must be 0", field);
    if (arg->tensor) return param_tensor(arg->tensor, field, rows, range->whole, out, err);
    if (!(arg->number >= range->low && arg->number <= range->high))
        return fv__fail(err, FV_E_INVALID, field, isfinite(arg->number) ? (int64_t)fmax(fmin(arg->number, 1e18), -1e18) : 0, (int64_t)range->low,
                        "%s is %g; it must be %g to %g", field, arg->number, range->low, range->high);
    if (range->whole && arg->number != floor(arg->number))
        return fv__fail(err, FV_E_INVALID, field, (int64_t)arg->number, 0, "%s is %g; it must be a whole number", field, arg->number);
    return FV_OK;
}

static fv_status missing(const char *name, fv_error *err) { return fv__fail(err, FV_E_INVALID, name, 0, 0, "%s is NULL", name); }

/* -------------------------------------------------------------------------------------------------------------- norms */

typedef struct norm_call {
    const fv__cpu_isa *isa;
    fv__norm_job job;
} norm_call;

static void norm_rows(const void *argument, int64_t first, int64_t last)
{
    const norm_call *call = argument;
    call->isa->norm_rows(&call->job, first, last);
}

/* [rows, width] is [rows, 1 head, width]. */
static fv_status norm_view(const fv_tensor *t, const char *field, const fv_tensor *like, fv__view *out, fv_error *err)
{
    const int ndim = like ? like->ndim : t->ndim;
    int64_t shape[FV_MAX_DIMS] = { FV__ANY, FV__ANY, FV__ANY };
    if (ndim != 2 && ndim != 3)
        return fv__fail(err, FV_E_INVALID, field, ndim, 2, "%s has %d axes; expected 2 (rows, elements) or 3 (rows, heads, elements)", field, ndim);
    for (int i = 0; like && i < ndim; i++) shape[i] = like->shape[i];
    return fv__rows_view(t, field, ndim, shape, FV__MAX_WIDTH, out, err);
}

static fv_status vector_view(const fv_tensor *t, const char *field, int64_t width, fv__view *out, fv_error *err)
{
    return fv__rows_view(t, field, 1, &width, FV__MAX_WIDTH, out, err);
}

static fv_status norm_init(const fv_norm_desc *d, bool centred, fv__norm_job *job, fv_error *err)
{
    const float eps = (float)d->eps;
    FV_TRY(norm_view(&d->x, "desc.x", NULL, &job->x, err));
    FV_TRY(norm_view(&d->y, "desc.y", &d->x, &job->y, err));
    if (fv__given(&d->residual)) {
        FV_TRY(norm_view(&d->residual, "desc.residual", &d->x, &job->residual, err));
        if (job->residual.dtype != job->x.dtype)
            return fv__fail(err, FV_E_INVALID, "desc.residual", 0, 0, "desc.residual is %s and desc.x %s; they must agree", d->residual.dtype,
                            d->x.dtype);
    }
    FV_TRY(vector_view(&d->weight, "desc.weight", job->x.width, &job->weight, err));
    if (fv__given(&d->bias)) FV_TRY(vector_view(&d->bias, "desc.bias", job->x.width, &job->bias, err));
    if (!(eps >= 0) || isinf(eps))
        return fv__fail(err, FV_E_INVALID, "desc.eps", 0, 0, "desc.eps is %g; it must be finite and not negative", d->eps);
    job->num_heads = d->x.ndim == 3 ? (int32_t)d->x.shape[1] : 1;
    job->eps = eps;
    job->plus_one = d->plus_one;
    job->centred = centred;
    return FV_OK;
}

static fv_status norm(fv_ctx *ctx, const fv_norm_desc *d, bool centred, fv_stream stream, fv_error *err)
{
    if (!ctx || !d) return missing(ctx ? "desc" : "ctx", err);
    norm_call call = { .isa = ctx->isa };
    FV_TRY(fv__check_reserved(d->reserved, FV__COUNT(d->reserved), "desc.reserved", err));
    if (centred && fv__given(&d->residual)) return fv__fail(err, FV_E_INVALID, "desc.residual", 1, 0, "desc.residual is of fv_rmsnorm only");
    if (!centred && fv__given(&d->bias)) return fv__fail(err, FV_E_INVALID, "desc.bias", 1, 0, "desc.bias is of fv_layernorm only");
    const bool none = (d->x.ndim == 2 || d->x.ndim == 3) && (d->x.shape[0] == 0 || (d->x.ndim == 3 && d->x.shape[1] == 0));
    if (none) return FV_OK;             /* nothing needs to be there */
    FV_TRY(norm_init(d, centred, &call.job, err));
    const int64_t items = d->x.shape[0] * call.job.num_heads;
    if (ctx->cuda) return fv__cuda_norm_rows(ctx, &call.job, items, stream, err);
    fv__ops_split(ctx, norm_rows, &call, items, 2 * fv__dtype_bytes(call.job.x.dtype, call.job.x.width));
    return FV_OK;
}

fv_status fv_rmsnorm(fv_ctx *ctx, const fv_norm_desc *desc, fv_stream stream, fv_error *err) { return norm(ctx, desc, false, stream, err); }

fv_status fv_layernorm(fv_ctx *ctx, const fv_norm_desc *desc, fv_stream stream, fv_error *err) { return norm(ctx, desc, true, stream, err); }

/* -------------------------------------------------------------------------------------------------------- activations */

typedef struct act_call {
    const fv__cpu_isa *isa;
    fv__act_job job;
} act_call;

static void act_rows(const void *argument, int64_t first, int64_t last)
{
    const act_call *call = argument;
    call->isa->act_rows(&call->job, first, last);
}

static fv_status act_of(const char *f, fv__act *out, fv_error *err)
{
    static const char *const names[] = { [FV__ACT_SILU] = "silu", [FV__ACT_GELU] = "gelu", [FV__ACT_GELU_TANH] = "gelu_tanh" };
    for (int i = 0; i < FV__COUNT(names); i++) {
        if (strcmp(f, names[i]) != 0) continue;
        *out = (fv__act)i;
        return FV_OK;
    }
    return fv__fail(err, FV_E_INVALID, "f", 0, 0, "there is no activation \"%.24s\"; silu, gelu, gelu_tanh", f);
}

fv_status fv_act_and_mul(fv_ctx *ctx, const char *f, const fv_tensor *x, const fv_tensor *y, fv_stream stream, fv_error *err)
{
    if (!ctx || !f || !x || !y) return missing(!ctx ? "ctx" : !f ? "f" : !x ? "x" : "y", err);
    act_call call = { .isa = ctx->isa };
    FV_TRY(act_of(f, &call.job.act, err));
    if (x->ndim == 2 && x->shape[0] == 0) return FV_OK;
    FV_TRY(fv__rows_view(x, "x", 2, (int64_t[]){ FV__ANY, FV__ANY }, 2 * (int64_t)FV__MAX_WIDTH, &call.job.x, err));
    if (x->shape[1] % 2)
        return fv__fail(err, FV_E_INVALID, "x", x->shape[1], 2, "rows of x have %lld elements; it must be two halves", (long long)x->shape[1]);
    FV_TRY(fv__rows_view(y, "y", 2, (int64_t[]){ x->shape[0], x->shape[1] / 2 }, FV__MAX_WIDTH, &call.job.y, err));
    if (ctx->cuda) return fv__cuda_act_rows(ctx, &call.job, x->shape[0], stream, err);
    fv__ops_split(ctx, act_rows, &call, x->shape[0], 2 * fv__dtype_bytes(call.job.x.dtype, x->shape[1]));
    return FV_OK;
}

fv_status fv_ops_warm(fv_ctx *ctx, fv_error *err)
{
    if (!ctx) return missing("ctx", err);
    return ctx->cuda ? fv__cuda_companions_warm(ctx, err) : FV_OK;
}
