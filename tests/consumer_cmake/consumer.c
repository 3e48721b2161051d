/* SPDX-License-Identifier: Apache-2.0 */
/* consumer.c -- what a program outside of this repository does with an installed Foveal: one row, a query of zeros over three keys, so that
 * the output is the mean of the values. Also a C++17 program (consumer.cc includes it). */
#include <foveal/foveal.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { DIM = 8, KEYS = 3 };

static fv_tensor view(float *data, int64_t tokens)
{
    fv_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.ndim = 3;
    t.shape[0] = tokens;
    t.shape[1] = 1;
    t.shape[2] = DIM;
    t.stride[0] = t.stride[1] = DIM;
    t.stride[2] = 1;
    return t;
}

static fv_status attend(fv_plan *plan, float *o, fv_error *err)
{
    static float q[DIM], k[KEYS * DIM], v[KEYS * DIM];
    const int32_t indptr[2] = { 0, KEYS };
    fv_batch batch;
    fv_tensors tensors;
    fv_status s;

    for (int i = 0; i < KEYS * DIM; i++) v[i] = (float)(i / DIM + 1);
    memset(&batch, 0, sizeof batch);
    batch.num_requests = 1;
    batch.kv_indptr = fv_i32(indptr, 2);
    s = fv_plan_update(plan, NULL, &batch, NULL, err);
    if (s != FV_OK) return s;
    memset(&tensors, 0, sizeof tensors);
    tensors.q = view(q, 1);
    tensors.k = view(k, KEYS);
    tensors.v = view(v, KEYS);
    tensors.o = view(o, 1);
    return fv_run(plan, &tensors, NULL, err);
}

static fv_status run(float *o, fv_error *err)
{
    fv_open_desc desc;
    fv_problem problem;
    fv_plan_desc limits;
    fv_ctx *ctx = NULL;
    fv_plan *plan = NULL;
    fv_status s;

    memset(&desc, 0, sizeof desc);
    memset(&problem, 0, sizeof problem);
    memset(&limits, 0, sizeof limits);
    desc.device = "cpu";
    problem.q = problem.k = problem.v = problem.o = "f32";
    problem.num_q_heads = 1;
    problem.dim_qk = DIM;
    limits.max_requests = limits.max_rows = 1;
    limits.max_kv_tokens = KEYS;
    s = fv_open(&desc, &ctx, err);
    if (s == FV_OK) s = fv_plan_create(ctx, &problem, &limits, &plan, err);
    if (s == FV_OK) s = attend(plan, o, err);
    fv_plan_destroy(&plan);
    fv_close(&ctx);
    return s;
}

int main(void)
{
    float o[DIM];
    fv_error err;
    memset(&err, 0, sizeof err);
    const fv_status s = run(o, &err);
    if (s != FV_OK) {
        fprintf(stderr, "consumer: %s: %s\n", fv_status_name(s), err.text);
        return 1;
    }
    for (int i = 0; i < DIM; i++)
        if (fabsf(o[i] - 2) > 1e-6f) {
            fprintf(stderr, "consumer: o[%d] is %g, expected 2\n", i, (double)o[i]);
            return 1;
        }
    printf("foveal %s: the mean is %g\n", fv_version(), (double)o[0]);
    return 0;
}
