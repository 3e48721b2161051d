/* SPDX-License-Identifier: Apache-2.0 */
/* prefill.c -- two prompts at once, ragged: their rows lie one after another, and so do their keys.
 * Causal: row i of a prompt sees its keys 0..i. Prints what can be checked by eye: the first row of
 * each prompt has one key, so its output is that key's value and its LSE is its score. */
#include <foveal/foveal.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PROMPTS = 2, TOKENS = 300, HEADS = 4, DIM = 80 };

static float q[TOKENS][HEADS][DIM], k[TOKENS][HEADS][DIM], v[TOKENS][HEADS][DIM],
    o[TOKENS][HEADS][DIM], lse[TOKENS][HEADS];

static const int32_t starts[PROMPTS + 1] = { 0, 200, TOKENS };

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void)
{
    fill(&q[0][0][0], sizeof q / sizeof(float));
    fill(&k[0][0][0], sizeof k / sizeof(float));
    fill(&v[0][0][0], sizeof v / sizeof(float));

    fv_ctx *ctx = NULL;
    fv_plan *plan = NULL;
    fv_error err;
    const fv_variant_use causal = { .name = "causal" };
    const fv_problem problem = { .q = "f32", .k = "f32", .v = "f32", .o = "f32",
                                 .num_q_heads = HEADS, .dim_qk = DIM, .variants = &causal,
                                 .num_variants = 1 };
    const fv_plan_desc limits = { .max_requests = PROMPTS, .max_rows = TOKENS,
                                  .max_kv_tokens = TOKENS };
    const fv_batch batch = { .num_requests = PROMPTS, .rows = fv_i32(starts, PROMPTS + 1),
                             .kv_indptr = fv_i32(starts, PROMPTS + 1) };
    const fv_tensor rows = { .ndim = 3, .shape = { TOKENS, HEADS, DIM },
                             .stride = { HEADS * DIM, DIM, 1 } };
    fv_tensors layer = {
        .q = rows, .k = rows, .v = rows, .o = rows,
        .lse = { .data = lse, .ndim = 2, .shape = { TOKENS, HEADS }, .stride = { HEADS, 1 } }
    };
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
    for (int p = 0; p < PROMPTS; p++)
        for (int h = 0; h < HEADS; h++) {
            double score = 0;
            for (int d = 0; d < DIM; d++) {
                score += (double)q[starts[p]][h][d] * (double)k[starts[p]][h][d] / sqrt(DIM);
                worst = fmax(worst, fabs((double)o[starts[p]][h][d] - (double)v[starts[p]][h][d]));
            }
            worst = fmax(worst, fabs((double)lse[starts[p]][h] - score));
        }
    printf("prefill: %d tokens of %d prompts; first rows differ from their only value by %.1e\n",
           TOKENS, PROMPTS, worst);
    fv_plan_destroy(&plan);
    fv_close(&ctx);
    return worst < 1e-5 ? 0 : 1;
}
