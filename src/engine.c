/* SPDX-License-Identifier: Apache-2.0 */
/* engine.c -- the life of a plan: create (all memory, once), update (every step, no allocation), delete. */
#include "engine.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* ---- maxima ---- */

static fv_status not_negative(const char *field, int64_t value, int64_t limit, fv_error *err)
{
    if (value >= 0 && value <= limit) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, value, limit, "%s is %lld; it lies between 0 and %lld", field, (long long)value, (long long)limit);
}

fv_status fv__limits_init(const fv_plan_desc *given, fv_plan_desc *out, fv_error *err)
{
    *out = *given;
    FV_TRY(fv__check_reserved(given->reserved, FV__COUNT(given->reserved), "limits.reserved", err));
    FV_TRY(not_negative("limits.max_requests", given->max_requests, INT32_MAX / 2, err));
    FV_TRY(not_negative("limits.max_rows", given->max_rows, INT32_MAX / 2, err));
    FV_TRY(not_negative("limits.max_kv_tokens", given->max_kv_tokens, INT64_C(1) << 48, err));
    FV_TRY(not_negative("limits.max_pages", given->max_pages, INT64_C(1) << 40, err));
    FV_TRY(not_negative("limits.max_segments", given->max_segments, INT32_MAX / 4, err));
    FV_TRY(not_negative("limits.max_segment_rows", given->max_segment_rows, INT32_MAX / 2, err));
    FV_TRY(not_negative("limits.max_levels", given->max_levels, FV__MAX_LEVELS, err));
    FV_TRY(not_negative("limits.splits", given->splits, 4096, err));
    FV_TRY(not_negative("limits.workers", given->workers, 65536, err));
    FV_TRY(not_negative("limits.chunk", given->chunk, 1 << 20, err));
    if (given->sharing != FV_SHARING_OFF && given->sharing != FV_SHARING_FIND)
        return fv__fail(err, FV_E_INVALID, "limits.sharing", given->sharing, FV_SHARING_FIND, "limits.sharing is %d; FV_SHARING_OFF or FV_SHARING_FIND",
                        (int)given->sharing);
    if (given->chunk % FV__KEY_BLOCK)
        return fv__fail(err, FV_E_INVALID, "limits.chunk", given->chunk, FV__KEY_BLOCK, "limits.chunk is %d; it must be a multiple of %d",
                        given->chunk, FV__KEY_BLOCK);
    if (given->sharing == FV_SHARING_FIND && given->max_segments)
        return fv__fail(err, FV_E_INVALID, "limits.sharing", given->sharing, FV_SHARING_OFF,
                        "limits.sharing is FV_SHARING_FIND and limits.max_segments is %lld: prefixes are either found or given",
                        (long long)given->max_segments);
    if (!out->chunk) out->chunk = 1024;
    if (!out->max_levels) out->max_levels = given->sharing == FV_SHARING_FIND ? 2 : 1;
    if (!out->max_segment_rows && out->max_segments) out->max_segment_rows = fv__min64(out->max_rows * out->max_levels, INT32_MAX / 2);
    return FV_OK;
}

/* ---- memory: one block, carved in this order ---- */

typedef struct carver {
    char *base;                         /* NULL: only measure */
    size_t used;
} carver;

static void *carve(carver *c, int64_t bytes)
{
    void *at = c->base ? c->base + c->used : NULL;
    c->used += (size_t)fv__round_up(bytes, 64);
    return at;
}

static int64_t power_of_two(int64_t x)
{
    int64_t p = 1;
    while (p < x) p *= 2;
    return p;
}

static void carve_plan(fv_plan *plan, carver *c)
{
    const fv_plan_desc *l = &plan->limits;
    fv__batch_memory *m = &plan->batch_memory;
    plan->blob = carve(c, plan->ctx->cuda ? 0 : plan->capacity.blob_bytes);     /* a GPU's backend has a place for each update */
    plan->temp = carve(c, plan->capacity.temp_bytes);
    m->requests = carve(c, l->max_requests * (int64_t)sizeof *m->requests);
    m->tables = carve(c, l->max_requests * (int64_t)sizeof *m->tables);
    m->min_position = carve(c, l->max_requests * (int64_t)sizeof *m->min_position);
    m->max_position = carve(c, l->max_requests * (int64_t)sizeof *m->max_position);
    m->bits_offsets = carve(c, (l->max_requests + 1) * (int64_t)sizeof *m->bits_offsets);
    m->page_set_size = l->max_segments ? power_of_two(2 * fv__max64(l->max_pages, 1)) : 0;
    m->page_set = carve(c, m->page_set_size * (int64_t)sizeof *m->page_set);
}

/* Shape and capacity of a problem with given maxima. */
static fv_status measure(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, fv__kernel_shape *shape,
                         fv__plan_capacity *capacity, fv_error *err)
{
    *shape = (fv__kernel_shape){ 0 };
    FV_TRY(fv__ctx_backend(ctx)->shape(ctx, problem, limits, shape, err));
    return fv__plan_capacity_of(shape, limits, fv__problem_has_bits(problem), capacity, err);
}

fv_status fv__plan_sizes_of(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, fv_sizes *out, fv_error *err)
{
    fv_plan plan = { .ctx = ctx, .limits = *limits };
    FV_TRY(measure(ctx, problem, limits, &plan.shape, &plan.capacity, err));
    carver c = { 0 };
    carve_plan(&plan, &c);
    *out = (fv_sizes){
        .host_bytes = c.used + sizeof plan,
        .workspace_bytes = (size_t)(plan.capacity.max_slots * plan.shape.partial_bytes),
        .max_pieces = plan.capacity.max_pieces,
        .max_partials = plan.capacity.max_slots * plan.shape.unit_heads,
        .workers = plan.shape.workers,
    };
    fv__ctx_backend(ctx)->sizes(ctx, problem, limits, &plan.shape, &plan.capacity, out);
    return FV_OK;
}

/* ---- create ---- */

static void count_users(fv_plan *plan, int by)
{
    __atomic_fetch_add(&plan->ctx->users, by, __ATOMIC_SEQ_CST);
    for (int i = 0; i < plan->problem.num_uses; i++)
        if (plan->problem.uses[i].variant->ctx)
            __atomic_fetch_add(&((fv_variant *)plan->problem.uses[i].variant)->users, by, __ATOMIC_SEQ_CST);
}

static fv_status check_workspace(const fv_plan *plan, fv_error *err)
{
    if (!plan->limits.workspace) return FV_OK;
    const size_t need = (size_t)(plan->capacity.max_slots * plan->shape.partial_bytes);
    if (plan->limits.workspace_bytes < need)
        return fv__fail(err, FV_E_CAPACITY, "limits.workspace_bytes", (int64_t)plan->limits.workspace_bytes, (int64_t)need,
                        "the workspace has %zu bytes; these maxima need %zu (fv_plan_sizes)", plan->limits.workspace_bytes, need);
    if ((uintptr_t)plan->limits.workspace % 64)
        return fv__fail(err, FV_E_INVALID, "limits.workspace", (int64_t)((uintptr_t)plan->limits.workspace % 64), 64,
                        "the workspace lies %d bytes past a multiple of 64", (int)((uintptr_t)plan->limits.workspace % 64));
    return FV_OK;
}

static fv_status allocate(fv_plan *plan, fv_error *err)
{
    carver c = { 0 };
    carve_plan(plan, &c);
    plan->memory = fv__ctx_alloc(plan->ctx, c.used);
    if (!plan->memory)
        return fv__fail(err, FV_E_NO_MEMORY, "plan", (int64_t)c.used, 0, "no memory for a plan of %zu bytes", c.used);
    plan->memory_bytes = c.used;
    c = (carver){ plan->memory, 0 };
    carve_plan(plan, &c);
    return FV_OK;
}

fv_status fv__plan_new(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_plan **out, fv_error *err)
{
    fv_plan *plan = fv__ctx_alloc(ctx, sizeof *plan);
    if (!plan) return fv__fail(err, FV_E_NO_MEMORY, "plan", (int64_t)sizeof *plan, 0, "no memory for a plan");
    memset(plan, 0, sizeof *plan);
    plan->ctx = ctx;
    plan->backend = fv__ctx_backend(ctx);
    plan->batch_memory.host_ids = !ctx->cuda;

    fv_status s = fv__limits_init(limits, &plan->limits, err);
    if (s == FV_OK) s = fv__problem_init_in(problem, &plan->frequencies[0], &plan->problem, err);
    if (s != FV_OK) {
        fv__ctx_free(ctx, plan, sizeof *plan);
        return s;
    }
    count_users(plan, 1);
    s = measure(ctx, &plan->problem, &plan->limits, &plan->shape, &plan->capacity, err);
    if (s == FV_OK) s = check_workspace(plan, err);
    if (s == FV_OK) s = allocate(plan, err);
    if (s == FV_OK) s = plan->backend->create(plan, err);
    if (s == FV_OK) *out = plan;
    else fv__plan_delete(plan);
    return s;
}

void fv__plan_delete(fv_plan *plan)
{
    fv_ctx *ctx = plan->ctx;
    if (plan->state) plan->backend->destroy(plan);
    if (plan->memory) fv__ctx_free(ctx, plan->memory, plan->memory_bytes);
    count_users(plan, -1);
    fv__ctx_free(ctx, plan, sizeof *plan);
}

/* ---- update ---- */

/* Same class: what the kernel was chosen for. */
static fv_status same_class(const fv__problem *a, const fv__problem *b, fv_error *err)
{
    if (a->q != b->q || a->k != b->k || a->v != b->v || a->o != b->o)
        return fv__fail(err, FV_E_INVALID, "problem.q", b->q, a->q, "the new problem's element types differ from those the plan was created for");
    if (a->num_q_heads != b->num_q_heads || a->num_kv_heads != b->num_kv_heads)
        return fv__fail(err, FV_E_INVALID, "problem.num_q_heads", b->num_q_heads, a->num_q_heads,
                        "the new problem has %d/%d heads; the plan was created for %d/%d", b->num_q_heads, b->num_kv_heads, a->num_q_heads,
                        a->num_kv_heads);
    if (a->dim_qk != b->dim_qk || a->dim_v != b->dim_v || a->qk_tail != b->qk_tail || a->v_in_k != b->v_in_k)
        return fv__fail(err, FV_E_INVALID, "problem.dim_qk", b->dim_qk, a->dim_qk, "the new problem's dims differ from those the plan was created for");
    if (a->k_scale != b->k_scale || a->v_scale != b->v_scale)
        return fv__fail(err, FV_E_INVALID, "problem.k_scale", b->k_scale, a->k_scale, "the new problem's scales differ from those the plan was created for");
    if (a->tiled != b->tiled)
        return fv__fail(err, FV_E_INVALID, "problem.page_order", b->tiled, a->tiled,
                        "the new problem's page order differs from the one that the plan was created for");
    if (fv__problem_has_bits(b) && !fv__problem_has_bits(a))
        return fv__fail(err, FV_E_INVALID, "problem.variants", 1, 0, "the new problem has a dense mask; the plan was created without room for one");
    if ((b->hooks & ~a->hooks) & (1u << FV__HOOK_KEY_SUM))
        return fv__fail(err, FV_E_INVALID, "problem.variants", 1, 0, "the new problem has key sums; the plan was created without room for them");
    return FV_OK;
}

static fv_status change_problem(fv_plan *plan, const fv_problem *given, fv_error *err)
{
    fv__problem fresh;
    FV_TRY(fv__problem_init_in(given, &plan->frequencies[!plan->now], &fresh, err));
    FV_TRY(same_class(&plan->problem, &fresh, err));
    count_users(plan, -1);
    plan->problem = fresh;
    plan->now = !plan->now;
    count_users(plan, 1);
    return FV_OK;
}

static void add_bound(const fv__use *use, const fv__bound *bound, bool first, fv__bounds *out)
{
    if (!bound->present) return;
    int64_t offset = 0;
    if (bound->sign) {
        const double x = use->planned[bound->param];
        if (x >= FV__NO_BOUND) return;
        offset = bound->sign * (int64_t)x;
    }
    if (first) {
        out->first = out->has_first ? fv__max64(out->first, offset) : offset;
        out->has_first = true;
    } else {
        out->last = out->has_last ? fv__min64(out->last, offset) : offset;
        out->has_last = true;
    }
}

/* What the variants say about visible keys, for this step's arguments. */
static void collect_bounds(const fv__problem *p, fv__bounds *out)
{
    *out = (fv__bounds){ 0 };
    for (int i = 0; i < p->num_uses; i++) {
        const fv__use *use = &p->uses[i];
        const fv__variant_meta *meta = &use->variant->meta;
        add_bound(use, &meta->first, true, out);
        add_bound(use, &meta->last, false, out);
        if (meta->lifted < 0) continue;
        const fv_ranges *list = (const fv_ranges *)(use->args + meta->params[meta->lifted].offset);
        if (!list->ranges) continue;
        out->lifted = true;
        out->lists[out->num_lists++] = list;
    }
}

static fv_status bind_batch(fv_plan *plan, fv_error *err)
{
    const fv_batch *b = &plan->given;
    const fv__batch *made = &plan->batch;
    const bool alone = made->num_requests == 1;
    const fv__bind_shape shape = {
        made->num_requests, made->total_rows, made->total_keys, plan->limits.max_rows, plan->batch_memory.bits_offsets,
        alone ? made->requests[0].num_rows : -1, alone ? made->requests[0].num_keys : -1,
    };
    FV_TRY(fv__problem_bind(&plan->step, FV__BIND_BATCH, "batch.args", b->args, b->num_args, NULL, 0, &shape, err));
    if (!plan->ctx->cuda) FV_TRY(fv__problem_check_ranges(&plan->step, made->num_requests, err));
    FV_TRY(fv__problem_bound(&plan->step, FV__BIND_BATCH, err));
    for (int64_t r = 0; r < made->num_requests && !plan->ctx->cuda; r++)
        FV_TRY(fv__problem_check_parents(&plan->step, r, made->requests[r].row_first, made->requests[r].num_rows, err));
    return FV_OK;
}

static fv_status refresh(fv_plan *plan, fv_stream stream, fv_error *err)
{
    fv__bounds bounds;
    plan->step = plan->problem;
    FV_TRY(fv__batch_read(&plan->given, &plan->limits, fv__problem_has_bits(&plan->problem), &plan->batch_memory, &plan->batch, &plan->tables, err));
    if (plan->problem.tiled && (plan->tables.paged || plan->batch.total_keys))
        FV_TRY(fv__page_order_size("batch.pages.page_size", plan->given.pages.page_size, err));
    FV_TRY(bind_batch(plan, err));
    collect_bounds(&plan->step, &bounds);
    if (bounds.lifted && plan->ctx->cuda)       /* the lists lie on the device: plan for all keys */
        bounds = (fv__bounds){ 0 };
    const fv__planner planner = { &plan->shape, &plan->limits, &plan->capacity, plan->temp };
    FV_TRY(fv__plan_make(&planner, &plan->batch, &bounds, plan->blob, &plan->report, err));
    return plan->backend->update(plan, stream, err);
}

fv_status fv__plan_refresh(fv_plan *plan, const fv_problem *problem, const fv_batch *batch, fv_stream stream, fv_error *err)
{
    const fv_status may = plan->backend->may_update(plan, stream, err);
    if (may == FV_E_NOT_READY) return may;      /* nothing happens */
    plan->ready = false;
    FV_TRY(may);
    if (problem) FV_TRY(change_problem(plan, problem, err));
    plan->given = *batch;
    FV_TRY(refresh(plan, stream, err));
    plan->ready = true;
    return FV_OK;
}
