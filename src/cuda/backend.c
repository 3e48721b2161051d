/* SPDX-License-Identifier: Apache-2.0 */
/* backend.c -- the GPU behind fv__backend: memory and code at creation, one upload an update, one launch a run (key sums: two).
 *
 * Device memory of a plan, one block; everything is at a fixed address, so that a captured launch sees each update:
 *
 *     step | the plan | arguments' arrays, row positions, page ids, V's page ids | tickets | stamps | scratch | lse | partials
 *     \--- an update's upload: the front of it, from one of NUM_STAGES pinned buffers ---/
 *
 * The plan is made in the pinned buffer itself, the lists are put behind it without gaps, and one copy brings what is used of it. The step and the
 * plan are at fixed addresses; the step says where the lists are. What the caller has on the device already (page ids, lengths, arrays of variants) stays
 * there; the step holds its address. In checked mode kernels/stale.cu stamps that memory at an update and looks at it again at each run. */
#include "../engine.h"
#include "state.h"
#include "ops.cuh"
#include "texts.h"

#include <stdlib.h>
#include <string.h>

#define SAME(ours, theirs, field) _Static_assert(offsetof(ours, field) == offsetof(theirs, field), "plan.cuh must agree with plan.h")
_Static_assert(sizeof(d_request) == sizeof(fv__request) && sizeof(d_segment) == sizeof(fv__segment) && sizeof(d_piece) == sizeof(fv__piece) &&
               sizeof(d_record) == sizeof(fv__record) && sizeof(d_listed_row) == sizeof(fv__listed_row) && sizeof(d_faults) == sizeof(fv__faults),
               "plan.cuh must agree with plan.h");
SAME(d_plan_head, fv__plan_head, num_page_positions);
SAME(d_plan_head, fv__plan_head, table_entries);
SAME(d_plan_head, fv__plan_head, bytes);
SAME(d_plan_head, fv__plan_head, queue);
SAME(d_segment, fv__segment, page_positions);
SAME(d_segment, fv__segment, live);
SAME(d_piece, fv__piece, record);
SAME(d_record, fv__record, arrivals);

enum { NUM_STAGES = 3, ARRAYS_ROOM = 64 << 10 };

enum { LIST_ALIGN = 64 };               /* bytes that lists begin at a multiple of */

typedef struct area { int64_t at, room; } area;         /* in the plan's device memory */

typedef struct plan_state {
    fv__attend_config config;
    fv__attend_device device;
    CUfunction function, sums, stale;   /* sums: NULL without key sums; stale: NULL unless checked */
    area step, blob, lists, tickets, stamps, partials, scratch;
    area lse;                           /* [max_rows][num_q_heads]: for key sums when the caller asks for no lse */
    int64_t arrays_room, ids_room;      /* of the lists: all arguments' arrays; the ids of K, and of V */
    int64_t bytes;
    CUdeviceptr memory;
    char *stage[NUM_STAGES];            /* pinned, lists' end bytes each */
    CUevent done[NUM_STAGES];
    bool used[NUM_STAGES];
    int next;
    /* what the code was made for */
    const fv_variant *variants[FV__MAX_VARIANTS];
    int num_variants;
    bool positive;                      /* the scale of scores */
} plan_state;

static struct fv__cuda *cuda_of(const fv_ctx *ctx) { return ctx->cuda; }

/* ---------------------------------------------------------------------------------------------- shape and sizes */

static fv_status shape(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, fv__kernel_shape *out, fv_error *err)
{
    const fv__attend_device device = fv__cuda_limits(&cuda_of(ctx)->device->facts);
    fv__attend_config config;
    FV_TRY(fv__attend_configure(problem, limits, &device, &config, err));
    fv__attend_shape(problem, limits, &config, &device, out);
    return FV_OK;
}

static void place(area *a, int64_t *at, int64_t room)
{
    *a = (area){ *at, room };
    *at += fv__round_up(room, 256);
}

static void lay_out(plan_state *s, const fv__problem *p, const fv_plan_desc *limits, const fv__kernel_shape *kernel, const fv__plan_capacity *capacity)
{
    int64_t at = 0;
    s->arrays_room = ARRAYS_ROOM + 16 * limits->max_requests + 4 * limits->max_rows + p->num_uses * FV__MAX_PARAMS * 16;
    s->ids_room = limits->max_pages * (int64_t)sizeof(int64_t);
    place(&s->step, &at, sizeof(d_step));
    place(&s->blob, &at, capacity->blob_bytes);
    place(&s->lists, &at, s->arrays_room + limits->max_rows * (int64_t)sizeof(int32_t) + 2 * s->ids_room + 4 * LIST_ALIGN);
    place(&s->tickets, &at, (2 + capacity->max_records) * (int64_t)sizeof(int32_t));
    place(&s->stamps, &at, limits->checked ? (limits->max_requests + capacity->max_segments) * (int64_t)sizeof(uint64_t) : 0);
    place(&s->scratch, &at, (int64_t)kernel->workers * s->config.scratch_floats * (int64_t)sizeof(float));
    place(&s->lse, &at, s->config.key_sums ? limits->max_rows * p->num_q_heads * (int64_t)sizeof(float) : 0);
    s->partials = (area){ at, capacity->max_slots * kernel->partial_bytes };
    if (!limits->workspace) at += fv__round_up(s->partials.room, 256);
    s->bytes = at;
}

static void sizes(fv_ctx *ctx, const fv__problem *problem, const fv_plan_desc *limits, const fv__kernel_shape *kernel,
                  const fv__plan_capacity *capacity, fv_sizes *out)
{
    plan_state s = { 0 };
    const fv__attend_device device = fv__cuda_limits(&cuda_of(ctx)->device->facts);
    fv_plan_desc own = *limits;
    own.workspace = NULL;
    if (fv__attend_configure(problem, limits, &device, &s.config, NULL) != FV_OK) return;
    lay_out(&s, problem, &own, kernel, capacity);
    out->device_bytes = (size_t)(s.bytes - fv__round_up(s.partials.room, 256));
    out->host_bytes += sizeof s + NUM_STAGES * (size_t)(s.lists.at + s.lists.room);
}

/* ------------------------------------------------------------------------------------------------- create, destroy */

/* Room for the block's shared memory, and as much of an SM's cache as can be for the blocks beside it. */
static fv_status prepare(const fv__cuda_device *device, const plan_state *s, CUfunction function, fv_error *err)
{
    FV_TRY(fv__cuda_kernel_shared(device, function, s->config.shared_bytes, err));
    FV_TRY(fv__cuda_enter(device, err));
    device->api.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);        /* a hint */
    fv__cuda_leave(device);
    return FV_OK;
}

static fv_status load_code(fv_plan *plan, plan_state *s, const fv__problem *p, CUstream stream, fv_error *err)
{
    char *text = fv__attend_text(p, &s->config);
    if (!text) return fv__fail(err, FV_E_NO_MEMORY, "plan", 0, 0, "no memory for the kernel's text");
    const fv__jit_text extra = { "uses.cuh", text };
    const fv__attend_device device = fv__cuda_limits(&cuda_of(plan->ctx)->device->facts);
    fv__cuda_program program = { .name = plan->shape.name, .source = "attend_sm80.cu", .extra = &extra, .num_extra = 1 };
    fv__attend_parts(&s->config, &device, &program.num_parts, &program.max_registers);
    fv_status status = fv__cuda_jit_function(cuda_of(plan->ctx)->jit, &program, "attend_sm80", stream, &s->function, err);
    if (status == FV_OK) status = prepare(cuda_of(plan->ctx)->device, s, s->function, err);
    s->sums = NULL;
    if (status == FV_OK && s->config.key_sums)
        status = fv__cuda_jit_function(cuda_of(plan->ctx)->jit, &program, "key_sums_sm80", stream, &s->sums, err);
    if (status == FV_OK && s->sums) status = prepare(cuda_of(plan->ctx)->device, s, s->sums, err);
    free(text);
    s->num_variants = p->num_uses;
    s->positive = p->scale > 0;
    for (int i = 0; i < p->num_uses; i++) s->variants[i] = p->uses[i].variant;
    if (status == FV_E_COMPILE) fv__cuda_blame(s->variants, s->num_variants, err);
    return status;
}

static fv_status load_stale(const fv_plan *plan, plan_state *s, fv_error *err)
{
    static const fv__cuda_program program = { .name = "stale", .source = "stale.cu" };
    return plan->limits.checked ? fv__cuda_jit_function(cuda_of(plan->ctx)->jit, &program, "stale", NULL, &s->stale, err) : FV_OK;
}

static fv_status allocate(fv_plan *plan, plan_state *s, fv_error *err)
{
    const struct fv__cuda *c = cuda_of(plan->ctx);
    FV_TRY(fv__cuda_alloc(c->device, (size_t)s->bytes, &s->memory, err));
    for (int i = 0; i < NUM_STAGES; i++) {
        FV_TRY(fv__cuda_alloc_pinned(c->device, (size_t)(s->lists.at + s->lists.room), (void **)&s->stage[i], err));
        FV_TRY(fv__cuda_event_create(c->device, false, &s->done[i], err));
    }
    FV_TRY(fv__cuda_fill_bytes(c->device, s->memory + (CUdeviceptr)s->tickets.at, 0, (size_t)s->tickets.room, c->stream, err));
    return fv__cuda_stream_sync(c->device, c->stream, err);
}

static void destroy(fv_plan *plan)
{
    plan_state *s = plan->state;
    const struct fv__cuda *c = cuda_of(plan->ctx);
    fv__cuda_free(c->device, s->memory);                /* waits for launches that use it */
    for (int i = 0; i < NUM_STAGES; i++) {
        if (s->stage[i]) fv__cuda_free_pinned(c->device, s->stage[i]);
        if (s->done[i]) fv__cuda_event_destroy(c->device, s->done[i]);
    }
    fv__ctx_free(plan->ctx, s, sizeof *s);
    plan->state = NULL;
}

static fv_status create(fv_plan *plan, fv_error *err)
{
    plan_state *s = fv__ctx_alloc(plan->ctx, sizeof *s);
    if (!s) return fv__fail(err, FV_E_NO_MEMORY, "plan", (int64_t)sizeof *s, 0, "no memory for a plan");
    memset(s, 0, sizeof *s);
    plan->state = s;
    s->device = fv__cuda_limits(&cuda_of(plan->ctx)->device->facts);
    fv_status status = fv__attend_configure(&plan->problem, &plan->limits, &s->device, &s->config, err);
    if (status == FV_OK) {
        lay_out(s, &plan->problem, &plan->limits, &plan->shape, &plan->capacity);
        status = load_code(plan, s, &plan->problem, NULL, err);
    }
    if (status == FV_OK) status = load_stale(plan, s, err);
    if (status == FV_OK) status = allocate(plan, s, err);
    if (status != FV_OK) destroy(plan);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- update */

/* The plan is made in the next pinned buffer, once the copy out of that one is done. */
static fv_status may_update(fv_plan *plan, fv_stream stream, fv_error *err)
{
    plan_state *s = plan->state;
    const fv__cuda_device *device = cuda_of(plan->ctx)->device;
    bool capturing = false;
    FV_TRY(fv__cuda_stream_capturing(device, stream, &capturing, err));
    if (capturing)
        return fv__fail(err, FV_E_NOT_READY, "stream", 0, 0, "the stream is being captured: update the plan before or after, between replays");
    if (s->used[s->next]) FV_TRY(fv__cuda_event_sync(device, s->done[s->next], err));
    plan->blob = (fv__plan_head *)(void *)(s->stage[s->next] + s->blob.at);
    return FV_OK;
}

/* An update on its way: bytes are put into the stage, which is copied when all is there. */
typedef struct uploader {
    fv_plan *plan;
    plan_state *s;
    char *stage;
    d_step *step;
    int64_t used;                       /* bytes of the stage */
    int64_t arrays_left;
    fv_error *err;
} uploader;

static CUdeviceptr on_device(const uploader *u, int64_t at) { return u->s->memory + (CUdeviceptr)at; }

/* The place of the next list, which is known to fit; *there is its address on the device. */
static char *put_list(uploader *u, int64_t bytes, const void **there)
{
    const int64_t at = u->used;
    u->used = fv__round_up(at + bytes, LIST_ALIGN);
    *there = (const void *)(uintptr_t)on_device(u, at);
    return u->stage + at;
}

/* A host array of a variant; its address on the device. */
static fv_status put_array(uploader *u, const char *name, const void **data, int64_t bytes)
{
    const void *from = *data;
    if (!from || bytes < 0 || fv__cuda_pointer_device(cuda_of(u->plan->ctx)->device, from) >= 0) return FV_OK;
    if (fv__round_up(bytes, LIST_ALIGN) > u->arrays_left)
        return fv__fail(u->err, FV_E_CAPACITY, name, bytes, u->arrays_left,
                        "'%s' lies in host memory and has %lld bytes; %lld can be taken along: put it on the device", name, (long long)bytes,
                        (long long)u->arrays_left);
    u->arrays_left -= fv__round_up(bytes, LIST_ALIGN);
    memcpy(put_list(u, bytes, data), from, (size_t)bytes);
    return FV_OK;
}

static fv_status put_use(uploader *u, const fv__use *use, unsigned char *args)
{
    const fv__variant_meta *meta = &use->variant->meta;
    const fv__batch *b = &u->plan->batch;
    memcpy(args, use->args, (size_t)meta->args_bytes);
    for (int k = 0; k < meta->num_params; k++) {
        const fv__param *p = &meta->params[k];
        void *at = args + p->offset;
        if (p->kind == FV__FLOATS) {
            fv_floats *x = at;
            FV_TRY(put_array(u, p->name, (const void **)&x->data, x->count * 4));
        } else if (p->kind == FV__INTS) {
            fv_ints *x = at;
            FV_TRY(put_array(u, p->name, (const void **)&x->data, x->count * 4));
        } else if (p->kind == FV__BITS) {
            fv_bits *x = at;
            if (!x->bits) continue;
            FV_TRY(put_array(u, p->name, (const void **)&x->bits, (x->offsets[b->num_requests] + 7) / 8));
            x->offsets = (const int64_t *)(uintptr_t)on_device(u, u->s->blob.at + u->plan->blob->bits_offsets);
        } else if (p->kind == FV__RANGES) {
            fv_ranges *x = at;
            if (x->ranges) FV_TRY(put_array(u, p->name, (const void **)&x->ranges, fv__max64(x->count, 1) * 8));
            if (x->indptr) FV_TRY(put_array(u, p->name, (const void **)&x->indptr, (b->num_requests + 1) * 4));
        }
    }
    return FV_OK;
}

static fv_status put_uses(uploader *u)
{
    const fv__problem *p = &u->plan->step;
    for (int i = 0; i < p->num_uses; i++) FV_TRY(put_use(u, &p->uses[i], u->step->uses + fv__attend_use_offset(p, i)));
    return FV_OK;
}

static size_t index_bytes(const fv_index *x) { return x->type == FV_INDEX_I64 ? 8 : 4; }

static int64_t whole_bytes(const fv_index *x) { return x->count > 0 ? ((x->count - 1) * x->stride + 1) * (int64_t)index_bytes(x) : 0; }

/* Page ids: the caller's on the device, or a copy of the host's. */
static fv_status put_ids(uploader *u, const fv_index *x, const char *field, const void **data, int64_t *stride, int32_t *is64)
{
    *stride = x->stride;
    *is64 = x->type == FV_INDEX_I64;
    *data = x->device;
    if (x->device || !fv__index_given(x)) return FV_OK;
    const int64_t bytes = whole_bytes(x);
    if (bytes > u->s->ids_room)
        return fv__fail(u->err, FV_E_CAPACITY, field, bytes, u->s->ids_room,
                        "%s has %lld bytes on the host; limits.max_pages makes room for %lld", field, (long long)bytes, (long long)u->s->ids_room);
    memcpy(put_list(u, bytes, data), x->host, (size_t)bytes);
    return FV_OK;
}

/* A page table on the host is often far wider than its requests are long, or strided, or longer than its last request needs: then just the entries that
 * segments have are taken along, and the segments say where those are. Tells how many (of a batch without rows none); -1: all of the table goes, as it
 * lies. */
static int64_t entries_in_use(const uploader *u)
{
    const fv_pages *pages = &u->plan->given.pages;
    const fv__plan_head *plan = u->plan->blob;
    const fv__segment *segments = FV__PLAN_ARRAY(plan, fv__segment, segments);
    int64_t entries = 0;
    if (pages->ids.device || pages->v_ids.device) return -1;
    for (int32_t i = 0; i < plan->num_segments; i++) {
        entries += fv__div_up(segments[i].num_keys, plan->page_size);
        if (segments[i].table + fv__div_up(segments[i].num_keys, plan->page_size) > pages->ids.count) return -1;
    }
    const bool has_room = fv__max64(whole_bytes(&pages->ids), whole_bytes(&pages->v_ids)) <= u->s->ids_room;
    if (has_room && 2 * entries >= pages->ids.count) return -1;
    return entries * (int64_t)index_bytes(&pages->ids) <= u->s->ids_room ? entries : -1;
}

static void put_entries(uploader *u, const fv_index *x, int64_t entries, const void **data, int64_t *stride, int32_t *is64)
{
    const fv__plan_head *plan = u->plan->blob;
    const fv__segment *segments = FV__PLAN_ARRAY(plan, fv__segment, segments);
    const int64_t size = (int64_t)index_bytes(x);
    if (!fv__index_given(x)) return;
    char *to = put_list(u, entries * size, data);
    *stride = 1;
    *is64 = size == 8;
    for (int32_t i = 0; i < plan->num_segments; i++) {
        const int64_t n = fv__div_up(segments[i].num_keys, plan->page_size);
        const char *from = (const char *)x->host + segments[i].table * x->stride * size;
        if (x->stride == 1) memcpy(to, from, (size_t)(n * size));
        for (int64_t k = 0; k < n && x->stride != 1; k++) memcpy(to + k * size, from + k * x->stride * size, (size_t)size);
        to += n * size;
    }
}

static void move_tables(fv__plan_head *plan, int64_t entries)
{
    fv__segment *segments = FV__PLAN_ARRAY(plan, fv__segment, segments);
    int64_t at = 0;
    for (int32_t i = 0; i < plan->num_segments; i++) {
        segments[i].table = at;
        at += fv__div_up(segments[i].num_keys, plan->page_size);
    }
    plan->table_entries = entries;
}

static fv_status put_pages(uploader *u)
{
    const fv_pages *pages = &u->plan->given.pages;
    d_step *s = u->step;
    const int64_t entries = entries_in_use(u);
    if (entries < 0) {
        FV_TRY(put_ids(u, &pages->ids, "batch.pages.ids", &s->ids, &s->ids_stride, &s->ids_64));
        return put_ids(u, &pages->v_ids, "batch.pages.v_ids", &s->v_ids, &s->v_ids_stride, &s->v_ids_64);
    }
    put_entries(u, &pages->ids, entries, &s->ids, &s->ids_stride, &s->ids_64);
    put_entries(u, &pages->v_ids, entries, &s->v_ids, &s->v_ids_stride, &s->v_ids_64);
    move_tables(u->plan->blob, entries);
    return FV_OK;
}

static fv_status put_positions(uploader *u)
{
    const fv_index *x = &u->plan->given.row_positions;
    const int64_t rows = u->plan->batch.total_rows;
    const void *there;
    if (!fv__index_given(x)) return FV_OK;
    if (x->device && x->type == FV_INDEX_I32 && x->stride == 1) {
        u->step->row_positions = x->device;
        return FV_OK;
    }
    if (!x->host)
        return fv__fail(u->err, FV_E_UNSUPPORTED, "batch.row_positions", x->stride, 1,
                        "row positions on the device alone must be dense 32-bit integers");
    int32_t *out = (int32_t *)(void *)put_list(u, rows * (int64_t)sizeof *out, &there);
    for (int64_t i = 0; i < rows; i++) out[i] = (int32_t)fv__index_at(x, i);
    u->step->row_positions = there;
    return FV_OK;
}

static void put_lengths(uploader *u)
{
    const fv_index *x = &u->plan->given.lengths;
    if (!fv__index_given(x) || !x->device) return;
    u->step->lengths = x->device;
    u->step->lengths_stride = x->stride;
    u->step->lengths_64 = x->type == FV_INDEX_I64;
}

/* Other variants of the same class need other code; everything else of the plan stays. */
static fv_status renew_code(fv_plan *plan, plan_state *s, CUstream stream, fv_error *err)
{
    const fv__problem *p = &plan->problem;
    bool same = s->num_variants == p->num_uses;
    for (int i = 0; same && i < p->num_uses; i++) same = s->variants[i] == p->uses[i].variant;
    if (same && s->positive == (p->scale > 0)) return FV_OK;
    fv__attend_config fresh;
    FV_TRY(fv__attend_configure(p, &plan->limits, &s->device, &fresh, err));
    if (fresh.rows != s->config.rows || fresh.unit_heads != s->config.unit_heads || fresh.blocks_per_sm < s->config.blocks_per_sm)
        return fv__fail(err, FV_E_INVALID, "problem.variants", p->num_uses, s->num_variants,
                        "the new problem's variants need another kernel configuration: make a plan for them");
    fresh.blocks_per_sm = s->config.blocks_per_sm;
    s->config = fresh;
    return load_code(plan, s, p, stream, err);
}

static fv_status fill_step(uploader *u)
{
    fv_plan *plan = u->plan;
    memset(u->step, 0, sizeof *u->step);
    FV_TRY(put_uses(u));
    if (plan->tables.paged) FV_TRY(put_pages(u));
    FV_TRY(put_positions(u));
    put_lengths(u);
    return FV_OK;
}

/* Checked mode: `write` stamps the caller's memory, else it is compared with the stamps. */
static fv_status launch_stale(const fv_plan *plan, const plan_state *s, bool write, CUstream stream, fv_error *err)
{
    const struct fv__cuda *c = cuda_of(plan->ctx);
    const int64_t items = plan->limits.max_requests + plan->capacity.max_segments;
    d_stale a = { .plan = (const char *)(uintptr_t)(s->memory + (CUdeviceptr)s->blob.at),
                  .step = (const d_step *)(uintptr_t)(s->memory + (CUdeviceptr)s->step.at),
                  .stamps = (uint64_t *)(uintptr_t)(s->memory + (CUdeviceptr)s->stamps.at), .faults = (d_faults *)(uintptr_t)c->faults,
                  .faults_host = (d_faults *)(uintptr_t)c->faults_mapped, .max_requests = plan->limits.max_requests, .write = write };
    const fv__cuda_launch launch = { .function = s->stale, .stream = stream, .block = { 32 * D_WARPS, 1, 1 },
                                     .grid = { (unsigned)fv__min64(fv__div_up(items, D_WARPS), 4 * (int64_t)c->device->facts.num_sms), 1, 1 } };
    return fv__cuda_launch_kernel(c->device, &launch, (void *[]){ &a }, err);
}

static fv_status update(fv_plan *plan, fv_stream stream, fv_error *err)
{
    plan_state *s = plan->state;
    const fv__cuda_device *device = cuda_of(plan->ctx)->device;
    FV_TRY(renew_code(plan, s, stream, err));
    const int i = s->next;
    uploader u = { .plan = plan, .s = s, .stage = s->stage[i], .step = (d_step *)(void *)s->stage[i], .arrays_left = s->arrays_room, .err = err,
                   .used = fv__round_up(s->blob.at + plan->blob->bytes, LIST_ALIGN) };
    FV_TRY(fill_step(&u));
    FV_TRY(fv__cuda_to_device(device, s->memory, u.stage, (size_t)u.used, stream, err));
    s->next = (i + 1) % NUM_STAGES;
    s->used[i] = true;
    FV_TRY(fv__cuda_event_record(device, s->done[i], stream, err));
    return s->stale ? launch_stale(plan, s, true, stream, err) : FV_OK;
}

/* ------------------------------------------------------------------------------------------------------------- run */

/* Strides in bytes; of types narrower than a byte, in elements. */
static d_view view_of(const fv__view *v)
{
    const int64_t by = v->dtype == FV__DTYPE_NONE || fv__dtypes[v->dtype].bits < 8 ? 1 : fv__dtypes[v->dtype].bits / 8;
    return (d_view){ v->data, { v->stride[0] * by, v->stride[1] * by, v->stride[2] * by } };
}

/* Ragged K has [token, head]: the same as pages of one key. */
static d_view keys_of(const fv__view *v, bool paged)
{
    d_view x = view_of(v);
    if (!paged) x = (d_view){ x.data, { x.stride[0], 0, x.stride[1] } };
    return x;
}

static d_scale scale_of(const fv__scale *s, bool paged)
{
    d_scale x = { .data = s->data, .number = s->number };
    memcpy(x.stride, s->stride, sizeof x.stride);
    if (s->kind == FV__SCALE_TOKEN_HEAD && !paged) {
        x.stride[2] = x.stride[1];
        x.stride[1] = 0;
    }
    return x;
}

/* May rows be read or written `bytes` at a time? */
static bool is_wide(const fv__view *v, int bytes)
{
    if (!v->data) return true;
    const int64_t bits = fv__dtypes[v->dtype].bits;
    int64_t any = v->stride[0] | v->stride[1] | v->stride[2] | v->width;
    return (uintptr_t)v->data % (uintptr_t)bytes == 0 && any * bits % (8 * bytes) == 0;
}

/* Which arguments this launch brings itself: those of the run that the step did not have, or had otherwise. */
static void put_run_uses(const fv_plan *plan, const fv__run *run, d_attend *a)
{
    const fv__problem *p = run->problem;
    for (int i = 0; i < p->num_uses; i++) {
        const fv__use *now = &p->uses[i], *step = &plan->step.uses[i];
        const fv__variant_meta *meta = &now->variant->meta;
        memcpy(a->uses + fv__attend_use_offset(p, i), now->args, (size_t)meta->args_bytes);
        for (int k = 0; k < meta->num_params; k++) {
            const fv__param *param = &meta->params[k];
            const size_t bytes = param->kind == FV__RANGES ? 32 : 16;
            if (param->binding != FV__BIND_RUN || !now->given[k]) continue;
            if (!step->given[k] || memcmp(now->args + param->offset, step->args + param->offset, bytes)) a->from_run[i] |= 1u << k;
        }
    }
}

static fv_status run(fv_plan *plan, fv__run *r, fv_stream stream, fv_error *err)
{
    plan_state *s = plan->state;
    const struct fv__cuda *c = cuda_of(plan->ctx);
    const bool paged = plan->tables.paged;
    const fv__problem *p = r->problem;
    d_attend a = {
        .plan = (const char *)(uintptr_t)(s->memory + (CUdeviceptr)s->blob.at), .step = (const d_step *)(uintptr_t)(s->memory + (CUdeviceptr)s->step.at),
        .q = view_of(&r->q), .q_tail = view_of(&r->q_tail), .k = keys_of(&r->k, paged), .k_tail = keys_of(&r->k_tail, paged),
        .v = keys_of(&r->v, paged), .o = view_of(&r->o), .k_block_scale = keys_of(&r->k_block_scale, paged),
        .v_block_scale = keys_of(&r->v_block_scale, paged), .k_scale = scale_of(&r->k_scale, paged), .v_scale = scale_of(&r->v_scale, paged),
        .lse = (float *)(void *)r->lse.data, .lse_stride = { r->lse.stride[0], r->lse.stride[1] },
        .partials = plan->limits.workspace ? plan->limits.workspace : (float *)(uintptr_t)(s->memory + (CUdeviceptr)s->partials.at),
        .scratch = (float *)(uintptr_t)(s->memory + (CUdeviceptr)s->scratch.at), .queue = (int32_t *)(uintptr_t)(s->memory + (CUdeviceptr)s->tickets.at),
        .tickets = (int32_t *)(uintptr_t)(s->memory + (CUdeviceptr)s->tickets.at) + 2,
        .faults = (d_faults *)(uintptr_t)c->faults, .faults_host = (d_faults *)(uintptr_t)c->faults_mapped,
        .scale = p->scale, .lse_factor = p->lse_base2 ? 1.0f : 0.693147180559945309f, .num_q_heads = p->num_q_heads,
        .slot_floats = s->config.slot_floats, .scratch_floats = s->config.scratch_floats,
    };
    const int o_bytes = fv__dtypes[p->o].bits / 8 * 4;
    a.wide = (is_wide(&r->k, 16) && is_wide(&r->k_tail, 16) ? 1 : 0) | (is_wide(&r->v, 16) ? 2 : 0) |
             (is_wide(&r->q, 16) && is_wide(&r->q_tail, 16) ? 4 : 0) | (is_wide(&r->o, o_bytes) ? 8 : 0);
    if (s->sums && !a.lse) {
        a.lse = (float *)(uintptr_t)(s->memory + (CUdeviceptr)s->lse.at);
        a.lse_stride[0] = p->num_q_heads;
        a.lse_stride[1] = 1;
    }
    put_run_uses(plan, r, &a);
    if (s->stale) FV_TRY(launch_stale(plan, s, false, stream, err));
    fv__cuda_launch launch = {
        .function = s->function, .stream = stream, .grid = { (unsigned)plan->shape.workers, 1, 1 }, .block = { (unsigned)(32 * s->config.warps), 1, 1 },
        .shared_bytes = (unsigned)s->config.shared_bytes,
    };
    void *parameters[] = { &a };
    FV_TRY(fv__cuda_launch_kernel(c->device, &launch, parameters, err));
    launch.function = s->sums;
    return s->sums ? fv__cuda_launch_kernel(c->device, &launch, parameters, err) : FV_OK;
}

const fv__backend fv__cuda_backend = { "cuda", shape, sizes, create, destroy, may_update, update, run };
