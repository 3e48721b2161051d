/* SPDX-License-Identifier: Apache-2.0 */
/* programs.c -- the builds of every kernel that are worth compiling on a machine without a GPU: for checkjit and for bundles. */
#include "attend.h"
#include "jit.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct sample {
    const char *q, *k;
    int heads, kv_heads, dim_qk, dim_v;
    const char *variants[3];
    bool decode, v_in_k, quick, invariant;
    const char *k_scale;
} sample;

static const sample samples[] = {
    { "bf16", "bf16", 32, 8, 128, 128, { "causal" }, .decode = true, .quick = true },
    { "bf16", "bf16", 32, 8, 128, 128, { "causal", "softcap", "window" }, .quick = true },
    { "f16", "f16", 32, 8, 64, 64, { "causal" }, .quick = false },
    { "bf16", "bf16", 16, 8, 256, 256, { "causal" }, .quick = false },
    { "bf16", "bf16", 32, 32, 192, 128, { "causal" }, .quick = false },
    { "bf16", "bf16", 128, 1, 576, 512, { "causal" }, .v_in_k = true },
    { "bf16", "fp8_e4m3", 32, 8, 128, 128, { "causal" }, .decode = true, .k_scale = "tensor" },
    { "f16", "fp8_e5m2", 32, 8, 128, 128, { "causal", "sink" }, .k_scale = "head" },
    { "f16", "int8", 32, 8, 128, 128, { "causal" }, .k_scale = "token_head" },
    { "bf16", "fp4_e2m1", 32, 8, 128, 128, { "causal" }, .decode = true },
    { "f32", "f32", 8, 2, 128, 128, { "causal" }, .quick = false },
    { "f16", "f16", 8, 2, 80, 80, { "mask", "alibi" }, .quick = false },
    { "bf16", "bf16", 8, 2, 128, 128, { "causal", "rope" }, .quick = false },
    { "bf16", "bf16", 8, 2, 128, 128, { "ranges", "tree" }, .quick = false },
    { "bf16", "bf16", 8, 2, 128, 128, { "causal" }, .invariant = true },
};

/* The problem of a sample; the arguments do not matter to the text. */
static bool make_problem(const sample *s, fv__problem *out)
{
    static const float slopes[64] = { 1 };
    const fv_tensor heads = { .data = (void *)(uintptr_t)slopes, .dtype = "f32", .ndim = 1, .shape = { s->heads }, .stride = { 1 } };
    const fv_arg dim = { .name = "rotary_dim", .number = 64 }, cap = { .name = "cap", .number = 30 }, left = { .name = "left", .number = 1023 };
    const fv_arg slope = { .name = "slopes", .tensor = &heads }, sinks = { .name = "sinks", .tensor = &heads };
    fv_variant_use uses[3];
    int n = 0;
    for (; n < 3 && s->variants[n]; n++) {
        const char c = s->variants[n][0], d = s->variants[n][1];
        uses[n] = (fv_variant_use){ .name = s->variants[n] };
        const fv_arg *arg = c == 'r' && d == 'o' ? &dim : c == 's' && d == 'o' ? &cap : c == 'w' ? &left : c == 'a' ? &slope : c == 's' ? &sinks : NULL;
        uses[n].args = arg;
        uses[n].num_args = arg != NULL;
    }
    const fv_problem p = { .q = s->q, .k = s->k, .v = s->k, .o = s->q, .num_q_heads = s->heads, .num_kv_heads = s->kv_heads,
                           .dim_qk = s->dim_qk, .dim_v = s->dim_v, .variants = uses, .num_variants = n, .v_in_k = s->v_in_k, .k_scale = s->k_scale,
                           .v_scale = s->k_scale };
    return fv__problem_init(&p, out, NULL) == FV_OK;
}

static void visit_sample(const sample *s, const fv__attend_device *device, int oldest, fv__cuda_visit_fn *visit, void *user)
{
    fv__problem p;
    fv__attend_config c;
    if (!make_problem(s, &p)) return;
    const fv_plan_desc limits = { .max_requests = 64, .max_rows = s->decode ? 64 : 4096, .max_kv_tokens = 1 << 20, .max_pages = 1 << 16, .chunk = 1024,
                                  .invariant = s->invariant };
    char *text = fv__attend_configure(&p, &limits, device, &c, NULL) == FV_OK ? fv__attend_text(&p, &c) : NULL;
    if (text) {
        char name[96];
        snprintf(name, sizeof name, "attend_sm80_%s_%s_d%d_%s%s%s", s->q, s->k, s->dim_qk, s->variants[0], s->variants[1] ? "_" : "",
                 s->variants[1] ? s->variants[1] : "");
        const fv__jit_text extra = { "uses.cuh", text };
        const fv__cuda_program program = { .name = name, .source = "attend_sm80.cu", .extra = &extra, .num_extra = 1 };
        visit(user, &program, oldest, s->quick);
    }
    free(text);
    fv__problem_free(&p);
}

void fv__cuda_programs(fv__cuda_visit_fn *visit, void *user)
{
    /* the smallest and the largest shared memory of the archs that are compiled for */
    const fv__attend_device large = { .shared_per_block = 232448, .shared_per_sm = 233472, .shared_reserved = 1024, .registers_per_sm = 65536,
                                      .num_sms = 132 };
    for (int i = 0; i < FV__COUNT(samples); i++) visit_sample(&samples[i], &large, 80, visit, user);
}
