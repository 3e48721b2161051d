/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.c -- see gpu.h. */
#include "gpu.h"
#include "ctx.h"
#include "cuda/state.h"

#include <stdlib.h>
#include <string.h>

struct gpu {
    const fv__cuda_device *device;
    fv__cuda_jit *jit;
    CUstream stream;
    CUevent start, end;
    CUfunction read, multiply[2];       /* of ceiling.cu; NULL: not loaded yet */
    char *nowhere, *numbers;            /* what the ceilings write and multiply; NULL: not yet */
};

struct gpu_graph {
    CUgraph graph;
    CUgraphExec exec;
};

enum { NUMBERS = 3072, TURNS = 4000, SUMS = 16 };               /* as ceiling.cu has them */

static void must(fv_status status, const fv_error *err)
{
    if (status == FV_OK)
        return;
    cli_failed("the GPU", err);
    exit(CLI_FAILED);
}

static void must_driver(const gpu *g, CUresult result, const char *what)
{
    fv_error err = { 0 };
    must(fv__cuda_status(g->device, result, what, &err), &err);
}

/* ---- opening ---- */

/* The context stays current until gpu_close, as it is in a program that computes on the GPU. */
void gpu_open(fv_ctx *ctx, gpu **out)
{
    fv_error err = { 0 };
    *out = NULL;
    if (!ctx->cuda)
        return;
    gpu *g = need(1, sizeof *g);
    g->device = ctx->cuda->device;
    g->jit = ctx->cuda->jit;
    must(fv__cuda_enter(g->device, &err), &err);
    must(fv__cuda_stream_create(g->device, &g->stream, &err), &err);
    must(fv__cuda_event_create(g->device, true, &g->start, &err), &err);
    must(fv__cuda_event_create(g->device, true, &g->end, &err), &err);
    *out = g;
}

void gpu_close(gpu **gp)
{
    gpu *g = *gp;
    *gp = NULL;
    if (!g)
        return;
    gpu_release(g, g->nowhere);
    gpu_release(g, g->numbers);
    fv__cuda_event_destroy(g->device, g->start);
    fv__cuda_event_destroy(g->device, g->end);
    fv__cuda_stream_destroy(g->device, g->stream);
    fv__cuda_leave(g->device);
    free(g);
}

fv_stream gpu_stream(const gpu *g) { return g ? g->stream : NULL; }
const char *gpu_name(const gpu *g) { return g ? g->device->facts.name : ""; }
int64_t gpu_cache_bytes(const gpu *g) { return g ? g->device->facts.l2_bytes : 0; }

int64_t gpu_free_bytes(const gpu *g)
{
    size_t left = 0, total = 0;
    if (g)
        must_driver(g, g->device->api.cuMemGetInfo(&left, &total), "cuMemGetInfo");
    return (int64_t)left;
}

/* ---- memory ---- */

static CUdeviceptr address(const char *at) { return (CUdeviceptr)(uintptr_t)at; }

char *gpu_allocate(gpu *g, int64_t bytes)
{
    fv_error err = { 0 };
    CUdeviceptr p = 0;
    const fv_status status = fv__cuda_alloc(g->device, (size_t)bytes, &p, &err);
    if (status != FV_E_NO_MEMORY)
        must(status, &err);
    return (char *)(uintptr_t)p;
}

void gpu_release(gpu *g, char *memory)
{
    if (g && memory)
        fv__cuda_free(g->device, address(memory));
}

void gpu_clear(gpu *g, char *to, int64_t bytes)
{
    fv_error err = { 0 };
    if (g)
        must(fv__cuda_fill_bytes(g->device, address(to), 0, (size_t)bytes, g->stream, &err), &err);
}

/* Waits: the host's memory may change as soon as this returns. */
void gpu_put(gpu *g, char *to, const char *from, int64_t bytes)
{
    fv_error err = { 0 };
    if (g)
        must(fv__cuda_to_device(g->device, address(to), from, (size_t)bytes, g->stream, &err),
             &err);
    gpu_wait(g);
}

void gpu_get(gpu *g, char *to, const char *from, int64_t bytes)
{
    fv_error err = { 0 };
    if (g)
        must(fv__cuda_to_host(g->device, to, address(from), (size_t)bytes, g->stream, &err), &err);
}

void gpu_copy(gpu *g, char *to, const char *from, int64_t bytes)
{
    fv_error err = { 0 };
    if (g)
        must(fv__cuda_copy(g->device, address(to), address(from), (size_t)bytes, g->stream, &err),
             &err);
}

void gpu_wait(gpu *g)
{
    fv_error err = { 0 };
    if (g)
        must(fv__cuda_stream_sync(g->device, g->stream, &err), &err);
}

/* ---- graphs ---- */

void gpu_capture(gpu *g)
{
    if (g)
        must_driver(g, g->device->api.cuStreamBeginCapture(g->stream,
                                                           CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                    "cuStreamBeginCapture");
}

gpu_graph *gpu_captured(gpu *g)
{
    if (!g)
        return NULL;
    const fv__cuda_api *api = &g->device->api;
    gpu_graph *graph = need(1, sizeof *graph);
    if (api->cuStreamEndCapture(g->stream, &graph->graph) != CUDA_SUCCESS || !graph->graph) {
        free(graph);
        return NULL;
    }
    must_driver(g, api->cuGraphInstantiateWithFlags(&graph->exec, graph->graph, 0),
                "cuGraphInstantiate");
    must_driver(g, api->cuGraphUpload(graph->exec, g->stream), "cuGraphUpload");
    return graph;
}

double gpu_time(gpu *g, gpu_graph *graph)
{
    fv_error err = { 0 };
    float ms = 0;
    if (!g || !graph)
        return 0;
    must(fv__cuda_event_record(g->device, g->start, g->stream, &err), &err);
    must_driver(g, g->device->api.cuGraphLaunch(graph->exec, g->stream), "cuGraphLaunch");
    must(fv__cuda_event_record(g->device, g->end, g->stream, &err), &err);
    must(fv__cuda_event_sync(g->device, g->end, &err), &err);
    must(fv__cuda_event_ms(g->device, g->start, g->end, &ms, &err), &err);
    return 1e-3 * (double)ms;
}

void gpu_graph_free(gpu *g, gpu_graph *graph)
{
    if (!g || !graph)
        return;
    g->device->api.cuGraphExecDestroy(graph->exec);
    g->device->api.cuGraphDestroy(graph->graph);
    free(graph);
}

/* ---- ceilings ---- */

/* bf16 pairs of both signs, from 0.5 to 1: no sum of them overflows in TURNS turns. */
static void make_numbers(gpu *g)
{
    uint32_t numbers[NUMBERS];
    for (uint32_t i = 0; i < NUMBERS; i++)
        numbers[i] = ((uint32_t)mix64(5, i) & 0x807f807fu) | 0x3f003f00u;
    gpu_put(g, g->numbers, (const char *)numbers, sizeof numbers);
}

static bool load_ceilings(gpu *g)
{
    static const char *const names[] = { "read", "multiply", "multiply32" };
    CUfunction *const functions[] = { &g->read, &g->multiply[0], &g->multiply[1] };
    const fv__cuda_program program = { .name = "ceiling", .source = "ceiling.cu" };
    fv_error err = { 0 };
    for (int i = 0; i < 3 && !*functions[i]; i++)
        if (fv__cuda_jit_function(g->jit, &program, names[i], g->stream, functions[i], &err) !=
            FV_OK) {
            cli_failed("cannot measure this GPU's ceilings", &err);
            return false;
        }
    if (!g->nowhere && (!(g->nowhere = gpu_allocate(g, 64)) ||
                        !(g->numbers = gpu_allocate(g, NUMBERS * sizeof(uint32_t))))) {
        cli_fail("out of memory on the GPU");
        return false;
    }
    make_numbers(g);
    return true;
}

static void launch(gpu *g, CUfunction function, int blocks_per_sm, unsigned threads,
                   void **parameters)
{
    fv_error err = { 0 };
    const fv__cuda_launch l = { .function = function, .stream = g->stream,
                                .grid = { (unsigned)(g->device->facts.num_sms * blocks_per_sm) },
                                .block = { threads } };
    must(fv__cuda_launch_kernel(g->device, &l, parameters, &err), &err);
}

bool gpu_time_read(gpu *g, const char *at, int64_t bytes, int64_t step, int times, double *seconds)
{
    *seconds = 0;
    if (!g || !load_ceilings(g))
        return false;
    gpu_capture(g);
    for (int i = 0; i < times; i++) {
        const char *from = at + i * step;
        uint64_t count = (uint64_t)bytes / 16;
        void *parameters[] = { &from, &count, &g->nowhere };
        launch(g, g->read, 4, 256, parameters);
    }
    gpu_graph *graph = gpu_captured(g);
    *seconds = gpu_time(g, graph) / times;
    gpu_graph_free(g, graph);
    return true;
}

bool gpu_multiply_rate(gpu *g, bool narrow, gpu_multiplier *out)
{
    enum { BLOCKS = 2, THREADS = 128 };
    int turns = TURNS;
    if (!g || !load_ceilings(g))
        return false;
    gpu_capture(g);
    void *parameters[] = { &g->numbers, &g->nowhere, &turns };
    launch(g, g->multiply[!narrow], BLOCKS, THREADS, parameters);
    gpu_graph *graph = gpu_captured(g);
    const double seconds = gpu_time(g, graph),
                 warps = (double)g->device->facts.num_sms * BLOCKS * THREADS / 32,
                 flops = warps * turns * SUMS * (narrow ? 4096 : 2048.0 / 3);
    gpu_graph_free(g, graph);
    *out = (gpu_multiplier){ narrow ? "mma.sync bf16" : "mma.sync tf32 x 3", flops / seconds };
    return true;
}

double gpu_time_launch(gpu *g)
{
    enum { TIMES = 64 };
    uint64_t nothing = 0;
    if (!g || !load_ceilings(g))
        return -1;
    void *parameters[] = { &g->numbers, &nothing, &g->nowhere };
    const CUlaunchConfig config = { .grid_x = 1, .grid_y = 1, .grid_z = 1, .block_x = 32,
                                    .block_y = 1, .block_z = 1, .stream = g->stream };
    const double start = cli_now();
    for (int i = 0; i < TIMES; i++)
        must_driver(g, g->device->api.cuLaunchKernelEx(&config, g->read, parameters, NULL),
                    "cuLaunchKernelEx");
    const double seconds = (cli_now() - start) / TIMES;
    gpu_wait(g);
    return seconds;
}
