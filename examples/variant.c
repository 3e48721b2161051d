/* SPDX-License-Identifier: Apache-2.0 */
/* variant.c -- attention with a formula of one's own: scores lose slope * ln(1 + distance). The
 * text below is all that there is to write; see docs/variants.md. Then one causal prompt runs with
 * three slopes (nothing is compiled for that), and the result is compared with the formula. */
#include <foveal/foveal.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char text[] =
    "FV_META(\"s - slope * ln(1 + q_pos - k_pos)\")\n"
    "FV_PARAMS(\n"
    "    FV_NUMBER(slope, run, required, 0.5)\n"
    ")\n"
    "FV_REQUIRE(slope >= 0)\n"
    "#ifdef FV_SPEC\n"
    "FV_SCORE { return s - a->slope * log(1.0 + fabs((double)(at.q_pos - at.k_pos))); }\n"
    "#else\n"
    "FV_SCORE\n"
    "{\n"
    "    const v_f32 distance = v_abs(v_float(at.q_pos - at.k_pos));\n"
    "    return v_fma(v_log(distance + 1.0f), v_set(-a->slope), s);\n"
    "}\n"
    "#endif\n";

enum { ROWS = 100, HEADS = 4, DIM = 32 };

static float q[ROWS][HEADS][DIM], k[ROWS][HEADS][DIM], v[ROWS][HEADS][DIM], o[ROWS][HEADS][DIM];

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

static double check(int row, int head, double slope)
{
    double weight[ROWS], sum = 0, worst = 0;
    for (int j = 0; j <= row; j++) {
        double s = 0;
        for (int d = 0; d < DIM; d++)
            s += (double)q[row][head][d] * (double)k[j][head][d];
        sum += weight[j] = exp(s / sqrt(DIM) - slope * log(1.0 + row - j));
    }
    for (int d = 0; d < DIM; d++) {
        double x = 0;
        for (int j = 0; j <= row; j++)
            x += weight[j] / sum * (double)v[j][head][d];
        worst = fmax(worst, fabs(x - (double)o[row][head][d]));
    }
    return worst;
}

static int fail(const fv_error *err)
{
    if (err->status == FV_E_COMPILE)
        fprintf(stderr, "line %lld of the text: ", (long long)err->value);
    fprintf(stderr, "%s: %s\n", fv_status_name(err->status), err->text);
    return 1;
}

int main(void)
{
    fill(&q[0][0][0], sizeof q / sizeof(float));
    fill(&k[0][0][0], sizeof k / sizeof(float));
    fill(&v[0][0][0], sizeof v / sizeof(float));

    fv_ctx *ctx = NULL;
    fv_variant *mine = NULL;
    fv_plan *plan = NULL;
    fv_error err;
    if (fv_open(&(fv_open_desc){ .device = "cpu" }, &ctx, &err) ||
        fv_variant_create(ctx, "log_distance", text, &mine, &err))
        return fail(&err);

    const fv_variant_use uses[] = { { .name = "causal" }, { .variant = mine } };
    const fv_problem problem = { .q = "f32", .k = "f32", .v = "f32", .o = "f32",
                                 .num_q_heads = HEADS, .dim_qk = DIM, .variants = uses,
                                 .num_variants = 2 };
    const fv_plan_desc limits = { .max_requests = 1, .max_rows = ROWS, .max_kv_tokens = ROWS };
    static const int32_t offsets[] = { 0, ROWS };
    const fv_batch batch = { .num_requests = 1, .rows = fv_i32(offsets, 2),
                             .kv_indptr = fv_i32(offsets, 2) };
    if (fv_plan_create(ctx, &problem, &limits, &plan, &err) ||
        fv_plan_update(plan, NULL, &batch, NULL, &err))
        return fail(&err);

    const fv_tensor rows = { .ndim = 3, .shape = { ROWS, HEADS, DIM },
                             .stride = { HEADS * DIM, DIM, 1 } };
    double worst = 0;
    for (double slope = 0; slope <= 2; slope++) {
        const fv_arg arg = { .name = "slope", .number = slope };
        fv_tensors layer = { .q = rows, .k = rows, .v = rows, .o = rows, .args = &arg,
                             .num_args = 1 };
        layer.q.data = q;
        layer.k.data = k;
        layer.v.data = v;
        layer.o.data = o;
        if (fv_run(plan, &layer, NULL, &err))
            return fail(&err);
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < HEADS; h++)
                worst = fmax(worst, check(r, h, slope));
    }
    printf("variant: %d rows, three slopes, largest difference from the formula %.1e\n", ROWS,
           worst);
    fv_plan_destroy(&plan);
    fv_variant_destroy(&mine);
    fv_close(&ctx);
    return worst < 1e-5 ? 0 : 1;
}
