/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_plan.c -- any bytes as maxima and three steps of a plan: each step is refused in words, or planned, described and run on memory that ends where
 * the batch says it ends. Arrays are as long as their counts say; everything in them is arbitrary. What must hold is checked here or seen by
 * a sanitizer; the planner's promises are checkplan's. */
#include "foveal/foveal.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DIM = 8, MOST_REQUESTS = 24, MOST_ROWS = 96, MOST_IDS = 128, MOST_SEGMENTS = 6, MOST_TOKENS = 1 << 14 };

typedef struct bytes {
    const uint8_t *at, *end;
} bytes;

typedef struct world {
    bytes in;
    fv_plan *plan;
    fv_problem problem;
    fv_plan_desc limits;
    fv_batch batch;
    int32_t rows[MOST_REQUESTS + 1], lengths[MOST_REQUESTS + 1], indptr[MOST_REQUESTS + 1], ids[MOST_IDS], table_rows[MOST_REQUESTS],
        first_positions[MOST_REQUESTS + 1], row_positions[MOST_ROWS], segment_rows[MOST_SEGMENTS][8], page_positions[MOST_SEGMENTS][8];
    fv_segment segments[MOST_SEGMENTS];
} world;

static void require(bool holds)
{
    if (!holds) abort();
}

static uint32_t byte(world *w) { return w->in.at < w->in.end ? *w->in.at++ : 0; }
static int32_t below(world *w, uint32_t n) { return (int32_t)(byte(w) % n); }

/* Mostly small, sometimes at an edge of 32 bits. */
static int32_t any(world *w, uint32_t small)
{
    const uint32_t b = byte(w);
    if (b < 250) return (int32_t)(b % small);
    static const int32_t edges[] = { -1, INT32_MIN, INT32_MAX, INT32_MAX - 63, 1 << 30, -1000 };
    return edges[b - 250];
}

/* Offsets that rise, or not. */
static void offsets(world *w, int32_t *out, int n, uint32_t step)
{
    int64_t at = byte(w) == 255 ? any(w, 4) : 0;
    for (int i = 0; i <= n; i++) {
        out[i] = (int32_t)at;
        at += any(w, step);
        if (at > INT32_MAX || at < INT32_MIN) at = 0;
    }
}

static void values(world *w, int32_t *out, int n, uint32_t small)
{
    for (int i = 0; i < n; i++) out[i] = any(w, small);
}

/* The array, or a shorter count than it should have. */
static fv_index index_of(world *w, const int32_t *at, int n)
{
    const fv_index x = fv_i32(at, byte(w) < 250 || n == 0 ? n : n - 1);
    return x;
}

static void make_limits(world *w)
{
    static const int32_t chunks[] = { 0, 64, 128, 100 };
    w->limits = (fv_plan_desc){
        .max_requests = below(w, MOST_REQUESTS + 1), .max_rows = below(w, MOST_ROWS + 1), .max_kv_tokens = 16 * (int64_t)byte(w),
        .max_pages = below(w, MOST_IDS + 1), .max_segments = below(w, 3) ? 0 : below(w, MOST_SEGMENTS + 1), .max_levels = below(w, 4),
        .splits = below(w, 4) ? 0 : any(w, 6), .workers = below(w, 5), .chunk = chunks[below(w, 4)], .invariant = below(w, 3) == 0,
        .sharing = below(w, 2) ? FV_SHARING_FIND : FV_SHARING_OFF,
    };
    if (!w->limits.invariant) w->limits.chunk = 0;
}

static void make_segments(world *w)
{
    fv_batch *b = &w->batch;
    b->num_segments = below(w, MOST_SEGMENTS + 1);
    for (int64_t i = 0; i < b->num_segments; i++) {
        fv_segment *s = &w->segments[i];
        *s = (fv_segment){
            .row_first = any(w, MOST_ROWS), .num_rows = any(w, 9), .kv_head_first = any(w, 3), .num_kv_heads = any(w, 3), .first_page = any(w, MOST_IDS),
            .num_pages = any(w, 9), .num_keys = any(w, 90), .first_position = any(w, 90),
        };
        values(w, w->segment_rows[i], 8, MOST_ROWS);
        values(w, w->page_positions[i], 8, 90);
        if (s->num_rows <= 8 && below(w, 2)) s->rows = w->segment_rows[i];
        if (s->num_pages <= 8 && below(w, 4) == 0) s->page_positions = w->page_positions[i];
    }
    b->segments = w->segments;
}

static void make_pages(world *w, int n)
{
    fv_pages *p = &w->batch.pages;
    static const int32_t sizes[] = { 1, 2, 3, 16, 16, 64, 7, 0 };
    const uint32_t size = byte(w);
    p->page_size = size < 250 ? sizes[size % 8] : any(w, 4);
    p->num_pages = any(w, 40);
    values(w, w->ids, MOST_IDS, 40);
    if (below(w, 3)) {
        offsets(w, w->indptr, n, 8);
        p->indptr = index_of(w, w->indptr, n + 1);
        p->ids = index_of(w, w->ids, MOST_IDS);
        return;
    }
    p->table_width = below(w, 12);
    p->table_stride = p->table_width + below(w, 3);
    p->ids = index_of(w, w->ids, MOST_IDS);
    values(w, w->table_rows, n, 12);
    if (below(w, 2)) p->table_rows = index_of(w, w->table_rows, n);
}

static void make_batch(world *w)
{
    fv_batch *b = &w->batch;
    const int n = below(w, MOST_REQUESTS + 1);
    *b = (fv_batch){ .num_requests = n };
    if (below(w, 4)) {
        offsets(w, w->rows, n, 6);
        b->rows = index_of(w, w->rows, n + 1);
    }
    values(w, w->lengths, n, 120);
    if (below(w, 3)) {
        make_pages(w, n);
        if (below(w, 8)) b->lengths = index_of(w, w->lengths, n);
        else b->last_page_lengths = index_of(w, w->lengths, n);
    } else {
        offsets(w, w->indptr, n, 120);
        b->kv_indptr = index_of(w, w->indptr, n + 1);
        if (below(w, 2)) b->lengths = index_of(w, w->lengths, n);
    }
    values(w, w->first_positions, n, 50);
    values(w, w->row_positions, MOST_ROWS, 200);
    if (below(w, 4) == 0) b->first_positions = index_of(w, w->first_positions, n);
    if (below(w, 4) == 0) b->row_positions = index_of(w, w->row_positions, MOST_ROWS);
    if (w->limits.max_segments && below(w, 2)) make_segments(w);
}

/* ---- a step that was planned ---- */

static void look(const world *w)
{
    fv_plan_stats stats;
    require(fv_plan_query(w->plan, &stats, NULL) == FV_OK);
    require(stats.num_rows <= w->limits.max_rows);
    require(w->batch.segments || stats.num_kv_tokens <= w->limits.max_kv_tokens);     /* with segments, lengths only place the rows */
    require(stats.workers >= 1 && stats.workers <= 4 && stats.max_worker_cost <= stats.total_cost);
    int64_t costs[4], sum = 0;
    require(fv_plan_worker_costs(w->plan, costs, stats.workers, NULL) == FV_OK);
    for (int i = 0; i < stats.workers; i++) sum += costs[i];
    require(sum == stats.total_cost);
    static const char *const formats[] = { "text", "svg" };
    for (int i = 0; i < 2; i++) {
        size_t needed = 0, again = 0;
        require(fv_plan_describe(w->plan, formats[i], NULL, 0, &needed, NULL) == FV_OK);
        char *text = malloc(needed);
        require(text && fv_plan_describe(w->plan, formats[i], text, needed, &again, NULL) == FV_OK);
        require(again == needed && strlen(text) + 1 == needed);
        free(text);
    }
}

static fv_tensor rows_of(float *data, int64_t rows, int64_t heads)
{
    return (fv_tensor){ .data = data, .ndim = 3, .shape = { rows, heads, DIM }, .stride = { heads * DIM, DIM, 1 } };
}

static fv_tensor pages_of(float *data, int64_t pages, int64_t page_size, int64_t heads)
{
    return (fv_tensor){ .data = data, .ndim = 4, .shape = { pages, page_size, heads, DIM }, .stride = { page_size * heads * DIM, heads * DIM, DIM, 1 } };
}

/* Exactly as much as the batch speaks of; a pool too large to be had is not run. */
static void run(world *w)
{
    const fv_batch *b = &w->batch;
    const int32_t heads = w->problem.num_kv_heads, q_heads = w->problem.num_q_heads;
    const bool paged = b->pages.page_size > 0;
    int64_t tokens = paged ? b->pages.num_pages * b->pages.page_size : b->num_requests ? w->indptr[b->num_requests] : 0;
    fv_plan_stats stats;
    if (tokens < 0) {
        require(b->segments);           /* which do not use kv_indptr */
        tokens = 0;
    }
    if (tokens > MOST_TOKENS) return;
    require(fv_plan_query(w->plan, &stats, NULL) == FV_OK);
    const int64_t rows = stats.num_rows, kv = tokens * heads * DIM, q = rows * q_heads * DIM;
    float *k = calloc((size_t)kv + 1, sizeof *k), *v = calloc((size_t)kv + 1, sizeof *v), *in = calloc((size_t)q + 1, sizeof *in);
    float *o = malloc(((size_t)q + 1) * sizeof *o), *lse = malloc(((size_t)(rows * q_heads) + 1) * sizeof *lse);
    require(k && v && in && o && lse);
    for (int64_t i = 0; i < kv; i++) v[i] = 1;
    memset(o, 0xff, (size_t)q * sizeof *o);                      /* NaN: every row must be written */
    const fv_tensors t = {
        .q = rows_of(in, rows, q_heads), .o = rows_of(o, rows, q_heads),
        .k = paged ? pages_of(k, b->pages.num_pages, b->pages.page_size, heads) : rows_of(k, tokens, heads),
        .v = paged ? pages_of(v, b->pages.num_pages, b->pages.page_size, heads) : rows_of(v, tokens, heads),
        .lse = { .data = lse, .ndim = 2, .shape = { rows, q_heads }, .stride = { q_heads, 1 } },
    };
    fv_error err;
    const fv_status s = fv_run(w->plan, &t, NULL, &err);
    const bool beyond = b->segments && !paged;               /* ragged segments may name tokens that K does not have: refused by the run */
    if (s != FV_OK && !beyond) fprintf(stderr, "a planned step is not run: %s\n", err.text);
    require(s == FV_OK || (beyond && s == FV_E_INVALID));
    for (int64_t i = 0; i < q && s == FV_OK; i++) require(o[i] == 0 || (o[i] > 0.999f && o[i] < 1.001f));      /* a mean of ones, or nothing was seen */
    free(k);
    free(v);
    free(in);
    free(o);
    free(lse);
}

static void step(world *w)
{
    fv_error err = { 0 };
    make_batch(w);
    const fv_status s = fv_plan_update(w->plan, NULL, &w->batch, NULL, &err);
    if (s != FV_OK) {
        require(err.status == s && err.text[0] && (s == FV_E_INVALID || s == FV_E_CAPACITY || s == FV_E_UNSUPPORTED));
        return;
    }
    look(w);
    run(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fv_ctx *ctx;
    static world w;
    if (!ctx) require(fv_open(&(fv_open_desc){ .device = "cpu", .num_threads = 4 }, &ctx, NULL) == FV_OK);
    memset(&w, 0, sizeof w);
    w.in = (bytes){ data, data + size };
    const fv_variant_use causal = { .name = "causal" };
    const int32_t kv_heads = 1 + below(&w, 3), group = 1 + below(&w, 4);
    w.problem = (fv_problem){ .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = kv_heads * group, .num_kv_heads = kv_heads,
                              .dim_qk = DIM, .variants = &causal, .num_variants = below(&w, 2) };
    make_limits(&w);
    fv_error err = { 0 };
    if (fv_plan_create(ctx, &w.problem, &w.limits, &w.plan, &err) != FV_OK) {
        require(err.text[0] && !w.plan);
        return 0;
    }
    for (int i = 0; i < 3; i++) step(&w);
    require(fv_plan_destroy(&w.plan) == FV_OK);
    return 0;
}
