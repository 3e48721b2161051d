/* SPDX-License-Identifier: Apache-2.0 */
/* ctx.h -- the context: one device, its workers, its error word. */
#ifndef FV__CTX_H
#define FV__CTX_H

#include "log.h"
#include "pool.h"
#include "run.h"

struct fv__cpu_isa;
struct fv__cuda;
struct fv__jit_cache;

struct fv_ctx {
    fv__log log;
    fv_allocator allocator;
    bool has_allocator;
    char device[16];                    /* "cpu", "cuda:0" */
    char cache_dir[512];                /* "" : the default */
    int num_threads;
    fv_parallel_for_fn *parallel_for;   /* NULL: pool */
    void *parallel_for_user;
    fv__pool *pool;
    const struct fv__cpu_isa *isa;      /* the CPU level in use (also on a GPU context, for host work) */
    struct fv__cuda *cuda;              /* NULL on the CPU */
    struct fv__jit_cache *cpu_cache;    /* of compiled variants; NULL until one is made. cpu/compile.c */
    fv__faults faults;
    int users;                          /* plans, caches, variants alive; atomic */
};

void fv__ctx_parallel_for(fv_ctx *ctx, void (*fn)(void *arg, int i), void *arg, int count);
void *fv__ctx_alloc(fv_ctx *ctx, size_t bytes);         /* 64-byte aligned, not cleared; NULL: out of memory */
void fv__ctx_free(fv_ctx *ctx, void *memory, size_t bytes);

#endif
