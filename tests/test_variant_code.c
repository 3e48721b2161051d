/* SPDX-License-Identifier: Apache-2.0 */
/* test_variant_code.c -- users' variants as code: every text under examples/variants, every hook and every built-in against its definition on
 * each CPU level of this machine; where a fault stands; what the cache and a missing compiler do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cpu/compile.h"
#include "cpu/cpu.h"
#include "jit/jit_cc.h"
#include "os.h"
#include "spec.h"
#include "variant_faults.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static fv_error err;
static char cache_dir[] = "/tmp/foveal-test-XXXXXX";

#define OK(call)                                                                          \
    do {                                                                                  \
        memset(&err, 0, sizeof err);                                                      \
        if ((call) != FV_OK) fail_msg("%s: %s (%s)", #call, err.text, err.field);         \
    } while (0)

static fv_ctx *open_level(const char *isa)
{
    fv_ctx *ctx = NULL;
    OK(fv_open(&(fv_open_desc){ .device = "cpu", .cpu_isa = isa, .num_threads = 2, .cache_dir = cache_dir }, &ctx, &err));
    return ctx;
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

/* Uses on every shape; what they say stands in the message. */
static void agrees(fv_ctx *ctx, const char *isa, const char *name, const fv_variant_use *uses, int n)
{
    double share = 0;
    for (const spec_shape *shape = spec_shapes; shape->name; shape++) {
        spec_result r;
        memset(&err, 0, sizeof err);
        const fv_status s = spec_compare(ctx, uses, n, shape, &r, &err);
        if (s != FV_OK) fail_msg("%s, %s, %s: %s", name, isa, shape->name, err.text);
        if (!(r.share <= 1)) fail_msg("%s, %s, %s: %s", name, isa, shape->name, r.worst);
        assert_true(r.values > 0);
        share = fmax(share, r.share);
    }
    print_message("  %-14s %-7s %.2f of what rounding allows\n", name, isa, share);
}

#define META_ONE "FV_META(\"x\")\nFV_SCORE { return s; }\n"

typedef void each_level(fv_ctx *ctx, const char *isa);

static void on_each_level(each_level *fn)
{
    for (int i = 0; i < fv__cpu_isa_count(); i++) {
        const fv__cpu_isa *isa = fv__cpu_isa_at(i);
        if (!isa->available()) continue;
        fv_ctx *ctx = open_level(isa->name);
        fn(ctx, isa->name);
        OK(fv_close(&ctx));
    }
}

/* ----------------------------------------------------------------------------------------------------------- agreement */

static void check_builtins(fv_ctx *ctx, const char *isa)
{
    for (int i = 0; i < fv__variant_count(); i++) {
        const fv_variant *v = fv__variant_builtin(i);
        agrees(ctx, isa, v->meta.name, &(fv_variant_use){ .variant = v }, 1);
    }
}

static void built_ins(void **state)
{
    (void)state;
    on_each_level(check_builtins);
}

static int is_text(const struct dirent *e)
{
    const char *dot = strrchr(e->d_name, '.');
    return dot && !strcmp(dot, ".c");
}

/* Alone, and behind a built-in. */
static void check_file(fv_ctx *ctx, const char *isa, const char *file)
{
    char path[512], name[32], both[48];
    snprintf(path, sizeof path, "examples/variants/%s", file);
    snprintf(name, sizeof name, "my_%.*s", (int)fv__min64((int64_t)strlen(file) - 2, 28), file);
    snprintf(both, sizeof both, "window, %s", name);
    char *text = read_text(path);
    fv_variant *v = NULL;
    OK(fv_variant_create(ctx, name, text, &v, &err));
    agrees(ctx, isa, name, &(fv_variant_use){ .variant = v }, 1);
    agrees(ctx, isa, both, (fv_variant_use[]){ { .name = "window" }, { .variant = v } }, 2);
    OK(fv_variant_destroy(&v));
    free(text);
}

static void check_examples(fv_ctx *ctx, const char *isa)
{
    struct dirent **list;
    const int n = scandir("examples/variants", &list, is_text, alphasort);
    assert_true(n >= 5);
    for (int i = 0; i < n; i++) {
        check_file(ctx, isa, list[i]->d_name);
        free(list[i]);
    }
    free(list);
}

static void examples(void **state)
{
    (void)state;
    on_each_level(check_examples);
}

/* Every hook, and words that the built-ins do not use, in three texts. */
static void check_hooks(fv_ctx *ctx, const char *isa)
{
    fv_variant *all = NULL, *weights = NULL, *sums = NULL;
    char *every_hook = read_text("tests/variants/every_hook.c"), *instead = read_text("tests/variants/weights.c"),
         *sums_text = read_text("tests/variants/sums.c");
    OK(fv_variant_create(ctx, "all", every_hook, &all, &err));
    OK(fv_variant_create(ctx, "weights", instead, &weights, &err));
    OK(fv_variant_create(ctx, "sums", sums_text, &sums, &err));
    free(sums_text);
    free(every_hook);
    free(instead);
    agrees(ctx, isa, "all", &(fv_variant_use){ .variant = all }, 1);
    agrees(ctx, isa, "causal, all, softcap", (fv_variant_use[]){ { .name = "causal" }, { .variant = all }, { .name = "softcap" } }, 3);
    agrees(ctx, isa, "all, sums", (fv_variant_use[]){ { .variant = all }, { .variant = sums } }, 2);
    agrees(ctx, isa, "weights", &(fv_variant_use){ .variant = weights }, 1);
    agrees(ctx, isa, "alibi, weights, window", (fv_variant_use[]){ { .name = "alibi" }, { .variant = weights }, { .name = "window" } }, 3);
    agrees(ctx, isa, "weights, softcap, alibi", (fv_variant_use[]){ { .variant = weights }, { .name = "softcap" }, { .name = "alibi" } }, 3);
    OK(fv_variant_destroy(&all));
    OK(fv_variant_destroy(&weights));
    OK(fv_variant_destroy(&sums));
}

static void hooks(void **state)
{
    (void)state;
    on_each_level(check_hooks);
}

/* Keys j = 0, 1, .. with the values j: o of rows that all see them all, and lse. */
static void run_rows(fv_ctx *ctx, const fv_variant_use *use, int rows, float *o, float *lse)
{
    enum { KEYS = 100, DIM = 16, MOST = 40 };
    static float q[MOST][DIM], k[KEYS][DIM], v[KEYS][DIM], out[MOST][DIM], lses[MOST];
    for (int j = 0; j < KEYS; j++) v[j][0] = (float)j;
    const fv_problem p = { .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = 1, .dim_qk = DIM, .variants = use, .num_variants = 1 };
    const fv_plan_desc limits = { .max_requests = 1, .max_rows = rows, .max_kv_tokens = KEYS };
    const int32_t row_indptr[] = { 0, rows }, key_indptr[] = { 0, KEYS };
    const fv_batch batch = { .num_requests = 1, .rows = fv_i32(row_indptr, 2), .kv_indptr = fv_i32(key_indptr, 2) };
    const fv_tensor few = { .ndim = 3, .shape = { rows, 1, DIM }, .stride = { DIM, DIM, 1 } }, all = { .ndim = 3, .shape = { KEYS, 1, DIM },
                                                                                                       .stride = { DIM, DIM, 1 } };
    fv_tensors t = { .q = few, .k = all, .v = all, .o = few, .lse = { .data = lses, .ndim = 2, .shape = { rows, 1 }, .stride = { 1, 1 } } };
    t.q.data = q, t.k.data = k, t.v.data = v, t.o.data = out;
    fv_plan *plan = NULL;
    OK(fv_plan_create(ctx, &p, &limits, &plan, &err));
    OK(fv_plan_update(plan, NULL, &batch, NULL, &err));
    OK(fv_run(plan, &t, NULL, &err));
    OK(fv_plan_destroy(&plan));
    *o = out[rows - 1][0];
    *lse = lses[rows - 1];
}

/* docs/numerics.md: how large a score may be, and what becomes of rows whose scores are below. */
static void check_largest_scores(fv_ctx *ctx, const char *isa)
{
    fv_variant *v = NULL;
    fv_arg arg = { .name = "s" };
    const float all[] = { 2.35e38f, -2.35e38f, -1e30f };
    static const char text[] = "FV_META(\"s\")\nFV_PARAMS(FV_NUMBER(s, run, 0, 1))\nFV_SCORE { return v_set(a->s); }\n";
    OK(fv_variant_create(ctx, "constant", text, &v, &err));
    const fv_variant_use use = { .variant = v, .args = &arg, .num_args = 1 };
    float o, lse;
    for (int rows = 1; rows <= 40; rows += 39) {
        for (int i = 0; i < FV__COUNT(all); i++) {
            arg.number = (double)all[i];
            run_rows(ctx, &use, rows, &o, &lse);
            if (!(fabsf(o - 49.5f) < 1e-3f && fabsf(lse - all[i]) < 1e-5f * fabsf(all[i])))
                fail_msg("%s, %d rows, scores of %g: o %g, lse %g", isa, rows, (double)all[i], (double)o, (double)lse);
        }
        arg.number = -3.4e38;
        run_rows(ctx, &use, rows, &o, &lse);
        if (!isnan(o) && (o != 0 || lse != -INFINITY)) fail_msg("%s, %d rows, scores beyond: o %g, lse %g", isa, rows, (double)o, (double)lse);
    }
    OK(fv_variant_destroy(&v));
}

static void largest_scores(void **state)
{
    (void)state;
    on_each_level(check_largest_scores);
}

static bool includes(const char *line)
{
    line += strspn(line, " \t");
    return *line == '#' && !strncmp(line + 1 + strspn(line + 1, " \t"), "include", 7);
}

/* The compiler reads one text: no header, whatever is installed. */
static void sources_stand_alone(void **state)
{
    (void)state;
    fv__variant_meta meta;
    OK(fv__variant_parse("mine", META_ONE, &meta, &err));
    for (int i = -1; i < fv__cpu_isa_count(); i++) {
        char *source = fv__cpu_source(i < 0 ? NULL : fv__cpu_isa_at(i)->name, &meta, META_ONE);
        assert_non_null(source);
        assert_non_null(strstr(source, "#line 1 \"mine\"\nFV_META"));
        for (const char *line = source; line; line = strchr(line, '\n')) {
            line += *line == '\n';
            assert_false(includes(line));
        }
        free(source);
    }
    assert_null(fv__cpu_source("no_level", &meta, META_ONE));
}

/* Levels that this machine lacks: their code is compiled and loaded, not run. */
static void levels_not_here(void **state)
{
    (void)state;
    fv_ctx *ctx = open_level(NULL);
    char *texts[] = { read_text("tests/variants/every_hook.c"), read_text("tests/variants/weights.c"), read_text("examples/variants/streaming.c") };
    for (int i = 0; i < fv__cpu_isa_count(); i++)
        for (int t = 0; t < FV__COUNT(texts) && !fv__cpu_isa_at(i)->available(); t++) {
            fv__variant_meta meta;
            fv__cpu_code code;
            OK(fv__variant_parse("mine", texts[t], &meta, &err));
            OK(fv__cpu_compile(ctx, fv__cpu_isa_at(i)->name, &meta, texts[t], &code, &err));
            assert_non_null(code.hooks);
            fv__cpu_code_close(&code);
        }
    for (int t = 0; t < FV__COUNT(texts); t++) free(texts[t]);
    OK(fv_close(&ctx));
}

/* A bound that promises more than FV_VISIBLE keeps is a fault of the text, and one that these checks find. */
static void wrong_bounds_are_noticed(void **state)
{
    (void)state;
    static const char text[] = "FV_META(\"x\")\nFV_PARAMS(FV_INT(left, run, 9, 9))\nFV_FIRST_KEY(position - left)\nFV_EXACT\n"
                               "FV_VISIBLE { return v_ige(at.k_pos, at.q_pos - (a->left + 1)); }\n";
    fv_ctx *ctx = open_level(NULL);
    fv_variant *v = NULL;
    spec_result r;
    OK(fv_variant_create(ctx, "narrow", text, &v, &err));
    OK(spec_compare(ctx, &(fv_variant_use){ .variant = v }, 1, &spec_shapes[2], &r, &err));
    assert_true(r.share > 1);
    OK(fv_variant_destroy(&v));
    OK(fv_close(&ctx));
}

/* -------------------------------------------------------------------------------------------------------------- faults */

#define SPEC(good, bad) META "#ifdef FV_SPEC\n" bad "#else\n" good "#endif\n"

static const struct {
    int line;
    const char *text, *word;
} faults[] = {
    { 2, META "static v_f32 help(v_f32 s) { return t; }\nFV_SCORE { return help(s); }\n", "t" },
    VARIANT_FAULTS
    { 3, META "FV_PARAMS(FV_SUMS(sums, run))\nFV_KEY_SUM { return p * b; }\n", "b" },
    { 2, META "FV_SCORE { s = s + 1.0f; }\n", "return" },
    { 2, META "#define TWICE(x) (x + y)\nFV_SCORE { return TWICE(s); }\n", "y" }, /* or where it is used */
    { 2, META "FV_SCORE { return \"s\"; }\n", "" },
    { 3, META "\nFV_SCORE { return s * a->gain; }\n", "declares no parameters (FV_PARAMS)" },
    { 4, META "static v_f32 help(v_f32 s)\n{\n    __asm__ volatile(\"bogus_word\");\n    return s;\n}\nFV_SCORE { return help(s); }\n", "bogus_word" },
    { 4, META "FV_PARAMS(FV_NUMBER(gain, run, 1, 1)\n\nFV_NUMBR(b, run, 1, 1))\nFV_SCORE { return s; }\n", "FV_NUMBR" },
    { 2, META "FV_REQUIRE(gain > 0)\nFV_SCORE { return s; }\n", "gain" },
};

static const struct {
    int line;
    const char *text, *word;
} spec_faults[] = {
    { 3, SPEC("FV_SCORE { return s; }\n", "FV_SCORE { return s * tanf(s); }\n"), "tanf" },
    { 4, SPEC("FV_WEIGHT { return s; }\n", "\nFV_WEIGHT { return a->none; }\n"), "" },
    { 3, SPEC("FV_VISIBLE { return v_true(); }\n", "FV_VISIBLE { return at.key > at.cap; }\n"), "cap" },
};

static void said(fv_status s, int i, int line, int or_line, const char *word)
{
    if (s != FV_E_COMPILE || err.status != s || (err.value != line && err.value != or_line) || strcmp(err.field, "mine") || !strstr(err.text, word))
        fail_msg("fault %d: %s, field %s, line %lld (expected %d): %s", i, fv_status_name(s), err.field, (long long)err.value, line, err.text);
}

static void every_fault_has_its_line(void **state)
{
    (void)state;
    fv_ctx *ctx = open_level(NULL);
    for (int i = 0; i < FV__COUNT(faults); i++) {
        fv_variant *v = NULL;
        memset(&err, 0, sizeof err);
        said(fv_variant_create(ctx, "mine", faults[i].text, &v, &err), i, faults[i].line, faults[i].line + (strstr(faults[i].text, "TWICE") != NULL),
             faults[i].word);
        assert_null(v);
    }
    for (int i = 0; i < FV__COUNT(spec_faults); i++) {
        fv_variant *v = NULL;
        OK(fv_variant_create(ctx, "mine", spec_faults[i].text, &v, &err));
        said(spec_compile(ctx, v, &err), i, spec_faults[i].line, spec_faults[i].line, spec_faults[i].word);
        OK(fv_variant_destroy(&v));
    }
    OK(fv_close(&ctx));
}

/* The same lines from clang, where there is one. */
static void lines_of_clang(void **state)
{
    if (system("command -v clang > /dev/null 2>&1")) skip();
    setenv("FV_CC", "clang", 1);
    every_fault_has_its_line(state);
    unsetenv("FV_CC");
}

/* --------------------------------------------------------------------------------------------------- compiler and cache */

static const char gain[] = META "FV_PARAMS(FV_NUMBER(gain, run, 1, 1.5))\nFV_SCORE { return s * a->gain; }\n";

static fv__jit_stats stats_of(fv_ctx *ctx)
{
    fv__jit_stats stats;
    fv__cpu_compile_stats(ctx, &stats);
    return stats;
}

/* Found again: in memory, by another context on disk, under another name not. Arguments compile nothing. */
static void found_again(void **state)
{
    (void)state;
    fv_ctx *ctx = open_level(NULL), *other = open_level(NULL);
    fv_variant *one = NULL, *two = NULL, *three = NULL;
    int64_t begin = fv__os_now_ns();
    OK(fv_variant_create(ctx, "gain_one", gain, &one, &err));
    print_message("  new: %.1f ms", (double)(fv__os_now_ns() - begin) * 1e-6);
    assert_int_equal(stats_of(ctx).compiles, 1);
    assert_int_equal(one->code->origin, FV__JIT_COMPILED);
    OK(fv_variant_create(ctx, "gain_one", gain, &two, &err));
    assert_int_equal(stats_of(ctx).compiles, 1);
    assert_int_equal(stats_of(ctx).memory_hits, 1);
    begin = fv__os_now_ns();
    OK(fv_variant_create(other, "gain_one", gain, &three, &err));
    print_message(", from the folder: %.1f ms\n", (double)(fv__os_now_ns() - begin) * 1e-6);
    assert_int_equal(stats_of(other).compiles, 0);
    assert_int_equal(stats_of(other).disk_hits, 1);

    for (int i = 0; i < 3; i++) {
        const fv_arg arg = { .name = "gain", .number = i + 1 };
        const fv_variant_use use = { .variant = one, .args = &arg, .num_args = 1 };
        const fv_problem p = { .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = 1, .dim_qk = 16, .variants = &use, .num_variants = 1 };
        const fv_plan_desc limits = { .max_requests = 1, .max_rows = 1, .max_kv_tokens = 16, .max_pages = 1 };
        fv_plan *plan = NULL;
        OK(fv_plan_create(ctx, &p, &limits, &plan, &err));
        fv_variant *busy = one;
        assert_int_equal(fv_variant_destroy(&busy), FV_E_BUSY);
        OK(fv_plan_destroy(&plan));
    }
    assert_int_equal(stats_of(ctx).compiles, 1);
    OK(fv_variant_destroy(&one));
    OK(fv_variant_destroy(&two));
    OK(fv_variant_destroy(&three));
    OK(fv_close(&ctx));
    OK(fv_close(&other));
}

/* A level that the text was not compiled for is refused, not run. */
static void other_levels(void **state)
{
    (void)state;
    fv_ctx *ctx = open_level(NULL), *scalar = open_level("scalar");
    if (!strcmp(fv__cpu_isa_choose(NULL, NULL)->name, "scalar")) skip();
    fv_variant *v = NULL;
    OK(fv_variant_create(scalar, "gain", gain, &v, &err));
    const fv_variant_use use = { .variant = v };
    const fv_problem p = { .q = "f32", .k = "f32", .v = "f32", .o = "f32", .num_q_heads = 1, .dim_qk = 16, .variants = &use, .num_variants = 1 };
    const fv_plan_desc limits = { .max_requests = 1, .max_rows = 1, .max_kv_tokens = 16, .max_pages = 1 };
    fv_plan *plan = NULL;
    assert_int_equal(fv_plan_create(ctx, &p, &limits, &plan, &err), FV_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "not compiled for the CPU level"));
    assert_null(plan);
    OK(fv_variant_destroy(&v));
    OK(fv_close(&scalar));
    OK(fv_close(&ctx));
}

static char last_line[512];
static int num_lines;

static void keep_line(void *user, fv_log_level level, const char *line)
{
    (void)user;
    if (level > FV_LOG_WARN) return;
    num_lines++;
    snprintf(last_line, sizeof last_line, "%s", line);
}

static fv_status create_in_memory(const char *text, char *words, size_t size)
{
    fv_ctx *ctx = NULL;
    fv_variant *v = NULL;
    OK(fv_open(&(fv_open_desc){ .num_threads = 1, .cache_dir = "/dev/null/none", .log = keep_line }, &ctx, &err));
    memset(&err, 0, sizeof err);
    const fv_status s = fv_variant_create(ctx, "mine", text, &v, &err);
    snprintf(words, size, "%s", err.text);
    if (s == FV_OK) {
        const fv_status status = fv_variant_destroy(&v);
        assert_int_equal(status, FV_OK);
    }
    assert_null(v);
    OK(fv_close(&ctx));
    return s;
}

static void without_compiler(void **state)
{
    (void)state;
    char words[sizeof err.text], *path = strdup(getenv("PATH"));
    static const struct {
        const char *cc, *path, *word;
    } ways[] = {
        { "/nonexistent", NULL, "FV_CC=/nonexistent is no program" }, { NULL, "/nonexistent", "no cc, gcc or clang: install one" },
        { "cc", "", "FV_CC=cc" },                                     { "/dev/null", NULL, "is no program" },
        { "/bin/false", NULL, "/bin/false failed (1)" },              { "/bin/true", NULL, "made no object" },
        { "sh -c exit", NULL, "made no object" },
    };
    for (int i = 0; i < FV__COUNT(ways); i++) {
        if (ways[i].cc) setenv("FV_CC", ways[i].cc, 1);
        if (ways[i].path) setenv("PATH", ways[i].path, 1);
        const fv_status s = create_in_memory(gain, words, sizeof words);
        unsetenv("FV_CC");
        setenv("PATH", path, 1);
        if (s != FV_E_COMPILE) fail_msg("%d: %s: %s", i, fv_status_name(s), words);
        if (!strstr(words, ways[i].word)) fail_msg("%d: %s", i, words);
    }
    free(path);

    /* what is in a cache needs none, and the built-ins never do */
    fv_ctx *ctx = open_level(NULL);
    fv_variant *v = NULL;
    OK(fv_variant_create(ctx, "kept", gain, &v, &err));
    OK(fv_variant_destroy(&v));
    OK(fv_close(&ctx));
    setenv("FV_CC", "/nonexistent", 1);
    ctx = open_level(NULL);
    OK(fv_variant_create(ctx, "kept", gain, &v, &err));
    OK(fv_variant_destroy(&v));
    OK(fv_close(&ctx));
    unsetenv("FV_CC");
}

/* A folder that cannot be used or trusted costs one line of the log. */
static void hostile_folders(void **state)
{
    (void)state;
    char open_to_all[128], file[128];
    snprintf(open_to_all, sizeof open_to_all, "%s/open", cache_dir);
    snprintf(file, sizeof file, "%s/file", cache_dir);
    assert_int_equal(mkdir(open_to_all, 0777), 0);
    assert_int_equal(chmod(open_to_all, 0777), 0);
    fclose(fopen(file, "w"));
    const char *const folders[] = { open_to_all, file, "/proc/self", "/dev/null/folder" };
    for (int i = 0; i < FV__COUNT(folders); i++) {
        fv_ctx *ctx = NULL;
        fv_variant *v = NULL, *w = NULL;
        num_lines = 0;
        OK(fv_open(&(fv_open_desc){ .num_threads = 1, .cache_dir = folders[i], .log = keep_line }, &ctx, &err));
        OK(fv_variant_create(ctx, "gain", gain, &v, &err));
        OK(fv_variant_create(ctx, "twice", gain, &w, &err));
        if (num_lines != 1 || !strstr(last_line, "compiled in memory"))
            fail_msg("%s: %d lines, the last is \"%s\"", folders[i], num_lines, last_line);
        OK(fv_variant_destroy(&v));
        OK(fv_variant_destroy(&w));
        OK(fv_close(&ctx));
    }
    assert_int_equal(rmdir(open_to_all), 0);            /* nothing was left in it */
}

/* A path that is too long is no folder, either. */
static void longest_folder(void **state)
{
    (void)state;
    static char path[6000];
    memset(path, 'a', sizeof path - 1);
    path[0] = '/';
    fv_ctx *ctx = NULL;
    fv_variant *v = NULL;
    num_lines = 0;
    setenv("FV_CACHE_DIR", path, 1);
    OK(fv_open(&(fv_open_desc){ .num_threads = 1, .log = keep_line }, &ctx, &err));
    OK(fv_variant_create(ctx, "gain", gain, &v, &err));
    unsetenv("FV_CACHE_DIR");
    if (num_lines != 1 || !strstr(last_line, "the path of its folder is too long; kernels are compiled in memory"))
        fail_msg("%d lines, the last is \"%s\"", num_lines, last_line);
    OK(fv_variant_destroy(&v));
    OK(fv_close(&ctx));
}

/* What forbids to compile names what would help: for the CPU a folder, never a bundle. */
static void forbidden(void **state)
{
    (void)state;
    char words[sizeof err.text];
    setenv("FV_DISABLE_JIT", "1", 1);
    assert_int_equal(create_in_memory(gain, words, sizeof words), FV_E_NOT_READY);
    unsetenv("FV_DISABLE_JIT");
    if (strstr(words, "bundle") || !strstr(words, "the cache folder of a machine that has compiled it can stand in")) fail_msg("%s", words);
}

/* Without descriptors that is the reason, whatever the call says that met it first. */
static void no_descriptors(void **state)
{
    (void)state;
    char words[sizeof err.text];
    struct rlimit before, few;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = 5;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    const fv_status s = create_in_memory(gain, words, sizeof words);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(s, FV_E_IO);
    if (!strstr(words, "Too many open files")) fail_msg("%s", words);
}

static int num_descriptors(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder)) n++;
    closedir(folder);
    return n;
}

/* Descriptors, children and signals of the host stay as they were. */
static void leaves_nothing(void **state)
{
    (void)state;
    char words[sizeof err.text];
    sigset_t before, after;
    const int n = num_descriptors();
    signal(SIGCHLD, SIG_IGN);                           /* then nobody can wait for a child */
    sigemptyset(&before);
    sigaddset(&before, SIGTERM);
    sigprocmask(SIG_SETMASK, &before, NULL);
    assert_int_equal(create_in_memory(gain, words, sizeof words), FV_OK);
    assert_int_equal(create_in_memory(META "FV_SCORE { return t; }\n", words, sizeof words), FV_E_COMPILE);
    if (!strstr(words, "mine, line 2: ")) fail_msg("%s", words);
    sigprocmask(SIG_SETMASK, NULL, &after);
    assert_true(sigismember(&after, SIGTERM) && !sigismember(&after, SIGINT));
    sigemptyset(&before);
    sigprocmask(SIG_SETMASK, &before, NULL);
    signal(SIGCHLD, SIG_DFL);
    assert_int_equal(create_in_memory(gain, words, sizeof words), FV_OK);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(num_descriptors(), n);
}

/* In place of a compiler: a shell script of the cache folder, which finds in $out the path of a file to write to. cc: what FV_CC calls it by. */
static void write_compiler(const char *name, const char *text, char out[160], char cc[160])
{
    char script[128];
    snprintf(script, sizeof script, "%s/%s", cache_dir, name);
    snprintf(out, 160, "%s/%s_out", cache_dir, name);
    snprintf(cc, 160, "sh %s", script);
    FILE *f = fopen(script, "w");
    fprintf(f, "out='%s'\n%s", out, text);
    fclose(f);
}

/* A compiler that does not come to an end is ended, with all that it started; nobody leaves anything in the temporary directory. */
static void ends(void **state)
{
    (void)state;
    char words[sizeof err.text], tmp[128], pid_file[160], cc[160], command[300];
    write_compiler("slow", "sleep 600 & echo $! > $out; wait\n", pid_file, cc);
    snprintf(tmp, sizeof tmp, "%s/tmp", cache_dir);
    assert_int_equal(mkdir(tmp, 0700), 0);
    char *before = getenv("TMPDIR") ? strdup(getenv("TMPDIR")) : NULL;
    setenv("TMPDIR", tmp, 1);
    setenv("FV_CC", cc, 1);
    fv__cc_seconds = 2;
    assert_int_equal(create_in_memory(gain, words, sizeof words), FV_E_COMPILE);
    fv__cc_seconds = 60;
    unsetenv("FV_CC");
    if (!strstr(words, "took longer than 2 s")) fail_msg("%s", words);
    snprintf(command, sizeof command, "for i in 1 2 3 4 5; do grep -q ') [^ZX]' /proc/$(cat %s)/stat 2>/dev/null || exit 0; sleep 0.2; done; exit 1",
             pid_file);
    assert_int_equal(system(command), 0);
    assert_int_equal(create_in_memory(gain, words, sizeof words), FV_OK);
    assert_int_equal(create_in_memory(META "FV_SCORE { return t; }\n", words, sizeof words), FV_E_COMPILE);
    if (before) setenv("TMPDIR", before, 1);
    else unsetenv("TMPDIR");
    free(before);
    assert_int_equal(rmdir(tmp), 0);
}

/* A linker that says all is well and leaves half of a library: that is refused, not mapped. */
static void cut_off(void **state)
{
    (void)state;
    char words[sizeof err.text], linker[160], cc[160];
    write_compiler("linked", "case \"$*\" in *-print-prog-name=ld*) echo $out ;; *) exec cc \"$@\" ;; esac\n", linker, cc);
    for (int bytes = 200; bytes < 10000; bytes *= 3) {
        FILE *f = fopen(linker, "w");
        fprintf(f, "#!/bin/sh\nld \"$@\" && truncate -s %d /proc/self/fd/4\n", bytes);
        fclose(f);
        assert_int_equal(chmod(linker, 0700), 0);
        setenv("FV_CC", cc, 1);
        assert_int_equal(create_in_memory(gain, words, sizeof words), FV_E_COMPILE);
        unsetenv("FV_CC");
        if (!strstr(words, "its linker's library is cut off")) fail_msg("%d bytes: %s", bytes, words);
    }
}

static bool is_running(const char *pid_file)
{
    char command[300];
    snprintf(command, sizeof command, "grep -q ') [^ZX]' /proc/$(cat %s)/stat 2>/dev/null", pid_file);
    return system(command) == 0;
}

static bool becomes(bool running, const char *pid_file)
{
    for (int i = 0; i < 500 && is_running(pid_file) != running; i++) usleep(20000);
    return is_running(pid_file) == running;
}

/* Ctrl-C in a terminal: a signal to the process group. What compiles ends with its host. */
static void ends_with_its_host(void **state)
{
    (void)state;
    char pid_file[160], cc[160], words[sizeof err.text];
    write_compiler("stuck", "echo $$ > $out\nexec sleep 50\n", pid_file, cc);
    const pid_t host = fork();
    if (!host) {
        signal(SIGINT, SIG_DFL);
        setpgid(0, 0);
        setenv("FV_CC", cc, 1);
        create_in_memory(gain, words, sizeof words);
        _exit(0);
    }
    assert_true(becomes(true, pid_file));
    assert_int_equal(kill(-host, SIGINT), 0);
    int status = 0;
    assert_int_equal(waitpid(host, &status, 0), host);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
    assert_true(becomes(false, pid_file));
}

/* A killed host cannot end its compiler; that may use no more processor time than a compilation may last. */
static void is_limited(void **state)
{
    (void)state;
    char limit[160], cc[160], words[sizeof err.text];
    int seconds = 0;
    write_compiler("limited", "while [ $(ulimit -t) = unlimited ]; do sleep 0.01; done\nulimit -t > $out\nexit 1\n", limit, cc);
    setenv("FV_CC", cc, 1);
    fv__cc_seconds = 20;
    assert_int_equal(create_in_memory(gain, words, sizeof words), FV_E_COMPILE);
    fv__cc_seconds = 60;
    unsetenv("FV_CC");
    FILE *f = fopen(limit, "r");
    if (!f) fail_msg("%s", words);
    assert_int_equal(fscanf(f, "%d", &seconds), 1);
    fclose(f);
    assert_in_range(seconds, 1, 20);
}

/* Every allocation of the library's own may fail. */
static void out_of_memory(void **state)
{
    (void)state;
    fv_ctx *ctx = open_level(NULL);
    fv_variant *v = NULL;
    long n = 1;
    for (;; n++) {
        fv__os_fail_at = n;
        const fv_status s = fv_variant_create(ctx, "gain", gain, &v, &err);
        fv__os_fail_at = 0;
        if (s == FV_OK) break;
        assert_int_equal(s, FV_E_NO_MEMORY);
        assert_null(v);
    }
    assert_true(n > 1);
    OK(fv_variant_destroy(&v));
    OK(fv_close(&ctx));
}

/* Threads that create the same text at once: it is compiled once. */
static void *create_one(void *arg)
{
    fv_ctx *ctx = arg;
    fv_variant *v = NULL;
    fv_error own;
    if (fv_variant_create(ctx, "together", gain, &v, &own) != FV_OK) return NULL;
    return v;
}

static void many_threads(void **state)
{
    (void)state;
    fv_ctx *ctx = open_level(NULL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, create_one, ctx), 0);
    for (int i = 0; i < 4; i++) {
        void *made = NULL;
        pthread_join(threads[i], &made);
        fv_variant *v = made;
        assert_non_null(v);
        OK(fv_variant_destroy(&v));
    }
    assert_int_equal(stats_of(ctx).compiles, 1);
    OK(fv_close(&ctx));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(built_ins),
        cmocka_unit_test(examples),
        cmocka_unit_test(hooks),
        cmocka_unit_test(largest_scores),
        cmocka_unit_test(sources_stand_alone),
        cmocka_unit_test(levels_not_here),
        cmocka_unit_test(wrong_bounds_are_noticed),
        cmocka_unit_test(every_fault_has_its_line),
        cmocka_unit_test(lines_of_clang),
        cmocka_unit_test(found_again),
        cmocka_unit_test(other_levels),
        cmocka_unit_test(without_compiler),
        cmocka_unit_test(hostile_folders), cmocka_unit_test(longest_folder), cmocka_unit_test(forbidden), cmocka_unit_test(no_descriptors),
        cmocka_unit_test(leaves_nothing),
        cmocka_unit_test(cut_off), cmocka_unit_test(ends), cmocka_unit_test(ends_with_its_host), cmocka_unit_test(is_limited),
        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(many_threads),
    };
    if (!mkdtemp(cache_dir)) return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", cache_dir);
    return system(command) || failed;
}
