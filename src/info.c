/* SPDX-License-Identifier: Apache-2.0 */
/* info.c -- fv_info: the library says what it is. One walk over the registries fills a writer; three writers know text, markdown and JSON.
 * docs/info.md holds the markdown form and a test compares them, so nothing here may depend on the machine but the sections "machine" and "cpu
 * levels", which it leaves out. */
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "engine.h"
#include "os.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef enum info_format { AS_TEXT, AS_MARKDOWN, AS_JSON } info_format;

typedef struct writer {
    info_format format;
    char *at;
    size_t size, used;                  /* used counts what did not fit, too */
    bool first_section, first_row;
} writer;

static void put(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(writer *w, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const size_t left = w->used < w->size ? w->size - w->used : 0;
    const int n = vsnprintf(left ? w->at + w->used : NULL, left, format, list);
    va_end(list);
    if (n > 0) w->used += (size_t)n;
}

static void put_json_string(writer *w, const char *s)
{
    put(w, "\"");
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') put(w, "\\%c", *s);
        else if ((unsigned char)*s < 0x20) put(w, "\\u%04x", *s);
        else put(w, "%c", *s);
    }
    put(w, "\"");
}

static void begin_section(writer *w, const char *name, const char *const *columns, int num_columns)
{
    w->first_row = true;
    switch (w->format) {
    case AS_TEXT:
        put(w, "%s%s\n", w->first_section ? "" : "\n", name);
        break;
    case AS_MARKDOWN:
        put(w, "%s## %s\n\n|", w->first_section ? "" : "\n", name);
        for (int i = 0; i < num_columns; i++) put(w, " %s |", columns[i]);
        put(w, "\n|");
        for (int i = 0; i < num_columns; i++) put(w, " --- |");
        put(w, "\n");
        break;
    case AS_JSON:
        put(w, "%s", w->first_section ? "" : ",");
        put_json_string(w, name);
        put(w, ":[");
        break;
    }
    w->first_section = false;
}

static void end_section(writer *w)
{
    if (w->format == AS_JSON) put(w, "]");
}

static void put_row(writer *w, const char *const *columns, const char *const *values, int count)
{
    if (w->format == AS_JSON) {
        put(w, "%s{", w->first_row ? "" : ",");
        for (int i = 0; i < count; i++) {
            put(w, "%s", i ? "," : "");
            put_json_string(w, columns[i]);
            put(w, ":");
            put_json_string(w, values[i]);
        }
        put(w, "}");
    } else if (w->format == AS_MARKDOWN) {
        put(w, "|");
        for (int i = 0; i < count; i++) put(w, " %s |", values[i]);
        put(w, "\n");
    } else {
        put(w, "  %-14s", values[0]);
        for (int i = 1; i < count; i++) put(w, "%s%s", values[i][0] ? "  " : "", values[i]);
        put(w, "\n");
    }
    w->first_row = false;
}

#define SECTION(w, name, ...)                                                                                          \
    static const char *const columns[] = { __VA_ARGS__ };                                                              \
    begin_section((w), (name), columns, FV__COUNT(columns))
#define ROW(w, ...) put_row((w), columns, (const char *const[]){ __VA_ARGS__ }, FV__COUNT(columns))

static void put_library(writer *w)
{
    char abi[16];
    snprintf(abi, sizeof abi, "%d", FV_ABI_VERSION);
    SECTION(w, "library", "what", "value");
    ROW(w, "version", fv_version());
    ROW(w, "abi", abi);
    end_section(w);
}

static void put_machine(writer *w, const fv_ctx *ctx)
{
    char lines[16][160], why[160] = "", text[64], compiler[400], folder[600];
    SECTION(w, "machine", "what", "value");
    snprintf(text, sizeof text, "%d", fv__os_num_cpus());
    ROW(w, "cpus", text);
    const fv__cpu_isa *best = fv__cpu_isa_choose(NULL, NULL);
    ROW(w, "cpu level", best ? best->name : "none");
    const int n = fv__cuda_list(lines, FV__COUNT(lines), why, sizeof why);
    for (int i = 0; i < n; i++) ROW(w, "cuda", lines[i]);
    if (n == 0) ROW(w, "cuda", why);
    fv__cuda_tools(ctx, compiler, sizeof compiler, folder, sizeof folder);
    ROW(w, "nvrtc", compiler);
    ROW(w, "kernel cache", folder);
    if (ctx) {
        ROW(w, "context", ctx->device);
        snprintf(text, sizeof text, "%d", ctx->num_threads);
        ROW(w, "threads", text);
        ROW(w, "level in use", ctx->isa->name);
    }
    end_section(w);
}

static void put_levels(writer *w)
{
    SECTION(w, "cpu levels", "name", "on this machine");
    for (int i = 0; i < fv__cpu_isa_count(); i++) {
        const fv__cpu_isa *isa = fv__cpu_isa_at(i);
        ROW(w, isa->name, isa->available() ? "yes" : "no");
    }
    end_section(w);
}

static void put_dtypes(writer *w)
{
    char bits[16], largest[32];
    SECTION(w, "element types", "name", "bits", "largest");
    for (int i = 0; i < FV__NUM_DTYPES; i++) {
        snprintf(bits, sizeof bits, "%d", fv__dtypes[i].bits);
        snprintf(largest, sizeof largest, "%.9g", fv__dtypes[i].largest);
        ROW(w, fv__dtypes[i].name, bits, largest);
    }
    end_section(w);
}

/* "cap (number, run)", "slopes (f32 array, run, optional)", ... */
static void param_text(const fv__param *p, char *out, size_t size)
{
    static const char *const kinds[] = { "number", "integer", "f32 array", "i32 array", "bits", "ranges", "f32 output", "f32 output" };
    static const char *const bindings[] = { "problem", "batch", "run" };
    char dflt[40] = "";
    if (p->dflt == FV__DEFAULT_REQUIRED) snprintf(dflt, sizeof dflt, ", required");
    else if (p->dflt == FV__DEFAULT_VALUE && p->value >= FV__NO_BOUND) snprintf(dflt, sizeof dflt, ", default no bound");
    else if (p->dflt == FV__DEFAULT_VALUE) snprintf(dflt, sizeof dflt, ", default %g", p->value);
    else if (p->dflt == FV__DEFAULT_FREQUENCIES) snprintf(dflt, sizeof dflt, ", default from base and factor");
    else snprintf(dflt, sizeof dflt, ", optional");
    snprintf(out, size, "%s (%s, %s%s)", p->name, kinds[p->kind], bindings[p->binding], dflt);
}

static void put_variants(writer *w)
{
    SECTION(w, "variants", "name", "formula", "parameters");
    for (int i = 0; i < fv__variant_count(); i++) {
        const fv__variant_meta *m = &fv__variant_builtin(i)->meta;
        char text[1024] = "", one[128];
        for (int j = 0; j < m->num_params; j++) {
            param_text(&m->params[j], one, sizeof one);
            const size_t used = strlen(text);
            snprintf(text + used, sizeof text - used, "%s%s", j ? "; " : "", one);
        }
        ROW(w, m->name, m->formula, text);
    }
    end_section(w);
}

static void put_environment(writer *w)
{
    SECTION(w, "environment", "name", "meaning");
    ROW(w, "FV_DEVICE", "device of fv_open_desc.device NULL");
    ROW(w, "FV_CPU", "highest CPU level to use");
    ROW(w, "FV_NUM_THREADS", "CPU workers");
    ROW(w, "FV_LOG", "off, error, warn, info, debug");
    ROW(w, "FV_CACHE_DIR", "folder of compiled kernels");
    ROW(w, "FV_KERNEL_PATH", "read-only bundles or folders of compiled kernels, separated by colons");
    ROW(w, "FV_DISABLE_JIT", "1: never compile, only load");
    ROW(w, "FV_JIT_PARTS", "1: compile for GPUs in parts, sooner done and slower");
    ROW(w, "FV_NVRTC_PATH", "the NVRTC library to load");
    ROW(w, "FV_NVRTC_FLAGS", "more options for NVRTC, with blanks between; part of what the cache knows kernels by");
    ROW(w, "FV_CUDA_DRIVER_PATH", "the CUDA driver library to load");
    ROW(w, "FV_CC", "compiler for variants on the CPU");
    end_section(w);
}

static bool parse_format(const char *name, info_format *out)
{
    static const char *const names[] = { "text", "markdown", "json" };
    for (int i = 0; i < FV__COUNT(names); i++)
        if (!strcmp(name, names[i])) {
            *out = (info_format)i;
            return true;
        }
    return false;
}

fv_status fv_info(fv_ctx *ctx, const char *format, char *buffer, size_t size, size_t *needed, fv_error *err)
{
    writer w = { .at = buffer, .size = size, .first_section = true };
    if (!format || !parse_format(format, &w.format))
        return fv__fail(err, FV_E_INVALID, "format", 0, 0, "there is no format \"%s\"; \"text\", \"markdown\" or \"json\"", format ? format : "");
    if (size && !buffer) return fv__fail(err, FV_E_INVALID, "buffer", 0, 0, "buffer is NULL, but size is %zu", size);
    if (w.format == AS_JSON) put(&w, "{");
    put_library(&w);
    put_machine(&w, ctx);
    put_levels(&w);
    put_dtypes(&w);
    put_variants(&w);
    put_environment(&w);
    if (w.format == AS_JSON) put(&w, "}\n");
    if (needed) *needed = w.used + 1;
    if (size) buffer[w.used < size ? w.used : size - 1] = 0;
    return FV_OK;
}
