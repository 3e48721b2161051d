/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_gpu.c -- see checkattn_gpu.h. Types and names are those of the driver's ABI (CUDA
 * 12). */
#include "checkattn_gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

/* CUmemAllocationProp and CUmemAccessDesc: pinned memory of one device. */
typedef struct memory_kind {
    int type, handle_types;
    struct { int type, id; } location;
    void *win32;
    unsigned char flags[8];
} memory_kind;

typedef struct memory_access {
    struct { int type, id; } location;
    int flags;
} memory_access;

enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, NON_BLOCKING = 1, CAPTURE_THREAD = 1 };

static struct driver {
    bool open;
    int device;
    void *stream;
    int (*Init)(unsigned);
    int (*DeviceGet)(int *, int);
    int (*PrimaryCtxRetain)(void **, int);
    int (*CtxSetCurrent)(void *);
    int (*StreamCreate)(void **, unsigned);
    int (*StreamSynchronize)(void *);
    int (*MemAlloc)(address *, size_t);
    int (*MemFree)(address);
    int (*HtoD)(address, const void *, size_t, void *);
    int (*DtoH)(void *, address, size_t);
    int (*Granularity)(size_t *, const memory_kind *, int);
    int (*Reserve)(address *, size_t, size_t, address, unsigned long long);
    int (*Unreserve)(address, size_t);
    int (*Create)(unsigned long long *, size_t, const memory_kind *, unsigned long long);
    int (*Release)(unsigned long long);
    int (*Map)(address, size_t, size_t, unsigned long long, unsigned long long);
    int (*Unmap)(address, size_t);
    int (*SetAccess)(address, size_t, const memory_access *, size_t);
    int (*BeginCapture)(void *, int);
    int (*EndCapture)(void *, void **);
    int (*Instantiate)(void **, void *, unsigned long long);
    int (*Launch)(void *, void *);
    int (*GraphDestroy)(void *);
    int (*ExecDestroy)(void *);
} cu;

static const struct { const char *name; size_t at; } functions[] = {
    { "cuInit", offsetof(struct driver, Init) },
    { "cuDeviceGet", offsetof(struct driver, DeviceGet) },
    { "cuDevicePrimaryCtxRetain", offsetof(struct driver, PrimaryCtxRetain) },
    { "cuCtxSetCurrent", offsetof(struct driver, CtxSetCurrent) },
    { "cuStreamCreate", offsetof(struct driver, StreamCreate) },
    { "cuStreamSynchronize", offsetof(struct driver, StreamSynchronize) },
    { "cuMemAlloc_v2", offsetof(struct driver, MemAlloc) },
    { "cuMemFree_v2", offsetof(struct driver, MemFree) },
    { "cuMemcpyHtoDAsync_v2", offsetof(struct driver, HtoD) },
    { "cuMemcpyDtoH_v2", offsetof(struct driver, DtoH) },
    { "cuMemGetAllocationGranularity", offsetof(struct driver, Granularity) },
    { "cuMemAddressReserve", offsetof(struct driver, Reserve) },
    { "cuMemAddressFree", offsetof(struct driver, Unreserve) },
    { "cuMemCreate", offsetof(struct driver, Create) },
    { "cuMemRelease", offsetof(struct driver, Release) },
    { "cuMemMap", offsetof(struct driver, Map) },
    { "cuMemUnmap", offsetof(struct driver, Unmap) },
    { "cuMemSetAccess", offsetof(struct driver, SetAccess) },
    { "cuStreamBeginCapture_v2", offsetof(struct driver, BeginCapture) },
    { "cuStreamEndCapture", offsetof(struct driver, EndCapture) },
    { "cuGraphInstantiateWithFlags", offsetof(struct driver, Instantiate) },
    { "cuGraphLaunch", offsetof(struct driver, Launch) },
    { "cuGraphDestroy", offsetof(struct driver, GraphDestroy) },
    { "cuGraphExecDestroy", offsetof(struct driver, ExecDestroy) },
};

static bool ok(int status, const char *what)
{
    if (status)
        fprintf(stderr, "checkattn: %s: CUDA error %d\n", what, status);
    return status == 0;
}

static bool find_functions(char *why, size_t size)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    if (!library) {
        snprintf(why, size, "%s", dlerror());
        return false;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *f = dlsym(library, functions[i].name);
        if (!f) {
            snprintf(why, size, "libcuda.so.1 has no %s", functions[i].name);
            return false;
        }
        memcpy((char *)&cu + functions[i].at, &f, sizeof f);
    }
    return true;
}

bool gpu_open(int ordinal, char *why, size_t size)
{
    void *context = NULL;

    if (!find_functions(why, size))
        return false;
    if (cu.Init(0) || cu.DeviceGet(&cu.device, ordinal) || cu.PrimaryCtxRetain(&context, cu.device)
        || cu.CtxSetCurrent(context) || cu.StreamCreate(&cu.stream, NON_BLOCKING)) {
        snprintf(why, size, "device %d cannot be opened", ordinal);
        return false;
    }
    cu.open = true;
    return true;
}

bool gpu_on(void)
{
    return cu.open;
}

void *gpu_stream(void)
{
    return cu.stream;
}

/* --------------------------------------------------------------------------------------- memory */

void *gpu_alloc(size_t bytes)
{
    address a = 0;

    return ok(cu.MemAlloc(&a, bytes ? bytes : 1), "cuMemAlloc") ? (void *)(uintptr_t)a : NULL;
}

void gpu_free(void *memory)
{
    if (memory)
        ok(cu.MemFree((address)(uintptr_t)memory), "cuMemFree");
}

bool gpu_sync(void)
{
    return ok(cu.StreamSynchronize(cu.stream), "cuStreamSynchronize");
}

/* Waits for the copy: the plain call returns when pageable memory is staged, and our stream
 * would not wait for the rest. */
bool gpu_upload(void *to, const void *from, size_t bytes)
{
    return !bytes
           || (ok(cu.HtoD((address)(uintptr_t)to, from, bytes, cu.stream), "cuMemcpyHtoDAsync")
               && gpu_sync());
}

bool gpu_download(void *to, const void *from, size_t bytes)
{
    return !bytes || ok(cu.DtoH(to, (address)(uintptr_t)from, bytes), "cuMemcpyDtoH");
}

/* Granules that are real, of all ranges. */
typedef struct granule {
    struct granule *next;
    address at, range;
    unsigned long long handle;
} granule;

typedef struct range {
    struct range *next;
    address at;
    size_t bytes;
} range;

static granule *granules;
static range *ranges;

static memory_kind kind_of(void)
{
    memory_kind k = { .type = PINNED };

    k.location.type = ON_DEVICE;
    k.location.id = cu.device;
    return k;
}

static size_t granularity(void)
{
    const memory_kind k = kind_of();
    size_t g = 0;

    return cu.Granularity(&g, &k, 0) || !g ? (size_t)2 << 20 : g;
}

void *gpu_reserve(size_t bytes)
{
    const size_t g = granularity(), whole = (bytes + g - 1) / g * g;
    range *r = calloc(1, sizeof *r);

    if (!r || !ok(cu.Reserve(&r->at, whole, 0, 0, 0), "cuMemAddressReserve")) {
        free(r);
        return NULL;
    }
    r->bytes = whole;
    r->next = ranges;
    ranges = r;
    return (void *)(uintptr_t)r->at;
}

static bool is_real(address at)
{
    for (const granule *g = granules; g; g = g->next)
        if (g->at == at)
            return true;
    return false;
}

static bool make_real(address of, address at, size_t bytes)
{
    const memory_kind kind = kind_of();
    memory_access access = { .flags = READ_WRITE };
    granule *g = calloc(1, sizeof *g);

    access.location.type = ON_DEVICE;
    access.location.id = cu.device;
    if (!g || !ok(cu.Create(&g->handle, bytes, &kind, 0), "cuMemCreate")) {
        free(g);
        return false;
    }
    g->at = at;
    g->range = of;
    g->next = granules;
    granules = g;
    return ok(cu.Map(at, bytes, 0, g->handle, 0), "cuMemMap")
           && ok(cu.SetAccess(at, bytes, &access, 1), "cuMemSetAccess");
}

bool gpu_back(void *memory, size_t first, size_t last, size_t *lo, size_t *hi)
{
    const size_t g = granularity();
    const address base = (address)(uintptr_t)memory;

    *lo = first / g * g;
    *hi = (last + g - 1) / g * g;
    for (size_t at = *lo; at < *hi; at += g)
        if (!is_real(base + at) && !make_real(base, base + at, g))
            return false;
    return true;
}

void gpu_unreserve(void *memory)
{
    const size_t bytes = granularity();

    for (granule **g = &granules; *g; ) {
        granule *it = *g;
        if (it->range != (address)(uintptr_t)memory) {
            g = &it->next;
            continue;
        }
        ok(cu.Unmap(it->at, bytes), "cuMemUnmap");
        ok(cu.Release(it->handle), "cuMemRelease");
        *g = it->next;
        free(it);
    }
    for (range **r = &ranges; *r; r = &(*r)->next)
        if ((*r)->at == (address)(uintptr_t)memory) {
            range *it = *r;
            ok(cu.Unreserve(it->at, it->bytes), "cuMemAddressFree");
            *r = it->next;
            free(it);
            return;
        }
}

/* --------------------------------------------------------------------------------------- graphs */

struct gpu_graph {
    void *graph, *exec;
};

gpu_graph *gpu_capture(bool (*fn)(void *arg), void *arg)
{
    gpu_graph *g = calloc(1, sizeof *g);

    if (!g || !ok(cu.BeginCapture(cu.stream, CAPTURE_THREAD), "cuStreamBeginCapture")) {
        free(g);
        return NULL;
    }
    const bool queued = fn(arg);
    if (ok(cu.EndCapture(cu.stream, &g->graph), "cuStreamEndCapture") && queued
        && ok(cu.Instantiate(&g->exec, g->graph, 0), "cuGraphInstantiate"))
        return g;
    gpu_graph_free(g);
    return NULL;
}

bool gpu_graph_launch(gpu_graph *g)
{
    return ok(cu.Launch(g->exec, cu.stream), "cuGraphLaunch");
}

void gpu_graph_free(gpu_graph *g)
{
    if (!g)
        return;
    if (g->exec)
        cu.ExecDestroy(g->exec);
    if (g->graph)
        cu.GraphDestroy(g->graph);
    free(g);
}
