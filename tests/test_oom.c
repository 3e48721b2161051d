/* SPDX-License-Identifier: Apache-2.0 */
/* test_oom.c -- fails the first, second, third, ... allocation of every public function that allocates, until it succeeds. A failure must be
 * FV_E_NO_MEMORY with a sentence, leave the outputs alone, and leak nothing (the address sanitizer's build of this test says so). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "os.h"

enum { HQ = 4, HK = 2, DIM = 32, PAGE = 4, POOL = 16, ROWS = 3, KEYS = 30 };

static float q[ROWS][HQ][DIM], o[ROWS][HQ][DIM], lse[ROWS][HQ], k[POOL][PAGE][HK][DIM], v[POOL][PAGE][HK][DIM];
static const int32_t ids[8] = { 1, 2, 3, 4, 5, 6, 7, 8 }, indptr[2] = { 0, 8 }, lengths[1] = { KEYS }, rows[2] = { 0, ROWS };

/* What a scenario does between allocations that may fail: returns the first status that is not FV_OK, and has undone everything by then. */
typedef fv_status scenario(fv_ctx *ctx, fv_error *err);

static const fv_arg rotary = { .name = "rotary_dim", .number = DIM };       /* makes a problem own a table of frequencies */

static fv_tensor tensor3(void *data, int64_t a, int64_t b, int64_t c)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 3, .shape = { a, b, c }, .stride = { b * c, c, 1 } };
}

static fv_tensor pool4(void *data)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 4, .shape = { POOL, PAGE, HK, DIM }, .stride = { PAGE * HK * DIM, HK * DIM, DIM, 1 } };
}

static fv_pages pages(void)
{
    return (fv_pages){ .page_size = PAGE, .num_pages = POOL, .indptr = fv_i32(indptr, 2), .ids = fv_i32(ids, 8) };
}

/* steps_alone: only what a step does is counted. */
static fv_status plan_and_steps(fv_ctx *ctx, bool steps_alone, fv_error *err)
{
    fv_plan *plan = NULL;
    fv_variant_use uses[] = { { .name = "causal" }, { .name = "rope", .args = &rotary, .num_args = 1 } };
    fv_problem p = { .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = HQ, .num_kv_heads = HK, .dim_qk = DIM, .variants = uses,
                     .num_variants = 2 };
    fv_plan_desc l = { .max_requests = 2, .max_rows = 8, .max_kv_tokens = 64, .max_pages = 16 };
    fv_status s = fv_plan_create(ctx, &p, &l, &plan, err);
    if (s != FV_OK) {
        assert_null(plan);
        return s;
    }
    fv_batch b = { .num_requests = 1, .rows = fv_i32(rows, 2), .lengths = fv_i32(lengths, 1), .pages = pages() };
    fv_tensors t = { .q = tensor3(q, ROWS, HQ, DIM), .k = pool4(k), .v = pool4(v), .o = tensor3(o, ROWS, HQ, DIM),
                     .lse = { .data = lse, .dtype = "f32", .ndim = 2, .shape = { ROWS, HQ }, .stride = { HQ, 1 } } };
    if (steps_alone) fv__os_fail_at = 1;
    s = fv_plan_update(plan, &p, &b, NULL, err);
    if (s == FV_OK) s = fv_run(plan, &t, NULL, err);
    if (s == FV_OK) s = fv_plan_update(plan, NULL, &b, NULL, err);
    if (s == FV_OK) s = fv_run(plan, &t, NULL, err);
    if (steps_alone) {
        assert_int_equal(fv__os_fail_at, 1);
        fv__os_fail_at = 0;
    }
    fv_plan_destroy(&plan);
    return s;
}

static fv_status plan_and_run(fv_ctx *ctx, fv_error *err) { return plan_and_steps(ctx, false, err); }

static fv_status sizes_and_support(fv_ctx *ctx, fv_error *err)
{
    fv_variant_use rope = { .name = "rope", .args = &rotary, .num_args = 1 };
    fv_problem p = { .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = HQ, .num_kv_heads = HK, .dim_qk = DIM, .variants = &rope,
                     .num_variants = 1 };
    fv_plan_desc l = { .max_requests = 2, .max_rows = 8, .max_kv_tokens = 64, .max_pages = 16 };
    fv_sizes sizes;
    fv_support support;
    const fv_problem *list[] = { &p };
    fv_status s = fv_plan_sizes(ctx, &p, &l, &sizes, err);
    if (s == FV_OK) s = fv_supports(ctx, &p, &l, &support, err);
    if (s == FV_OK) s = fv_warm(ctx, list, 1, &l, err);
    return s;
}

static fv_status append_rope_merge_copy(fv_ctx *ctx, fv_error *err)
{
    static float new_k[ROWS][HK][DIM], new_v[ROWS][HK][DIM], part_lse[2][ROWS][HQ], part_o[2][ROWS][HQ][DIM];
    static const int32_t positions[ROWS] = { 27, 28, 29 };
    fv_rope_desc rope = { .rotary_dim = DIM };
    fv_append_desc a = { .new_k = tensor3(new_k, ROWS, HK, DIM), .new_v = tensor3(new_v, ROWS, HK, DIM), .k = pool4(k), .v = pool4(v), .rope = &rope,
                         .num_requests = 1, .rows = fv_i32(rows, 2), .lengths = fv_i32(lengths, 1), .pages = pages() };
    fv_tensor x = tensor3(q, ROWS, HQ, DIM);
    fv_tensor os[2] = { tensor3(part_o[0], ROWS, HQ, DIM), tensor3(part_o[1], ROWS, HQ, DIM) };
    fv_tensor ls[2];
    for (int i = 0; i < 2; i++)
        ls[i] = (fv_tensor){ .data = part_lse[i], .dtype = "f32", .ndim = 2, .shape = { ROWS, HQ }, .stride = { HQ, 1 } };
    fv_tensor out = tensor3(o, ROWS, HQ, DIM);
    fv_tensor out_lse = ls[0];
    out_lse.data = lse;
    fv_tensor kp = pool4(k), vp = pool4(v);
    fv_copy copy = { 1, 2 };
    fv_status s = fv_append(ctx, &a, NULL, err);
    if (s == FV_OK) s = fv_rope(ctx, &rope, &x, fv_i32(positions, ROWS), &x, NULL, err);
    if (s == FV_OK) s = fv_merge(ctx, os, ls, 2, false, &out, &out_lse, NULL, err);
    if (s == FV_OK) s = fv_copy_pages(ctx, &kp, &vp, &copy, 1, NULL, err);
    return s;
}

static fv_status cache_life(fv_ctx *ctx, fv_error *err)
{
    fv_cache *cache = NULL;
    fv_cache_desc d = { .page_size = PAGE, .max_sequences = 4, .num_pages = POOL, .max_pages_per_sequence = 8 };
    fv_status s = fv_cache_create(ctx, &d, &cache, err);
    if (s != FV_OK) {
        assert_null(cache);
        return s;
    }
    const uint64_t keys[4] = { 11, 12, 13, 14 };
    int32_t a = -1, child = -1;
    int64_t have;
    fv_copy copy;
    fv_pages table;
    s = fv_cache_open(cache, keys, 4, 16, &a, &have, err);
    if (s == FV_OK) s = fv_cache_extend(cache, a, 18, err);
    if (s == FV_OK) s = fv_cache_commit(cache, a, 18, keys, 4, err);
    if (s == FV_OK) s = fv_cache_fork(cache, a, &child, &copy, err);
    if (s == FV_OK) s = fv_cache_pages(cache, &child, 1, &table, err);
    if (s == FV_OK) s = fv_cache_release(cache, child, err);
    if (s == FV_OK) s = fv_cache_release(cache, a, err);
    assert_int_equal(fv_cache_destroy(&cache), FV_OK);
    return s;
}

static void each_allocation(scenario *run)
{
    fv_ctx *ctx = NULL;
    fv_error err;
    assert_int_equal(fv_open(&(fv_open_desc){ .num_threads = 2 }, &ctx, &err), FV_OK);
    long n = 1;
    for (;; n++) {
        assert_true(n < 1000);
        memset(&err, 0, sizeof err);
        fv__os_fail_at = n;
        const fv_status s = run(ctx, &err);
        fv__os_fail_at = 0;
        if (s == FV_OK) break;
        assert_int_equal(s, FV_E_NO_MEMORY);
        assert_int_equal(err.status, FV_E_NO_MEMORY);
        assert_true(err.text[0] != 0);
    }
    print_message("%ld allocations failed one by one\n", n - 1);
    assert_int_equal(fv_close(&ctx), FV_OK);
}

static void open_and_close(void **state)
{
    (void)state;
    for (long n = 1;; n++) {
        fv_ctx *ctx = NULL;
        fv_error err = { 0 };
        assert_true(n < 1000);
        fv__os_fail_at = n;
        const fv_status s = fv_open(&(fv_open_desc){ .num_threads = 2 }, &ctx, &err);
        fv__os_fail_at = 0;
        if (s == FV_OK) {
            assert_true(n > 1);
            assert_int_equal(fv_close(&ctx), FV_OK);
            return;
        }
        assert_int_equal(s, FV_E_NO_MEMORY);
        assert_null(ctx);
        assert_true(err.text[0] != 0);
    }
}

/* A step allocates nothing, not even with another problem whose frequencies it makes. */
static void steps(void **state)
{
    (void)state;
    fv_ctx *ctx = NULL;
    fv_error err = { 0 };
    assert_int_equal(fv_open(&(fv_open_desc){ .num_threads = 2 }, &ctx, &err), FV_OK);
    assert_int_equal(plan_and_steps(ctx, true, &err), FV_OK);
    assert_int_equal(fv_close(&ctx), FV_OK);
}

static void plans(void **state) { (void)state; each_allocation(plan_and_run); }
static void sizes(void **state) { (void)state; each_allocation(sizes_and_support); }
static void operations(void **state) { (void)state; each_allocation(append_rope_merge_copy); }
static void caches(void **state) { (void)state; each_allocation(cache_life); }

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_and_close), cmocka_unit_test(plans), cmocka_unit_test(steps), cmocka_unit_test(sizes), cmocka_unit_test(operations), cmocka_unit_test(caches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
