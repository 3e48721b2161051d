/* SPDX-License-Identifier: Apache-2.0 */
/* player.cpp -- the attention kernel played on the CPU, for machines without a GPU: the same text as C++. nvrtc.c beside this compiles it, with the
 * texts of one program in the include path, into a library that cuda.c loads in place of a cubin.
 *
 * A thread of a block is a stack of its own; it runs until it comes to a barrier, of its warp or of its block. Blocks run one after another, so a merge
 * is made by the last of them. Asynchronous copies happen when they are waited for, no earlier: what is used too soon is what was there before.
 * Shared memory begins as NaN. The instructions of ptx.cuh are here, lane by lane, by PTX's tables of fragments; products are summed in double. */
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
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define FV_PTX_CUH                      /* below */

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
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline void __threadfence() { }
static inline void __threadfence_system() { }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T add_to(T *p, T x) { const T old = *p; *p = old + x; return old; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long x) { return add_to(p, x); }
static inline int atomicAdd(int *p, int x) { return add_to(p, x); }
static inline float atomicAdd(float *p, float x) { return add_to(p, x); }
static inline int atomicMin(int *p, int x) { const int old = *p; *p = x < old ? x : old; return old; }
static inline int atomicMax(int *p, int x) { const int old = *p; *p = x > old ? x : old; return old; }
static inline uint32_t atomicOr(uint32_t *p, uint32_t x) { const uint32_t old = *p; *p = old | x; return old; }

/* ------------------------------------------------------------------------------------------------------------- threads */

enum wait { RUN, WARP, BLOCK, DONE };
enum { MAX_THREADS = 256, STACK = 256 << 10, SHARED = 232448, MAX_COPIES = 4096 };

struct copy { uint32_t to; int bytes, size; const void *from; };

struct fiber {
    jmp_buf at;
    ucontext_t start;
    char *stack;
    bool started;
    wait state;
    copy copies[MAX_COPIES];            /* asked for, in a ring; group_end[i % 16] of group i */
    int num_copies, first_copy, num_groups, first_group, group_end[16];
};

alignas(1024) unsigned char memory[SHARED];
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
template <class T> static inline T __shfl_sync(unsigned, T x, int from) { return among(x, [from](auto of) { return of(from & 31); }); }
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int by)
{
    const int from = current % 32 ^ by;
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

/* Warps in another order in each round: nobody may count on warp 0 being first. */
static void run_block()
{
    unsigned turn = blockIdx.x;
    memset(memory, 0xff, sizeof memory);
    for (int i = 0; i < num_threads; i++) {
        if (!fibers[i].stack) fibers[i].stack = (char *)malloc(STACK);
        fibers[i].started = false;
        fibers[i].state = RUN;
        fibers[i].num_copies = fibers[i].first_copy = fibers[i].num_groups = fibers[i].first_group = 0;
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
            fprintf(stderr, "player: block %u: threads wait for each other\n", blockIdx.x);
            abort();
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- instructions */

static inline uint64_t __cvta_generic_to_shared(const void *p) { return (uint64_t)((const unsigned char *)p - memory); }

#include "base.cuh"

static unsigned char *shared_at(uint32_t at, int bytes)
{
    if (at % (uint32_t)bytes || at + (uint32_t)bytes > SHARED) {
        fprintf(stderr, "player: %d bytes at %u of shared memory\n", bytes, at);
        abort();
    }
    return memory + at;
}

static void ask(uint32_t to, const void *from, int bytes, int size)
{
    fiber *f = &fibers[current];
    if (f->num_copies - f->first_copy == MAX_COPIES || (uintptr_t)from % (uintptr_t)size) {
        fprintf(stderr, "player: too many copies, or from %p\n", from);
        abort();
    }
    memset(shared_at(to, size), 0xff, (size_t)size);
    f->copies[f->num_copies++ % MAX_COPIES] = { to, bytes, size, from };
}

static inline void cp_async_cg_16(uint32_t to, const void *from) { ask(to, from, 16, 16); }
static inline void cp_async_ca_4(uint32_t to, const void *from, int bytes) { ask(to, from, bytes, 4); }

static inline void cp_async_commit_group()
{
    fiber *f = &fibers[current];
    f->group_end[f->num_groups++ % 16] = f->num_copies;
}

template <int N> static inline void cp_async_wait_group()
{
    fiber *f = &fibers[current];
    for (; f->num_groups - f->first_group > N; f->first_group++)
        for (; f->first_copy < f->group_end[f->first_group % 16]; f->first_copy++) {
            const copy *c = &f->copies[f->first_copy % MAX_COPIES];
            unsigned char *to = shared_at(c->to, c->size);
            memset(to, 0, (size_t)c->size);
            memcpy(to, c->from, (size_t)c->bytes);
        }
}

static inline uint32_t word_at(uint32_t at) { uint32_t x; memcpy(&x, shared_at(at, 4), 4); return x; }
static inline uint32_t half_at(uint32_t at) { uint16_t x; memcpy(&x, shared_at(at, 2), 2); return x; }

static inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t from)
{
    const int lane = current % 32;
    shared_at(from, 16);
    among(from, [&](auto of) {
        for (int m = 0; m < 4; m++) r[m] = word_at(of(8 * m + lane / 4) + 4 * (uint32_t)(lane % 4));
        return 0;
    });
}

static inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t from)
{
    const int lane = current % 32, row = 2 * (lane % 4);
    shared_at(from, 16);
    among(from, [&](auto of) {
        for (int m = 0; m < 4; m++)
            r[m] = half_at(of(8 * m + row) + 2 * (uint32_t)(lane / 4)) | half_at(of(8 * m + row + 1) + 2 * (uint32_t)(lane / 4)) << 16;
        return 0;
    });
}

static inline float ld_shared_f32(uint32_t from) { return __uint_as_float(word_at(from)); }
static inline uint32_t ld_shared_u8(uint32_t from) { return *shared_at(from, 1); }
static inline void st_shared_b32(uint32_t to, uint32_t x) { memcpy(shared_at(to, 4), &x, 4); }
static inline void st_shared_v4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t x[4] = { a, b, c, d };
    memcpy(shared_at(to, 16), x, 16);
}

static inline float cvt_f32_f16(uint16_t h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const float x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24);
    return h & 0x8000 ? -x : x;
}

/* To nearest even. */
static uint16_t to_f16(float x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs((double)x);
    if (isnan(x)) return sign | 0x7fff;
    if (a >= 65520.0) return sign | 0x7c00;
    int e;
    frexp(a, &e);
    if (a == 0) return sign;
    const int unit = (e - 11 < -24 ? -24 : e - 11);             /* of the last place */
    const double n = nearbyint(ldexp(a, -unit));
    if (unit == -24) return sign | (uint16_t)n;                 /* subnormal, or just normal */
    return sign | (uint16_t)((unit + 24) * 1024 + (int)n);      /* n in [1024, 2048]: its 1024 carries into the exponent, which counts one less */
}

static inline uint16_t to_bf16(float x)
{
    const uint32_t u = __float_as_uint(x);
    return isnan(x) ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline uint32_t cvt_rn_f16x2(float lo, float hi) { return to_f16(lo) | (uint32_t)to_f16(hi) << 16; }
static inline uint32_t cvt_rn_bf16x2(float lo, float hi) { return to_bf16(lo) | (uint32_t)to_bf16(hi) << 16; }
static inline float of_bf16(uint32_t h) { return __uint_as_float(h << 16); }

static inline uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c)
{
    const auto one = [](uint32_t x, uint32_t y, uint32_t z) {
        return (float)((double)cvt_f32_f16((uint16_t)x) * cvt_f32_f16((uint16_t)y) + cvt_f32_f16((uint16_t)z));
    };
    return cvt_rn_f16x2(one(a & 0xffff, b & 0xffff, c & 0xffff), one(a >> 16, b >> 16, c >> 16));
}

static inline uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
    const auto one = [](uint32_t x, uint32_t y, uint32_t z) { return (float)((double)of_bf16(x) * of_bf16(y) + of_bf16(z)); };
    return cvt_rn_bf16x2(one(a & 0xffff, b & 0xffff, c & 0xffff), one(a >> 16, b >> 16, c >> 16));
}

struct operands { const uint32_t *a; uint32_t b[2]; };

/* Lane 4 i + j has of A the pairs (i, 2 j), (i + 8, 2 j), (i, 2 j + 8), (i + 8, 2 j + 8), of B (2 j, i), (2 j + 8, i), of C (i, 2 j), (i + 8, 2 j). */
template <class F> static void multiply_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F value)
{
    const operands mine = { a, { b0, b1 } };
    const int i = current % 32 / 4, j = current % 4;
    float sum[4];
    among(mine, [&](auto of) {
        for (int n = 0; n < 4; n++) {
            double s = c[n];
            const int row = i + n / 2 * 8, column = 2 * j + n % 2;
            for (int k = 0; k < 16; k++) {
                const uint32_t x = of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2] >> (k % 2 * 16) & 0xffff;
                const uint32_t y = of(column * 4 + k % 8 / 2).b[k / 8] >> (k % 2 * 16) & 0xffff;
                s += (double)value(x) * value(y);
            }
            sum[n] = (float)s;
        }
        return 0;
    });
    memcpy(c, sum, sizeof sum);
}

static inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    multiply_16(c, a, b0, b1, [](uint32_t x) { return cvt_f32_f16((uint16_t)x); });
}

static inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply_16(c, a, b0, b1, of_bf16); }

/* Lane 4 i + j has of A (i, j), (i + 8, j), (i, j + 4), (i + 8, j + 4), of B (j, i), (j + 4, i). */
static inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    const operands mine = { a, { b0, b1 } };
    const int i = current % 32 / 4, j = current % 4;
    float sum[4];
    among(mine, [&](auto of) {
        for (int n = 0; n < 4; n++) {
            double s = c[n];
            const int row = i + n / 2 * 8, column = 2 * j + n % 2;
            for (int k = 0; k < 8; k++) {
                const uint32_t x = of(row % 8 * 4 + k % 4).a[row / 8 + k / 4 * 2], y = of(column * 4 + k % 4).b[k / 4];
                s += (double)__uint_as_float(x & 0xffffe000u) * __uint_as_float(y & 0xffffe000u);
            }
            sum[n] = (float)s;
        }
        return 0;
    });
    memcpy(c, sum, sizeof sum);
}

static inline float ex2_approx(float x) { return exp2f(x); }
static inline float lg2_approx(float x) { return log2f(x); }

/* -------------------------------------------------------------------------------------------------------------- kernel */

#include PLAYED

extern "C" const size_t fake_parameter_bytes = sizeof(d_attend);

extern "C" void fake_play(const unsigned *grid, const unsigned *block, void **parameters)
{
    body = [](const void *p) { attend_sm80(*(const d_attend *)p); };
    parameter = parameters[0];
    num_threads = (int)block[0];
    blockDim = { block[0], 1, 1 };
    gridDim = { grid[0], 1, 1 };
    for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = { x, 0, 0 };
        run_block();
    }
}
