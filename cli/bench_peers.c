/* SPDX-License-Identifier: Apache-2.0 */
/* bench_peers.c -- the engine on a CPU beside attention of other projects (peer.h): the same
 * numbers in K and V, the same threads, taking turns in one process.
 *
 * The engine reads shuffled pages of 16 keys in a decode; the peers need no page table. Two rows a
 * case and way: milliseconds, and the error against the definition in double.
 */
#include "bench.h"
#include "definition.h"
#include "peer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the same problem for a peer ---- */

static const char *cache_name(const workload *w)
{
    return w->desc.kv_dtype ? w->desc.kv_dtype : "bf16";
}

static double cache_scale(const workload *w) { return w->desc.kv_dtype ? WORKLOAD_SCALE : 1; }

/* Row `key` of a head, as bf16. What an int8 stands for is a bf16 number. */
static void copy_key(const workload *w, const char *at, uint16_t *to)
{
    const element_type *type = element_find(cache_name(w)), *bf16 = element_find("bf16");
    if (type == bf16) {
        memcpy(to, at, (size_t)(w->desc.dim * bf16->bytes));
        return;
    }
    for (int64_t i = 0; i < w->desc.dim; i++)
        bf16->store(to + i, type->load(at + i * type->bytes) * cache_scale(w));
}

/* K or V of all requests: [requests][heads][keys][dim], out of pages or of one run of keys. */
static uint16_t *gather(const workload *w, const char *cache)
{
    const workload_desc *d = &w->desc;
    const int64_t keys = d->lengths[0], page = d->page_size ? d->page_size : keys,
                  bytes = d->dim * element_find(cache_name(w))->bytes;
    uint16_t *out = need((size_t)(w->total_keys * d->kv_heads * d->dim), sizeof *out), *to = out;
    for (int64_t r = 0; r < d->num_requests; r++)
        for (int64_t h = 0; h < d->kv_heads; h++)
            for (int64_t key = 0; key < keys; key++, to += d->dim) {
                const int64_t id = d->page_size ? w->page_ids[w->page_indptr[r] + key / page] : r;
                copy_key(w, cache + ((id * page + key % page) * d->kv_heads + h) * bytes, to);
            }
    return out;
}

/* [requests][rows][heads][dim] with heads in front of rows. */
static uint16_t *gather_queries(const workload *w)
{
    const workload_desc *d = &w->desc;
    const int64_t rows = d->rows[0], n = d->num_requests;
    const uint16_t *q = (const uint16_t *)w->q.data;
    uint16_t *out = need((size_t)(n * rows * d->q_heads * d->dim), sizeof *out), *to = out;
    for (int64_t r = 0; r < n; r++)
        for (int64_t h = 0; h < d->q_heads; h++)
            for (int64_t row = 0; row < rows; row++, to += d->dim)
                memcpy(to, q + ((r * rows + row) * d->q_heads + h) * d->dim,
                       (size_t)d->dim * sizeof *to);
    return out;
}

static peer_problem problem_of(const workload *w)
{
    const workload_desc *d = &w->desc;
    return (peer_problem){ .requests = d->num_requests, .q_heads = d->q_heads,
                           .kv_heads = d->kv_heads, .rows = d->rows[0], .keys = d->lengths[0],
                           .dim = d->dim, .causal = d->rows[0] > 1,
                           .scale = (float)(1 / sqrt(d->dim)), .q = gather_queries(w),
                           .k = gather(w, w->k.data), .v = gather(w, w->v.data) };
}

static void free_problem(peer_problem *p)
{
    free(p->q);
    free(p->k);
    free(p->v);
}

/* ---- times ---- */

/* A library's threads go on looking for work after it is done, for up to some 10 ms, and must not
 * do so beside the next candidate. So each turn begins with a rest, then a run that wakes the
 * candidate's own threads and caches; one that takes long does not notice. */
typedef struct side {
    workload *ours;                     /* or */
    const peer_kind *kind;
    void *prepared;
    double last;
} side;

static double run_once(side *s)
{
    if (s->ours)
        return bench_time_run(s->ours);
    const double start = cli_now();
    return s->kind->run(s->prepared) ? cli_now() - start : -1;
}

static double time_turn(void *arg)
{
    const struct timespec rest = { 0, 20000000 };
    const double long_run = 0.1;
    side *s = arg;
    nanosleep(&rest, NULL);
    if (s->last < long_run && run_once(s) < 0)
        return -1;
    return s->last = run_once(s);
}

/* ---- errors ---- */

typedef struct errors {
    double ours, theirs, size;          /* sums of squares */
} errors;

static void add_row(const workload *w, const side *s, int64_t request, int64_t head, int64_t row,
                    errors *e)
{
    const workload_desc *d = &w->desc;
    const element_type *bf16 = element_find("bf16");
    const int32_t first_page[] = { (int32_t)request };
    double q[256], want[256], magnitude[256], theirs[256], lse;
    const definition_cache cache = { .type = element_find(cache_name(w)), .k = w->k.data,
                                     .v = w->v.data,
                                     .page_size = d->page_size ? d->page_size : d->lengths[0],
                                     .kv_heads = d->kv_heads, .dim_k = d->dim, .dim_v = d->dim,
                                     .k_scale = cache_scale(w), .v_scale = cache_scale(w) };
    const int64_t place = ((request * d->rows[0] + row) * d->q_heads + head) * d->dim;
    for (int64_t i = 0; i < d->dim; i++)
        q[i] = bf16->load((const uint16_t *)w->q.data + place + i);
    const definition_row at = { .q = q, .scale = 1 / sqrt(d->dim),
                                .kv_head = head / (d->q_heads / d->kv_heads),
                                .pages = d->page_size ? w->page_ids + w->page_indptr[request]
                                                      : first_page,
                                .position = d->lengths[0] - d->rows[0] + row, .window = -1 };
    definition_attend(&cache, &at, want, magnitude, &lse);
    s->kind->row(s->prepared, request, head, row, theirs);
    for (int64_t i = 0; i < d->dim; i++) {
        const double ours = bf16->load((const uint16_t *)w->o.data + place + i);
        e->ours += (ours - want[i]) * (ours - want[i]);
        e->theirs += (theirs[i] - want[i]) * (theirs[i] - want[i]);
        e->size += want[i] * want[i];
    }
}

/* ---- the comparison ---- */

enum { MAX_WAYS = 2 };

typedef struct comparison {
    const char *goal, *name;
    workload *w;
    const peer *p;
    const peer_problem *problem;
    int n;                              /* sides: ours, then the ways that the peer takes */
    side sides[1 + MAX_WAYS];
    candidate c[1 + MAX_WAYS];
    char peers[1 + MAX_WAYS][64];
} comparison;

static void add_side(comparison *x, side s, const char *way)
{
    snprintf(x->peers[x->n], sizeof x->peers[x->n], "%.47s%.15s", x->p->name, way);
    x->sides[x->n] = s;
    x->c[x->n] = (candidate){ time_turn, &x->sides[x->n], { 0 } };
    x->n++;
}

/* Of rows spread over requests, heads and positions: root mean squares, as shares of the outputs'
 * own. false: the two have not computed the same. */
static bool report_errors(bench *b, const comparison *x, int i)
{
    enum { ROWS = 16 };
    const double too_much = 0.1;
    const workload_desc *d = &x->w->desc;
    errors e = { 0 };
    char title[80];
    for (int64_t row = 0; row < ROWS; row++)
        add_row(x->w, &x->sides[i], row % d->num_requests, row * 7 % d->q_heads,
                (d->rows[0] - 1) * (row + 1) / ROWS, &e);
    snprintf(title, sizeof title, "%s error", x->name);
    const double ours = sqrt(e.ours / e.size), theirs = sqrt(e.theirs / e.size);
    const result r = { .goal = x->goal, .name = title, .unit = "1e-6", .peer = x->peers[i],
                       .ours = 1e6 * ours, .low = 1e6 * ours, .high = 1e6 * ours,
                       .peer_value = 1e6 * theirs };
    bench_report(b, &r);
    if (ours < too_much && theirs < too_much)
        return true;
    cli_fail("%s: the two have not computed the same", x->name);
    return false;
}

static void report_time(bench *b, comparison *x, int i)
{
    result r = { .goal = x->goal, .name = x->name, .unit = "ms", .peer = x->peers[i],
                 .peer_value = 1e3 * bench_median(&x->c[i]) };
    bench_set_ours(&r, &x->c[0], 1e3, false);
    bench_report(b, &r);
}

/* Ours and the peer's ways take turns. */
static bool compare(bench *b, comparison *x)
{
    const peer_kind *kind = x->p->kind;
    add_side(x, (side){ .ours = x->w }, "");
    for (int way = 0; kind->ways[way]; way++) {
        void *prepared = kind->prepare(x->p->functions, x->problem, way);
        if (prepared)
            add_side(x, (side){ .kind = kind, .prepared = prepared }, kind->ways[way]);
    }
    bool good = x->n > 1 && bench_take_turns(b, x->c, x->n);
    if (!good)
        cli_fail("%s: %s cannot run this", x->name, x->p->name);
    for (int i = 1; i < x->n; i++) {
        if (good)
            report_time(b, x, i);
        good = good && report_errors(b, x, i);
        kind->close(x->sides[i].prepared);
    }
    bench_free(x->c, x->n);
    return good;
}

/* ---- cases ---- */

typedef struct peer_case {
    const char *name;
    const peer_kind *kind;
    int64_t requests;
    int32_t rows, keys;                 /* of each request */
} peer_case;

static const peer_case cases[] = {
    { "torch decode b=8 L=32768 32/8", &peer_torch, 8, 1, 32768 },
    { "torch decode b=1 L=4096 32/8", &peer_torch, 1, 1, 4096 },
    { "torch prefill L=2048 32/8", &peer_torch, 1, 2048, 2048 },
    { "torch prefill L=8192 32/8", &peer_torch, 1, 8192, 8192 },
    { "ggml decode b=8 L=32768 32/8", &peer_ggml_f16, 8, 1, 32768 },
    { "ggml decode b=1 L=4096 32/8", &peer_ggml_f16, 1, 1, 4096 },
    { "ggml prefill L=2048 32/8", &peer_ggml_f16, 1, 2048, 2048 },
    { "ggml prefill L=8192 32/8", &peer_ggml_f16, 1, 8192, 8192 },
    { "ggml decode b=8 L=32768 32/8 int8", &peer_ggml_q8, 8, 1, 32768 },
    { "ggml decode b=1 L=4096 32/8 int8", &peer_ggml_q8, 1, 1, 4096 },
};

static bool compare_with(bench *b, const peer_case *one, const peer *p)
{
    int32_t *rows = bench_constant(one->requests, one->rows),
            *lengths = bench_constant(one->requests, one->keys);
    const bool prefill = one->rows > 1, quantised = strcmp(p->kind->kv_dtype, "bf16");
    const workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128,
                                 .page_size = prefill ? 0 : 16, .num_requests = one->requests,
                                 .rows = rows, .lengths = lengths,
                                 .kv_dtype = quantised ? p->kind->kv_dtype : NULL };
    workload w = { 0 };
    bool good = true;
    /* The engine's, a dense copy in bf16 and the peer's own, which may have its heads repeated. */
    if (bench_fits(one->name, workload_bytes(&desc) * (prefill || quantised ? 6 : 4))) {
        good = workload_open(b->ctx, NULL, &desc, &w);
        peer_problem problem = good ? problem_of(&w) : (peer_problem){ 0 };
        comparison x = { .goal = prefill ? "18b" : "18a", .name = one->name, .w = &w, .p = p,
                         .problem = &problem };
        good = good && compare(b, &x);
        free_problem(&problem);
        workload_close(&w);
    }
    free(rows);
    free(lengths);
    return good;
}

static bool run_case(bench *b, const char *name)
{
    const peer_case *one = cases;
    while (strcmp(one->name, name))
        one++;
    peer p;
    if (!peer_open(one->kind, b->peers, b->threads, &p)) {
        bench_absent(b, name, p.name, p.why);
        return true;
    }
    const bool good = compare_with(b, one, &p);
    peer_close(&p);
    return good;
}

bool bench_peer_case(int n, bench_case *out)
{
    if (n < 0 || n >= (int)(sizeof cases / sizeof cases[0]))
        return false;
    *out = (bench_case){ cases[n].name, run_case };
    return true;
}
