/* SPDX-License-Identifier: Apache-2.0 */
/* prefix.c -- sixteen requests whose page lists begin with the same pages (a system prompt of 2048
 * tokens). With FV_SHARING_FIND the plan reads that prefix once for all of them; the outputs stay
 * the same. Prints both plans' traffic and the difference. */
#include <foveal/foveal.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    REQUESTS = 16, Q_HEADS = 32, KV_HEADS = 8, DIM = 128, PAGE = 16,
    PREFIX = 2048 / PAGE, OWN = 64 / PAGE,              /* pages */
    PAGES = PREFIX + REQUESTS * OWN, ENTRIES = REQUESTS * (PREFIX + OWN),
};

static float q[REQUESTS][Q_HEADS][DIM], o[2][REQUESTS][Q_HEADS][DIM];
static float k[PAGES][PAGE][KV_HEADS][DIM], v[PAGES][PAGE][KV_HEADS][DIM];
static int32_t lengths[REQUESTS], page_indptr[REQUESTS + 1], page_ids[ENTRIES];

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

static void lay_pages(void)
{
    int32_t n = 0;
    for (int r = 0; r < REQUESTS; r++) {
        for (int p = 0; p < PREFIX; p++)
            page_ids[n++] = p;                          /* the same ids: that is all it takes */
        for (int p = 0; p < OWN; p++)
            page_ids[n++] = PREFIX + r * OWN + p;
        page_indptr[r + 1] = n;
        lengths[r] = (PREFIX + OWN) * PAGE;
    }
}

/* One decode step; the megabytes of K and V that its plan reads. */
static int step(fv_ctx *ctx, fv_sharing sharing, float (*out)[Q_HEADS][DIM], double *megabytes,
                fv_error *err)
{
    fv_plan *plan = NULL;
    fv_plan_stats stats = { 0 };
    const fv_problem problem = { .q = "f32", .k = "f32", .v = "f32", .o = "f32",
                                 .num_q_heads = Q_HEADS, .num_kv_heads = KV_HEADS, .dim_qk = DIM };
    const fv_plan_desc limits = { .max_requests = REQUESTS, .max_rows = REQUESTS,
                                  .max_kv_tokens = (int64_t)ENTRIES * PAGE, .max_pages = ENTRIES,
                                  .sharing = sharing };
    const fv_batch batch = {
        .num_requests = REQUESTS, .lengths = fv_i32(lengths, REQUESTS),
        .pages = { .page_size = PAGE, .num_pages = PAGES,
                   .indptr = fv_i32(page_indptr, REQUESTS + 1), .ids = fv_i32(page_ids, ENTRIES) },
    };
    const fv_tensor rows = { .ndim = 3, .shape = { REQUESTS, Q_HEADS, DIM },
                             .stride = { Q_HEADS * DIM, DIM, 1 } };
    const fv_tensor pool = { .ndim = 4, .shape = { PAGES, PAGE, KV_HEADS, DIM },
                             .stride = { PAGE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, 1 } };
    fv_tensors layer = { .q = rows, .k = pool, .v = pool, .o = rows };
    layer.q.data = q;
    layer.k.data = k;
    layer.v.data = v;
    layer.o.data = out;
    const int failed = fv_plan_create(ctx, &problem, &limits, &plan, err) ||
                       fv_plan_update(plan, NULL, &batch, NULL, err) ||
                       fv_run(plan, &layer, NULL, err) || fv_plan_query(plan, &stats, err);
    *megabytes = (double)stats.kv_bytes / 1e6;
    fv_plan_destroy(&plan);
    return failed;
}

int main(void)
{
    fv_ctx *ctx = NULL;
    fv_error err;
    double read[2], worst = 0;
    fill(&q[0][0][0], sizeof q / sizeof(float));
    fill(&k[0][0][0][0], sizeof k / sizeof(float));
    fill(&v[0][0][0][0], sizeof v / sizeof(float));
    lay_pages();
    if (fv_open(&(fv_open_desc){ .device = "cpu" }, &ctx, &err) ||
        step(ctx, FV_SHARING_OFF, o[0], &read[0], &err) ||
        step(ctx, FV_SHARING_FIND, o[1], &read[1], &err)) {
        fprintf(stderr, "%s: %s\n", fv_status_name(err.status), err.text);
        return 1;
    }
    for (size_t i = 0; i < sizeof o[0] / sizeof(float); i++)
        worst = fmax(worst, fabs((double)(&o[0][0][0][0])[i] - (double)(&o[1][0][0][0])[i]));
    printf("prefix: %.1f MB of keys and values read without sharing, %.1f MB with it; outputs "
           "differ by at most %.1e\n",
           read[0], read[1], worst);
    fv_close(&ctx);
    return worst < 1e-5 ? 0 : 1;
}
