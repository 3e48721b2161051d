/* SPDX-License-Identifier: Apache-2.0 */
/* bench_cpu.c -- the cases of foveal bench on a CPU. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- limits ---- */

typedef struct read_floor {
    const workload *w; /* reads as many bytes as its plan has to, from its own K and V */
    int threads;
} read_floor;

static double time_read(void *arg)
{
    const read_floor *f = arg;
    const int64_t half = (int64_t)(f->w->bytes / 2);
    return bounds_read_time(f->w->k.data, half, f->threads) +
           bounds_read_time(f->w->v.data, half, f->threads);
}

typedef struct multiply_floor {
    double flops;
    int threads;
} multiply_floor;

static double time_multiply(void *arg)
{
    const multiply_floor *f = arg;
    return f->flops / bounds_multiply_rate(f->threads, true);
}

static double time_gemm(void *arg)
{
    const multiply_floor *f = arg;
    return f->flops / bounds_gemm_rate(f->threads);
}

/* ---- cases ---- */

bool bench_fits(const char *name, int64_t bytes)
{
    if (bytes <= cli_available_memory() / 10 * 8)
        return true;
    fprintf(stderr, "foveal: %s is left out: it needs %.1f GB\n", name, (double)bytes / 1e9);
    return false;
}

/* Decode of n requests of L keys in bf16 beside a streaming read of the same bytes; those of a
 * narrower type beside bf16. */
static bool decode_case(bench *b, const char *name, int64_t n, int32_t length, const char *quantised)
{
    int32_t *rows = bench_constant(n, 1), *lengths = bench_constant(n, length);
    workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                           .num_requests = n, .rows = rows, .lengths = lengths };
    workload full, small = { 0 };
    bool good = true;
    if (bench_fits(name, workload_bytes(&desc) * (quantised ? 3 : 2) / 2)) {
        good = workload_open(b->ctx, NULL, &desc, &full);
        desc.kv_dtype = quantised;
        good = good && (!quantised || workload_open(b->ctx, NULL, &desc, &small));
        read_floor floors[] = { { &full, b->threads }, { &small, b->threads } };
        candidate c[] = { { bench_time_run, &full, { 0 } },
                          { time_read, &floors[0], { 0 } },
                          { bench_time_run, &small, { 0 } },
                          { time_read, &floors[1], { 0 } } };
        good = good && bench_take_turns(b, c, quantised ? 4 : 2);
        if (good && quantised) {
            result r = { .goal = "18a", .name = name, .unit = "ms", .peer = "own bf16",
                         .peer_value = 1e3 * bench_median(&c[0]),
                         .bound = 1e3 * bench_median(&c[3]) };
            bench_set_ours(&r, &c[2], 1e3, false);
            bench_report(b, &r);
        } else if (good) {
            result r = { .goal = "18a", .name = name, .unit = "GB/s",
                         .bound = full.bytes / 1e9 / bench_median(&c[1]) };
            bench_set_ours(&r, &c[0], full.bytes / 1e9, true);
            bench_report(b, &r);
        }
        bench_free(c, 4);
        workload_close(&full);
        workload_close(&small);
    }
    free(rows);
    free(lengths);
    return good;
}

/* One causal prompt beside a product of matrices, and beside products alone, which no loop that
 * loads operands reaches. */
static bool prefill_of(bench *b, const char *name, const workload_desc *desc)
{
    workload w;
    bool good = workload_open(b->ctx, NULL, desc, &w);
    multiply_floor floor = { w.flops, b->threads };
    candidate c[] = { { bench_time_run, &w, { 0 } },
                      { time_gemm, &floor, { 0 } },
                      { time_multiply, &floor, { 0 } } };
    good = good && bench_take_turns(b, c, 3);
    if (good) {
        result r = { .goal = "18b", .name = name, .unit = "GFLOP/s",
                     .peer = "products in registers",
                     .peer_value = w.flops / 1e9 / bench_median(&c[2]),
                     .bound = w.flops / 1e9 / bench_median(&c[1]) };
        bench_set_ours(&r, &c[0], w.flops / 1e9, true);
        bench_report(b, &r);
    }
    bench_free(c, 3);
    workload_close(&w);
    return good;
}

static bool prefill_case(bench *b, const char *name, int32_t length, int32_t dim)
{
    return prefill_of(b, name,
                      &(workload_desc){ .q_heads = 32, .kv_heads = 8, .dim = dim,
                                        .num_requests = 1, .rows = &length, .lengths = &length });
}

/* Two ways of the engine and the floor of the first: milliseconds. `rates`: also a row for the
 * peer's rate of reading. */
typedef struct pair {
    const char *goal, *name, *peer;
    workload_desc ours, other;
    bool prefill;                       /* the floor is a product of matrices, not reading */
    bool rates;
} pair;

static void report_pair(bench *b, const pair *p, candidate *c, const workload *ours,
                        const workload *other)
{
    char name[64];
    result r = { .goal = p->goal, .name = p->name, .unit = "ms", .peer = p->peer,
                 .peer_value = 1e3 * bench_median(&c[2]), .bound = 1e3 * bench_median(&c[3]) };
    bench_set_ours(&r, &c[0], 1e3, false);
    bench_report(b, &r);
    if (!p->rates)
        return;
    snprintf(name, sizeof name, "%s off", p->name);
    result rate = { .goal = p->goal, .name = name, .unit = "GB/s",
                    .bound = ours->bytes / 1e9 / bench_median(&c[3]) };
    bench_set_ours(&rate, &c[2], other->asked_bytes / 1e9, true);
    bench_report(b, &rate);
}

static bool pair_case(bench *b, const pair *p)
{
    workload ours, other = { 0 };
    bool good = workload_open(b->ctx, NULL, &p->ours, &ours) &&
                workload_open(b->ctx, NULL, &p->other, &other);
    read_floor reading[] = { { &ours, b->threads }, { &other, b->threads } };
    multiply_floor multiplying = { ours.flops, b->threads };
    candidate c[] = { { bench_time_run, &ours, { 0 } },         /* each finds the other's in caches */
                      { time_read, &reading[1], { 0 } },
                      { bench_time_run, &other, { 0 } },
                      { time_read, &reading[0], { 0 } } };
    if (p->prefill)
        c[1] = c[3] = (candidate){ time_gemm, &multiplying, { 0 } };
    good = good && bench_take_turns(b, c, 4);
    if (good)
        report_pair(b, p, c, &ours, &other);
    bench_free(c, 4);
    workload_close(&ours);
    workload_close(&other);
    return good;
}

/* 16 requests, 16384 keys in all: in proportion to 1/i, against 1024 each. */
static bool skew_case(bench *b, const char *name, int32_t q_heads, int32_t kv_heads)
{
    enum { N = BENCH_SKEW_REQUESTS };
    int32_t *rows = bench_constant(N, 1), *even = bench_constant(N, BENCH_SKEW_TOTAL / N), zipf[N];
    bench_zipf(zipf);
    const workload_desc flat = { .q_heads = q_heads, .kv_heads = kv_heads, .dim = 128,
                                 .page_size = 16, .num_requests = N, .rows = rows,
                                 .lengths = even };
    pair p = {
        .goal = "5", .name = name, .peer = "own constant lengths", .ours = flat, .other = flat
    };
    p.ours.lengths = zipf;
    const bool good = pair_case(b, &p);
    free(rows);
    free(even);
    return good;
}

/* n requests that share 4096 keys and have 64 of their own: prefix found and read once, against
 * every request reading all. */
static bool prefix_case(bench *b, const char *name, int64_t n, int32_t q_heads, int32_t kv_heads)
{
    int32_t *rows = bench_constant(n, 1), *lengths = bench_constant(n, 4096 + 64);
    const workload_desc off = { .q_heads = q_heads, .kv_heads = kv_heads, .dim = 128,
                                .page_size = 16, .num_requests = n, .rows = rows,
                                .lengths = lengths, .prefix = n > 1 ? 4096 : 0 };
    pair p = { .goal = "12", .name = name, .peer = "own sharing off", .ours = off, .other = off,
               .rates = true };
    p.ours.sharing = true;
    const bool good = pair_case(b, &p);
    free(rows);
    free(lengths);
    return good;
}

/* Shuffled pages against one run of keys a request: decode of 8 x 4096, or a prompt of 2048. */
static bool pages_case(bench *b, const char *name, int32_t page_size, bool prefill)
{
    const int64_t n = prefill ? 1 : 8;
    int32_t *lengths = bench_constant(n, prefill ? 2048 : 4096),
            *rows = bench_constant(n, prefill ? 2048 : 1);
    const workload_desc ragged = { .q_heads = 32, .kv_heads = 8, .dim = 128, .num_requests = n,
                                   .rows = rows, .lengths = lengths };
    pair p = { .goal = "7", .name = name, .peer = "own contiguous", .ours = ragged, .other = ragged,
               .prefill = prefill };
    p.ours.page_size = page_size;
    const bool good = pair_case(b, &p);
    free(rows);
    free(lengths);
    return good;
}

/* Pages in the order "tiles" against the same in rows: n requests of `length` keys and `count` rows
 * each. */
static bool tiles_case(bench *b, const char *name, int64_t n, int32_t length, int32_t count)
{
    int32_t *lengths = bench_constant(n, length), *rows = bench_constant(n, count);
    const workload_desc in_rows = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                                    .num_requests = n, .rows = rows, .lengths = lengths };
    pair p = { .goal = "18c", .name = name, .peer = "own rows", .ours = in_rows, .other = in_rows,
               .prefill = count > 16 };
    p.ours.tiled = true;
    const bool good = pair_case(b, &p);
    free(rows);
    free(lengths);
    return good;
}

/* The same bits whatever runs beside a request, against the fastest mode. */
static bool invariant_case(bench *b, const char *name, int64_t n, int32_t length)
{
    int32_t *lengths = bench_constant(n, length), *rows = bench_constant(n, 1);
    const workload_desc fast = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                                 .num_requests = n, .rows = rows, .lengths = lengths };
    pair p = { .goal = "16", .name = name, .peer = "own fastest", .ours = fast, .other = fast };
    p.ours.invariant = true;
    const bool good = pair_case(b, &p);
    free(rows);
    free(lengths);
    return good;
}

static bool decode_8(bench *b, const char *name) { return decode_case(b, name, 8, 32768, NULL); }
static bool decode_1(bench *b, const char *name) { return decode_case(b, name, 1, 4096, NULL); }
static bool decode_8_int8(bench *b, const char *name)
{
    return decode_case(b, name, 8, 32768, "int8");
}
static bool decode_8_int4(bench *b, const char *name)
{
    return decode_case(b, name, 8, 32768, "int4");
}
static bool decode_1_int8(bench *b, const char *name)
{
    return decode_case(b, name, 1, 4096, "int8");
}
static bool decode_1_int4(bench *b, const char *name)
{
    return decode_case(b, name, 1, 4096, "int4");
}
static bool prefill_2k(bench *b, const char *name) { return prefill_case(b, name, 2048, 128); }
static bool prefill_8k(bench *b, const char *name) { return prefill_case(b, name, 8192, 128); }
static bool prefill_64(bench *b, const char *name) { return prefill_case(b, name, 8192, 64); }
static bool prefill_96(bench *b, const char *name) { return prefill_case(b, name, 8192, 96); }
static bool prefill_256(bench *b, const char *name) { return prefill_case(b, name, 8192, 256); }
static bool prefill_latent(bench *b, const char *name)
{
    const int32_t length = 2048;
    return prefill_of(b, name,
                      &(workload_desc){ .q_heads = 16, .kv_heads = 1, .dim = 576, .dim_v = 512,
                                        .latent = true, .num_requests = 1, .rows = &length,
                                        .lengths = &length });
}
static bool decode_page_1(bench *b, const char *name) { return pages_case(b, name, 1, false); }
static bool decode_page_16(bench *b, const char *name) { return pages_case(b, name, 16, false); }
static bool prefill_page_1(bench *b, const char *name) { return pages_case(b, name, 1, true); }
static bool prefill_page_16(bench *b, const char *name) { return pages_case(b, name, 16, true); }
static bool tiles_1(bench *b, const char *name) { return tiles_case(b, name, 1, 4096, 1); }
static bool tiles_8(bench *b, const char *name) { return tiles_case(b, name, 8, 32768, 1); }
static bool tiles_4_rows(bench *b, const char *name) { return tiles_case(b, name, 1, 4096, 4); }
static bool tiles_16_rows(bench *b, const char *name) { return tiles_case(b, name, 1, 4096, 16); }
static bool tiles_prefill(bench *b, const char *name) { return tiles_case(b, name, 1, 2048, 2048); }
static bool invariant_8(bench *b, const char *name) { return invariant_case(b, name, 8, 4096); }
static bool invariant_1(bench *b, const char *name) { return invariant_case(b, name, 1, 32768); }
static bool skew_32_32(bench *b, const char *name) { return skew_case(b, name, 32, 32); }
static bool skew_32_8(bench *b, const char *name) { return skew_case(b, name, 32, 8); }
static bool skew_32_4(bench *b, const char *name) { return skew_case(b, name, 32, 4); }
static bool prefix_32_32(bench *b, const char *name) { return prefix_case(b, name, 16, 32, 32); }
static bool prefix_32_8(bench *b, const char *name) { return prefix_case(b, name, 16, 32, 8); }
static bool prefix_one(bench *b, const char *name) { return prefix_case(b, name, 1, 32, 8); }
static bool plan_decodes(bench *b, const char *name) { return bench_plan(b, name, 256, 1, true); }
static bool plan_ragged(bench *b, const char *name) { return bench_plan(b, name, 4096, 1, true); }
static bool plan_prefill(bench *b, const char *name)
{
    return bench_plan(b, name, 32, 8192, false);
}

static const bench_case cases[] = {
    { "plan 256 decodes", plan_decodes },
    { "plan 4096 ragged decodes", plan_ragged },
    { "plan 32 prefills of 8192", plan_prefill },
    { "decode b=8 L=32768 32/8", decode_8 },
    { "decode b=1 L=4096 32/8", decode_1 },
    { "decode b=8 L=32768 32/8 int8", decode_8_int8 },
    { "decode b=1 L=4096 32/8 int8", decode_1_int8 },
    { "decode b=8 L=32768 32/8 int4", decode_8_int4 },
    { "decode b=1 L=4096 32/8 int4", decode_1_int4 },
    { "skew zipf b=16 32/32", skew_32_32 },
    { "skew zipf b=16 32/8", skew_32_8 },
    { "skew zipf b=16 32/4", skew_32_4 },
    { "prefix 4096+64 b=16 32/32", prefix_32_32 },
    { "prefix 4096+64 b=16 32/8", prefix_32_8 },
    { "prefix 4096+64 b=1 32/8", prefix_one },
    { "prefill L=2048 32/8", prefill_2k },
    { "prefill L=8192 32/8", prefill_8k },
    { "prefill L=8192 32/8 d64", prefill_64 },
    { "prefill L=8192 32/8 d96", prefill_96 },
    { "prefill L=8192 32/8 d256", prefill_256 },
    { "prefill L=2048 latent 16/1 576/512", prefill_latent },
    { "pages of 1 decode b=8 L=4096", decode_page_1 },
    { "pages of 16 decode b=8 L=4096", decode_page_16 },
    { "pages of 1 prefill L=2048", prefill_page_1 },
    { "pages of 16 prefill L=2048", prefill_page_16 },
    { "tiles decode b=1 L=4096", tiles_1 },
    { "tiles decode b=8 L=32768", tiles_8 },
    { "tiles 4 rows L=4096", tiles_4_rows },
    { "tiles 16 rows L=4096", tiles_16_rows },
    { "tiles prefill L=2048", tiles_prefill },
    { "invariant decode b=8 L=4096", invariant_8 },
    { "invariant decode b=1 L=32768", invariant_1 },
};

bool bench_cpu_case(int n, bench_case *out)
{
    const int count = (int)(sizeof cases / sizeof cases[0]);
    if (n >= count)
        return bench_peer_case(n - count, out);
    *out = cases[n];
    return true;
}
