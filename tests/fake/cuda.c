/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.c -- a driver without a GPU: keeps the books on contexts, capture modes and calls, and fails where a test asks for it.
 * test_cuda_driver builds it into a libcuda.so.1 of its own and looks into the books by the fake_* functions. Linked with simt.cpp it plays the simple
 * kernels, and with nvrtc.c the attention kernel; launches, copies and fills happen at once, also while a stream is captured (a graph's launch repeats the
 * attention kernel's then).
 * Two devices: 0 is of compute capability 9.0, 1 of 8.6; 2 (with fake_devices(3)) is too old. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900 };

typedef unsigned long long address;

static atomic_int num_devices = 2, driver_version = 13000;
static atomic_int num_calls, num_loads, num_unloads, live_allocations, retains[3], unsafe_calls;
static _Atomic(void *) capturing;               /* the stream in capture, of any thread, in the global mode */
static char failing[64];
static int failure;
static char contexts[3];                        /* their addresses are the handles */

static _Thread_local void *stack[16];
static _Thread_local int depth;
static _Thread_local int mode;                  /* of stream capture */
static char last_launch[256];

/* ---- books */
void fake_devices(int n) { num_devices = n; }
void fake_version(int version) { driver_version = version; }
void fake_fail(const char *name, int result) { snprintf(failing, sizeof failing, "%s", name ? name : ""); failure = result; }
void fake_capture(void *stream) { capturing = stream; }
int fake_calls(void) { return num_calls; }
int fake_loads(void) { return num_loads; }
int fake_unloads(void) { return num_unloads; }
int fake_live(void) { return live_allocations; }
int fake_retains(int device) { return retains[device]; }
int fake_unsafe(void) { return unsafe_calls; }
int fake_depth(void) { return depth; }
int fake_mode(void) { return mode; }
void *fake_current(void) { return depth ? stack[depth - 1] : NULL; }
void *fake_context(int device) { return &contexts[device]; }
const char *fake_launch(void) { return last_launch; }

/* Every entry point begins here: its failure, if one was asked for. */
static int enter(const char *name)
{
    num_calls++;
    return !strcmp(name, failing) ? failure : OK;
}

#define BEGIN do { const int begin_ = enter(__func__); if (begin_) return begin_; } while (0)
#define NEED_CONTEXT do { if (!depth) return INVALID_CONTEXT; } while (0)

/* What a capture of the global mode forbids to threads that are not relaxed. */
#define UNSAFE do { if (capturing && mode != 2) { unsafe_calls++; return CAPTURE_UNSUPPORTED; } } while (0)

/* ---- the driver */
int cuInit(unsigned flags) { BEGIN; return flags ? INVALID_VALUE : OK; }
int cuDriverGetVersion(int *v) { *v = driver_version; return OK; }
int cuDeviceGetCount(int *n) { BEGIN; *n = num_devices; return OK; }
int cuDeviceGet(int *d, int i) { BEGIN; *d = i; return i < num_devices ? OK : INVALID_DEVICE; }
int cuDeviceGetName(char *s, int n, int d) { BEGIN; snprintf(s, (size_t)n, "Fake %d", d); return OK; }
int cuDeviceTotalMem_v2(size_t *n, int d) { BEGIN; *n = (size_t)(d + 1) << 36; return OK; }

int cuGetErrorName(int e, const char **s)
{
    *s = e == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : e == 100 ? "CUDA_ERROR_NO_DEVICE" : e == 3 ? "CUDA_ERROR_NOT_INITIALIZED"
       : e == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : e == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return *s ? OK : INVALID_VALUE;
}

int cuGetErrorString(int e, const char **s)
{
    *s = e == NO_MEMORY ? "out of memory" : NULL;
    return *s ? OK : INVALID_VALUE;
}

int cuDeviceGetAttribute(int *v, int a, int d)
{
    static const int major[] = { 9, 8, 7 }, minor[] = { 0, 6, 5 };
    BEGIN;
    switch (a) {
    case 10: *v = 32; break;
    case 16: *v = 132; break;
    case 38: *v = 60 << 20; break;
    case 75: *v = major[d]; break;
    case 76: *v = minor[d]; break;
    case 81: *v = 228 << 10; break;
    case 82: *v = 65536; break;
    case 97: *v = 227 << 10; break;
    case 111: *v = 1 << 10; break;
    case 127: *v = d == 0; break;
    default: *v = 1; break;
    }
    return a < 140 ? OK : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void **c, int d) { BEGIN; UNSAFE; retains[d]++; *c = &contexts[d]; return OK; }
int cuDevicePrimaryCtxRelease_v2(int d) { BEGIN; retains[d]--; return OK; }
int cuCtxPushCurrent_v2(void *c) { BEGIN; stack[depth++] = c; return OK; }
int cuCtxPopCurrent_v2(void **c) { BEGIN; NEED_CONTEXT; *c = stack[--depth]; return OK; }
int cuCtxGetCurrent(void **c) { BEGIN; *c = fake_current(); return OK; }
int cuCtxSetCurrent(void *c) { BEGIN; if (!depth) depth = 1; stack[depth - 1] = c; return OK; }
int cuCtxSynchronize(void) { BEGIN; NEED_CONTEXT; UNSAFE; return OK; }

/* Device memory ends at a page that nobody may touch: whoever reads or writes past the end is caught at once. */
enum { PAGE = 4096, MAX_ALLOCATIONS = 4096 };
static struct { char *base; size_t size; address at; } allocations[MAX_ALLOCATIONS];
static atomic_flag allocating = ATOMIC_FLAG_INIT;

static int book(address from, address at, char *base, size_t size)
{
    while (atomic_flag_test_and_set(&allocating)) { }
    int i = 0;
    while (i < MAX_ALLOCATIONS && allocations[i].at != from) i++;
    if (i < MAX_ALLOCATIONS && !from) allocations[i].base = base, allocations[i].size = size, allocations[i].at = at;
    atomic_flag_clear(&allocating);
    return i;
}

int cuMemAlloc_v2(address *p, size_t n)
{
    BEGIN; NEED_CONTEXT; UNSAFE;
    const size_t used = (n + 255) / 256 * 256, size = (used + PAGE - 1) / PAGE * PAGE;
    if (n > (size_t)1 << 40) return NO_MEMORY;
    char *base = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || mprotect(base, size, PROT_READ | PROT_WRITE)) return NO_MEMORY;
    *p = (address)(uintptr_t)(base + size - used);
    if (book(0, *p, base, size + PAGE) == MAX_ALLOCATIONS) return NO_MEMORY;
    live_allocations++;
    return OK;
}

int cuMemFree_v2(address p)
{
    BEGIN; NEED_CONTEXT; UNSAFE;
    const int i = book(p, 0, NULL, 0);
    if (i == MAX_ALLOCATIONS || !p) return INVALID_VALUE;
    munmap(allocations[i].base, allocations[i].size);
    allocations[i].at = 0;
    live_allocations--;
    return OK;
}

/* Ranges of addresses: nobody may touch what was not given access to. */
int cuMemGetAllocationGranularity(size_t *n, const void *kind, int option) { BEGIN; (void)kind, (void)option; *n = 64 << 10; return OK; }
int cuMemAddressReserve(address *p, size_t n, size_t align, address at, address flags)
{
    BEGIN;
    (void)align, (void)at, (void)flags;
    void *base = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *p = (address)(uintptr_t)base;
    return base == MAP_FAILED ? NO_MEMORY : OK;
}
int cuMemAddressFree(address p, size_t n) { BEGIN; return munmap((void *)(uintptr_t)p, n) ? INVALID_VALUE : OK; }
int cuMemCreate(address *handle, size_t n, const void *kind, address flags) { BEGIN; (void)n, (void)kind, (void)flags; *handle = 1; return OK; }
int cuMemRelease(address handle) { BEGIN; (void)handle; return OK; }
int cuMemMap(address p, size_t n, size_t offset, address handle, address flags)
{
    BEGIN;
    (void)p, (void)n, (void)offset, (void)handle, (void)flags;
    return OK;
}
int cuMemUnmap(address p, size_t n)
{
    BEGIN;
    void *base = (void *)(uintptr_t)p;
    return mmap(base, n, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == base ? OK : INVALID_VALUE;
}
int cuMemSetAccess(address p, size_t n, const void *access, size_t count)
{
    BEGIN;
    (void)access, (void)count;
    return mprotect((void *)(uintptr_t)p, n, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
int cuMemGetInfo_v2(size_t *f, size_t *t) { BEGIN; NEED_CONTEXT; *f = *t = (size_t)1 << 30; return OK; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { BEGIN; NEED_CONTEXT; UNSAFE; (void)flags; *p = malloc(n); live_allocations++; return OK; }
int cuMemFreeHost(void *p) { BEGIN; NEED_CONTEXT; UNSAFE; free(p); live_allocations--; return OK; }
int cuMemHostGetDevicePointer_v2(address *d, void *h, unsigned f) { BEGIN; NEED_CONTEXT; (void)f; *d = (address)(uintptr_t)h; return OK; }
int cuMemcpyHtoDAsync_v2(address t, const void *f, size_t n, void *s) { BEGIN; NEED_CONTEXT; (void)s; memcpy((void *)(uintptr_t)t, f, n); return OK; }
int cuMemcpyDtoHAsync_v2(void *t, address f, size_t n, void *s) { BEGIN; NEED_CONTEXT; (void)s; memcpy(t, (void *)(uintptr_t)f, n); return OK; }
int cuMemcpyDtoH_v2(void *t, address f, size_t n) { return cuMemcpyDtoHAsync_v2(t, f, n, NULL); }
int cuMemcpyDtoDAsync_v2(address t, address f, size_t n, void *s)
{
    BEGIN; NEED_CONTEXT;
    (void)s;
    memcpy((void *)(uintptr_t)t, (void *)(uintptr_t)f, n);
    return OK;
}
int cuMemsetD8Async(address t, unsigned char v, size_t n, void *s) { BEGIN; NEED_CONTEXT; (void)s; memset((void *)(uintptr_t)t, v, n); return OK; }
int cuMemsetD32Async(address t, unsigned v, size_t n, void *s)
{
    BEGIN; NEED_CONTEXT;
    (void)s;
    for (size_t i = 0; i < n; i++) ((unsigned *)(uintptr_t)t)[i] = v;
    return OK;
}
int cuPointerGetAttribute(void *v, int a, address p) { BEGIN; (void)p; *(int *)v = a == 2 ? 2 : 1; return OK; }

int cuStreamCreate(void **s, unsigned flags) { BEGIN; NEED_CONTEXT; (void)flags; *s = malloc(1); return OK; }
int cuStreamDestroy_v2(void *s) { BEGIN; NEED_CONTEXT; free(s); return OK; }
int cuStreamSynchronize(void *s) { BEGIN; NEED_CONTEXT; (void)s; return OK; }
int cuStreamQuery(void *s) { BEGIN; NEED_CONTEXT; (void)s; return OK; }
int cuStreamWaitEvent(void *s, void *e, unsigned f) { BEGIN; NEED_CONTEXT; (void)s, (void)e, (void)f; return OK; }
int cuStreamIsCapturing(void *s, int *v) { BEGIN; NEED_CONTEXT; *v = s == capturing; return OK; }

typedef void play_fn(const char *name, const unsigned *grid, const unsigned *block, void **parameters);
typedef struct module { play_fn *play; size_t parameter_bytes; } module;        /* play: where the image is a library for this processor, by nvrtc.c */

/* A graph is the launches of such modules that its capture saw, at most MAX_NODES; it stays until the process ends. */
enum { MAX_NODES = 64 };
typedef struct node { play_fn *play; char name[40]; unsigned grid[3], block[3]; void *parameter; } node;
typedef struct graph { int num_nodes; node nodes[MAX_NODES]; } graph;
static graph *captured;

int cuStreamBeginCapture_v2(void *s, int m) { BEGIN; (void)m; capturing = s; captured = calloc(1, sizeof *captured); return OK; }
int cuStreamEndCapture(void *s, void **g) { BEGIN; (void)s; capturing = NULL; *g = captured; return OK; }
int cuThreadExchangeStreamCaptureMode(int *m) { const int old = mode; num_calls++; mode = *m; *m = old; return OK; }
int cuGraphInstantiateWithFlags(void **x, void *g, address f) { BEGIN; (void)f; *x = g; return OK; }
int cuGraphUpload(void *x, void *s) { BEGIN; (void)x, (void)s; return OK; }
int cuGraphLaunch(void *x, void *s)
{
    BEGIN;
    (void)s;
    const graph *g = x;
    for (int i = 0; i < g->num_nodes; i++) g->nodes[i].play(g->nodes[i].name, g->nodes[i].grid, g->nodes[i].block, (void *[]){ g->nodes[i].parameter });
    return OK;
}
int cuGraphExecDestroy(void *x) { BEGIN; (void)x; return OK; }
int cuGraphDestroy(void *g) { BEGIN; (void)g; return OK; }

int cuEventCreate(void **e, unsigned f) { BEGIN; NEED_CONTEXT; (void)f; *e = malloc(1); return OK; }
int cuEventDestroy_v2(void *e) { BEGIN; NEED_CONTEXT; free(e); return OK; }
int cuEventRecord(void *e, void *s) { BEGIN; NEED_CONTEXT; (void)e, (void)s; return OK; }
int cuEventQuery(void *e) { BEGIN; NEED_CONTEXT; UNSAFE; (void)e; return OK; }
int cuEventSynchronize(void *e) { BEGIN; NEED_CONTEXT; UNSAFE; (void)e; return OK; }
int cuEventElapsedTime(float *ms, void *a, void *b) { BEGIN; NEED_CONTEXT; (void)a, (void)b; *ms = 1.5f; return OK; }

void fake_play(const char *name, const unsigned *grid, const unsigned *block, void **parameters) __attribute__((weak));

static struct function { void *module; char name[40]; } functions[64];

/* The functions of a library in memory, none where the image is none. The library stays. */
static module load_library(const unsigned char *image)
{
    module none = { 0 };
    char path[64];
    uint16_t machine, entry_bytes, entries;
    uint64_t table;
    memcpy(&machine, image + 18, 2);
    if (memcmp(image, "\177ELF", 4) || (machine != 62 && machine != 183)) return none;
    memcpy(&table, image + 40, 8);      /* sections are described at the image's end */
    memcpy(&entry_bytes, image + 58, 2);
    memcpy(&entries, image + 60, 2);
    const size_t size = table + (size_t)entry_bytes * entries;
    const int file = memfd_create("module", 0);
    if (file < 0 || write(file, image, size) != (ssize_t)size) return none;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);        /* the file stays open: loaded libraries are known by their paths */
    if (!library) fprintf(stderr, "%s\n", dlerror());
    if (!library) return none;
    return (module){ (play_fn *)(uintptr_t)dlsym(library, "fake_play"), *(const size_t *)dlsym(library, "fake_parameter_bytes") };
}

/* A module is an ELF image or PTX; a function is a name in it. */
int cuModuleLoadData(void **m, const void *image)
{
    BEGIN; NEED_CONTEXT; UNSAFE;
    if (memcmp(image, "\177ELF", 4) && !strstr(image, ".version")) return 200;
    num_loads++;
    module *x = *m = malloc(sizeof *x);
    *x = load_library(image);
    return OK;
}
int cuModuleUnload(void *m) { BEGIN; NEED_CONTEXT; UNSAFE; num_unloads++; free(m); return OK; }
int cuModuleGetFunction(void **f, void *m, const char *name)
{
    BEGIN; NEED_CONTEXT;
    if (!strcmp(name, "absent")) return NOT_FOUND;
    for (int i = 0; i < 64; i++) {
        struct function *x = &functions[i];
        if (!x->module) snprintf(x->name, sizeof x->name, "%s", name), x->module = m;
        *f = x;
        if (x->module == m && !strcmp(x->name, name)) return OK;
    }
    return NO_MEMORY;
}
int cuModuleGetGlobal_v2(address *p, size_t *n, void *m, const char *name) { BEGIN; NEED_CONTEXT; (void)m, (void)name; *p = 64; *n = 8; return OK; }
int cuFuncGetAttribute(int *v, int a, void *f) { BEGIN; NEED_CONTEXT; (void)f; *v = a * 10; return OK; }
int cuFuncSetAttribute(void *f, int a, int v) { BEGIN; NEED_CONTEXT; (void)f, (void)a, (void)v; return OK; }
int cuFuncLoad(void *f) { BEGIN; NEED_CONTEXT; UNSAFE; (void)f; return OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int t, size_t s) { BEGIN; NEED_CONTEXT; (void)f, (void)s; *n = 2048 / t; return OK; }

struct launch { unsigned grid[3], block[3], shared; void *stream; struct { int id; char pad[4]; int value[16]; } *attributes; unsigned count; };

int cuLaunchKernelEx(const struct launch *l, void *f, void **parameters, void **extra)
{
    BEGIN; NEED_CONTEXT;
    (void)extra;
    const struct function *function = f;                /* tests launch what is none, too */
    const module *m = function >= functions && function < functions + 64 ? function->module : NULL;
    if (m && m->play) {
        m->play(function->name, l->grid, l->block, parameters);
        if (l->stream == capturing && capturing && captured->num_nodes < MAX_NODES) {
            node *n = &captured->nodes[captured->num_nodes++];
            n->play = m->play;
            memcpy(n->name, function->name, sizeof n->name);
            memcpy(n->grid, l->grid, sizeof n->grid);
            memcpy(n->block, l->block, sizeof n->block);
            n->parameter = malloc(m->parameter_bytes);
            memcpy(n->parameter, parameters[0], m->parameter_bytes);
        }
    }
    else if (fake_play) fake_play(function->name, l->grid, l->block, parameters);
    int at = snprintf(last_launch, sizeof last_launch, "grid %u %u %u block %u %u %u shared %u parameter %d", l->grid[0], l->grid[1], l->grid[2],
                      l->block[0], l->block[1], l->block[2], l->shared, *(int *)parameters[0]);
    for (unsigned i = 0; i < l->count; i++)
        at += snprintf(last_launch + at, sizeof last_launch - (size_t)at, " attribute %d=%d", l->attributes[i].id, l->attributes[i].value[0]);
    return OK;
}

int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *p, const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *steps, int interleave, int swizzle, int promotion, int fill)
{
    BEGIN; NEED_CONTEXT;
    (void)p, (void)strides, (void)box, (void)interleave, (void)promotion, (void)fill;
    memset(map, 0, 128);
    *(uint64_t *)map = dims[0] * 1000 + rank * 100 + (uint64_t)type * 10 + (uint64_t)swizzle + steps[rank - 1] - 1;
    return OK;
}

#ifndef FAKE_OLD

/* Knows every name in the version that the symbols above are of. */
int cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, int *found)
{
    char symbol[80];
    (void)version, (void)flags;
    Dl_info self;
    dladdr((void *)(uintptr_t)&cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    snprintf(symbol, sizeof symbol, "%s_v2", name);
    *f = dlsym(library, symbol);
    if (!*f) *f = dlsym(library, name);
    *found = *f ? 0 : 1;
    return *f ? OK : NOT_FOUND;
}
#endif
