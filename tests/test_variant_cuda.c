/* SPDX-License-Identifier: Apache-2.0 */
/* test_variant_cuda.c -- users' variants in CUDA kernels, without a GPU: every text under examples/variants compiles for three generations, alone and
 * beside others with the same names in them, and a fault stands on the user's line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cuda/attend.h"
#include "cuda/jit.h"
#include "cuda/texts.h"
#include "os.h"
#include "variant_faults.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fv_error err;
static fv__jit_cache *cache;
static fv__cuda_jit *jit;

#define OK(call)                                                                          \
    do {                                                                                  \
        memset(&err, 0, sizeof err);                                                      \
        if ((call) != FV_OK) fail_msg("%s: %s (%s)", #call, err.text, err.field);         \
    } while (0)

static int open_compiler(void **state)
{
    (void)state;
    const fv__jit_cache_desc desc = { .dir = "", .kernel_path = "" };
    OK(fv__jit_cache_open(&desc, &cache, &err));
    OK(fv__cuda_jit_open(NULL, cache, NULL, &jit, &err));
    return 0;
}

static int close_compiler(void **state)
{
    (void)state;
    fv__cuda_jit_close(&jit);
    fv__jit_cache_close(&cache);
    return 0;
}

static void need_nvrtc(void)
{
    if (*fv__cuda_jit_compiler(jit)) return;
    print_message("there is no NVRTC on this machine\n");
    skip();
}

static char *read_text(const char *path)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = fopen(path, "r");
    if (!f || getdelim(&text, &size, 0, f) < 0) fail_msg("%s cannot be read", path);
    fclose(f);
    return text;
}

static fv_variant parsed(const char *name, const char *text)
{
    fv_variant v = { .text = text, .builtin = -1 };
    OK(fv__variant_parse(name, text, &v.meta, &err));
    return v;
}

/* The text of the kernel of a problem with these variants, or NULL; the arguments do not matter to it, but those of the problem must be there. */
static char *kernel_text(const fv_variant *const *variants, int n, fv_error *error)
{
    static const fv__attend_device device = { .shared_per_block = 101376, .shared_per_sm = 102400, .shared_reserved = 1024, .registers_per_sm = 65536,
                                              .num_sms = 100 };
    fv_arg args[4][FV__MAX_PARAMS];
    fv_variant_use uses[4];
    for (int u = 0; u < n; u++) {
        int count = 0;
        for (int i = 0; i < variants[u]->meta.num_params; i++) {
            const fv__param *p = &variants[u]->meta.params[i];
            if (p->kind <= FV__INT && p->binding == FV__BIND_PROBLEM) args[u][count++] = (fv_arg){ .name = p->name, .number = p->example };
        }
        uses[u] = (fv_variant_use){ .variant = variants[u], .args = args[u], .num_args = count };
    }
    const fv_problem given = {
        .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = 8, .num_kv_heads = 2, .dim_qk = 64, .variants = uses, .num_variants = n
    };
    const fv_plan_desc limits = { .max_requests = 4, .max_rows = 4, .max_kv_tokens = 1024, .max_pages = 64, .chunk = 1024 };
    fv__problem problem;
    fv__attend_config config;
    if (fv__problem_init(&given, &problem, error) != FV_OK) return NULL;
    char *text = fv__attend_configure(&problem, &limits, &device, &config, error) == FV_OK ? fv__attend_text(&problem, &config) : NULL;
    fv__problem_free(&problem);
    return text;
}

static fv_status compile(const fv_variant *const *variants, int n, const char *arch, fv_error *error)
{
    char *text = kernel_text(variants, n, error);
    if (!text) return error->status;
    const fv__jit_text extra = { "uses.cuh", text };
    const fv__cuda_program program = { .name = "attend", .source = "attend_sm80.cu", .extra = &extra, .num_extra = 1 };
    const fv__jit_blob *blob;
    const fv_status status = fv__cuda_jit_compile(jit, &program, arch, &blob, error);
    if (status == FV_E_COMPILE) fv__cuda_blame(variants, n, error);
    free(text);
    return status;
}

/* A built-in costs what a user's variant of the same text costs: they are the same kernel. */
static void built_ins_are_texts(void **state)
{
    (void)state;
    for (int i = 0; i < fv__variant_count(); i++) {
        const fv_variant *built_in = fv__variant_builtin(i), own = parsed(built_in->meta.name, built_in->text), *use = &own;
        char *theirs = kernel_text(&use, 1, &err), *ours = kernel_text(&built_in, 1, &err);
        if (!theirs || !ours) fail_msg("%s: %s", built_in->meta.name, err.text);
        assert_string_equal(theirs, ours);
        free(theirs);
        free(ours);
    }
}

static int is_text(const struct dirent *e)
{
    const char *dot = strrchr(e->d_name, '.');
    return dot && !strcmp(dot, ".c");
}

/* As fv_variant_create compiles a text on a GPU. */
static fv_status probe(const fv_variant *v, const char *arch, fv_error *error)
{
    char *text = fv__cuda_probe_text(v);
    const fv__jit_text extra = { "probe.cu", text };
    const fv__cuda_program program = { .name = v->meta.name, .source = "probe.cu", .extra = &extra, .num_extra = 1 };
    const fv__jit_blob *blob;
    assert_non_null(text);
    const fv_status status = fv__cuda_jit_compile(jit, &program, arch, &blob, error);
    free(text);
    fv__cuda_blame(&v, 1, error);
    return status;
}

/* Every text for every generation, and in the kernel for one: they take turns, for a kernel takes seconds. */
static void examples(void **state)
{
    (void)state;
    static const char *const archs[] = { "sm_80", "sm_90a", "sm_120a" };
    struct dirent **list;
    need_nvrtc();
    const int n = scandir("examples/variants", &list, is_text, alphasort);
    assert_true(n >= 5);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "examples/variants/%s", list[i]->d_name);
        char *text = read_text(path);
        const fv_variant v = parsed("mine", text);
        const fv_variant *use = &v;
        for (int a = 0; a < FV__COUNT(archs); a++) {
            memset(&err, 0, sizeof err);
            const int64_t begin = fv__os_now_ns();
            const bool whole = i % FV__COUNT(archs) == a;
            const fv_status s = whole ? compile(&use, 1, archs[a], &err) : probe(use, archs[a], &err);
            if (s != FV_OK) fail_msg("%s for %s: %s", path, archs[a], err.text);
            print_message("  %-36s %-8s %s, %.0f ms\n", path, archs[a], whole ? "kernel" : "text", (double)(fv__os_now_ns() - begin) * 1e-6);
        }
        free(text);
        free(list[i]);
    }
    free(list);
}


/* Names and macros of one text are not those of another, nor the kernel's. */
static void texts_beside_each_other(void **state)
{
    (void)state;
    need_nvrtc();
    const fv_variant one = parsed("one", META "#define FACTOR 2.0f\n#define lane 7\nstatic v_f32 help(v_f32 s) { return s * FACTOR; }\n"
                                              "FV_SCORE { return help(s) + lane; }\n");
    const fv_variant two = parsed("two", META "FV_PARAMS(FV_NUMBER(gain, run, 1, 1))\n#ifndef FACTOR\n#define FACTOR a->gain\n#endif\n"
                                              "static v_f32 help(v_f32 s, float x) { return s * x; }\nFV_SCORE { return help(s, FACTOR); }\n"
                                              "FV_VALUE { return v + 1.0f; }\nFV_OUTPUT { return o - lse; }\n");
    const fv_variant *uses[] = { &one, &two };
    OK(compile(uses, 2, "sm_90a", &err));
}

static const struct {
    int line;
    const char *text, *word;
} faults[] = {
    { 2, META "static v_f32 help(v_f32 s) { return t; }\nFV_SCORE { return help(s); }\n", "\"t\"" },
    VARIANT_FAULTS
    { 3, META "#define TWICE(x) (x + y)\nFV_SCORE { return TWICE(s); }\n", "" },
};

static void every_fault_has_its_line(void **state)
{
    (void)state;
    need_nvrtc();
    for (int i = 0; i < FV__COUNT(faults); i++) {
        const fv_variant v = parsed("mine", faults[i].text);
        memset(&err, 0, sizeof err);
        const fv_status s = probe(&v, "sm_90a", &err);
        if (s != FV_E_COMPILE || err.value != faults[i].line || strcmp(err.field, "mine") || !strstr(err.text, faults[i].word))
            fail_msg("fault %d: %s, field %s, line %lld (expected %d): %s", i, fv_status_name(s), err.field, (long long)err.value, faults[i].line,
                     err.text);
    }
}

/* In a kernel, among other texts, too. */
static void faults_in_kernels(void **state)
{
    (void)state;
    need_nvrtc();
    const fv_variant fine = parsed("fine", META "FV_SCORE { return s; }\n"), bad = parsed("bad", META "\n\nFV_SCORE { return oops; }\n");
    const fv_variant *uses[] = { &fine, &bad };
    assert_int_equal(compile(uses, 2, "sm_80", &err), FV_E_COMPILE);
    assert_string_equal(err.field, "bad");
    assert_int_equal(err.value, 4);
    assert_non_null(strstr(err.text, "oops"));
}

/* What ptxas complains of has its line, too: NVRTC alone knows nothing of instructions. */
static void asm_in_kernels(void **state)
{
    (void)state;
    need_nvrtc();
    const fv_variant bad = parsed("bad", META "\n\nFV_SCORE {\n    float t;\n    asm(\"bogus.f32 %0, %1;\" : \"=f\"(t) : \"f\"(s));\n    return t; }\n");
    const fv_variant *uses[] = { &bad };
    assert_int_equal(compile(uses, 1, "sm_80", &err), FV_E_COMPILE);
    assert_string_equal(err.field, "bad");
    assert_int_equal(err.value, 6);
    assert_non_null(strstr(err.text, "bogus"));
}

/* The hook of the second pass, beside parameters of its own; a fault in it has its line, too. */
static void key_sums(void **state)
{
    (void)state;
    need_nvrtc();
    const fv_variant sums = parsed("mine", META "FV_PARAMS(FV_NUMBER(b, run, 1, 2) FV_SUMS(sums, run))\nFV_KEY_SUM { return p * a->b; }\n");
    const fv_variant bad = parsed("bad", META "FV_PARAMS(FV_SUMS(sums, run))\nFV_KEY_SUM { return oops; }\n");
    const fv_variant *use = &sums;
    OK(compile(&use, 1, "sm_90a", &err));
    use = &bad;
    assert_int_equal(compile(&use, 1, "sm_90a", &err), FV_E_COMPILE);
    assert_int_equal(err.value, 3);
    assert_non_null(strstr(err.text, "oops"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fault_has_its_line), cmocka_unit_test(faults_in_kernels), cmocka_unit_test(key_sums),
        cmocka_unit_test(asm_in_kernels),
        cmocka_unit_test(texts_beside_each_other),  cmocka_unit_test(examples),          cmocka_unit_test(built_ins_are_texts),
    };
    return cmocka_run_group_tests(tests, open_compiler, close_compiler);
}
