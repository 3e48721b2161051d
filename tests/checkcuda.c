/* SPDX-License-Identifier: Apache-2.0 */
/* checkcuda.c -- the driver layer and the run-time compiler on the GPUs of this machine: a cold and a warm start with their times, launches,
 * captures, forks, every device. Needs nothing but libc, the driver and NVRTC. Exit status: 0 passed, 1 failed, 77 there is no GPU.
 *
 *     checkcuda [CACHE_DIR]        CACHE_DIR: measure a warm start from it in this fresh process too (a run before has filled it) */
#include "cuda/jit.h"
#include "os.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N = 1000 };

static int passed, failed;
static fv_error err;

static bool check(bool fine, const char *what)
{
    fine ? passed++ : failed++;
    if (!fine) printf("FAILED: %s: %s\n", what, err.text);
    err.text[0] = 0;
    return fine;
}

#define CHECK(condition) check((condition), #condition)
#define CALL(call) check((call) == FV_OK, #call)

static const char kernel_text[] =
    "extern \"C\" __global__ void add(float *p, float x, int n)\n"
    "{\n"
    "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "#if __CUDA_ARCH__ >= 900\n"
    "    asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
    "#endif\n"
    "    if (i < n) p[i] += x * SCALE;\n"
    "}\n";

static const fv__jit_text text = { "add.cu", kernel_text };
static const char *const by_one[] = { "-DSCALE=1.0f" }, *const by_two[] = { "-DSCALE=2.0f" };
static const fv__cuda_program add_one = { .name = "add_1", .source = "add.cu", .extra = &text, .num_extra = 1, .options = by_one, .num_options = 1 };
static const fv__cuda_program add_two = { .name = "add_2", .source = "add.cu", .extra = &text, .num_extra = 1, .options = by_two, .num_options = 1 };

typedef struct bench {
    fv__cuda_device *device;
    fv__jit_cache *cache;
    fv__cuda_jit *jit;
    CUstream stream;
    CUdeviceptr p;
    float host[N];
} bench;

static double ms_since(int64_t before)
{
    return (double)(fv__os_now_ns() - before) * 1e-6;
}

/* From nothing but an open device to a function: what a first plan of a process pays for its kernel. */
static CUfunction start(bench *b, const char *dir, const char *what)
{
    CUfunction f = NULL;
    fv__jit_stats s = { 0 };
    fv__cuda_jit_stats j = { 0 };
    const fv__log log = { .level = FV_LOG_WARN };
    const fv__jit_cache_desc desc = { .dir = dir, .kernel_path = "", .log = &log };
    const int64_t before = fv__os_now_ns();
    if (!CALL(fv__jit_cache_open(&desc, &b->cache, &err)) || !CALL(fv__cuda_jit_open(b->device, b->cache, &log, &b->jit, &err))) return NULL;
    CALL(fv__cuda_jit_function(b->jit, &add_one, "add", NULL, &f, &err));
    const double took = ms_since(before);
    fv__jit_cache_stats(b->cache, &s);
    fv__cuda_jit_stats_of(b->jit, &j);
    printf("%s: %.2f ms (compiled %lld in %.2f ms, disk hits %lld, read %.3f ms, loaded %lld in %.3f ms; %s %s)\n", what, took, (long long)s.compiles,
           (double)s.compile_ns * 1e-6, (long long)s.disk_hits, (double)s.load_ns * 1e-6, (long long)j.modules, (double)j.load_ns * 1e-6,
           fv__cuda_jit_compiler(b->jit), fv__cuda_jit_compiler_path(b->jit));
    return f;
}

static void stop(bench *b)
{
    fv__cuda_jit_close(&b->jit);
    fv__jit_cache_close(&b->cache);
}

static bool launch(bench *b, CUfunction f, float x, bool overlap, unsigned cluster)
{
    int n = N;
    void *parameters[] = { &b->p, &x, &n };
    const fv__cuda_launch l = { .function = f, .stream = b->stream, .grid = { 8 }, .block = { 128 }, .overlap = overlap, .cluster_x = cluster };
    return fv__cuda_launch_kernel(b->device, &l, parameters, &err) == FV_OK;
}

/* What the device holds now is `want` everywhere. */
static bool holds(bench *b, float want)
{
    memset(b->host, 0, sizeof b->host);
    if (fv__cuda_to_host(b->device, b->host, b->p, sizeof b->host, b->stream, &err) != FV_OK) return false;
    if (fv__cuda_stream_sync(b->device, b->stream, &err) != FV_OK) return false;
    for (int i = 0; i < N; i++)
        if (b->host[i] != want) return snprintf(err.text, sizeof err.text, "[%d] = %g, not %g", i, b->host[i], want), false;
    return true;
}

static void launches(bench *b, CUfunction f)
{
    fv__cuda_kernel_facts facts;
    int blocks = 0;
    CALL(fv__cuda_fill_bytes(b->device, b->p, 0, N * sizeof(float), b->stream, &err));
    CHECK(launch(b, f, 1, false, 0) && holds(b, 1));
    const bool hopper = b->device->facts.cc_major >= 9;
    for (int i = 0; i < 10; i++) CHECK(launch(b, f, 1, hopper, 0));
    CHECK(holds(b, 11));
    if (b->device->facts.clusters) CHECK(launch(b, f, 1, true, 2) && holds(b, 12));
    CALL(fv__cuda_kernel_inspect(b->device, f, &facts, &err));
    CALL(fv__cuda_kernel_shared(b->device, f, b->device->facts.shared_per_block_optin, &err));
    CALL(fv__cuda_kernel_occupancy(b->device, f, 128, 0, &blocks, &err));
    printf("kernel: %d registers, %d bytes local, %d blocks of 128 an SM\n", facts.registers, facts.local_bytes, blocks);
    CHECK(facts.registers > 0 && facts.local_bytes == 0 && blocks > 0);
    CHECK(fv__cuda_pointer_device(b->device, (void *)(uintptr_t)b->p) == b->device->ordinal);
    CHECK(fv__cuda_pointer_device(b->device, b) == -1);
}

/* A capture in the strictest mode: what is loaded may be launched; what is not is "not ready"; allocations of ours do not break it. */
static void captures(bench *b, CUfunction f)
{
    const fv__cuda_api *cu = &b->device->api;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    CUfunction late = NULL;
    CUdeviceptr extra = 0;
    void *pinned = NULL;
    CALL(fv__cuda_fill_bytes(b->device, b->p, 0, N * sizeof(float), b->stream, &err));
    CALL(fv__cuda_stream_sync(b->device, b->stream, &err));
    if (!CALL(fv__cuda_enter(b->device, &err))) return;
    CHECK(!cu->cuStreamBeginCapture(b->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(launch(b, f, 1, false, 0));
    CHECK(fv__cuda_jit_function(b->jit, &add_two, "add", b->stream, &late, &err) == FV_E_NOT_READY);
    CALL(fv__cuda_alloc(b->device, 1 << 20, &extra, &err));
    CALL(fv__cuda_alloc_pinned(b->device, 1 << 20, &pinned, &err));
    CALL(fv__cuda_jit_function(b->jit, &add_two, "add", NULL, &late, &err));        /* for another stream: loads, and the capture lives */
    CHECK(launch(b, late, 1, b->device->facts.cc_major >= 9, 0));
    CHECK(!cu->cuStreamEndCapture(b->stream, &graph) && graph);
    CHECK(!cu->cuGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 0; i < 3; i++) CHECK(!cu->cuGraphLaunch(exec, b->stream));
    CHECK(holds(b, 9));
    if (exec) cu->cuGraphExecDestroy(exec);
    if (graph) cu->cuGraphDestroy(graph);
    fv__cuda_leave(b->device);
    fv__cuda_free(b->device, extra);
    fv__cuda_free_pinned(b->device, pinned);
}

static void failures(bench *b)
{
    CUmodule m;
    CUfunction f;
    CUdeviceptr p;
    CHECK(fv__cuda_module_load(b->device, "neither ELF nor PTX", &m, &err) == FV_E_DEVICE && strstr(err.text, "CUDA_ERROR"));
    CHECK(fv__cuda_alloc(b->device, (size_t)1 << 46, &p, &err) == FV_E_NO_MEMORY && strstr(err.text, "CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK(fv__cuda_jit_function(b->jit, &add_one, "absent", NULL, &f, &err) == FV_E_DEVICE && strstr(err.text, "absent"));
    int status = 1;
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) _exit(fv__cuda_alloc(b->device, 64, &p, &err) == FV_E_DEVICE && strstr(err.text, "fork") ? 0 : 1);
    waitpid(pid, &status, 0);
    CHECK(status == 0);
}

/* What a call costs on the host: how far fv_run's launch is from the driver's own. */
static void overheads(bench *b, CUfunction f)
{
    enum { LAUNCHES = 2000 };
    fv__cuda_stream_sync(b->device, b->stream, NULL);
    int64_t before = fv__os_now_ns();
    for (int i = 0; i < LAUNCHES; i++) launch(b, f, 0, false, 0);
    const double launch_us = ms_since(before) * 1e3 / LAUNCHES;
    fv__cuda_stream_sync(b->device, b->stream, NULL);
    before = fv__os_now_ns();
    for (int i = 0; i < LAUNCHES; i++) {
        fv__cuda_enter(b->device, NULL);
        fv__cuda_leave(b->device);
    }
    printf("host: launch %.2f us, entering and leaving %.3f us\n", launch_us, ms_since(before) * 1e3 / LAUNCHES);
}

static void check_device(int ordinal, const char *dir, bool cold)
{
    bench b = { 0 };
    CUcontext before = NULL, after = NULL;
    const int64_t opening = fv__os_now_ns();
    if (!CALL(fv__cuda_device_open(ordinal, &b.device, &err))) return;
    const fv__cuda_facts *f = &b.device->facts;
    printf("%s: %s, sm_%d%d, %d SMs, %.1f GB, L2 %d MB, %d KB shared a block, driver %d, opened in %.0f ms\n", b.device->label, f->name, f->cc_major,
           f->cc_minor, f->num_sms, (double)f->memory_bytes * 1e-9, f->l2_bytes >> 20, f->shared_per_block_optin >> 10, b.device->api.version,
           ms_since(opening));
    b.device->api.cuCtxGetCurrent(&before);
    CALL(fv__cuda_stream_create(b.device, &b.stream, &err));
    CALL(fv__cuda_alloc(b.device, N * sizeof(float), &b.p, &err));
    if (cold && start(&b, dir, "cold start")) stop(&b);
    CUfunction function = start(&b, dir, cold || !ordinal ? "warm start" : "start");
    if (function) {
        launches(&b, function);
        captures(&b, function);
        failures(&b);
        overheads(&b, function);
    }
    b.device->api.cuCtxGetCurrent(&after);
    CHECK(before == after);
    stop(&b);
    fv__cuda_free(b.device, b.p);
    fv__cuda_stream_destroy(b.device, b.stream);
    fv__cuda_device_close(&b.device);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/checkcuda_XXXXXX";
    int count = 0;
    if (fv__cuda_count(&count, &err) != FV_OK) {
        printf("not run: %s\n", err.text);
        return 77;
    }
    if (argc > 1) check_device(0, argv[1], false);
    else if (CHECK(mkdtemp(folder)))
        for (int i = 0; i < count; i++) check_device(i, folder, i == 0);
    if (argc == 1) nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
