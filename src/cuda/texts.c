/* SPDX-License-Identifier: Apache-2.0 */
/* texts.c -- see texts.h. A variant's lines stand behind a #line with its name, so that NVRTC complains as "NAME(LINE): error: WORDS". */
#include "texts.h"

#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *fv__cuda_variant_text(int i, const fv_variant *v)
{
    char *text = NULL, defined[64];
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return NULL;
    fprintf(f, "namespace fv_text_u%d {\n#define FV_VARIANT_NAME u%d\nstruct FV_ARGS;\n#line 1 \"%s\"\n", i, i, v->meta.name);
    fputs(v->text, f);
    fprintf(f, "\n#line 1 \"uses.cuh\"\n#undef FV_VARIANT_NAME\n");
    for (const char *at = v->text; fv__variant_next_define(&at, defined); ) fprintf(f, "#undef %s\n", defined);
    fprintf(f, "}\nusing namespace fv_text_u%d;\n", i);
    if (!fclose(f)) return text;
    free(text);
    return NULL;
}

/* "NAME(LINE): error: WORDS" within `text`; NULL: it is not about this variant. */
static const char *find_complaint(const char *text, const char *name, long *line)
{
    const size_t n = strlen(name);
    for (const char *at = text; (at = strstr(at, name)); at++) {
        const bool starts = at == text || at[-1] == ' ';
        if (!starts || at[n] != '(') continue;
        char *end;
        *line = strtol(at + n + 1, &end, 10);
        const char *words = strstr(end, "error: ");
        if (*end == ')' && words) return words + strlen("error: ");
    }
    return NULL;
}

void fv__cuda_blame(const fv_variant *const *variants, int num_variants, fv_error *err)
{
    char words[sizeof err->text];
    if (!err || err->status != FV_E_COMPILE || strcmp(err->field, "text")) return;
    for (int i = 0; i < num_variants; i++) {
        const char *name = variants[i]->meta.name;
        long line = 0;
        const char *found = find_complaint(err->text, name, &line);
        if (!found) continue;
        snprintf(words, sizeof words, "%s", found);
        fv__fail(err, FV_E_COMPILE, name, line, 0, "%s, line %ld: %s", name, line, words);
        return;
    }
}

/* The hooks as functions of one kernel that does nothing else. */
char *fv__cuda_probe_text(const fv_variant *variant)
{
    static const char before[] = "#include \"hooks.cuh\"\n", after[] = "extern \"C\" __global__ void probe() { }\n";
    char *text = fv__cuda_variant_text(0, variant), *whole = NULL;
    if (text) whole = malloc(sizeof before + strlen(text) + sizeof after);
    if (whole) sprintf(whole, "%s%s%s", before, text, after);
    free(text);
    return whole;
}

/* Where nothing can be compiled here, plans may still find what they need in bundles and caches: then there is nothing to say yet. */
fv_status fv__cuda_check_variant(fv_ctx *ctx, const fv_variant *variant, fv_error *err)
{
    const fv__jit_blob *blob;
    fv_error own = { 0 };
    char *text = fv__cuda_probe_text(variant);
    if (!text) return fv__fail(err, FV_E_NO_MEMORY, "text", 0, 0, "no memory to compile variant %s", variant->meta.name);
    const fv__jit_text extra = { "probe.cu", text };
    const fv__cuda_program program = { .name = variant->meta.name, .source = "probe.cu", .extra = &extra, .num_extra = 1 };
    const fv_status status = fv__cuda_jit_compile(ctx->cuda->jit, &program, NULL, &blob, &own);
    free(text);
    if (status == FV_OK || status == FV_E_NOT_READY || (status == FV_E_COMPILE && strcmp(own.field, "text"))) return FV_OK;
    fv__cuda_blame(&variant, 1, &own);
    if (err) *err = own;
    return status;
}
