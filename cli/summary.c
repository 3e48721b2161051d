/* SPDX-License-Identifier: Apache-2.0 */
/* summary.c -- the numbers of a replay, as a table and as JSON. */
#include "chart.h"
#include "replay.h"

#include <jansson.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

void replay_describe(const replay *r, char *out, size_t size)
{
    const geometry *g = &r->config.geometry;
    char cache[32] = "";
    if (r->config.cache_type != r->config.type)
        snprintf(cache, sizeof cache, " with a %s cache", r->config.cache_type->name);
    snprintf(out, size, "%s: %d/%d heads, dim %d%s, %s%s, %d of %d layers; %s, %d threads", g->name, g->q_heads, g->kv_heads,
             g->dim_qk, g->v_in_k ? " (V is 512 of it)" : "", r->config.type->name, cache, r->config.layers,
             g->layers, r->device, r->bounds.threads);
}

/* ---- numbers ---- */

/* Total, p50 and p99 of the double at `offset` of every step. */
static void spread(const replay *r, size_t offset, double out[3])
{
    sample s = { 0 };
    for (int64_t i = 0; i < r->num_steps; i++) {
        double x;
        memcpy(&x, (const char *)&r->steps[i] + offset, sizeof x);
        sample_add(&s, x);
    }
    out[0] = sample_sum(&s);
    out[1] = sample_percentile(&s, 50);
    out[2] = sample_percentile(&s, 99);
    sample_free(&s);
}

static void add_rates(const replay *r, summary *s)
{
    double bytes = 0, flops = 0, bound = 0;
    for (int64_t i = 0; i < r->num_steps; i++) {
        bytes += r->steps[i].bytes;
        flops += r->steps[i].flops;
        bound += r->steps[i].bound;
    }
    if (s->attention[0] > 0) {
        s->bytes_rate = bytes / s->attention[0];
        s->flops_rate = flops / s->attention[0];
        s->bound_share = bound / s->attention[0];
    }
}

static void line(summary *s, const char *label, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void line(summary *s, const char *label, const char *format, ...)
{
    if (s->num_lines == SUMMARY_MAX_LINES)
        return;
    summary_line *l = &s->lines[s->num_lines++];
    va_list args;
    va_start(args, format);
    snprintf(l->label, sizeof l->label, "%s", label);
    vsnprintf(l->value, sizeof l->value, format, args);
    va_end(args);
}

static void add_load_lines(const replay *r, summary *s)
{
    const scheduler *q = &r->scheduler;
    int64_t input = 0;
    for (int64_t i = 0; i < r->trace.count; i++)
        input += r->trace.requests[i].input;
    line(s, "requests", "%lld served, %lld rejected (larger than the pool), %lld preemptions, at most %lld at once",
         (long long)q->finished, (long long)q->rejected, (long long)q->preempted, (long long)q->peak_running);
    if (r->trace.left_out)
        line(s, "left out", "%lld requests, longer than --max-length", (long long)r->trace.left_out);
    line(s, "tokens", "%lld in, %lld out; %lld computed in %lld steps", (long long)input, (long long)q->generated,
         (long long)r->rows, (long long)r->num_steps);
    line(s, "throughput", "%.0f tokens/s computed, %.0f tokens/s handed out, in %.2f s of work", (double)r->rows / s->busy,
         (double)q->generated / s->busy, s->busy);
}

static void step_line(summary *s, const char *label, const double x[3])
{
    line(s, label, "p50 %.3f ms, p99 %.3f ms, %.2f s in all (%.1f %%)", 1e3 * x[1], 1e3 * x[2], x[0], 100 * x[0] / s->busy);
}

static void add_time_lines(const replay *r, summary *s)
{
    step_line(s, "step: plan", s->plan);
    step_line(s, "step: append", s->append);
    step_line(s, "step: attention", s->attention);
    line(s, "TTFT, attention part", "p50 %.1f ms, p99 %.1f ms, from %s", 1e3 * s->ttft[0], 1e3 * s->ttft[1],
         r->scheduling.speed > 0 ? "arrival" : "admission");
    line(s, "ITL, attention part", "p50 %.2f ms, p99 %.2f ms", 1e3 * s->itl[0], 1e3 * s->itl[1]);
}

static void add_bound_lines(const replay *r, summary *s)
{
    const bounds *b = &r->bounds;
    char set[32];
    if (!(b->read > 0)) {
        line(s, "memory traffic", "%.2f GB/s; this machine's bounds were not measured", s->bytes_rate / 1e9);
        line(s, "arithmetic", "%.1f GFLOP/s", s->flops_rate / 1e9);
        return;
    }
    chart_number((double)b->read_set, CHART_BYTES, set, sizeof set);
    line(s, "memory traffic", "%.2f GB/s, %.0f %% of a streaming read (%.1f GB/s of %s)", s->bytes_rate / 1e9,
         100 * s->bytes_rate / b->read, b->read / 1e9, set);
    line(s, "arithmetic", "%.1f GFLOP/s, %.1f %% of %s (%.0f GFLOP/s)", s->flops_rate / 1e9, 100 * s->flops_rate / b->flops,
         b->multiplier, b->flops / 1e9);
    line(s, "share of the bound", "%.0f %% (per step the larger of the two floors, over the attention time)",
         100 * s->bound_share);
}

static void add_cache_lines(const replay *r, summary *s)
{
    char peak[32], held[32], pool[32], padded[32];
    chart_number((double)s->peak_bytes, CHART_BYTES, peak, sizeof peak);
    chart_number((double)s->held_bytes, CHART_BYTES, held, sizeof held);
    chart_number((double)s->pool_bytes, CHART_BYTES, pool, sizeof pool);
    chart_number((double)s->padded_bytes, CHART_BYTES, padded, sizeof padded);
    line(s, "prefix hits", "%.1f %% of input tokens (%lld of %lld)%s", 100 * s->hit_rate, (long long)r->scheduler.hit_tokens,
         (long long)r->scheduler.asked_tokens, r->no_prefix ? ", prefix cache off" : "");
    line(s, "KV bytes, peak", "%s in use, %s with cached prefixes, pool %s, %lld pages evicted", peak, held, pool,
         (long long)r->evicted_pages);
    line(s, "KV bytes, padded", "%s would a contiguous cache take: %lld slots of %lld tokens", padded,
         (long long)r->scheduler.peak_running, (long long)r->longest);
}

static void add_check_lines(const replay *r, summary *s)
{
    const checker *c = &r->checker;
    if (c->rows)
        line(s, "largest error", "%.2e, %.0f %% of what rounding allows; %lld rows, %lld heads, %lld keys compared, %lld wrong",
             c->max_error, 100 * c->max_share, (long long)c->rows, (long long)c->heads, (long long)c->keys,
             (long long)c->failures);
    else
        line(s, "largest error", "nothing was compared");
    if (c->digesting)
        line(s, "digest", "%016llx", (unsigned long long)c->digest);
}

void summary_make(replay *r, summary *out)
{
    *out = (summary){ 0 };
    const int64_t page = serve_page_bytes(&r->config), token = page / r->config.page_size;
    spread(r, offsetof(replay_step, plan), out->plan);
    spread(r, offsetof(replay_step, append), out->append);
    spread(r, offsetof(replay_step, attention), out->attention);
    out->busy = out->plan[0] + out->append[0] + out->attention[0];
    if (out->busy <= 0)
        out->busy = 1e-9;
    add_rates(r, out);
    for (int i = 0; i < 2; i++) {
        out->ttft[i] = sample_percentile(&r->scheduler.ttft, i ? 99 : 50);
        out->itl[i] = sample_percentile(&r->scheduler.itl, i ? 99 : 50);
    }
    out->hit_rate = r->scheduler.asked_tokens ? (double)r->scheduler.hit_tokens / (double)r->scheduler.asked_tokens : 0;
    out->peak_bytes = r->peak_used * page;
    out->held_bytes = r->peak_held * page;
    out->pool_bytes = r->config.num_pages * page;
    out->padded_bytes = r->scheduler.peak_running * r->longest * token;
    add_load_lines(r, out);
    add_time_lines(r, out);
    add_bound_lines(r, out);
    add_cache_lines(r, out);
    add_check_lines(r, out);
}

void summary_print(FILE *out, const replay *r, const summary *s)
{
    char text[256];
    replay_describe(r, text, sizeof text);
    fprintf(out, "%s (%s)\n%s; kernel %s\n\n", r->file_name, r->trace.format, text, r->kernel);
    for (int i = 0; i < s->num_lines; i++)
        fprintf(out, "  %-22s %s\n", s->lines[i].label, s->lines[i].value);
}

/* ---- JSON ---- */

static bool write_line(FILE *out, json_t *object)
{
    const bool good = object && json_dumpf(object, out, JSON_COMPACT | JSON_REAL_PRECISION(9)) == 0 && fputc('\n', out) != EOF;
    json_decref(object);
    return good;
}

bool json_step(FILE *out, const replay *r, int64_t step)
{
    const replay_step *s = &r->steps[step];
    return write_line(out, json_pack("{s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
        "type", "step", "step", (json_int_t)step, "start_s", s->start, "plan_s", s->plan, "append_s", s->append,
        "attention_s", s->attention, "bytes", s->bytes, "flops", s->flops, "bound_s", s->bound, "error", s->error,
        "prefill_rows", (json_int_t)s->prefill_rows, "decode_rows", (json_int_t)s->decode_rows,
        "requests", (json_int_t)s->requests, "waiting", (json_int_t)s->waiting, "used_pages", (json_int_t)s->used_pages,
        "cached_pages", (json_int_t)s->cached_pages, "free_pages", (json_int_t)s->free_pages));
}

static json_t *json_run(const replay *r)
{
    const serve_config *c = &r->config;
    return json_pack("{s:s, s:s, s:s, s:i, s:s, s:i, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:s, s:b, s:I}",
        "trace", r->file_name, "format", r->trace.format, "model", c->geometry.name, "layers", c->layers, "device", r->device,
        "threads", r->bounds.threads, "kernel", r->kernel, "dtype", c->type->name, "kv_dtype", c->cache_type->name,
        "page_size", (json_int_t)c->page_size, "pages", (json_int_t)c->num_pages, "token_budget", (json_int_t)c->token_budget,
        "max_requests", (json_int_t)c->max_requests, "speed", r->scheduling.speed, "sharing", c->sharing ? "find" : "off",
        "invariant", c->invariant, "seed", (json_int_t)c->seed);
}

static json_t *json_times(const summary *s)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
        "busy_s", s->busy, "plan_s", s->plan[0], "plan_p50_s", s->plan[1], "plan_p99_s", s->plan[2], "append_s", s->append[0],
        "append_p50_s", s->append[1], "append_p99_s", s->append[2], "attention_s", s->attention[0],
        "attention_p50_s", s->attention[1], "attention_p99_s", s->attention[2], "ttft_p50_s", s->ttft[0], "ttft_p99_s", s->ttft[1],
        "itl_p50_s", s->itl[0], "itl_p99_s", s->itl[1]);
}

static json_t *json_rates(const replay *r, const summary *s)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:I, s:s*, s:f}",
        "bytes_per_s", s->bytes_rate, "flops_per_s", s->flops_rate, "bound_share", s->bound_share,
        "read_bytes_per_s", r->bounds.read, "read_set_bytes", (json_int_t)r->bounds.read_set, "multiplier", r->bounds.multiplier,
        "multiplier_flops_per_s", r->bounds.flops);
}

static json_t *json_cache(const replay *r, const summary *s)
{
    return json_pack("{s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "hit_rate", s->hit_rate,
        "hit_tokens", (json_int_t)r->scheduler.hit_tokens, "asked_tokens", (json_int_t)r->scheduler.asked_tokens,
        "peak_bytes", (json_int_t)s->peak_bytes, "held_bytes", (json_int_t)s->held_bytes, "pool_bytes", (json_int_t)s->pool_bytes,
        "padded_bytes", (json_int_t)s->padded_bytes, "evicted_pages", (json_int_t)r->evicted_pages);
}

static json_t *json_check(const checker *c)
{
    char digest[20];
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)c->digest);
    return json_pack("{s:I, s:I, s:I, s:f, s:f, s:I, s:s*}", "rows", (json_int_t)c->rows, "heads", (json_int_t)c->heads,
        "keys", (json_int_t)c->keys, "max_error", c->max_error, "max_share", c->max_share, "failures", (json_int_t)c->failures,
        "digest", c->digesting ? digest : NULL);
}

bool json_summary(FILE *out, const replay *r, const summary *s)
{
    const scheduler *q = &r->scheduler;
    return write_line(out, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:o, s:o, s:o}",
        "type", "summary", "served", (json_int_t)q->finished, "left_out", (json_int_t)r->trace.left_out, "rejected", (json_int_t)q->rejected,
        "preempted", (json_int_t)q->preempted, "steps", (json_int_t)r->num_steps, "rows", (json_int_t)r->rows,
        "generated", (json_int_t)q->generated, "clock_s", r->clock, "run", json_run(r), "times", json_times(s),
        "rates", json_rates(r, s), "cache", json_cache(r, s), "check", json_check(&r->checker)));
}
