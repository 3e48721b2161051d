/* SPDX-License-Identifier: Apache-2.0 */
/* player.cpp -- the attention kernel played on the CPU, for machines without a GPU: the same text as C++. nvrtc.c beside this compiles it, with the
 * texts of one program in the include path, into a library that cuda.c loads in place of a cubin.
 *
 * As blocks run one after another, a merge is made by the last of them. Asynchronous copies happen when they are waited for, no earlier: what is used too
 * soon is what was there before. Shared memory begins as NaN. The instructions of ptx.cuh are here, lane by lane, by PTX's tables of fragments;
 * products are summed in double. */
#define MAX_THREADS 256
#define STACK (256 << 10)
#define __shared__
#define __CUDA_ARCH__ 900               /* the newest of what the texts ask for */
#define FV_PTX_CUH                      /* below */
#include "fibers.h"
#include "convert.h"

enum { SHARED = 232448, MAX_COPIES = 4096 };
alignas(1024) unsigned char memory[SHARED];

struct copy { uint32_t to; int bytes, size; const void *from; };

/* What a thread has asked for, in a ring; group_end[i % 16] of group i. */
static struct asked {
    copy copies[MAX_COPIES];
    int num_copies, first_copy, num_groups, first_group, group_end[16];
} asked[MAX_THREADS];

static void play_block()
{
    memset(memory, 0xff, sizeof memory);
    for (int i = 0; i < num_threads; i++) asked[i].num_copies = asked[i].first_copy = asked[i].num_groups = asked[i].first_group = 0;
    run_block();
}

/* -------------------------------------------------------------------------------------------------------- instructions */

static inline uint64_t __cvta_generic_to_shared(const void *p) { return (uint64_t)((const unsigned char *)p - memory); }
static inline void *__cvta_shared_to_generic(uint64_t at) { return memory + at; }

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
    struct asked *f = &asked[current];
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
    struct asked *f = &asked[current];
    f->group_end[f->num_groups++ % 16] = f->num_copies;
}

template <int N> static inline void cp_async_wait_group()
{
    struct asked *f = &asked[current];
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
static inline uint32_t ld_shared_b32(uint32_t from) { return word_at(from); }
static inline uint32_t ld_shared_u8(uint32_t from) { return *shared_at(from, 1); }
static inline void st_shared_b32(uint32_t to, uint32_t x) { memcpy(shared_at(to, 4), &x, 4); }
static inline void st_shared_v4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t x[4] = { a, b, c, d };
    memcpy(shared_at(to, 16), x, 16);
}

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
static inline float rcp_approx(float x) { return 1.0f / x; }
static inline float lg2_approx(float x) { return log2f(x); }
static inline float sin_approx(float x) { return sinf(x); }
static inline float cos_approx(float x) { return cosf(x); }

/* -------------------------------------------------------------------------------------------------------------- kernel */

#include PLAYED

extern "C" const size_t fake_parameter_bytes = sizeof(d_attend);

extern "C" void fake_play(const char *name, const unsigned *grid, const unsigned *block, void **parameters)
{
    body = [](const void *p) { attend_sm80(*(const d_attend *)p); };
#ifdef FV_HAS_KEY_SUM
    if (!strcmp(name, "key_sums_sm80")) body = [](const void *p) { key_sums_sm80(*(const d_attend *)p); };
#endif
    parameter = parameters[0];
    num_threads = (int)block[0];
    blockDim = { block[0], 1, 1 };
    gridDim = { grid[0], 1, 1 };
    for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = { x, 0, 0 };
        play_block();
    }
}
