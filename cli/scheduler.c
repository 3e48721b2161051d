/* SPDX-License-Identifier: Apache-2.0 */
/* scheduler.c -- see scheduler.h. */
#include "scheduler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void scheduler_init(scheduler *s, const scheduler_config *config, const trace *t, fv_cache *cache)
{
    *s = (scheduler){ .config = *config, .trace = t, .cache = cache };
    s->requests = need((size_t)t->count, sizeof *s->requests);
    s->queue = need((size_t)t->count, sizeof *s->queue);
    s->running = need((size_t)config->max_requests, sizeof *s->running);
    for (int64_t i = 0; i < t->count; i++) {
        s->requests[i] = (live_request){
            .index = i, .known = t->requests[i].input, .sequence = -1, .since = -1
        };
        s->queue[i] = i;
    }
}

void scheduler_free(scheduler *s)
{
    for (int64_t i = 0; s->requests && i < s->trace->count; i++)
        free(s->requests[i].keys);
    free(s->requests);
    free(s->queue);
    free(s->running);
    sample_free(&s->ttft);
    sample_free(&s->itl);
    *s = (scheduler){ 0 };
}

static int64_t pages_of(const scheduler *s, int64_t tokens)
{
    return div_up(tokens, s->config.page_size);
}

static double arrival_of(const scheduler *s, int64_t index)
{
    return s->config.speed > 0 ? s->trace->requests[index].arrival / s->config.speed : 0;
}

/* Tokens that a request has in the cache when it ends: the last one generated is not computed. */
static int64_t final_tokens(const trace_request *q) { return q->input + max_i64(q->output, 1) - 1; }

bool scheduler_is_done(const scheduler *s) { return s->finished + s->rejected == s->trace->count; }

double scheduler_next_arrival(const scheduler *s)
{
    return s->queue_last < s->trace->count ? arrival_of(s, s->queue[s->queue_last]) : INFINITY;
}

/* ---- leaving ---- */

static fv_status release(scheduler *s, live_request *r, fv_error *err)
{
    const fv_status status = fv_cache_release(s->cache, r->sequence, err);
    r->sequence = -1;
    r->rows = r->done = 0;
    free(r->keys);
    r->keys = NULL;
    return status;
}

/* The youngest running request gives up its pages and waits at the head of the queue. */
static fv_status preempt_youngest(scheduler *s, fv_error *err)
{
    live_request *victim = s->running[--s->num_running];
    s->queue[--s->queue_first] = victim->index;
    s->preempted++;
    return release(s, victim, err);
}

/* ---- rows for running requests ---- */

/* Room for r's next `rows` rows, at the cost of younger requests if need be. r->rows stays 0 if r
 * itself had to go. */
static fv_status give_rows(scheduler *s, live_request *r, int64_t rows, fv_error *err)
{
    for (;;) {
        fv_status status = fv_cache_extend(s->cache, r->sequence, rows, err);
        if (status == FV_OK) {
            r->rows = rows;
            return FV_OK;
        }
        if (status != FV_E_CAPACITY)
            return status;
        const bool itself = s->running[s->num_running - 1] == r;
        status = preempt_youngest(s, err);
        if (status != FV_OK || itself)
            return status;
    }
}

/* Decodes get their row first (want_decode), then inputs their chunks. */
static fv_status serve_running(scheduler *s, bool want_decode, int64_t *left, fv_error *err)
{
    for (int64_t i = 0; i < s->num_running && *left > 0; i++) {
        live_request *r = s->running[i];
        const bool decode = r->known - r->done == 1;
        if (decode != want_decode || r->rows)
            continue;
        const fv_status status = give_rows(s, r, min_i64(*left, r->known - r->done), err);
        if (status != FV_OK)
            return status;
        int64_t given = 0;                      /* victims give back what they had been given */
        for (int64_t j = 0; j < s->num_running; j++)
            given += s->running[j]->rows;
        *left = s->config.token_budget - given;
    }
    return FV_OK;
}

/* ---- admission ---- */

/* Does the pool have room for all known tokens of r and a row of each request that runs, if r holds
 * `held` of them? */
static fv_status has_room(scheduler *s, const live_request *r, int64_t held, bool *room,
                          fv_error *err)
{
    fv_cache_stats stats;
    const fv_status status = fv_cache_query(s->cache, &stats, err);
    const int64_t missing = pages_of(s, r->known) - held / s->config.page_size;
    *room = status == FV_OK && (s->num_running == 0 ||
                                missing + s->num_running <= stats.free_pages + stats.cached_pages);
    return status;
}

/* Opens a sequence for r if there is room, else leaves it as it was: r->sequence stays -1. */
static fv_status open_sequence(scheduler *s, live_request *r, fv_error *err)
{
    int64_t held = 0;
    bool room;
    r->keys =
        need((size_t)(s->trace->requests[r->index].input / s->config.page_size), sizeof *r->keys);
    r->num_keys = trace_page_keys(s->trace, r->index, s->config.page_size, r->keys);
    fv_status status = fv_cache_match(s->cache, r->keys, r->num_keys, &held, err);
    if (status == FV_OK)
        status = has_room(s, r, held, &room, err);  /* cheap: counts what r takes over as free */
    if (status == FV_OK && room)
        status =
            fv_cache_open(s->cache, r->keys, r->num_keys, r->known - 1, &r->sequence, &held, err);
    if (status == FV_OK && r->sequence >= 0) {
        r->done = held;
        status = has_room(s, r, held, &room, err);  /* exact */
    }
    if (status == FV_OK && r->sequence >= 0 && !room)
        return release(s, r, err);
    if (r->sequence < 0) {
        free(r->keys);
        r->keys = NULL;
    }
    return status;
}

/* Starts requests from the head of the queue while there is room and budget. */
static fv_status admit(scheduler *s, double now, int64_t *left, fv_error *err)
{
    while (s->queue_first < s->queue_last && s->num_running < s->config.max_requests && *left > 0) {
        live_request *r = &s->requests[s->queue[s->queue_first]];
        if (pages_of(s, final_tokens(&s->trace->requests[r->index])) > s->config.num_pages) {
            s->queue_first++;
            s->rejected++;
            continue;
        }
        fv_status status = open_sequence(s, r, err);
        if (status != FV_OK || r->sequence < 0)
            return status;
        const int64_t rows = min_i64(*left, r->known - r->done);
        status = fv_cache_extend(s->cache, r->sequence, rows, err);
        if (status != FV_OK)
            return status;
        s->queue_first++;
        s->running[s->num_running++] = r;
        s->peak_running = max_i64(s->peak_running, s->num_running);
        if (r->since < 0) {                                 /* its first time */
            s->hit_tokens += r->done;
            s->asked_tokens += r->known;
            r->since = s->config.speed > 0 ? arrival_of(s, r->index) : now;
        }
        r->rows = rows;
        *left -= rows;
    }
    return FV_OK;
}

fv_status scheduler_plan(scheduler *s, double now, int64_t *rows, fv_error *err)
{
    int64_t left = s->config.token_budget;
    while (s->queue_last < s->trace->count && arrival_of(s, s->queue[s->queue_last]) <= now)
        s->queue_last++;
    const int64_t preempted = s->preempted;
    fv_status status = serve_running(s, true, &left, err);
    if (status == FV_OK)
        status = serve_running(s, false, &left, err);
    const bool was_full = s->preempted != preempted;    /* who just left is not let in at once */
    if (status == FV_OK && !was_full)
        status = admit(s, now, &left, err);
    *rows = s->config.token_budget - left;
    return status;
}

/* ---- after the step ---- */

static void hand_out_token(scheduler *s, live_request *r, double now)
{
    if (r->generated++ == 0)
        sample_add(&s->ttft, now - r->since);
    else
        sample_add(&s->itl, now - r->last_token);
    r->last_token = now;
    r->known++;
    s->generated++;
}

static fv_status advance_one(scheduler *s, live_request *r, double now, bool *finished,
                             fv_error *err)
{
    r->done += r->rows;
    r->rows = 0;
    fv_status status = fv_cache_commit(s->cache, r->sequence, r->done, r->keys, r->num_keys, err);
    if (status == FV_OK && s->config.slide >= 0)
        status = fv_cache_slide(s->cache, r->sequence, max_i64(0, r->done - s->config.slide), err);
    if (r->done == r->known)
        hand_out_token(s, r, now);
    *finished = r->generated >= max_i64(1, s->trace->requests[r->index].output);
    return status == FV_OK && *finished ? release(s, r, err) : status;
}

fv_status scheduler_advance(scheduler *s, double now, fv_error *err)
{
    int64_t kept = 0;
    fv_status status = FV_OK;
    for (int64_t i = 0; i < s->num_running; i++) {
        live_request *r = s->running[i];
        bool finished = false;
        if (r->rows && status == FV_OK)
            status = advance_one(s, r, now, &finished, err);
        s->finished += finished;
        if (!finished)
            s->running[kept++] = r;
    }
    s->num_running = kept;
    return status;
}
