/* SPDX-License-Identifier: Apache-2.0 */
/* checkstream.c -- graphs, streams, devices, bad data and the compiler's cache on a real GPU: the scenarios (tests/cases/scenarios.md), a function each,
 * of the same number.
 *
 *     checkstream [--device cuda:0] [--match S0] [--kills N]
 *     checkstream --payload THREADS       one process of the scenarios that need fresh ones: runs a decode in each thread, prints what the cache did
 *
 * Expected values are those of a direct run on one stream, bit for bit. Needs libc, the driver and NVRTC. Last line "N passed, N failed". Exit status
 * 77: no GPU. */
#include "cuda/state.h"
#include "ctx.h"
#include "os.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_REQUESTS = 300, DIM = 128 };

static int passed, failed;
static const char *device_name = "cuda:0", *self;
static fv_error err;

static bool check(bool fine, const char *what)
{
    if (fine) passed++;
    else failed++;
    if (!fine) printf("    FAILED: %s  %s\n", what, err.text);
    err.text[0] = 0;
    fflush(stdout);
    return fine;
}

#define CHECK(condition) check((condition), #condition)
#define CALL(call) check((call) == FV_OK, #call)

static uint64_t state = 88172645463325252u;

static uint32_t draw(uint32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

/* ------------------------------------------------------------------------------------------------- a device and a batch */

typedef struct machine {
    fv_ctx *ctx;
    fv__cuda_device *device;
    CUstream stream[2];
} machine;

static bool open_machine(machine *m, const char *name)
{
    *m = (machine){ 0 };
    if (fv_open(&(fv_open_desc){ .device = name }, &m->ctx, &err) != FV_OK) return false;
    m->device = m->ctx->cuda->device;
    for (int i = 0; i < 2; i++) fv__cuda_stream_create(m->device, &m->stream[i], &err);
    return true;
}

static void close_machine(machine *m)
{
    for (int i = 0; i < 2; i++) fv__cuda_stream_destroy(m->device, m->stream[i]);
    check(fv_close(&m->ctx) == FV_OK, "fv_close");
}

/* Requests with random pages of one pool. */
typedef struct batch {
    machine *m;
    int n, hq, hk, page, pages;         /* pages: of each request */
    CUdeviceptr q, k, v;
    int32_t rows[MAX_REQUESTS + 1], lengths[MAX_REQUESTS], *ids;
} batch;

/* bf16 in [-1, 1], a block of 1 MB again and again. */
static CUdeviceptr random_rows(machine *m, size_t bytes)
{
    enum { BLOCK = 1 << 20 };
    CUdeviceptr p = 0;
    uint16_t *block = malloc(BLOCK);
    for (int i = 0; i < BLOCK / 2; i++) block[i] = (uint16_t)(0x3c00 + draw(0x380) + (draw(2) << 15));
    fv__cuda_alloc(m->device, bytes, &p, &err);
    for (size_t at = 0; p && at < bytes; at += BLOCK)
        fv__cuda_to_device(m->device, p + at, block, bytes - at < BLOCK ? bytes - at : BLOCK, m->stream[0], &err);
    fv__cuda_stream_sync(m->device, m->stream[0], &err);
    free(block);
    return p;
}

static bool make_batch(batch *b, machine *m, int n, int hq, int hk, int page, int64_t keys)
{
    *b = (batch){ .m = m, .n = n, .hq = hq, .hk = hk, .page = page, .pages = (int)((keys + page - 1) / page) };
    const int total = n * b->pages;
    const size_t pool = (size_t)total * (size_t)(page * hk * DIM) * 2;
    b->q = random_rows(m, (size_t)(n * hq * DIM) * 2);
    b->k = random_rows(m, pool);
    b->v = random_rows(m, pool);
    b->ids = malloc(sizeof *b->ids * (size_t)total);
    for (int i = 0; i < total; i++) b->ids[i] = i;
    for (int i = total - 1; i > 0; i--) {
        const int j = (int)draw((uint32_t)i + 1), x = b->ids[i];
        b->ids[i] = b->ids[j];
        b->ids[j] = x;
    }
    return b->q && b->k && b->v;
}

static void free_batch(batch *b)
{
    fv__cuda_free(b->m->device, b->q);
    fv__cuda_free(b->m->device, b->k);
    fv__cuda_free(b->m->device, b->v);
    free(b->ids);
}

static fv_plan *make_plan(const batch *b)
{
    const fv_variant_use causal = { .name = "causal" };
    const fv_problem p = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = b->hq, .num_kv_heads = b->hk, .dim_qk = DIM,
                           .variants = &causal, .num_variants = 1 };
    const fv_plan_desc limits = { .max_requests = b->n, .max_rows = b->n, .max_kv_tokens = (int64_t)b->n * b->pages * b->page,
                                  .max_pages = (int64_t)b->n * b->pages };
    fv_plan *plan = NULL;
    CALL(fv_plan_create(b->m->ctx, &p, &limits, &plan, &err));
    return plan;
}

/* The first n requests with these lengths. */
static fv_status update(fv_plan *plan, const batch *b, int n, const int32_t *lengths, CUstream stream)
{
    const fv_batch x = { .num_requests = n, .lengths = fv_i32(lengths, n),
                         .pages = { .page_size = b->page, .num_pages = (int64_t)b->n * b->pages, .ids = fv_i32(b->ids, (int64_t)b->n * b->pages),
                                    .table_width = b->pages, .table_stride = b->pages } };
    return fv_plan_update(plan, NULL, &x, stream, &err);
}

/* O [n][hq][DIM] bf16, then LSE [n][hq] f32. */
static size_t out_bytes(const batch *b) { return (size_t)(b->n * b->hq) * (DIM * 2 + 4); }

static fv_status run(fv_plan *plan, const batch *b, CUdeviceptr out, CUstream stream)
{
    const int64_t pages = (int64_t)b->n * b->pages, token = b->hk * DIM;
    const fv_tensor rows = { .ndim = 3, .shape = { b->n, b->hq, DIM }, .stride = { b->hq * DIM, DIM, 1 } };
    const fv_tensor cache = { .ndim = 4, .shape = { pages, b->page, b->hk, DIM }, .stride = { b->page * token, token, DIM, 1 } };
    fv_tensors t = { .q = rows, .k = cache, .v = cache, .o = rows };
    t.q.data = (void *)(uintptr_t)b->q;
    t.k.data = (void *)(uintptr_t)b->k;
    t.v.data = (void *)(uintptr_t)b->v;
    t.o.data = (void *)(uintptr_t)out;
    t.lse = (fv_tensor){ .data = (void *)(uintptr_t)(out + (CUdeviceptr)(b->n * b->hq * DIM * 2)), .dtype = "f32", .ndim = 2,
                         .shape = { b->n, b->hq }, .stride = { b->hq, 1 } };
    return fv_run(plan, &t, stream, &err);
}

typedef struct output { CUdeviceptr device; char *host; size_t bytes; } output;

static output make_output(const batch *b)
{
    output o = { .bytes = out_bytes(b) };
    o.host = malloc(o.bytes);
    fv__cuda_alloc(b->m->device, o.bytes, &o.device, &err);
    fv__cuda_fill_bytes(b->m->device, o.device, 0xff, o.bytes, b->m->stream[0], &err);
    fv__cuda_stream_sync(b->m->device, b->m->stream[0], &err);
    return o;
}

static void free_output(const batch *b, output *o)
{
    fv__cuda_free(b->m->device, o->device);
    free(o->host);
}

static bool fetch(const batch *b, output *o)
{
    return fv__cuda_to_host(b->m->device, o->host, o->device, o->bytes, b->m->stream[0], &err) == FV_OK
        && fv__cuda_stream_sync(b->m->device, b->m->stream[0], &err) == FV_OK;
}

/* The first n rows of O and of LSE have the same bits. */
static bool same_rows(const batch *b, const output *x, const output *y, int n)
{
    const size_t row = (size_t)(b->hq * DIM) * 2, lse = (size_t)(b->n) * row;
    return !memcmp(x->host, y->host, (size_t)n * row) && !memcmp(x->host + lse, y->host + lse, (size_t)(n * b->hq) * 4);
}

/* A fresh plan, updated and run on one stream. */
static bool direct(const batch *b, int n, const int32_t *lengths, output *o)
{
    fv_plan *plan = make_plan(b);
    const bool ok = plan && update(plan, b, n, lengths, b->m->stream[0]) == FV_OK && run(plan, b, o->device, b->m->stream[0]) == FV_OK && fetch(b, o);
    fv_plan_destroy(&plan);
    return check(ok, "a direct run");
}

/* ---------------------------------------------------------------------------------------------------------------- graphs */

typedef struct graph { CUgraph graph; CUgraphExec exec; } graph;

static void begin(machine *m)
{
    fv__cuda_enter(m->device, &err);
    CHECK(!m->device->api.cuStreamBeginCapture(m->stream[0], CU_STREAM_CAPTURE_MODE_GLOBAL));
}

static graph end(machine *m)
{
    graph g = { 0 };
    CHECK(!m->device->api.cuStreamEndCapture(m->stream[0], &g.graph) && g.graph);
    CHECK(!m->device->api.cuGraphInstantiateWithFlags(&g.exec, g.graph, 0));
    fv__cuda_leave(m->device);
    return g;
}

static bool launch(machine *m, graph g)
{
    fv__cuda_enter(m->device, &err);
    const bool ok = !m->device->api.cuGraphLaunch(g.exec, m->stream[0]);
    fv__cuda_leave(m->device);
    return ok;
}

static void free_graph(machine *m, graph *g)
{
    fv__cuda_enter(m->device, &err);
    if (g->exec) m->device->api.cuGraphExecDestroy(g->exec);
    if (g->graph) m->device->api.cuGraphDestroy(g->graph);
    fv__cuda_leave(m->device);
}

static graph capture(fv_plan *plan, const batch *b, output *o)
{
    begin(b->m);
    CALL(run(plan, b, o->device, b->m->stream[0]));
    return end(b->m);
}

/* A graph for 8 requests, replayed with 6: the others have no keys. */
static void s031(machine *m)
{
    batch b;
    if (!CHECK(make_batch(&b, m, 8, 8, 2, 16, 400))) return;
    const int32_t eight[8] = { 100, 30, 400, 17, 1, 222, 64, 65 }, six[8] = { 300, 16, 1, 399, 250, 33, 0, 0 };
    output o = make_output(&b), want = make_output(&b);
    fv_plan *plan = make_plan(&b);
    CALL(update(plan, &b, 8, eight, m->stream[0]));
    graph g = capture(plan, &b, &o);
    CALL(update(plan, &b, 8, six, m->stream[0]));
    CHECK(launch(m, g) && fetch(&b, &o));
    if (direct(&b, 6, six, &want)) CHECK(same_rows(&b, &o, &want, 6));
    bool empty = true;
    for (int i = 6 * b.hq * DIM; i < 8 * b.hq * DIM; i++) empty = empty && (((uint16_t *)o.host)[i] & 0x7fff) == 0;
    for (int i = 6 * b.hq; i < 8 * b.hq; i++) empty = empty && ((float *)(o.host + 8 * b.hq * DIM * 2))[i] == -INFINITY;
    check(empty, "rows without keys: o = 0, lse = -inf");
    free_graph(m, &g);
    fv_plan_destroy(&plan);
    free_output(&b, &o);
    free_output(&b, &want);
    free_batch(&b);
}

static double time_launches(machine *m, graph g, int times)
{
    CUevent a, z;
    float ms = 0;
    fv__cuda_event_create(m->device, true, &a, &err);
    fv__cuda_event_create(m->device, true, &z, &err);
    launch(m, g);
    fv__cuda_event_record(m->device, a, m->stream[0], &err);
    for (int i = 0; i < times; i++) launch(m, g);
    fv__cuda_event_record(m->device, z, m->stream[0], &err);
    fv__cuda_event_sync(m->device, z, &err);
    fv__cuda_event_ms(m->device, a, z, &ms, &err);
    fv__cuda_event_destroy(m->device, a);
    fv__cuda_event_destroy(m->device, z);
    return ms * 1e3 / times;
}

/* Lengths grow from 100 to 100000 under a captured graph. The times are printed, not judged. */
static void s093(machine *m)
{
    batch b;
    if (!CHECK(make_batch(&b, m, 4, 8, 2, 16, 100000))) return;
    const int32_t few[4] = { 100, 100, 100, 100 }, many[4] = { 100000, 100000, 100000, 100000 };
    output o = make_output(&b), want = make_output(&b);
    fv_plan *plan = make_plan(&b), *fresh = make_plan(&b);
    CALL(update(plan, &b, 4, few, m->stream[0]));
    graph g = capture(plan, &b, &o);
    CHECK(launch(m, g) && fetch(&b, &o));
    if (direct(&b, 4, few, &want)) CHECK(same_rows(&b, &o, &want, 4));
    CALL(update(plan, &b, 4, many, m->stream[0]));
    CHECK(launch(m, g) && fetch(&b, &o));
    if (direct(&b, 4, many, &want)) CHECK(same_rows(&b, &o, &want, 4));
    CALL(update(fresh, &b, 4, many, m->stream[0]));
    graph h = capture(fresh, &b, &want);
    const double old = time_launches(m, g, 20), new = time_launches(m, h, 20);
    printf("    100000 keys: %.1f us under a graph captured with 100, %.1f us with a fresh plan (%.2f)\n", old, new, old / new);
    free_graph(m, &g);
    free_graph(m, &h);
    fv_plan_destroy(&plan);
    fv_plan_destroy(&fresh);
    free_output(&b, &o);
    free_output(&b, &want);
    free_batch(&b);
}

/* Lengths and page ids that kernels read from the caller's memory on the device. */
typedef struct live { CUdeviceptr lengths, ids; } live;

static live make_live(const batch *b, const int32_t *lengths)
{
    const size_t entries = (size_t)b->n * (size_t)b->pages;
    live l = { 0 };
    fv__cuda_alloc(b->m->device, 4 * (size_t)b->n, &l.lengths, &err);
    fv__cuda_alloc(b->m->device, 4 * entries, &l.ids, &err);
    fv__cuda_to_device(b->m->device, l.lengths, lengths, 4 * (size_t)b->n, b->m->stream[0], &err);
    fv__cuda_to_device(b->m->device, l.ids, b->ids, 4 * entries, b->m->stream[0], &err);
    return l;
}

/* Entry i of a list on the device becomes x. */
static void poke(const batch *b, CUdeviceptr list, int i, int32_t x)
{
    CALL(fv__cuda_to_device(b->m->device, list + 4 * (CUdeviceptr)i, &x, 4, b->m->stream[0], &err));
    CALL(fv__cuda_stream_sync(b->m->device, b->m->stream[0], &err));
}

static fv_plan *plan_live(const batch *b, const live *l, const int32_t *lengths, bool checked)
{
    const fv_variant_use causal = { .name = "causal" };
    const fv_problem p = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = b->hq, .num_kv_heads = b->hk, .dim_qk = DIM,
                           .variants = &causal, .num_variants = 1 };
    const int64_t entries = (int64_t)b->n * b->pages;
    const fv_plan_desc limits = { .max_requests = b->n, .max_rows = b->n, .max_kv_tokens = entries * b->page, .max_pages = entries,
                                  .checked = checked };
    fv_batch x = { .num_requests = b->n, .lengths = fv_i32(lengths, b->n),
                   .pages = { .page_size = b->page, .num_pages = entries, .ids = fv_i32(b->ids, entries), .table_width = b->pages,
                              .table_stride = b->pages } };
    x.lengths.device = (const void *)(uintptr_t)l->lengths;
    x.pages.ids.device = (const void *)(uintptr_t)l->ids;
    fv_plan *plan = NULL;
    CALL(fv_plan_create(b->m->ctx, &p, &limits, &plan, &err));
    CALL(fv_plan_update(plan, NULL, &x, b->m->stream[0], &err));
    return plan;
}

/* What the error word says after one more launch: of a graph, or of a run. */
static fv_errors after_launch(fv_plan *plan, const batch *b, output *o, const graph *g)
{
    fv_errors e = { 0 };
    if (g) CHECK(launch(b->m, *g));
    else CALL(run(plan, b, o->device, b->m->stream[0]));
    CALL(fv__cuda_stream_sync(b->m->device, b->m->stream[0], &err));
    CALL(fv_ctx_errors(b->m->ctx, &e, 1));
    CALL(fv__cuda_stream_sync(b->m->device, b->m->ctx->cuda->stream, &err));        /* the word is cleared in its own time */
    return e;
}

static bool is_stale(fv_errors e, int request, int64_t value)
{
    if (e.what == FV_FAULT_STALE && e.request == request && e.value == value && e.count >= 1) return true;
    printf("    fault %d, request %d, value %lld, count %lld\n", (int)e.what, e.request, (long long)e.value, (long long)e.count);
    return false;
}

/* A host-made plan, and device memory that changes behind its back: checked mode says so, at each launch until it is planned again. */
static void stale_plans(machine *m, bool graphs)
{
    batch b;
    if (!CHECK(make_batch(&b, m, 4, 8, 2, 16, 400))) return;
    const int32_t lengths[4] = { 100, 30, 400, 64 };
    live l = make_live(&b, lengths);
    output o = make_output(&b);
    fv_plan *plan = plan_live(&b, &l, lengths, true), *unchecked = plan_live(&b, &l, lengths, false);
    graph captured = { 0 }, *g = NULL;
    if (graphs) {
        captured = capture(plan, &b, &o);
        g = &captured;
    }
    const int of_request_1 = b.pages, old = b.ids[of_request_1], other = b.ids[0];
    CHECK(after_launch(plan, &b, &o, g).count == 0);
    poke(&b, l.lengths, 2, 333);
    CHECK(is_stale(after_launch(plan, &b, &o, g), 2, 333));
    CHECK(is_stale(after_launch(plan, &b, &o, g), 2, 333));
    CHECK(after_launch(unchecked, &b, &o, NULL).count == 0);                /* shorter ones are clamped to, and right */
    poke(&b, l.lengths, 2, 400);
    CHECK(after_launch(plan, &b, &o, g).count == 0);
    poke(&b, l.ids, of_request_1 + 1, other);                               /* its 30 keys lie in two pages */
    CHECK(is_stale(after_launch(plan, &b, &o, g), 1, 30));
    poke(&b, l.ids, of_request_1 + 1, b.ids[of_request_1 + 1]);
    poke(&b, l.ids, of_request_1 + 2, old);                                 /* behind what it reads */
    CHECK(after_launch(plan, &b, &o, g).count == 0);
    poke(&b, l.ids, of_request_1, b.ids[of_request_1 + 1]);                 /* two pages change places */
    poke(&b, l.ids, of_request_1 + 1, old);
    CHECK(is_stale(after_launch(plan, &b, &o, g), 1, 30));
    poke(&b, l.ids, of_request_1, old);
    poke(&b, l.ids, of_request_1 + 1, b.ids[of_request_1 + 1]);
    poke(&b, l.lengths, 0, 99);
    CHECK(is_stale(after_launch(plan, &b, &o, g), 0, 99));
    const int32_t shorter[4] = { 99, 30, 400, 64 };
    fv_batch x = { .num_requests = 4, .lengths = fv_i32(shorter, 4),
                   .pages = { .page_size = b.page, .num_pages = 4 * b.pages, .ids = fv_i32(b.ids, 4 * b.pages), .table_width = b.pages,
                              .table_stride = b.pages } };
    x.lengths.device = (const void *)(uintptr_t)l.lengths;
    x.pages.ids.device = (const void *)(uintptr_t)l.ids;
    CALL(fv_plan_update(plan, NULL, &x, m->stream[0], &err));
    CHECK(after_launch(plan, &b, &o, g).count == 0);
    if (g) free_graph(m, g);
    fv_plan_destroy(&plan);
    fv_plan_destroy(&unchecked);
    fv__cuda_free(m->device, l.lengths);
    fv__cuda_free(m->device, l.ids);
    free_output(&b, &o);
    free_batch(&b);
}

static void s094(machine *m) { stale_plans(m, true); }
static void s094_direct(machine *m) { stale_plans(m, false); }

/* Two plans on two streams, 100 rounds without a wait. */
static void s096(machine *m)
{
    enum { ROUNDS = 100 };
    batch b[2];
    fv_plan *plans[2];
    static int32_t lengths[2][ROUNDS][8];
    output *o = calloc(2 * ROUNDS, sizeof *o);
    int right = 0;
    for (int i = 0; i < 2; i++) {
        if (!CHECK(make_batch(&b[i], m, 8, 8, i ? 8 : 2, 16, 700))) return;
        plans[i] = make_plan(&b[i]);
        for (int r = 0; r < ROUNDS; r++) {
            o[2 * r + i] = make_output(&b[i]);
            for (int k = 0; k < 8; k++) lengths[i][r][k] = (int32_t)draw(700);
        }
    }
    bool ok = true;
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < 2; i++) ok = ok && update(plans[i], &b[i], 8, lengths[i][r], m->stream[i]) == FV_OK;
        for (int i = 0; i < 2; i++) ok = ok && run(plans[i], &b[i], o[2 * r + i].device, m->stream[i]) == FV_OK;
    }
    check(ok, "200 updates and runs");
    for (int i = 0; i < 2; i++) fv__cuda_stream_sync(m->device, m->stream[i], &err);
    for (int i = 0; i < 2; i++) {
        output want = make_output(&b[i]);
        for (int r = 0; r < ROUNDS; r++) {
            const bool fine = update(plans[i], &b[i], 8, lengths[i][r], m->stream[0]) == FV_OK
                           && run(plans[i], &b[i], want.device, m->stream[0]) == FV_OK && fetch(&b[i], &want);
            right += fine && fetch(&b[i], &o[2 * r + i]) && same_rows(&b[i], &want, &o[2 * r + i], 8);
            free_output(&b[i], &o[2 * r + i]);
        }
        free_output(&b[i], &want);
        fv_plan_destroy(&plans[i]);
        free_batch(&b[i]);
    }
    printf("    %d of %d results are right\n", right, 2 * ROUNDS);
    CHECK(right == 2 * ROUNDS);
    free(o);
}

/* A second device, with the first one current. */
static void s099(machine *m)
{
    int count = 0;
    fv__cuda_count(&count, &err);
    if (count < 2) {
        printf("    not run: one device\n");
        return;
    }
    machine other;
    CUcontext before = NULL, after = NULL;
    const int32_t lengths[4] = { 100, 1, 333, 64 };
    batch b[2];
    output o[2];
    fv__cuda_enter(m->device, &err);
    m->device->api.cuCtxGetCurrent(&before);
    if (CHECK(open_machine(&other, "cuda:1"))) {
        machine *const machines[2] = { m, &other };
        for (int i = 0; i < 2; i++) {
            state = 4711;
            CHECK(make_batch(&b[i], machines[i], 4, 8, 2, 16, 400));
            o[i] = make_output(&b[i]);
            direct(&b[i], 4, lengths, &o[i]);
            m->device->api.cuCtxGetCurrent(&after);
            CHECK(before == after);
        }
        CHECK(same_rows(&b[0], &o[0], &o[1], 4));
        for (int i = 0; i < 2; i++) {
            free_output(&b[i], &o[i]);
            free_batch(&b[i]);
        }
        close_machine(&other);
    }
    m->device->api.cuCtxGetCurrent(&after);
    CHECK(before == after);
    fv__cuda_leave(m->device);
}

/* What is not ready while a stream is captured says so, and the capture lives. */
static void s111(machine *old)
{
    machine m;                          /* fresh: nothing is loaded in it */
    batch b;
    (void)old;
    if (!CHECK(open_machine(&m, device_name)) || !CHECK(make_batch(&b, &m, 4, 8, 2, 16, 400))) return;
    const int32_t lengths[4] = { 100, 1, 333, 64 };
    output o = make_output(&b), want = make_output(&b);
    fv_plan *plan = make_plan(&b);
    const fv_rope_desc turn = { .rotary_dim = DIM };
    const fv_tensor q = { .data = (void *)(uintptr_t)b.q, .dtype = "bf16", .ndim = 3, .shape = { b.n, b.hq, DIM }, .stride = { b.hq * DIM, DIM, 1 } };
    const int32_t positions[4] = { 1, 2, 3, 4 };
    CALL(update(plan, &b, 4, lengths, m.stream[0]));
    begin(&m);
    CHECK(update(plan, &b, 4, lengths, m.stream[0]) == FV_E_NOT_READY);
    CHECK(fv_rope(m.ctx, &turn, &q, fv_i32(positions, 4), &q, m.stream[0], &err) == FV_E_NOT_READY);
    CALL(run(plan, &b, o.device, m.stream[0]));
    graph g = end(&m);
    CHECK(launch(&m, g) && fetch(&b, &o));
    if (direct(&b, 4, lengths, &want)) CHECK(same_rows(&b, &o, &want, 4));
    /* loaded by now, but its positions lie on the host alone */
    CALL(fv_rope(m.ctx, &turn, &q, fv_i32(positions, 4), &q, m.stream[0], &err));
    begin(&m);
    CHECK(fv_rope(m.ctx, &turn, &q, fv_i32(positions, 4), &q, m.stream[0], &err) == FV_E_NOT_READY);
    CALL(run(plan, &b, o.device, m.stream[0]));
    graph h = end(&m);
    CHECK(launch(&m, h));
    CALL(fv__cuda_stream_sync(m.device, m.stream[0], &err));
    free_graph(&m, &g);
    free_graph(&m, &h);
    fv_plan_destroy(&plan);
    free_output(&b, &o);
    free_output(&b, &want);
    free_batch(&b);
    close_machine(&m);
}

/* 1000 shapes of one type and width. All requests read the same few pages. */
static void s112(machine *old)
{
    enum { SHAPES = 1000, POOL = 9216 };
    machine m;
    fv__jit_stats stats = { 0 };
    char folder[] = "/tmp/checkstream_XXXXXX";
    (void)old;
    if (!CHECK(mkdtemp(folder)) || setenv("FV_CACHE_DIR", folder, 1) || !CHECK(open_machine(&m, device_name))) return;
    const CUdeviceptr pool = random_rows(&m, POOL * DIM * 2 + 128 * DIM * 2), q = random_rows(&m, 2000 * 16 * DIM * 2);
    CUdeviceptr o = 0;
    CALL(fv__cuda_alloc(m.device, 2000 * 16 * DIM * 2, &o, &err));
    int fine = 0;
    int32_t *ids = malloc(sizeof *ids * (1 << 22));
    const fv_variant_use causal = { .name = "causal" };
    const int64_t before = fv__os_now_ns();
    for (int i = 0; i < SHAPES; i++) {
        const int group = 1 + (int)draw(16), page = 1 + (int)draw(128), n = 1 + (int)draw(300);
        const bool decode = draw(2);
        const int longest = page < 4 ? 1000 : 9000, width = (longest + page - 1) / page, pages = POOL / page;
        int32_t lengths[MAX_REQUESTS], rows[MAX_REQUESTS + 1] = { 0 };
        for (int r = 0; r < n; r++) {
            lengths[r] = (int32_t)draw((uint32_t)longest);
            rows[r + 1] = rows[r] + (decode ? 1 : (int32_t)draw(6));
            for (int k = 0; k < width; k++) ids[r * width + k] = (int32_t)draw((uint32_t)pages);
        }
        const int total = decode ? n : rows[n];
        const fv_problem p = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = group, .num_kv_heads = 1, .dim_qk = DIM,
                               .variants = &causal, .num_variants = 1 };
        const fv_plan_desc limits = { .max_requests = n, .max_rows = decode ? n : total + n + 1, .max_kv_tokens = (int64_t)n * longest,
                                      .max_pages = (int64_t)n * width };
        fv_batch x = { .num_requests = n, .lengths = fv_i32(lengths, n),
                       .pages = { .page_size = page, .num_pages = pages, .ids = fv_i32(ids, (int64_t)n * width), .table_width = width,
                                  .table_stride = width } };
        if (!decode) x.rows = fv_i32(rows, n + 1);
        const fv_tensor row = { .data = (void *)(uintptr_t)q, .ndim = 3, .shape = { total, group, DIM }, .stride = { group * DIM, DIM, 1 } };
        fv_tensors t = { .q = row, .o = row,
                         .k = { .data = (void *)(uintptr_t)pool, .ndim = 4, .shape = { pages, page, 1, DIM }, .stride = { page * DIM, DIM, DIM, 1 } } };
        t.v = t.k;
        t.o.data = (void *)(uintptr_t)o;
        fv_plan *plan = NULL;
        fine += fv_plan_create(m.ctx, &p, &limits, &plan, &err) == FV_OK && fv_plan_update(plan, NULL, &x, m.stream[0], &err) == FV_OK
             && fv_run(plan, &t, m.stream[0], &err) == FV_OK && fv__cuda_stream_sync(m.device, m.stream[0], &err) == FV_OK;
        fv_plan_destroy(&plan);
    }
    fv__jit_cache_stats(m.ctx->cuda->cache, &stats);
    printf("    %d of %d shapes run, %lld compilations, %.1f ms a shape\n", fine, SHAPES, (long long)stats.compiles,
           (double)(fv__os_now_ns() - before) * 1e-6 / SHAPES);
    CHECK(fine == SHAPES);
    CHECK(stats.compiles <= 2);
    free(ids);
    fv__cuda_free(m.device, pool);
    fv__cuda_free(m.device, q);
    fv__cuda_free(m.device, o);
    close_machine(&m);
}

/* ------------------------------------------------------------------------------------------- bad data and odd descriptors */

/* 33 keys in pages [1, 2, num_pages], on the device already; healthy requests beside it. */
static void s013(machine *m)
{
    batch b;
    if (!CHECK(make_batch(&b, m, 4, 8, 2, 16, 400))) return;
    const int32_t lengths[4] = { 33, 30, 400, 64 };
    live l = make_live(&b, lengths);
    output o = make_output(&b), want = make_output(&b);
    fv_plan *plan = plan_live(&b, &l, lengths, false);
    const int entries = b.n * b.pages, good = b.ids[2];
    if (direct(&b, 4, lengths, &want)) {
        fv_errors e = { 0 };
        poke(&b, l.ids, 2, entries);
        e = after_launch(plan, &b, &o, NULL);
        if (!CHECK(e.what == FV_FAULT_PAGE_ID && e.request == 0 && e.slot == 2 && e.value == entries && e.count > 0))
            printf("    fault %d, request %d, slot %lld, value %lld\n", (int)e.what, e.request, (long long)e.slot, (long long)e.value);
        CHECK(fetch(&b, &o));
        const size_t row = (size_t)(b.hq * DIM) * 2;
        CHECK(!memcmp(o.host + row, want.host + row, 3 * row));
        poke(&b, l.ids, 2, good);
        CHECK(after_launch(plan, &b, &o, NULL).count == 0);
        CHECK(fetch(&b, &o) && same_rows(&b, &o, &want, 4));
    }
    fv_plan_destroy(&plan);
    fv__cuda_free(m->device, l.lengths);
    fv__cuda_free(m->device, l.ids);
    free_output(&b, &o);
    free_output(&b, &want);
    free_batch(&b);
}

/* Room for 64 tokens, 64 in use, a guard behind it: one more is refused, or told by the error word where only the device knows the length. */
static void s015(machine *m)
{
    enum { PAGE = 16, PAGES = 4, HEADS = 2 };
    const size_t token = HEADS * DIM * 2, pool = PAGES * PAGE * token, guard = PAGE * token;
    CUdeviceptr k = 0, rows = random_rows(m, token), length = 0, ids = 0;
    const int32_t page_ids[PAGES] = { 0, 1, 2, 3 }, row_offsets[2] = { 0, 1 }, indptr[2] = { 0, PAGES };
    const int32_t full = 65;
    char *before = malloc(pool + guard), *after = malloc(pool + guard);
    CALL(fv__cuda_alloc(m->device, 2 * (pool + guard), &k, &err));
    CALL(fv__cuda_fill_bytes(m->device, k, 0x5a, 2 * (pool + guard), m->stream[0], &err));
    CALL(fv__cuda_alloc(m->device, 4, &length, &err));
    CALL(fv__cuda_alloc(m->device, sizeof page_ids, &ids, &err));
    CALL(fv__cuda_to_device(m->device, length, &full, 4, m->stream[0], &err));
    CALL(fv__cuda_to_device(m->device, ids, page_ids, sizeof page_ids, m->stream[0], &err));
    CALL(fv__cuda_to_host(m->device, before, k, pool + guard, m->stream[0], &err));
    CALL(fv__cuda_stream_sync(m->device, m->stream[0], &err));
    const fv_tensor fresh = { .data = (void *)(uintptr_t)rows, .dtype = "bf16", .ndim = 3, .shape = { 1, HEADS, DIM },
                              .stride = { HEADS * DIM, DIM, 1 } };
    fv_append_desc d = { .new_k = fresh, .new_v = fresh, .num_requests = 1, .rows = fv_i32(row_offsets, 2), .lengths = fv_i32(&full, 1),
                         .pages = { .page_size = PAGE, .num_pages = PAGES, .indptr = fv_i32(indptr, 2), .ids = fv_i32(page_ids, PAGES) } };
    d.k = (fv_tensor){ .data = (void *)(uintptr_t)k, .dtype = "bf16", .ndim = 4, .shape = { PAGES, PAGE, HEADS, DIM },
                       .stride = { PAGE * HEADS * DIM, HEADS * DIM, DIM, 1 } };
    d.v = d.k;
    d.v.data = (void *)(uintptr_t)(k + pool + guard);
    CHECK(fv_append(m->ctx, &d, m->stream[0], &err) != FV_OK);
    d.lengths = (fv_index){ .device = (const void *)(uintptr_t)length, .count = 1, .stride = 1, .type = FV_INDEX_I32 };
    d.pages.ids.device = (const void *)(uintptr_t)ids;
    fv_errors e = { 0 };
    const fv_status status = fv_append(m->ctx, &d, m->stream[0], &err);
    CALL(fv__cuda_stream_sync(m->device, m->stream[0], &err));
    CALL(fv_ctx_errors(m->ctx, &e, 1));
    CALL(fv__cuda_stream_sync(m->device, m->ctx->cuda->stream, &err));
    check(status != FV_OK || e.count > 0, "refused, or in the error word");
    CALL(fv__cuda_to_host(m->device, after, k, pool + guard, m->stream[0], &err));
    CALL(fv__cuda_stream_sync(m->device, m->stream[0], &err));
    check(!memcmp(before, after, pool + guard), "cache and guard page are unchanged");
    fv__cuda_free(m->device, k);
    fv__cuda_free(m->device, rows);
    fv__cuda_free(m->device, length);
    fv__cuda_free(m->device, ids);
    free(before);
    free(after);
}

/* No requests; requests without rows; requests without keys and pages. */
static void s026(machine *m)
{
    batch b;
    if (!CHECK(make_batch(&b, m, 4, 8, 2, 16, 400))) return;
    const int32_t none[4] = { 0, 0, 0, 0 }, some[4] = { 100, 0, 7, 0 }, no_rows[4] = { 0, 0, 0, 0 };
    output o = make_output(&b), poison = make_output(&b);
    fv_plan *plan = make_plan(&b);
    CHECK(fetch(&b, &poison));
    CALL(update(plan, &b, 0, none, m->stream[0]));
    CALL(run(plan, &b, o.device, m->stream[0]));
    CHECK(fetch(&b, &o) && !memcmp(o.host, poison.host, o.bytes));
    fv_batch x = { .num_requests = 3, .rows = fv_i32(no_rows, 4), .lengths = fv_i32(some, 3),
                   .pages = { .page_size = b.page, .num_pages = 4 * b.pages, .ids = fv_i32(b.ids, 4 * b.pages), .table_width = b.pages,
                              .table_stride = b.pages } };
    CALL(fv_plan_update(plan, NULL, &x, m->stream[0], &err));
    CALL(run(plan, &b, o.device, m->stream[0]));
    CHECK(fetch(&b, &o) && !memcmp(o.host, poison.host, o.bytes));
    CALL(update(plan, &b, 4, none, m->stream[0]));
    CALL(run(plan, &b, o.device, m->stream[0]));
    CHECK(fetch(&b, &o));
    bool empty = true;
    for (int i = 0; i < 4 * b.hq * DIM; i++) empty = empty && (((uint16_t *)o.host)[i] & 0x7fff) == 0;
    for (int i = 0; i < 4 * b.hq; i++) empty = empty && ((float *)(o.host + 4 * b.hq * DIM * 2))[i] == -INFINITY;
    check(empty, "rows without keys: o = 0, lse = -inf");
    fv_plan_destroy(&plan);
    free_output(&b, &o);
    free_output(&b, &poison);
    free_batch(&b);
}

/* Every second entry of a longer array, of 32 and of 64 bits, on the host and on the device. */
static void s089(machine *m)
{
    batch b;
    if (!CHECK(make_batch(&b, m, 4, 8, 2, 16, 400))) return;
    const int32_t lengths[4] = { 100, 30, 400, 64 };
    const int entries = b.n * b.pages;
    output o = make_output(&b), want = make_output(&b);
    if (!direct(&b, 4, lengths, &want)) return;
    for (int wide = 0; wide < 2; wide++)
        for (int there = 0; there < 2; there++) {
            const size_t size = wide ? 8 : 4, bytes = size * 2 * (size_t)entries;
            char *host = malloc(bytes), *host_lengths = malloc(size * 8);
            memset(host, 0x7f, bytes);
            memset(host_lengths, 0x7f, size * 8);
            for (int i = 0; i < entries; i++) {
                if (wide) ((int64_t *)(void *)host)[2 * i] = b.ids[i];
                else ((int32_t *)(void *)host)[2 * i] = b.ids[i];
            }
            for (int i = 0; i < 4; i++) {
                if (wide) ((int64_t *)(void *)host_lengths)[2 * i] = lengths[i];
                else ((int32_t *)(void *)host_lengths)[2 * i] = lengths[i];
            }
            const fv_index_type type = wide ? FV_INDEX_I64 : FV_INDEX_I32;
            fv_batch x = { .num_requests = 4, .lengths = { .host = host_lengths, .count = 4, .stride = 2, .type = type },
                           .pages = { .page_size = b.page, .num_pages = entries, .table_width = b.pages, .table_stride = b.pages,
                                      .ids = { .host = host, .count = entries, .stride = 2, .type = type } } };
            CUdeviceptr copy = 0, copy_lengths = 0;
            if (there) {
                CALL(fv__cuda_alloc(m->device, bytes, &copy, &err));
                CALL(fv__cuda_alloc(m->device, size * 8, &copy_lengths, &err));
                CALL(fv__cuda_to_device(m->device, copy, host, bytes, m->stream[0], &err));
                CALL(fv__cuda_to_device(m->device, copy_lengths, host_lengths, size * 8, m->stream[0], &err));
                x.pages.ids.device = (const void *)(uintptr_t)copy;
                x.lengths.device = (const void *)(uintptr_t)copy_lengths;
            }
            const fv_variant_use causal = { .name = "causal" };
            const fv_problem p = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = b.hq, .num_kv_heads = b.hk, .dim_qk = DIM,
                                   .variants = &causal, .num_variants = 1 };
            const fv_plan_desc limits = { .max_requests = 4, .max_rows = 4, .max_kv_tokens = (int64_t)entries * b.page, .max_pages = 2 * entries };
            fv_plan *plan = NULL;
            CALL(fv_plan_create(m->ctx, &p, &limits, &plan, &err));
            CALL(fv_plan_update(plan, NULL, &x, m->stream[0], &err));
            CALL(run(plan, &b, o.device, m->stream[0]));
            CHECK(fetch(&b, &o) && same_rows(&b, &o, &want, 4));
            fv_plan_destroy(&plan);
            fv__cuda_free(m->device, copy);
            fv__cuda_free(m->device, copy_lengths);
            free(host);
            free(host_lengths);
        }
    free_output(&b, &o);
    free_output(&b, &want);
    free_batch(&b);
}

/* Invariant mode: a request of 500 keys alone, and among 31 others of 0 to 5000, at several places in the batch. */
static void s100(machine *m)
{
    enum { N = 32 };
    batch b;
    if (!CHECK(make_batch(&b, m, N, 8, 2, 16, 5000))) return;
    const size_t row = (size_t)(b.hq * DIM) * 2;
    const fv_variant_use causal = { .name = "causal" };
    const fv_problem p = { .q = "bf16", .k = "bf16", .v = "bf16", .o = "bf16", .num_q_heads = b.hq, .num_kv_heads = b.hk, .dim_qk = DIM,
                           .variants = &causal, .num_variants = 1 };
    const int64_t entries = (int64_t)N * b.pages;
    const fv_plan_desc limits = { .max_requests = N, .max_rows = N, .max_kv_tokens = entries * b.page, .max_pages = entries, .invariant = true };
    fv_plan *plan = NULL;
    output o = make_output(&b);
    char *alone = malloc(row), *alone_lse = malloc((size_t)b.hq * 4);
    CALL(fv_plan_create(m->ctx, &p, &limits, &plan, &err));
    const int places[5] = { 0, 0, 7, 16, 31 };
    for (int i = 0; i < 5; i++) {
        const int n = i ? N : 1, at = places[i];
        int32_t lengths[N], tables[N];
        for (int r = 0; r < n; r++) {
            lengths[r] = r == at ? 500 : (int32_t)draw(5001);
            tables[r] = r == at ? 3 : r == 3 ? at : r;          /* the request's pages are row 3's; its query is copied to its place */
        }
        const fv_batch x = { .num_requests = n, .lengths = fv_i32(lengths, n),
                             .pages = { .page_size = b.page, .num_pages = entries, .ids = fv_i32(b.ids, entries), .table_width = b.pages,
                                        .table_stride = b.pages, .table_rows = fv_i32(tables, n) } };
        const CUdeviceptr mine = b.q + (CUdeviceptr)at * row, first = b.q;
        if (at) CALL(fv__cuda_copy(m->device, mine, first, row, m->stream[0], &err));
        CALL(fv_plan_update(plan, NULL, &x, m->stream[0], &err));
        CALL(run(plan, &b, o.device, m->stream[0]));
        CHECK(fetch(&b, &o));
        const char *lse = o.host + (size_t)N * row + (size_t)(at * b.hq) * 4;
        if (i == 0) {
            memcpy(alone, o.host, row);
            memcpy(alone_lse, lse, (size_t)b.hq * 4);
        }
        CHECK(!memcmp(o.host + (size_t)at * row, alone, row) && !memcmp(lse, alone_lse, (size_t)b.hq * 4));
    }
    fv_plan_destroy(&plan);
    free_output(&b, &o);
    free_batch(&b);
    free(alone);
    free(alone_lse);
}

/* ----------------------------------------------------------------------------------------------- processes and the cache */

typedef struct worker { machine *m; uint64_t hash; bool ok; } worker;

/* Keys 13, pages of 4: three slots of the last page hold what they hold. */
static void *work(void *arg)
{
    worker *w = arg;
    batch b;
    output o;
    const int32_t lengths[1] = { 13 };
    w->ok = false;
    if (!make_batch(&b, w->m, 1, 16, 1, 4, 13)) return NULL;
    fv_plan *plan = make_plan(&b);
    o = make_output(&b);
    CUstream stream = NULL;
    fv__cuda_stream_create(w->m->device, &stream, NULL);
    w->ok = plan && update(plan, &b, 1, lengths, stream) == FV_OK && run(plan, &b, o.device, stream) == FV_OK
         && fv__cuda_stream_sync(w->m->device, stream, NULL) == FV_OK && fetch(&b, &o);
    for (size_t i = 0; i < o.bytes; i++) w->hash = (w->hash ^ (uint8_t)o.host[i]) * 0x100000001b3u;
    fv_plan_destroy(&plan);
    fv__cuda_stream_destroy(w->m->device, stream);
    free_output(&b, &o);
    free_batch(&b);
    return NULL;
}

static int payload(int threads)
{
    machine m;
    worker w[16] = { { 0 } };
    pthread_t ids[16];
    fv__jit_stats s = { 0 };
    if (threads < 1 || threads > 16 || !open_machine(&m, device_name)) {
        printf("payload: %s\n", err.text);
        return 1;
    }
    if (threads == 1) {
        w[0].m = &m;
        work(&w[0]);
    }
    for (int i = 0; i < threads && threads > 1; i++) {
        w[i].m = &m;
        pthread_create(&ids[i], NULL, work, &w[i]);
    }
    for (int i = 0; i < threads && threads > 1; i++) pthread_join(ids[i], NULL);
    fv__jit_cache_stats(m.ctx->cuda->cache, &s);
    bool ok = failed == 0;
    for (int i = 0; i < threads; i++) ok = ok && w[i].ok;
    printf("payload %s hash %llx compiles %lld disk %lld damaged %lld\n", ok ? "right" : "wrong", threads == 1 ? (unsigned long long)w[0].hash : 0ull,
           (long long)s.compiles, (long long)s.disk_hits, (long long)s.damaged);
    fflush(stdout);
    close_machine(&m);
    return !ok;
}

typedef struct report { bool ok; unsigned long long hash; long long compiles, disk, damaged; int warnings; } report;

/* Starts a payload; what it says comes through *fd. */
static pid_t start(const char *threads, const char *folder, const char *path, int *fd)
{
    int both[2];
    if (pipe(both)) return -1;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        dup2(both[1], 1);
        dup2(both[1], 2);
        close(both[0]);
        if (folder) setenv("FV_CACHE_DIR", folder, 1);
        else unsetenv("FV_CACHE_DIR"), unsetenv("XDG_CACHE_HOME"), unsetenv("HOME");
        if (path) setenv("PATH", path, 1);
        execl(self, self, "--device", device_name, "--payload", threads, (char *)NULL);
        _exit(127);
    }
    close(both[1]);
    *fd = both[0];
    return child;
}

static report finish(pid_t child, int fd)
{
    static char text[1 << 16];
    report r = { 0 };
    size_t n = 0;
    int status = 0;
    for (ssize_t got; n + 1 < sizeof text && (got = read(fd, text + n, sizeof text - 1 - n)) > 0;) n += (size_t)got;
    text[n] = 0;
    close(fd);
    waitpid(child, &status, 0);
    const char *line = strstr(text, "payload right");
    r.ok = WIFEXITED(status) && WEXITSTATUS(status) == 0 && line
        && sscanf(line, "payload right hash %llx compiles %lld disk %lld damaged %lld", &r.hash, &r.compiles, &r.disk, &r.damaged) == 4;
    for (const char *at = text; (at = strstr(at, "kernel cache:")); at++) r.warnings++;
    if (!r.ok) printf("    the process said: %.600s\n", text);
    return r;
}

static report one(const char *threads, const char *folder, const char *path)
{
    int fd = -1;
    const pid_t child = start(threads, folder, path, &fd);
    return child > 0 ? finish(child, fd) : (report){ 0 };
}

static bool new_folder(char folder[64])
{
    snprintf(folder, 64, "/tmp/checkstream_XXXXXX");
    return CHECK(mkdtemp(folder));
}

/* Files below a folder; the first one that holds a kernel in `entry`; how many have a name of something unfinished. */
static int list(const char *folder, char entry[512], int *unfinished)
{
    DIR *d = opendir(folder);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[512];
        struct stat st;
        if (e->d_name[0] == '.' && (!e->d_name[1] || !strcmp(e->d_name, ".."))) continue;
        snprintf(path, sizeof path, "%.250s/%.250s", folder, e->d_name);
        if (stat(path, &st)) continue;
        if (S_ISDIR(st.st_mode)) {
            n += list(path, entry, unfinished);
            continue;
        }
        n++;
        if (strstr(e->d_name, "tmp") || strstr(e->d_name, "lock")) ++*unfinished;
        else if (st.st_size > 1000) memcpy(entry, path, sizeof path);
    }
    if (d) closedir(d);
    return n;
}

static void remove_folder(const char *folder)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command)) printf("    %s could not be removed\n", folder);
}

/* What a process that runs alone gets. */
static unsigned long long right_hash(void)
{
    static unsigned long long hash;
    char folder[64];
    if (hash || !new_folder(folder)) return hash;
    hash = one("1", folder, NULL).hash;
    remove_folder(folder);
    return hash;
}

/* Empty cache, no tools. */
static void s103(machine *m)
{
    char folder[64];
    (void)m;
    if (!new_folder(folder)) return;
    const report r = one("1", folder, "/nonexistent");
    CHECK(r.ok && r.compiles == 1 && r.disk == 0);
    const report again = one("1", folder, "/nonexistent");
    CHECK(again.ok && again.compiles == 0 && again.disk == 1 && again.hash == r.hash);
    CHECK(r.hash == right_hash());
    remove_folder(folder);
}

/* A folder that nobody can write to; then no folder at all. */
static void s104(machine *m)
{
    (void)m;
    const report r = one("1", "/proc/self/fdinfo/foveal", NULL);
    CHECK(r.ok && r.compiles == 1 && r.warnings == 1 && r.hash == right_hash());
    const report homeless = one("1", NULL, NULL);
    CHECK(homeless.ok && homeless.warnings == (homeless.compiles > 0) && homeless.hash == right_hash());
}

/* 16 processes of 4 threads. */
static void s105(machine *m)
{
    enum { N = 16 };
    char folder[64], entry[512] = "";
    pid_t children[N];
    int fd[N], unfinished = 0, right = 0, once = 0;
    (void)m;
    if (!new_folder(folder)) return;
    for (int i = 0; i < N; i++) children[i] = start("4", folder, NULL, &fd[i]);
    for (int i = 0; i < N; i++) {
        const report r = finish(children[i], fd[i]);
        right += r.ok;
        once += r.compiles <= 1;
    }
    CHECK(right == N);
    CHECK(once == N);
    CHECK(list(folder, entry, &unfinished) >= 1 && unfinished == 0);
    remove_folder(folder);
}

static int kills = 20;

/* Killed while it compiles, again and again. */
static void s106(machine *m)
{
    char folder[64], entry[512] = "";
    int unfinished = 0;
    (void)m;
    if (!new_folder(folder)) return;
    for (int i = 0; i < kills; i++) {
        int fd = -1;
        const pid_t child = start("1", folder, NULL, &fd);
        const struct timespec pause = { 0, 1000000L * (long)(100 + draw(800)) };
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        close(fd);
    }
    const report r = one("1", folder, NULL);
    CHECK(r.ok && r.hash == right_hash());
    const report again = one("1", folder, NULL);
    CHECK(again.ok && again.compiles == 0 && again.hash == right_hash());
    list(folder, entry, &unfinished);
    CHECK(unfinished == 0);
    remove_folder(folder);
}

static bool spoil(const char *path, int how)
{
    struct stat st;
    const int f = open(path, O_RDWR);
    char x = 0;
    if (f < 0 || fstat(f, &st)) return false;
    bool ok = true;
    if (how == 0) ok = pread(f, &x, 1, st.st_size / 2) == 1 && (x ^= 1, pwrite(f, &x, 1, st.st_size / 2) == 1);
    else ok = ftruncate(f, how == 1 ? st.st_size - 100 : 0) == 0;
    close(f);
    return ok;
}

/* A byte flipped, a file cut short, an empty file. */
static void s107(machine *m)
{
    char folder[64], entry[512] = "";
    int unfinished = 0;
    (void)m;
    if (!new_folder(folder)) return;
    CHECK(one("1", folder, NULL).ok);
    for (int how = 0; how < 3; how++) {
        entry[0] = 0;
        list(folder, entry, &unfinished);
        CHECK(spoil(entry, how));
        const report r = one("1", folder, NULL);
        CHECK(r.ok && r.damaged == 1 && r.compiles == 1 && r.hash == right_hash());
        const report again = one("1", folder, NULL);
        CHECK(again.ok && again.damaged == 0 && again.compiles == 0);
    }
    remove_folder(folder);
}

static void set_times(const char *folder, time_t when)
{
    DIR *d = opendir(folder);
    const struct timespec times[2] = { { when, 0 }, { when, 0 } };
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[512];
        struct stat st;
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%.250s/%.250s", folder, e->d_name);
        if (!stat(path, &st) && S_ISDIR(st.st_mode)) set_times(path, when);
        utimensat(AT_FDCWD, path, times, 0);
    }
    if (d) closedir(d);
}

static void s109(machine *m)
{
    char folder[64];
    (void)m;
    if (!new_folder(folder)) return;
    CHECK(one("1", folder, NULL).ok);
    const time_t whens[2] = { 1, 4000000000 };
    for (int i = 0; i < 2; i++) {
        set_times(folder, whens[i]);
        const report r = one("1", folder, NULL);
        CHECK(r.ok && r.compiles == 0 && r.disk == 1 && r.hash == right_hash());
    }
    remove_folder(folder);
}

/* ------------------------------------------------------------------------------------------------------------------ main */

static const struct { const char *name; void (*fn)(machine *m); bool fresh; } scenarios[] = {
    { "S103", s103, true }, { "S104", s104, true }, { "S105", s105, true }, { "S106", s106, true }, { "S107", s107, true }, { "S109", s109, true },
    { "S013", s013, false }, { "S015", s015, false }, { "S026", s026, false }, { "S089", s089, false }, { "S100", s100, false },
    { "S031", s031, false }, { "S093", s093, false },
    { "S094 direct", s094_direct, false }, { "S094", s094, false }, { "S096", s096, false }, { "S099", s099, false }, { "S111", s111, false },
    { "S112", s112, false },
};

int main(int argc, char **argv)
{
    const char *match = NULL;
    int threads = 0;
    static char path[512];
    machine m = { 0 };
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--device") && i + 1 < argc) device_name = argv[++i];
        else if (!strcmp(argv[i], "--match") && i + 1 < argc) match = argv[++i];
        else if (!strcmp(argv[i], "--kills") && i + 1 < argc) kills = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--payload") && i + 1 < argc) threads = atoi(argv[++i]);
        else {
            printf("checkstream [--device cuda:0] [--match S0] [--kills N] [--payload THREADS]\n");
            return 2;
        }
    }
    if (threads) return payload(threads);
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n < 0) return 2;
    self = path;
    /* the processes first: nothing of the driver may be in this one when it forks */
    bool any = false;
    for (int fresh = 1; fresh >= 0; fresh--)
        for (int i = 0; i < FV__COUNT(scenarios); i++) {
            if (scenarios[i].fresh != fresh || (match && !strstr(scenarios[i].name, match))) continue;
            if (fresh && !any && !one("1", "/proc/self/fdinfo/foveal", NULL).ok) {
                printf("not run: no GPU runs the payload\n");
                return 77;
            }
            any = true;
            if (!fresh && !m.ctx && !open_machine(&m, device_name)) {
                printf("not run: %s\n", err.text);
                return 77;
            }
            const int before = failed;
            const int64_t started = fv__os_now_ns();
            printf("%s\n", scenarios[i].name);
            scenarios[i].fn(&m);
            printf("%s %s, %.1f s\n", scenarios[i].name, failed == before ? "ok" : "FAILED", (double)(fv__os_now_ns() - started) * 1e-9);
            fflush(stdout);
        }
    if (m.ctx) close_machine(&m);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
