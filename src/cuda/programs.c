/* SPDX-License-Identifier: Apache-2.0 */
/* programs.c -- what is compiled for GPUs that are not there: the builds of every kernel that are worth checking, and worth having in a bundle.
 *
 *   (1) a program that is named here for an arch is, text by text and option by option, what the backend asks for on a device of that arch: else a
 *       bundle would hold what nobody looks for. [tests/test_jit.sh: a bundle serves a machine that may not compile] */
#include "attend.h"
#include "jit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What devices of an arch have: bytes of shared memory for a block, of an SM. The system's part and the registers are alike in all. */
typedef struct arch_facts {
    int number;                         /* 80 of "sm_80" */
    int block, sm;
} arch_facts;

static const arch_facts archs[] = {
    { 80, 163 << 10, 164 << 10 }, { 86, 99 << 10, 100 << 10 }, { 87, 163 << 10, 164 << 10 }, { 89, 99 << 10, 100 << 10 },
    { 90, 227 << 10, 228 << 10 }, { 100, 227 << 10, 228 << 10 }, { 103, 227 << 10, 228 << 10 }, { 120, 99 << 10, 100 << 10 },
    { 121, 99 << 10, 100 << 10 },
};

int fv__cuda_arch_number(const char *arch) { return !strncmp(arch, "sm_", 3) ? atoi(arch + 3) : 0; }

static bool find_device(const char *arch, fv__attend_device *out)
{
    for (int i = 0; i < FV__COUNT(archs); i++)
        if (archs[i].number == fv__cuda_arch_number(arch)) {
            *out = (fv__attend_device){ .shared_per_block = archs[i].block, .shared_per_sm = archs[i].sm, .shared_reserved = 1 << 10,
                                        .registers_per_sm = 65536, .num_sms = 1 };
            return true;
        }
    return false;
}

bool fv__cuda_arch_known(const char *arch)
{
    fv__attend_device ignored;
    return find_device(arch, &ignored);
}

/* ------------------------------------------------------------------------------------------------------- attention */

typedef struct sample {
    const char *q, *k;
    int heads, kv_heads, dim_qk, dim_v;
    const char *variants[3];
    bool decode, v_in_k, quick, invariant;
    const char *k_scale;
} sample;

static const sample samples[] = {
    { "bf16", "bf16", 32, 8, 128, 128, { "causal" }, .decode = true, .quick = true },
    { "bf16", "bf16", 32, 8, 128, 128, { "causal" }, .quick = false },
    { "bf16", "bf16", 32, 8, 128, 128, { "causal", "softcap", "window" }, .quick = true },
    { "f16", "f16", 32, 8, 64, 64, { "causal" }, .quick = false },
    { "bf16", "bf16", 16, 8, 256, 256, { "causal" }, .quick = false },
    { "bf16", "bf16", 32, 32, 192, 128, { "causal" }, .quick = false },
    { "bf16", "bf16", 128, 1, 576, 512, { "causal" }, .v_in_k = true },
    { "bf16", "bf16", 128, 1, 576, 512, { "causal" }, .v_in_k = true, .decode = true },
    { "bf16", "fp8_e4m3", 32, 8, 128, 128, { "causal" }, .decode = true, .k_scale = "tensor" },
    { "f16", "fp8_e5m2", 32, 8, 128, 128, { "causal", "sink" }, .k_scale = "head" },
    { "f16", "int8", 32, 8, 128, 128, { "causal" }, .k_scale = "token_head" },
    { "bf16", "fp4_e2m1", 32, 8, 128, 128, { "causal" }, .decode = true },
    { "f32", "f32", 8, 2, 128, 128, { "causal" }, .quick = false },
    { "f16", "f16", 8, 2, 80, 80, { "mask", "alibi" }, .quick = false },
    { "bf16", "bf16", 8, 2, 128, 128, { "causal", "rope" }, .quick = false },
    { "bf16", "bf16", 8, 2, 128, 128, { "ranges", "tree" }, .quick = false },
    { "bf16", "bf16", 8, 2, 128, 128, { "causal" }, .invariant = true },
    { "bf16", "bf16", 32, 8, 128, 128, { "causal", "key_sums" }, .quick = true },
    { "bf16", "bf16", 32, 8, 128, 128, { "causal", "key_sums" }, .decode = true },
    { "f16", "f16", 16, 8, 256, 256, { "causal", "softcap", "key_sums" }, .quick = false },
    { "bf16", "bf16", 32, 8, 128, 128, { "causal", "row_max" }, .quick = false },
    { "bf16", "fp8_e4m3", 32, 8, 128, 128, { "causal", "key_sums" }, .decode = true, .k_scale = "token_head" },
    { "bf16", "bf16", 128, 1, 576, 512, { "ranges", "key_sums" }, .v_in_k = true },
    { "f32", "f32", 8, 2, 128, 128, { "mask", "key_sums" }, .invariant = true },
};

/* The problem of a sample; the arguments do not matter to the text. */
static bool make_problem(const sample *s, fv__problem *out)
{
    static const float slopes[64] = { 1 };
    const fv_tensor heads = { .data = (void *)(uintptr_t)slopes, .dtype = "f32", .ndim = 1, .shape = { s->heads }, .stride = { 1 } };
    const struct { const char *variant; fv_arg arg; } args[] = {
        { "rope", { .name = "rotary_dim", .number = 64 } }, { "softcap", { .name = "cap", .number = 30 } },
        { "window", { .name = "left", .number = 1023 } }, { "alibi", { .name = "slopes", .tensor = &heads } },
        { "sink", { .name = "sinks", .tensor = &heads } },
    };
    fv_variant_use uses[3];
    int n = 0;
    for (; n < 3 && s->variants[n]; n++) {
        uses[n] = (fv_variant_use){ .name = s->variants[n] };
        for (int i = 0; i < FV__COUNT(args); i++)
            if (!strcmp(args[i].variant, s->variants[n])) uses[n].args = &args[i].arg, uses[n].num_args = 1;
    }
    const fv_problem p = { .q = s->q, .k = s->k, .v = s->k, .o = s->q, .num_q_heads = s->heads, .num_kv_heads = s->kv_heads,
                           .dim_qk = s->dim_qk, .dim_v = s->dim_v, .variants = uses, .num_variants = n, .v_in_k = s->v_in_k, .k_scale = s->k_scale,
                           .v_scale = s->k_scale };
    return fv__problem_init(&p, out, NULL) == FV_OK;
}

/* One build of the attention kernel; refused ones are left out. */
static void visit_build(const fv__problem *p, const fv_plan_desc *limits, const fv__attend_device *device, bool quick, fv__cuda_visit_fn *visit,
                        void *user)
{
    fv__attend_config c;
    fv__kernel_shape shape;
    char *text = fv__attend_configure(p, limits, device, &c, NULL) == FV_OK ? fv__attend_text(p, &c) : NULL;
    if (!text) return;
    char name[160];
    fv__attend_shape(p, limits, &c, device, &shape);
    int at = snprintf(name, sizeof name, "%s%s", shape.name, limits->invariant ? "_invariant" : "");
    for (int i = 0; i < p->num_uses && at < (int)sizeof name; i++)
        at += snprintf(name + at, sizeof name - (size_t)at, "_%s", p->uses[i].variant->meta.name);
    const fv__jit_text extra = { "uses.cuh", text };
    fv__cuda_program program = { .name = name, .source = "attend_sm80.cu", .extra = &extra, .num_extra = 1 };
    fv__attend_parts(&c, device, &program.num_parts, &program.max_registers);
    visit(user, &program, 80, quick);
    free(text);
}

static fv_plan_desc limits_of(bool decode, bool invariant)
{
    return (fv_plan_desc){ .max_requests = 64, .max_rows = decode ? 64 : 4096, .max_kv_tokens = 1 << 20, .max_pages = 1 << 16, .chunk = 1024,
                           .invariant = invariant };
}

static void visit_sample(const sample *s, const fv__attend_device *device, fv__cuda_visit_fn *visit, void *user)
{
    fv__problem p;
    if (!make_problem(s, &p)) return;
    const fv_plan_desc limits = limits_of(s->decode, s->invariant);
    visit_build(&p, &limits, device, s->quick, visit, user);
    fv__problem_free(&p);
}

fv_status fv__cuda_problem_programs(const fv_problem *problem, const char *arch, fv__cuda_visit_fn *visit, void *user, fv_error *err)
{
    fv__problem p;
    fv__attend_device device;
    fv__attend_config c;
    if (!find_device(arch, &device))
        return fv__fail(err, FV_E_INVALID, "arch", fv__cuda_arch_number(arch), 80, "%s is none of the archs that kernels are made for", arch);
    FV_TRY(fv__problem_init(problem, &p, err));
    fv_plan_desc limits = limits_of(false, false);
    const fv_status status = fv__attend_configure(&p, &limits, &device, &c, err);
    for (int build = 0; build < 4 && status == FV_OK; build++) {
        limits = limits_of(build & 1, build & 2);
        visit_build(&p, &limits, &device, true, visit, user);
    }
    fv__problem_free(&p);
    return status;
}

/* ------------------------------------------------------------------------------------------------ kernels of one text */

/* A build that a line asks for: its options, "full" (not in quick checks), "sm>=N". */
static void visit_line(const char *source, const char *text, const char *line, size_t length, fv__cuda_visit_fn *visit, void *user)
{
    enum { MOST = 40 };
    const char *options[MOST];
    char *words = strndup(line, length), *rest = words, name[256];
    int n = 0, oldest = 0, at = snprintf(name, sizeof name, "%s", source);
    bool quick = true;
    for (char *word; words && (word = strsep(&rest, " \t\r"));) {
        if (!*word) continue;
        if (!strcmp(word, "full")) quick = false;
        else if (sscanf(word, "sm>=%d", &oldest) != 1 && n < MOST) options[n++] = word;
    }
    for (int i = 0; i < n && at < (int)sizeof name; i++) at += snprintf(name + at, sizeof name - (size_t)at, " %s", options[i]);
    const fv__jit_text extra = { source, text };
    const fv__cuda_program program = { .name = name, .source = source, .extra = &extra, .num_extra = text != NULL, .options = options,
                                       .num_options = n };
    visit(user, &program, oldest, quick);
    free(words);
}

void fv__cuda_text_programs(const char *source, const char *text, bool embedded, fv__cuda_visit_fn *visit, void *user)
{
    static const char mark[] = "checkjit:";
    bool any = false;
    for (const char *at = text; (at = strstr(at, mark)); any = true) {
        at += strlen(mark);
        const size_t length = strcspn(at, "\n");
        const char *end = memmem(at, length, "*/", 2);
        visit_line(source, embedded ? NULL : text, at, end ? (size_t)(end - at) : length, visit, user);
    }
    if (!any) visit_line(source, embedded ? NULL : text, "", 0, visit, user);
}

void fv__cuda_plain_programs(fv__cuda_visit_fn *visit, void *user)
{
    for (const fv__jit_text *t = fv__cuda_sources; t->name; t++) {
        const size_t length = strlen(t->name);
        if (length > 3 && !strcmp(t->name + length - 3, ".cu") && strcmp(t->name, "attend_sm80.cu"))
            fv__cuda_text_programs(t->name, t->text, true, visit, user);
    }
}

void fv__cuda_programs(const char *arch, fv__cuda_visit_fn *visit, void *user)
{
    fv__attend_device device;
    if (!find_device(arch, &device)) find_device("sm_80", &device);
    for (int i = 0; i < FV__COUNT(samples); i++) visit_sample(&samples[i], &device, visit, user);
    fv__cuda_plain_programs(visit, user);
}
