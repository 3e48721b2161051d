/* SPDX-License-Identifier: Apache-2.0 */
/* bench.h -- what the cases of foveal bench share.
 *
 * A case has candidates: two ways of the engine, or one, and a physical limit measured with the
 * same clock. They take turns (A B C, C B A, ...), so that a machine that slows down slows all of
 * them, and medians are compared. A result is one row: ours, a peer, the bound, all in one unit.
 * The CPU's cases are bench_cpu.c's and, beside other libraries, bench_peers.c's, the GPU's
 * bench_gpu.c's; rows go to cmd_bench.c.
 */
#ifndef BENCH_H
#define BENCH_H

#include "bounds.h"
#include "stats.h"
#include "workload.h"

typedef struct bench {
    fv_ctx *ctx;
    gpu *gpu;                           /* NULL: the CPU */
    cli_device device;
    const char *filter, *commit, *peers;
    double seconds;                     /* of measuring, for each case */
    int threads;
    memory set;                         /* on a GPU: what is read for the ceiling */
    FILE *csv, *json;
    char device_name[128], date[16], commit_name[48];
    int failures;
} bench;

typedef struct bench_case {
    const char *name;
    bool (*run)(bench *b, const char *name);
} bench_case;

/* The n-th case of the device's list; false: there is none. */
bool bench_cpu_case(int n, bench_case *out);
bool bench_peer_case(int n, bench_case *out);   /* behind those of the CPU */
bool bench_gpu_case(int n, bench_case *out);

/* Room for workloads of these bytes on the CPU, with a margin for everybody else; false: the case
 * is left out. */
bool bench_fits(const char *name, int64_t bytes);

/* ---- candidates ---- */

typedef struct candidate {
    double (*measure)(void *arg);       /* seconds; negative: failed */
    void *arg;
    sample times;
} candidate;

double bench_time_run(void *workload);
double bench_time_plan(void *workload);         /* fv_plan_update, by the host's clock */

bool bench_take_turns(bench *b, candidate *c, int n);   /* false: a candidate failed */
double bench_median(candidate *c);
void bench_free(candidate *c, int n);

/* ---- results ---- */

typedef struct result {
    const char *goal;                   /* of the goals that docs/cli.md names; "0": none */
    const char *name, *unit, *peer;     /* peer NULL: none */
    double ours, low, high;             /* median, p10 and p90, in `unit` */
    double peer_value, bound;           /* bound 0: none */
    bool rate;                          /* more is better */
} result;

/* Times of a candidate in a unit: x = per / seconds for rates, seconds x per for times. */
void bench_set_ours(result *r, candidate *c, double per, bool rate);
void bench_report(bench *b, const result *r);
void bench_absent(bench *b, const char *name, const char *peer, const char *why);

/* fv_plan_update alone, in us. Lengths of "ragged" batches are spread over 16..2047. */
bool bench_plan(bench *b, const char *name, int64_t n, int32_t rows_each, bool ragged);
bool bench_plan_of(bench *b, const char *name, const workload_desc *desc);

int32_t *bench_constant(int64_t n, int32_t x);  /* n times x; the caller's to free */

/* 16 lengths in proportion to 1/i, 16384 in all. */
enum { BENCH_SKEW_REQUESTS = 16, BENCH_SKEW_TOTAL = 16384 };
void bench_zipf(int32_t lengths[BENCH_SKEW_REQUESTS]);

#endif
