/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gpu.c -- the cases of foveal bench on a GPU: a table of shapes, and a few about the host.
 *
 * A shape's bound is the kernel-independent limit that its goal names: a streaming read of a set
 * far larger than the cache (READ), a cold read of just as many bytes in one launch (LATENCY), or
 * mma.sync from registers (MULTIPLY). A shape with `against` is compared with another way of the
 * engine, in time; one without is reported as a rate, or in us where latency is the matter.
 */
#include "bench.h"

#include <ftw.h>
#include <stdlib.h>
#include <string.h>

typedef enum limit { READ, LATENCY, MULTIPLY } limit;

typedef enum against {
    NOBODY,
    CONTIGUOUS,                         /* one run of keys a request instead of pages */
    EVEN,                               /* the same keys in equal lengths */
    FASTEST,                            /* without the invariant mode */
    UNSHARED,                           /* without sharing of prefixes */
    BF16,                               /* K and V in bf16 */
    UNTURNED,                           /* without rotary embedding */
    UNFUSED,                            /* rotary embedding of all keys before, by fv_rope */
} against;

static const char *const peers[] = { NULL, "own contiguous", "own constant lengths", "own fastest",
                                     "own sharing off", "own bf16", "own without rope",
                                     "own rope before" };

typedef struct shape {
    const char *goal, *name;
    limit limit;
    against against;
    int32_t q_heads, kv_heads, dim, page;       /* page 0: contiguous */
    struct { int32_t count, rows, length; } group[2];
    int32_t prefix, share, dim_v, window, pool_keys;
    const char *kv;
    bool zipf, invariant, sharing, latent, rope;
} shape;

static const shape shapes[] = {
    { "1", "decode b=256 L=4096 32/8", READ, NOBODY, 32, 8, 128, 16,
      .group = { { 256, 1, 4096 } } },
    { "2", "decode b=256 L=4096 32/4", READ, NOBODY, 32, 4, 128, 16,
      .group = { { 256, 1, 4096 } } },
    { "2", "decode b=64 L=8192 64/8", READ, NOBODY, 64, 8, 128, 16, .group = { { 64, 1, 8192 } } },
    { "3", "decode b=32 L=4096 32/8", READ, NOBODY, 32, 8, 128, 16, .group = { { 32, 1, 4096 } } },
    { "0", "decode b=128 L=1024 32/32", READ, NOBODY, 32, 32, 128, 16,
      .group = { { 128, 1, 1024 } } },
    { "4", "decode b=1 L=1024 32/4", LATENCY, NOBODY, 32, 4, 128, 16, .group = { { 1, 1, 1024 } } },
    { "4", "decode b=1 L=4096 32/8", LATENCY, NOBODY, 32, 8, 128, 16, .group = { { 1, 1, 4096 } } },
    { "4", "decode b=1 L=8192 64/8 page 32", LATENCY, NOBODY, 64, 8, 128, 32,
      .group = { { 1, 1, 8192 } } },
    { "4", "decode b=1 L=131072 64/8", LATENCY, NOBODY, 64, 8, 128, 16,
      .group = { { 1, 1, 131072 } } },
    { "5", "skew zipf b=16 32/32", READ, EVEN, 32, 32, 128, 16,
      .group = { { 16, 1, 0 } }, .zipf = true },
    { "5", "skew zipf b=16 32/8", READ, EVEN, 32, 8, 128, 16,
      .group = { { 16, 1, 0 } }, .zipf = true },
    { "5", "skew zipf b=16 32/4", READ, EVEN, 32, 4, 128, 16,
      .group = { { 16, 1, 0 } }, .zipf = true },
    { "6", "prefill 8 x 2048 32/8", MULTIPLY, NOBODY, 32, 8, 128, 0,
      .group = { { 8, 2048, 2048 } } },
    { "6", "prefill 4 x 4096 32/8", MULTIPLY, NOBODY, 32, 8, 128, 0,
      .group = { { 4, 4096, 4096 } } },
    { "6", "prefill 2 x 8192 32/8", MULTIPLY, NOBODY, 32, 8, 128, 0,
      .group = { { 2, 8192, 8192 } } },
    { "6", "prefill 1 x 16384 32/8", MULTIPLY, NOBODY, 32, 8, 128, 0,
      .group = { { 1, 16384, 16384 } } },
    { "0", "prefill 4 x 8192 32/8 d64", MULTIPLY, NOBODY, 32, 8, 64, 0,
      .group = { { 4, 8192, 8192 } } },
    { "0", "prefill 4 x 8192 16/4 d256", MULTIPLY, NOBODY, 16, 4, 256, 0,
      .group = { { 4, 8192, 8192 } } },
    { "7", "pages of 1 decode b=256 L=4096", READ, CONTIGUOUS, 32, 8, 128, 1,
      .group = { { 256, 1, 4096 } } },
    { "7", "pages of 16 decode b=256 L=4096", READ, CONTIGUOUS, 32, 8, 128, 16,
      .group = { { 256, 1, 4096 } } },
    { "7", "pages of 64 decode b=256 L=4096", READ, CONTIGUOUS, 32, 8, 128, 64,
      .group = { { 256, 1, 4096 } } },
    { "7", "pages of 1 prefill 2 x 8192", MULTIPLY, CONTIGUOUS, 32, 8, 128, 1,
      .group = { { 2, 8192, 8192 } } },
    { "7", "pages of 16 prefill 2 x 8192", MULTIPLY, CONTIGUOUS, 32, 8, 128, 16,
      .group = { { 2, 8192, 8192 } } },
    { "7", "pages of 64 prefill 2 x 8192", MULTIPLY, CONTIGUOUS, 32, 8, 128, 64,
      .group = { { 2, 8192, 8192 } } },
    { "8", "append 128 rows b=256 L=4096 32/8", MULTIPLY, NOBODY, 32, 8, 128, 16,
      .group = { { 256, 128, 4096 } } },
    { "8", "append 512 rows b=4 L=32768 32/8", MULTIPLY, NOBODY, 32, 8, 128, 16,
      .group = { { 4, 512, 32768 } } },
    { "10", "mixed 128 decodes + 1 prefill of 2048", LATENCY, NOBODY, 28, 4, 128, 16,
      .group = { { 128, 1, 2048 }, { 1, 2048, 2048 } } },
    { "10", "mixed 128 decodes + 2 prefills of 2048", LATENCY, NOBODY, 28, 4, 128, 16,
      .group = { { 128, 1, 2048 }, { 2, 2048, 2048 } } },
    { "11", "prefix 32768+128 b=64", LATENCY, UNSHARED, 32, 8, 128, 16,
      .group = { { 64, 1, 32896 } }, .prefix = 32768, .sharing = true },
    { "11", "prefix 8192+128 b=256", LATENCY, UNSHARED, 32, 8, 128, 16,
      .group = { { 256, 1, 8320 } }, .prefix = 8192, .sharing = true },
    { "11", "prefix 1024+128 b=16", LATENCY, UNSHARED, 32, 8, 128, 16,
      .group = { { 16, 1, 1152 } }, .prefix = 1024, .sharing = true },
    { "12", "trees 16 x 4 of 1024+256", LATENCY, UNSHARED, 32, 8, 128, 16,
      .group = { { 64, 1, 1280 } }, .prefix = 1024, .share = 4, .sharing = true },
    { "12", "trees 16 x 16 of 1024+256", LATENCY, UNSHARED, 32, 8, 128, 16,
      .group = { { 256, 1, 1280 } }, .prefix = 1024, .share = 16, .sharing = true },
    { "12", "trees 16 x 1 of 1024+256", LATENCY, UNSHARED, 32, 8, 128, 16,
      .group = { { 16, 1, 1280 } }, .prefix = 1024, .share = 1, .sharing = true },
    { "13", "rope as read window=4092 b=8 40/40", READ, UNTURNED, 40, 40, 128, 16,
      .group = { { 8, 1, 4096 } }, .window = 4092, .rope = true },
    { "13", "rope as read window=1020 b=32 40/40", READ, UNTURNED, 40, 40, 128, 16,
      .group = { { 32, 1, 4096 } }, .window = 1020, .rope = true },
    { "13", "streaming window=4092 b=8 40/40", READ, UNFUSED, 40, 40, 128, 16,
      .group = { { 8, 1, 4096 } }, .rope = true },
    { "13", "streaming window=1020 b=8 40/40", READ, UNFUSED, 40, 40, 128, 16,
      .group = { { 8, 1, 1024 } }, .rope = true },
    { "13", "streaming window=1020 b=32 40/40", READ, UNFUSED, 40, 40, 128, 16,
      .group = { { 32, 1, 1024 } }, .rope = true },
    { "13", "streaming window=252 b=32 40/40", READ, UNFUSED, 40, 40, 128, 16,
      .group = { { 32, 1, 256 } }, .rope = true },
    { "14", "sparse 512 of 32768 b=16 32/32", READ, NOBODY, 32, 32, 128, 16,
      .group = { { 16, 1, 512 } }, .pool_keys = 32768 },
    { "14", "sparse 4096 of 32768 b=16 32/32", READ, NOBODY, 32, 32, 128, 16,
      .group = { { 16, 1, 4096 } }, .pool_keys = 32768 },
    { "14", "sparse 512 of 32768 b=16 32/32 page 1", READ, NOBODY, 32, 32, 128, 1,
      .group = { { 16, 1, 512 } }, .pool_keys = 32768 },
    { "16", "invariant decode b=256 L=4096", READ, FASTEST, 32, 8, 128, 16,
      .group = { { 256, 1, 4096 } }, .invariant = true },
    { "16", "invariant decode b=32 L=4096", READ, FASTEST, 32, 8, 128, 16,
      .group = { { 32, 1, 4096 } }, .invariant = true },
    { "16", "invariant decode b=1 L=32768", READ, FASTEST, 32, 8, 128, 16,
      .group = { { 1, 1, 32768 } }, .invariant = true },
    { "17", "decode b=64 L=16384 fp8_e4m3", READ, BF16, 32, 8, 128, 16,
      .group = { { 64, 1, 16384 } }, .kv = "fp8_e4m3" },
    { "17", "decode b=64 L=16384 int8", READ, BF16, 32, 8, 128, 16,
      .group = { { 64, 1, 16384 } }, .kv = "int8" },
    { "0", "latent decode b=128 L=8192 128/1 page 64", MULTIPLY, NOBODY, 128, 1, 576, 64,
      .group = { { 128, 1, 8192 } }, .dim_v = 512, .latent = true },
    { "0", "latent decode b=128 L=8192 16/1 page 64", READ, NOBODY, 16, 1, 576, 64,
      .group = { { 128, 1, 8192 } }, .dim_v = 512, .latent = true },
};

/* ---- a shape as workloads ---- */

static void make_desc(const shape *s, workload_desc *d)
{
    const int64_t n = s->group[0].count + s->group[1].count;
    int32_t *rows = need((size_t)n, sizeof *rows), *lengths = need((size_t)n, sizeof *lengths);
    for (int64_t i = 0; i < n; i++) {
        const int g = i >= s->group[0].count;
        rows[i] = s->group[g].rows;
        lengths[i] = s->group[g].length;
    }
    if (s->zipf)
        bench_zipf(lengths);
    *d = (workload_desc){ .q_heads = s->q_heads, .kv_heads = s->kv_heads, .dim = s->dim,
                          .dim_v = s->dim_v, .latent = s->latent, .kv_dtype = s->kv,
                          .page_size = s->page, .num_requests = n, .rows = rows,
                          .lengths = lengths, .prefix = s->prefix, .share = s->share,
                          .pool_keys = s->pool_keys, .window = s->window, .rope = s->rope,
                          .sharing = s->sharing, .invariant = s->invariant };
}

static void free_desc(workload_desc *d)
{
    free((void *)(uintptr_t)d->rows);
    free((void *)(uintptr_t)d->lengths);
}

static void make_peer(const shape *s, workload_desc *d)
{
    make_desc(s, d);
    switch (s->against) {
    case NOBODY: break;
    case CONTIGUOUS: d->page_size = 0; break;
    case EVEN:
        free((void *)(uintptr_t)d->lengths);
        d->lengths = bench_constant(d->num_requests, BENCH_SKEW_TOTAL / BENCH_SKEW_REQUESTS);
        break;
    case FASTEST: d->invariant = false; break;
    case UNSHARED: d->sharing = false; break;
    case BF16: d->kv_dtype = NULL; break;
    case UNTURNED: d->rope = false; break;
    case UNFUSED:
        d->rope = false;
        d->rope_before = true;
        break;
    }
}

/* ---- limits ---- */

typedef struct floor_of {
    bench *b;
    const workload *w;
    limit limit;
} floor_of;

/* Seconds that the limit alone makes the workload take. */
static double time_floor(void *arg)
{
    enum { TIMES = 32 };
    const floor_of *f = arg;
    const memory *set = &f->b->set;
    gpu *g = f->b->gpu;
    gpu_multiplier m = { 0 };
    double seconds = 0;
    if (f->limit != READ && !gpu_multiply_rate(g, true, &m))
        return -1;
    if (f->limit == MULTIPLY)
        return f->w->flops / m.rate;
    const int64_t bytes = div_up((int64_t)f->w->bytes, 256) * 256;
    if (f->limit == LATENCY && bytes <= set->bytes / 4) {
        const int times = (int)min_i64(set->bytes / bytes, TIMES);
        if (!gpu_time_read(g, set->device, bytes, bytes, times, &seconds))
            return -1;
    } else {
        if (!gpu_time_read(g, set->device, set->bytes, 0, 2, &seconds))
            return -1;
        seconds *= f->w->bytes / (double)set->bytes;
    }
    const double multiplying = f->limit == LATENCY ? f->w->flops / m.rate : 0;
    return seconds > multiplying ? seconds : multiplying;
}

static void report_shape(bench *b, const shape *s, const workload *w, candidate *c)
{
    const double floor = bench_median(&c[1]),
                 amount = s->limit == MULTIPLY ? w->flops / 1e12 : w->bytes / 1e12;
    const bool rate = s->limit != LATENCY && s->against == NOBODY;
    result r = { .goal = s->goal, .name = s->name, .peer = peers[s->against],
                 .unit = !rate ? "us" : s->limit == MULTIPLY ? "TFLOP/s" : "TB/s",
                 .bound = rate ? amount / floor : 1e6 * floor };
    if (s->against != NOBODY)
        r.peer_value = 1e6 * bench_median(&c[2]);
    bench_set_ours(&r, &c[0], rate ? amount : 1e6, rate);
    bench_report(b, &r);
}

/* What does not fit into the GPU is left out with a word, as on the CPU. */
static bool fits(bench *b, const shape *s, const workload_desc *ours, const workload_desc *other)
{
    const int64_t bytes =
        workload_bytes(ours) + (s->against == NOBODY ? 0 : workload_bytes(other));
    if (bytes <= gpu_free_bytes(b->gpu) / 10 * 9)
        return true;
    fprintf(stderr, "foveal: %s is left out: it needs %.1f GB\n", s->name, (double)bytes / 1e9);
    return false;
}

static bool run_shape(bench *b, const shape *s)
{
    workload ours = { 0 }, other = { 0 };
    workload_desc d, e;
    floor_of floor = { b, &ours, s->limit };
    candidate c[] = { { bench_time_run, &ours, { 0 } },
                      { time_floor, &floor, { 0 } },
                      { bench_time_run, &other, { 0 } } };
    make_desc(s, &d);
    make_peer(s, &e);
    bool good = true;
    if (fits(b, s, &d, &e)) {
        good = workload_open(b->ctx, b->gpu, &d, &ours) &&
               (s->against == NOBODY || workload_open(b->ctx, b->gpu, &e, &other)) &&
               bench_take_turns(b, c, s->against == NOBODY ? 2 : 3);
        if (good)
            report_shape(b, s, &ours, c);
        bench_free(c, 3);
        workload_close(&ours);
        workload_close(&other);
    }
    free_desc(&d);
    free_desc(&e);
    return good;
}

static bool one_shape(bench *b, const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (!strcmp(shapes[i].name, name))
            return run_shape(b, &shapes[i]);
    return false;
}

/* ---- what moves keys and values ---- */

enum { TURN, APPEND, TURN_AND_APPEND, COPY };

/* fv_rope over all keys of a workload, or fv_append of all its keys and values in a shuffled order; or copies of as many bytes. */
typedef struct pass_of {
    workload *w;
    int what;
    bool values;                        /* COPY: V too */
    const memory *slots, *v;            /* where rows of K and V go: int32 each, and the cache of V (that of K is w->turned) */
    gpu_graph *graph;                   /* once for each copy of the workload's tensors */
} pass_of;

static fv_tensor rows_at(const workload *w, char *at)
{
    const int64_t heads = w->desc.kv_heads, dim = w->desc.dim;
    return (fv_tensor){ .data = at, .dtype = "bf16", .ndim = 3, .shape = { w->total_keys, heads, dim }, .stride = { heads * dim, dim, 1 } };
}

static fv_tensor pages_at(const workload *w, char *at)
{
    const int64_t page = w->desc.page_size, heads = w->desc.kv_heads, dim = w->desc.dim;
    return (fv_tensor){ .data = at, .dtype = "bf16", .ndim = 4, .shape = { w->num_pages, page, heads, dim },
                        .stride = { page * heads * dim, heads * dim, dim, 1 } };
}

static fv_index on_device(const memory *m, int64_t count)
{
    fv_index x = fv_i32(NULL, count);
    x.device = m->device;
    return x;
}

static fv_status append_all(const pass_of *p, int copy, fv_error *err)
{
    const workload *w = p->w;
    const fv_rope_desc rope = { .rotary_dim = w->desc.dim };
    const fv_append_desc desc = { .new_k = rows_at(w, w->k.device + copy * w->k_bytes), .new_v = rows_at(w, w->v.device + copy * w->v_bytes),
                                  .k = pages_at(w, w->turned.device), .v = pages_at(w, p->v->device),
                                  .rope = p->what == TURN_AND_APPEND ? &rope : NULL, .slots = on_device(p->slots, w->total_keys),
                                  .row_positions = p->what == TURN_AND_APPEND ? on_device(&w->positions, w->total_keys) : (fv_index){ 0 },
                                  .pages = { .page_size = w->desc.page_size, .num_pages = w->num_pages } };
    return fv_append(w->ctx, &desc, gpu_stream(w->gpu), err);
}

static fv_status pass(const pass_of *p, int copy, fv_error *err)
{
    workload *w = p->w;
    if (p->what == TURN)
        return workload_turn(w, copy, err);
    if (p->what != COPY)
        return append_all(p, copy, err);
    gpu_copy(w->gpu, w->turned.device, w->k.device + copy * w->k_bytes, w->k_bytes);
    if (p->values)
        gpu_copy(w->gpu, p->v->device, w->v.device + copy * w->v_bytes, w->v_bytes);
    return FV_OK;
}

static fv_status make_pass(pass_of *p, fv_error *err)
{
    workload *w = p->w;
    fv_status status = pass(p, 0, err);                 /* loads what a capture may not */
    gpu_capture(w->gpu);
    for (int i = 0; i < w->copies && status == FV_OK; i++)
        status = pass(p, i, err);
    p->graph = gpu_captured(w->gpu);
    if (status == FV_OK && !p->graph) {
        snprintf(err->text, sizeof err->text, "calls could not be captured in a graph");
        status = err->status = FV_E_DEVICE;
    }
    return status;
}

static double time_pass(void *arg)
{
    pass_of *p = arg;
    fv_error err = { 0 };
    if (p->graph || make_pass(p, &err) == FV_OK)
        return gpu_time(p->w->gpu, p->graph) / p->w->copies;
    cli_failed("move", &err);
    return -1;
}

/* Row i of request r goes where the batch's pages have it. */
static bool make_slots(workload *w, memory *slots)
{
    if (!memory_allocate(w->gpu, w->total_keys * (int64_t)sizeof(int32_t), slots))
        return false;
    int32_t *slot = (int32_t *)(void *)slots->data;
    for (int64_t e = 0; e < w->total_pages; e++)
        for (int32_t i = 0; i < w->desc.page_size; i++)
            slot[e * w->desc.page_size + i] = w->page_ids[e] * w->desc.page_size + i;
    memory_put(slots, 0, w->total_keys * (int64_t)sizeof(int32_t));
    return true;
}

static bool move(bench *b, const char *name, int what, int32_t heads, int32_t requests)
{
    int32_t *rows = bench_constant(requests, 1), *lengths = bench_constant(requests, 4096);
    const workload_desc desc = { .q_heads = heads, .kv_heads = heads, .dim = 128, .page_size = 16, .num_requests = requests,
                                 .rows = rows, .lengths = lengths, .rope_before = true };
    workload w;
    memory slots = { 0 }, v = { 0 };
    pass_of passes[] = { { .w = &w, .what = what, .slots = &slots, .v = &v },
                         { .w = &w, .what = COPY, .values = what != TURN, .v = &v } };
    candidate c[] = { { time_pass, &passes[0], { 0 } }, { time_pass, &passes[1], { 0 } } };
    const bool good = workload_open(b->ctx, b->gpu, &desc, &w) && make_slots(&w, &slots) &&
                      (what == TURN || memory_allocate(b->gpu, w.v_bytes, &v)) && bench_take_turns(b, c, 2);
    if (good) {
        const double amount = 2e-12 * (double)(w.k_bytes + (what == TURN ? 0 : w.v_bytes));
        result r = { .goal = what == TURN ? "13" : "0", .name = name, .unit = "TB/s", .peer = "copy of the same bytes",
                     .peer_value = amount / bench_median(&c[1]) };
        bench_set_ours(&r, &c[0], amount, true);
        bench_report(b, &r);
    }
    bench_free(c, 2);
    gpu_graph_free(b->gpu, passes[0].graph);
    gpu_graph_free(b->gpu, passes[1].graph);
    memory_release(&slots);
    memory_release(&v);
    workload_close(&w);
    free(rows);
    free(lengths);
    return good;
}

static bool move_turned(bench *b, const char *name) { return move(b, name, TURN, 40, 8); }
static bool move_appended(bench *b, const char *name) { return move(b, name, APPEND, 8, 16); }
static bool move_both(bench *b, const char *name) { return move(b, name, TURN_AND_APPEND, 8, 16); }

/* ---- the host's part ---- */

/* fv_run, by the host's clock: launches go into the stream, and are waited for when the clock has
 * stopped. */
static double time_launch(void *arg)
{
    enum { TIMES = 64 };
    workload *w = arg;
    fv_error err = { 0 };
    fv_status status = FV_OK;
    const double start = cli_now();
    for (int i = 0; i < TIMES && status == FV_OK; i++)
        status = workload_run(w, i % w->copies, &err);
    const double seconds = (cli_now() - start) / TIMES;
    gpu_wait(w->gpu);
    if (status == FV_OK)
        return seconds;
    cli_failed("run", &err);
    return -1;
}

static double time_bare_launch(void *arg)
{
    const workload *w = arg;
    return gpu_time_launch(w->gpu);
}

static bool launch_overhead(bench *b, const char *name)
{
    const int32_t rows = 1, length = 16;
    const workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                                 .num_requests = 1, .rows = &rows, .lengths = &length };
    workload w;
    candidate c[] = { { time_launch, &w, { 0 } }, { time_bare_launch, &w, { 0 } } };
    const bool good = workload_open(b->ctx, b->gpu, &desc, &w) && bench_take_turns(b, c, 2);
    if (good) {
        result r = { .goal = "0", .name = name, .unit = "us", .peer = "bare cuLaunchKernelEx",
                     .peer_value = 1e6 * bench_median(&c[1]) };
        bench_set_ours(&r, &c[0], 1e6, false);
        bench_report(b, &r);
    }
    bench_free(c, 2);
    workload_close(&w);
    return good;
}

static bool plan_decodes(bench *b, const char *name) { return bench_plan(b, name, 256, 1, true); }
static bool plan_ragged(bench *b, const char *name) { return bench_plan(b, name, 4096, 1, true); }
static bool plan_prefills(bench *b, const char *name)
{
    return bench_plan(b, name, 32, 8192, false);
}

/* A million page ids: taken along by each update, or read where they are. */
static bool plan_ids(bench *b, const char *name, bool on_device)
{
    enum { N = 256 };
    int32_t *rows = bench_constant(N, 1), *lengths = bench_constant(N, 4096);
    const workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 1,
                                 .num_requests = N, .rows = rows, .lengths = lengths,
                                 .no_tensors = true, .ids_on_device = on_device };
    const bool good = bench_plan_of(b, name, &desc);
    free(rows);
    free(lengths);
    return good;
}

static bool plan_host_ids(bench *b, const char *name) { return plan_ids(b, name, false); }
static bool plan_device_ids(bench *b, const char *name) { return plan_ids(b, name, true); }

/* ---- compiling ---- */

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

/* A plan of bf16 and dims 128 under three variants; number 0 is that of the times, 1 .. differ in
 * heads, groups, maxima and arguments. */
static fv_status create_plan(fv_ctx *ctx, int n, fv_plan **plan, fv_error *err)
{
    static const int groups[] = { 4, 1, 2, 3, 5, 8, 16, 32, 64, 128 };
    const int num_groups = (int)(sizeof groups / sizeof groups[0]), kv_heads = 1 + (n + 7) % 8;
    const fv_arg left = { .name = "left", .number = 1023 + n },
                 cap = { .name = "cap", .number = 30 + n % 3 };
    const fv_variant_use uses[] = { { .name = "causal" },
                                    { .name = "softcap", .args = &cap, .num_args = 1 },
                                    { .name = "window", .args = &left, .num_args = 1 } };
    const fv_problem problem = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16",
                                 .num_q_heads = kv_heads * groups[n % num_groups],
                                 .num_kv_heads = kv_heads, .dim_qk = 128,
                                 .variants = uses, .num_variants = 3 };
    const fv_plan_desc limits = { .max_requests = 64 - n % 3,
                                  .max_rows = n % 2 ? 64 - n % 3 : 4096 - n,
                                  .max_kv_tokens = (1 << 17) - n,
                                  .max_pages = (1 << 13) - n };
    return fv_plan_create(ctx, &problem, &limits, plan, err);
}

/* Seconds of fv_plan_create, in a context of its own. */
static double time_create(const bench *b, const char *folder)
{
    const fv_open_desc desc = { .device = b->device.device, .cache_dir = folder };
    fv_error err = { 0 };
    fv_ctx *ctx = NULL;
    fv_plan *plan = NULL;
    fv_status status = fv_open(&desc, &ctx, &err);
    const double start = cli_now();
    if (status == FV_OK)
        status = create_plan(ctx, 0, &plan, &err);
    const double seconds = cli_now() - start;
    fv_plan_destroy(&plan);
    fv_close(&ctx);
    if (status == FV_OK)
        return seconds;
    cli_failed("compile", &err);
    return -1;
}

/* The folder is empty (cold) or has it (warm); "warm" comes once from "cold". Cold is once a process: NVRTC itself
 * remembers what it has compiled. */
static bool compile_case(bench *b, const char *name, bool warm)
{
    candidate c = { 0 };
    bool good = true;
    for (int round = 0; round < (warm ? 10 : 1) && good; round++) {
        char folder[] = "/tmp/foveal_bench_XXXXXX";
        if (!mkdtemp(folder)) {
            cli_fail("%s cannot be made", folder);
            return false;
        }
        double seconds = time_create(b, folder);
        for (; warm && seconds >= 0 && round < 10; round++) {
            seconds = time_create(b, folder);
            sample_add(&c.times, seconds);
        }
        if (!warm)
            sample_add(&c.times, seconds);
        good = seconds >= 0;
        nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    }
    if (good) {
        result r = { .goal = "C", .name = name, .unit = "ms" };
        bench_set_ours(&r, &c, 1e3, false);
        bench_report(b, &r);
    }
    bench_free(&c, 1);
    return good;
}

static int entries;                     /* nftw has no argument to give */

static int count_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    const char *dot = strrchr(path + where->base, '.');
    (void)st;
    entries += type == FTW_F && dot && !strcmp(dot, ".cubin");
    return 0;
}

/* How many kernels a folder that was empty holds after plans of 1000 shapes. */
static bool compile_shapes(bench *b, const char *name)
{
    char folder[] = "/tmp/foveal_bench_XXXXXX";
    if (!mkdtemp(folder))
        return cli_fail("%s cannot be made", folder), false;
    const fv_open_desc desc = { .device = b->device.device, .cache_dir = folder };
    fv_error err = { 0 };
    fv_ctx *ctx = NULL;
    fv_status status = fv_open(&desc, &ctx, &err);
    for (int i = 0; i < 1000 && status == FV_OK; i++) {
        fv_plan *plan = NULL;
        status = create_plan(ctx, i, &plan, &err);
        fv_plan_destroy(&plan);
    }
    fv_close(&ctx);
    entries = 0;
    nftw(folder, count_one, 16, FTW_PHYS);
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    if (status == FV_OK)
        bench_report(b, &(result){ .goal = "C", .name = name, .unit = "kernels", .ours = entries,
                                   .low = entries, .high = entries });
    else
        cli_failed("compile", &err);
    return status == FV_OK;
}

static bool compile_cold(bench *b, const char *name) { return compile_case(b, name, false); }
static bool compile_warm(bench *b, const char *name) { return compile_case(b, name, true); }

static const bench_case others[] = {
    { "launch of fv_run", launch_overhead },
    { "rope of keys b=8 L=4096 40 heads", move_turned },
    { "append of keys b=16 L=4096 8 heads", move_appended },
    { "append of keys turned b=16 L=4096 8 heads", move_both },
    { "plan 256 decodes", plan_decodes },
    { "plan 4096 ragged decodes", plan_ragged },
    { "plan 32 prefills of 8192", plan_prefills },
    { "plan 256 x 4096 page 1 ids on the host", plan_host_ids },
    { "plan 256 x 4096 page 1 ids on the GPU", plan_device_ids },
    { "compile causal softcap window cold", compile_cold },
    { "compile causal softcap window from disk", compile_warm },
    { "compile 1000 shapes of bf16 dims 128", compile_shapes },
};

bool bench_gpu_case(int n, bench_case *out)
{
    const int num_shapes = (int)(sizeof shapes / sizeof shapes[0]),
              num_others = (int)(sizeof others / sizeof others[0]);
    if (n < 0 || n >= num_shapes + num_others)
        return false;
    *out = n < num_shapes ? (bench_case){ shapes[n].name, one_shape } : others[n - num_shapes];
    return true;
}
