/* SPDX-License-Identifier: Apache-2.0 */
/* scheduler.h -- continuous batching over fv_cache: which requests of a trace compute how many rows
 * in the next step.
 *
 * A request waits, runs, and is finished (or is rejected at once when the pool can never hold it).
 * Each step gives, in this order,
 *   - one row to every running request that decodes,
 *   - chunks of rows to those whose input is not yet computed, oldest first,
 *   - places to waiting requests, first come first served, while the pool has room for their whole
 *     input,
 * until the token budget is spent. When a running request finds the pool full, the youngest running
 * one gives up its pages and waits again at the head of the queue; it computes its tokens anew (or
 * finds them in the cache) later. The oldest is never asked to, so there is always progress.
 *
 * Invariants: a request's rows of a step are tokens [done, done + rows); the cache holds exactly
 * done tokens of it between steps; known = input + generated is what may be computed.
 */
#ifndef SCHEDULER_H
#define SCHEDULER_H

#include "cli.h"
#include "stats.h"
#include "trace.h"

typedef struct live_request {
    int64_t index;                      /* in the trace */
    int64_t known, done, generated;
    int64_t rows;                       /* in the step that is being made or run */
    int32_t sequence;                   /* of the cache; -1: not running */
    uint64_t *keys;                     /* of the input's full pages */
    int64_t num_keys;
    double since;                       /* TTFT counts from here: its arrival, or its admission when
                                           arrivals are ignored */
    double last_token;
} live_request;

typedef struct scheduler_config {
    int64_t token_budget, max_requests, page_size, num_pages;
    double speed;                       /* arrivals are divided by this; 0: all requests are there
                                           at once */
    int64_t slide;                      /* >= 0: no layer looks further back than this, older pages
                                           are given back; -1 */
} scheduler_config;

typedef struct scheduler {
    scheduler_config config;
    const trace *trace;
    fv_cache *cache;
    live_request *requests;             /* [trace->count] */
    int64_t *queue;                     /* waiting: queue[queue_first .. queue_last) */
    int64_t queue_first, queue_last;    /* what lies behind queue_last has not arrived */
    live_request **running;             /* [max_requests], oldest admission first */
    int64_t num_running, peak_running;
    int64_t finished, rejected, preempted;
    int64_t hit_tokens, asked_tokens;   /* of first admissions */
    int64_t generated;                  /* tokens handed out */
    sample ttft, itl;                   /* seconds */
} scheduler;

void scheduler_init(scheduler *s, const scheduler_config *config, const trace *t, fv_cache *cache);
void scheduler_free(scheduler *s);

/* Gives rows to running requests; *rows is their sum. FV_OK, or what the cache failed with. */
fv_status scheduler_plan(scheduler *s, double now, int64_t *rows, fv_error *err);

/* The step's rows are computed at time `now`: tokens come out, finished requests leave. */
fv_status scheduler_advance(scheduler *s, double now, fv_error *err);

bool scheduler_is_done(const scheduler *s);
double scheduler_next_arrival(const scheduler *s);          /* of a request that has not arrived;
                                                               infinity: all have */

#endif
