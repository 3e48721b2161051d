/* SPDX-License-Identifier: Apache-2.0 */
/* companions.c -- the host half of norm.cu, act.cu, filter.cu, sample.cu and verify.cu: checked jobs become launch parameters. */
#include "companions.h"

#include "plan.cuh"
#include "ops.cuh"
#include "companions.cuh"
#include "ops.h"
#include "state.h"

#include "foveal/ops.h"

_Static_assert((int)D_SILU == (int)FV__ACT_SILU && (int)D_GELU == (int)FV__ACT_GELU && (int)D_GELU_TANH == (int)FV__ACT_GELU_TANH &&
               (int)D_SOFTMAX == (int)FV__SOFTMAX && (int)D_TOP_K_RENORM == (int)FV__TOP_K_RENORM && (int)D_TOP_P_RENORM == (int)FV__TOP_P_RENORM &&
               (int)D_TOP_K_MASK == (int)FV__TOP_K_MASK, "companions.cuh must agree with cpu_companions.h");
_Static_assert((int)D_TOP_K == FV_TOP_K && (int)D_TOP_P == FV_TOP_P && (int)D_MIN_P == FV_MIN_P && (int)D_TOP_K_FIRST == FV_TOP_K_FIRST &&
               (int)D_MAX_VOCAB == FV_MAX_VOCAB, "companions.cuh must agree with foveal/ops.h");
_Static_assert((int)D_NUMBER == (int)FV__SETTING_NUMBER && (int)D_FLOATS == (int)FV__SETTING_F32 && (int)D_INTS == (int)FV__SETTING_I32 &&
               (int)D_LONGS == (int)FV__SETTING_I64, "companions.cuh must agree with cpu_companions.h");
_Static_assert(sizeof(d_norm) <= 4096 && sizeof(d_sample) <= 4096 && sizeof(d_verify) <= 4096, "what a launch can take");

enum { WARP_WIDTH = 1024 };             /* rows up to this are a warp's */

static fv_status launch(const struct fv__cuda *c, CUfunction function, int64_t blocks, int64_t parts, int threads, void *parameters, fv_stream stream,
                        fv_error *err)
{
    const fv__cuda_launch l = { .function = function, .stream = stream, .grid = { (unsigned)blocks, (unsigned)parts, 1 },
                                .block = { (unsigned)threads, 1, 1 } };
    return fv__cuda_launch_kernel(c->device, &l, (void *[]){ parameters }, err);
}

static d_ints ints_of(const fv__ints *x) { return (d_ints){ x->data, { x->stride[0], x->stride[1] }, x->wide, 0 }; }

/* A number that is a count goes where the stride would be: floats do not hold it. */
static d_param param_of(const fv__setting *p)
{
    const bool number = p->kind == FV__SETTING_NUMBER;
    return (d_param){ p->data, number ? (int64_t)p->number : p->stride, (float)p->number, (int32_t)p->kind };
}

static d_random random_of(const fv__random *r) { return (d_random){ ints_of(&r->seeds), ints_of(&r->offsets), r->seed, r->offset }; }

fv_status fv__cuda_norm_rows(fv_ctx *ctx, const fv__norm_job *job, int64_t items, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_norm p = { .x = fv__cuda_tensor(&job->x), .residual = fv__cuda_tensor(&job->residual), .y = fv__cuda_tensor(&job->y),
                 .weight = fv__cuda_tensor(&job->weight), .bias = fv__cuda_tensor(&job->bias), .num_items = items, .eps = job->eps,
                 .num_heads = job->num_heads, .plus_one = job->plus_one, .centred = job->centred, .warps = job->x.width <= WARP_WIDTH ? 1 : D_WARPS };
    const int64_t blocks = fv__div_up(items, D_WARPS / p.warps);
    if (blocks > INT32_MAX)
        return fv__fail(err, FV_E_CAPACITY, "desc.x", items, INT32_MAX, "desc.x has %lld rows of heads; norm them in parts", (long long)items);
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_NORM, stream, &function, err));
    return launch(c, function, blocks, 1, 32 * D_WARPS, &p, stream, err);
}

fv_status fv__cuda_act_rows(fv_ctx *ctx, const fv__act_job *job, int64_t rows, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_act p = { .x = fv__cuda_tensor(&job->x), .y = fv__cuda_tensor(&job->y), .num_rows = rows, .act = (int32_t)job->act };
    const int64_t wanted = fv__div_up(job->y.width, 4 * 32 * D_WARPS), fill = fv__div_up(16 * (int64_t)c->device->facts.num_sms, rows);
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_ACT, stream, &function, err));
    return launch(c, function, rows, fv__min64(wanted, fill), 32 * D_WARPS, &p, stream, err);
}

fv_status fv__cuda_filter_rows(fv_ctx *ctx, const fv__filter_job *job, int64_t rows, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_filter p = { .x = fv__cuda_tensor(&job->x), .y = fv__cuda_tensor(&job->y), .param = param_of(&job->param), .what = (int32_t)job->what };
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_FILTER, stream, &function, err));
    return launch(c, function, rows, 1, D_SAMPLE_THREADS, &p, stream, err);
}

fv_status fv__cuda_sample_rows(fv_ctx *ctx, const fv__sample_job *job, int64_t samples, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_sample p = { .x = fv__cuda_tensor(&job->x), .top_k = param_of(&job->top_k), .top_p = param_of(&job->top_p), .min_p = param_of(&job->min_p),
                   .rows = ints_of(&job->rows), .ids = ints_of(&job->ids), .valid = job->valid, .valid_stride = job->valid_stride,
                   .num_rows = job->x.extent, .random = random_of(&job->random), .filters = (int32_t)job->filters, .logits = job->logits };
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_SAMPLE, stream, &function, err));
    return launch(c, function, samples, 1, D_SAMPLE_THREADS, &p, stream, err);
}

fv_status fv__cuda_verify_rows(fv_ctx *ctx, const fv__verify_job *job, int64_t requests, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_verify p = { .draft = fv__cuda_tensor(&job->draft), .target = fv__cuda_tensor(&job->target), .draft_ids = ints_of(&job->draft_ids),
                   .ids = ints_of(&job->ids), .num_accepted = ints_of(&job->num_accepted), .num_emitted = ints_of(&job->num_emitted),
                   .random = random_of(&job->random), .num_drafts = job->num_drafts };
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_VERIFY, stream, &function, err));
    return launch(c, function, requests, 1, D_SAMPLE_THREADS, &p, stream, err);
}

fv_status fv__cuda_companions_warm(fv_ctx *ctx, fv_error *err)
{
    CUfunction ignored;
    for (int i = FV__CUDA_NORM; i <= FV__CUDA_VERIFY; i++) FV_TRY(fv__cuda_ops_function(ctx->cuda, i, ctx->cuda->stream, &ignored, err));
    return FV_OK;
}
