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
#include "os.h"
#include "spec.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

/* Every hook, and words that the built-ins do not use, in two texts. */
static const char every_hook[] =
    "FV_META(\"all that softmax leaves room for\")\n"
    "FV_PARAMS(\n"
    "    FV_INT(turned, problem, 32, 32)\n"
    "    FV_INT(interleaved, problem, 1, 1)\n"
    "    FV_NUMBER(gain, batch, 1, 1.25)\n"
    "    FV_FLOATS(of_head, run, heads, required)\n"
    "    FV_FLOATS(of_request, batch, requests, required)\n"
    "    FV_INTS(of_row, batch, rows, required)\n"
    "    FV_INTS(of_key, run, any, none)\n"
    "    FV_SUMS(key_sums, run)\n"
    ")\n"
    "FV_PAIRS(turned, interleaved)\n"
    "#define HALF 0.5f\n"
    "#define n 3\n"
    "static v_f32 help(v_f32 x) { return v_abs(x) * HALF + n; }\n"
    "FV_QUERY { const v_pair y = { v_add(x.lo, x.hi), v_sub(x.hi, x.lo) }; return y; }\n"
    "FV_KEY { const v_pair y = { v_neg(x.hi), v_mul(x.lo, v_cos(v_float(at.index))) }; return y; }\n"
    "FV_SCORE { return v_fma(s, v_set(a->gain), v_read(a->of_request, at.request) + help(v_read(a->of_head, at.head))); }\n"
    "FV_VISIBLE { return v_ine(v_iand(at.key, v_seti(3)), v_iand(v_readi(a->of_row, at.batch_row), v_seti(3))); }\n"
    "FV_SINK { return v_read(a->of_head, at.head) - v_float(at.row) * 0.125f; }\n"
    "FV_VALUE { return v * (v_set(1.0f) + v_float(v_readi(a->of_key, at.key)) * 0.0625f) + v_float(at.index) * 0.001f; }\n"
    "FV_OUTPUT { return v_select(v_lt(lse, v_set(2.0f)), o, o * v_sqrt(v_abs(lse))); }\n"
    "FV_KEY_SUM { return p * v_max(v_float(at.q_pos - at.k_pos), v_set(0.5f)); }\n";

static const char weights_and_output[] =
    "FV_META(\"weights add\")\n"
    "FV_PARAMS(FV_NUMBER(limit, run, 1, 0.75))\n"
    "FV_WEIGHT { return v_min(v_max(s, v_set(0.0f)), v_set(a->limit)); }\n"
    "FV_OUTPUT { return o * 2.0f + lse; }\n";

static void check_hooks(fv_ctx *ctx, const char *isa)
{
    fv_variant *all = NULL, *weights = NULL;
    OK(fv_variant_create(ctx, "all", every_hook, &all, &err));
    OK(fv_variant_create(ctx, "weights", weights_and_output, &weights, &err));
    agrees(ctx, isa, "all", &(fv_variant_use){ .variant = all }, 1);
    agrees(ctx, isa, "causal, all, softcap", (fv_variant_use[]){ { .name = "causal" }, { .variant = all }, { .name = "softcap" } }, 3);
    agrees(ctx, isa, "weights", &(fv_variant_use){ .variant = weights }, 1);
    agrees(ctx, isa, "alibi, weights, window", (fv_variant_use[]){ { .name = "alibi" }, { .variant = weights }, { .name = "window" } }, 3);
    OK(fv_variant_destroy(&all));
    OK(fv_variant_destroy(&weights));
}

static void hooks(void **state)
{
    (void)state;
    on_each_level(check_hooks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(built_ins), cmocka_unit_test(examples), cmocka_unit_test(hooks),
    };
    if (!mkdtemp(cache_dir)) return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", cache_dir);
    return system(command) || failed;
}
