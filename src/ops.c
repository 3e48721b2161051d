/* SPDX-License-Identifier: Apache-2.0 */
/* ops.c -- fv_rope, fv_merge, fv_copy_pages and fv_rope_frequencies: arguments checked, a job made,
 * its rows split over threads or launched on the GPU (cuda/ops.c). (fv_append is append.c's.)
 * Everything that can fail does so before the first byte is written. */
#include "ops.h"
#include "cuda/ops.h"
#include "rope.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_HEADS  65536
#define PART_BYTES (64 << 10)           /* less than this is not worth waking a thread for */

/* -------------------------------------------------------------------------------- shared checks */

fv_status fv__ops_dtype(const fv_tensor *t, const char *field, bool narrow, fv__dtype *out,
                        fv_error *err)
{
    *out = fv__dtype_find(t->dtype);
    if (!t->dtype)
        return fv__fail(err, FV_E_INVALID, field, 0, 0,
                        "%s.dtype is NULL; it must name the element type", field);
    if (*out == FV__DTYPE_NONE)
        return fv__fail(err, FV_E_INVALID, field, 0, 0, "%s: there is no element type \"%.24s\"",
                        field, t->dtype);
    if (!narrow && fv__dtypes[*out].bits < 16)
        return fv__fail(err, FV_E_INVALID, field, fv__dtypes[*out].bits, 16,
                        "%s is %s; it must be f32, f16 or bf16", field, t->dtype);
    return FV_OK;
}

fv_status fv__ops_rows(const fv_tensor *t, const char *field, int64_t heads, int64_t width,
                       fv__view *out, fv_error *err)
{
    fv__dtype dtype;
    FV_TRY(fv__ops_dtype(t, field, false, &dtype, err));
    FV_TRY(fv__tensor_view(t, field, dtype, 3, (int64_t[]){ FV__ANY, heads, width }, out, err));
    if (t->shape[1] < 1 || t->shape[1] > MAX_HEADS)
        return fv__fail(err, FV_E_INVALID, field, t->shape[1], MAX_HEADS,
                        "%s has %lld heads; 1 to %d", field, (long long)t->shape[1], MAX_HEADS);
    if (out->width < 1 || t->shape[2] > FV__MAX_DIM)
        return fv__fail(err, FV_E_INVALID, field, t->shape[2], FV__MAX_DIM,
                        "%s is %lld elements wide; 1 to %d", field, (long long)t->shape[2],
                        FV__MAX_DIM);
    return FV_OK;
}

fv_status fv__positions_check(const fv_ctx *ctx, const fv_index *positions, const char *field,
                              int64_t rows, fv_error *err)
{
    const bool there = fv__ops_on_device(ctx, positions);
    FV_TRY(fv__index_check(positions, field, rows, false, !there, err));
    if (there) return FV_OK;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t p = fv__index_at(positions, i);
        if (p > -FV__NO_BOUND && p < FV__NO_BOUND) continue;
        return fv__fail(err, FV_E_INVALID, field, p, FV__NO_BOUND - 1,
                        "%s[%lld] is %lld; positions lie within +-2^30", field, (long long)i,
                        (long long)p);
    }
    return FV_OK;
}

/* -------------------------------------------------------------------------------------- threads */

typedef struct split {
    void (*rows)(const void *job, int64_t first, int64_t last);
    const void *job;
    int64_t n;
    int parts;
} split;

static void run_part(void *argument, int i)
{
    const split *s = argument;
    s->rows(s->job, s->n * i / s->parts, s->n * (i + 1) / s->parts);
}

void fv__ops_split(fv_ctx *ctx, void (*rows)(const void *job, int64_t first, int64_t last),
                   const void *job, int64_t n, int64_t bytes)
{
    const int64_t worth = n * fv__max64(bytes, 1) / PART_BYTES + 1;
    split s = { rows, job, n, (int)fv__min64(fv__min64(worth, n), ctx->num_threads) };
    if (n <= 0) return;
    fv__ctx_parallel_for(ctx, run_part, &s, s.parts);
}

/* ----------------------------------------------------------------------------------------- rope */

static fv_status check_rope(const fv_rope_desc *desc, const char *field, int32_t width,
                            fv_error *err)
{
    char name[48];
    snprintf(name, sizeof name, "%s.reserved", field);
    FV_TRY(fv__check_reserved(desc->reserved, FV__COUNT(desc->reserved), name, err));
    snprintf(name, sizeof name, "%s.rotary_dim", field);
    if (desc->rotary_dim < 0 || desc->rotary_dim > width || desc->rotary_dim % 2)
        return fv__fail(err, FV_E_INVALID, name, desc->rotary_dim, width,
                        "%s is %d; it must be even and at most the head's width, %d", name,
                        desc->rotary_dim, width);
    if (desc->frequencies && (desc->base != 0 || desc->factor != 0 || desc->low_freq_factor != 0 ||
                              desc->high_freq_factor != 0 || desc->original_context != 0))
        return fv__fail(err, FV_E_INVALID, field, 1, 0,
                        "%s gives frequencies, so base, factor and the like must be 0", field);
    if (desc->original_context != 0 && desc->low_freq_factor == 0 && desc->high_freq_factor == 0) {
        snprintf(name, sizeof name, "%s.original_context", field);
        return fv__fail(
            err, FV_E_INVALID, name, (int64_t)fmin(fabs(desc->original_context), 1e18), 0,
            "%s is %g, but only low_freq_factor and high_freq_factor use it, and they are 0", name,
            desc->original_context);
    }
    return FV_OK;
}

static fv_status frequencies_of(const fv_rope_desc *desc, const char *field, float *out,
                                fv_error *err)
{
    const fv__rope_numbers numbers = {
        desc->base,
        desc->factor,
        desc->low_freq_factor,
        desc->high_freq_factor,
        desc->original_context,
    };
    if (!desc->frequencies)
        return fv__rope_frequencies(&numbers, desc->rotary_dim, field, out, err);
    for (int32_t i = 0; i < desc->rotary_dim / 2; i++)
        if (!isfinite(desc->frequencies[i]))
            return fv__fail(err, FV_E_INVALID, field, i, 0,
                            "%s.frequencies[%d] is %g; it must be finite", field, i,
                            (double)desc->frequencies[i]);
    memcpy(out, desc->frequencies, (size_t)desc->rotary_dim / 2 * sizeof *out);
    return FV_OK;
}

fv_status fv__rotary_init(const fv_rope_desc *desc, const char *field, int32_t width,
                          fv__rotary *out, fv_error *err)
{
    *out = (fv__rotary){ 0 };
    if (!desc) return FV_OK;
    FV_TRY(check_rope(desc, field, width, err));
    out->dim = desc->rotary_dim;
    out->interleaved = desc->interleaved;
    return frequencies_of(desc, field, out->frequencies, err);
}

fv_status fv_rope_frequencies(const fv_rope_desc *desc, float *frequencies, fv_error *err)
{
    if (!desc) return fv__fail(err, FV_E_INVALID, "desc", 0, 0, "desc is NULL");
    fv__rotary rotary;
    FV_TRY(fv__rotary_init(desc, "desc", FV__MAX_DIM, &rotary, err));
    if (desc->rotary_dim && !frequencies)
        return fv__fail(err, FV_E_INVALID, "frequencies", 0, 0, "frequencies is NULL");
    if (desc->rotary_dim)
        memcpy(frequencies, rotary.frequencies, (size_t)desc->rotary_dim / 2 * sizeof *frequencies);
    return FV_OK;
}

typedef struct rope_call {
    const fv__cpu_isa *isa;
    fv__rope_job job;
} rope_call;

static void rope_rows(const void *argument, int64_t first, int64_t last)
{
    const rope_call *call = argument;
    call->isa->rope_rows(&call->job, first, last);
}

fv_status fv_rope(fv_ctx *ctx, const fv_rope_desc *desc, const fv_tensor *x, fv_index positions,
                  const fv_tensor *y, fv_stream stream, fv_error *err)
{
    if (!ctx || !desc || !x || !y) {
        const char *name = !ctx ? "ctx" : !desc ? "desc" : !x ? "x" : "y";
        return fv__fail(err, FV_E_INVALID, name, 0, 0, "%s is NULL", name);
    }
    rope_call call = { .isa = ctx->isa, .job.positions = &positions };
    if (x->ndim == 3 && x->shape[0] == 0 && y->ndim == 3 && y->shape[0] == 0) return FV_OK;
    FV_TRY(fv__ops_rows(x, "x", FV__ANY, FV__ANY, &call.job.x, err));
    FV_TRY(fv__ops_rows(y, "y", x->shape[1], x->shape[2], &call.job.y, err));
    FV_TRY(fv__tensor_written(y, "y", err));
    const int64_t rows = x->shape[0];
    if (y->shape[0] != rows)
        return fv__fail(err, FV_E_INVALID, "y", y->shape[0], rows, "y has %lld rows and x %lld",
                        (long long)y->shape[0], (long long)rows);
    FV_TRY(fv__rotary_init(desc, "desc", call.job.x.width, &call.job.rotary, err));
    FV_TRY(fv__positions_check(ctx, &positions, "positions", rows, err));
    call.job.num_heads = (int32_t)x->shape[1];
    if (ctx->cuda) return fv__cuda_rope_rows(ctx, &call.job, rows, stream, err);
    fv__ops_split(ctx, rope_rows, &call, rows,
                  x->shape[1] * fv__dtype_bytes(call.job.x.dtype, x->shape[2]));
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------- merge */

typedef struct merge_call {
    const fv__cpu_isa *isa;
    fv__merge_job job;
} merge_call;

static void merge_rows(const void *argument, int64_t first, int64_t last)
{
    const merge_call *call = argument;
    call->isa->merge_rows(&call->job, first, last);
}

/* [rows, heads] f32 with any strides: seen as [rows, heads, 1]. */
static fv_status lse_view(const fv_tensor *t, const char *field, int64_t rows, int64_t heads,
                          fv__view *out, fv_error *err)
{
    if (t->ndim != 2)
        return fv__fail(err, FV_E_INVALID, field, t->ndim, 2,
                        "%s has %d axes; expected 2 (rows, heads)", field, t->ndim);
    fv_tensor wide = *t;
    wide.ndim = 3;
    wide.shape[2] = wide.stride[2] = 1;
    return fv__tensor_view(&wide, field, FV__DTYPE_f32, 3, (int64_t[]){ rows, heads, 1 }, out, err);
}

static fv_status state_views(const fv_tensor *o_states, const fv_tensor *lse_states, int64_t s,
                             const fv_tensor *o, fv__view *o_out, fv__view *lse_out, fv_error *err)
{
    char field[48];
    snprintf(field, sizeof field, "o_states[%lld]", (long long)s);
    FV_TRY(fv__ops_rows(&o_states[s], field, o->shape[1], o->shape[2], o_out, err));
    if (o_states[s].shape[0] != o->shape[0])
        return fv__fail(err, FV_E_INVALID, field, o_states[s].shape[0], o->shape[0],
                        "%s has %lld rows and o %lld", field, (long long)o_states[s].shape[0],
                        (long long)o->shape[0]);
    snprintf(field, sizeof field, "lse_states[%lld]", (long long)s);
    return lse_view(&lse_states[s], field, o->shape[0], o->shape[1], lse_out, err);
}

static fv_status check_merge(const fv_ctx *ctx, const fv_tensor *o_states,
                             const fv_tensor *lse_states, int64_t num_states, const fv_tensor *o,
                             fv_error *err)
{
    if (!ctx) return fv__fail(err, FV_E_INVALID, "ctx", 0, 0, "ctx is NULL");
    if (!o) return fv__fail(err, FV_E_INVALID, "o", 0, 0, "o is NULL");
    if (num_states < 1 || num_states > INT32_MAX / 2)
        return fv__fail(err, FV_E_INVALID, "num_states", num_states, 1,
                        "num_states is %lld; at least 1", (long long)num_states);
    if (!o_states || !lse_states) {
        const char *name = !o_states ? "o_states" : "lse_states";
        return fv__fail(err, FV_E_INVALID, name, 0, num_states, "%s is NULL and num_states %lld",
                        name, (long long)num_states);
    }
    return FV_OK;
}

static fv_status merge_views(merge_call *call, const fv_tensor *o_states,
                             const fv_tensor *lse_states, const fv_tensor *o, const fv_tensor *lse,
                             fv__view *views, fv_error *err)
{
    fv__merge_job *job = &call->job;
    job->o_states = views;
    job->lse_states = views + job->num_states;
    FV_TRY(fv__ops_rows(o, "o", FV__ANY, FV__ANY, &job->o, err));
    FV_TRY(fv__tensor_written(o, "o", err));
    if (lse && lse->data) FV_TRY(lse_view(lse, "lse", o->shape[0], o->shape[1], &job->lse, err));
    for (int32_t s = 0; s < job->num_states; s++)
        FV_TRY(
            state_views(o_states, lse_states, s, o, &views[s], &views[job->num_states + s], err));
    job->num_heads = (int32_t)o->shape[1];
    return FV_OK;
}

fv_status fv_merge(fv_ctx *ctx, const fv_tensor *o_states, const fv_tensor *lse_states,
                   int64_t num_states, bool lse_base2, const fv_tensor *o, const fv_tensor *lse,
                   fv_stream stream, fv_error *err)
{
    FV_TRY(check_merge(ctx, o_states, lse_states, num_states, o, err));
    if (o->ndim == 3 && o->shape[0] == 0) return FV_OK; /* no rows: nothing needs to be there */
    merge_call call = { .isa = ctx->isa,
                        .job = { .num_states = (int32_t)num_states, .base2 = lse_base2 } };
    const size_t bytes = 2 * (size_t)num_states * sizeof(fv__view);
    fv__view *views = fv__ctx_alloc(ctx, bytes);
    if (!views)
        return fv__fail(err, FV_E_NO_MEMORY, "num_states", num_states, 0,
                        "no memory for %lld states", (long long)num_states);
    fv_status status = merge_views(&call, o_states, lse_states, o, lse, views, err);
    if (status == FV_OK && ctx->cuda)
        status = fv__cuda_merge_rows(ctx, &call.job, o->shape[0], stream, err);
    else if (status == FV_OK)
        fv__ops_split(ctx, merge_rows, &call, o->shape[0],
                      (num_states + 1) * o->shape[1] *
                          fv__dtype_bytes(call.job.o.dtype, o->shape[2]));
    fv__ctx_free(ctx, views, bytes);
    return status;
}

/* ----------------------------------------------------------------------------------- copy pages */

/* Pages of K, then of V: a slice is one token (the second axis) of one of them, for all copies in
 * the order given, so that threads never meet. */
typedef struct pages {                  /* in bits; data NULL: absent */
    char *data;
    int64_t num_pages, page_stride, num_tokens, token_stride;
    int64_t extent[2], stride[2];       /* axes between the token and the last one */
    int64_t width;                      /* of the last axis */
} pages;

typedef struct copy_call {
    pages pages[2];
    const fv_copy *copies;
    int64_t num_copies;
} copy_call;

static void copy_token(const pages *p, int64_t from, int64_t to)
{
    for (int64_t i = 0; i < p->extent[0]; i++)
        for (int64_t k = 0; k < p->extent[1]; k++) {
            const int64_t at = i * p->stride[0] + k * p->stride[1];
            memcpy(p->data + (to + at) / 8, p->data + (from + at) / 8, (size_t)(p->width + 7) / 8);
        }
}

static void copy_slices(const void *argument, int64_t first, int64_t last)
{
    const copy_call *call = argument;
    for (int64_t slice = first; slice < last; slice++) {
        const int64_t behind = slice - call->pages[0].num_tokens;
        const pages *p = &call->pages[behind >= 0];
        const int64_t at = (behind >= 0 ? behind : slice) * p->token_stride;
        for (int64_t i = 0; i < call->num_copies; i++) {
            const fv_copy c = call->copies[i];
            if (c.src != c.dst)
                copy_token(p, c.src * p->page_stride + at, c.dst * p->page_stride + at);
        }
    }
}

/* Axes whose elements follow one another without a gap are copied as one. */
static pages pages_of(const fv_tensor *t, int bits)
{
    pages p = {
        .data = t->data,
        .num_pages = t->shape[0],
        .page_stride = t->stride[0] * bits,
        .num_tokens = t->shape[1],
        .token_stride = t->stride[1] * bits,
        .extent = { 1, 1 },
        .width = t->shape[t->ndim - 1] * bits,
    };
    bool dense = true;
    for (int i = t->ndim - 2; i >= 2; i--) {
        dense = dense && (t->shape[i] == 1 || t->stride[i] * bits == p.width);
        if (dense) p.width *= t->shape[i];
        else p.extent[i - 2] = t->shape[i], p.stride[i - 2] = t->stride[i] * bits;
    }
    return p;
}

/* Only sizes count where bytes are copied: integers are moved as an element type as wide. */
static fv_tensor as_elements(const fv_tensor *t)
{
    static const char *const same[][2] = { { "u8", "int8" }, { "u16", "f16" }, { "i32", "f32" } };
    fv_tensor x = *t;
    for (size_t i = 0; x.dtype && i < sizeof same / sizeof *same; i++)
        if (!strcmp(x.dtype, same[i][0])) x.dtype = same[i][1];
    return x;
}

static fv_status check_pages(copy_call *call, int which, const fv_tensor *given, const char *field,
                             fv_error *err)
{
    fv__dtype dtype;
    fv__view ignored;
    const int64_t any[FV_MAX_DIMS] = { FV__ANY, FV__ANY, FV__ANY, FV__ANY, FV__ANY };
    if (!given || !given->data) return FV_OK;
    const fv_tensor x = as_elements(given), *t = &x;
    FV_TRY(fv__ops_dtype(t, field, true, &dtype, err));
    if (t->ndim < 3 || t->ndim > 5)
        return fv__fail(err, FV_E_INVALID, field, t->ndim, 4,
                        "%s has %d axes; expected 4 (pages, tokens, heads, elements), 3 or 5",
                        field, t->ndim);
    FV_TRY(fv__tensor_view(t, field, dtype, t->ndim, any, &ignored, err));
    call->pages[which] = pages_of(t, fv__dtypes[dtype].bits);
    return FV_OK;
}

/* -1, -1 is what a fork answers when there is nothing to copy. */
static fv_status check_copies(const copy_call *call, fv_error *err)
{
    int64_t limit = INT32_MAX;
    for (int which = 0; which < 2; which++)
        if (call->pages[which].data) limit = fv__min64(limit, call->pages[which].num_pages);
    for (int64_t i = 0; i < call->num_copies; i++) {
        const fv_copy c = call->copies[i];
        const bool none = c.src == -1 && c.dst == -1, src = c.src >= 0 && c.src < limit,
                   dst = c.dst >= 0 && c.dst < limit;
        char field[48];
        if (none || (src && dst)) continue;
        snprintf(field, sizeof field, "copies[%lld].%s", (long long)i, src ? "dst" : "src");
        return fv__fail(err, FV_E_INVALID, field, src ? c.dst : c.src, limit,
                        "%s is %d; there are %lld pages", field, src ? c.dst : c.src,
                        (long long)limit);
    }
    return FV_OK;
}

static fv__cuda_pages on_device(const pages *p)
{
    return (fv__cuda_pages){ p->data,
                             p->page_stride,
                             p->num_tokens,
                             p->token_stride,
                             { p->extent[0], p->extent[1] },
                             { p->stride[0], p->stride[1] },
                             p->width };
}

static fv_status copy_on_device(fv_ctx *ctx, const copy_call *call, fv_stream stream, fv_error *err)
{
    const fv__cuda_pages both[2] = { on_device(&call->pages[0]), on_device(&call->pages[1]) };
    return fv__cuda_copy_pages(ctx, both, call->copies, call->num_copies, stream, err);
}

static int64_t token_bytes(const pages *p) { return p->extent[0] * p->extent[1] * p->width / 8; }

fv_status fv_copy_pages(fv_ctx *ctx, const fv_tensor *k, const fv_tensor *v, const fv_copy *copies,
                        int64_t num_copies, fv_stream stream, fv_error *err)
{
    if (!ctx) return fv__fail(err, FV_E_INVALID, "ctx", 0, 0, "ctx is NULL");
    if (num_copies < 0 || (num_copies && !copies))
        return fv__fail(err, FV_E_INVALID, "num_copies", num_copies, 0,
                        "num_copies is %lld and copies %s", (long long)num_copies,
                        copies ? "is given" : "NULL");
    copy_call call = { .copies = copies, .num_copies = num_copies };
    FV_TRY(check_pages(&call, 0, k, "k", err));
    FV_TRY(check_pages(&call, 1, v, "v", err));
    FV_TRY(check_copies(&call, err));
    if (ctx->cuda) return copy_on_device(ctx, &call, stream, err);
    if (num_copies)
        fv__ops_split(ctx, copy_slices, &call, call.pages[0].num_tokens + call.pages[1].num_tokens,
                      num_copies *
                          fv__max64(token_bytes(&call.pages[0]), token_bytes(&call.pages[1])));
    return FV_OK;
}
