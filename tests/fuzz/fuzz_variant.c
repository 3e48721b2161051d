/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_variant.c -- any bytes as a variant's text: nothing but a status comes back, with a line of the text where it is a fault of the text. What
 * parses is compiled too, both halves, and loaded, but no hook is called: a text that compiles may do what it likes. */
#include "cpu/compile.h"
#include "os.h"
#include "variant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void silent(void *user, fv_log_level level, const char *line)
{
    (void)user, (void)level, (void)line;
}

static void require(bool condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "fuzz_variant: %s\n", what);
    abort();
}

static fv_ctx *open_context(void)
{
    fv_ctx *ctx = NULL;
    fv_error err;
    const fv_open_desc desc = { .device = "cpu", .num_threads = 1, .cache_dir = "/dev/null/none", .log = silent };
    require(fv_open(&desc, &ctx, &err) == FV_OK, err.text);
    return ctx;
}

/* The status of a call about a text of so many lines. */
static void check(fv_status s, const fv_error *err, int64_t lines)
{
    if (s == FV_OK) return;
    require(s == FV_E_COMPILE || s == FV_E_INVALID, "a status that no text should lead to");
    require(err->status == s && err->text[0] && memchr(err->text, 0, sizeof err->text), "an error without words");
    require(s != FV_E_COMPILE || (err->value >= 0 && err->value <= lines), "a line that the text does not have");
}

static void check_declared(const fv__variant_meta *m)
{
    require(m->num_params >= 0 && m->num_params <= FV__MAX_PARAMS && m->args_bytes <= 256 && m->hooks && m->formula[0], "declarations out of range");
    for (int i = 0; i < m->num_params; i++)
        require(m->params[i].name[0] && m->params[i].offset + 16 <= m->args_bytes && m->params[i].offset % 16 == 0, "a parameter out of range");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fv_ctx *ctx;
    static int uses;
    char *text = malloc(size + 1);
    fv__variant_meta meta;
    fv_error err = { 0 };
    int64_t lines = 1;
    if (!text) return 0;
    memcpy(text, data, size);
    text[size] = 0;
    for (const char *c = text; *c; c++) lines += *c == '\n';
    if (!ctx || ++uses % 256 == 0) {                    /* what was compiled stays in the context */
        fv_close(&ctx);
        ctx = open_context();
    }
    fv_status s = fv__variant_parse("fuzzed", text, &meta, &err);
    check(s, &err, lines);
    if (s == FV_OK) {
        fv_variant *v = NULL;
        fv__cpu_code code = { 0 };
        check_declared(&meta);
        s = fv_variant_create(ctx, "fuzzed", text, &v, &err);
        check(s, &err, lines);
        require((s == FV_OK) == (v != NULL), "a handle without success, or none with it");
        check(fv__spec_compile(ctx, &meta, text, &code, &err), &err, lines);
        fv__cpu_code_close(&code);
        fv_variant_destroy(&v);
    }
    free(text);
    return 0;
}
