/* SPDX-License-Identifier: Apache-2.0 */
/* compile.h -- a user's variant for one CPU level: its text among the texts that built-in variants are compiled with, given to the system's C
 * compiler (jit/jit_cc.h), kept in the cache of compiled kernels, loaded from memory.
 *
 * A variant is compiled when it is created, for the level of its context, so that every fault of the text is told there and nothing is compiled
 * later. The object code depends on the text, the level and the compiler alone: the same text again is found in the cache, and arguments never
 * compile. */
#ifndef FV__CPU_COMPILE_H
#define FV__CPU_COMPILE_H

#include "../ctx.h"
#include "../jit/jit_cache.h"
#include "../variant.h"
#include "hooks_abi.h"
#include "spec_abi.h"

/* Code in this process. The hooks live until it is closed. */
typedef struct fv__cpu_code {
    fv__jit_library library;
    const fv__cpu_hooks *hooks;         /* of fv__cpu_compile */
    const fv__spec_hooks *spec;         /* of fv__spec_compile */
    fv__jit_origin origin;
    double build_ms;                    /* in the compiler; 0: it was found */
} fv__cpu_code;

/* isa: "avx2". FV_E_COMPILE: field is the variant, value the line, or field FV_CC: there is no compiler. */
fv_status fv__cpu_compile(fv_ctx *ctx, const char *isa, const fv__variant_meta *meta, const char *text, fv__cpu_code *out, fv_error *err);

/* The definition in double, the half of the text behind #ifdef FV_SPEC: for checks; no kernel runs it. */
fv_status fv__spec_compile(fv_ctx *ctx, const fv__variant_meta *meta, const char *text, fv__cpu_code *out, fv_error *err);

void fv__cpu_code_close(fv__cpu_code *code);            /* of zeros is fine */

/* The whole source, malloc'ed: for tests. isa NULL: the definition. NULL: no memory, or no such level. */
char *fv__cpu_source(const char *isa, const fv__variant_meta *meta, const char *text);

/* What the context's cache has done so far; zeros before its first use. */
void fv__cpu_compile_stats(fv_ctx *ctx, fv__jit_stats *stats);

#endif
