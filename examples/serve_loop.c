/* SPDX-License-Identifier: Apache-2.0 */
/* serve_loop.c -- the smallest serving loop: a cache hands out pages, new keys are rotated into
 * them, every step is planned and run. Three requests compute their prompts in chunks and then
 * decode token by token, all in the same batches. In the end each request's last row is computed
 * once more, from the whole sequence at a time (ragged, with its own copy of keys): both must
 * agree. */
#include <foveal/foveal.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    REQUESTS = 3,
    Q_HEADS = 4,
    KV_HEADS = 2,
    DIM = 64,
    PAGE = 16,
    PAGES = 32,
    BUDGET = 24,
    LONGEST = 128
};

/* The model's projections, as it were: what token t of request r would be turned into. */
static float all_q[REQUESTS][LONGEST][Q_HEADS][DIM], all_k[REQUESTS][LONGEST][KV_HEADS][DIM],
    all_v[REQUESTS][LONGEST][KV_HEADS][DIM];

static float cache_k[PAGES][PAGE][KV_HEADS][DIM], cache_v[PAGES][PAGE][KV_HEADS][DIM];
static float q[BUDGET][Q_HEADS][DIM], new_k[BUDGET][KV_HEADS][DIM], new_v[BUDGET][KV_HEADS][DIM],
    o[BUDGET][Q_HEADS][DIM];
static float last_o[REQUESTS][Q_HEADS][DIM];

static const int prompt[REQUESTS] = { 70, 9, 33 }, total[REQUESTS] = { 90, 40, 64 };

static const fv_variant_use causal = { .name = "causal" };
static const fv_problem problem = { .q = "f32", .k = "f32", .v = "f32", .o = "f32",
                                    .num_q_heads = Q_HEADS, .num_kv_heads = KV_HEADS, .dim_qk = DIM,
                                    .variants = &causal, .num_variants = 1 };
static const fv_rope_desc rope = { .rotary_dim = DIM, .base = 10000 };

static fv_tensor tensor(void *data, int64_t rows, int64_t heads)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 3, .shape = { rows, heads, DIM },
                        .stride = { heads * DIM, DIM, 1 } };
}

static fv_tensor pool(void *data)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 4,
                        .shape = { PAGES, PAGE, KV_HEADS, DIM },
                        .stride = { PAGE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, 1 } };
}

/* One step: done[r] tokens of request r are in the cache; want[r] more are computed now. */
static int step(fv_ctx *ctx, fv_plan *plan, fv_cache *cache, const int32_t *sequences, int *done,
                const int *want, fv_error *err)
{
    int32_t rows[REQUESTS + 1] = { 0 }, lengths[REQUESTS];
    fv_pages pages;
    for (int r = 0; r < REQUESTS; r++) {
        const int at = rows[r];
        memcpy(q[at], all_q[r][done[r]], (size_t)want[r] * sizeof q[0]);
        memcpy(new_k[at], all_k[r][done[r]], (size_t)want[r] * sizeof new_k[0]);
        memcpy(new_v[at], all_v[r][done[r]], (size_t)want[r] * sizeof new_v[0]);
        rows[r + 1] = at + want[r];
        lengths[r] = done[r] + want[r];
        if (fv_cache_extend(cache, sequences[r], want[r], err))
            return 1;
    }
    if (fv_cache_pages(cache, sequences, REQUESTS, &pages, err))
        return 1;
    const int64_t n = rows[REQUESTS];
    const fv_batch batch = { .num_requests = REQUESTS, .rows = fv_i32(rows, REQUESTS + 1),
                             .lengths = fv_i32(lengths, REQUESTS), .pages = pages };
    const fv_append_desc append = {
        /* rotates and stores new keys, and rotates q in place */
        .new_k = tensor(new_k, n, KV_HEADS), .new_v = tensor(new_v, n, KV_HEADS),
        .k = pool(cache_k), .v = pool(cache_v), .rope = &rope, .q = tensor(q, n, Q_HEADS),
        .q_out = tensor(q, n, Q_HEADS), .num_requests = REQUESTS, .rows = batch.rows,
        .lengths = batch.lengths, .pages = pages,
    };
    const fv_tensors layer = { .q = tensor(q, n, Q_HEADS), .k = pool(cache_k), .v = pool(cache_v),
                               .o = tensor(o, n, Q_HEADS) };
    if (fv_plan_update(plan, NULL, &batch, NULL, err) || fv_append(ctx, &append, NULL, err) ||
        fv_run(plan, &layer, NULL, err))
        return 1;
    for (int r = 0; r < REQUESTS; r++) {
        done[r] += want[r];
        if (want[r])
            memcpy(last_o[r], o[rows[r + 1] - 1], sizeof last_o[r]);
        if (fv_cache_commit(cache, sequences[r], done[r], NULL, 0, err))
            return 1;
    }
    return 0;
}

/* Chunks of prompts and single tokens of those that decode, within the budget. */
static int serve(fv_ctx *ctx, fv_plan *plan, fv_cache *cache, int *steps, fv_error *err)
{
    int32_t sequences[REQUESTS];
    int done[REQUESTS] = { 0 };
    int64_t held;
    for (int r = 0; r < REQUESTS; r++)
        if (fv_cache_open(cache, NULL, 0, 0, &sequences[r], &held, err))
            return 1;
    for (*steps = 0;; ++*steps) {
        int want[REQUESTS], left = BUDGET;
        for (int r = 0; r < REQUESTS; r++) {
            const int missing = done[r] < prompt[r] ? prompt[r] - done[r] : done[r] < total[r];
            left -= want[r] = missing < left ? missing : left;
        }
        if (left == BUDGET)
            return 0;
        if (step(ctx, plan, cache, sequences, done, want, err))
            return 1;
    }
}

/* The last row of request r, from its whole sequence at once; the largest difference to what the
 * loop computed. */
static double compare(fv_ctx *ctx, fv_plan *plan, int r, fv_error *err)
{
    static float k[LONGEST][KV_HEADS][DIM], one_q[1][Q_HEADS][DIM], one_o[1][Q_HEADS][DIM];
    int32_t positions[LONGEST];
    const int32_t n = total[r], last = n - 1, rows[2] = { 0, 1 }, keys[2] = { 0, n };
    for (int32_t i = 0; i < n; i++)
        positions[i] = i;
    const fv_tensor from = tensor(all_k[r], n, KV_HEADS), to = tensor(k, n, KV_HEADS);
    const fv_tensor q_from = tensor(all_q[r][last], 1, Q_HEADS), q_to = tensor(one_q, 1, Q_HEADS);
    const fv_batch batch = { .num_requests = 1, .rows = fv_i32(rows, 2),
                             .kv_indptr = fv_i32(keys, 2) };
    const fv_tensors layer = {
        .q = q_to, .k = to, .v = tensor(all_v[r], n, KV_HEADS), .o = tensor(one_o, 1, Q_HEADS)
    };
    if (fv_rope(ctx, &rope, &from, fv_i32(positions, n), &to, NULL, err) ||
        fv_rope(ctx, &rope, &q_from, fv_i32(&last, 1), &q_to, NULL, err) ||
        fv_plan_update(plan, NULL, &batch, NULL, err) || fv_run(plan, &layer, NULL, err))
        return -1;
    double worst = 0;
    for (int h = 0; h < Q_HEADS; h++)
        for (int d = 0; d < DIM; d++)
            worst = fmax(worst, fabs((double)one_o[0][h][d] - (double)last_o[r][h][d]));
    return worst;
}

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void)
{
    fv_ctx *ctx = NULL;
    fv_plan *plan = NULL;
    fv_cache *cache = NULL;
    fv_error err = { 0 };
    int steps;
    const fv_plan_desc limits = { .max_requests = REQUESTS, .max_rows = BUDGET,
                                  .max_kv_tokens = REQUESTS * LONGEST,
                                  .max_pages = REQUESTS * LONGEST / PAGE };
    const fv_cache_desc pages = { .page_size = PAGE, .max_sequences = REQUESTS, .num_pages = PAGES,
                                  .max_pages_per_sequence = LONGEST / PAGE };
    fill(&all_q[0][0][0][0], sizeof all_q / sizeof(float));
    fill(&all_k[0][0][0][0], sizeof all_k / sizeof(float));
    fill(&all_v[0][0][0][0], sizeof all_v / sizeof(float));
    if (fv_open(&(fv_open_desc){ .device = "cpu" }, &ctx, &err) ||
        fv_plan_create(ctx, &problem, &limits, &plan, &err) ||
        fv_cache_create(ctx, &pages, &cache, &err) || serve(ctx, plan, cache, &steps, &err)) {
        fprintf(stderr, "%s: %s\n", fv_status_name(err.status), err.text);
        return 1;
    }
    double worst = 0;
    for (int r = 0; r < REQUESTS; r++) {
        const double difference = compare(ctx, plan, r, &err);
        if (difference < 0) {
            fprintf(stderr, "%s: %s\n", fv_status_name(err.status), err.text);
            return 1;
        }
        worst = fmax(worst, difference);
    }
    printf("serve_loop: %d requests in %d steps; step by step and all at once differ by at most "
           "%.1e\n",
           REQUESTS, steps, worst);
    fv_cache_destroy(&cache);
    fv_plan_destroy(&plan);
    fv_close(&ctx);
    return worst < 1e-5 ? 0 : 1;
}
