/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c -- fv_softmax, fv_top_*_renorm, fv_top_k_mask, fv_sample, fv_verify: arguments checked, a job made, its rows split over threads or
 * launched on the GPU (cuda/companions.c). */
#include "companions.h"
#include "cuda/companions.h"

#include <float.h>
#include <string.h>

#define PASSES 8                        /* over a row, give or take: what splitting it off is worth */

static const fv__range k_range = { .low = 1, .high = INT32_MAX, .missing = 1, .whole = true };
static const fv__range p_range = { .low = 0, .high = 1, .missing = 1 };
static const fv__range temperature_range = { .low = 0, .high = FLT_MAX, .missing = 1 };

static fv_status missing(const char *name, fv_error *err) { return fv__fail(err, FV_E_INVALID, name, 0, 0, "%s is NULL", name); }

/* ------------------------------------------------------------------------------------------------------------ filters */

typedef struct filter_call {
    const fv__cpu_isa *isa;
    fv__filter_job job;
} filter_call;

static void filter_rows(const void *argument, int64_t first, int64_t last)
{
    const filter_call *call = argument;
    call->isa->filter_rows(&call->job, first, last);
}

/* What a function calls its arguments. */
typedef struct filter_names {
    const char *x, *param, *y;
} filter_names;

static fv_status filter(fv_ctx *ctx, fv__filter what, const filter_names *names, const fv_tensor *x, const fv_arg *param, const fv__range *range,
                        const fv_tensor *y, fv_stream stream, fv_error *err)
{
    if (!ctx || !x || !y) return missing(!ctx ? "ctx" : !x ? names->x : names->y, err);
    if (!param && what != FV__SOFTMAX) return missing(names->param, err);
    filter_call call = { .isa = ctx->isa, .job.what = what };
    if (x->ndim == 2 && x->shape[0] == 0) return FV_OK;
    FV_TRY(fv__rows_view(x, names->x, 2, (int64_t[]){ FV__ANY, FV__ANY }, FV_MAX_VOCAB, &call.job.x, err));
    FV_TRY(fv__rows_view(y, names->y, 2, (int64_t[]){ x->shape[0], x->shape[1] }, FV_MAX_VOCAB, &call.job.y, err));
    FV_TRY(fv__setting_of(param, names->param, x->shape[0], range, &call.job.param, err));
    if (ctx->cuda) return fv__cuda_filter_rows(ctx, &call.job, x->shape[0], stream, err);
    fv__ops_split(ctx, filter_rows, &call, x->shape[0], PASSES * fv__dtype_bytes(call.job.x.dtype, x->shape[1]));
    return FV_OK;
}

fv_status fv_softmax(fv_ctx *ctx, const fv_tensor *logits, const fv_arg *temperature, const fv_tensor *probs, fv_stream stream, fv_error *err)
{
    return filter(ctx, FV__SOFTMAX, &(filter_names){ "logits", "temperature", "probs" }, logits, temperature, &temperature_range, probs, stream, err);
}

fv_status fv_top_k_renorm(fv_ctx *ctx, const fv_tensor *x, const fv_arg *k, const fv_tensor *y, fv_stream stream, fv_error *err)
{
    return filter(ctx, FV__TOP_K_RENORM, &(filter_names){ "x", "k", "y" }, x, k, &k_range, y, stream, err);
}

fv_status fv_top_p_renorm(fv_ctx *ctx, const fv_tensor *x, const fv_arg *p, const fv_tensor *y, fv_stream stream, fv_error *err)
{
    return filter(ctx, FV__TOP_P_RENORM, &(filter_names){ "x", "p", "y" }, x, p, &p_range, y, stream, err);
}

fv_status fv_top_k_mask(fv_ctx *ctx, const fv_tensor *x, const fv_arg *k, const fv_tensor *y, fv_stream stream, fv_error *err)
{
    return filter(ctx, FV__TOP_K_MASK, &(filter_names){ "x", "k", "y" }, x, k, &k_range, y, stream, err);
}

/* ------------------------------------------------------------------------------------------------------------ samples */

typedef struct sample_call {
    const fv__cpu_isa *isa;
    fv__sample_job job;
} sample_call;

static void sample_rows(const void *argument, int64_t first, int64_t last)
{
    const sample_call *call = argument;
    call->isa->sample_rows(&call->job, first, last);
}

static fv_status state_view(const fv_tensor *t, const char *field, int64_t rows, fv__ints *out, fv_error *err)
{
    if (!fv__given(t)) return FV_OK;
    const int64_t n = t->ndim == 1 && t->shape[0] == 1 ? 1 : rows;
    FV_TRY(fv__ints_view(t, field, 1, &n, out, err));
    if (!out->wide) return fv__fail(err, FV_E_INVALID, field, 32, 64, "%s is i32; it must be i64", field);
    return FV_OK;
}

static fv_status valid_view(const fv_tensor *t, int64_t n, fv__sample_job *job, fv_error *err)
{
    if (!fv__given(t)) return FV_OK;
    if (t->reserved) return fv__fail(err, FV_E_INVALID, "desc.valid", t->reserved, 0, "the reserved word of desc.valid must be 0");
    if (!t->dtype || strcmp(t->dtype, "u8") != 0)
        return fv__fail(err, FV_E_INVALID, "desc.valid", 0, 0, "desc.valid is %.24s; it must be u8", t->dtype ? t->dtype : "of no type");
    if (t->ndim != 1 || t->shape[0] != n)
        return fv__fail(err, FV_E_INVALID, "desc.valid", t->ndim == 1 ? t->shape[0] : t->ndim, n, "desc.valid must have one axis with %lld entries",
                        (long long)n);
    job->valid = t->data;
    job->valid_stride = n > 1 ? t->stride[0] : 0;
    return FV_OK;
}

static fv_status sample_filters(const fv_sample_desc *d, int64_t n, fv__sample_job *job, fv_error *err)
{
    const uint32_t both = FV_TOP_K | FV_TOP_P, all = both | FV_MIN_P | FV_TOP_K_FIRST;
    if (d->filters & ~all)
        return fv__fail(err, FV_E_INVALID, "desc.filters", d->filters, all, "desc.filters is %u; there are no bits but those of %u", d->filters, all);
    if (d->filters & FV_TOP_K_FIRST && (d->filters & both) != both)
        return fv__fail(err, FV_E_INVALID, "desc.filters", d->filters, both, "desc.filters has FV_TOP_K_FIRST, which needs FV_TOP_K and FV_TOP_P");
    job->filters = d->filters;
    if (d->filters & FV_TOP_K) FV_TRY(fv__setting_of(&d->top_k, "desc.top_k", n, &k_range, &job->top_k, err));
    if (d->filters & FV_TOP_P) FV_TRY(fv__setting_of(&d->top_p, "desc.top_p", n, &p_range, &job->top_p, err));
    if (d->filters & FV_MIN_P) FV_TRY(fv__setting_of(&d->min_p, "desc.min_p", n, &p_range, &job->min_p, err));
    return FV_OK;
}

static fv_status sample_init(const fv_sample_desc *d, int64_t n, fv__sample_job *job, fv_error *err)
{
    FV_TRY(fv__rows_view(&d->x, "desc.x", 2, (int64_t[]){ FV__ANY, FV__ANY }, FV_MAX_VOCAB, &job->x, err));
    if (fv__given(&d->rows)) FV_TRY(fv__ints_view(&d->rows, "desc.rows", 1, &n, &job->rows, err));
    FV_TRY(fv__ints_view(&d->ids, "desc.ids", 1, &n, &job->ids, err));
    FV_TRY(fv__rows_check(&d->ids, "desc.ids", err));
    FV_TRY(valid_view(&d->valid, n, job, err));
    FV_TRY(sample_filters(d, n, job, err));
    FV_TRY(state_view(&d->seeds, "desc.seeds", n, &job->random.seeds, err));
    FV_TRY(state_view(&d->offsets, "desc.offsets", n, &job->random.offsets, err));
    job->random.seed = d->seed;
    job->random.offset = d->offset;
    job->logits = d->logits;
    return FV_OK;
}

fv_status fv_sample(fv_ctx *ctx, const fv_sample_desc *d, fv_stream stream, fv_error *err)
{
    if (!ctx || !d) return missing(ctx ? "desc" : "ctx", err);
    sample_call call = { .isa = ctx->isa };
    FV_TRY(fv__check_reserved(d->reserved, FV__COUNT(d->reserved), "desc.reserved", err));
    const int64_t n = fv__given(&d->rows) && d->rows.ndim == 1 ? d->rows.shape[0] : d->x.shape[0];
    if (d->x.ndim == 2 && d->ids.ndim == 1 && n == 0 && d->ids.shape[0] == 0) return FV_OK;
    FV_TRY(sample_init(d, n, &call.job, err));
    if (ctx->cuda) return fv__cuda_sample_rows(ctx, &call.job, n, stream, err);
    fv__ops_split(ctx, sample_rows, &call, n, PASSES * fv__dtype_bytes(call.job.x.dtype, d->x.shape[1]));
    return FV_OK;
}

/* ------------------------------------------------------------------------------------------------------- verification */

typedef struct verify_call {
    const fv__cpu_isa *isa;
    fv__verify_job job;
} verify_call;

static void verify_rows(const void *argument, int64_t first, int64_t last)
{
    const verify_call *call = argument;
    call->isa->verify_rows(&call->job, first, last);
}

static fv_status verify_init(const fv_verify_desc *d, int64_t requests, int64_t drafts, fv__verify_job *job, fv_error *err)
{
    FV_TRY(fv__rows_view(&d->target_probs, "desc.target_probs", 3, (int64_t[]){ FV__ANY, FV__ANY, FV__ANY }, FV_MAX_VOCAB, &job->target, err));
    if (drafts)
        FV_TRY(fv__rows_view(&d->draft_probs, "desc.draft_probs", 3, (int64_t[]){ requests, drafts, d->target_probs.shape[2] }, FV_MAX_VOCAB,
                             &job->draft, err));
    if (drafts) FV_TRY(fv__ints_view(&d->draft_ids, "desc.draft_ids", 2, (int64_t[]){ requests, drafts }, &job->draft_ids, err));
    FV_TRY(fv__ints_view(&d->ids, "desc.ids", 2, (int64_t[]){ requests, drafts + 1 }, &job->ids, err));
    if (fv__given(&d->num_accepted)) FV_TRY(fv__ints_view(&d->num_accepted, "desc.num_accepted", 1, &requests, &job->num_accepted, err));
    if (fv__given(&d->num_emitted)) FV_TRY(fv__ints_view(&d->num_emitted, "desc.num_emitted", 1, &requests, &job->num_emitted, err));
    FV_TRY(state_view(&d->seeds, "desc.seeds", requests, &job->random.seeds, err));
    FV_TRY(state_view(&d->offsets, "desc.offsets", requests, &job->random.offsets, err));
    job->random.seed = d->seed;
    job->random.offset = d->offset;
    job->num_drafts = (int32_t)drafts;
    return FV_OK;
}

fv_status fv_verify(fv_ctx *ctx, const fv_verify_desc *d, fv_stream stream, fv_error *err)
{
    if (!ctx || !d) return missing(ctx ? "desc" : "ctx", err);
    verify_call call = { .isa = ctx->isa };
    const fv_tensor *t = &d->target_probs;
    FV_TRY(fv__check_reserved(d->reserved, FV__COUNT(d->reserved), "desc.reserved", err));
    if (t->ndim == 3 && t->shape[0] == 0) return FV_OK;
    if (t->ndim == 3 && (t->shape[1] < 1 || t->shape[1] > INT32_MAX))
        return fv__fail(err, FV_E_INVALID, "desc.target_probs", t->shape[1], 1,
                        "desc.target_probs has %lld steps; it has one more than there are drafts", (long long)t->shape[1]);
    FV_TRY(verify_init(d, t->shape[0], t->shape[1] - 1, &call.job, err));
    if (ctx->cuda) return fv__cuda_verify_rows(ctx, &call.job, t->shape[0], stream, err);
    fv__ops_split(ctx, verify_rows, &call, t->shape[0], PASSES * fv__dtype_bytes(call.job.target.dtype, t->shape[2]));
    return FV_OK;
}
