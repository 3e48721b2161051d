/* SPDX-License-Identifier: Apache-2.0 */
/* ctx.c -- opening and closing a context, its memory and its workers. */
#include "ctx.h"

#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "engine.h"
#include "jit/jit_cache.h"
#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *fv__ctx_alloc(fv_ctx *ctx, size_t bytes) { return fv__os_alloc(ctx->has_allocator ? &ctx->allocator : NULL, bytes); }

void fv__ctx_free(fv_ctx *ctx, void *memory, size_t bytes)
{
    if (memory) fv__os_free(ctx->has_allocator ? &ctx->allocator : NULL, memory, bytes);
}

void fv__ctx_parallel_for(fv_ctx *ctx, void (*fn)(void *arg, int i), void *arg, int count)
{
    if (count <= 0) return;
    if (count == 1) fn(arg, 0);
    else if (ctx->parallel_for) ctx->parallel_for(ctx->parallel_for_user, fn, arg, count);
    else fv__pool_run(ctx->pool, fn, arg, count);
}

const fv__backend *fv__ctx_backend(const fv_ctx *ctx) { return ctx->cuda ? &fv__cuda_backend : &fv__cpu_backend; }

/* "cpu" -> -1, "cuda:N" -> N. */
static fv_status parse_device(const char *device, int *ordinal, fv_error *err)
{
    *ordinal = -1;
    if (!strcmp(device, "cpu")) return FV_OK;
    if (!strncmp(device, "cuda:", 5) && device[5] >= '0' && device[5] <= '9') {
        char *end;
        const long n = strtol(device + 5, &end, 10);
        if (*end == 0 && n < 1024) {
            *ordinal = (int)n;
            return FV_OK;
        }
    }
    return fv__fail(err, FV_E_INVALID, "desc.device", 0, 0, "there is no device \"%s\"; \"cpu\" or \"cuda:N\"", device);
}

static int thread_count(const fv_open_desc *desc)
{
    if (desc->num_threads > 0) return desc->num_threads;
    const char *text = fv__os_env("FV_NUM_THREADS");
    const int n = text ? atoi(text) : 0;
    return n > 0 && n <= 1024 ? n : fv__os_num_cpus();
}

static fv_status check_desc(const fv_open_desc *desc, fv_error *err)
{
    FV_TRY(fv__check_reserved(desc->reserved, FV__COUNT(desc->reserved), "desc.reserved", err));
    if (desc->num_threads < 0 || desc->num_threads > 1024)
        return fv__fail(err, FV_E_INVALID, "desc.num_threads", desc->num_threads, 1024, "desc.num_threads is %d; 0 (all) to 1024", desc->num_threads);
    if (desc->allocator && (!desc->allocator->allocate || !desc->allocator->release))
        return fv__fail(err, FV_E_INVALID, "desc.allocator", 0, 0, "an allocator needs both allocate and release");
    if (desc->cache_dir && strlen(desc->cache_dir) >= sizeof((fv_ctx *)0)->cache_dir)
        return fv__fail(err, FV_E_INVALID, "desc.cache_dir", (int64_t)strlen(desc->cache_dir), (int64_t)sizeof((fv_ctx *)0)->cache_dir - 1,
                        "desc.cache_dir has %zu characters; at most %zu", strlen(desc->cache_dir), sizeof((fv_ctx *)0)->cache_dir - 1);
    return FV_OK;
}

static fv_status start(fv_ctx *ctx, const fv_open_desc *desc, int ordinal, fv_error *err)
{
    fv__log_init(&ctx->log, desc->log, desc->log_user);
    ctx->num_threads = thread_count(desc);
    ctx->parallel_for = desc->parallel_for;
    ctx->parallel_for_user = desc->parallel_for_user;
    if (desc->cache_dir) strcpy(ctx->cache_dir, desc->cache_dir);
    ctx->isa = fv__cpu_isa_choose(desc->cpu_isa, err);
    if (!ctx->isa) return FV_E_INVALID;
    ctx->pool = fv__pool_create(ctx->num_threads, ctx->has_allocator ? &ctx->allocator : NULL);
    if (!ctx->pool) return fv__fail(err, FV_E_NO_MEMORY, "ctx", ctx->num_threads, 0, "no memory for a pool of %d threads", ctx->num_threads);
    return ordinal < 0 ? FV_OK : fv__cuda_open(ctx, ordinal, err);
}

static void stop(fv_ctx *ctx)
{
    if (ctx->cuda) fv__cuda_close(ctx);
    if (ctx->pool) fv__pool_destroy(ctx->pool);
    if (ctx->cpu_cache) fv__jit_cache_close(&ctx->cpu_cache);
    fv__ctx_free(ctx, ctx, sizeof *ctx);
}

fv_status fv_open_abi(uint32_t abi_version, const fv_open_desc *desc, fv_ctx **out, fv_error *err)
{
    static const fv_open_desc defaults;
    if (!out) return fv__fail(err, FV_E_INVALID, "ctx", 0, 0, "the place for the context is NULL");
    if (abi_version != FV_ABI_VERSION)
        return fv__fail(err, FV_E_VERSION, "abi_version", abi_version, FV_ABI_VERSION,
                        "the caller was built for ABI version %u of Foveal; this library has version %d", abi_version, FV_ABI_VERSION);
    if (!desc) desc = &defaults;
    FV_TRY(check_desc(desc, err));
    const char *device = desc->device ? desc->device : fv__os_env("FV_DEVICE");
    int ordinal;
    FV_TRY(parse_device(device ? device : "cpu", &ordinal, err));

    fv_ctx *ctx = fv__os_alloc(desc->allocator, sizeof *ctx);
    if (!ctx) return fv__fail(err, FV_E_NO_MEMORY, "ctx", (int64_t)sizeof *ctx, 0, "no memory for a context");
    memset(ctx, 0, sizeof *ctx);
    snprintf(ctx->device, sizeof ctx->device, "%s", device ? device : "cpu");
    ctx->has_allocator = desc->allocator != NULL;
    if (desc->allocator) ctx->allocator = *desc->allocator;

    const fv_status s = start(ctx, desc, ordinal, err);
    if (s == FV_OK) *out = ctx;
    else stop(ctx);
    return s;
}

fv_status fv_close(fv_ctx **ctx)
{
    if (!ctx || !*ctx) return FV_OK;
    if (__atomic_load_n(&(*ctx)->users, __ATOMIC_SEQ_CST) != 0) return FV_E_BUSY;
    stop(*ctx);
    *ctx = NULL;
    return FV_OK;
}

/* Takes the host's word together with the device's. */
fv_status fv_ctx_errors(fv_ctx *ctx, fv_errors *out, int clear)
{
    if (!ctx || !out) return FV_E_INVALID;
    fv__faults seen;
    if (ctx->cuda) {
        fv__cuda_faults(ctx, &seen, clear);
    } else {
        seen.what = __atomic_load_n(&ctx->faults.what, __ATOMIC_ACQUIRE);
        seen.request = ctx->faults.request;
        seen.slot = ctx->faults.slot;
        seen.value = ctx->faults.value;
        seen.count = __atomic_load_n(&ctx->faults.count, __ATOMIC_RELAXED);
        if (clear) ctx->faults = (fv__faults){ 0 };
    }
    *out = (fv_errors){ (fv_fault)seen.what, seen.request, seen.slot, seen.value, seen.count };
    return FV_OK;
}
