/* SPDX-License-Identifier: Apache-2.0 */
/* serve.c -- see serve.h. */
#include "serve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- tensors ---- */

static fv_tensor rows_tensor(void *data, const element_type *type, int64_t rows, int64_t heads,
                             int64_t dim, int64_t stride)
{
    return (fv_tensor){ .data = data, .dtype = type->name, .ndim = 3, .shape = { rows, heads, dim },
                        .stride = { stride, dim, 1 } };
}

static fv_tensor plane_tensor(const serve *s, int plane, int layer)
{
    const serve_plane *p = &s->planes[plane];
    if (!p->dim)
        return (fv_tensor){ 0 };
    return rows_tensor(p->step.device + (int64_t)layer * LAYER_SHIFT * s->config.type->bytes,
                       s->config.type, s->step.num_rows, p->heads, p->dim, p->stride);
}

static fv_tensor cache_tensor(const serve *s, const memory *m, int64_t dim)
{
    const serve_config *c = &s->config;
    const int64_t heads = c->geometry.kv_heads;
    if (!m->data)
        return (fv_tensor){ 0 };
    return (fv_tensor){ .data = m->device, .dtype = c->cache_type->name, .ndim = 4,
                        .shape = { c->num_pages, c->page_size, heads, dim },
                        .stride = { c->page_size * heads * dim, heads * dim, dim, 1 } };
}

/* What is rotated: q, or its tail where there is one. */
static int turned_plane(const serve *s) { return s->config.geometry.tail ? PLANE_Q_TAIL : PLANE_Q; }

static fv_tensor turned_tensor(const serve *s)
{
    const serve_plane *p = &s->planes[turned_plane(s)];
    return rows_tensor(s->q_turned.device, s->config.type, s->step.num_rows, p->heads, p->dim,
                       p->heads * p->dim);
}

/* ---- opening ---- */

static bool open_plane(serve *s, int plane, int64_t heads, int64_t dim)
{
    serve_plane *p = &s->planes[plane];
    const element_type *type = s->config.type;
    if (!dim)
        return true;
    const int64_t stride =
        div_up(heads * dim + (int64_t)s->config.layers * LAYER_SHIFT, LAYER_SHIFT) * LAYER_SHIFT;
    p->heads = heads;
    p->dim = dim;
    p->stride = stride;
    if (!memory_allocate(NULL, s->source_rows * stride * type->bytes, &p->source) ||
        !memory_allocate(s->gpu, s->config.token_budget * stride * type->bytes, &p->step))
        return false;
    element_fill(type, p->source.data, s->source_rows * stride, 1,
                 mix64(s->config.seed, (uint64_t)plane));
    return true;
}

static bool open_planes(serve *s)
{
    const geometry *g = &s->config.geometry;
    const int64_t dim = g->dim_qk - g->tail,
                  q_row = (int64_t)g->q_heads * g->dim_qk * s->config.type->bytes;
    s->source_rows = max_i64(64, min_i64(4096, (int64_t)(64 << 20) / q_row));
    return open_plane(s, PLANE_Q, g->q_heads, dim) &&
           open_plane(s, PLANE_Q_TAIL, g->q_heads, g->tail) &&
           open_plane(s, PLANE_K, g->kv_heads, dim) &&
           open_plane(s, PLANE_K_TAIL, g->kv_heads, g->tail) &&
           open_plane(s, PLANE_V, g->kv_heads, g->v_in_k ? 0 : g->dim_v);
}

static bool open_caches(serve *s)
{
    const serve_config *c = &s->config;
    const geometry *g = &c->geometry;
    const int64_t token = c->num_pages * c->page_size * g->kv_heads * c->cache_type->bytes;
    s->k = need((size_t)c->layers, sizeof *s->k);
    s->k_tail = need((size_t)c->layers, sizeof *s->k_tail);
    s->v = need((size_t)c->layers, sizeof *s->v);
    for (int l = 0; l < c->layers; l++) {
        if (!memory_allocate(s->gpu, token * (g->dim_qk - g->tail), &s->k[l]) ||
            (g->tail && !memory_allocate(s->gpu, token * g->tail, &s->k_tail[l])) ||
            (!g->v_in_k && !memory_allocate(s->gpu, token * g->dim_v, &s->v[l])))
            return false;
    }
    return true;
}

static bool open_outputs(serve *s)
{
    const serve_config *c = &s->config;
    const geometry *g = &c->geometry;
    const int64_t heads = c->token_budget * g->q_heads;
    return memory_allocate(s->gpu, heads * (g->tail ? g->tail : g->dim_qk) * c->type->bytes,
                           &s->q_turned) &&
           memory_allocate(s->gpu, heads * g->dim_v * c->type->bytes, &s->o) &&
           memory_allocate(s->gpu, heads * 4, &s->lse);
}

static void open_step(serve *s)
{
    const size_t n = (size_t)s->config.max_requests, rows = (size_t)s->config.token_budget;
    s->step.rows = need(n + 1, sizeof *s->step.rows);
    s->step.lengths = need(n, sizeof *s->step.lengths);
    s->step.sequences = need(n, sizeof *s->step.sequences);
    s->step.requests = need(n, sizeof *s->step.requests);
    s->step.tokens = need(rows, sizeof *s->step.tokens);
    s->step.positions = need(rows, sizeof *s->step.positions);
    s->step.row_request = need(rows, sizeof *s->step.row_request);
    s->page_seen = need((size_t)s->config.num_pages, sizeof *s->page_seen);
}

static fv_status open_plan(serve *s, int kind, fv_error *err)
{
    const serve_config *c = &s->config;
    const geometry *g = &c->geometry;
    const layer_kind *k = &g->kinds[kind];
    const fv_arg left = { .name = "left", .number = (double)k->window };
    const fv_variant_use variants[] = { { .name = "causal" },
                                        { .name = "window", .args = &left, .num_args = 1 } };
    const char *scales = s->cache_scale != 1 ? "tensor" : NULL;
    const fv_problem problem = {
        .q = c->type->name, .k = c->cache_type->name, .v = c->cache_type->name, .o = c->type->name,
        .num_q_heads = g->q_heads, .num_kv_heads = g->kv_heads, .dim_qk = g->dim_qk,
        .dim_v = g->dim_v, .scale = g->scale, .variants = variants,
        .num_variants = k->window >= 0 ? 2 : 1, .k_scale = scales,
        .v_scale = g->v_in_k ? NULL : scales, .qk_tail = g->tail, .v_in_k = g->v_in_k,
    };
    const fv_plan_desc limits = {
        .max_requests = c->max_requests, .max_rows = c->token_budget,
        .max_kv_tokens = c->max_kv_tokens,
        .max_pages = c->max_kv_tokens / c->page_size + c->max_requests, .invariant = c->invariant,
        .sharing = c->sharing ? FV_SHARING_FIND : FV_SHARING_OFF,
    };
    if (k->rope.rotary_dim) {
        s->frequencies[kind] = need((size_t)k->rope.rotary_dim / 2, sizeof(float));
        const fv_status status = fv_rope_frequencies(&k->rope, s->frequencies[kind], err);
        if (status != FV_OK)
            return status;
    }
    return fv_plan_create(s->ctx, &problem, &limits, &s->plans[kind], err);
}

bool serve_open(fv_ctx *ctx, gpu *where, const serve_config *config, serve *out)
{
    fv_error err = { 0 };
    *out = (serve){ .config = *config, .ctx = ctx, .gpu = where };
    const geometry *g = &config->geometry;
    out->cache_scale =
        config->cache_type->bytes == 1 ? CACHE_AMPLITUDE / config->cache_type->largest : 1;
    out->scale = g->scale != 0 ? g->scale : 1 / sqrt(g->dim_qk);
    if (!open_planes(out) || !open_caches(out) || !open_outputs(out))
        return false;
    open_step(out);
    for (int kind = 0; kind < g->num_kinds; kind++)
        if (open_plan(out, kind, &err) != FV_OK) {
            cli_failed("cannot make a plan", &err);
            return false;
        }
    return true;
}

void serve_close(serve *s)
{
    for (int i = 0; i < GEOMETRY_MAX_KINDS; i++) {
        fv_plan_destroy(&s->plans[i]);
        free(s->frequencies[i]);
    }
    for (int l = 0; l < s->config.layers; l++) {
        if (s->k)
            memory_release(&s->k[l]);
        if (s->k_tail)
            memory_release(&s->k_tail[l]);
        if (s->v)
            memory_release(&s->v[l]);
    }
    for (int p = 0; p < NUM_PLANES; p++) {
        memory_release(&s->planes[p].source);
        memory_release(&s->planes[p].step);
    }
    for (int i = 0; i < NUM_LISTS; i++)
        memory_release(&s->lists[i]);
    memory_release(&s->q_turned);
    memory_release(&s->o);
    memory_release(&s->lse);
    free(s->k);
    free(s->k_tail);
    free(s->v);
    free(s->step.rows);
    free(s->step.lengths);
    free(s->step.sequences);
    free(s->step.requests);
    free(s->step.tokens);
    free(s->step.positions);
    free(s->step.row_request);
    free(s->page_seen);
    *s = (serve){ 0 };
}

int64_t serve_page_bytes(const serve_config *config)
{
    return config->page_size * geometry_token_elements(&config->geometry) *
           config->cache_type->bytes * config->layers;
}

/* ---- a step ---- */

static void take_request(serve *s, const scheduler *from, const live_request *r)
{
    serve_step *t = &s->step;
    const int64_t i = t->num_requests++;
    t->requests[i] = r;
    t->sequences[i] = r->sequence;
    t->lengths[i] = (int32_t)(r->done + r->rows);
    for (int64_t j = 0; j < r->rows; j++) {
        t->tokens[t->num_rows] = trace_token(from->trace, r->index, r->done + j);
        t->positions[t->num_rows] = r->done + j;
        t->row_request[t->num_rows++] = i;
    }
    t->rows[i + 1] = (int32_t)t->num_rows;
}

static void gather(serve *s, int plane)
{
    serve_plane *p = &s->planes[plane];
    const int64_t bytes = p->stride * s->config.type->bytes;
    if (!p->dim)
        return;
    for (int64_t i = 0; i < s->step.num_rows; i++) {
        const int64_t row = (int64_t)(s->step.tokens[i] % (uint64_t)s->source_rows);
        memcpy(p->step.data + i * bytes, p->source.data + row * bytes, (size_t)bytes);
    }
    memory_put(&p->step, 0, s->step.num_rows * bytes);
}

/* A list of integers as the engine takes it; on a GPU also where kernels find it, as a serving
 * engine keeps it. false: message printed. */
static bool put_list(serve *s, int list, fv_index *x)
{
    memory *m = &s->lists[list];
    const int64_t bytes = ((x->count - 1) * x->stride + 1) * (int64_t)sizeof(int32_t);
    if (!s->gpu || !x->host || x->count < 1)
        return true;
    if (m->bytes < bytes) {
        memory_release(m);
        if (!memory_allocate(s->gpu, bytes, m))
            return false;
    }
    memcpy(m->data, x->host, (size_t)bytes);
    memory_put(m, 0, bytes);
    x->device = m->device;
    return true;
}

static fv_status put_lists(serve *s, fv_error *err)
{
    serve_step *t = &s->step;
    t->row_list = fv_i32(t->rows, t->num_requests + 1);
    t->length_list = fv_i32(t->lengths, t->num_requests);
    if (put_list(s, LIST_ROWS, &t->row_list) && put_list(s, LIST_LENGTHS, &t->length_list) &&
        put_list(s, LIST_TABLE_ROWS, &t->pages.table_rows) &&
        put_list(s, LIST_PAGES, &t->pages.ids))
        return FV_OK;
    snprintf(err->text, sizeof err->text, "no memory on the GPU for the page table");
    return err->status = FV_E_NO_MEMORY;
}

fv_status serve_prepare(serve *s, const scheduler *from, fv_error *err)
{
    s->step.num_requests = s->step.num_rows = 0;
    s->step.rows[0] = 0;
    for (int64_t i = 0; i < from->num_running; i++)
        if (from->running[i]->rows)
            take_request(s, from, from->running[i]);
    for (int p = 0; p < NUM_PLANES; p++)
        gather(s, p);
    const fv_status status = fv_cache_pages(from->cache, s->step.sequences, s->step.num_requests,
                                            &s->step.pages, err);
    return status == FV_OK ? put_lists(s, err) : status;
}

/* The page list of request i of the step. */
const int32_t *serve_page_list(const serve *s, int64_t i)
{
    const fv_pages *p = &s->step.pages;
    const int64_t row =
        p->table_rows.host ? ((const int32_t *)p->table_rows.host)[i * p->table_rows.stride] : i;
    return (const int32_t *)p->ids.host + row * p->table_stride;
}

static fv_status update_plans(serve *s, fv_error *err)
{
    const serve_step *t = &s->step;
    const fv_batch batch = { .num_requests = t->num_requests, .rows = t->row_list,
                             .lengths = t->length_list, .pages = t->pages };
    for (int kind = 0; kind < s->config.geometry.num_kinds; kind++) {
        const fv_status status =
            fv_plan_update(s->plans[kind], NULL, &batch, gpu_stream(s->gpu), err);
        if (status != FV_OK)
            return status;
    }
    return FV_OK;
}

static fv_status append(serve *s, int layer, fv_error *err)
{
    const serve_step *t = &s->step;
    const geometry *g = &s->config.geometry;
    const layer_kind *kind = &g->kinds[geometry_kind(g, layer)];
    const bool scaled = s->cache_scale != 1, turns = kind->rope.rotary_dim > 0;
    const fv_append_desc desc = {
        .k_scale_kind = scaled ? "tensor" : NULL,
        .v_scale_kind = scaled && !g->v_in_k ? "tensor" : NULL,
        .k_scale = { .number = scaled ? s->cache_scale : 0 },
        .v_scale = { .number = scaled && !g->v_in_k ? s->cache_scale : 0 },
        .new_k = plane_tensor(s, PLANE_K, layer),
        .new_k_tail = plane_tensor(s, PLANE_K_TAIL, layer),
        .new_v = plane_tensor(s, PLANE_V, layer),
        .k = cache_tensor(s, &s->k[layer], g->dim_qk - g->tail),
        .k_tail = cache_tensor(s, &s->k_tail[layer], g->tail),
        .v = cache_tensor(s, &s->v[layer], g->dim_v),
        .rope = turns ? &kind->rope : NULL,
        .q = turns ? plane_tensor(s, turned_plane(s), layer) : (fv_tensor){ 0 },
        .q_out = turns ? turned_tensor(s) : (fv_tensor){ 0 }, .num_requests = t->num_requests,
        .rows = t->row_list, .lengths = t->length_list, .pages = t->pages,
    };
    return fv_append(s->ctx, &desc, gpu_stream(s->gpu), err);
}

static fv_status attend(serve *s, int layer, fv_error *err)
{
    const geometry *g = &s->config.geometry;
    const int kind = geometry_kind(g, layer);
    const bool turns = g->kinds[kind].rope.rotary_dim > 0;
    const int64_t rows = s->step.num_rows;
    const fv_arg scales[] = { { .name = "k_scale", .number = s->cache_scale },
                              { .name = "v_scale", .number = s->cache_scale } };
    fv_tensors t = {
        .q = plane_tensor(s, PLANE_Q, layer), .q_tail = plane_tensor(s, PLANE_Q_TAIL, layer),
        .k = cache_tensor(s, &s->k[layer], g->dim_qk - g->tail),
        .k_tail = cache_tensor(s, &s->k_tail[layer], g->tail),
        .v = cache_tensor(s, &s->v[layer], g->dim_v),
        .o = rows_tensor(s->o.device, s->config.type, rows, g->q_heads, g->dim_v,
                         (int64_t)g->q_heads * g->dim_v),
        .lse = { .data = s->lse.device, .dtype = "f32", .ndim = 2, .shape = { rows, g->q_heads },
                 .stride = { g->q_heads, 1 } },
        .args = scales, .num_args = s->cache_scale == 1 ? 0
                    : g->v_in_k         ? 1
                                        : 2,
    };
    if (turns)
        *(g->tail ? &t.q_tail : &t.q) = turned_tensor(s);
    return fv_run(s->plans[kind], &t, gpu_stream(s->gpu), err);
}

/* Keys that rows [length - rows, length) see, added up; *first is the first key that any of them
 * sees. */
static int64_t visible_keys(int64_t length, int64_t rows, int64_t window, int64_t *first)
{
    *first = window < 0 ? 0 : max_i64(0, length - rows - window);
    if (window < 0)
        return rows * (length - rows) + rows * (rows + 1) / 2;
    int64_t sum = 0;
    for (int64_t p = length - rows; p < length; p++)
        sum += min_i64(p, window) + 1;
    return sum;
}

static void account(serve *s, int kind, int64_t layers, serve_result *out)
{
    const serve_config *c = &s->config;
    const geometry *g = &c->geometry;
    int64_t pairs = 0, tokens = 0;
    s->tag++;
    for (int64_t i = 0; i < s->step.num_requests; i++) {
        const int32_t *pages = serve_page_list(s, i);
        const int64_t length = s->step.lengths[i];
        int64_t first;
        pairs += visible_keys(length, s->step.requests[i]->rows, g->kinds[kind].window, &first);
        for (int64_t p = first / c->page_size; p * c->page_size < length; p++)
            if (s->page_seen[pages[p]] != s->tag) {
                s->page_seen[pages[p]] = s->tag;
                tokens +=
                    min_i64(length, (p + 1) * c->page_size) - max_i64(first, p * c->page_size);
            }
    }
    const double row_bytes = (double)g->q_heads * (g->dim_qk + g->dim_v) * c->type->bytes;
    out->flops += (double)layers * (double)pairs * g->q_heads * 2.0 * (g->dim_qk + g->dim_v);
    out->bytes += (double)layers *
                  ((double)tokens * (double)geometry_token_elements(g) * c->cache_type->bytes +
                   (double)s->step.num_rows * row_bytes);
}

static void account_all(serve *s, serve_result *out)
{
    int64_t layers[GEOMETRY_MAX_KINDS] = { 0 };
    for (int l = 0; l < s->config.layers; l++)
        layers[geometry_kind(&s->config.geometry, l)]++;
    for (int kind = 0; kind < s->config.geometry.num_kinds; kind++)
        if (layers[kind])
            account(s, kind, layers[kind], out);
}

typedef fv_status layer_call(serve *s, int layer, fv_error *err);

/* Seconds of one call for every layer: on a GPU all of them in a graph, by its own clock. */
static fv_status time_layers(serve *s, layer_call *call, double *seconds, fv_error *err)
{
    fv_status status = FV_OK;
    gpu_capture(s->gpu);
    for (int l = 0; l < s->config.layers && status == FV_OK; l++)
        status = call(s, l, err);
    gpu_graph *graph = gpu_captured(s->gpu);
    if (status == FV_OK && !graph) {
        snprintf(err->text, sizeof err->text, "the layers could not be captured in a graph");
        status = err->status = FV_E_DEVICE;
    }
    if (status == FV_OK)
        *seconds = gpu_time(s->gpu, graph);
    gpu_graph_free(s->gpu, graph);
    return status;
}

/* All layers, each watched; timed as they run, which on the CPU is when they are called. */
static fv_status run_layers(serve *s, serve_watch *watch, void *user, serve_result *out,
                            fv_error *err)
{
    fv_status status = FV_OK;
    for (int l = 0; l < s->config.layers && status == FV_OK; l++) {
        const double before = cli_now();
        status = append(s, l, err);
        const double between = cli_now();
        if (status == FV_OK)
            status = attend(s, l, err);
        out->append += between - before;
        out->attention += cli_now() - between;
        if (watch && status == FV_OK)
            watch(user, s, l);
    }
    return status;
}

fv_status serve_run(serve *s, serve_watch *watch, void *user, serve_result *out, fv_error *err)
{
    *out = (serve_result){ 0 };
    const double start = cli_now();
    fv_status status = update_plans(s, err);
    out->plan = cli_now() - start;
    if (status == FV_OK)
        status = run_layers(s, watch, user, out, err);
    /* once more for the times: appending the same rows again changes nothing */
    if (status == FV_OK && s->gpu)
        status = time_layers(s, append, &out->append, err);
    if (status == FV_OK && s->gpu)
        status = time_layers(s, attend, &out->attention, err);
    if (status == FV_OK)
        account_all(s, out);
    return status;
}

/* ---- what was computed, for a watcher ---- */

void serve_look_at_rows(const serve *s, int64_t first, int64_t count)
{
    const geometry *g = &s->config.geometry;
    const int64_t heads = g->q_heads, bytes = s->config.type->bytes,
                  turned = heads * (g->tail ? g->tail : g->dim_qk) * bytes,
                  o = heads * g->dim_v * bytes, lse = heads * 4;
    memory_get(&s->q_turned, first * turned, count * turned);
    memory_get(&s->o, first * o, count * o);
    memory_get(&s->lse, first * lse, count * lse);
    gpu_wait(s->gpu);
}

static void get_pages(const serve *s, const memory *m, int64_t dim, const int32_t *pages,
                      int64_t first, int64_t last)
{
    const serve_config *c = &s->config;
    const int64_t bytes = c->page_size * c->geometry.kv_heads * dim * c->cache_type->bytes;
    for (int64_t p = first / c->page_size; m->data && p <= last / c->page_size; p++)
        memory_get(m, pages[p] * bytes, bytes);
}

void serve_look_at_keys(const serve *s, int layer, int64_t request, int64_t first, int64_t last)
{
    const geometry *g = &s->config.geometry;
    const int32_t *pages = serve_page_list(s, request);
    get_pages(s, &s->k[layer], g->dim_qk - g->tail, pages, first, last);
    get_pages(s, &s->k_tail[layer], g->tail, pages, first, last);
    get_pages(s, &s->v[layer], g->dim_v, pages, first, last);
    gpu_wait(s->gpu);
}

void serve_look_away(const serve *s, int layer)
{
    memory_forget(&s->k[layer]);
    memory_forget(&s->k_tail[layer]);
    memory_forget(&s->v[layer]);
}
