/* SPDX-License-Identifier: Apache-2.0 */
/* engine.h -- the plan object: an fv_plan holds its problem, its maxima, all the memory it will ever need, and the step it was last made for.
 *
 * Life of a plan; each arrow names its function:
 *
 *     (nothing) --fv_plan_create--> EMPTY --fv_plan_update--> READY --fv_run--> READY
 *                                     ^                         |
 *                                     +---- update that failed -+
 *     any --fv_plan_destroy--> (nothing)
 *
 * EMPTY   memory is there, no step: fv_run refuses
 * READY   `blob`, `step`, `batch` describe the step; tickets are all 0
 *
 * A backend turns a READY plan into results. cpu/ and cuda/ each fill one fv__backend and never include each other. */
#ifndef FV__ENGINE_H
#define FV__ENGINE_H

#include "batch.h"
#include "ctx.h"

typedef struct fv__backend {
    const char *name;
    /* What the planner needs to know; FV_E_UNSUPPORTED with the reasons in err->text. A function of its arguments alone. */
    fv_status (*shape)(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, fv__kernel_shape *out, fv_error *err);
    /* Bytes besides the plan's own host memory. */
    void (*sizes)(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, const fv__kernel_shape *shape,
                  const fv__plan_capacity *capacity, fv_sizes *out);
    /* Allocates (and compiles) what the backend needs for plan->problem and plan->shape; plan->state is its own. */
    fv_status (*create)(fv_plan *plan, fv_error *err);
    void (*destroy)(fv_plan *plan);
    /* May an update be made on this stream now (not capturing)? May set plan->blob: where the plan is to be made. */
    fv_status (*may_update)(fv_plan *plan, fv_stream stream, fv_error *err);
    /* The blob in host memory is new: bring it to the device in the order of the stream. */
    fv_status (*update)(fv_plan *plan, fv_stream stream, fv_error *err);
    fv_status (*run)(fv_plan *plan, fv__run *run, fv_stream stream, fv_error *err);
} fv__backend;

extern const fv__backend fv__cpu_backend;
extern const fv__backend fv__cuda_backend;

struct fv_plan {
    fv_ctx *ctx;
    const fv__backend *backend;
    fv__problem problem;                /* as created, or as the last update has changed it */
    fv__problem step;                   /* with this step's arguments bound */
    fv_plan_desc limits;
    fv__kernel_shape shape;
    fv__plan_capacity capacity;
    fv__plan_report report;

    void *memory;                       /* one block: blob, temp, requests, ... */
    size_t memory_bytes;
    fv__plan_head *blob;
    void *temp;
    fv__batch_memory batch_memory;

    fv__batch batch;
    fv_batch given;                     /* copy of the step's descriptor: pointers are the caller's, kept by contract */
    fv__tables tables;
    bool ready;
    fv__frequencies frequencies[2];     /* of problem, and of the next problem while it is read */
    int now;                            /* which of them is the problem's */
    void *state;                        /* the backend's */
};

/* Defaults filled in, reserved words and signs checked. */
fv_status fv__limits_init(const fv_plan_desc *given, fv_plan_desc *out, fv_error *err);

fv_status fv__plan_new(fv_ctx *ctx, const fv_problem *problem, const fv_plan_desc *limits, fv_plan **out, fv_error *err);
void fv__plan_delete(fv_plan *plan);
fv_status fv__plan_refresh(fv_plan *plan, const fv_problem *problem, const fv_batch *batch, fv_stream stream, fv_error *err);
fv_status fv__plan_sizes_of(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, fv_sizes *out, fv_error *err);
fv_status fv__plan_run(fv_plan *plan, const fv_tensors *tensors, fv_stream stream, fv_error *err);

const fv__backend *fv__ctx_backend(const fv_ctx *ctx);

#endif
