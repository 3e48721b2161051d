/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.c -- a context on a GPU: device, compiler, error word. */
#include "cuda.h"

#include "ops.h"
#include "state.h"

#include <stdio.h>
#include <string.h>

fv__attend_device fv__cuda_limits(const fv__cuda_facts *facts)
{
    return (fv__attend_device){ .shared_per_block = facts->shared_per_block_optin, .shared_per_sm = facts->shared_per_sm,
                                .shared_reserved = facts->shared_reserved, .registers_per_sm = facts->registers_per_sm, .num_sms = facts->num_sms };
}

static fv_status open_faults(struct fv__cuda *c, fv_error *err)
{
    FV_TRY(fv__cuda_alloc(c->device, sizeof(d_faults), &c->faults, err));
    FV_TRY(fv__cuda_alloc_pinned(c->device, sizeof(d_faults), (void **)&c->faults_host, err));
    memset(c->faults_host, 0, sizeof *c->faults_host);
    FV_TRY(fv__cuda_mapped_address(c->device, c->faults_host, &c->faults_mapped, err));
    FV_TRY(fv__cuda_fill_bytes(c->device, c->faults, 0, sizeof(d_faults), c->stream, err));
    return fv__cuda_stream_sync(c->device, c->stream, err);
}

static fv_status open_parts(fv_ctx *ctx, struct fv__cuda *c, int ordinal, fv_error *err)
{
    FV_TRY(fv__cuda_device_open(ordinal, &c->device, err));
    const fv__cuda_facts *facts = &c->device->facts;
    if (facts->cc_major < 8)
        return fv__fail(err, FV_E_DEVICE, "desc.device", facts->cc_major * 10 + facts->cc_minor, 80,
                        "%s has compute capability %d.%d; 8.0 is the oldest that there are kernels for", facts->name, facts->cc_major, facts->cc_minor);
    const fv__jit_cache_desc desc = { .dir = ctx->cache_dir[0] ? ctx->cache_dir : NULL, .disable_jit = -1, .log = &ctx->log };
    FV_TRY(fv__jit_cache_open(&desc, &c->cache, err));
    FV_TRY(fv__cuda_jit_open(c->device, c->cache, &ctx->log, &c->jit, err));
    FV_TRY(fv__cuda_stream_create(c->device, &c->stream, err));
    FV_TRY(fv__cuda_ops_open(c, err));
    return open_faults(c, err);
}

fv_status fv__cuda_open(fv_ctx *ctx, int ordinal, fv_error *err)
{
    struct fv__cuda *c = fv__ctx_alloc(ctx, sizeof *c);
    if (!c) return fv__fail(err, FV_E_NO_MEMORY, "ctx", (int64_t)sizeof *c, 0, "no memory for a context");
    memset(c, 0, sizeof *c);
    ctx->cuda = c;
    const fv_status s = open_parts(ctx, c, ordinal, err);
    if (s != FV_OK) fv__cuda_close(ctx);
    return s;
}

void fv__cuda_close(fv_ctx *ctx)
{
    struct fv__cuda *c = ctx->cuda;
    ctx->cuda = NULL;
    fv__cuda_ops_close(c);
    if (c->jit) fv__cuda_jit_close(&c->jit);
    if (c->cache) fv__jit_cache_close(&c->cache);
    if (c->device) {
        fv__cuda_free(c->device, c->faults);
        fv__cuda_free_pinned(c->device, c->faults_host);
        if (c->stream) fv__cuda_stream_destroy(c->device, c->stream);
        fv__cuda_device_close(&c->device);
    }
    fv__ctx_free(ctx, c, sizeof *c);
}

/* Kernels write the host's copy with ordinary stores, the count last; see `fault` in the kernels. What an append met while it read tables on the host
 * is in the context's own word: that is the first one, where the device's is empty. */
void fv__cuda_faults(fv_ctx *ctx, fv__faults *out, int clear)
{
    struct fv__cuda *c = ctx->cuda;
    volatile const d_faults *seen = c->faults_host;
    const int64_t count = seen->count, of_host = __atomic_load_n(&ctx->faults.count, __ATOMIC_ACQUIRE);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (count) *out = (fv__faults){ .what = seen->what, .request = seen->request, .slot = seen->slot, .value = seen->value };
    else *out = ctx->faults;
    out->count = count + of_host;
    if (!clear) return;
    ctx->faults = (fv__faults){ 0 };
    memset(c->faults_host, 0, sizeof *c->faults_host);
    fv__cuda_fill_bytes(c->device, c->faults, 0, sizeof(d_faults), c->stream, NULL);
}

int fv__cuda_list(char (*lines)[160], int max_lines, char *why, size_t why_size)
{
    fv_error err = { 0 };
    int count = 0, n = 0;
    if (fv__cuda_count(&count, &err) != FV_OK) {
        snprintf(why, why_size, "%s", err.text);
        return 0;
    }
    for (int i = 0; i < count && n < max_lines; i++) {
        fv__cuda_device *device = NULL;
        if (fv__cuda_device_open(i, &device, &err) != FV_OK) {
            snprintf(lines[n++], sizeof *lines, "cuda:%d %.120s", i, err.text);
            continue;
        }
        const fv__cuda_facts *f = &device->facts;
        snprintf(lines[n++], sizeof *lines, "cuda:%d %.64s, compute capability %d.%d, %d SMs, %.1f GiB, driver for CUDA %d.%d", i, f->name,
                 f->cc_major, f->cc_minor, f->num_sms, (double)f->memory_bytes / (1 << 30), device->api.version / 1000, device->api.version % 1000 / 10);
        fv__cuda_device_close(&device);
    }
    return n;
}

void fv__cuda_tools(const fv_ctx *ctx, char *compiler, size_t compiler_size, char *folder, size_t folder_size)
{
    const struct fv__cuda *c = ctx ? ctx->cuda : NULL;
    const fv__jit_cache_desc desc = { .dir = ctx && ctx->cache_dir[0] ? ctx->cache_dir : NULL, .disable_jit = -1 };
    fv__jit_cache *own = NULL;
    fv__nvrtc *found = NULL;
    fv_error err = { 0 };
    if (c && fv__cuda_jit_compiler(c->jit)[0]) {
        snprintf(compiler, compiler_size, "%s, %s", fv__cuda_jit_compiler(c->jit), fv__cuda_jit_compiler_path(c->jit));
    } else if (fv__nvrtc_open(c ? c->device->api.version / 1000 : 0, NULL, &found, &err) == FV_OK) {
        snprintf(compiler, compiler_size, "%s, %s", fv__nvrtc_name(found), fv__nvrtc_path(found));
    } else {
        snprintf(compiler, compiler_size, "%s", err.text);
    }
    fv__nvrtc_close(&found);
    const bool known = c || fv__jit_cache_open(&desc, &own, &err) == FV_OK;
    const char *path = known ? fv__jit_cache_folder(c ? c->cache : own) : "";
    snprintf(folder, folder_size, "%s", *path ? path : "none: compiled kernels stay in memory");
    fv__jit_cache_close(&own);
}
