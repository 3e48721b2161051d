/* SPDX-License-Identifier: Apache-2.0 */
/* fibers.h -- a block of a CUDA kernel played on the CPU: what simt.cpp and player.cpp share. The kernel's text is C++ then; the words of CUDA that it uses
 * stand here.
 *
 * A thread of a block is a stack of its own; it runs until it comes to a barrier, of its warp or of its block. Warps wait for all of their live threads,
 * blocks for all of theirs; a barrier that some thread never comes to is found as a deadlock. Blocks run one after another.
 *
 * Whoever includes this has defined MAX_THREADS, STACK (bytes of one), and __shared__. */
#ifndef FAKE_FIBERS_H
#define FAKE_FIBERS_H

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
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct index3 { unsigned x, y, z; };

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return { x, y }; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return { x, y, z, w }; }
static inline float2 make_float2(float x, float y) { return { x, y }; }
static inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
static inline float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline float __int_as_float(int u) { return __uint_as_float((uint32_t)u); }
static inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static inline void __threadfence() { }
static inline void __threadfence_system() { }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldg(const T *p) { return *p; }
static inline int64_t __double_as_longlong(double x) { int64_t u; memcpy(&u, &x, 8); return u; }
static inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
template <class T> static inline T add_to(T *p, T x) { const T old = *p; *p = old + x; return old; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long x) { return add_to(p, x); }
static inline int atomicAdd(int *p, int x) { return add_to(p, x); }
static inline float atomicAdd(float *p, float x) { return add_to(p, x); }
static inline int atomicMin(int *p, int x) { const int old = *p; *p = x < old ? x : old; return old; }
static inline int atomicMax(int *p, int x) { const int old = *p; *p = x > old ? x : old; return old; }
static inline uint32_t atomicOr(uint32_t *p, uint32_t x) { const uint32_t old = *p; *p = old | x; return old; }

/* ------------------------------------------------------------------------------------------------------------- threads */

enum wait { RUN, WARP, BLOCK, DONE };

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
static const void *exchange[MAX_THREADS];
static void (*body)(const void *);
static const void *parameter;

static void pause_at(wait state)
{
    fibers[current].state = state;
    if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}

static inline void __syncthreads() { pause_at(BLOCK); }
static inline void __syncwarp() { pause_at(WARP); }

/* f of what every lane brings. */
template <class T, class F> static auto among(const T &mine, F f)
{
    exchange[current] = &mine;
    __syncwarp();
    const auto x = f([](int lane) -> const T & { return *(const T *)exchange[current / 32 * 32 + lane]; });
    __syncwarp();
    return x;
}

static inline unsigned __ballot_sync(unsigned, bool x)
{
    return among(x, [](auto of) { unsigned m = 0; for (int i = 0; i < 32; i++) m |= (unsigned)of(i) << i; return m; });
}
static inline bool __any_sync(unsigned m, bool x) { return __ballot_sync(m, x) != 0; }
static inline int __reduce_add_sync(unsigned, int x)
{
    return among(x, [](auto of) { int s = 0; for (int i = 0; i < 32; i++) s += of(i); return s; });
}
template <class T> static inline T __shfl_sync(unsigned, T x, int from) { return among(x, [from](auto of) { return of(from & 31); }); }
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int by)
{
    const int from = current % 32 ^ by;
    return among(x, [from](auto of) { return of(from); });
}
template <class T> static inline T __shfl_up_sync(unsigned, T x, int by)
{
    const int from = current % 32 < by ? current % 32 : current % 32 - by;
    return among(x, [from](auto of) { return of(from); });
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

/* The block blockIdx of num_threads, a multiple of 32. Warps in another order in each round: nobody may count on warp 0 being first. */
static void run_block()
{
    unsigned turn = blockIdx.x;
    if (num_threads % 32 || num_threads > MAX_THREADS) {
        fprintf(stderr, "played: a block of %d threads\n", num_threads);
        abort();
    }
    for (int i = 0; i < num_threads; i++) {
        if (!fibers[i].stack) fibers[i].stack = (char *)malloc(STACK);
        fibers[i].started = false;
        fibers[i].state = RUN;
    }
    for (;; turn = turn * 5 + 1) {
        int done = 0;
        bool moved = false;
        for (volatile int i = 0; i < num_threads; i = i + 1) {
            const int warp = (int)((i / 32 + turn) % (unsigned)(num_threads / 32)), t = warp * 32 + i % 32;
            if (fibers[t].state == RUN) resume(t), moved = true;
        }
        for (int i = 0; i < num_threads; i++) done += fibers[i].state == DONE;
        if (done == num_threads) return;
        for (int w = 0; w < num_threads; w += 32) moved = release(w, w + 32, WARP) || moved;
        if (!moved) moved = release(0, num_threads, BLOCK);
        if (!moved) {
            fprintf(stderr, "played: block %u %u: threads wait for each other\n", blockIdx.x, blockIdx.y);
            abort();
        }
    }
}

#endif
