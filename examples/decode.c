/* SPDX-License-Identifier: Apache-2.0 */
/* decode.c -- one decode step: each of three requests has one new row and keys in pages of 16.
 * Prints how far the result is from the formula, worked out by hand below. */
#include <foveal/foveal.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { REQUESTS = 3, Q_HEADS = 8, KV_HEADS = 2, DIM = 64, PAGE = 16, PAGES = 16 };

static float q[REQUESTS][Q_HEADS][DIM], o[REQUESTS][Q_HEADS][DIM];
static float k[PAGES][PAGE][KV_HEADS][DIM], v[PAGES][PAGE][KV_HEADS][DIM];

static const int32_t lengths[REQUESTS] = { 100, 17, 1 };
static const int32_t page_indptr[REQUESTS + 1] = { 0, 7, 9, 10 };
static const int32_t page_ids[10] = { 3, 1, 4, 15, 9, 2, 6, 5, 8, 7 };  /* any order will do */

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

/* o = softmax(q.k / sqrt(dim)) v for one request and head; returns the largest difference. */
static double check(int request, int head)
{
    const int kv = head / (Q_HEADS / KV_HEADS);
    double weight[128], sum = 0, worst = 0;
    for (int j = 0; j < lengths[request]; j++) {
        const int32_t page = page_ids[page_indptr[request] + j / PAGE];
        double s = 0;
        for (int d = 0; d < DIM; d++)
            s += (double)q[request][head][d] * (double)k[page][j % PAGE][kv][d];
        sum += weight[j] = exp(s / sqrt(DIM));
    }
    for (int d = 0; d < DIM; d++) {
        double x = 0;
        for (int j = 0; j < lengths[request]; j++)
            x += weight[j] / sum *
                 (double)v[page_ids[page_indptr[request] + j / PAGE]][j % PAGE][kv][d];
        worst = fmax(worst, fabs(x - (double)o[request][head][d]));
    }
    return worst;
}

int main(void)
{
    fill(&q[0][0][0], sizeof q / sizeof(float));
    fill(&k[0][0][0][0], sizeof k / sizeof(float));
    fill(&v[0][0][0][0], sizeof v / sizeof(float));

    fv_ctx *ctx = NULL;
    fv_plan *plan = NULL;
    fv_error err;
    const fv_problem problem = { .q = "f32", .k = "f32", .v = "f32", .o = "f32",
                                 .num_q_heads = Q_HEADS, .num_kv_heads = KV_HEADS, .dim_qk = DIM };
    const fv_plan_desc limits = {
        .max_requests = REQUESTS, .max_rows = REQUESTS, .max_kv_tokens = 256, .max_pages = 16
    };
    const fv_batch batch = {
        /* .rows absent: one row a request */
        .num_requests = REQUESTS, .lengths = fv_i32(lengths, REQUESTS),
        .pages = { .page_size = PAGE, .num_pages = PAGES,
                   .indptr = fv_i32(page_indptr, REQUESTS + 1), .ids = fv_i32(page_ids, 10) },
    };
    const fv_tensor rows = { .ndim = 3, .shape = { REQUESTS, Q_HEADS, DIM },
                             .stride = { Q_HEADS * DIM, DIM, 1 } };
    const fv_tensor pool = { .ndim = 4, .shape = { PAGES, PAGE, KV_HEADS, DIM },
                             .stride = { PAGE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, 1 } };
    fv_tensors layer = { .q = rows, .k = pool, .v = pool, .o = rows };
    layer.q.data = q;
    layer.k.data = k;
    layer.v.data = v;
    layer.o.data = o;

    if (fv_open(&(fv_open_desc){ .device = "cpu" }, &ctx, &err) ||
        fv_plan_create(ctx, &problem, &limits, &plan, &err) ||
        fv_plan_update(plan, NULL, &batch, NULL, &err) || fv_run(plan, &layer, NULL, &err)) {
        fprintf(stderr, "%s: %s\n", fv_status_name(err.status), err.text);
        return 1;
    }
    double worst = 0;
    for (int r = 0; r < REQUESTS; r++)
        for (int h = 0; h < Q_HEADS; h++)
            worst = fmax(worst, check(r, h));
    printf("decode: %d requests, largest difference from the formula %.1e\n", REQUESTS, worst);
    fv_plan_destroy(&plan);
    fv_close(&ctx);
    return worst < 1e-5 ? 0 : 1;
}
