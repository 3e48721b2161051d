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
    char cache[32] = "", layers[48];
    if (r->config.cache_type != r->config.type)
        snprintf(cache, sizeof cache, " with a %s cache", r->config.cache_type->name);
    if (g->layers)
        snprintf(layers, sizeof layers, "%d of %d layers", r->config.layers, g->layers);
    else
        snprintf(layers, sizeof layers, "%d layer%s", r->config.layers,
                 r->config.layers == 1 ? "" : "s");
    snprintf(out, size, "%s: %d/%d heads, dim %d%s, %s%s, %s; %s", g->name, g->q_heads,
             g->kv_heads, g->dim_qk, g->v_in_k ? " (V is 512 of it)" : "", r->config.type->name,
             cache, layers, r->device_text);
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

static void line(summary *s, const char *label, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

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
    line(
        s, "requests",
        "%lld served, %lld rejected (larger than the pool), %lld preemptions, at most %lld at once",
        (long long)q->finished, (long long)q->rejected, (long long)q->preempted,
        (long long)q->peak_running);
    if (r->trace.left_out)
        line(s, "left out", "%lld requests, longer than --max-length",
             (long long)r->trace.left_out);
    line(s, "tokens", "%lld in, %lld out; %lld computed in %lld steps", (long long)input,
         (long long)q->generated, (long long)r->rows, (long long)r->num_steps);
    line(s, "throughput", "%.0f tokens/s computed, %.0f tokens/s handed out, in %.2f s of work",
         (double)r->rows / s->busy, (double)q->generated / s->busy, s->busy);
}

static void step_line(summary *s, const char *label, const double x[3])
{
    line(s, label, "p50 %.3f ms, p99 %.3f ms, %.2f s in all (%.1f %%)", 1e3 * x[1], 1e3 * x[2],
         x[0], 100 * x[0] / s->busy);
}

static void add_time_lines(const replay *r, summary *s)
{
    step_line(s, "step: plan", s->plan);
    step_line(s, "step: append", s->append);
    step_line(s, "step: attention", s->attention);
    line(s, "TTFT, attention part", "p50 %.1f ms, p99 %.1f ms, from %s", 1e3 * s->ttft[0],
         1e3 * s->ttft[1], r->scheduling.speed > 0 ? "arrival" : "admission");
    line(s, "ITL, attention part", "p50 %.2f ms, p99 %.2f ms", 1e3 * s->itl[0], 1e3 * s->itl[1]);
}

static void add_bound_lines(const replay *r, summary *s)
{
    const bounds *b = &r->bounds;
    char set[32];
    if (!(b->read > 0)) {
        line(s, "memory traffic", "%.2f GB/s; this machine's bounds were not measured",
             s->bytes_rate / 1e9);
        line(s, "arithmetic", "%.1f GFLOP/s", s->flops_rate / 1e9);
        return;
    }
    chart_number((double)b->read_set, CHART_BYTES, set, sizeof set);
    line(s, "memory traffic", "%.2f GB/s, %.0f %% of a streaming read (%.1f GB/s of %s)",
         s->bytes_rate / 1e9, 100 * s->bytes_rate / b->read, b->read / 1e9, set);
    line(s, "arithmetic", "%.1f GFLOP/s, %.1f %% of %s (%.0f GFLOP/s)", s->flops_rate / 1e9,
         100 * s->flops_rate / b->flops, b->multiplier, b->flops / 1e9);
    line(s, "share of the bound",
         "%.0f %% (per step the larger of the two floors, over the attention time)",
         100 * s->bound_share);
}

static void add_cache_lines(const replay *r, summary *s)
{
    char peak[32], held[32], pool[32], padded[32];
    chart_number((double)s->peak_bytes, CHART_BYTES, peak, sizeof peak);
    chart_number((double)s->held_bytes, CHART_BYTES, held, sizeof held);
    chart_number((double)s->pool_bytes, CHART_BYTES, pool, sizeof pool);
    chart_number((double)s->padded_bytes, CHART_BYTES, padded, sizeof padded);
    line(s, "prefix hits", "%.1f %% of input tokens (%lld of %lld)%s", 100 * s->hit_rate,
         (long long)r->scheduler.hit_tokens, (long long)r->scheduler.asked_tokens,
         r->no_prefix ? ", prefix cache off" : "");
    line(s, "KV bytes, peak", "%s in use, %s with cached prefixes, pool %s, %lld pages evicted",
         peak, held, pool, (long long)r->evicted_pages);
    line(s, "KV bytes, padded", "%s would a contiguous cache take: %lld slots of %lld tokens",
         padded, (long long)r->scheduler.peak_running, (long long)r->longest);
}

static void add_check_lines(const replay *r, summary *s)
{
    const checker *c = &r->checker;
    if (c->rows)
        line(s, "largest error",
             "%.2e, %.0f %% of what rounding allows; %lld rows, %lld heads, %lld keys compared, "
             "%lld wrong",
             c->max_error, 100 * c->max_share, (long long)c->rows, (long long)c->heads,
             (long long)c->keys, (long long)c->failures);
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
    out->hit_rate = r->scheduler.asked_tokens
                        ? (double)r->scheduler.hit_tokens / (double)r->scheduler.asked_tokens
                        : 0;
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
    char about[256];
    replay_describe(r, about, sizeof about);
    cli_print(out, "%s (%s)\n%s%s%s\n\n", r->file_name, r->trace.format, about,
            r->kernel[0] ? "; kernel " : "", r->kernel);
    for (int i = 0; i < s->num_lines; i++)
        fprintf(out, "  %-22s %s\n", s->lines[i].label, s->lines[i].value);
}

/* ---- JSON: objects grow by name; what fails is seen when the line is written ---- */

static void real(json_t *o, const char *name, double x)
{
    json_object_set_new(o, name, json_real(x));
}

static void whole(json_t *o, const char *name, int64_t x)
{
    json_object_set_new(o, name, json_integer(x));
}

static void text(json_t *o, const char *name, const char *x)
{
    json_object_set_new(o, name, json_string(x));
}

/* Writes and frees it. */
static bool write_line(FILE *out, json_t *object)
{
    const size_t flags = JSON_COMPACT | JSON_REAL_PRECISION(9);
    const bool good = json_dumpf(object, out, flags) == 0 && fputc('\n', out) != EOF;
    json_decref(object);
    return good;
}

bool json_step(FILE *out, const replay *r, int64_t step)
{
    const replay_step *s = &r->steps[step];
    json_t *o = json_object();
    text(o, "type", "step");
    whole(o, "step", step);
    real(o, "start_s", s->start);
    real(o, "plan_s", s->plan);
    real(o, "append_s", s->append);
    real(o, "attention_s", s->attention);
    real(o, "bytes", s->bytes);
    real(o, "flops", s->flops);
    real(o, "bound_s", s->bound);
    real(o, "error", s->error);
    whole(o, "prefill_rows", s->prefill_rows);
    whole(o, "decode_rows", s->decode_rows);
    whole(o, "requests", s->requests);
    whole(o, "waiting", s->waiting);
    whole(o, "used_pages", s->used_pages);
    whole(o, "cached_pages", s->cached_pages);
    whole(o, "free_pages", s->free_pages);
    return write_line(out, o);
}

static json_t *json_run(const replay *r)
{
    const serve_config *c = &r->config;
    json_t *o = json_object();
    text(o, "trace", r->file_name);
    text(o, "format", r->trace.format);
    text(o, "model", c->geometry.name);
    whole(o, "layers", c->layers);
    text(o, "device", r->device);
    whole(o, "threads", r->bounds.threads);
    text(o, "kernel", r->kernel);
    text(o, "dtype", c->type->name);
    text(o, "kv_dtype", c->cache_type->name);
    whole(o, "page_size", c->page_size);
    whole(o, "pages", c->num_pages);
    whole(o, "token_budget", c->token_budget);
    whole(o, "max_requests", c->max_requests);
    real(o, "speed", r->scheduling.speed);
    text(o, "sharing", c->sharing ? "find" : "off");
    json_object_set_new(o, "invariant", json_boolean(c->invariant));
    whole(o, "seed", (int64_t)c->seed);
    return o;
}

/* NAME_s, NAME_p50_s and NAME_p99_s. */
static void times(json_t *o, const char *name, const double x[3])
{
    static const char *const suffix[] = { "s", "p50_s", "p99_s" };
    for (int i = 0; i < 3; i++) {
        char full[32];
        snprintf(full, sizeof full, "%s_%s", name, suffix[i]);
        real(o, full, x[i]);
    }
}

static json_t *json_times(const summary *s)
{
    json_t *o = json_object();
    real(o, "busy_s", s->busy);
    times(o, "plan", s->plan);
    times(o, "append", s->append);
    times(o, "attention", s->attention);
    real(o, "ttft_p50_s", s->ttft[0]);
    real(o, "ttft_p99_s", s->ttft[1]);
    real(o, "itl_p50_s", s->itl[0]);
    real(o, "itl_p99_s", s->itl[1]);
    return o;
}

/* Without what was not measured. */
static json_t *json_rates(const replay *r, const summary *s)
{
    json_t *o = json_object();
    real(o, "bytes_per_s", s->bytes_rate);
    real(o, "flops_per_s", s->flops_rate);
    if (r->bounds.read > 0) {
        real(o, "bound_share", s->bound_share);
        real(o, "read_bytes_per_s", r->bounds.read);
        whole(o, "read_set_bytes", r->bounds.read_set);
        text(o, "multiplier", r->bounds.multiplier);
        real(o, "multiplier_flops_per_s", r->bounds.flops);
    }
    return o;
}

static json_t *json_cache(const replay *r, const summary *s)
{
    json_t *o = json_object();
    real(o, "hit_rate", s->hit_rate);
    whole(o, "hit_tokens", r->scheduler.hit_tokens);
    whole(o, "asked_tokens", r->scheduler.asked_tokens);
    whole(o, "peak_bytes", s->peak_bytes);
    whole(o, "held_bytes", s->held_bytes);
    whole(o, "pool_bytes", s->pool_bytes);
    whole(o, "padded_bytes", s->padded_bytes);
    whole(o, "evicted_pages", r->evicted_pages);
    return o;
}

static json_t *json_check(const checker *c)
{
    char digest[20];
    json_t *o = json_object();
    whole(o, "rows", c->rows);
    whole(o, "heads", c->heads);
    whole(o, "keys", c->keys);
    real(o, "max_error", c->max_error);
    real(o, "max_share", c->max_share);
    whole(o, "failures", c->failures);
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)c->digest);
    if (c->digesting)
        text(o, "digest", digest);
    return o;
}

bool json_summary(FILE *out, const replay *r, const summary *s)
{
    const scheduler *q = &r->scheduler;
    json_t *o = json_object();
    text(o, "type", "summary");
    whole(o, "served", q->finished);
    whole(o, "left_out", r->trace.left_out);
    whole(o, "rejected", q->rejected);
    whole(o, "preempted", q->preempted);
    whole(o, "steps", r->num_steps);
    whole(o, "rows", r->rows);
    whole(o, "generated", q->generated);
    real(o, "clock_s", r->clock);
    json_object_set_new(o, "run", json_run(r));
    json_object_set_new(o, "times", json_times(s));
    json_object_set_new(o, "rates", json_rates(r, s));
    json_object_set_new(o, "cache", json_cache(r, s));
    json_object_set_new(o, "check", json_check(&r->checker));
    return write_line(out, o);
}
