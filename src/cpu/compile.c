/* SPDX-License-Identifier: Apache-2.0 */
/* compile.c -- composes the source (see compile.h):
 *
 *     integer names; FV_HAS_* for each hook
 *     the level's file, vocabulary.h, hooks_abi.h, hooks_open.h           or, for the definition: FV_SPEC, spec_abi.h, spec_open.h
 *     #line 1 "NAME"    the user's text    #line 1 "foveal"               so that complaints name the user's lines
 *     #undef of what the text defines
 *     hooks_close.h                                                       or spec_close.h
 *
 * One text without a single include: the compiler opens no header, whatever is installed. */
#include "compile.h"

#include "../jit/jit_cc.h"
#include "cpu.h"

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_texts.inc"

static const fv__jit_text texts[] = {
#include "cpu_table.inc"
};

enum { MAX_FLAGS = 24, FLAGS_CHARS = 512 };

/* What all levels have; CMakeLists.txt says why no multiply-add is made that the source does not ask for. A call of nothing that is declared, a hook
 * that returns nothing and the like are faults, not warnings. */
static const char *const common_flags[] = {
    "-std=gnu11", "-O2", "-fPIC", "-nostdinc", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector", "-Werror=implicit-function-declaration", "-Werror=implicit-int", "-Werror=int-conversion", "-Werror=return-type",
    "-Werror=incompatible-pointer-types",
};

static const char integer_names[] =
    "typedef __INT8_TYPE__ int8_t; typedef __UINT8_TYPE__ uint8_t; typedef __INT16_TYPE__ int16_t; typedef __UINT16_TYPE__ uint16_t;\n"
    "typedef __INT32_TYPE__ int32_t; typedef __UINT32_TYPE__ uint32_t; typedef __INT64_TYPE__ int64_t; typedef __UINT64_TYPE__ uint64_t;\n"
    "#define bool _Bool\n#define true 1\n#define false 0\n";

static const char *const hook_names[FV__NUM_HOOKS] = { "SCORE", "VISIBLE", "SINK", "QUERY", "KEY", "VALUE", "OUTPUT", "WEIGHT", "KEY_SUM",
                                                         "ROW_MAX" };

/* ------------------------------------------------------------------------------------------------------------- writing */

typedef struct writer {
    char *text;
    size_t size, room;
    bool failed;
} writer;

static void put(writer *w, const char *text, size_t n)
{
    if (w->failed) return;
    if (w->size + n + 1 > w->room) {
        const size_t room = 2 * w->room + n + 1;
        char *grown = realloc(w->text, room);
        w->failed = !grown;
        if (!grown) return;
        w->text = grown;
        w->room = room;
    }
    memcpy(w->text + w->size, text, n);
    w->size += n;
    w->text[w->size] = 0;
}

static void put_line(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put_line(writer *w, const char *format, ...)
{
    char line[160];
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(line, sizeof line, format, list);
    va_end(list);
    put(w, line, (size_t)fv__min32(n, (int)sizeof line - 1));
    put(w, "\n", 1);
}

static const char *find_text(const char *name)
{
    for (int i = 0; i < FV__COUNT(texts); i++)
        if (!strcmp(texts[i].name, name)) return texts[i].text;
    return NULL;
}

/* Is the line an #include? *text: of the file, where it is one of ours. */
static bool is_include(const char *line, const char **text)
{
    char name[64];
    *text = NULL;
    line += strspn(line, " \t");
    if (*line != '#' || strncmp(line + 1 + strspn(line + 1, " \t"), "include", 7)) return false;
    const char *quote = line + strcspn(line, "\"\n");
    if (*quote != '"') return true;
    const size_t n = strcspn(quote + 1, "\"\n");
    if (n >= sizeof name) return true;
    memcpy(name, quote + 1, n);
    name[n] = 0;
    const char *slash = strrchr(name, '/');
    *text = find_text(slash ? slash + 1 : name);
    return true;
}

/* One of our texts. Files of ours that it includes come in their place, with guards of their own; others give integer names, which are there. */
static void put_text(writer *w, const char *at)
{
    while (at && *at) {
        const size_t n = strcspn(at, "\n");
        const char *included;
        if (!is_include(at, &included)) put(w, at, n);
        else put_text(w, included);
        put(w, "\n", 1);
        at += n + (at[n] == '\n');
    }
}

static void put_ours(writer *w, const char *name)
{
    const char *text = find_text(name);
    w->failed |= !text;
    put_text(w, text);
}

static void put_level(writer *w, const char *isa)
{
    char file[40];
    snprintf(file, sizeof file, "%s.h", isa);
    put_line(w, "#define FV_ISA_NAME %s", isa);
    put_ours(w, file);
    put_ours(w, "vocabulary.h");
    put_ours(w, "hooks_abi.h");
    put_line(w, "#define FV_VARIANT_NAME user");
    put_ours(w, "hooks_open.h");
}

static void put_users(writer *w, const char *name, const char *text)
{
    char defined[64];
    put_line(w, "#line 1 \"%s\"", name);
    put(w, text, strlen(text));
    put_line(w, "\n#line 1 \"foveal\"");
    for (const char *at = text; fv__variant_next_define(&at, defined); ) put_line(w, "#undef %s", defined);
}

char *fv__cpu_source(const char *isa, const fv__variant_meta *meta, const char *text)
{
    writer w = { 0 };
    put_line(&w, "#line 1 \"foveal\"");
    put(&w, integer_names, sizeof integer_names - 1);
    for (int i = 0; i < FV__NUM_HOOKS; i++)
        if (meta->hooks >> i & 1) put_line(&w, "#define FV_HAS_%s", hook_names[i]);
    put_line(&w, "#define FV_VARIANT_EXPORT fv__variant_hooks");
    if (isa) {
        put_level(&w, isa);
    } else {
        put_line(&w, "#define FV_SPEC");
        put_ours(&w, "spec_abi.h");
        put_ours(&w, "spec_open.h");
    }
    put_users(&w, meta->name, text);
    put_ours(&w, isa ? "hooks_close.h" : "spec_close.h");
    if (!w.failed) return w.text;
    free(w.text);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------ compiling */

/* The words of the level's flags, those that its built-in variants were compiled with. */
static int level_flags(const char *isa, char words[FLAGS_CHARS], const char *flags[MAX_FLAGS])
{
    static const struct {
        const char *level, *flags;
    } levels[] = {
#include "isa_flags.inc"
    };
    int n = 0;
    *words = 0;
    for (int i = 0; i < FV__COUNT(levels); i++)
        if (!strcmp(levels[i].level, isa)) snprintf(words, FLAGS_CHARS, "%s", levels[i].flags);
    for (char *rest = words, *word; n < MAX_FLAGS && (word = strsep(&rest, " ")); )
        if (*word) flags[n++] = word;
    return n;
}

/* The context's cache, made when it is first needed. Two threads may make one each; one of them is kept. */
static fv_status open_cache(fv_ctx *ctx, fv__jit_cache **out, fv_error *err)
{
    fv__jit_cache *made = NULL, *none = NULL;
    *out = __atomic_load_n(&ctx->cpu_cache, __ATOMIC_ACQUIRE);
    if (*out) return FV_OK;
    const fv__jit_cache_desc desc = { .dir = ctx->cache_dir[0] ? ctx->cache_dir : NULL, .disable_jit = -1, .log = &ctx->log };
    FV_TRY(fv__jit_cache_open(&desc, &made, err));
    if (__atomic_compare_exchange_n(&ctx->cpu_cache, &none, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        *out = made;
        return FV_OK;
    }
    fv__jit_cache_close(&made);
    *out = none;
    return FV_OK;
}

/* Found in the cache, or compiled where there is a compiler. */
static fv_status find_blob(fv_ctx *ctx, fv__jit_request *r, const fv__jit_blob **blob, fv_error *err)
{
    fv__jit_cache *cache;
    fv_error none = { 0 };
    fv__cc cc;
    FV_TRY(open_cache(ctx, &cache, err));
    const bool found = fv__cc_find(&cc, &none) == FV_OK;
    r->compiler = found ? cc.name : NULL;
    const fv_status s = fv__jit_cache_get(cache, r, found ? fv__cc_compile : NULL, &cc, blob, err);
    if (s != FV_E_NOT_READY || found) return s;
    if (err) *err = none;               /* it is nowhere, and this is why it cannot be made */
    return none.status;
}

static fv_status load(const fv__jit_blob *blob, fv__cpu_code *out, const void **table, fv_error *err)
{
    const fv_status s = fv__jit_library_open(blob, &out->library, err);
    if (s != FV_OK) return s;
    out->origin = blob->origin;
    out->build_ms = blob->build_ms;
    *table = dlsym(out->library.handle, "fv__variant_hooks");
    if (*table) return FV_OK;
    fv__cpu_code_close(out);
    return fv__fail(err, FV_E_COMPILE, "text", 0, 0, "%s was compiled, but has no table of hooks", blob->name);
}

/* arch: of the entry; isa NULL: the definition. */
static fv_status compile(fv_ctx *ctx, const char *arch, const char *isa, const fv__variant_meta *meta, const char *text, fv__cpu_code *out,
                         const void **table, fv_error *err)
{
    char name[64], words[FLAGS_CHARS];
    const char *flags[FV__COUNT(common_flags) + MAX_FLAGS];
    const fv__jit_blob *blob = NULL;
    int n = FV__COUNT(common_flags);
    memset(out, 0, sizeof *out);
    out->library.fd = -1;
    memcpy(flags, common_flags, sizeof common_flags);
    if (isa) n += level_flags(isa, words, flags + n);
    char *source = fv__cpu_source(isa, meta, text);
    if (!source) return fv__fail(err, FV_E_NO_MEMORY, "text", (int64_t)strlen(text), 0, "no memory to compile variant %s", meta->name);
    snprintf(name, sizeof name, "variant %s", meta->name);
    const fv__jit_text user = { meta->name, source };
    fv__jit_request r = { .kind = "so", .name = name, .arch = arch, .texts = &user, .num_texts = 1, .options = flags, .num_options = n };
    fv_status s = find_blob(ctx, &r, &blob, err);
    if (s == FV_OK) s = load(blob, out, table, err);
    free(source);
    if (s == FV_OK && out->origin == FV__JIT_COMPILED)
        fv__log_line(&ctx->log, FV_LOG_DEBUG, "%s for %s took %.0f ms to compile", name, arch, out->build_ms);
    return s;
}

fv_status fv__cpu_compile(fv_ctx *ctx, const char *isa, const fv__variant_meta *meta, const char *text, fv__cpu_code *out, fv_error *err)
{
    char arch[32];
    const void *table = NULL;
    snprintf(arch, sizeof arch, "%s-%.12s",
#if defined __x86_64__
             "x86-64",
#elif defined __aarch64__
             "aarch64",
#else
             "cpu",
#endif
             isa);
    FV_TRY(compile(ctx, arch, isa, meta, text, out, &table, err));
    out->hooks = table;
    return FV_OK;
}

static const fv__spec_math functions = {
#define FV__NAME(name) .name##_ = name,
    FV__MATH_OF_ONE(FV__NAME)
    FV__MATH_OF_TWO(FV__NAME)
#undef FV__NAME
};

fv_status fv__spec_compile(fv_ctx *ctx, const fv__variant_meta *meta, const char *text, fv__cpu_code *out, fv_error *err)
{
    const void *table = NULL;
#if defined __aarch64__
    static const char arch[] = "aarch64-spec";
#else
    static const char arch[] = "x86-64-spec";
#endif
    FV_TRY(compile(ctx, arch, NULL, meta, text, out, &table, err));
    const fv__spec_math **math = dlsym(out->library.handle, "fv__math");
    if (math) *math = &functions;
    out->spec = table;
    return FV_OK;
}

void fv__cpu_code_close(fv__cpu_code *code)
{
    if (code->library.handle) fv__jit_library_close(&code->library);
    memset(code, 0, sizeof *code);
    code->library.fd = -1;
}

void fv__cpu_compile_stats(fv_ctx *ctx, fv__jit_stats *stats)
{
    fv__jit_cache *cache = __atomic_load_n(&ctx->cpu_cache, __ATOMIC_ACQUIRE);
    memset(stats, 0, sizeof *stats);
    if (cache) fv__jit_cache_stats(cache, stats);
}
