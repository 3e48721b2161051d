/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- fv_run: tensors against the plan's problem and step, scales and run-bound arguments, then the backend. Allocates nothing. */
#include "engine.h"

#include <math.h>
#include <string.h>

typedef struct runner {
    const fv_plan *plan;
    const fv_tensors *t;
    fv__run *run;
    fv__problem *now;                   /* the step's problem with run arguments bound */
    fv_error *err;
} runner;

/* ---- q, o, lse ---- */

/* [rows, heads, width]: rows may exceed the batch's. Absent is fine where there are no rows. */
static fv_status row_view(runner *r, const fv_tensor *t, const char *field, fv__dtype dtype, int64_t heads, int64_t width, fv__view *out)
{
    const int64_t rows = r->plan->batch.total_rows;
    if (!t->data && rows == 0) return FV_OK;
    FV_TRY(fv__tensor_view(t, field, dtype, 3, (int64_t[]){ FV__ANY, heads, width }, out, r->err));
    if (out->extent < rows)
        return fv__fail(r->err, FV_E_INVALID, field, out->extent, rows, "%s has %lld rows; the plan was made for %lld", field,
                        (long long)out->extent, (long long)rows);
    return FV_OK;
}

static fv_status lse_view(runner *r)
{
    const fv_tensor *t = &r->t->lse;
    if (!t->data) return FV_OK;
    if (r->now->hooks >> FV__HOOK_WEIGHT & 1)
        return fv__fail(r->err, FV_E_UNSUPPORTED, "tensors.lse", 1, 0,
                        "tensors.lse is given, but a variant replaces the softmax (FV_WEIGHT): there is no lse");
    const int64_t heads = r->now->num_q_heads;
    /* two axes, neither need be dense: seen as [rows, heads, 1] */
    fv_tensor wide = *t;
    if (t->ndim != 2)
        return fv__fail(r->err, FV_E_INVALID, "tensors.lse", t->ndim, 2, "tensors.lse has %d axes; expected 2 (rows, heads)", t->ndim);
    wide.ndim = 3;
    wide.shape[2] = wide.stride[2] = 1;
    FV_TRY(row_view(r, &wide, "tensors.lse", FV__DTYPE_f32, heads, 1, &r->run->lse));
    FV_TRY(fv__tensor_written(&wide, "tensors.lse", r->err));
    return FV_OK;
}

/* ---- k, v ---- */

/* The cache: [pages, page_size, kv heads, width] or [tokens, kv heads, width]. Absent is fine where the batch has no keys. */
static fv_status key_view(runner *r, const fv_tensor *t, const char *field, fv__dtype dtype, int64_t heads, int64_t width, fv__view *out)
{
    const fv_plan *p = r->plan;
    if (!t->data && p->batch.total_keys == 0 && !p->given.segments) return FV_OK;
    if (p->tables.paged) {
        FV_TRY(fv__tensor_view(t, field, dtype, 4, (int64_t[]){ FV__ANY, p->given.pages.page_size, heads, width }, out, r->err));
        if (out->extent < p->given.pages.num_pages)
            return fv__fail(r->err, FV_E_INVALID, field, out->extent, p->given.pages.num_pages, "%s has %lld pages; batch.pages.num_pages is %lld",
                            field, (long long)out->extent, (long long)p->given.pages.num_pages);
        return FV_OK;
    }
    FV_TRY(fv__tensor_view(t, field, dtype, 3, (int64_t[]){ FV__ANY, heads, width }, out, r->err));
    if (out->extent < p->tables.num_tokens)
        return fv__fail(r->err, FV_E_INVALID, field, out->extent, p->tables.num_tokens, "%s has %lld tokens; the batch reaches token %lld", field,
                        (long long)out->extent, (long long)p->tables.num_tokens);
    return FV_OK;
}

static fv_status refuse_given(runner *r, const fv_tensor *t, const char *field, const char *why)
{
    if (!t->data) return FV_OK;
    return fv__fail(r->err, FV_E_INVALID, field, 1, 0, "%s is given, but %s", field, why);
}

static fv_status views(runner *r)
{
    const fv__problem *p = r->now;
    const fv_tensors *t = r->t;
    const int32_t head = p->dim_qk - p->qk_tail;
    FV_TRY(row_view(r, &t->q, "tensors.q", p->q, p->num_q_heads, head, &r->run->q));
    FV_TRY(row_view(r, &t->o, "tensors.o", p->o, p->num_q_heads, p->dim_v, &r->run->o));
    FV_TRY(fv__tensor_written(&t->o, "tensors.o", r->err));
    FV_TRY(lse_view(r));
    FV_TRY(key_view(r, &t->k, "tensors.k", p->k, p->num_kv_heads, head, &r->run->k));
    if (p->qk_tail) {
        FV_TRY(row_view(r, &t->q_tail, "tensors.q_tail", p->q, p->num_q_heads, p->qk_tail, &r->run->q_tail));
        FV_TRY(key_view(r, &t->k_tail, "tensors.k_tail", p->k, p->num_kv_heads, p->qk_tail, &r->run->k_tail));
    } else {
        FV_TRY(refuse_given(r, &t->q_tail, "tensors.q_tail", "problem.qk_tail is 0"));
        FV_TRY(refuse_given(r, &t->k_tail, "tensors.k_tail", "problem.qk_tail is 0"));
    }
    if (p->v_in_k) {
        FV_TRY(refuse_given(r, &t->v, "tensors.v", "problem.v_in_k says that V lies in K"));
        r->run->v = r->run->k;
        r->run->v.width = p->dim_v;
        return FV_OK;
    }
    return key_view(r, &t->v, "tensors.v", p->v, p->num_kv_heads, p->dim_v, &r->run->v);
}

/* ---- scales ---- */

static const fv_arg *find_arg(const fv_tensors *t, const char *name)
{
    for (int i = 0; i < t->num_args; i++)
        if (t->args[i].name && !strcmp(t->args[i].name, name)) return &t->args[i];
    return NULL;
}

static fv_status check_scale(runner *r, const char *name, double x)
{
    const float f = (float)x;
    if (isfinite(f) && f > 0) return FV_OK;
    return fv__fail(r->err, FV_E_INVALID, name, (int64_t)(isfinite(x) && fabs(x) < 1e18 ? x : 0), 0,
                    "%s is %g; a scale must be finite and positive as a 32-bit float", name, x);
}

static fv_status number_scale(runner *r, const fv_arg *a, const char *name, fv__scale *out)
{
    double x = a->number;
    if (a->tensor) {
        fv__view view;
        FV_TRY(fv__tensor_view(a->tensor, name, FV__DTYPE_f32, 1, (int64_t[]){ 1 }, &view, r->err));
        if (r->plan->ctx->cuda) {
            out->data = (const float *)view.data;
            return FV_OK;
        }
        x = *(const float *)view.data;
    }
    FV_TRY(check_scale(r, name, x));
    out->number = (float)x;
    return FV_OK;
}

static fv_status head_scale(runner *r, const fv_arg *a, const char *name, fv__scale *out)
{
    fv__view view;
    fv_tensor column = *a->tensor;      /* [heads] seen as [heads, 1]: any stride */
    if (column.ndim != 1)
        return fv__fail(r->err, FV_E_INVALID, name, column.ndim, 1, "%s has %d axes; expected 1 (kv heads)", name, column.ndim);
    column.ndim = 2;
    column.shape[1] = column.stride[1] = 1;
    FV_TRY(fv__tensor_view(&column, name, FV__DTYPE_f32, 2, (int64_t[]){ r->now->num_kv_heads, 1 }, &view, r->err));
    out->data = (const float *)view.data;
    out->stride[0] = view.stride[0];
    if (r->plan->ctx->cuda) return FV_OK;
    for (int h = 0; h < r->now->num_kv_heads; h++) FV_TRY(check_scale(r, name, out->data[h * out->stride[0]]));
    return FV_OK;
}

/* The axes of K without the last: [pages, page_size, heads] or [tokens, heads], any strides. */
static fv_status token_scale(runner *r, const fv_arg *a, const char *name, fv__scale *out)
{
    const int axes = r->plan->tables.paged ? 3 : 2;
    if (a->tensor->ndim != axes)
        return fv__fail(r->err, FV_E_INVALID, name, a->tensor->ndim, axes, "%s has %d axes; expected %d, those of K without the last", name,
                        a->tensor->ndim, axes);
    fv_tensor wide = *a->tensor;
    wide.ndim = axes + 1;
    wide.shape[axes] = wide.stride[axes] = 1;
    fv__view view = { 0 };
    FV_TRY(key_view(r, &wide, name, FV__DTYPE_f32, r->now->num_kv_heads, 1, &view));
    out->data = (const float *)view.data;
    memcpy(out->stride, view.stride, sizeof out->stride);
    return FV_OK;
}

static fv_status scale(runner *r, fv__scale_kind kind, const char *name, fv__scale *out)
{
    *out = (fv__scale){ .kind = kind, .number = 1 };
    if (kind == FV__SCALE_NONE) return FV_OK;
    const fv_arg *a = find_arg(r->t, name);
    if (!a) return fv__fail(r->err, FV_E_INVALID, name, 0, 0, "the run argument %s is missing; the problem asks for it", name);
    if (kind == FV__SCALE_TENSOR) return number_scale(r, a, name, out);
    if (!a->tensor) return fv__fail(r->err, FV_E_INVALID, name, 0, 0, "%s must be a tensor: the problem says a scale per %s", name,
                                    kind == FV__SCALE_HEAD ? "head" : "token and head");
    return kind == FV__SCALE_HEAD ? head_scale(r, a, name, out) : token_scale(r, a, name, out);
}

static fv_status block_scale(runner *r, fv__dtype dtype, int32_t dim, const char *name, fv__view *out)
{
    fv__dtype type;
    int32_t width;
    if (!fv__dtype_has_blocks(dtype)) return FV_OK;
    const fv_arg *a = find_arg(r->t, name);
    if (!a || !a->tensor)
        return fv__fail(r->err, FV_E_INVALID, name, 0, 0, "the run argument %s is missing; %s", name, dtype == FV__DTYPE_int4 ?
                        "int4 needs a tensor of f16 pairs (scale, zero) per 32 or 64 elements" :
                        "fp4_e2m1 needs a tensor of one scale per 16 elements");
    FV_TRY(fv__block_scale_shape(a->tensor, name, dtype, dim, &type, &width, r->err));
    return key_view(r, a->tensor, name, type, r->now->num_kv_heads, width, out);
}

static fv_status scales(runner *r)
{
    const fv__problem *p = r->now;
    FV_TRY(scale(r, p->k_scale, "k_scale", &r->run->k_scale));
    FV_TRY(block_scale(r, p->k, p->dim_qk, "k_block_scale", &r->run->k_block_scale));
    if (p->v_in_k) {                    /* V is a prefix of K as read: it has K's scales */
        r->run->v_scale = r->run->k_scale;
        r->run->v_block_scale = r->run->k_block_scale;
        return FV_OK;
    }
    FV_TRY(scale(r, p->v_scale, "v_scale", &r->run->v_scale));
    return block_scale(r, p->v, p->dim_v, "v_block_scale", &r->run->v_block_scale);
}

/* ---- arguments ---- */

static fv_status bind(runner *r)
{
    const fv_plan *plan = r->plan;
    const char *others[4];
    int n = 0;
    if (r->now->k_scale != FV__SCALE_NONE) others[n++] = "k_scale";
    if (r->now->v_scale != FV__SCALE_NONE) others[n++] = "v_scale";
    if (fv__dtype_has_blocks(r->now->k)) others[n++] = "k_block_scale";
    if (fv__dtype_has_blocks(r->now->v) && !r->now->v_in_k) others[n++] = "v_block_scale";
    const fv__bind_shape shape = { plan->batch.num_requests, plan->batch.total_rows, plan->batch.total_keys, plan->limits.max_rows,
                                   plan->batch_memory.bits_offsets, -1, -1 };
    FV_TRY(fv__problem_bind(r->now, FV__BIND_RUN, "tensors.args", r->t->args, r->t->num_args, others, n, &shape, r->err));
    FV_TRY(fv__problem_bound(r->now, FV__BIND_RUN, r->err));
    for (int i = 0; i < r->now->num_uses; i++) r->run->args[i] = r->now->uses[i].args;
    return FV_OK;
}

static fv__ids ids_of(const fv_index *x) { return (fv__ids){ x->host, x->stride, x->type == FV_INDEX_I64 }; }

static void set_tables(const fv_plan *plan, fv__run *run)
{
    if (!plan->tables.paged) return;
    const fv_pages *pages = &plan->given.pages;
    run->ids = ids_of(&pages->ids);
    run->v_ids = fv__index_given(&pages->v_ids) ? ids_of(&pages->v_ids) : run->ids;
}

fv_status fv__plan_run(fv_plan *plan, const fv_tensors *tensors, fv_stream stream, fv_error *err)
{
    if (!plan->ready)
        return fv__fail(err, FV_E_INVALID, "plan", 0, 0, "the plan holds no step: fv_plan_update was not called, or its last call failed");
    FV_TRY(fv__check_reserved(tensors->reserved, FV__COUNT(tensors->reserved), "tensors.reserved", err));
    FV_TRY(fv__check_reserved0(tensors->reserved0, "tensors.reserved0", err));

    fv__problem now = plan->step;
    fv__run run = { .problem = &now, .plan = plan->blob, .checked = plan->limits.checked, .faults = &plan->ctx->faults };
    if (fv__index_given(&plan->given.row_positions)) run.row_positions = &plan->given.row_positions;
    runner r = { plan, tensors, &run, &now, err };
    FV_TRY(bind(&r));
    FV_TRY(views(&r));
    FV_TRY(scales(&r));
    set_tables(plan, &run);
    const bool has_sums = now.hooks >> FV__HOOK_KEY_SUM & 1;    /* of no rows they are zeros, and are written */
    if (plan->batch.total_rows == 0 && !has_sums) return FV_OK; /* nothing to compute: no launch */
    return plan->backend->run(plan, &run, stream, err);
}
