/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_bench.c -- foveal bench: shapes whose limits are known, timed beside those limits.
 *
 * A case has candidates: two ways of the engine, or one, and a physical limit measured with the
 * same clock. They take turns (A B C, C B A, ...), so that a machine that slows down slows all of
 * them, and medians are compared. A result is one row: ours, a peer, the bound, all in one unit.
 * Rows can be appended to bench/results.csv.
 */
#include "bounds.h"
#include "progress.h"
#include "stats.h"
#include "workload.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct bench {
    fv_ctx *ctx;
    cli_device device;
    const char *filter, *commit;
    double seconds;                     /* of measuring, for each case */
    int threads;
    FILE *csv, *json;
    char device_name[128], date[16], commit_name[48];
    int failures, rows;
} bench;

/* ---- candidates ---- */

enum { MAX_CANDIDATES = 4, MIN_ROUNDS = 5, MAX_ROUNDS = 2000 };

typedef struct candidate {
    double (*measure)(void *arg);       /* seconds; negative: failed */
    void *arg;
    sample times;
} candidate;

static double time_run(void *arg)
{
    fv_error err = { 0 };
    const double start = cli_now();
    if (workload_run(arg, &err) == FV_OK)
        return cli_now() - start;
    cli_failed("run", &err);
    return -1;
}

/* A step is planned many times in a row: the clock's own cost and resolution drop out. */
static double time_plan(void *arg)
{
    enum { TIMES = 16 };
    fv_error err = { 0 };
    const double start = cli_now();
    for (int i = 0; i < TIMES; i++)
        if (workload_update(arg, &err) != FV_OK) {
            cli_failed("plan", &err);
            return -1;
        }
    return (cli_now() - start) / TIMES;
}

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

/* Takes turns until the time is used up. false: a candidate failed. */
static bool take_turns(bench *b, candidate *c, int n)
{
    double spent = 0;
    for (int i = 0; i < n; i++)
        if (c[i].measure(c[i].arg) < 0)             /* warms up */
            return false;
    const double start = cli_now();
    for (int round = 0; round < MAX_ROUNDS && (round < MIN_ROUNDS || spent < b->seconds); round++) {
        for (int i = 0; i < n; i++) {
            candidate *turn = &c[round % 2 ? n - 1 - i : i];
            const double t = turn->measure(turn->arg);
            if (t < 0)
                return false;
            sample_add(&turn->times, t);
        }
        spent = cli_now() - start;
    }
    return true;
}

/* ---- rows ---- */

typedef struct result {
    const char *goal;                   /* of the goals that docs/cli.md names; "0": none */
    const char *name, *unit, *peer;     /* peer NULL: none */
    double ours, low, high;             /* median, p10 and p90, in `unit` */
    double peer_value, bound;           /* bound 0: none */
    bool rate;                          /* more is better */
} result;

static void print_number(char *out, size_t size, double x)
{
    snprintf(out, size, "%.*f", fabs(x) >= 100 ? 1 : fabs(x) >= 1 ? 2 : 4, x);
}

static void print_row(const result *r)
{
    char ours[32], low[32], high[32], bound[32] = "", peer[80] = "", share[16] = "";
    print_number(ours, sizeof ours, r->ours);
    print_number(low, sizeof low, r->low);
    print_number(high, sizeof high, r->high);
    if (r->bound > 0) {
        print_number(bound, sizeof bound, r->bound);
        snprintf(share, sizeof share, "%.0f %%",
                 100 * (r->rate ? r->ours / r->bound : r->bound / r->ours));
    }
    if (r->peer) {
        char value[32];
        print_number(value, sizeof value, r->peer_value);
        snprintf(peer, sizeof peer, "%s %s (%.2f x)", r->peer, value,
                 r->rate ? r->ours / r->peer_value : r->peer_value / r->ours);
    }
    char spread[80];
    snprintf(spread, sizeof spread, "%s..%s", low, high);
    printf("%-38s %-8s %10s  %-20s %10s %6s  %s\n", r->name, r->unit, ours, spread, bound, share,
           peer);
    fflush(stdout);
}

static void write_csv(bench *b, const result *r)
{
    if (!b->csv)
        return;
    fprintf(b->csv, "%s,%s,%s,%s,%s,%s,%.6g,%s,", b->date, b->commit_name, b->device_name, r->goal,
            r->name, r->unit, r->ours, r->peer ? r->peer : "");
    if (r->peer)
        fprintf(b->csv, "%.6g", r->peer_value);
    fputc(',', b->csv);
    if (r->bound > 0)
        fprintf(b->csv, "%.6g", r->bound);
    fputc('\n', b->csv);
}

static void write_json(bench *b, const result *r)
{
    json_t *o = b->json ? json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:f, s:f, s:f, s:s*, s:f, s:f}",
                                    "date", b->date, "commit", b->commit_name, "device",
                                    b->device_name, "goal", r->goal, "case", r->name, "unit",
                                    r->unit, "ours", r->ours, "p10", r->low, "p90", r->high, "peer",
                                    r->peer, "peer_value", r->peer_value, "bound", r->bound)
                        : NULL;
    if (o) {
        json_dumpf(o, b->json, JSON_COMPACT | JSON_REAL_PRECISION(9));
        fputc('\n', b->json);
    }
    json_decref(o);
}

static void report(bench *b, const result *r)
{
    b->rows++;
    if (b->json != stdout)
        print_row(r);
    write_csv(b, r);
    write_json(b, r);
}

/* Times of a candidate in a unit: x = per / seconds for rates, seconds x per for times. */
static void set_ours(result *r, candidate *c, double per, bool rate)
{
    const double low = sample_percentile(&c->times, 10), middle = sample_percentile(&c->times, 50),
                 high = sample_percentile(&c->times, 90);
    r->rate = rate;
    r->ours = rate ? per / middle : per * middle;
    r->low = rate ? per / high : per * low;
    r->high = rate ? per / low : per * high;
}

static double median(candidate *c) { return sample_percentile(&c->times, 50); }

static void free_candidates(candidate *c, int n)
{
    for (int i = 0; i < n; i++)
        sample_free(&c[i].times);
}

/* ---- cases ---- */

static bool wanted(const bench *b, const char *name)
{
    return !b->filter || strstr(name, b->filter);
}

/* Room for workloads of these bytes, with a margin for everybody else. */
static bool fits(const char *name, int64_t bytes)
{
    if (bytes <= cli_available_memory() / 10 * 8)
        return true;
    fprintf(stderr, "foveal: %s is left out: it needs %.1f GB\n", name, (double)bytes / 1e9);
    return false;
}

static int32_t *constant(int64_t n, int32_t x)
{
    int32_t *a = need((size_t)n, sizeof *a);
    for (int64_t i = 0; i < n; i++)
        a[i] = x;
    return a;
}

/* Decode of n requests of L keys in bf16 beside a streaming read of the same bytes; int8 beside
 * bf16. */
static bool decode_case(bench *b, const char *name, int64_t n, int32_t length, bool quantised)
{
    int32_t *rows = constant(n, 1), *lengths = constant(n, length);
    workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                           .num_requests = n, .rows = rows, .lengths = lengths };
    workload full, small = { 0 };
    bool good = true;
    if (fits(name, workload_bytes(&desc) * (quantised ? 3 : 2) / 2)) {
        good = workload_open(b->ctx, &desc, &full);
        desc.kv_dtype = "int8";
        good = good && (!quantised || workload_open(b->ctx, &desc, &small));
        read_floor floors[] = { { &full, b->threads }, { &small, b->threads } };
        candidate c[] = { { time_run, &full, { 0 } },
                          { time_read, &floors[0], { 0 } },
                          { time_run, &small, { 0 } },
                          { time_read, &floors[1], { 0 } } };
        good = good && take_turns(b, c, quantised ? 4 : 2);
        if (good && quantised) {
            result r = { .goal = "18a", .name = name, .unit = "ms", .peer = "own bf16",
                         .peer_value = 1e3 * median(&c[0]), .bound = 1e3 * median(&c[3]) };
            set_ours(&r, &c[2], 1e3, false);
            report(b, &r);
        } else if (good) {
            result r = { .goal = "18a", .name = name, .unit = "GB/s",
                         .bound = full.bytes / 1e9 / median(&c[1]) };
            set_ours(&r, &c[0], full.bytes / 1e9, true);
            report(b, &r);
        }
        free_candidates(c, 4);
        workload_close(&full);
        workload_close(&small);
    }
    free(rows);
    free(lengths);
    return good;
}

/* One causal prompt beside the fastest multiplier. */
static bool prefill_case(bench *b, const char *name, int32_t length)
{
    const workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .num_requests = 1,
                                 .rows = &length, .lengths = &length };
    workload w;
    bool good = workload_open(b->ctx, &desc, &w);
    multiply_floor floor = { w.flops, b->threads };
    candidate c[] = { { time_run, &w, { 0 } }, { time_multiply, &floor, { 0 } } };
    good = good && take_turns(b, c, 2);
    if (good) {
        result r = {
            .goal = "18b", .name = name, .unit = "GFLOP/s", .bound = w.flops / 1e9 / median(&c[1])
        };
        set_ours(&r, &c[0], w.flops / 1e9, true);
        report(b, &r);
    }
    free_candidates(c, 2);
    workload_close(&w);
    return good;
}

/* Two ways of the engine and the floor of the first: milliseconds. `rates`: also a row for the
 * peer's rate of reading. */
typedef struct pair {
    const char *goal, *name, *peer;
    workload_desc ours, other;
    bool prefill;                       /* the floor is the multiplier, not reading */
    bool rates;
} pair;

static void report_pair(bench *b, const pair *p, candidate *c, const workload *ours,
                        const workload *other)
{
    char name[64];
    result r = { .goal = p->goal, .name = p->name, .unit = "ms", .peer = p->peer,
                 .peer_value = 1e3 * median(&c[1]), .bound = 1e3 * median(&c[2]) };
    set_ours(&r, &c[0], 1e3, false);
    report(b, &r);
    if (!p->rates)
        return;
    snprintf(name, sizeof name, "%s off", p->name);
    result rate = {
        .goal = p->goal, .name = name, .unit = "GB/s", .bound = ours->bytes / 1e9 / median(&c[2])
    };
    set_ours(&rate, &c[1], other->asked_bytes / 1e9, true);
    report(b, &rate);
}

static bool pair_case(bench *b, const pair *p)
{
    workload ours, other = { 0 };
    bool good = workload_open(b->ctx, &p->ours, &ours) && workload_open(b->ctx, &p->other, &other);
    read_floor reading = { &ours, b->threads };
    multiply_floor multiplying = { ours.flops, b->threads };
    candidate c[] = { { time_run, &ours, { 0 } },
                      { time_run, &other, { 0 } },
                      { time_read, &reading, { 0 } } };
    if (p->prefill)
        c[2] = (candidate){ time_multiply, &multiplying, { 0 } };
    good = good && take_turns(b, c, 3);
    if (good)
        report_pair(b, p, c, &ours, &other);
    free_candidates(c, 3);
    workload_close(&ours);
    workload_close(&other);
    return good;
}

/* 16 requests, 16384 keys in all: in proportion to 1/i, against 1024 each. */
static bool skew_case(bench *b, const char *name, int32_t q_heads, int32_t kv_heads)
{
    enum { N = 16, TOTAL = 16384 };
    int32_t *rows = constant(N, 1), *even = constant(N, TOTAL / N), zipf[N], left = TOTAL;
    double harmonic = 0;
    for (int i = 0; i < N; i++)
        harmonic += 1.0 / (i + 1);
    for (int i = N - 1; i >= 0; i--)
        left -= zipf[i] = i ? (int32_t)lround(TOTAL / (harmonic * (i + 1))) : left;
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
    int32_t *rows = constant(n, 1), *lengths = constant(n, 4096 + 64);
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
    int32_t *lengths = constant(n, prefill ? 2048 : 4096), *rows = constant(n, prefill ? 2048 : 1);
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

/* The same bits whatever runs beside a request, against the fastest mode. */
static bool invariant_case(bench *b, const char *name, int64_t n, int32_t length)
{
    int32_t *lengths = constant(n, length), *rows = constant(n, 1);
    const workload_desc fast = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                                 .num_requests = n, .rows = rows, .lengths = lengths };
    pair p = { .goal = "16", .name = name, .peer = "own fastest", .ours = fast, .other = fast };
    p.ours.invariant = true;
    const bool good = pair_case(b, &p);
    free(rows);
    free(lengths);
    return good;
}

/* fv_plan_update alone. Lengths of "ragged" batches are spread over 16..2047. */
static bool plan_case(bench *b, const char *name, int64_t n, int32_t rows_each, bool ragged)
{
    int32_t *rows = constant(n, rows_each), *lengths = constant(n, rows_each);
    for (int64_t i = 0; i < n && ragged; i++)
        lengths[i] = (int32_t)(16 + mix64(11, (uint64_t)i) % 2032);
    const workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                                 .num_requests = n, .rows = rows, .lengths = lengths,
                                 .no_tensors = true };
    workload w;
    bool good = workload_open(b->ctx, &desc, &w);
    candidate c = { time_plan, &w, { 0 } };
    good = good && take_turns(b, &c, 1);
    if (good) {
        result r = { .goal = "0", .name = name, .unit = "us" };
        set_ours(&r, &c, 1e6, false);
        report(b, &r);
    }
    free_candidates(&c, 1);
    workload_close(&w);
    free(rows);
    free(lengths);
    return good;
}

static bool decode_8(bench *b, const char *name) { return decode_case(b, name, 8, 32768, false); }
static bool decode_1(bench *b, const char *name) { return decode_case(b, name, 1, 4096, false); }
static bool decode_8_int8(bench *b, const char *name)
{
    return decode_case(b, name, 8, 32768, true);
}
static bool decode_1_int8(bench *b, const char *name)
{
    return decode_case(b, name, 1, 4096, true);
}
static bool prefill_2k(bench *b, const char *name) { return prefill_case(b, name, 2048); }
static bool prefill_8k(bench *b, const char *name) { return prefill_case(b, name, 8192); }
static bool decode_page_1(bench *b, const char *name) { return pages_case(b, name, 1, false); }
static bool decode_page_16(bench *b, const char *name) { return pages_case(b, name, 16, false); }
static bool prefill_page_1(bench *b, const char *name) { return pages_case(b, name, 1, true); }
static bool prefill_page_16(bench *b, const char *name) { return pages_case(b, name, 16, true); }
static bool invariant_8(bench *b, const char *name) { return invariant_case(b, name, 8, 4096); }
static bool invariant_1(bench *b, const char *name) { return invariant_case(b, name, 1, 32768); }
static bool skew_32_32(bench *b, const char *name) { return skew_case(b, name, 32, 32); }
static bool skew_32_8(bench *b, const char *name) { return skew_case(b, name, 32, 8); }
static bool skew_32_4(bench *b, const char *name) { return skew_case(b, name, 32, 4); }
static bool prefix_32_32(bench *b, const char *name) { return prefix_case(b, name, 16, 32, 32); }
static bool prefix_32_8(bench *b, const char *name) { return prefix_case(b, name, 16, 32, 8); }
static bool prefix_one(bench *b, const char *name) { return prefix_case(b, name, 1, 32, 8); }
static bool plan_decodes(bench *b, const char *name) { return plan_case(b, name, 256, 1, true); }
static bool plan_ragged(bench *b, const char *name) { return plan_case(b, name, 4096, 1, true); }
static bool plan_prefill(bench *b, const char *name) { return plan_case(b, name, 32, 8192, false); }

static const struct {
    const char *name;
    bool (*run)(bench *b, const char *name);
} cases[] = {
    { "plan 256 decodes", plan_decodes },
    { "plan 4096 ragged decodes", plan_ragged },
    { "plan 32 prefills of 8192", plan_prefill },
    { "decode b=8 L=32768 32/8", decode_8 },
    { "decode b=1 L=4096 32/8", decode_1 },
    { "decode b=8 L=32768 32/8 int8", decode_8_int8 },
    { "decode b=1 L=4096 32/8 int8", decode_1_int8 },
    { "skew zipf b=16 32/32", skew_32_32 },
    { "skew zipf b=16 32/8", skew_32_8 },
    { "skew zipf b=16 32/4", skew_32_4 },
    { "prefix 4096+64 b=16 32/32", prefix_32_32 },
    { "prefix 4096+64 b=16 32/8", prefix_32_8 },
    { "prefix 4096+64 b=1 32/8", prefix_one },
    { "prefill L=2048 32/8", prefill_2k },
    { "prefill L=8192 32/8", prefill_8k },
    { "pages of 1 decode b=8 L=4096", decode_page_1 },
    { "pages of 16 decode b=8 L=4096", decode_page_16 },
    { "pages of 1 prefill L=2048", prefill_page_1 },
    { "pages of 16 prefill L=2048", prefill_page_16 },
    { "invariant decode b=8 L=4096", invariant_8 },
    { "invariant decode b=1 L=32768", invariant_1 },
};

enum { NUM_CASES = sizeof cases / sizeof cases[0] };

/* ---- the command ---- */

/* The processor's name without what a CSV field cannot hold. */
static void name_device(bench *b)
{
    char line[256], name[96] = "cpu";
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name : %95[^\n]", name) == 1)
            break;
    if (file)
        fclose(file);
    snprintf(b->device_name, sizeof b->device_name, "%s x%d", name, b->threads);
    for (char *c = b->device_name; *c; c++)
        if (*c == ',' || *c == '"')
            *c = ' ';
}

/* --commit, or what git says about the folder that the command runs in. */
static void name_commit(bench *b)
{
    snprintf(b->commit_name, sizeof b->commit_name, "%s", b->commit ? b->commit : "unknown");
    FILE *git = b->commit ? NULL : popen("git rev-parse --short HEAD 2>/dev/null", "r");
    char line[40];
    if (git && fgets(line, sizeof line, git) && line[0] != '\n') {
        line[strcspn(line, "\n")] = 0;
        snprintf(b->commit_name, sizeof b->commit_name, "%s", line);
    }
    if (git)
        pclose(git);
}

static bool open_csv(bench *b, const char *path)
{
    if (!path)
        return true;
    if (!(b->csv = fopen(path, "ab"))) {
        cli_fail("%s: %s", path, strerror(errno));
        return false;
    }
    if (fseek(b->csv, 0, SEEK_END) == 0 && ftell(b->csv) == 0)
        fputs("date,commit,device,goal,case,unit,ours,peer,peer_value,bound\n", b->csv);
    return true;
}

static void run_cases(bench *b)
{
    progress bar = progress_begin();
    if (b->json != stdout)
        printf("%s\n%-38s %-8s %10s  %-20s %10s %6s  %s\n", b->device_name, "case", "unit",
               "median", "p10..p90", "bound", "share", "peer");
    for (int i = 0; i < NUM_CASES; i++)
        if (wanted(b, cases[i].name)) {
            bar.last = 0;
            progress_show(&bar, (double)i / NUM_CASES, cases[i].name);
            if (bar.shown)
                fputs("\r\033[K", stderr);
            b->failures += !cases[i].run(b, cases[i].name);
        }
    progress_end(&bar);
}

static int list_cases(void)
{
    for (int i = 0; i < NUM_CASES; i++)
        puts(cases[i].name);
    return CLI_OK;
}

int cmd_bench(int argc, char **argv)
{
    bench b = { .seconds = 2 };
    const char *csv = NULL, *json = NULL;
    bool list = false;
    int first;
    const cli_option options[] = {
        { "filter", "TEXT", "only cases whose name holds TEXT", CLI_TEXT, &b.filter, 0, 0, NULL },
        { "list", NULL, "name the cases", CLI_FLAG, &list, 0, 0, NULL },
        { "seconds", "X", "measure each case for X seconds (2)",
          CLI_REAL, &b.seconds, 0, 3600, NULL },
        { "csv", "FILE", "append rows to a table like bench/results.csv",
          CLI_TEXT, &csv, 0, 0, NULL },
        { "json", "FILE", "one JSON object a row (-: standard output, no table)",
          CLI_TEXT, &json, 0, 0, NULL },
        { "commit", "NAME", "what the rows say was measured (git's answer)",
          CLI_TEXT, &b.commit, 0, 0, NULL },
        CLI_DEVICE_OPTIONS(b.device),
        { 0 },
    };
    int code = cli_parse("bench [OPTIONS]", options, argc, argv, &first);
    if (code != CLI_GO_ON)
        return code;
    if (first < argc)
        return cli_misuse("bench takes no argument \"%s\"", argv[first]);
    if (list)
        return list_cases();
    if (!memory_supported(&b.device))
        return CLI_FAILED;
    b.threads = cli_threads(&b.device);
    name_device(&b);
    name_commit(&b);
    const time_t now = time(NULL);
    strftime(b.date, sizeof b.date, "%Y-%m-%d", gmtime(&now));
    if (!open_csv(&b, csv))
        return CLI_FAILED;
    if (json && !(b.json = cli_create(json)))
        code = cli_fail("%s: %s", json, strerror(errno));
    else if ((code = cli_open(&b.device, &b.ctx)) == CLI_OK) {
        run_cases(&b);
        fv_close(&b.ctx);
        if (b.failures)
            code = cli_fail("%d cases failed", b.failures);
        else if (b.rows == 0)
            code = cli_misuse("no case's name holds \"%s\"; --list names them",
                              b.filter ? b.filter : "");
    }
    if (b.csv && !cli_close(b.csv))
        code = cli_fail("%s could not be written", csv);
    if (b.json && !cli_close(b.json))
        code = cli_fail("%s could not be written", json);
    return code;
}
