/* SPDX-License-Identifier: Apache-2.0 */
/* backend.c -- the CPU behind fv__backend: memory at creation, then one parallel loop over the plan's workers a run. */
#include "../engine.h"
#include "cpu.h"

#include <string.h>

/* What a plan needs on the CPU besides its own memory; one block. */
typedef struct cpu_state {
    size_t bytes;                       /* of the block, this header included */
    float *partials;
    int32_t *tickets;
    int32_t *queue;                     /* pieces that workers have taken; a line of its own */
    char *scratch;
    size_t scratch_bytes;               /* per worker, a multiple of 64 */
    float *lse;                         /* [max_rows][num_q_heads]: for key sums when the caller asks for no lse */
} cpu_state;

/* A user's variant is compiled for the level of the context that it was created in. */
static fv_status check_compiled(const fv_ctx *ctx, const fv__problem *problem, fv_error *err)
{
    for (int i = 0; i < problem->num_uses; i++) {
        const fv_variant *v = problem->uses[i].variant;
        if (!fv__variant_hooks(v, ctx->isa->name))
            return fv__fail(err, FV_E_UNSUPPORTED, "problem.variants", i, 0, "variant %s is not compiled for the CPU level %s: create it in this context",
                            v->meta.name, ctx->isa->name);
    }
    return FV_OK;
}

static fv_status shape(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, fv__kernel_shape *out, fv_error *err)
{
    FV_TRY(check_compiled(ctx, problem, err));
    const int workers = limits->workers ? fv__min32(limits->workers, ctx->num_threads) : ctx->num_threads;
    return ctx->isa->shape(problem, limits, workers, out, err);
}

static bool has_key_sums(const fv__problem *problem) { return problem->hooks >> FV__HOOK_KEY_SUM & 1; }

/* Lays the block out; base NULL: only measures. */
static size_t lay_out(cpu_state *s, char *base, const fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits,
                      const fv__kernel_shape *kernel, const fv__plan_capacity *capacity)
{
    size_t at = (size_t)fv__round_up((int64_t)sizeof *s, 64);
    s->scratch_bytes = (size_t)fv__round_up((int64_t)ctx->isa->scratch_bytes(problem, kernel), 64);
    s->tickets = (int32_t *)(base + at);
    at += (size_t)fv__round_up(capacity->max_records * (int64_t)sizeof(int32_t), 64);
    s->queue = (int32_t *)(base + at);
    at += 64;
    s->scratch = base + at;
    at += s->scratch_bytes * (size_t)kernel->workers;
    s->lse = has_key_sums(problem) ? (float *)(base + at) : NULL;
    if (s->lse) at += (size_t)fv__round_up(limits->max_rows * problem->num_q_heads * (int64_t)sizeof(float), 64);
    s->partials = limits->workspace ? limits->workspace : (float *)(base + at);
    if (!limits->workspace) at += (size_t)fv__round_up(capacity->max_slots * kernel->partial_bytes, 64);
    return at;
}

static void sizes(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, const fv__kernel_shape *kernel,
                  const fv__plan_capacity *capacity, fv_sizes *out)
{
    cpu_state s;
    fv_plan_desc own = *limits;
    own.workspace = NULL;
    const size_t all = lay_out(&s, NULL, ctx, problem, &own, kernel, capacity);
    out->host_bytes += all - (size_t)fv__round_up(capacity->max_slots * kernel->partial_bytes, 64);
}

static fv_status create(fv_plan *plan, fv_error *err)
{
    cpu_state s;
    const size_t bytes = lay_out(&s, NULL, plan->ctx, &plan->problem, &plan->limits, &plan->shape, &plan->capacity);
    char *block = fv__ctx_alloc(plan->ctx, bytes);
    if (!block) return fv__fail(err, FV_E_NO_MEMORY, "plan", (int64_t)bytes, 0, "no memory for a plan's %zu bytes of scratch", bytes);
    lay_out(&s, block, plan->ctx, &plan->problem, &plan->limits, &plan->shape, &plan->capacity);
    s.bytes = bytes;
    memcpy(block, &s, sizeof s);
    memset(s.tickets, 0, (size_t)plan->capacity.max_records * sizeof(int32_t));
    plan->state = block;
    return FV_OK;
}

static void destroy(fv_plan *plan)
{
    cpu_state *s = plan->state;
    fv__ctx_free(plan->ctx, s, s->bytes);
}

static fv_status may_update(fv_plan *plan, fv_stream stream, fv_error *err)
{
    (void)plan; (void)stream; (void)err;
    return FV_OK;
}

/* The problem may be another one than the plan was created for. */
static fv_status update(fv_plan *plan, fv_stream stream, fv_error *err)
{
    (void)stream;
    return check_compiled(plan->ctx, &plan->step, err);
}

typedef struct cpu_job {
    const fv_plan *plan;
    const fv__run *run;
    const cpu_state *state;
} cpu_job;

static void do_worker(void *arg, int worker)
{
    const cpu_job *job = arg;
    void *scratch = job->state->scratch + (size_t)worker * job->state->scratch_bytes;
    job->plan->ctx->isa->attend(job->run, &job->plan->shape, worker, scratch);
}

static void do_key_sums(void *arg, int part)
{
    const cpu_job *job = arg;
    void *scratch = job->state->scratch + (size_t)part * job->state->scratch_bytes;
    job->plan->ctx->isa->key_sums(job->run, &job->plan->shape, part, job->plan->shape.workers, scratch);
}

static fv_status run(fv_plan *plan, fv__run *r, fv_stream stream, fv_error *err)
{
    (void)stream; (void)err;
    const cpu_state *s = plan->state;
    r->partials = s->partials;
    r->tickets = s->tickets;
    r->queue = s->queue;
    *r->queue = 0;
    r->scratch = s->scratch;
    r->scratch_bytes = s->scratch_bytes;
    if (s->lse && !r->lse.data)
        r->lse = (fv__view){ .data = (char *)s->lse, .stride = { plan->problem.num_q_heads, 1, 0 }, .extent = plan->batch.total_rows,
                             .dtype = FV__DTYPE_f32, .width = 1 };
    cpu_job job = { plan, r, s };
    fv__ctx_parallel_for(plan->ctx, do_worker, &job, plan->blob->num_workers);
    if (has_key_sums(&plan->step)) fv__ctx_parallel_for(plan->ctx, do_key_sums, &job, plan->shape.workers);
    return FV_OK;
}

const fv__backend fv__cpu_backend = { "cpu", shape, sizes, create, destroy, may_update, update, run };
