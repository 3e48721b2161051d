/* SPDX-License-Identifier: Apache-2.0 */
/* foveal.c -- the public functions about plans: check handles, call a box, nothing else. (ctx.c has open and close, ops.c append, rope, merge and
 * copies, cache.c the cache, variant.c user variants, info.c fv_info.) */
#include "cuda/ops.h"
#include "engine.h"
#include "os.h"

#include <stdio.h>
#include <string.h>

static const struct { fv_status status; const char *name, *text; } statuses[] = {
#define STATUS_ROW(name, number, text) { FV_##name, "FV_" #name, text },
    FV_STATUS_MAP(STATUS_ROW)
#undef STATUS_ROW
};

const char *fv_status_name(fv_status status)
{
    for (int i = 0; i < FV__COUNT(statuses); i++)
        if (statuses[i].status == status) return statuses[i].name;
    return "unknown status";
}

const char *fv_status_text(fv_status status)
{
    for (int i = 0; i < FV__COUNT(statuses); i++)
        if (statuses[i].status == status) return statuses[i].text;
    return "unknown status";
}

#define TEXT_OF(x) #x
#define DOTTED(a, b, c) TEXT_OF(a) "." TEXT_OF(b) "." TEXT_OF(c)

const char *fv_version(void) { return DOTTED(FV_VERSION_MAJOR, FV_VERSION_MINOR, FV_VERSION_PATCH); }

static fv_status is_null(const char *what, fv_error *err) { return fv__fail(err, FV_E_INVALID, what, 0, 0, "%s is NULL", what); }

#define NOT_NULL(argument)                                                                                             \
    do {                                                                                                               \
        if (!(argument)) return is_null(#argument, err);                                                               \
    } while (0)

/* A problem and maxima, checked; the caller frees the problem. */
static fv_status read_problem(const fv_problem *problem, const fv_plan_desc *limits, fv__problem *p, fv_plan_desc *l, fv_error *err)
{
    FV_TRY(fv__limits_init(limits, l, err));
    return fv__problem_init(problem, p, err);
}

fv_status fv_supports(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_support *out, fv_error *err)
{
    NOT_NULL(ctx); NOT_NULL(problem); NOT_NULL(limits); NOT_NULL(out);
    fv__problem p;
    fv_plan_desc l;
    FV_TRY(read_problem(problem, limits, &p, &l, err));
    fv__kernel_shape shape = { 0 };
    fv_error why = { 0 };
    const fv_status s = fv__ctx_backend(ctx)->shape(ctx, &p, &l, &shape, &why);
    fv__problem_free(&p);
    *out = (fv_support){ { 0 }, { 0 } };
    snprintf(out->kernel, sizeof out->kernel, "%s", shape.name);
    if (s == FV_OK) return FV_OK;
    out->kernel[0] = 0;
    snprintf(out->reasons, sizeof out->reasons, "%s", why.text);
    if (err) *err = why;
    return s;
}

fv_status fv_plan_sizes(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_sizes *out, fv_error *err)
{
    NOT_NULL(ctx); NOT_NULL(problem); NOT_NULL(limits); NOT_NULL(out);
    fv__problem p;
    fv_plan_desc l;
    FV_TRY(read_problem(problem, limits, &p, &l, err));
    const fv_status s = fv__plan_sizes_of(ctx, &p, &l, out, err);
    fv__problem_free(&p);
    return s;
}

fv_status fv_plan_create(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_plan **plan, fv_error *err)
{
    NOT_NULL(ctx); NOT_NULL(problem); NOT_NULL(limits); NOT_NULL(plan);
    return fv__plan_new(ctx, problem, limits, plan, err);
}

fv_status fv_plan_destroy(fv_plan **plan)
{
    if (!plan || !*plan) return FV_OK;
    fv__plan_delete(*plan);
    *plan = NULL;
    return FV_OK;
}

/* Compiling is what creation does besides allocating; a plan with room for nothing compiles the same kernel. */
fv_status fv_warm(fv_ctx *ctx, const fv_problem *const *problems, int64_t num_problems, const fv_plan_desc *limits, fv_error *err)
{
    NOT_NULL(ctx); NOT_NULL(limits);
    if (num_problems > 0) NOT_NULL(problems);
    for (int64_t i = 0; i < num_problems; i++) {
        fv_plan *plan = NULL;
        NOT_NULL(problems[i]);
        FV_TRY(fv__plan_new(ctx, problems[i], limits, &plan, err));
        fv__plan_delete(plan);
    }
    return ctx->cuda ? fv__cuda_ops_warm(ctx, err) : FV_OK;
}

fv_status fv_plan_update(fv_plan *plan, const fv_problem *problem, const fv_batch *batch, fv_stream stream, fv_error *err)
{
    NOT_NULL(plan);
    if (!batch) plan->ready = false;            /* as after every failure */
    NOT_NULL(batch);
    return fv__plan_refresh(plan, problem, batch, stream, err);
}

fv_status fv_run(fv_plan *plan, const fv_tensors *tensors, fv_stream stream, fv_error *err)
{
    NOT_NULL(plan); NOT_NULL(tensors);
    return fv__plan_run(plan, tensors, stream, err);
}

static fv_status not_ready(const fv_plan *plan, fv_error *err)
{
    if (plan->ready) return FV_OK;
    return fv__fail(err, FV_E_INVALID, "plan", 0, 0, "the plan holds no step: fv_plan_update was not called, or its last call failed");
}

fv_status fv_plan_query(const fv_plan *plan, fv_plan_stats *out, fv_error *err)
{
    NOT_NULL(plan); NOT_NULL(out);
    FV_TRY(not_ready(plan, err));
    const fv__plan_head *b = plan->blob;
    const fv__problem *p = &plan->problem;
    const int64_t k_bits = (int64_t)p->dim_qk * fv__dtypes[p->k].bits;
    const int64_t v_bits = p->v_in_k ? 0 : (int64_t)p->dim_v * fv__dtypes[p->v].bits;
    *out = (fv_plan_stats){
        .num_pieces = b->num_pieces, .num_partials = b->num_slots, .num_segments = b->num_segments,
        .num_shared_segments = plan->report.num_shared_segments, .num_rows = plan->batch.total_rows, .num_kv_tokens = plan->batch.total_keys,
        .total_cost = plan->report.total_cost, .max_worker_cost = plan->report.max_worker_cost,
        .kv_bytes = plan->report.kv_tokens_read * (k_bits + v_bits) / 8,
        .flops = 2 * (int64_t)(p->dim_qk + p->dim_v) * plan->report.score_pairs,
        .workers = b->num_workers,
    };
    snprintf(out->kernel, sizeof out->kernel, "%s", plan->shape.name);
    return FV_OK;
}

fv_status fv_plan_worker_costs(const fv_plan *plan, int64_t *out, int32_t count, fv_error *err)
{
    NOT_NULL(plan); NOT_NULL(out);
    FV_TRY(not_ready(plan, err));
    if (count != plan->blob->num_workers)
        return fv__fail(err, FV_E_INVALID, "count", count, plan->blob->num_workers, "count is %d; the plan has %d workers", count,
                        plan->blob->num_workers);
    fv__plan_worker_costs(plan->blob, &plan->shape, out);
    return FV_OK;
}

fv_status fv_plan_describe(const fv_plan *plan, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err)
{
    NOT_NULL(plan); NOT_NULL(format);
    if (size > 0) NOT_NULL(buffer);
    FV_TRY(not_ready(plan, err));
    const bool svg = !strcmp(format, "svg");
    if (!svg && strcmp(format, "text") != 0)
        return fv__fail(err, FV_E_INVALID, "format", 0, 0, "there is no format \"%s\"; \"text\" or \"svg\"", format);
    const size_t bytes = fv__plan_describe(plan->blob, &plan->shape, &plan->report, svg, buffer, size);
    if (needed) *needed = bytes;
    return FV_OK;
}
