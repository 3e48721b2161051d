/* SPDX-License-Identifier: Apache-2.0 */
/* test_api.c -- the scenarios that tables of numbers cannot hold (tests/cases/scenarios.md), played through the public header on the CPU:
 * refusals name the field, the request, the value and the limit; what is refused has written nothing; plans can be used again.
 * Names of tests are the scenarios' numbers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "foveal/foveal.h"

enum { HQ = 8, HK = 2, DIM = 64, PAGE = 16, POOL = 64, MAX_ROWS = 256, MAX_REQUESTS = 64 };

typedef struct world {
    fv_ctx *ctx;
    fv_error err;
    float *q, *k, *v, *o, *lse;         /* q, o [MAX_ROWS][HQ][DIM]; k, v [POOL][PAGE][HK][DIM] */
} world;

static float noise(uint32_t seed, uint32_t i)
{
    uint32_t x = i + seed * 0x9E3779B9u;
    x ^= x >> 16; x *= 0x85EBCA6Bu;
    x ^= x >> 13; x *= 0xC2B2AE35u;
    return (float)((int)((x ^ x >> 16) % 129) - 64) / 64;
}

static float *filled(size_t count, uint32_t seed, float amplitude)
{
    float *x = malloc(count * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < count; i++) x[i] = amplitude * noise(seed, (uint32_t)i);
    return x;
}

static int set_up(void **state)
{
    world *w = calloc(1, sizeof *w);
    w->q = filled((size_t)MAX_ROWS * HQ * DIM, 1, 4);
    w->k = filled((size_t)POOL * PAGE * HK * DIM, 2, 1);
    w->v = filled((size_t)POOL * PAGE * HK * DIM, 3, 1);
    w->o = filled((size_t)MAX_ROWS * HQ * DIM, 4, 1);
    w->lse = filled((size_t)MAX_ROWS * HQ, 5, 1);
    assert_int_equal(fv_open(&(fv_open_desc){ .device = "cpu", .num_threads = 2 }, &w->ctx, &w->err), FV_OK);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    world *w = *state;
    assert_int_equal(fv_close(&w->ctx), FV_OK);
    assert_null(w->ctx);
    free(w->q); free(w->k); free(w->v); free(w->o); free(w->lse);
    free(w);
    return 0;
}

static fv_problem problem_f32(const fv_variant_use *uses, int count)
{
    return (fv_problem){ .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = HQ, .num_kv_heads = HK, .dim_qk = DIM,
                         .variants = uses, .num_variants = count };
}

static fv_plan_desc limits_of(void)
{
    return (fv_plan_desc){ .max_requests = MAX_REQUESTS, .max_rows = MAX_ROWS, .max_kv_tokens = 1 << 16, .max_pages = 4096 };
}

static fv_plan *plan_of(world *w, const fv_variant_use *uses, int count, fv_plan_desc limits)
{
    fv_plan *plan = NULL;
    const fv_problem problem = problem_f32(uses, count);
    if (fv_plan_create(w->ctx, &problem, &limits, &plan, &w->err) != FV_OK) fail_msg("fv_plan_create: %s", w->err.text);
    return plan;
}

static fv_tensor rows_tensor(float *data, int64_t rows)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 3, .shape = { rows, HQ, DIM }, .stride = { HQ * DIM, DIM, 1 } };
}

static fv_tensor pool_tensor(float *data)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 4, .shape = { POOL, PAGE, HK, DIM },
                        .stride = { PAGE * HK * DIM, HK * DIM, DIM, 1 } };
}

static fv_tensors tensors_of(world *w)
{
    return (fv_tensors){ .q = rows_tensor(w->q, MAX_ROWS), .k = pool_tensor(w->k), .v = pool_tensor(w->v), .o = rows_tensor(w->o, MAX_ROWS),
                         .lse = { .data = w->lse, .dtype = "f32", .ndim = 2, .shape = { MAX_ROWS, HQ }, .stride = { HQ, 1 } } };
}

/* A CSR batch. */
typedef struct csr {
    int32_t rows[MAX_REQUESTS + 1], lengths[MAX_REQUESTS], indptr[MAX_REQUESTS + 1], ids[4096];
    int n;
} csr;

static void add_request(csr *c, int rows, int length, const int32_t *ids, int pages)
{
    c->rows[c->n + 1] = c->rows[c->n] + rows;
    c->lengths[c->n] = length;
    if (pages) memcpy(c->ids + c->indptr[c->n], ids, (size_t)pages * sizeof *ids);
    c->indptr[c->n + 1] = c->indptr[c->n] + pages;
    c->n++;
}

static fv_batch batch_of(const csr *c)
{
    return (fv_batch){ .num_requests = c->n, .rows = fv_i32(c->rows, c->n + 1), .lengths = fv_i32(c->lengths, c->n),
                       .pages = { .page_size = PAGE, .num_pages = POOL, .indptr = fv_i32(c->indptr, c->n + 1),
                                  .ids = fv_i32(c->ids, c->indptr[c->n]) } };
}

static void run_ok(world *w, fv_plan *plan, const fv_batch *batch)
{
    if (fv_plan_update(plan, NULL, batch, NULL, &w->err) != FV_OK) fail_msg("fv_plan_update: %s", w->err.text);
    const fv_tensors t = tensors_of(w);
    if (fv_run(plan, &t, NULL, &w->err) != FV_OK) fail_msg("fv_run: %s", w->err.text);
}

static void assert_says(const fv_error *err, const char *piece)
{
    if (!strstr(err->text, piece)) fail_msg("\"%s\" does not say \"%s\"", err->text, piece);
}

static size_t row_bytes(int rows) { return (size_t)rows * HQ * DIM * sizeof(float); }

static float *copy_of(const float *x, size_t bytes)
{
    float *y = malloc(bytes);
    memcpy(y, x, bytes);
    return y;
}

/* Parents are rows of their request that stand before, or -1. */
static void tree_parents(void **state)
{
    world *w = *state;
    const fv_variant_use tree = { .name = "tree" };
    fv_plan *plan = plan_of(w, &tree, 1, limits_of());
    csr c = { 0 };
    add_request(&c, 2, 4, (int32_t[]){ 0 }, 1);
    add_request(&c, 3, 3, (int32_t[]){ 1 }, 1);
    static const struct {
        int32_t parents[5];
        int request, parent;            /* -1: fine */
    } ways[] = {
        { { -1, 0, -1, 0, 0 }, -1, 0 }, { { -1, -1, -1, 0, 1 }, -1, 0 }, { { -1, 0, -1, 0, 9 }, 1, 9 }, { { -1, 2, -1, 0, 1 }, 0, 2 },
        { { 1, 0, -1, 0, 1 }, 0, 1 },   { { -1, 1, -1, 0, 1 }, 0, 1 },   { { -1, 0, -5, 0, 1 }, 1, -5 }, { { -1, 0, 0, 0, 1 }, 1, 0 },
    };
    for (int i = 0; i < (int)(sizeof ways / sizeof *ways); i++) {
        const fv_tensor t = { .data = (void *)(uintptr_t)ways[i].parents, .dtype = "i32", .ndim = 1, .shape = { 5 }, .stride = { 1 } };
        const fv_arg arg = { .name = "parents", .tensor = &t };
        fv_batch batch = batch_of(&c);
        batch.args = &arg, batch.num_args = 1;
        const fv_status s = fv_plan_update(plan, NULL, &batch, NULL, &w->err);
        if (s != (ways[i].request < 0 ? FV_OK : FV_E_INVALID)) fail_msg("%d: %s", i, fv_status_name(s));
        if (s == FV_OK) continue;
        assert_says(&w->err, "'parents': the parent of row");
        assert_true(w->err.request == ways[i].request && w->err.value == ways[i].parent);
    }
    fv_plan_destroy(&plan);
}

/* ---- page tables and lengths ---- */

static void s006_length_over_pages(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    add_request(&c, 1, 17, (int32_t[]){ 1 }, 1);
    fv_batch b = batch_of(&c);
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_int_equal(w->err.request, 0);
    assert_int_equal(w->err.value, 17);
    assert_int_equal(w->err.limit, 16);
    assert_says(&w->err, "request 0");
    assert_says(&w->err, "17");
    assert_says(&w->err, "16");

    b.lengths = (fv_index){ 0 };
    b.last_page_lengths = fv_i32((int32_t[]){ 17 }, 1);
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_int_equal(w->err.request, 0);
    assert_int_equal(w->err.value, 17);
    assert_int_equal(w->err.limit, 16);

    /* the same as a table two requests wide and one page short */
    b = batch_of(&c);
    b.pages.indptr = (fv_index){ 0 };
    b.pages.table_width = b.pages.table_stride = 1;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_int_equal(w->err.value, 17);
    fv_plan_destroy(&plan);
}

static void s013_bad_page_id(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr good = { 0 }, bad = { 0 };
    add_request(&good, 1, 33, (int32_t[]){ 1, 2, 3 }, 3);
    add_request(&good, 1, 40, (int32_t[]){ 4, 5, 6 }, 3);
    add_request(&bad, 1, 33, (int32_t[]){ 1, 2, POOL }, 3);
    add_request(&bad, 1, 40, (int32_t[]){ 4, 5, 6 }, 3);
    fv_batch b = batch_of(&good);
    run_ok(w, plan, &b);
    float *expected = copy_of(w->o, row_bytes(2));

    fv_errors word;
    b = batch_of(&bad);
    run_ok(w, plan, &b);
    assert_int_equal(fv_ctx_errors(w->ctx, &word, 1), FV_OK);
    assert_int_equal(word.what, FV_FAULT_PAGE_ID);
    assert_int_equal(word.request, 0);
    assert_int_equal(word.slot, 2);
    assert_int_equal(word.value, POOL);
    assert_true(word.count >= 1);
    assert_memory_equal(w->o + HQ * DIM, expected + HQ * DIM, row_bytes(1));
    for (int i = 0; i < HQ * DIM; i++) assert_true(isfinite(w->o[i]));

    b = batch_of(&good);
    run_ok(w, plan, &b);
    assert_memory_equal(w->o, expected, row_bytes(2));
    assert_int_equal(fv_ctx_errors(w->ctx, &word, 1), FV_OK);
    assert_int_equal(word.what, FV_FAULT_NONE);
    free(expected);
    fv_plan_destroy(&plan);
}

static void s026_nothing_to_do(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    float *before = copy_of(w->o, row_bytes(MAX_ROWS));

    csr none = { 0 };
    fv_batch b = batch_of(&none);
    run_ok(w, plan, &b);
    assert_memory_equal(w->o, before, row_bytes(MAX_ROWS));

    csr no_rows = { 0 };
    for (int i = 0; i < 3; i++) add_request(&no_rows, 0, 5, (int32_t[]){ i }, 1);
    b = batch_of(&no_rows);
    run_ok(w, plan, &b);
    assert_memory_equal(w->o, before, row_bytes(MAX_ROWS));

    csr empty = { 0 };
    for (int i = 0; i < 3; i++) add_request(&empty, 2, 0, NULL, 0);
    b = batch_of(&empty);
    b.pages.num_pages = 0;
    run_ok(w, plan, &b);
    for (int i = 0; i < 6 * HQ * DIM; i++) assert_true(w->o[i] == 0);
    for (int i = 0; i < 6 * HQ; i++) assert_true(w->lse[i] == -INFINITY);
    assert_memory_equal(w->o + 6 * HQ * DIM, before + 6 * HQ * DIM, row_bytes(MAX_ROWS - 6));
    free(before);
    fv_plan_destroy(&plan);
}

/* ---- problems ---- */

static void s046_heads(void **state)
{
    world *w = *state;
    fv_plan *plan = NULL;
    fv_problem p = problem_f32(NULL, 0);
    p.num_q_heads = 8;
    p.num_kv_heads = 3;
    const fv_plan_desc limits = limits_of();
    assert_int_equal(fv_plan_create(w->ctx, &p, &limits, &plan, &w->err), FV_E_INVALID);
    assert_null(plan);
    assert_says(&w->err, "8");
    assert_says(&w->err, "3");
}

static void problem_refusals(void **state)
{
    world *w = *state;
    const fv_plan_desc limits = limits_of();
    fv_variant_use nobody = { .name = "nobody" };
    fv_arg cap = { .name = "cap", .number = 0 }, surplus = { .name = "colour", .number = 1 };
    fv_variant_use zero_cap = { .name = "softcap", .args = &cap, .num_args = 1 };
    fv_variant_use surplus_use = { .name = "causal", .args = &surplus, .num_args = 1 };
    struct { const char *says; fv_problem p; } rows[] = {
        { "q", problem_f32(NULL, 0) }, { "577", problem_f32(NULL, 0) }, { "nobody", problem_f32(&nobody, 1) },
        { "cap", problem_f32(&zero_cap, 1) }, { "colour", problem_f32(&surplus_use, 1) }, { "reserved", problem_f32(NULL, 0) },
        { "int8", problem_f32(NULL, 0) },
    };
    rows[0].p.q = NULL;
    rows[1].p.dim_qk = 577;
    rows[5].p.reserved[2] = 1;
    rows[6].p.o = "int8";
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fv_plan *plan = NULL;
        w->err = (fv_error){ 0 };
        if (fv_plan_create(w->ctx, &rows[i].p, &limits, &plan, &w->err) == FV_OK) fail_msg("row %zu was accepted", i);
        assert_null(plan);
        assert_says(&w->err, rows[i].says);
    }
}

static void a_capacity_is_named(void **state)
{
    world *w = *state;
    fv_plan_desc limits = limits_of();
    limits.max_requests = 1;
    limits.max_rows = 2;
    fv_plan *plan = plan_of(w, NULL, 0, limits);
    csr two = { 0 }, tall = { 0 };
    add_request(&two, 1, 5, (int32_t[]){ 1 }, 1);
    add_request(&two, 1, 5, (int32_t[]){ 2 }, 1);
    fv_batch b = batch_of(&two);
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_CAPACITY);
    assert_says(&w->err, "max_requests");
    add_request(&tall, 3, 5, (int32_t[]){ 1 }, 1);
    b = batch_of(&tall);
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_CAPACITY);
    assert_says(&w->err, "max_rows");

    /* a plan whose update failed holds no step */
    const fv_tensors t = tensors_of(w);
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
    fv_plan_destroy(&plan);
}

static void wrong_tensors_are_refused(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    add_request(&c, 2, 20, (int32_t[]){ 1, 2 }, 2);
    fv_batch b = batch_of(&c);
    run_ok(w, plan, &b);
    float *before = copy_of(w->o, row_bytes(MAX_ROWS));
    for (int i = 0; i < 8; i++) {
        fv_tensors t = tensors_of(w);
        fv_arg surplus = { .name = "k_scale", .number = 2 };
        switch (i) {
        case 0: t.q.data = NULL; break;
        case 1: t.q.shape[0] = 1; break;
        case 2: t.k.shape[0] = POOL - 1; break;
        case 3: t.k.stride[3] = 2; break;
        case 4: t.v.dtype = "bf16"; break;
        case 5: t.o.shape[2] = DIM - 1; break;
        case 6: t.args = &surplus; t.num_args = 1; break;
        case 7: t.k_tail = t.k; break;
        }
        w->err = (fv_error){ 0 };
        if (fv_run(plan, &t, NULL, &w->err) == FV_OK) fail_msg("case %d was accepted", i);
        assert_true(w->err.text[0] != 0 && w->err.field[0] != 0);
        assert_memory_equal(w->o, before, row_bytes(MAX_ROWS));
    }
    free(before);
    fv_plan_destroy(&plan);
}

/* ---- masks ---- */

/* A word of the tensors to change, and the field that is named. */
typedef struct bend {
    int axis;
    size_t tensor;
    int64_t stride;
    const char *field, *word;
} bend;

/* Strides out of reach, outputs that overlap themselves, words that must be 0: refused before anything is written. */
static void bent_tensors_are_refused(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    static const bend bends[] = {
        { 0, offsetof(fv_tensors, q), INT64_MAX, "tensors.q", "out of reach" },
        { 0, offsetof(fv_tensors, q), INT64_MIN, "tensors.q", "out of reach" },
        { 1, offsetof(fv_tensors, k), INT64_MAX / 4, "tensors.k", "out of reach" },
        { 0, offsetof(fv_tensors, o), 0, "tensors.o", "may not overlap" },
        { 1, offsetof(fv_tensors, o), 1, "tensors.o", "may not overlap" },
        { 1, offsetof(fv_tensors, o), 1 - DIM, "tensors.o", "may not overlap" },
    };
    csr c = { 0 };
    add_request(&c, 3, 20, (int32_t[]){ 1, 2 }, 2);
    const fv_batch b = batch_of(&c);
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_OK);
    for (size_t i = 0; i < sizeof bends / sizeof *bends; i++) {
        fv_tensors t = tensors_of(w);
        ((fv_tensor *)((char *)&t + bends[i].tensor))->stride[bends[i].axis] = bends[i].stride;
        assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
        assert_string_equal(w->err.field, bends[i].field);
        assert_says(&w->err, bends[i].word);
    }
    fv_tensors t = tensors_of(w);
    add_request(&c, 0, 16, (int32_t[]){ 3 }, 1);
    c.rows[1] = c.rows[2] = 0;          /* no rows at all: what the strides of empty tensors are does not matter */
    c.rows[0] = 0;
    const fv_batch none = batch_of(&c);
    assert_int_equal(fv_plan_update(plan, NULL, &none, NULL, &w->err), FV_OK);
    t.lse.shape[0] = t.o.shape[0] = 0;
    t.lse.stride[1] = t.o.stride[1] = 0;
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_OK);
    t = tensors_of(w);
    t.reserved0 = 1;
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "tensors.reserved0");
    fv_plan_destroy(&plan);
}

/* An array with a pointer but no type is not taken for an absent one; strides that leave memory, and reserved words. */
static void bent_batches_are_refused(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    add_request(&c, 3, 20, (int32_t[]){ 1, 2 }, 2);
    const fv_batch good = batch_of(&c);
    fv_batch b = good;
    b.rows.type = FV_INDEX_NONE;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch.rows");
    b = good;
    b.first_positions = good.lengths;
    b.first_positions.type = FV_INDEX_NONE;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch.first_positions");
    b = good;
    b.rows.stride = (int64_t)1 << 60;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "out of reach");
    b = good;
    b.pages.ids.stride = INT64_MAX / 2;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch.pages.ids");
    b = good;
    b.reserved0 = 1;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch.reserved0");
    b = good;
    b.pages.reserved0 = 1;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch.pages.reserved0");
    assert_int_equal(fv_plan_update(plan, NULL, &good, NULL, &w->err), FV_OK);
    fv_plan_destroy(&plan);
}

/* Whatever an update fails of, the plan holds no step. */
static void a_failed_update_drops_the_step(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    add_request(&c, 2, 20, (int32_t[]){ 1, 2 }, 2);
    const fv_batch b = batch_of(&c);
    const fv_tensors t = tensors_of(w);
    run_ok(w, plan, &b);
    assert_int_equal(fv_plan_update(plan, NULL, NULL, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch");
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "holds no step");
    run_ok(w, plan, &b);
    fv_plan_destroy(&plan);
}

/* Segments that begin where no memory is; sums of what is given must not overflow on the way to the refusal. */
static void segments_out_of_reach(void **state)
{
    world *w = *state;
    fv_plan_desc limits = limits_of();
    limits.max_segments = 4;
    fv_plan *plan = plan_of(w, NULL, 0, limits);
    static int32_t rows[2] = { 0, 4 }, lengths[1] = { 20 }, ids[2] = { 1, 2 };
    for (int paged = 0; paged < 2; paged++) {
        const fv_segment s = { .num_rows = 4, .first_page = INT64_MAX, .num_pages = paged ? 2 : 0, .num_keys = 20 };
        fv_batch b = { .num_requests = 1, .rows = fv_i32(rows, 2), .lengths = fv_i32(lengths, 1), .segments = &s, .num_segments = 1 };
        if (paged) b.pages = (fv_pages){ .page_size = PAGE, .num_pages = POOL, .ids = fv_i32(ids, 2) };
        else b.kv_indptr = fv_i32(lengths, 1);
        assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
        assert_int_equal(w->err.value, INT64_MAX);
        assert_says(&w->err, paged ? "2 pages from entry 9223372036854775807 on" : "first_page");
    }
    fv_plan_destroy(&plan);
}

/* Pointers between two elements are refused, in tensors and in arrays. */
static void misaligned_memory_is_refused(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    add_request(&c, 3, 20, (int32_t[]){ 1, 2 }, 2);
    const fv_batch good = batch_of(&c);
    const struct { size_t at; const char *field; } tensors[] = {
        { offsetof(fv_tensors, q), "tensors.q" }, { offsetof(fv_tensors, k), "tensors.k" }, { offsetof(fv_tensors, v), "tensors.v" },
        { offsetof(fv_tensors, o), "tensors.o" }, { offsetof(fv_tensors, lse), "tensors.lse" },
    }, arrays[] = {
        { offsetof(fv_batch, rows), "batch.rows" }, { offsetof(fv_batch, lengths), "batch.lengths" },
        { offsetof(fv_batch, pages.indptr), "batch.pages.indptr" }, { offsetof(fv_batch, pages.ids), "batch.pages.ids" },
    };
    assert_int_equal(fv_plan_update(plan, NULL, &good, NULL, &w->err), FV_OK);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        fv_tensors t = tensors_of(w);
        fv_tensor *bent = (fv_tensor *)((char *)&t + tensors[i].at);
        assert_non_null(bent->data);
        bent->data = (char *)bent->data + 1;
        assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
        assert_string_equal(w->err.field, tensors[i].field);
        assert_says(&w->err, "aligned");
    }
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        fv_batch b = good;
        fv_index *bent = (fv_index *)((char *)&b + arrays[i].at);
        bent->host = (const char *)bent->host + 2;
        assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
        assert_string_equal(w->err.field, arrays[i].field);
        assert_says(&w->err, "aligned");
    }
    fv_plan_destroy(&plan);

    fv_plan_desc limits = limits_of();
    limits.max_segments = 4;
    plan = plan_of(w, NULL, 0, limits);
    static const int32_t list[4] = { 0, 1, 2, 3 }, *const between = (const void *)((const char *)list + 2);
    for (int i = 0; i < 2; i++) {
        const fv_segment s = { .num_rows = i ? 3 : 2, .rows = i ? NULL : between, .num_pages = 2, .num_keys = 20, .page_positions = i ? between : NULL };
        fv_batch b = good;
        b.segments = &s;
        b.num_segments = 1;
        b.pages.indptr = (fv_index){ 0 };
        assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
        assert_string_equal(w->err.field, i ? "batch.segments[0].page_positions" : "batch.segments[0].rows");
        assert_says(&w->err, "aligned");
    }
    fv_plan_destroy(&plan);
}

static void s058_mask_of_the_wrong_size(void **state)
{
    world *w = *state;
    fv_variant_use mask = { .name = "mask" };
    fv_plan *plan = plan_of(w, &mask, 1, limits_of());
    csr c = { 0 };
    add_request(&c, 10, 20, (int32_t[]){ 1, 2 }, 2);
    fv_batch b = batch_of(&c);
    uint8_t bits[64] = { 0 };
    const int64_t shapes[2][2] = { { 10, 15 }, { 9, 20 } };
    for (int i = 0; i < 2; i++) {
        fv_tensor t = { .data = bits, .dtype = "b1", .ndim = 2, .shape = { shapes[i][0], shapes[i][1] }, .stride = { shapes[i][1], 1 } };
        fv_arg arg = { .name = "bits", .tensor = &t };
        char given[16];
        b.args = &arg;
        b.num_args = 1;
        assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
        assert_says(&w->err, "10");
        assert_says(&w->err, "20");
        snprintf(given, sizeof given, "%d", i == 0 ? 15 : 9);
        assert_says(&w->err, given);
    }
    fv_plan_destroy(&plan);
}

static void s059_mask_then_causal(void **state)
{
    world *w = *state;
    fv_variant_use mask = { .name = "mask" }, causal = { .name = "causal" };
    fv_plan *masked = plan_of(w, &mask, 1, limits_of());
    fv_plan *fresh = plan_of(w, &causal, 1, limits_of());
    csr c = { 0 };
    add_request(&c, 4, 15, (int32_t[]){ 3 }, 1);
    fv_batch b = batch_of(&c);
    uint8_t bits[8] = { 0x9F, 0x08, 0x5F, 0x08, 0x3F, 0x28, 0x7F, 0x01 };
    fv_tensor t = { .data = bits, .dtype = "b1", .ndim = 2, .shape = { 4, 15 }, .stride = { 15, 1 } };
    fv_arg arg = { .name = "bits", .tensor = &t };
    b.args = &arg;
    b.num_args = 1;
    run_ok(w, masked, &b);
    float *with_mask = copy_of(w->o, row_bytes(4));

    b = batch_of(&c);
    run_ok(w, fresh, &b);
    float *expected = copy_of(w->o, row_bytes(4));
    assert_memory_not_equal(expected, with_mask, row_bytes(4));

    const fv_problem plain = problem_f32(&causal, 1);
    memset(w->o, 0, row_bytes(4));
    if (fv_plan_update(masked, &plain, &b, NULL, &w->err) != FV_OK) fail_msg("%s", w->err.text);
    const fv_tensors tensors = tensors_of(w);
    assert_int_equal(fv_run(masked, &tensors, NULL, &w->err), FV_OK);
    assert_memory_equal(w->o, expected, row_bytes(4));
    free(expected);
    free(with_mask);
    fv_plan_destroy(&masked);
    fv_plan_destroy(&fresh);
}

/* Block-sparse: 2 block rows of 8 rows, pages of 16 as block columns. */
static fv_status update_blocks(world *w, fv_plan *plan, const int32_t *ids, const int32_t *positions, int pages)
{
    static int32_t rows[2] = { 0, 16 }, lengths[1] = { 64 };
    fv_segment segments[2] = {
        { .row_first = 0, .num_rows = 8, .first_page = 0, .num_pages = pages, .num_keys = pages * PAGE, .page_positions = positions },
        { .row_first = 8, .num_rows = 8, .first_page = 0, .num_pages = 1, .num_keys = PAGE, .page_positions = positions },
    };
    fv_batch b = { .num_requests = 1, .rows = fv_i32(rows, 2), .lengths = fv_i32(lengths, 1),
                   .pages = { .page_size = PAGE, .num_pages = POOL, .ids = fv_i32(ids, pages) }, .segments = segments, .num_segments = 2 };
    return fv_plan_update(plan, NULL, &b, NULL, &w->err);
}

static void s069_block_lists(void **state)
{
    world *w = *state;
    fv_plan_desc limits = limits_of();
    limits.max_segments = 4;
    fv_plan *plan = plan_of(w, NULL, 0, limits);
    const fv_tensors t = tensors_of(w);
    static const int32_t sorted[3] = { 3, 5, 9 }, sorted_at[3] = { 0, 16, 32 };
    static const int32_t mixed[3] = { 9, 3, 5 }, mixed_at[3] = { 32, 0, 16 };
    static const int32_t twice[3] = { 3, 5, 3 }, twice_at[3] = { 0, 16, 0 };

    if (update_blocks(w, plan, sorted, sorted_at, 3) != FV_OK) fail_msg("%s", w->err.text);
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_OK);
    float *expected = copy_of(w->o, row_bytes(8));
    if (update_blocks(w, plan, mixed, mixed_at, 3) != FV_OK) fail_msg("%s", w->err.text);
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_OK);
    for (int i = 0; i < 8 * HQ * DIM; i++) assert_true(fabsf(w->o[i] - expected[i]) <= 1e-5f);

    assert_int_equal(update_blocks(w, plan, twice, twice_at, 3), FV_E_INVALID);
    assert_says(&w->err, "page 3 twice");
    free(expected);
    fv_plan_destroy(&plan);
}

/* ---- scales and index types ---- */

static void s079_scales(void **state)
{
    world *w = *state;
    uint8_t *cache = calloc(POOL * PAGE * HK * DIM, 1);
    fv_problem p = problem_f32(NULL, 0);
    p.k = p.v = "fp8_e4m3";
    p.k_scale = p.v_scale = "tensor";
    const fv_plan_desc limits = limits_of();
    fv_plan *plan = NULL;
    assert_int_equal(fv_plan_create(w->ctx, &p, &limits, &plan, &w->err), FV_OK);
    csr c = { 0 };
    add_request(&c, 1, 20, (int32_t[]){ 1, 2 }, 2);
    const fv_batch b = batch_of(&c);
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_OK);
    fv_tensors t = tensors_of(w);
    t.k.data = t.v.data = cache;
    t.k.dtype = t.v.dtype = "fp8_e4m3";
    fv_arg args[2] = { { .name = "k_scale", .number = 1 }, { .name = "v_scale", .number = 1 } };
    t.args = args;
    t.num_args = 2;
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_OK);
    float *before = copy_of(w->o, row_bytes(MAX_ROWS));
    const double bad[] = { 0, NAN, 1e300, -1, INFINITY, 1e-60 };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        for (int j = 0; j < 2; j++) {
            args[0].number = args[1].number = 1;
            args[j].number = bad[i];
            assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
            assert_says(&w->err, args[j].name);
        }
    t.num_args = 1;                     /* v_scale missing */
    args[0].number = 1;
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "v_scale");
    assert_memory_equal(w->o, before, row_bytes(MAX_ROWS));
    free(before);
    free(cache);
    fv_plan_destroy(&plan);
}

static void s089_index_types(void **state)
{
    world *w = *state;
    fv_plan *plan = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    add_request(&c, 1, 33, (int32_t[]){ 1, 2, 3 }, 3);
    add_request(&c, 2, 40, (int32_t[]){ 7, 5, 6 }, 3);
    fv_batch b = batch_of(&c);
    run_ok(w, plan, &b);
    float *expected = copy_of(w->o, row_bytes(3));

    int64_t lengths64[2] = { 33, 40 }, ids64[6] = { 1, 2, 3, 7, 5, 6 };
    int32_t spread[12], rows_spread[6] = { 0, -1, 1, -1, 3, -1 };
    for (int i = 0; i < 6; i++) {
        spread[2 * i] = c.ids[i];
        spread[2 * i + 1] = 1 << 30;
    }
    b.lengths = fv_i64(lengths64, 2);
    b.pages.ids = (fv_index){ .host = spread, .count = 6, .stride = 2, .type = FV_INDEX_I32 };
    b.rows = (fv_index){ .host = rows_spread, .count = 3, .stride = 2, .type = FV_INDEX_I32 };
    run_ok(w, plan, &b);
    assert_memory_equal(w->o, expected, row_bytes(3));
    b.pages.ids = fv_i64(ids64, 6);
    run_ok(w, plan, &b);
    assert_memory_equal(w->o, expected, row_bytes(3));

    b.lengths.stride = 0;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "stride");
    b = batch_of(&c);
    b.lengths.type = (fv_index_type)7;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    b = batch_of(&c);
    b.pages.ids.host = NULL;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "batch.pages.ids");
    b = batch_of(&c);
    b.lengths.count = 1;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "batch.lengths");
    free(expected);
    fv_plan_destroy(&plan);
}

/* ---- invariance, balance ---- */

static void s100_invariant(void **state)
{
    world *w = *state;
    fv_variant_use causal = { .name = "causal" };
    fv_plan_desc limits = limits_of();
    limits.invariant = true;
    limits.chunk = 128;
    fv_plan *plan = plan_of(w, &causal, 1, limits);
    int32_t mine[32];
    for (int i = 0; i < 32; i++) mine[i] = 63 - i;
    csr alone = { 0 };
    add_request(&alone, 1, 500, mine, 32);
    fv_batch b = batch_of(&alone);
    run_ok(w, plan, &b);
    float *expected = copy_of(w->o, row_bytes(1));
    float *expected_lse = copy_of(w->lse, HQ * sizeof(float));
    float *q0 = copy_of(w->q, row_bytes(1));

    for (int round = 0; round < 12; round++) {
        csr c = { 0 };
        const int place = round * 31 / 11;
        int32_t ids[32];
        for (int i = 0; i < 32; i++) {
            if (i == place) {
                add_request(&c, 1, 500, mine, 32);
                continue;
            }
            const int length = (int)(noise(9, (uint32_t)(round * 40 + i)) * 256 + 256);
            const int rows = 1 + (i + round) % 5;
            for (int p = 0; p < 32; p++) ids[p] = (p * 7 + i) % POOL;
            add_request(&c, rows, length, ids, (length + PAGE - 1) / PAGE);
        }
        float *saved = copy_of(w->q, row_bytes(MAX_ROWS));
        memcpy(w->q + (size_t)c.rows[place] * HQ * DIM, q0, row_bytes(1));
        b = batch_of(&c);
        run_ok(w, plan, &b);
        assert_memory_equal(w->o + (size_t)c.rows[place] * HQ * DIM, expected, row_bytes(1));
        assert_memory_equal(w->lse + (size_t)c.rows[place] * HQ, expected_lse, HQ * sizeof(float));
        memcpy(w->q, saved, row_bytes(MAX_ROWS));
        free(saved);
    }
    free(q0);
    free(expected);
    free(expected_lse);
    fv_plan_destroy(&plan);
}

/* A row's bits in decode over n keys and inside a prefill (S080, here with f32). */
static void s080_prefill_is_decode(void **state)
{
    world *w = *state;
    fv_variant_use causal = { .name = "causal" };
    const int splits[] = { 1, 0, 8 };
    int32_t ids[13];
    for (int i = 0; i < 13; i++) ids[i] = 40 - 2 * i;
    float *first_o = NULL;
    for (int s = 0; s < 3; s++) {
        fv_plan_desc limits = limits_of();
        limits.invariant = true;
        limits.chunk = 64;
        limits.splits = splits[s];
        fv_plan *plan = plan_of(w, &causal, 1, limits);
        csr prefill = { 0 };
        add_request(&prefill, 200, 200, ids, 13);
        fv_batch b = batch_of(&prefill);
        run_ok(w, plan, &b);
        float *o = copy_of(w->o, row_bytes(200));
        float *lse = copy_of(w->lse, 200 * HQ * sizeof(float));
        if (!first_o) first_o = copy_of(o, row_bytes(200));
        assert_memory_equal(o, first_o, row_bytes(200));

        float *q = copy_of(w->q, row_bytes(MAX_ROWS));
        const int rows[] = { 96, 199 };
        for (int i = 0; i < 2; i++) {
            csr decode = { 0 };
            add_request(&decode, 1, rows[i] + 1, ids, 13);
            memcpy(w->q, q + (size_t)rows[i] * HQ * DIM, row_bytes(1));
            b = batch_of(&decode);
            run_ok(w, plan, &b);
            assert_memory_equal(w->o, o + (size_t)rows[i] * HQ * DIM, row_bytes(1));
            assert_memory_equal(w->lse, lse + (size_t)rows[i] * HQ, HQ * sizeof(float));
        }
        memcpy(w->q, q, row_bytes(MAX_ROWS));
        free(q); free(o); free(lse);
        fv_plan_destroy(&plan);
    }
    free(first_o);
}

/* ---- objects ---- */

/* ---- pages in the order "tiles" ---- */

enum { TILED_DIM = 32, TILED_KEYS = 43, TILED_ROWS = 5 };

static fv_problem problem_tiled(const char *order)
{
    return (fv_problem){ .q = "f32", .k = "bf16", .v = "bf16", .o = "f32", .num_q_heads = HQ, .num_kv_heads = HK, .dim_qk = TILED_DIM,
                         .page_order = order };
}

static fv_tensor tiled_pool(void *data)
{
    return (fv_tensor){ .data = data, .dtype = "bf16", .ndim = 4, .shape = { POOL, PAGE, HK, TILED_DIM },
                        .stride = { PAGE * HK * TILED_DIM, HK * TILED_DIM, TILED_DIM, 1 } };
}

static fv_tensor tiled_rows(const float *data, int rows, int heads)
{
    return (fv_tensor){ .data = (void *)(uintptr_t)data, .dtype = "f32", .ndim = 3, .shape = { rows, heads, TILED_DIM },
                        .stride = { (int64_t)heads * TILED_DIM, TILED_DIM, 1 } };
}

/* Keys appended in two steps, the last page copied to another, attention over them. */
static void attend_in_order(world *w, const char *order, float *o)
{
    enum { FIRST = 30 };
    static uint16_t k[POOL * PAGE * HK * TILED_DIM], v[POOL * PAGE * HK * TILED_DIM];
    const fv_problem problem = problem_tiled(order);
    const fv_plan_desc limits = limits_of();
    fv_plan *plan;
    int32_t ids[] = { 4, 2, 9 };
    for (int first = 0; first < TILED_KEYS; first += FIRST) {
        const int end = first + FIRST < TILED_KEYS ? first + FIRST : TILED_KEYS;
        const int32_t rows[] = { 0, end - first }, lengths[] = { end }, indptr[] = { 0, 3 };
        const fv_append_desc append = { .new_k = tiled_rows(w->k + first * HK * TILED_DIM, end - first, HK),
                                        .new_v = tiled_rows(w->v + first * HK * TILED_DIM, end - first, HK), .k = tiled_pool(k),
                                        .v = tiled_pool(v), .num_requests = 1, .rows = fv_i32(rows, 2), .lengths = fv_i32(lengths, 1),
                                        .pages = { .page_size = PAGE, .num_pages = POOL, .indptr = fv_i32(indptr, 2), .ids = fv_i32(ids, 3) },
                                        .page_order = order };
        assert_int_equal(fv_append(w->ctx, &append, NULL, &w->err), FV_OK);
    }
    const fv_tensor kt = tiled_pool(k), vt = tiled_pool(v);
    assert_int_equal(fv_copy_pages(w->ctx, &kt, &vt, &(fv_copy){ 9, 7 }, 1, NULL, &w->err), FV_OK);
    ids[2] = 7;
    assert_int_equal(fv_plan_create(w->ctx, &problem, &limits, &plan, &w->err), FV_OK);
    csr c = { 0 };
    add_request(&c, TILED_ROWS, TILED_KEYS, ids, 3);
    const fv_batch b = batch_of(&c);
    const fv_tensors t = { .q = tiled_rows(w->q, TILED_ROWS, HQ), .k = kt, .v = vt, .o = tiled_rows(o, TILED_ROWS, HQ) };
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_OK);
    assert_int_equal(fv_run(plan, &t, NULL, &w->err), FV_OK);
    fv_plan_destroy(&plan);
}

static void tiled_pages_are_pages(void **state)
{
    world *w = *state;
    static float rows[TILED_ROWS * HQ * TILED_DIM], tiles[TILED_ROWS * HQ * TILED_DIM];
    float most = 0;
    attend_in_order(w, NULL, rows);
    attend_in_order(w, "tiles", tiles);
    for (int i = 0; i < TILED_ROWS * HQ * TILED_DIM; i++) {
        assert_true(fabsf(rows[i] - tiles[i]) < 1e-4f);
        most = fmaxf(most, fabsf(rows[i]));
    }
    assert_true(most > 0.01f);
}

static void tiled_pages_are_refused(void **state)
{
    world *w = *state;
    const fv_problem tiled = problem_tiled("tiles"), rows = problem_tiled("rows");
    const fv_plan_desc limits = limits_of();
    fv_plan *plan;
    assert_int_equal(fv_plan_create(w->ctx, &tiled, &limits, &plan, &w->err), FV_OK);
    csr c = { 0 };
    add_request(&c, 1, 20, (int32_t[]){ 1, 2 }, 2);
    fv_batch b = batch_of(&c);
    assert_int_equal(fv_plan_update(plan, &rows, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "problem.page_order");
    b.pages.page_size = 24;
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_string_equal(w->err.field, "batch.pages.page_size");
    assert_says(&w->err, "multiple of 16");
    b = (fv_batch){ .num_requests = 1, .rows = b.rows, .kv_indptr = fv_i32((int32_t[]){ 0, 20 }, 2) };
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_E_INVALID);
    assert_says(&w->err, "not in pages");
    b = (fv_batch){ .kv_indptr = fv_i32((int32_t[]){ 0 }, 1) };     /* no keys, which lie nowhere */
    assert_int_equal(fv_plan_update(plan, NULL, &b, NULL, &w->err), FV_OK);
    fv_plan_destroy(&plan);
}

static void close_refuses_while_plans_live(void **state)
{
    (void)state;
    fv_ctx *ctx = NULL;
    fv_error err;
    world w = { 0 };
    assert_int_equal(fv_open(&(fv_open_desc){ .num_threads = 1 }, &ctx, &err), FV_OK);
    w.ctx = ctx;
    fv_plan *plan = plan_of(&w, NULL, 0, limits_of());
    assert_int_equal(fv_close(&ctx), FV_E_BUSY);
    assert_non_null(ctx);
    assert_int_equal(fv_plan_destroy(&plan), FV_OK);
    assert_int_equal(fv_close(&ctx), FV_OK);
    assert_int_equal(fv_close(&ctx), FV_OK);
    assert_int_equal(fv_plan_destroy(&plan), FV_OK);
}

static void open_refusals(void **state)
{
    (void)state;
    fv_ctx *ctx = NULL;
    fv_error err = { 0 };
    assert_int_equal(fv_open_abi(FV_ABI_VERSION + 1, NULL, &ctx, &err), FV_E_VERSION);
    assert_int_equal(err.value, FV_ABI_VERSION + 1);
    assert_int_equal(fv_open(&(fv_open_desc){ .device = "tpu" }, &ctx, &err), FV_E_INVALID);
    assert_says(&err, "tpu");
    assert_int_equal(fv_open(&(fv_open_desc){ .cpu_isa = "sse9" }, &ctx, &err), FV_E_INVALID);
    assert_says(&err, "sse9");
    assert_int_equal(fv_open(&(fv_open_desc){ .reserved = { 0, 1 } }, &ctx, &err), FV_E_INVALID);
    assert_null(ctx);
}

static int threads_used;
static void own_parallel_for(void *user, void (*fn)(void *arg, int i), void *arg, int count)
{
    ++*(int *)user;
    for (int i = count - 1; i >= 0; i--) fn(arg, i);            /* any order is allowed */
}

static void hosts_parallel_for(void **state)
{
    world *w = *state;
    fv_plan *ours = plan_of(w, NULL, 0, limits_of());
    csr c = { 0 };
    int32_t ids[40];
    for (int i = 0; i < 40; i++) ids[i] = i;
    add_request(&c, 1, 640, ids, 40);
    fv_batch b = batch_of(&c);
    run_ok(w, ours, &b);
    float *expected = copy_of(w->o, row_bytes(1));
    world theirs = *w;
    threads_used = 0;
    assert_int_equal(fv_open(&(fv_open_desc){ .num_threads = 2, .parallel_for = own_parallel_for, .parallel_for_user = &threads_used },
                             &theirs.ctx, &w->err), FV_OK);
    fv_plan *plan = plan_of(&theirs, NULL, 0, limits_of());
    run_ok(&theirs, plan, &b);
    assert_true(threads_used > 0);
    assert_memory_equal(w->o, expected, row_bytes(1));
    free(expected);
    fv_plan_destroy(&plan);
    fv_plan_destroy(&ours);
    assert_int_equal(fv_close(&theirs.ctx), FV_OK);
}

static void sizes_are_monotone(void **state)
{
    world *w = *state;
    const fv_problem p = problem_f32(NULL, 0);
    fv_sizes last = { 0 };
    for (int i = 0; i < 6; i++) {
        fv_plan_desc l = { .max_requests = 1 << i, .max_rows = 1 << (i + 2), .max_kv_tokens = 1 << (i + 8), .max_pages = 1 << (i + 4) };
        fv_sizes s;
        assert_int_equal(fv_plan_sizes(w->ctx, &p, &l, &s, &w->err), FV_OK);
        assert_true(s.host_bytes >= last.host_bytes && s.workspace_bytes >= last.workspace_bytes && s.max_pieces >= last.max_pieces);
        last = s;
    }
    /* the caller's workspace: exact is enough, one byte less is refused */
    fv_plan_desc l = limits_of();
    fv_sizes s;
    assert_int_equal(fv_plan_sizes(w->ctx, &p, &l, &s, &w->err), FV_OK);
    assert_true(s.workspace_bytes > 0);
    l.workspace = aligned_alloc(64, (s.workspace_bytes + 63) / 64 * 64);
    l.workspace_bytes = s.workspace_bytes - 1;
    fv_plan *plan = NULL;
    assert_int_equal(fv_plan_create(w->ctx, &p, &l, &plan, &w->err), FV_E_CAPACITY);
    assert_int_equal(w->err.limit, (int64_t)s.workspace_bytes);
    l.workspace_bytes = s.workspace_bytes;
    assert_int_equal(fv_plan_create(w->ctx, &p, &l, &plan, &w->err), FV_OK);
    csr c = { 0 };
    int32_t ids[40];
    for (int i = 0; i < 40; i++) ids[i] = i;
    add_request(&c, 1, 640, ids, 40);
    const fv_batch b = batch_of(&c);
    run_ok(w, plan, &b);
    fv_plan_destroy(&plan);
    free(l.workspace);
}

static void names_and_info(void **state)
{
    world *w = *state;
    assert_string_equal(fv_status_name(FV_E_CAPACITY), "FV_E_CAPACITY");
    assert_non_null(fv_status_text((fv_status)99));
    size_t needed = 0;
    const char *formats[] = { "text", "markdown", "json" };
    for (int i = 0; i < 3; i++) {
        assert_int_equal(fv_info(w->ctx, formats[i], NULL, 0, &needed, &w->err), FV_OK);
        char *text = malloc(needed);
        assert_int_equal(fv_info(w->ctx, formats[i], text, needed, NULL, &w->err), FV_OK);
        assert_int_equal(strlen(text) + 1, needed);
        assert_non_null(strstr(text, "causal"));
        assert_non_null(strstr(text, "bf16"));
        free(text);
    }
    char small[8];
    assert_int_equal(fv_info(w->ctx, "text", small, sizeof small, NULL, &w->err), FV_OK);
    assert_int_equal(strlen(small), 7);
    assert_int_equal(fv_info(w->ctx, "xml", NULL, 0, &needed, &w->err), FV_E_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tree_parents, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s006_length_over_pages, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s013_bad_page_id, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s026_nothing_to_do, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s046_heads, set_up, tear_down),
        cmocka_unit_test_setup_teardown(problem_refusals, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_capacity_is_named, set_up, tear_down),
        cmocka_unit_test_setup_teardown(wrong_tensors_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bent_tensors_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bent_batches_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_failed_update_drops_the_step, set_up, tear_down),
        cmocka_unit_test_setup_teardown(segments_out_of_reach, set_up, tear_down),
        cmocka_unit_test_setup_teardown(misaligned_memory_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(tiled_pages_are_pages, set_up, tear_down),
        cmocka_unit_test_setup_teardown(tiled_pages_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s058_mask_of_the_wrong_size, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s059_mask_then_causal, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s069_block_lists, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s079_scales, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s089_index_types, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s100_invariant, set_up, tear_down),
        cmocka_unit_test_setup_teardown(s080_prefill_is_decode, set_up, tear_down),
        cmocka_unit_test(close_refuses_while_plans_live),
        cmocka_unit_test(open_refusals),
        cmocka_unit_test_setup_teardown(hosts_parallel_for, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sizes_are_monotone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(names_and_info, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
