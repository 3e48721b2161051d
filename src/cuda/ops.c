/* SPDX-License-Identifier: Apache-2.0 */
/* ops.c -- the host half of append.cu, rope.cu, merge.cu and copy_pages.cu: checked jobs become launch parameters.
 *
 * The ring. NUM_STAGES buffers, each pinned on the host and as large on the device: a call that has host arrays takes the next one (it waits while the
 * ring is full), fills it, queues one copy, its launch, and an event behind both. A call with more rows than fit is cut into several launches. */
#include "ops.h"

#include "plan.cuh"
#include "ops.cuh"
#include "state.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_STAGES = 4, STAGE_BYTES = 256 << 10 };

typedef struct buffer {
    char *pinned;
    CUdeviceptr device;
    CUevent done;
    bool used;
} buffer;

struct fv__cuda_ops {
    pthread_mutex_t mutex;              /* the ring; held from taking a buffer to the event behind its use */
    buffer ring[NUM_STAGES];
    int next;
    CUfunction functions[FV__CUDA_NUM_OPS];  /* NULL: not loaded yet; atomic */
};

_Static_assert((int)D_SCALE_NONE == (int)FV__SCALE_NONE && (int)D_SCALE_TENSOR == (int)FV__SCALE_TENSOR && (int)D_SCALE_HEAD == (int)FV__SCALE_HEAD &&
               (int)D_SCALE_TOKEN_HEAD == (int)FV__SCALE_TOKEN_HEAD, "ops.cuh must agree with problem.h");
_Static_assert((int)D_F16 == (int)FV__F16 && (int)D_BF16 == (int)FV__BF16 && (int)D_F32 == (int)FV__F32 && (int)D_E4M3 == (int)FV__E4M3 &&
               (int)D_E5M2 == (int)FV__E5M2 && (int)D_INT8 == (int)FV__INT8 && (int)D_E2M1 == (int)FV__E2M1, "ops.cuh must agree with attend.h");
_Static_assert((int)D_MAX_DIM == FV__MAX_DIM, "ops.cuh must agree with core.h");
_Static_assert(sizeof(d_append) <= 4096 && sizeof(d_rope) <= 4096 && sizeof(d_merge) <= 4096 && sizeof(d_copies) <= 4096, "what a launch can take");

/* ------------------------------------------------------------------------------------------------------------- functions */

fv_status fv__cuda_ops_function(struct fv__cuda *c, int which, CUstream stream, CUfunction *function, fv_error *err)
{
    /* exact: without contraction, for the bits of the CPU */
    static const struct { const char *name, *source; bool exact; } kernels[FV__CUDA_NUM_OPS] = {
        [FV__CUDA_APPEND] = { "append", "append.cu", true }, [FV__CUDA_ROPE] = { "rope", "rope.cu", true },
        [FV__CUDA_MERGE] = { "merge", "merge.cu", true }, [FV__CUDA_COPY_PAGES] = { "copy_pages", "copy_pages.cu", false },
        [FV__CUDA_NORM] = { "norm_rows", "norm.cu", false }, [FV__CUDA_ACT] = { "act", "act.cu", false },
        [FV__CUDA_FILTER] = { "filter", "filter.cu", true }, [FV__CUDA_SAMPLE] = { "sample", "sample.cu", true },
        [FV__CUDA_VERIFY] = { "verify", "verify.cu", true },
    };
    static const char *const options[] = { "--fmad=false" };
    *function = __atomic_load_n(&c->ops->functions[which], __ATOMIC_ACQUIRE);
    if (*function) return FV_OK;
    const char *name = kernels[which].name;
    const fv__cuda_program program = { .name = name, .source = kernels[which].source, .options = options, .num_options = kernels[which].exact };
    FV_TRY(fv__cuda_jit_function(c->jit, &program, name, stream, function, err));
    __atomic_store_n(&c->ops->functions[which], *function, __ATOMIC_RELEASE);
    return FV_OK;
}

fv_status fv__cuda_ops_warm(fv_ctx *ctx, fv_error *err)
{
    CUfunction ignored;
    for (int i = FV__CUDA_APPEND; i <= FV__CUDA_COPY_PAGES; i++)
        FV_TRY(fv__cuda_ops_function(ctx->cuda, i, ctx->cuda->stream, &ignored, err));
    return FV_OK;
}

static fv_status launch_warps(const struct fv__cuda *c, CUfunction function, int64_t blocks, int64_t parts, int warps, void *parameters,
                              CUstream stream, fv_error *err)
{
    const fv__cuda_launch l = { .function = function, .stream = stream, .grid = { (unsigned)blocks, (unsigned)parts, 1 },
                                .block = { 32 * (unsigned)warps, 1, 1 } };
    return fv__cuda_launch_kernel(c->device, &l, (void *[]){ parameters }, err);
}

static fv_status launch(const struct fv__cuda *c, CUfunction function, int64_t blocks, int64_t parts, void *parameters, CUstream stream, fv_error *err)
{
    return launch_warps(c, function, blocks, parts, D_WARPS, parameters, stream, err);
}

/* -------------------------------------------------------------------------------------------------------------- the ring */

fv_status fv__cuda_ops_open(struct fv__cuda *c, fv_error *err)
{
    struct fv__cuda_ops *o = calloc(1, sizeof *o);
    if (!o) return fv__fail(err, FV_E_NO_MEMORY, "ctx", (int64_t)sizeof *o, 0, "no memory for a context");
    pthread_mutex_init(&o->mutex, NULL);
    c->ops = o;
    for (int i = 0; i < NUM_STAGES; i++) {
        FV_TRY(fv__cuda_alloc_pinned(c->device, STAGE_BYTES, (void **)&o->ring[i].pinned, err));
        FV_TRY(fv__cuda_alloc(c->device, STAGE_BYTES, &o->ring[i].device, err));
        FV_TRY(fv__cuda_event_create(c->device, false, &o->ring[i].done, err));
    }
    return FV_OK;
}

void fv__cuda_ops_close(struct fv__cuda *c)
{
    struct fv__cuda_ops *o = c->ops;
    if (!o) return;
    for (int i = 0; i < NUM_STAGES; i++) {
        fv__cuda_free(c->device, o->ring[i].device);            /* waits for launches that use it */
        fv__cuda_free_pinned(c->device, o->ring[i].pinned);
        if (o->ring[i].done) fv__cuda_event_destroy(c->device, o->ring[i].done);
    }
    pthread_mutex_destroy(&o->mutex);
    free(o);
    c->ops = NULL;
}

/* A buffer of the ring while a call fills and uses it. */
typedef struct stage {
    struct fv__cuda *c;
    buffer *b;                          /* NULL: none taken */
    int64_t used;
    CUstream stream;
    fv_error *err;
} stage;

static fv_status take(stage *s)
{
    struct fv__cuda_ops *o = s->c->ops;
    bool capturing = false;
    FV_TRY(fv__cuda_stream_capturing(s->c->device, s->stream, &capturing, s->err));
    if (capturing)
        return fv__fail(s->err, FV_E_NOT_READY, "stream", 0, 0,
                        "the stream is being captured, and an array of this call lies on the host alone: put it on the device");
    pthread_mutex_lock(&o->mutex);
    buffer *b = &o->ring[o->next];
    const fv_status status = b->used ? fv__cuda_event_sync(s->c->device, b->done, s->err) : FV_OK;
    if (status != FV_OK) {
        pthread_mutex_unlock(&o->mutex);
        return status;
    }
    o->next = (o->next + 1) % NUM_STAGES;
    b->used = false;
    s->b = b;
    return FV_OK;
}

/* Room of `bytes` in the stage: where the host writes, and where kernels read. */
static char *room_for(stage *s, int64_t bytes, const void **device)
{
    const int64_t at = s->used;
    if (at + bytes > STAGE_BYTES) return NULL;
    s->used = fv__round_up(at + bytes, 16);
    *device = (const void *)(uintptr_t)(s->b->device + (CUdeviceptr)at);
    return s->b->pinned + at;
}

static fv_status send(stage *s)
{
    return s->b ? fv__cuda_to_device(s->c->device, s->b->device, s->b->pinned, (size_t)s->used, s->stream, s->err) : FV_OK;
}

static fv_status give_back(stage *s, fv_status status)
{
    if (!s->b) return status;
    /* also where something failed: a copy that was queued reads the buffer */
    const fv_status recorded = fv__cuda_event_record(s->c->device, s->b->done, s->stream, status == FV_OK ? s->err : NULL);
    s->b->used = recorded == FV_OK;
    pthread_mutex_unlock(&s->c->ops->mutex);
    return status != FV_OK ? status : recorded;
}

/* An index array for the kernel: the caller's on the device, or a dense copy of `count` entries of the host's. */
static fv_status put_index(stage *s, const fv_index *x, const char *field, int64_t count, d_index *out)
{
    *out = (d_index){ x->device, x->stride, x->type == FV_INDEX_I64, 0 };
    if (x->device || !fv__index_given(x)) return FV_OK;
    if (!s->b) FV_TRY(take(s));
    const int64_t size = x->type == FV_INDEX_I64 ? 8 : 4;
    char *to = room_for(s, count * size, &out->data);
    if (!to)
        return fv__fail(s->err, FV_E_CAPACITY, field, count * size, STAGE_BYTES - s->used,
                        "%s has %lld bytes on the host; %lld can be taken along beside arrays on the device: put it there too", field,
                        (long long)(count * size), (long long)(STAGE_BYTES - s->used));
    for (int64_t i = 0; i < count; i++) memcpy(to + i * size, (const char *)x->host + i * x->stride * size, (size_t)size);
    out->stride = 1;
    return FV_OK;
}

/* ------------------------------------------------------------------------------------------------------- shared pieces */

static int32_t type_of(fv__dtype t)
{
    switch (t) {
    case FV__DTYPE_f16: return D_F16;
    case FV__DTYPE_bf16: return D_BF16;
    case FV__DTYPE_fp8_e4m3: return D_E4M3;
    case FV__DTYPE_fp8_e5m2: return D_E5M2;
    case FV__DTYPE_int8: return D_INT8;
    case FV__DTYPE_fp4_e2m1: return D_E2M1;
    default: return D_F32;
    }
}

d_tensor fv__cuda_tensor(const fv__view *v)
{
    return (d_tensor){ v->data, { v->stride[0], v->stride[1], v->stride[2] }, type_of(v->dtype), v->width };
}

/* Ragged caches have [token, head]: pages of one token. */
static d_tensor cache_of(const fv__view *v, bool paged)
{
    d_tensor t = fv__cuda_tensor(v);
    if (!paged) t.stride[2] = t.stride[1], t.stride[1] = 0;
    return t;
}

static d_row_scale scale_of(const fv__scale *s, bool paged)
{
    d_row_scale x = { (float *)(uintptr_t)s->data, { s->stride[0], s->stride[1], s->stride[2] }, s->kind == FV__SCALE_NONE ? 1.0f : s->number,
                      (int32_t)s->kind };
    if (s->kind == FV__SCALE_TOKEN_HEAD && !paged) x.stride[2] = x.stride[1], x.stride[1] = 0;
    return x;
}

static void set_rotary(const fv__rotary *from, d_rotary *to)
{
    to->dim = from->dim;
    to->interleaved = from->interleaved;
    memcpy(to->frequencies, from->frequencies, (size_t)(from->dim / 2) * sizeof *to->frequencies);
}

/* Blocks a row: as many as its items can use, but not more than fill the device a few times. */
static int64_t parts_of(const struct fv__cuda *c, int64_t rows, int64_t items)
{
    const int64_t wanted = fv__div_up(items, D_WARPS), fill = 8 * (int64_t)c->device->facts.num_sms;
    return fv__max64(fv__min64(wanted, fill / fv__max64(rows, 1)), 1);
}

/* One type of 16 bits, and rows of both that are vectors of 16 bytes, also where `turned` elements of them are pairs; strides in elements. */
static bool is_wide(const d_tensor *a, const d_tensor *b, int turned)
{
    uintptr_t all = (uintptr_t)a->data | (uintptr_t)b->data | (uintptr_t)(2 * a->width);
    for (int i = 0; i < 3; i++) all |= (uintptr_t)(2 * a->stride[i]) | (uintptr_t)(2 * b->stride[i]);
    return all % 16 == 0 && a->type == b->type && a->type <= D_BF16 && turned % 16 == 0;
}

/* -------------------------------------------------------------------------------------------------------------- append */

/* What is stored as it came, turned at most. */
static int wide_of(const d_append *a)
{
    const bool k = a->k_scale.kind == D_SCALE_NONE && !a->new_k_tail.data && is_wide(&a->new_k, &a->k, a->rotary.dim),
               v = a->new_v.data && a->v_scale.kind == D_SCALE_NONE && is_wide(&a->new_v, &a->v, 0),
               q = a->num_q_heads && is_wide(&a->q, &a->q_out, a->rotary.dim);
    return (k ? D_WIDE_K : 0) | (v ? D_WIDE_V : 0) | (q ? D_WIDE_Q : 0);
}

static void fill_append(const struct fv__cuda *c, const fv__cuda_append *call, d_append *a)
{
    const fv__append_job *j = call->job;
    const fv_pages *p = &call->desc->pages;
    const bool paged = j->page_size != 0;
    memset(a, 0, sizeof *a);
    a->new_k = fv__cuda_tensor(&j->new_k);
    a->new_k_tail = fv__cuda_tensor(&j->new_k_tail);
    a->new_v = fv__cuda_tensor(&j->new_v);
    a->k = cache_of(&j->k, paged);
    a->k_tail = cache_of(&j->k_tail, paged);
    a->v = cache_of(&j->v, paged);
    a->k_blocks = cache_of(&j->k_block_scale, paged);
    a->v_blocks = cache_of(&j->v_block_scale, paged);
    a->q = fv__cuda_tensor(&j->q);
    a->q_out = fv__cuda_tensor(&j->q_out);
    a->k_scale = scale_of(&j->k_scale, paged);
    a->v_scale = scale_of(&j->v_scale, paged);
    a->num_requests = call->desc->num_requests;
    a->num_pages = p->num_pages;
    a->num_slots = j->num_slots;
    a->num_ids = p->ids.count;
    a->table_width = p->table_width;
    a->table_stride = p->table_stride;
    a->faults = (d_faults *)(uintptr_t)c->faults;
    a->faults_host = (d_faults *)(uintptr_t)c->faults_mapped;
    a->page_size = j->page_size;
    a->num_kv_heads = j->num_kv_heads;
    a->num_q_heads = j->q.data ? j->num_q_heads : 0;
    a->checked = j->checked;
    set_rotary(&j->rotary, &a->rotary);
    a->wide = wide_of(a);
}

/* Rows [first, last) whose slots the host has made. */
static fv_status put_slots(stage *s, const fv__append_job *j, int64_t first, int64_t last, d_append *a)
{
    const int64_t n = last - first;
    FV_TRY(take(s));
    const int64_t *const from[2] = { j->slots, j->v_slots };
    d_index *const to[2] = { &a->slots, &a->v_slots };
    for (int i = 0; i < 2; i++) {
        *to[i] = (d_index){ NULL, 1, 1, 0 };
        if (from[i]) memcpy(room_for(s, n * 8, &to[i]->data), from[i] + first, (size_t)n * 8);
    }
    a->row_positions = (d_index){ NULL, 1, 0, 0 };
    if (j->rotary.dim) memcpy(room_for(s, n * 4, &a->row_positions.data), j->positions + first, (size_t)n * 4);
    /* kernels count rows from the first of all */
    for (int i = 0; i < 2; i++) if (to[i]->data) to[i]->data = (const int64_t *)to[i]->data - first;
    if (a->row_positions.data) a->row_positions.data = (const int32_t *)a->row_positions.data - first;
    return FV_OK;
}

/* Arrays of which some lie on the device. */
static fv_status put_arrays(stage *s, const fv_append_desc *d, int64_t rows, d_append *a)
{
    const int64_t n = d->num_requests;
    const fv_pages *p = &d->pages;
    FV_TRY(put_index(s, &d->row_positions, "desc.row_positions", rows, &a->row_positions));
    if (fv__index_given(&d->slots)) return put_index(s, &d->slots, "desc.slots", rows, &a->slots);
    FV_TRY(put_index(s, &d->rows, "desc.rows", n + 1, &a->rows));
    FV_TRY(put_index(s, &d->lengths, "desc.lengths", n, &a->lengths));
    FV_TRY(put_index(s, &d->first_positions, "desc.first_positions", n, &a->first_positions));
    if (!p->page_size) return put_index(s, &d->kv_indptr, "desc.kv_indptr", n + 1, &a->kv_indptr);
    FV_TRY(put_index(s, &p->indptr, "desc.pages.indptr", n + 1, &a->indptr));
    FV_TRY(put_index(s, &p->table_rows, "desc.pages.table_rows", n, &a->table_rows));
    FV_TRY(put_index(s, &p->ids, "desc.pages.ids", p->ids.count, &a->ids));
    return put_index(s, &p->v_ids, "desc.pages.v_ids", p->v_ids.count, &a->v_ids);
}

static fv_status append_part(struct fv__cuda *c, const fv__cuda_append *call, CUfunction function, d_append *a, int64_t first, int64_t last,
                             CUstream stream, fv_error *err)
{
    stage s = { .c = c, .stream = stream, .err = err };
    const int64_t items = (int64_t)a->num_kv_heads * (a->new_v.data ? 2 : 1) + a->num_q_heads;
    fv_status status = call->placed ? put_slots(&s, call->job, first, last, a) : put_arrays(&s, call->desc, call->rows, a);
    a->row_first = first;
    a->row_end = last;
    a->num_rows = call->rows;
    a->parts = (int32_t)fv__max64(fv__min64(items, 16 * (int64_t)c->device->facts.num_sms / fv__max64(last - first, 1)), 1);
    if (status == FV_OK) status = send(&s);
    if (status == FV_OK)
        status = launch_warps(c, function, fv__div_up((last - first) * a->parts, D_APPEND_WARPS), 1, D_APPEND_WARPS, a, stream, err);
    return give_back(&s, status);
}

fv_status fv__cuda_append_rows(fv_ctx *ctx, const fv__cuda_append *call, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_append a;
    const int64_t part = call->placed ? (STAGE_BYTES - 64) / (2 * 8 + 4) : call->rows;
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_APPEND, stream, &function, err));
    fill_append(c, call, &a);
    for (int64_t first = 0; first < call->rows; first += part)
        FV_TRY(append_part(c, call, function, &a, first, fv__min64(first + part, call->rows), stream, err));
    return FV_OK;
}

/* ---------------------------------------------------------------------------------------------------------------- rope */

/* Of a block that has one part of a row. */
static int rope_warps(const d_rope *r, int64_t parts)
{
    if (!r->wide) return D_WARPS;
    const int64_t each = r->rotary.dim / 16 + (r->x.width - r->rotary.dim) / 8, pieces = fv__div_up(r->num_heads * each, parts);
    return (int)fv__max64(fv__div_up(fv__div_up(pieces, fv__div_up(pieces, 32 * D_WARPS)), 32), 2);
}

static fv_status rope_part(struct fv__cuda *c, const fv__rope_job *job, CUfunction function, d_rope *r, int64_t first, int64_t last, CUstream stream,
                           fv_error *err)
{
    stage s = { .c = c, .stream = stream, .err = err };
    fv_index positions = *job->positions;
    const int64_t size = positions.type == FV_INDEX_I64 ? 8 : 4;
    fv_status status = FV_OK;
    if (positions.host) positions.host = (const char *)positions.host + first * positions.stride * size;
    if (positions.device) positions.device = (const char *)positions.device + first * positions.stride * size;
    if (r->rotary.dim) status = put_index(&s, &positions, "positions", last - first, &r->positions);
    r->positions.data = (const char *)r->positions.data - first * r->positions.stride * size;
    r->row_first = first;
    if (status == FV_OK) status = send(&s);
    const int64_t parts = parts_of(c, last - first, r->num_heads);
    if (status == FV_OK) status = launch_warps(c, function, last - first, parts, rope_warps(r, parts), r, stream, err);
    return give_back(&s, status);
}

fv_status fv__cuda_rope_rows(fv_ctx *ctx, const fv__rope_job *job, int64_t rows, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_rope r = { .x = fv__cuda_tensor(&job->x), .y = fv__cuda_tensor(&job->y), .num_rows = rows, .num_heads = job->num_heads };
    const int64_t part = job->positions->device ? rows : STAGE_BYTES / 8;
    set_rotary(&job->rotary, &r.rotary);
    r.wide = is_wide(&r.x, &r.y, r.rotary.dim);
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_ROPE, stream, &function, err));
    for (int64_t first = 0; first < rows; first += part)
        FV_TRY(rope_part(c, job, function, &r, first, fv__min64(first + part, rows), stream, err));
    return FV_OK;
}

/* --------------------------------------------------------------------------------------------------------------- merge */

static void put_states(const fv__merge_job *job, d_state *to)
{
    for (int32_t i = 0; i < job->num_states; i++) {
        const fv__view *o = &job->o_states[i], *lse = &job->lse_states[i];
        to[i] = (d_state){ o->data, (const float *)(const void *)lse->data, { o->stride[0], o->stride[1] }, { lse->stride[0], lse->stride[1] },
                           type_of(o->dtype), 0 };
    }
}

static fv_status stage_states(stage *s, const fv__merge_job *job, d_merge *m)
{
    const int64_t bytes = job->num_states * (int64_t)sizeof(d_state);
    const void *device = NULL;
    if (job->num_states <= D_STATES) {
        put_states(job, m->states);
        return FV_OK;
    }
    if (bytes > STAGE_BYTES)
        return fv__fail(s->err, FV_E_CAPACITY, "num_states", job->num_states, STAGE_BYTES / (int64_t)sizeof(d_state),
                        "%d states; one call merges at most %lld: merge in several steps", job->num_states,
                        (long long)(STAGE_BYTES / (int64_t)sizeof(d_state)));
    FV_TRY(take(s));
    put_states(job, (d_state *)(void *)room_for(s, bytes, &device));
    m->many = device;
    return send(s);
}

fv_status fv__cuda_merge_rows(fv_ctx *ctx, const fv__merge_job *job, int64_t rows, fv_stream stream, fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    stage s = { .c = c, .stream = stream, .err = err };
    d_merge m = { .o = fv__cuda_tensor(&job->o), .lse = (float *)(void *)job->lse.data, .lse_stride = { job->lse.stride[0], job->lse.stride[1] },
                  .num_rows = rows, .num_states = job->num_states, .num_heads = job->num_heads, .base2 = job->base2 };
    const int64_t blocks = fv__div_up(rows * job->num_heads, D_WARPS);
    if (blocks > INT32_MAX)
        return fv__fail(err, FV_E_CAPACITY, "o", rows, (int64_t)INT32_MAX * D_WARPS / job->num_heads, "o has %lld rows; merge them in parts",
                        (long long)rows);
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_MERGE, stream, &function, err));
    fv_status status = stage_states(&s, job, &m);
    if (status == FV_OK) status = launch(c, function, blocks, 1, &m, stream, err);
    return give_back(&s, status);
}

/* --------------------------------------------------------------------------------------------------------- page copies */

/* The largest unit of 1 to 16 bytes that everything is a multiple of. */
static int unit_of(const fv__cuda_pages *p, int unit)
{
    if (!p->data) return unit;
    const int64_t all = (p->page_stride | p->token_stride | p->stride[0] | p->stride[1]) / 8 | fv__div_up(p->width, 8) | (int64_t)(uintptr_t)p->data;
    while (all % unit) unit /= 2;
    return unit;
}

static d_pages pages_of(const fv__cuda_pages *p, int unit)
{
    return (d_pages){ p->data, p->page_stride / 8, p->token_stride / 8, { p->stride[0] / 8, p->stride[1] / 8 }, p->num_tokens,
                      { p->extent[0], p->extent[1] }, fv__div_up(p->width, 8) / unit };
}

static int64_t units_of(const d_pages *p) { return p->data ? p->tokens * p->extent[0] * p->extent[1] * p->run : 0; }

/* Does `c` read or write what one of the copies so far writes, or write what one of them reads? */
static bool depends(const d_copies *d, fv_copy c)
{
    for (int i = 0; i < d->num_copies; i++)
        if (c.src == d->copies[i].dst || c.dst == d->copies[i].dst || c.dst == d->copies[i].src) return true;
    return false;
}

fv_status fv__cuda_copy_pages(fv_ctx *ctx, const fv__cuda_pages pages[2], const fv_copy *copies, int64_t num_copies, fv_stream stream,
                              fv_error *err)
{
    struct fv__cuda *c = ctx->cuda;
    CUfunction function;
    d_copies d = { .unit = unit_of(&pages[1], unit_of(&pages[0], 16)) };
    for (int i = 0; i < 2; i++) if (pages[i].data) d.pages[i] = pages_of(&pages[i], d.unit);
    const int64_t units = fv__max64(units_of(&d.pages[0]), units_of(&d.pages[1]));
    const int64_t blocks = fv__min64(fv__div_up(units, 4 * 32 * D_WARPS), 4 * (int64_t)c->device->facts.num_sms);
    if (units == 0) return FV_OK;
    FV_TRY(fv__cuda_ops_function(c, FV__CUDA_COPY_PAGES, stream, &function, err));
    for (int64_t i = 0; i < num_copies; d.num_copies = 0) {
        for (; i < num_copies && d.num_copies < D_COPIES; i++) {
            if (copies[i].src == copies[i].dst) continue;
            if (depends(&d, copies[i])) break;
            d.copies[d.num_copies++] = (d_copy){ copies[i].src, copies[i].dst };
        }
        if (d.num_copies) FV_TRY(launch(c, function, blocks, d.num_copies, &d, stream, err));
    }
    return FV_OK;
}
