/* SPDX-License-Identifier: Apache-2.0 */
/* variant.c -- the built-in variants: the texts of src/variants/, which the build embeds, parsed
 * once when they are first asked for; and those that users make from texts of the same form. */
#include "variant.h"
#include "cpu/compile.h"
#include "cpu/cpu.h"
#include "ctx.h"
#include "cuda/texts.h"

#include <pthread.h>
#include <string.h>

#include "variant_texts.inc"

enum {
#define FV_VARIANT(name) BUILTIN_##name,
#include "variants.inc"
#undef FV_VARIANT
    NUM_BUILTINS
};

static fv_variant builtins[NUM_BUILTINS + 1] = {
#define FV_VARIANT(id) { .meta = { .name = #id }, .text = fv__text_##id, .builtin = BUILTIN_##id },
#include "variants.inc"
#undef FV_VARIANT
};

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A text that the parser refuses leaves a variant without parameters and hooks; test_variant parses
 * them all. */
static void parse_builtins(void)
{
    for (int i = 0; i < NUM_BUILTINS; i++) {
        fv__variant_meta meta;
        if (fv__variant_parse(builtins[i].meta.name, builtins[i].text, &meta, NULL) == FV_OK)
            builtins[i].meta = meta;
    }
}

int fv__variant_count(void)
{
    return NUM_BUILTINS;
}

const fv_variant *fv__variant_builtin(int i)
{
    pthread_once(&once, parse_builtins);
    return &builtins[i];
}

const fv_variant *fv__variant_find(const char *name)
{
    for (int i = 0; name && i < NUM_BUILTINS; i++)
        if (!strcmp(name, builtins[i].meta.name)) return fv__variant_builtin(i);
    return NULL;
}

const fv__cpu_hooks *fv__variant_hooks(const fv_variant *v, const char *isa)
{
    if (v->builtin < 0) return v->code && !strcmp(v->ctx->isa->name, isa) ? v->code->hooks : NULL;
    for (int level = 0; level < fv__cpu_isa_count(); level++) {
        const fv__cpu_isa *at = fv__cpu_isa_at(level);
        if (!strcmp(at->name, isa)) return &at->hooks[v->builtin];
    }
    return NULL;
}

/* ------------------------------------------------------------------------------ users' variants */

/* One block: the variant, its code, its text. */
typedef struct made {
    fv_variant variant;
    fv__cpu_code code;
    char text[];
} made;

static size_t bytes_of(const char *text)
{
    return sizeof(made) + strlen(text) + 1;
}

/* Here, not when a plan is created: a fault of the text is told to whoever wrote it. */
static fv_status compile(fv_ctx *ctx, made *m, fv_error *err)
{
    if (ctx->cuda) return fv__cuda_check_variant(ctx, &m->variant, err);
    FV_TRY(fv__cpu_compile(ctx, ctx->isa->name, &m->variant.meta, m->text, &m->code, err));
    m->variant.code = &m->code;
    return FV_OK;
}

/* Without FV_PARAMS `a` is a struct that nobody has declared, which compilers say in their words. */
static void name_missing_params(const fv__variant_meta *meta, fv_error *err)
{
    if (!err || meta->num_params || !err->value || !strstr(err->text, "fv_args_")) return;
    fv__fail(err, FV_E_COMPILE, meta->name, err->value, 0,
             "%s, line %lld: 'a' has no members: the text declares no parameters (FV_PARAMS)",
             meta->name, (long long)err->value);
}

fv_status fv_variant_create(fv_ctx *ctx, const char *name, const char *text, fv_variant **variant,
                            fv_error *err)
{
    if (!ctx) return fv__fail(err, FV_E_INVALID, "ctx", 0, 0, "ctx is NULL");
    if (!variant)
        return fv__fail(err, FV_E_INVALID, "variant", 0, 0,
                        "variant is NULL: there is no place for the result");
    fv__variant_meta meta;
    FV_TRY(fv__variant_parse(name, text, &meta, err));
    if (fv__variant_find(name))
        return fv__fail(err, FV_E_INVALID, "name", 0, 0,
                        "\"%s\" is the name of a built-in variant; choose another", name);
    made *m = fv__ctx_alloc(ctx, bytes_of(text));
    if (!m)
        return fv__fail(err, FV_E_NO_MEMORY, "text", (int64_t)bytes_of(text), 0,
                        "no memory for variant %s", name);
    memset(m, 0, sizeof *m);
    memcpy(m->text, text, strlen(text) + 1);
    m->variant = (fv_variant){ .meta = meta, .text = m->text, .builtin = -1, .ctx = ctx };
    const fv_status status = compile(ctx, m, err);
    if (status != FV_OK) {
        if (status == FV_E_COMPILE) name_missing_params(&meta, err);
        fv__ctx_free(ctx, m, bytes_of(text));
        return status;
    }
    __atomic_add_fetch(&ctx->users, 1, __ATOMIC_SEQ_CST);
    *variant = &m->variant;
    return FV_OK;
}

fv_status fv_variant_destroy(fv_variant **variant)
{
    if (!variant || !*variant) return FV_OK;
    fv_variant *old = *variant;
    fv_ctx *ctx = old->ctx;
    if (!ctx) return FV_E_INVALID;                      /* a built-in is nobody's to destroy */
    if (__atomic_load_n(&old->users, __ATOMIC_SEQ_CST)) return FV_E_BUSY;
    if (old->code) fv__cpu_code_close(old->code);
    fv__ctx_free(ctx, old, bytes_of(old->text));
    __atomic_sub_fetch(&ctx->users, 1, __ATOMIC_SEQ_CST);
    *variant = NULL;
    return FV_OK;
}
