/* SPDX-License-Identifier: Apache-2.0 */
/* replay.h -- what a replay was asked to do, and everything it found out: the source of the table,
 * of --json and of --report. */
#ifndef REPLAY_H
#define REPLAY_H

#include "bounds.h"
#include "check.h"

typedef struct replay_step {
    double start;                       /* on the serving clock, seconds */
    double plan, append, attention;     /* seconds, all layers */
    double bytes, flops;                /* see serve_result */
    double bound;                       /* seconds that this machine needs for them at least */
    double error;                       /* -1: nothing was compared */
    int64_t prefill_rows, decode_rows, requests, waiting;
    int64_t used_pages, cached_pages, free_pages;
} replay_step;

typedef struct replay {
    /* asked */
    const char *path, *file_name, *device;
    trace trace;
    serve_config config;
    scheduler_config scheduling;
    cli_device where;
    bool no_prefix;
    /* found */
    gpu *gpu;                           /* NULL: the CPU */
    char device_text[128];              /* the device for people */
    bounds bounds;
    replay_step *steps;
    int64_t num_steps, step_room;
    double clock;                       /* seconds of the serving clock: time of the steps, and
                                           waiting for arrivals */
    int64_t rows;                       /* tokens computed */
    int64_t peak_used, peak_held;       /* pages of running requests; these and cached ones */
    int64_t evicted_pages;
    int64_t longest;                    /* tokens of the longest request that was served */
    char *heaviest_plan;                /* SVG; NULL: none */
    int64_t heaviest_step;
    char kernel[64];
    scheduler scheduler;
    checker checker;
} replay;

/* One line of the table: printed in the terminal and in the report. */
typedef struct summary_line {
    char label[40], value[160];
} summary_line;

#define SUMMARY_MAX_LINES 24

/* Totals that several outputs need. */
typedef struct summary {
    double plan[3], append[3], attention[3];    /* seconds: total, p50, p99 of a step */
    double ttft[2], itl[2];             /* seconds: p50, p99 */
    double busy;                        /* plan + append + attention */
    double bytes_rate, flops_rate;      /* of the attention time */
    double bound_share;                 /* sum of the steps' bounds / attention time */
    double hit_rate;
    int64_t peak_bytes, held_bytes, padded_bytes, pool_bytes;
    int num_lines;
    summary_line lines[SUMMARY_MAX_LINES];
} summary;

void summary_make(replay *r, summary *out);
void summary_print(FILE *out, const replay *r, const summary *s);

/* --json: one object a line. */
bool json_step(FILE *out, const replay *r, int64_t step);
bool json_summary(FILE *out, const replay *r, const summary *s);

void report_write(FILE *out, replay *r, const summary *s);

/* "2 of 32 layers", and what else describes the run, in one line. */
void replay_describe(const replay *r, char *out, size_t size);

#endif
