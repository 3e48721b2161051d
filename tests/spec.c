/* SPDX-License-Identifier: Apache-2.0 */
/* spec.c -- see spec.h.
 *
 * Nouns
 *   subject    one problem with its inputs in host memory (and, on a GPU, copies), its arguments, and the definitions of its variants
 *   array      memory of one tensor: host bytes, and an address on the device where the context has one */
#include "spec.h"

#include "cpu/compile.h"
#include "cpu/cpu.h"
#include "cuda/state.h"
#include "dtype.h"
#include "os.h"
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const spec_shape spec_shapes[] = {
    { .name = "decode", .type = "f32", .q_heads = 8, .kv_heads = 2, .dim_qk = 64, .dim_v = 64, .num_requests = 4, .rows = { 1, 1, 1, 1 },
      .keys = { 1, 33, 64, 200 }, .page = 16 },
    { .name = "decode, split", .type = "bf16", .q_heads = 8, .kv_heads = 1, .dim_qk = 128, .dim_v = 128, .num_requests = 3, .rows = { 1, 1, 1 },
      .keys = { 700, 65, 130 }, .page = 1, .splits = 4 },
    { .name = "prefill", .type = "f32", .q_heads = 4, .kv_heads = 4, .dim_qk = 32, .dim_v = 48, .num_requests = 2, .rows = { 70, 5 },
      .keys = { 130, 5 }, .page = 16 },
    { .name = "prefill, f16", .type = "f16", .q_heads = 6, .kv_heads = 2, .dim_qk = 80, .dim_v = 80, .num_requests = 2, .rows = { 33, 100 },
      .keys = { 97, 100 }, .page = 64, .first_position = 1000 },
    { .name = "ragged", .type = "bf16", .q_heads = 4, .kv_heads = 2, .dim_qk = 64, .dim_v = 64, .num_requests = 3, .rows = { 3, 40, 1 },
      .keys = { 3, 150, 0 }, .lse_base2 = true },
    { .name = "8-bit cache", .type = "bf16", .kv_type = "fp8_e4m3", .q_heads = 8, .kv_heads = 2, .dim_qk = 128, .dim_v = 128, .num_requests = 2,
      .rows = { 1, 20 }, .keys = { 100, 64 }, .page = 16 },
    { .name = "shared prefix", .type = "f32", .q_heads = 4, .kv_heads = 1, .dim_qk = 64, .dim_v = 64, .num_requests = 6, .rows = { 1, 1, 1, 1, 1, 1 },
      .keys = { 300, 290, 300, 310, 299, 301 }, .page = 16, .shared_pages = 16 },
    { .name = "invariant", .type = "f32", .q_heads = 4, .kv_heads = 2, .dim_qk = 64, .dim_v = 64, .num_requests = 2, .rows = { 9, 1 },
      .keys = { 300, 180 }, .page = 16, .splits = 2, .invariant = true },
    { .name = NULL },
};

enum { MAX_ARGS = SPEC_MAX_USES * FV__MAX_PARAMS * 2 };

typedef struct array {
    void *host;
    size_t bytes;
    CUdeviceptr device;
} array;

typedef struct argument {
    char name[64];
    fv__binding binding;
    array data;
    fv_tensor host, device;
    double number;
    int use;
    bool is_tensor, is_sums, is_maxes;  /* the last two: written */
} argument;

typedef struct subject {
    fv_ctx *ctx;
    const spec_shape *shape;
    const fv_variant *variants[SPEC_MAX_USES];
    int num_uses;
    fv__dtype type, kv_type;
    int64_t total_rows, total_keys, num_pages, num_tokens;
    int32_t row_indptr[SPEC_MAX_REQUESTS + 1], lengths[SPEC_MAX_REQUESTS], first_positions[SPEC_MAX_REQUESTS];
    int32_t page_indptr[SPEC_MAX_REQUESTS + 1], kv_indptr[SPEC_MAX_REQUESTS + 1];
    int32_t *page_ids;
    int64_t bits_offsets[SPEC_MAX_REQUESTS + 1];
    array q, k, v, o, lse;
    argument *args;                     /* [MAX_ARGS] */
    int num_args;
    fv_arg lists[3][MAX_ARGS];          /* by binding, as the library is given them */
    int counts[3];
    fv_variant_use uses[SPEC_MAX_USES];
    fv_plan *plan;
    uint64_t random;
    fv__problem problem;                /* the same arguments bound to host memory: what definitions read */
    bool has_problem;
    fv__cpu_code code[SPEC_MAX_USES];
    fv_error *err;
} subject;

static bool has_hook(const subject *s, fv__hook hook) { return s->problem.hooks >> hook & 1; }

/* ------------------------------------------------------------------------------------------------------------- memory */

static uint64_t draw(subject *s)
{
    uint64_t x = s->random += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static double uniform(subject *s, double low, double high) { return low + (high - low) * (double)(draw(s) >> 11) * 0x1p-53; }

static fv_status make_array(subject *s, array *a, int64_t bytes)
{
    a->bytes = (size_t)fv__max64(bytes, 16);
    a->host = calloc(1, a->bytes);
    if (!a->host) return fv__fail(s->err, FV_E_NO_MEMORY, "check", bytes, 0, "no memory for the inputs of a check");
    return s->ctx->cuda ? fv__cuda_alloc(s->ctx->cuda->device, a->bytes, &a->device, s->err) : FV_OK;
}

static fv_status upload(subject *s, array *a)
{
    if (!s->ctx->cuda) return FV_OK;
    return fv__cuda_to_device(s->ctx->cuda->device, a->device, a->host, a->bytes, s->ctx->cuda->stream, s->err);
}

static fv_status download(subject *s, array *a)
{
    if (!s->ctx->cuda) return FV_OK;
    FV_TRY(fv__cuda_to_host(s->ctx->cuda->device, a->host, a->device, a->bytes, s->ctx->cuda->stream, s->err));
    return fv__cuda_stream_sync(s->ctx->cuda->device, s->ctx->cuda->stream, s->err);
}

static void free_array(subject *s, array *a)
{
    if (a->device) fv__cuda_free(s->ctx->cuda->device, a->device);
    free(a->host);
}

static void *address(const subject *s, const array *a) { return s->ctx->cuda ? (void *)(uintptr_t)a->device : a->host; }

/* Large ones, which only clocks look at, repeat. */
static void fill(subject *s, array *a, fv__dtype type, int64_t count, double amplitude)
{
    const int64_t own = fv__min64(count, 1 << 20);
    for (int64_t i = 0; i < own; i++) fv__dtype_store(type, a->host, i, uniform(s, -amplitude, amplitude));
    for (int64_t i = own; i < count; i += own)
        memcpy((char *)a->host + fv__dtype_bytes(type, i), a->host, (size_t)fv__dtype_bytes(type, fv__min64(own, count - i)));
}

/* ------------------------------------------------------------------------------------------------------------- batches */

static fv_status place_pages(subject *s)
{
    const spec_shape *h = s->shape;
    int64_t entries = 0;
    for (int r = 0; r < h->num_requests; r++) entries += fv__div_up(h->keys[r], h->page);
    s->num_pages = entries + 3;
    s->page_ids = malloc((size_t)(entries + 1) * sizeof *s->page_ids);
    int32_t *order = malloc((size_t)s->num_pages * sizeof *order);
    if (!s->page_ids || !order) {
        free(order);
        return fv__fail(s->err, FV_E_NO_MEMORY, "check", entries, 0, "no memory for a page table");
    }
    for (int64_t i = 0; i < s->num_pages; i++) {        /* a shuffle: page i swaps with one before it */
        const int64_t j = (int64_t)(draw(s) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    int64_t at = 0;
    for (int r = 0; r < h->num_requests; r++) {
        s->page_indptr[r] = (int32_t)at;
        const int64_t n = fv__div_up(h->keys[r], h->page);
        for (int64_t i = 0; i < n; i++) s->page_ids[at + i] = r > 0 && i < h->shared_pages ? s->page_ids[i] : order[at + i];
        at += n;
    }
    s->page_indptr[h->num_requests] = (int32_t)at;
    free(order);
    return FV_OK;
}

static fv_status make_batch(subject *s)
{
    const spec_shape *h = s->shape;
    for (int r = 0; r < h->num_requests; r++) {
        s->row_indptr[r + 1] = s->row_indptr[r] + h->rows[r];
        s->kv_indptr[r + 1] = s->kv_indptr[r] + h->keys[r];
        s->lengths[r] = h->keys[r];
        s->first_positions[r] = h->first_position;
        s->bits_offsets[r + 1] = fv__round_up(s->bits_offsets[r] + (int64_t)h->rows[r] * h->keys[r], 8);
    }
    s->total_rows = s->row_indptr[h->num_requests];
    s->total_keys = s->kv_indptr[h->num_requests];
    if (h->page) FV_TRY(place_pages(s));
    s->num_tokens = h->page ? s->num_pages * h->page : s->total_keys;
    return FV_OK;
}

static int64_t token_of(const subject *s, int request, int64_t key)
{
    const int page = s->shape->page;
    if (!page) return s->kv_indptr[request] + key;
    return (int64_t)s->page_ids[s->page_indptr[request] + key / page] * page + key % page;
}

static fv_status make_inputs(subject *s)
{
    const spec_shape *h = s->shape;
    const int64_t q = s->total_rows * h->q_heads * h->dim_qk, k = s->num_tokens * h->kv_heads * h->dim_qk, v = s->num_tokens * h->kv_heads * h->dim_v,
                  o = s->total_rows * h->q_heads * h->dim_v;
    FV_TRY(make_array(s, &s->q, fv__dtype_bytes(s->type, q)));
    FV_TRY(make_array(s, &s->k, fv__dtype_bytes(s->kv_type, k)));
    FV_TRY(make_array(s, &s->v, fv__dtype_bytes(s->kv_type, v)));
    FV_TRY(make_array(s, &s->o, fv__dtype_bytes(s->type, o)));
    FV_TRY(make_array(s, &s->lse, s->total_rows * h->q_heads * 4));
    fill(s, &s->q, s->type, q, 3);
    fill(s, &s->k, s->kv_type, k, 2);
    fill(s, &s->v, s->kv_type, v, 1);
    FV_TRY(upload(s, &s->q));
    FV_TRY(upload(s, &s->k));
    return upload(s, &s->v);
}

/* ----------------------------------------------------------------------------------------------------------- arguments */

static argument *new_argument(subject *s, int use, const fv__param *p, const char *suffix)
{
    argument *a = &s->args[s->num_args++];
    snprintf(a->name, sizeof a->name, "%s.%s%s", s->variants[use]->meta.name, p->name, suffix);
    a->binding = p->binding;
    a->use = use;
    return a;
}

static fv_status make_tensor(subject *s, argument *a, const char *dtype, int64_t bytes, int ndim, int64_t rows, int64_t columns)
{
    a->is_tensor = true;
    a->host = (fv_tensor){ .dtype = dtype, .ndim = ndim, .shape = { rows, columns }, .stride = { ndim == 2 ? columns : 1, 1 } };
    FV_TRY(make_array(s, &a->data, bytes));
    a->host.data = a->data.host;
    return FV_OK;
}

/* How many entries a list has; -1: not given, its default is what is meant. */
static int64_t count_of(const subject *s, int use, const fv__param *p)
{
    const fv__variant_meta *meta = &s->variants[use]->meta;
    if (p->dflt == FV__DEFAULT_FREQUENCIES) return -1;
    switch (p->count_of) {
    case FV__COUNT_HEADS: return s->shape->q_heads;
    case FV__COUNT_REQUESTS: return s->shape->num_requests;
    case FV__COUNT_ROWS: return s->total_rows;
    case FV__COUNT_NUMBER: return p->count;
    case FV__COUNT_HALF: return (int64_t)meta->params[p->count].example / 2;
    case FV__COUNT_ANY: break;
    }
    return 48;
}

static fv_status make_list(subject *s, int use, const fv__param *p)
{
    const int64_t n = count_of(s, use, p);
    const bool floats = p->kind == FV__FLOATS;
    if (n < 0) return FV_OK;
    argument *a = new_argument(s, use, p, "");
    FV_TRY(make_tensor(s, a, floats ? "f32" : "i32", n * 4, 1, n, 1));
    float *x = a->data.host;
    int32_t *i32 = a->data.host;
    int request = 0;
    for (int64_t i = 0; i < n; i++) {
        if (floats) {
            x[i] = (float)uniform(s, 0.01, 0.5);
        } else if (p->count_of == FV__COUNT_ROWS) {     /* an earlier row of the request, or none */
            while (i >= s->row_indptr[request + 1]) request++;
            i32[i] = (int32_t)(draw(s) % (uint64_t)(i - s->row_indptr[request] + 1)) - 1;
        } else {
            i32[i] = (int32_t)(draw(s) % 8);
        }
    }
    return FV_OK;
}

static fv_status make_bits(subject *s, int use, const fv__param *p)
{
    const int64_t bits = s->bits_offsets[s->shape->num_requests];
    argument *a = new_argument(s, use, p, "");
    const bool alone = s->shape->num_requests == 1;
    FV_TRY(make_tensor(s, a, "b1", bits / 8, 1, alone ? s->total_rows * s->total_keys : bits, 1));
    for (int64_t i = 0; i < bits / 8; i++) ((uint8_t *)a->data.host)[i] = (uint8_t)(draw(s) | draw(s));
    return FV_OK;
}

/* Two ranges a request: some keys near its beginning, some near its end; the second request has none. */
static fv_status make_ranges(subject *s, int use, const fv__param *p)
{
    const int n = s->shape->num_requests;
    argument *a = new_argument(s, use, p, ""), *b = new_argument(s, use, p, "_indptr");
    FV_TRY(make_tensor(s, a, "i32", n * 2 * 8, 2, n * 2, 2));
    FV_TRY(make_tensor(s, b, "i32", (n + 1) * 4, 1, n + 1, 1));
    int32_t *lists = a->data.host, *indptr = b->data.host, used = 0;
    for (int r = 0; r < n; r++) {
        const int32_t first = s->shape->first_position, keys = s->shape->keys[r], third = keys / 3;
        indptr[r] = used;
        if (r == 1 && n > 1) continue;
        const int32_t ranges[4] = { first + third / 2, first + third, first + 2 * third, first + keys };
        memcpy(lists + 2 * used, ranges, sizeof ranges);
        used += 2;
    }
    indptr[n] = used;
    a->host.shape[0] = used;
    return FV_OK;
}

static fv_status make_argument(subject *s, int use, const fv__param *p)
{
    switch (p->kind) {
    case FV__NUMBER:
    case FV__INT: new_argument(s, use, p, "")->number = p->example; return FV_OK;
    case FV__FLOATS:
    case FV__INTS: return make_list(s, use, p);
    case FV__BITS: return make_bits(s, use, p);
    case FV__RANGES: return make_ranges(s, use, p);
    case FV__SUMS: {
        argument *a = new_argument(s, use, p, "");
        a->is_sums = true;
        return make_tensor(s, a, "f32", s->shape->kv_heads * s->total_keys * 4, 2, s->shape->kv_heads, s->total_keys);
    }
    case FV__MAXES: {
        argument *a = new_argument(s, use, p, "");
        a->is_maxes = true;
        return make_tensor(s, a, "f32", s->shape->q_heads * s->total_rows * 4, 2, s->total_rows, s->shape->q_heads);
    }
    }
    return FV_OK;
}

/* What the library is given: a GPU's run arguments lie there, all others on the host. */
static fv_status list_arguments(subject *s)
{
    for (int i = 0; i < s->num_args; i++) {
        argument *a = &s->args[i];
        a->device = a->host;
        if (a->is_tensor && a->binding == FV__BIND_RUN) {
            FV_TRY(upload(s, &a->data));
            a->device.data = address(s, &a->data);
        }
        s->lists[a->binding][s->counts[a->binding]++] = (fv_arg){ .name = a->name, .number = a->number, .tensor = a->is_tensor ? &a->device : NULL };
    }
    return FV_OK;
}

static fv_status make_arguments(subject *s)
{
    s->args = calloc(MAX_ARGS, sizeof *s->args);
    if (!s->args) return fv__fail(s->err, FV_E_NO_MEMORY, "check", MAX_ARGS, 0, "no memory for arguments");
    for (int u = 0; u < s->num_uses; u++) {
        const fv__variant_meta *meta = &s->variants[u]->meta;
        for (int i = 0; i < meta->num_params; i++) FV_TRY(make_argument(s, u, &meta->params[i]));
    }
    return list_arguments(s);
}

/* The problem's own arguments, use by use. */
static int own_arguments(const subject *s, int use, const fv_arg **first)
{
    const fv_arg *list = s->lists[FV__BIND_PROBLEM];
    const char *name = s->variants[use]->meta.name;
    int at = 0, n = 0;
    while (at < s->counts[FV__BIND_PROBLEM] && (strncmp(list[at].name, name, strlen(name)) || list[at].name[strlen(name)] != '.')) at++;
    while (at + n < s->counts[FV__BIND_PROBLEM] && !strncmp(list[at + n].name, name, strlen(name)) && list[at + n].name[strlen(name)] == '.') n++;
    *first = list + at;
    return n;
}

static fv_problem make_problem(subject *s)
{
    const spec_shape *h = s->shape;
    for (int u = 0; u < s->num_uses; u++) {
        s->uses[u] = (fv_variant_use){ .variant = s->variants[u] };
        s->uses[u].num_args = own_arguments(s, u, &s->uses[u].args);
    }
    return (fv_problem){ .q = h->type, .k = fv__dtypes[s->kv_type].name, .v = fv__dtypes[s->kv_type].name, .o = h->type, .num_q_heads = h->q_heads,
                         .num_kv_heads = h->kv_heads, .dim_qk = h->dim_qk, .dim_v = h->dim_v, .variants = s->uses, .num_variants = s->num_uses,
                         .lse_base2 = h->lse_base2 };
}

/* All arguments bound to host memory. */
static fv_status bind_definition(subject *s)
{
    const fv_problem given = make_problem(s);
    const int n = s->shape->num_requests;
    const fv__bind_shape shape = { n, s->total_rows, s->total_keys, s->total_rows, s->bits_offsets, n == 1 ? s->total_rows : -1,
                                   n == 1 ? s->total_keys : -1 };
    FV_TRY(fv__problem_init(&given, &s->problem, s->err));
    s->has_problem = true;
    for (int when = FV__BIND_BATCH; when <= FV__BIND_RUN; when++) {
        fv_arg list[MAX_ARGS];
        int count = 0;
        for (int i = 0; i < s->num_args; i++) {
            argument *a = &s->args[i];
            if ((int)a->binding == when) list[count++] = (fv_arg){ .name = a->name, .number = a->number, .tensor = a->is_tensor ? &a->host : NULL };
        }
        FV_TRY(fv__problem_bind(&s->problem, (fv__binding)when, "check", list, count, NULL, 0, &shape, s->err));
    }
    return fv__problem_bound(&s->problem, FV__BIND_RUN, s->err);
}

/* ------------------------------------------------------------------------------------------------------------- running */

static fv_status find_variants(subject *s, const fv_variant_use *uses, int num_uses)
{
    if (num_uses > SPEC_MAX_USES) return fv__fail(s->err, FV_E_INVALID, "uses", num_uses, SPEC_MAX_USES, "more than %d variants", SPEC_MAX_USES);
    for (int i = 0; i < num_uses; i++) {
        s->variants[i] = uses[i].variant ? uses[i].variant : fv__variant_find(uses[i].name);
        if (!s->variants[i]) return fv__fail(s->err, FV_E_INVALID, "uses", i, 0, "there is no variant \"%.40s\"", uses[i].name ? uses[i].name : "");
    }
    s->num_uses = num_uses;
    return FV_OK;
}

/* Copies and launches go to one stream, in order. */
static fv_stream stream_of(const subject *s) { return s->ctx->cuda ? (fv_stream)s->ctx->cuda->stream : NULL; }

static fv_status make_plan(subject *s)
{
    const spec_shape *h = s->shape;
    const fv_problem problem = make_problem(s);
    const fv_plan_desc limits = { .max_requests = h->num_requests, .max_rows = s->total_rows, .max_kv_tokens = fv__max64(s->total_keys, 1),
                                  .max_pages = h->page ? s->page_indptr[h->num_requests] + 1 : 0, .splits = h->splits, .invariant = h->invariant,
                                  .chunk = 64, .sharing = h->shared_pages ? FV_SHARING_FIND : FV_SHARING_OFF };
    fv_batch batch = { .num_requests = h->num_requests, .rows = fv_i32(s->row_indptr, h->num_requests + 1),
                       .lengths = fv_i32(s->lengths, h->num_requests), .first_positions = fv_i32(s->first_positions, h->num_requests),
                       .args = s->lists[FV__BIND_BATCH], .num_args = s->counts[FV__BIND_BATCH] };
    if (h->page)
        batch.pages = (fv_pages){ .page_size = h->page, .num_pages = s->num_pages, .indptr = fv_i32(s->page_indptr, h->num_requests + 1),
                                  .ids = fv_i32(s->page_ids, s->page_indptr[h->num_requests]) };
    else
        batch.kv_indptr = fv_i32(s->kv_indptr, h->num_requests + 1);
    FV_TRY(fv_plan_create(s->ctx, &problem, &limits, &s->plan, s->err));
    return fv_plan_update(s->plan, NULL, &batch, stream_of(s), s->err);
}

static fv_status begin(subject *s, fv_ctx *ctx, const fv_variant_use *uses, int num_uses, const spec_shape *shape, fv_error *err)
{
    memset(s, 0, sizeof *s);
    s->ctx = ctx;
    s->shape = shape;
    s->err = err;
    s->random = 7;
    s->type = fv__dtype_find(shape->type);
    s->kv_type = fv__dtype_find(shape->kv_type ? shape->kv_type : shape->type);
    FV_TRY(find_variants(s, uses, num_uses));
    FV_TRY(make_batch(s));
    FV_TRY(make_inputs(s));
    FV_TRY(make_arguments(s));
    FV_TRY(bind_definition(s));
    return make_plan(s);
}

static void end(subject *s)
{
    fv_plan_destroy(&s->plan);
    for (int u = 0; u < s->num_uses; u++) fv__cpu_code_close(&s->code[u]);
    if (s->has_problem) fv__problem_free(&s->problem);
    for (int i = 0; s->args && i < s->num_args; i++) free_array(s, &s->args[i].data);
    free(s->args);
    free_array(s, &s->q);
    free_array(s, &s->k);
    free_array(s, &s->v);
    free_array(s, &s->o);
    free_array(s, &s->lse);
    free(s->page_ids);
}

static fv_tensor dense(const subject *s, const array *a, const char *type, int ndim, const int64_t *shape)
{
    fv_tensor t = { .data = address(s, a), .dtype = type, .ndim = ndim };
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        stride *= shape[i];
    }
    return t;
}

static fv_tensor cache_tensor(const subject *s, const array *a, int dim)
{
    const spec_shape *h = s->shape;
    const char *type = fv__dtypes[s->kv_type].name;
    if (h->page) return dense(s, a, type, 4, (int64_t[]){ s->num_pages, h->page, h->kv_heads, dim });
    return dense(s, a, type, 3, (int64_t[]){ s->num_tokens, h->kv_heads, dim });
}

static fv_status run(subject *s)
{
    const spec_shape *h = s->shape;
    fv_tensors t = { .q = dense(s, &s->q, h->type, 3, (int64_t[]){ s->total_rows, h->q_heads, h->dim_qk }), .k = cache_tensor(s, &s->k, h->dim_qk),
                     .v = cache_tensor(s, &s->v, h->dim_v), .o = dense(s, &s->o, h->type, 3, (int64_t[]){ s->total_rows, h->q_heads, h->dim_v }),
                     .args = s->lists[FV__BIND_RUN], .num_args = s->counts[FV__BIND_RUN] };
    if (!has_hook(s, FV__HOOK_WEIGHT)) t.lse = dense(s, &s->lse, "f32", 2, (int64_t[]){ s->total_rows, h->q_heads });
    return fv_run(s->plan, &t, stream_of(s), s->err);
}

/* --------------------------------------------------------------------------------------------------------- definitions */

/* What one row and head should be, and how far off its sums may be. */
typedef struct wanted {
    double *o, *magnitude;              /* [dim_v]; magnitude: sum of weight x |v| */
    double lse, max, blur;              /* max: of the scores; blur: what rounding may change one by */
} wanted;

typedef struct memory {
    double *q, *turned_q, *k, *v, *s, *share;   /* [dim_qk], [dim_qk], [keys][dim_qk], [keys][dim_v], [keys], [keys] of one request and kv head */
    bool *seen;
    double *o, *magnitude;
    double *sums;                       /* [kv heads][total keys] */
} memory;

static const fv__spec_hooks *hooks_of(const subject *s, int u) { return s->code[u].spec; }
static const void *args_of(const subject *s, int u) { return s->problem.uses[u].args; }

static void turn(const subject *s, int u, bool key, fv__spec_at at, double *x)
{
    const fv__spec_hooks *h = hooks_of(s, u);
    bool interleaved;
    int32_t n = h->pairs(args_of(s, u), &interleaved);
    if (n > s->shape->dim_qk) n = s->shape->dim_qk;
    for (at.index = 0; at.index < n / 2; at.index++) {
        double *lo = interleaved ? &x[2 * at.index] : &x[at.index], *hi = interleaved ? &x[2 * at.index + 1] : &x[at.index + n / 2];
        (key ? h->key : h->query)(args_of(s, u), &at, lo, hi);
    }
}

/* K and V of one request and kv head, as the hooks make them. Hooks on keys know the key alone. */
static void load_keys(const subject *s, int request, int g, memory *m)
{
    const spec_shape *h = s->shape;
    for (int64_t j = 0; j < h->keys[request]; j++) {
        const int64_t row = token_of(s, request, j) * h->kv_heads + g;
        double *k = m->k + j * h->dim_qk, *v = m->v + j * h->dim_v;
        fv__spec_at at = { .request = request, .head = g * (h->q_heads / h->kv_heads), .key = (int32_t)j, .k_pos = h->first_position + (int32_t)j,
                           .num_q_heads = h->q_heads };
        for (int d = 0; d < h->dim_qk; d++) k[d] = fv__dtype_load(s->kv_type, s->k.host, row * h->dim_qk + d);
        for (int d = 0; d < h->dim_v; d++) v[d] = fv__dtype_load(s->kv_type, s->v.host, row * h->dim_v + d);
        for (int u = 0; u < s->num_uses; u++) {
            if (hooks_of(s, u)->key) turn(s, u, true, at, k);
            for (at.index = 0; hooks_of(s, u)->value && at.index < h->dim_v; at.index++)
                v[at.index] = hooks_of(s, u)->value(args_of(s, u), &at, v[at.index]);
        }
    }
}

static fv__spec_at place(const subject *s, int request, int row, int head)
{
    const spec_shape *h = s->shape;
    return (fv__spec_at){ .request = request, .row = row, .batch_row = s->row_indptr[request] + row, .head = head,
                          .q_pos = h->first_position + h->keys[request] - h->rows[request] + row, .num_rows = h->rows[request],
                          .num_keys = h->keys[request], .num_q_heads = h->q_heads };
}

static void load_query(const subject *s, const fv__spec_at *at, double *q)
{
    const spec_shape *h = s->shape;
    for (int d = 0; d < h->dim_qk; d++)
        q[d] = fv__dtype_load(s->type, s->q.host, ((int64_t)at->batch_row * h->q_heads + at->head) * h->dim_qk + d);
    for (int u = 0; u < s->num_uses; u++)
        if (hooks_of(s, u)->query) turn(s, u, false, *at, q);
}

static bool is_visible(const subject *s, const fv__spec_at *at)
{
    for (int u = 0; u < s->num_uses; u++)
        if (hooks_of(s, u)->visible && !hooks_of(s, u)->visible(args_of(s, u), at)) return false;
    return true;
}

/* Scores of the visible keys, and the largest. Pairs that a GPU turns are rounded to q's type before they are multiplied. */
static void score_keys(const subject *s, fv__spec_at at, memory *m, double *max, double *blur)
{
    const spec_shape *h = s->shape;
    const bool turned = has_hook(s, FV__HOOK_QUERY) || has_hook(s, FV__HOOK_KEY);
    const double scale = s->problem.scale, unit = turned && s->ctx->cuda && s->type != FV__DTYPE_f32 ? 0x1p-8 : 4e-6;
    *blur = 0;
    *max = -INFINITY;
    for (at.key = 0; at.key < h->keys[at.request]; at.key++) {
        const double *k = m->k + (int64_t)at.key * h->dim_qk;
        double dot = 0, size = 0;
        at.k_pos = h->first_position + at.key;
        m->seen[at.key] = is_visible(s, &at);
        if (!m->seen[at.key]) continue;
        for (int d = 0; d < h->dim_qk; d++) {
            dot += m->q[d] * k[d];
            size += m->q[d] * k[d] * m->q[d] * k[d];
        }
        double x = scale * dot;
        for (int u = 0; u < s->num_uses; u++)
            if (hooks_of(s, u)->score) x = hooks_of(s, u)->score(args_of(s, u), &at, x);
        for (int u = 0; u < s->num_uses; u++)           /* of all scores, wherever it stands */
            if (hooks_of(s, u)->weight) x = hooks_of(s, u)->weight(args_of(s, u), &at, x);
        m->s[at.key] = x;
        *max = fmax(*max, x);
        *blur = fmax(*blur, unit * (fabs(x) + 4 * scale * sqrt(size)));
    }
}

/* Weights of the keys into m->share; the row's lse. */
static double weigh_keys(const subject *s, const fv__spec_at *at, memory *m)
{
    const int keys = s->shape->keys[at->request];
    double top = -INFINITY, sum = 0, sink[SPEC_MAX_USES];
    for (int u = 0; u < s->num_uses; u++) {
        sink[u] = hooks_of(s, u)->sink ? hooks_of(s, u)->sink(args_of(s, u), at) : -INFINITY;
        top = fmax(top, sink[u]);
    }
    for (int j = 0; j < keys; j++)
        if (m->seen[j]) top = fmax(top, m->s[j]);
    for (int u = 0; u < s->num_uses; u++) sum += sink[u] > -INFINITY ? exp(sink[u] - top) : 0;
    for (int j = 0; j < keys; j++) sum += m->seen[j] ? exp(m->s[j] - top) : 0;
    const double lse = sum > 0 ? top + log(sum) : -INFINITY;
    for (int j = 0; j < keys; j++) m->share[j] = m->seen[j] ? exp(m->s[j] - lse) : 0;
    return lse;
}

static void define_row(const subject *s, fv__spec_at at, memory *m, wanted *w)
{
    const spec_shape *h = s->shape;
    const int keys = h->keys[at.request];
    load_query(s, &at, m->q);
    score_keys(s, at, m, &w->max, &w->blur);
    if (has_hook(s, FV__HOOK_WEIGHT)) {
        w->lse = 0;
        for (int j = 0; j < keys; j++) m->share[j] = m->seen[j] ? m->s[j] : 0;
    } else {
        w->lse = weigh_keys(s, &at, m);
    }
    for (int d = 0; d < h->dim_v; d++) w->o[d] = w->magnitude[d] = 0;
    for (int j = 0; j < keys; j++)
        for (int d = 0; d < h->dim_v && m->share[j] != 0; d++) {
            w->o[d] += m->share[j] * m->v[(int64_t)j * h->dim_v + d];
            w->magnitude[d] += fabs(m->share[j] * m->v[(int64_t)j * h->dim_v + d]);
        }
    for (int u = 0; u < s->num_uses; u++)
        for (at.index = 0; hooks_of(s, u)->output && at.index < h->dim_v; at.index++)
            w->o[at.index] = hooks_of(s, u)->output(args_of(s, u), &at, w->o[at.index], w->lse);
}

static void add_sums(const subject *s, fv__spec_at at, const memory *m)
{
    const int64_t first = at.head / (s->shape->q_heads / s->shape->kv_heads) * s->total_keys + s->kv_indptr[at.request];
    for (int u = 0; u < s->num_uses; u++)
        for (at.key = 0; hooks_of(s, u)->key_sum && at.key < s->shape->keys[at.request]; at.key++) {
            at.k_pos = s->shape->first_position + at.key;
            if (m->seen[at.key]) m->sums[first + at.key] += hooks_of(s, u)->key_sum(args_of(s, u), &at, m->share[at.key]);
        }
}

/* ----------------------------------------------------------------------------------------------------------- comparing */

static double rounding_of(fv__dtype type) { return type == FV__DTYPE_f32 ? 0x1p-24 : type == FV__DTYPE_f16 ? 0x1p-11 : 0x1p-8; }

static void judge(spec_result *r, const char *what, const fv__spec_at *at, double got, double want, double allowed)
{
    const double error = got == want ? 0 : fabs(got - want);
    const double share = error <= allowed ? error / allowed : isnan(error) ? INFINITY : fmax(error / allowed, 1.001);
    r->values++;
    if (share <= r->share && r->worst[0]) return;
    r->share = share;
    if (isnan(want))
        snprintf(r->worst, sizeof r->worst, "%s of request %d, row %d, head %d, element %d: the definition gives no number (nan), nothing can be compared with it",
                 what, at->request, at->row, at->head, at->index);
    else
        snprintf(r->worst, sizeof r->worst, "%s of request %d, row %d, head %d, element %d is %.7g, its definition says %.7g", what, at->request, at->row,
                 at->head, at->index, got, want);
}

/* What the hooks make of the largest score. */
static void judge_max(const subject *s, fv__spec_at at, const wanted *w, spec_result *r)
{
    for (int i = 0; i < s->num_args; i++) {
        const int u = s->args[i].use;
        if (!s->args[i].is_maxes) continue;
        const double got = ((const float *)s->args[i].data.host)[(int64_t)at.batch_row * s->shape->q_heads + at.head];
        const double want = hooks_of(s, u)->row_max(args_of(s, u), &at, w->max);
        judge(r, "a row's maximum", &at, got, want, isfinite(want) ? 2 * w->blur + 4e-6 * (1 + fabs(want)) : 1);
    }
}

/* Matrix units take weights of 16 bits: a GPU's all, a CPU's of bf16 problems. */
static double weights_rounding(const subject *s)
{
    const bool tiles = !s->ctx->cuda && !strcmp(s->ctx->isa->name, "amx") && s->type == FV__DTYPE_bf16;
    return s->ctx->cuda || tiles ? rounding_of(s->type) : 0x1p-24;
}

static void judge_row(const subject *s, fv__spec_at at, const wanted *w, spec_result *r)
{
    const spec_shape *h = s->shape;
    const int64_t place_of_row = (int64_t)at.batch_row * h->q_heads + at.head;
    const double weights = weights_rounding(s);
    for (at.index = 0; at.index < h->dim_v; at.index++) {
        const double got = fv__dtype_load(s->type, s->o.host, place_of_row * h->dim_v + at.index), want = w->o[at.index];
        const double size = fmax(w->magnitude[at.index], fabs(want));
        judge(r, "o", &at, got, want, rounding_of(s->type) * fabs(want) + (2 * weights + 2 * w->blur + 3e-6) * size + 1e-6);
        r->error = fmax(r->error, fabs(got - want));
    }
    if (has_hook(s, FV__HOOK_WEIGHT)) return;
    const double got = ((const float *)s->lse.host)[place_of_row] * (h->lse_base2 ? log(2) : 1);
    at.index = 0;
    judge(r, "lse", &at, got, w->lse, 2 * w->blur + 4e-6 * (1 + fabs(w->lse)));
    if (got != w->lse) r->lse_error = fmax(r->lse_error, fabs(got - w->lse));
    judge_max(s, at, w, r);
}

static const float *sums_of(const subject *s)
{
    for (int i = 0; i < s->num_args; i++)
        if (s->args[i].is_sums) return s->args[i].data.host;
    return NULL;
}

static void judge_sums(const subject *s, const memory *m, spec_result *r)
{
    const float *got = sums_of(s);
    for (int64_t i = 0; got && i < s->shape->kv_heads * s->total_keys; i++) {
        const fv__spec_at at = { .head = (int32_t)(i / s->total_keys), .index = (int32_t)(i % s->total_keys) };
        judge(r, "a key sum", &at, got[i], m->sums[i], 1e-4 * fabs(m->sums[i]) + 1e-6);
        r->sums_error = fmax(r->sums_error, fabs(got[i] - m->sums[i]));
    }
}

static bool make_memory(const subject *s, memory *m)
{
    const spec_shape *h = s->shape;
    size_t keys = 1;
    for (int r = 0; r < h->num_requests; r++) keys = keys < (size_t)h->keys[r] ? (size_t)h->keys[r] : keys;
    const size_t dk = (size_t)h->dim_qk, dv = (size_t)h->dim_v;
    m->q = malloc(dk * sizeof(double));
    m->k = malloc(keys * dk * sizeof(double));
    m->v = malloc(keys * dv * sizeof(double));
    m->s = malloc(keys * sizeof(double));
    m->share = malloc(keys * sizeof(double));
    m->seen = malloc(keys);
    m->o = malloc(dv * sizeof(double));
    m->magnitude = malloc(dv * sizeof(double));
    m->sums = calloc((size_t)(h->kv_heads * s->total_keys + 1), sizeof(double));
    return m->q && m->k && m->v && m->s && m->share && m->seen && m->o && m->magnitude && m->sums;
}

static void free_memory(memory *m)
{
    free(m->q), free(m->k), free(m->v), free(m->s), free(m->share), free(m->seen), free(m->o), free(m->magnitude), free(m->sums);
}

static fv_status compare(subject *s, spec_result *r)
{
    const spec_shape *h = s->shape;
    const int group = h->q_heads / h->kv_heads;
    memory m = { 0 };
    if (!make_memory(s, &m)) {
        free_memory(&m);
        return fv__fail(s->err, FV_E_NO_MEMORY, "check", 0, 0, "no memory for a definition");
    }
    wanted w = { .o = m.o, .magnitude = m.magnitude };
    for (int request = 0; request < h->num_requests; request++)
        for (int head = 0; head < h->q_heads; head++) {
            if (head % group == 0) load_keys(s, request, head / group, &m);
            for (int row = 0; row < h->rows[request]; row++) {
                const fv__spec_at at = place(s, request, row, head);
                define_row(s, at, &m, &w);
                r->seen += memchr(m.seen, 1, (size_t)h->keys[request]) != NULL;
                judge_row(s, at, &w, r);
                add_sums(s, at, &m);
            }
        }
    judge_sums(s, &m, r);
    free_memory(&m);
    return FV_OK;
}

static fv_status run_and_compare(subject *s, spec_result *out)
{
    fv_plan_stats stats;
    for (int u = 0; u < s->num_uses; u++) FV_TRY(fv__spec_compile(s->ctx, &s->variants[u]->meta, s->variants[u]->text, &s->code[u], s->err));
    FV_TRY(run(s));
    FV_TRY(download(s, &s->o));
    FV_TRY(download(s, &s->lse));
    for (int i = 0; i < s->num_args; i++)
        if (s->args[i].is_sums || s->args[i].is_maxes) FV_TRY(download(s, &s->args[i].data));
    FV_TRY(fv_plan_query(s->plan, &stats, s->err));
    snprintf(out->kernel, sizeof out->kernel, "%s", stats.kernel);
    return compare(s, out);
}

fv_status spec_compare(fv_ctx *ctx, const fv_variant_use *uses, int num_uses, const spec_shape *shape, spec_result *out, fv_error *err)
{
    subject s;
    memset(out, 0, sizeof *out);
    fv_status status = begin(&s, ctx, uses, num_uses, shape, err);
    if (status == FV_OK) status = run_and_compare(&s, out);
    end(&s);
    return status;
}

/* -------------------------------------------------------------------------------------------------------------- timing */

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { MAX_TIMES = 1000 };

static fv_status run_and_wait(subject *s)
{
    FV_TRY(run(s));
    return s->ctx->cuda ? fv__cuda_stream_sync(s->ctx->cuda->device, s->ctx->cuda->stream, s->err) : FV_OK;
}

static fv_status measure(subject *s, double seconds, double *ms)
{
    double times[MAX_TIMES];
    int n = 0;
    const int64_t begin_ns = fv__os_now_ns();
    FV_TRY(run_and_wait(s));
    do {
        const int64_t before = fv__os_now_ns();
        FV_TRY(run_and_wait(s));
        times[n++] = (double)(fv__os_now_ns() - before) * 1e-6;
    } while (n < MAX_TIMES && (n < 3 || (double)(fv__os_now_ns() - begin_ns) < seconds * 1e9));
    qsort(times, (size_t)n, sizeof *times, by_size);
    *ms = times[n / 2];
    return FV_OK;
}

fv_status spec_time(fv_ctx *ctx, const fv_variant_use *uses, int num_uses, const spec_shape *shape, double seconds, double *ms, fv_error *err)
{
    subject s;
    fv_status status = begin(&s, ctx, uses, num_uses, shape, err);
    if (status == FV_OK) status = measure(&s, seconds, ms);
    end(&s);
    return status;
}

/* --------------------------------------------------------------------------------------------------------------- words */

fv_status spec_compile(fv_ctx *ctx, const fv_variant *v, fv_error *err)
{
    fv__cpu_code code = { 0 };
    const fv_status status = fv__spec_compile(ctx, &v->meta, v->text, &code, err);
    fv__cpu_code_close(&code);
    return status;
}

const char *spec_level(int i, bool *available)
{
    if (i < 0 || i >= fv__cpu_isa_count()) return NULL;
    const fv__cpu_isa *isa = fv__cpu_isa_at(i);
    *available = isa->available();
    return isa->name;
}

bool spec_is_builtin(const char *name) { return fv__variant_find(name) != NULL; }

const char *spec_formula(const fv_variant *v) { return v->meta.formula; }

void spec_hooks(const fv_variant *v, char *words, size_t size)
{
    static const char *const names[FV__NUM_HOOKS] = { "score",  "visible", "sink",     "query",  "key", "value",
                                                      "output", "weight",  "key sums", "row max" };
    size_t at = 0;
    *words = 0;
    for (int i = 0; i < FV__NUM_HOOKS && at < size; i++)
        if (v->meta.hooks >> i & 1) at += (size_t)snprintf(words + at, size - at, "%s%s", at ? ", " : "", names[i]);
}
