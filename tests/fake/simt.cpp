/* SPDX-License-Identifier: Apache-2.0 */
/* simt.cpp -- the simple kernels (appends, copies, norms, samples and the like) played on the CPU, for machines without a GPU: the same texts, compiled as
 * C++. Linked with cuda.c into a driver whose launches run them.
 *
 * A thread of a block is a stack of its own; it runs until it comes to a barrier. Warps wait for all of their live threads, blocks for all of theirs; a
 * barrier that some thread never comes to is found as a deadlock. Blocks run one after another, so shared memory is static. */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __CUDACC__
#define __CUDACC_RTC__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct index3 { unsigned x, y, z; };

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return { x, y }; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return { x, y, z, w }; }
static inline float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline float __int_as_float(int u) { return __uint_as_float((uint32_t)u); }
static inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static inline void __threadfence_system() { }
static inline int atomicAdd(int *p, int x) { const int old = *p; *p += x; return old; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long x) { const unsigned long long old = *p; *p += x; return old; }
static inline uint64_t __cvta_generic_to_shared(const void *p) { return (uint64_t)p; }

/* ------------------------------------------------------------------------------------------------------------- threads */

enum wait { RUN, WARP, BLOCK, DONE };
enum { MAX_THREADS = 1024, STACK = 64 << 10 };

struct fiber {
    jmp_buf at;
    ucontext_t start;
    char *stack;
    bool started;
    wait state;
};

static fiber fibers[MAX_THREADS];
static jmp_buf scheduler;
static ucontext_t here;
static int current, num_threads;
static index3 blockIdx, blockDim, gridDim, threadIdx;
static uint64_t exchange[MAX_THREADS];
static void (*body)(const void *);
static const void *parameter;

static void pause_at(wait state)
{
    fibers[current].state = state;
    if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}

static inline void __syncthreads() { pause_at(BLOCK); }
static inline void __syncwarp() { pause_at(WARP); }

/* Every lane's value, then f over them. */
template <class F> static uint64_t among(uint64_t mine, F f)
{
    exchange[current] = mine;
    __syncwarp();
    const uint64_t x = f(&exchange[current / 32 * 32]);
    __syncwarp();
    return x;
}

static inline unsigned __ballot_sync(unsigned, bool x)
{
    return (unsigned)among(x, [](const uint64_t *all) { uint64_t m = 0; for (int i = 0; i < 32; i++) m |= (all[i] & 1) << i; return m; });
}

static inline int __reduce_add_sync(unsigned, int x)
{
    return (int)among((uint64_t)(int64_t)x, [](const uint64_t *all) { uint64_t s = 0; for (int i = 0; i < 32; i++) s += all[i]; return s; });
}

static inline uint64_t __shfl_xor_sync(unsigned, uint64_t x, int by)
{
    const int from = current % 32 ^ by;
    return among(x, [from](const uint64_t *all) { return all[from]; });
}
static inline float __shfl_xor_sync(unsigned, float x, int by)
{
    const int from = current % 32 ^ by;
    return __uint_as_float((uint32_t)among(__float_as_uint(x), [from](const uint64_t *all) { return all[from]; }));
}

static inline uint64_t __shfl_sync(unsigned, uint64_t x, int from)
{
    return among(x, [from](const uint64_t *all) { return all[from]; });
}

static inline uint64_t __shfl_up_sync(unsigned, uint64_t x, int by)
{
    const int from = current % 32 < by ? current % 32 : current % 32 - by;
    return among(x, [from](const uint64_t *all) { return all[from]; });
}

static void begin()
{
    body(parameter);
    fibers[current].state = DONE;
    _longjmp(scheduler, 1);
}

static void resume(int i)
{
    current = i;
    threadIdx = { (unsigned)i, 0, 0 };
    if (_setjmp(scheduler)) return;
    fiber *f = &fibers[i];
    if (f->started) _longjmp(f->at, 1);
    f->started = true;
    getcontext(&f->start);
    f->start.uc_stack.ss_sp = f->stack;
    f->start.uc_stack.ss_size = STACK;
    makecontext(&f->start, begin, 0);
    swapcontext(&here, &f->start);
}

/* Threads [first, last) that all wait for `state` or are done go on. */
static bool release(int first, int last, wait state)
{
    bool any = false;
    for (int i = first; i < last; i++) {
        if (fibers[i].state != state && fibers[i].state != DONE) return false;
        any = any || fibers[i].state == state;
    }
    for (int i = first; i < last && any; i++) if (fibers[i].state == state) fibers[i].state = RUN;
    return any;
}

static void run_block()
{
    for (int i = 0; i < num_threads; i++) {
        if (!fibers[i].stack) fibers[i].stack = (char *)malloc(STACK);
        fibers[i].started = false;
        fibers[i].state = RUN;
    }
    for (;;) {
        int done = 0;
        bool moved = false;
        for (volatile int i = 0; i < num_threads; i = i + 1) {
            if (fibers[i].state == RUN) resume(i), moved = true;
            done += fibers[i].state == DONE;
        }
        if (done == num_threads) return;
        for (int w = 0; w < num_threads; w += 32) moved = release(w, w + 32, WARP) || moved;
        moved = release(0, num_threads, BLOCK) || moved;
        if (!moved) {
            fprintf(stderr, "simt: block %u %u: threads wait for each other\n", blockIdx.x, blockIdx.y);
            abort();
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------- kernels */

#include "../../src/cuda/base.cuh"
#include "../../src/cuda/plan.cuh"
#include "../../src/cuda/ops.cuh"
#include "../../src/cuda/companions.cuh"
#include "../../src/cuda/sample.cuh"
namespace of_append {
#include "../../src/cuda/kernels/append.cu"
}
namespace of_rope {
#include "../../src/cuda/kernels/rope.cu"
}
namespace of_merge {
#include "../../src/cuda/kernels/merge.cu"
}
namespace of_copy {
#include "../../src/cuda/kernels/copy_pages.cu"
}
namespace of_norm {
#include "../../src/cuda/kernels/norm.cu"
}
namespace of_act {
#include "../../src/cuda/kernels/act.cu"
}
namespace of_filter {
#include "../../src/cuda/kernels/filter.cu"
}
namespace of_sample {
#include "../../src/cuda/kernels/sample.cu"
}
namespace of_verify {
#include "../../src/cuda/kernels/verify.cu"
}
namespace of_stale {
#include "../../src/cuda/kernels/stale.cu"
}

static const struct { const char *name; void (*fn)(const void *); } kernels[] = {
    { "append", [](const void *p) { of_append::append(*(const d_append *)p); } },
    { "rope", [](const void *p) { of_rope::rope(*(const d_rope *)p); } },
    { "merge", [](const void *p) { of_merge::merge(*(const d_merge *)p); } },
    { "copy_pages", [](const void *p) { of_copy::copy_pages(*(const d_copies *)p); } },
    { "norm_rows", [](const void *p) { of_norm::norm_rows(*(const d_norm *)p); } },
    { "act", [](const void *p) { of_act::act(*(const d_act *)p); } },
    { "filter", [](const void *p) { of_filter::filter(*(const d_filter *)p); } },
    { "sample", [](const void *p) { of_sample::sample(*(const d_sample *)p); } },
    { "verify", [](const void *p) { of_verify::verify(*(const d_verify *)p); } },
    { "stale", [](const void *p) { of_stale::stale(*(const d_stale *)p); } },
};

/* cuda.c calls this where it is linked in. */
extern "C" void fake_play(const char *name, const unsigned *grid, const unsigned *block, void **parameters)
{
    body = NULL;
    for (const auto &k : kernels) if (!strcmp(k.name, name)) body = k.fn;
    if (!body) return;
    parameter = parameters[0];
    num_threads = (int)block[0];
    blockDim = { block[0], 1, 1 };
    gridDim = { grid[0], grid[1], 1 };
    for (unsigned y = 0; y < grid[1]; y++)
        for (unsigned x = 0; x < grid[0]; x++) {
            blockIdx = { x, y, 0 };
            run_block();
        }
}
