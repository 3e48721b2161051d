/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_bench.c -- foveal bench: shapes whose limits are known, timed beside those limits; see
 * bench.h. Rows can be appended to bench/results.csv. */
#include "bench.h"
#include "progress.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- candidates ---- */

enum { MIN_ROUNDS = 5, MAX_ROUNDS = 2000 };

double bench_time_run(void *arg)
{
    fv_error err = { 0 };
    double seconds;
    if (workload_time(arg, &seconds, &err) == FV_OK)
        return seconds;
    cli_failed("run", &err);
    return -1;
}

/* A step is planned many times in a row: the clock's own cost and resolution drop out. */
double bench_time_plan(void *arg)
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

/* Takes turns until the time is used up. false: a candidate failed. */
bool bench_take_turns(bench *b, candidate *c, int n)
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

void bench_report(bench *b, const result *r)
{
    if (b->json != stdout)
        print_row(r);
    write_csv(b, r);
    write_json(b, r);
}

void bench_absent(bench *b, const char *name, const char *peer, const char *why)
{
    if (b->json != stdout)
        printf("%-38s %s is absent: %s\n", name, peer, why);
}

void bench_set_ours(result *r, candidate *c, double per, bool rate)
{
    const double low = sample_percentile(&c->times, 10), middle = sample_percentile(&c->times, 50),
                 high = sample_percentile(&c->times, 90);
    r->rate = rate;
    r->ours = rate ? per / middle : per * middle;
    r->low = rate ? per / high : per * low;
    r->high = rate ? per / low : per * high;
}

double bench_median(candidate *c) { return sample_percentile(&c->times, 50); }

void bench_free(candidate *c, int n)
{
    for (int i = 0; i < n; i++)
        sample_free(&c[i].times);
}

/* ---- what cases share ---- */

int32_t *bench_constant(int64_t n, int32_t x)
{
    int32_t *a = need((size_t)n, sizeof *a);
    for (int64_t i = 0; i < n; i++)
        a[i] = x;
    return a;
}

void bench_zipf(int32_t lengths[BENCH_SKEW_REQUESTS])
{
    double harmonic = 0;
    int32_t left = BENCH_SKEW_TOTAL;
    for (int i = 0; i < BENCH_SKEW_REQUESTS; i++)
        harmonic += 1.0 / (i + 1);
    for (int i = BENCH_SKEW_REQUESTS - 1; i >= 0; i--)
        left -= lengths[i] =
            i ? (int32_t)lround(BENCH_SKEW_TOTAL / (harmonic * (i + 1))) : left;
}

bool bench_plan_of(bench *b, const char *name, const workload_desc *desc)
{
    workload w;
    candidate c = { bench_time_plan, &w, { 0 } };
    const bool good = workload_open(b->ctx, b->gpu, desc, &w) && bench_take_turns(b, &c, 1);
    if (good) {
        result r = { .goal = "0", .name = name, .unit = "us" };
        bench_set_ours(&r, &c, 1e6, false);
        bench_report(b, &r);
    }
    bench_free(&c, 1);
    workload_close(&w);
    return good;
}

bool bench_plan(bench *b, const char *name, int64_t n, int32_t rows_each, bool ragged)
{
    int32_t *rows = bench_constant(n, rows_each), *lengths = bench_constant(n, rows_each);
    for (int64_t i = 0; i < n && ragged; i++)
        lengths[i] = (int32_t)(16 + mix64(11, (uint64_t)i) % 2032);
    const workload_desc desc = { .q_heads = 32, .kv_heads = 8, .dim = 128, .page_size = 16,
                                 .num_requests = n, .rows = rows, .lengths = lengths,
                                 .no_tensors = true };
    const bool good = bench_plan_of(b, name, &desc);
    free(rows);
    free(lengths);
    return good;
}

/* ---- the command ---- */

static bool wanted(const bench *b, const char *name)
{
    return !b->filter || strstr(name, b->filter);
}

/* The GPU's or the processor's name without what a CSV field cannot hold. */
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
    if (b->gpu)
        snprintf(b->device_name, sizeof b->device_name, "%s", gpu_name(b->gpu));
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

static bool case_of(const bench *b, int n, bench_case *out)
{
    return b->gpu ? bench_gpu_case(n, out) : bench_cpu_case(n, out);
}

static void run_cases(bench *b)
{
    progress bar = progress_begin();
    bench_case one;
    int count = 0;
    while (case_of(b, count, &one))
        count++;
    if (b->json != stdout)
        printf("%s\n%-38s %-8s %10s  %-20s %10s %6s  %s\n", b->device_name, "case", "unit",
               "median", "p10..p90", "bound", "share", "peer");
    for (int i = 0; case_of(b, i, &one); i++)
        if (wanted(b, one.name)) {
            bar.last = 0;
            progress_show(&bar, (double)i / count, one.name);
            if (bar.shown)
                fputs("\r\033[K", stderr);
            b->failures += !one.run(b, one.name);
        }
    progress_end(&bar);
}

static int list_cases(const bench *b)
{
    const char *name = b->device.device ? b->device.device : getenv("FV_DEVICE");
    const bool on_gpu = name && !strncmp(name, "cuda", 4);
    bench_case one;
    for (int i = 0; on_gpu ? bench_gpu_case(i, &one) : bench_cpu_case(i, &one); i++)
        if (wanted(b, one.name))
            puts(one.name);
    return CLI_OK;
}

static bool any_wanted(const bench *b)
{
    bench_case one;
    for (int i = 0; case_of(b, i, &one); i++)
        if (wanted(b, one.name))
            return true;
    return false;
}

/* On a GPU: with a set to read, 2 GiB or as much as there is. */
static int measure(bench *b)
{
    enum { PARTS = 8 };
    const int64_t most = (int64_t)2 << 30;
    name_device(b);
    if (b->gpu && !memory_allocate(b->gpu, min_i64(most, gpu_free_bytes(b->gpu) / PARTS), &b->set))
        return CLI_FAILED;
    run_cases(b);
    memory_release(&b->set);
    return b->failures ? cli_fail("%d cases failed", b->failures) : CLI_OK;
}

/* Files are opened when nothing is left to refuse: an old one is emptied by that. */
static int into_files(bench *b, const char *csv, const char *json)
{
    int code = CLI_FAILED;
    if (!any_wanted(b))
        return cli_misuse("no case's name holds \"%s\"; --list names them", b->filter);
    if (json && cli_writable(json) != CLI_OK)
        return CLI_FAILED;
    if (!open_csv(b, csv))
        return CLI_FAILED;
    if (json && !(b->json = cli_create(json)))
        cli_fail("%s: %s", json, strerror(errno));
    else
        code = measure(b);
    if (b->csv && !cli_close(b->csv))
        code = cli_unwritten(csv);
    if (b->json && !cli_close(b->json))
        code = cli_unwritten(json);
    return code;
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
        { "peers", "FOLDERS", "where libtorch_cpu.so and libggml.so lie, a:b (a CPU's peers)",
          CLI_TEXT, &b.peers, 0, 0, NULL },
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
    const cli_file files[] = { { "--csv", csv, true }, { "--json", json, true } };
    if ((code = cli_distinct(files, 2)) != CLI_OK)
        return code;
    if (list)
        return list_cases(&b);
    b.threads = cli_threads(&b.device);
    name_commit(&b);
    const time_t now = time(NULL);
    strftime(b.date, sizeof b.date, "%Y-%m-%d", gmtime(&now));
    if ((code = cli_open(&b.device, &b.ctx)) != CLI_OK)
        return code;
    gpu_open(b.ctx, &b.gpu);
    code = into_files(&b, csv, json);
    gpu_close(&b.gpu);
    fv_close(&b.ctx);
    return code;
}
