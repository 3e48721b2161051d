/* SPDX-License-Identifier: Apache-2.0 */
/* bounds.c -- see bounds.h. Both measurements take the best of several rounds: a bound is what can
 * be reached, not what is usual. */
#include "bounds.h"
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

static volatile uint64_t sink;          /* keeps the loops below from being dropped */

/* ---- threads: fn(arg, i) on `count` threads at once, this one among them ---- */

typedef struct team {
    void (*fn)(void *arg, int i);
    void *arg;
    pthread_barrier_t start;
} team;

typedef struct member {
    team *team;
    pthread_t thread;
    int i;
    double begin, end;                  /* cli_now */
} member;

static void *run_member(void *arg)
{
    member *m = arg;
    pthread_barrier_wait(&m->team->start);
    m->begin = cli_now();
    m->team->fn(m->team->arg, m->i);
    m->end = cli_now();
    return NULL;
}

/* Seconds from the first start to the last end; creating threads is not counted. Fewer threads than
 * asked for end the process: a bound that is too low would be a lie. */
static double on_threads(int count, void (*fn)(void *arg, int i), void *arg)
{
    member *members = need((size_t)count, sizeof *members);
    team t = { .fn = fn, .arg = arg };
    pthread_barrier_init(&t.start, NULL, (unsigned)count);
    for (int i = 0; i < count; i++) {
        members[i] = (member){ .team = &t, .i = i };
        if (i > 0 && pthread_create(&members[i].thread, NULL, run_member, &members[i]) != 0) {
            cli_fail("cannot start %d threads", count);
            exit(CLI_FAILED);
        }
    }
    run_member(&members[0]);
    double begin = members[0].begin, end = members[0].end;
    for (int i = 1; i < count; i++) {
        pthread_join(members[i].thread, NULL);
        begin = members[i].begin < begin ? members[i].begin : begin;
        end = members[i].end > end ? members[i].end : end;
    }
    pthread_barrier_destroy(&t.start);
    free(members);
    return end - begin;
}

/* ---- reading ---- */

typedef struct read_job {
    const char *data;
    int64_t bytes;
    int threads, times;
} read_job;

static void read_plain(const char *at, const char *end)
{
    uint64_t sum[8] = { 0 };
    for (; at + 64 <= end; at += 64)
        for (int i = 0; i < 8; i++) {
            uint64_t x;
            memcpy(&x, at + 8 * i, 8);
            sum[i] ^= x;
        }
    for (int i = 0; i < 8; i++)
        sink += sum[i];
}

#if defined __x86_64__
__attribute__((target("avx512f"))) static void read_avx512(const char *at, const char *end)
{
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (; at + 256 <= end; at += 256) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(at));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(at + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(at + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(at + 192));
    }
    a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
    sink += (uint64_t)_mm512_reduce_or_epi64(a);
    read_plain(at, end);
}
#endif

static void read_range(const char *at, const char *end)
{
#if defined __x86_64__
    if (__builtin_cpu_supports("avx512f")) {
        read_avx512(at, end);
        return;
    }
#endif
    read_plain(at, end);
}

static void read_part(void *arg, int i)
{
    const read_job *j = arg;
    const int64_t share = j->bytes / j->threads / 64 * 64;
    const char *at = j->data + i * share,
               *end = i == j->threads - 1 ? j->data + j->bytes : at + share;
    for (int n = 0; n < j->times; n++)
        read_range(at, end);
}

double bounds_read_time(const void *data, int64_t bytes, int threads)
{
    read_job job = { data, bytes, threads, (int)max_i64(1, (64 << 20) / max_i64(bytes, 1)) };
    job.times = job.times > 1000 ? 1000 : job.times;
    return on_threads(threads, read_part, &job) / job.times;
}

/* Twice the last-level cache, but at least 256 MiB and at most a quarter of the free memory or
 * 1 GiB. */
static int64_t read_set_size(void)
{
    const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const int64_t most = min_i64((int64_t)1 << 30, cli_available_memory() / 4);
    return max_i64(1 << 20, min_i64(most, max_i64((int64_t)256 << 20, 2 * max_i64(cache, 0))));
}

static bool measure_read(bounds *b)
{
    memory set;
    b->read_set = read_set_size();
    if (!memory_allocate(NULL, b->read_set, &set))
        return false;
    memset(set.data, 1, (size_t)b->read_set);
    for (int i = 0; i < 7; i++) {
        const double rate =
            (double)b->read_set / bounds_read_time(set.data, b->read_set, b->threads);
        b->read = rate > b->read ? rate : b->read;
    }
    memory_release(&set);
    return true;
}

/* ---- multiplying: each loop does `rounds` rounds and says how many operations one is ---- */

typedef struct multiplier {
    const char *name;
    void (*loop)(int64_t rounds);
    double flops;                       /* of a round */
} multiplier;

static void multiply_plain(int64_t rounds)
{
    float a[16] = { 0 };
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < 16; i++)
            a[i] = a[i] * 0.999f + 0.5f;
    for (int i = 0; i < 16; i++)
        sink += (uint64_t)a[i];
}

#if defined __x86_64__
__attribute__((target("avx2,fma"))) static void multiply_avx2(int64_t rounds)
{
    __m256 a[10], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.5f);
    for (int i = 0; i < 10; i++)
        a[i] = _mm256_setzero_ps();
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < 10; i++)
            a[i] = _mm256_fmadd_ps(a[i], x, y);
    for (int i = 0; i < 10; i++)
        sink += (uint64_t)_mm256_cvtss_f32(a[i]);
}

__attribute__((target("avx512f"))) static void multiply_avx512(int64_t rounds)
{
    __m512 a[12], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.5f);
    for (int i = 0; i < 12; i++)
        a[i] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < 12; i++)
            a[i] = _mm512_fmadd_ps(a[i], x, y);
    for (int i = 0; i < 12; i++)
        sink += (uint64_t)_mm512_cvtss_f32(a[i]);
}

/* Eight tiles of 16 rows x 64 bytes. Constant memory: a compiler may think that only its first
 * bytes are read. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shape = { .palette = 1, .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
                 .rows = { 16, 16, 16, 16, 16, 16, 16, 16 } };

/* 2 x 2 accumulators of 16 x 16; a round is 4 products of 16 x 32 and 32 x 16, on zeros. */
__attribute__((target("amx-tile,amx-bf16"))) static void multiply_amx(int64_t rounds)
{
    _tile_loadconfig(&tile_shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t r = 0; r < rounds; r++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

/* C = A B. Operands are packed once: pairs of tiles, 32 rows of A or columns of B x 32 of K, lie
 * in the order in which they are multiplied. All three stay in the second-level cache, also beside
 * those of the core's other thread. Sums of 32 x 32 stay in tiles for all of K: cutting K, so that
 * operands stay in the first-level cache, was slower on a Xeon (1,650 against 1,150 to 1,550
 * GFLOP/s a thread), asking for operands ahead as well. */
enum { GEMM_M = 192, GEMM_N = 192, GEMM_K = 768, GEMM_SIDE = 32, GEMM_PAIR = GEMM_SIDE * 32 };
enum { GEMM_ELEMENTS = (GEMM_M + GEMM_N) * GEMM_K };
enum { GEMM_BYTES = 2 * GEMM_ELEMENTS + 4 * GEMM_M * GEMM_N };

typedef struct gemm {
    uint16_t *a, *b;                    /* [M or N / 32][K / 32][2][16][32] */
    float *c;                           /* [M / 32][N / 32][2][2][16][16] */
} gemm;

/* 32 x 32 sums. */
__attribute__((target("amx-tile,amx-bf16"))) static void
make_product(const uint16_t *a, const uint16_t *b, float *c)
{
    enum { TILE_SUMS = 16 * 16 };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < GEMM_K; k += 32, a += GEMM_PAIR, b += GEMM_PAIR) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + GEMM_PAIR / 2, 64);
        _tile_loadd(5, a + GEMM_PAIR / 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 64);
    _tile_stored(1, c + TILE_SUMS, 64);
    _tile_stored(2, c + 2 * TILE_SUMS, 64);
    _tile_stored(3, c + 3 * TILE_SUMS, 64);
}

__attribute__((target("amx-tile"))) static void gemm_amx(const gemm *g, int64_t rounds)
{
    const int64_t panel = GEMM_SIDE * GEMM_K, m = GEMM_M / GEMM_SIDE, n = GEMM_N / GEMM_SIDE;
    _tile_loadconfig(&tile_shape);
    for (int64_t r = 0; r < rounds; r++)
        for (int64_t i = 0; i < m * n; i++)
            make_product(g->a + i / n * panel, g->b + i % n * panel, g->c + i * GEMM_PAIR);
    _tile_release();
}

/* The processor has the tiles, and the system lets this process use them. */
static bool has_amx(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1))
        return false;
    const long ask_for_state = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, ask_for_state, tile_data) == 0;
}
#endif

static multiplier choose_multiplier(bool tiles)
{
#if defined __x86_64__
    if (tiles && has_amx())
        return (multiplier){ "AMX bf16 tiles", multiply_amx, 4 * 2.0 * 16 * 16 * 32 };
    if (__builtin_cpu_supports("avx512f"))
        return (multiplier){ "AVX-512 f32 FMA", multiply_avx512, 12 * 2.0 * 16 };
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (multiplier){ "AVX2 f32 FMA", multiply_avx2, 10 * 2.0 * 8 };
#endif
    (void)tiles;
    return (multiplier){ "f32 multiply and add", multiply_plain, 16 * 2.0 };
}

typedef struct multiply_job {
    const multiplier *m;
    int64_t rounds;
} multiply_job;

static void multiply_part(void *arg, int i)
{
    const multiply_job *j = arg;
    (void)i;
    j->m->loop(j->rounds);
}

double bounds_multiply_rate(int threads, bool tiles)
{
    const multiplier m = choose_multiplier(tiles);
    multiply_job job = { &m, (int64_t)(2e7 / m.flops) };
    for (;;) {                                  /* rounds grow until they take 20 ms */
        const double t = on_threads(threads, multiply_part, &job);
        if (t >= 0.02 || job.rounds > INT64_MAX / 4)
            return (double)job.rounds * m.flops * threads / t;
        job.rounds *= 2;
    }
}

#if defined __x86_64__
typedef struct gemm_job {
    gemm *each;                         /* a thread's own */
    int64_t rounds;
} gemm_job;

static void gemm_part(void *arg, int i)
{
    const gemm_job *j = arg;
    gemm_amx(&j->each[i], j->rounds);
}

/* Numbers in [-1, 1): the clock of the tiles depends on what they multiply. */
static void fill_operands(uint16_t *out)
{
    for (int i = 0; i < GEMM_ELEMENTS; i++) {
        const float x = (float)((int)(mix64(5, (uint64_t)i) & 0xFFFF) - 0x8000) / 0x8000;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        out[i] = (uint16_t)(bits >> 16);
    }
}

static double gemm_rate(int threads, memory *set)
{
    const double flops = 2.0 * GEMM_M * GEMM_N * GEMM_K;
    gemm *each = need((size_t)threads, sizeof *each);
    for (int i = 0; i < threads; i++) {
        char *own = set->data + (int64_t)i * GEMM_BYTES;
        each[i] = (gemm){ (uint16_t *)own, (uint16_t *)own + GEMM_M * GEMM_K,
                          (float *)(own + 2 * GEMM_ELEMENTS) };
        if (i == 0)
            fill_operands(each[0].a);
        else
            memcpy(each[i].a, each[0].a, 2 * GEMM_ELEMENTS);
    }
    gemm_job job = { each, 4 };
    double t = 0;
    while ((t = on_threads(threads, gemm_part, &job)) < 0.02)
        job.rounds *= 2;
    free(each);
    return (double)job.rounds * flops * threads / t;
}
#endif

double bounds_gemm_rate(int threads)
{
#if defined __x86_64__
    memory set;
    if (has_amx() && memory_allocate(NULL, (int64_t)GEMM_BYTES * threads, &set)) {
        const double rate = gemm_rate(threads, &set);
        memory_release(&set);
        return rate;
    }
#endif
    return bounds_multiply_rate(threads, true);
}

static void measure_flops(bounds *b, bool tiles)
{
    b->multiplier = choose_multiplier(tiles).name;
    for (int i = 0; i < 8; i++) {
        const double rate = bounds_multiply_rate(b->threads, tiles);
        b->flops = rate > b->flops ? rate : b->flops;
    }
}

/* A set of 1 GiB is far larger than any cache of a GPU. */
static bool measure_gpu(gpu *g, bool tiles, bounds *b)
{
    memory set;
    gpu_multiplier m = { 0 };
    bool good = true;
    b->read_set = min_i64((int64_t)1 << 30, gpu_free_bytes(g) / 4);
    if (!memory_allocate(g, b->read_set, &set))
        return false;
    for (int i = 0; i < 5 && good; i++) {
        double seconds = 0;
        good = gpu_time_read(g, set.device, b->read_set, 0, 4, &seconds) &&
               gpu_multiply_rate(g, tiles, &m);
        if (good && (double)b->read_set / seconds > b->read)
            b->read = (double)b->read_set / seconds;
        if (good && m.rate > b->flops)
            b->flops = m.rate;
    }
    b->multiplier = m.name;
    memory_release(&set);
    return good;
}

bool bounds_measure(gpu *g, int threads, bool tiles, bounds *out)
{
    *out = (bounds){ .threads = threads };
    if (g)
        return measure_gpu(g, tiles, out);
    measure_flops(out, tiles);
    return measure_read(out);
}

double bounds_time(const bounds *b, double bytes, double flops)
{
    if (!(b->read > 0 && b->flops > 0))
        return 0;
    const double t = bytes / b->read, u = flops / b->flops;
    return t > u ? t : u;
}
