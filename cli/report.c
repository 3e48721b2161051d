/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- the page of a replay: one file, no network, no script; colours follow the reader's
 * light or dark setting. */
#include "chart.h"
#include "replay.h"

#include <stdlib.h>
#include <string.h>

static const char head[] =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
    "<meta name=\"color-scheme\" content=\"light dark\">\n<title>Foveal replay</title>\n<style>\n"
    ":root{--page:#f7f7f5;--card:#fff;--ink:#1c1e21;--soft:#5c6370;--line:#e3e4e6;--s1:#2f6fde;"
    "--s2:#e0812f;--s3:#8b93a1;"
    "--s4:#b8bec8;--hit:#1c1e2114;--bad:#c0392b}\n"
    "@media(prefers-color-scheme:dark){:root{--page:#14161a;--card:#1d2026;--ink:#e8eaed;"
    "--soft:#a2a9b4;--line:#31353d;"
    "--s1:#6fa0ff;--s2:#f2a25c;--s3:#7d8696;--s4:#565d6a;--hit:#ffffff1c;--bad:#ff7b6b}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);"
    "font:15px/1.5 system-ui,-apple-system,\"Segoe UI\",sans-serif}\n"
    "main{max-width:1040px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;margin:0}"
    "h2{font-size:18px;margin:36px 0 12px}"
    "h3{font-size:15px;margin:0}p{margin:4px 0;color:var(--soft)}\n"
    "figure,.tile,.table{background:var(--card);border:1px solid var(--line);border-radius:10px}"
    "figure{margin:0 0 16px;padding:16px 18px 10px}\n"
    "figcaption p{font-size:13px}.legend span{display:inline-block;margin:4px 18px 0 0;"
    "color:var(--ink)}"
    ".legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}\n"
    "svg{display:block;width:100%;height:auto;margin-top:8px}"
    ".axis{font:12px system-ui,sans-serif;fill:var(--soft);"
    "font-variant-numeric:tabular-nums}.grid{stroke:var(--line)}\n"
    ".hit{fill:transparent}.hit:hover{fill:var(--hit)}\n"
    "path.s1{fill:var(--s1)}path.s2{fill:var(--s2)}path.s3{fill:var(--s3)}path.s4{fill:var(--s4)}"
    "i.s1{background:var(--s1)}i.s2{background:var(--s2)}i.s3{background:var(--s3)}"
    "i.s4{background:var(--s4)}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;"
    "margin:22px 0 16px}"
    ".tile{padding:12px 16px}.tile b{display:block;font-size:23px;font-weight:600;"
    "font-variant-numeric:tabular-nums}"
    ".tile small{font-size:14px;font-weight:500;margin-left:5px;color:var(--soft)}"
    ".tile span{font-size:13px;color:var(--soft)}\n"
    ".tile.bad b{color:var(--bad)}.table{overflow-x:auto}table{border-collapse:collapse;"
    "width:100%;font-size:14px}"
    "td{padding:7px 16px;border-top:1px solid var(--line);vertical-align:top}"
    "tr:first-child td{border-top:0}"
    "td:first-child{color:var(--soft);white-space:nowrap}\n"
    ".plan object{display:block;max-width:100%;margin:8px auto}"
    "footer{margin-top:28px;font-size:13px;color:var(--soft)}\n"
    "</style></head><body><main>\n";

static void write_text(FILE *out, const char *text)
{
    for (; *text; text++)
        switch (*text) {
        case '<': fputs("&lt;", out); break;
        case '>': fputs("&gt;", out); break;
        case '&': fputs("&amp;", out); break;
        case '"': fputs("&quot;", out); break;
        default: fputc(*text, out);
        }
}

/* ---- numbers ---- */

static void tile(FILE *out, bool bad, const char *value, const char *unit, const char *about)
{
    fprintf(out, "<div class=\"tile%s\"><b>%s<small>%s</small></b><span>%s</span></div>\n",
            bad ? " bad" : "", value, unit, about);
}

static void number_tile(FILE *out, double x, const char *unit, const char *about)
{
    char text[32];
    chart_number(x, CHART_NUMBER, text, sizeof text);
    tile(out, false, text, unit, about);
}

static void time_tile(FILE *out, double seconds, const char *about)
{
    number_tile(out, seconds >= 1 ? seconds : 1e3 * seconds, seconds >= 1 ? "s" : "ms", about);
}

static void write_tiles(FILE *out, const replay *r, const summary *s)
{
    char text[48];
    fputs("<div class=\"tiles\">\n", out);
    number_tile(out, (double)r->rows / s->busy, "tokens/s", "computed");
    time_tile(out, s->ttft[0], "time to first token, p50");
    time_tile(out, s->itl[0], "between tokens, p50");
    time_tile(out, s->itl[1], "between tokens, p99");
    if (r->bounds.read > 0)
        number_tile(out, 100 * s->bound_share, "%", "of what this machine can do");
    number_tile(out, 100 * s->hit_rate, "%", "of input tokens found in the cache");
    chart_number((double)s->peak_bytes, CHART_BYTES, text, sizeof text);
    tile(out, false, text, "", "keys and values in use at the peak");
    if (r->checker.failures)
        snprintf(text, sizeof text, "%lld wrong", (long long)r->checker.failures);
    else
        snprintf(text, sizeof text, "%.1e", r->checker.max_error);
    tile(out, r->checker.failures > 0, text, "", "largest error seen");
    fputs("</div>\n", out);
}

static void write_table(FILE *out, const summary *s)
{
    fputs("<h2>In numbers</h2><div class=\"table\"><table>\n", out);
    for (int i = 0; i < s->num_lines; i++) {
        fputs("<tr><td>", out);
        write_text(out, s->lines[i].label);
        fputs("</td><td>", out);
        write_text(out, s->lines[i].value);
        fputs("</td></tr>\n", out);
    }
    fputs("</table></div>\n", out);
}

/* ---- charts over time ---- */

/* Columns of numbers, one entry a step. */
typedef struct over_time {
    double *begin, *end, *y[7];
    bool in_seconds;                    /* step times: else in ms */
} over_time;

enum { Y_PLAN, Y_APPEND, Y_ATTENTION, Y_PREFILL, Y_DECODE, Y_USED, Y_CACHED };

static over_time make_over_time(const replay *r)
{
    over_time t;
    const size_t n = (size_t)r->num_steps;
    const double page = (double)serve_page_bytes(&r->config);
    double longest = 0;
    for (size_t i = 0; i < n; i++)
        longest = r->steps[i].attention > longest ? r->steps[i].attention : longest;
    t.in_seconds = longest >= 2;
    const double unit = t.in_seconds ? 1 : 1e3;
    t.begin = need(n, sizeof(double));
    t.end = need(n, sizeof(double));
    for (int j = 0; j < 7; j++)
        t.y[j] = need(n, sizeof(double));
    for (size_t i = 0; i < n; i++) {
        const replay_step *s = &r->steps[i];
        t.begin[i] = s->start;
        t.end[i] = s->start + s->plan + s->append + s->attention;
        t.y[Y_PLAN][i] = unit * s->plan;
        t.y[Y_APPEND][i] = unit * s->append;
        t.y[Y_ATTENTION][i] = unit * s->attention;
        t.y[Y_PREFILL][i] = (double)s->prefill_rows;
        t.y[Y_DECODE][i] = (double)s->decode_rows;
        t.y[Y_USED][i] = page * (double)s->used_pages;
        t.y[Y_CACHED][i] = page * (double)s->cached_pages;
    }
    return t;
}

static void free_over_time(over_time *t)
{
    free(t->begin);
    free(t->end);
    for (int j = 0; j < 7; j++)
        free(t->y[j]);
}

static void write_step_times(FILE *out, const replay *r, const over_time *t)
{
    chart c = {
        .title = "Step times", .about =
            "What a step took, all layers. Each column is the slowest step of its slice of time.",
        .x_label = "serving time (s)", .y_label = t->in_seconds ? "step (s)" : "step (ms)",
        .x_unit = "s", .y_unit = t->in_seconds ? "s" : "ms", .begin = t->begin, .end = t->end,
        .count = r->num_steps, .num_series = 3, .fold = CHART_HIGHEST
    };
    c.series[0].name = "attention";
    c.series[0].y = t->y[Y_ATTENTION];
    c.series[1].name = "append (rotate, store)";
    c.series[1].y = t->y[Y_APPEND];
    c.series[2].name = "plan";
    c.series[2].y = t->y[Y_PLAN];
    chart_write(out, &c);
}

static void write_make_up(FILE *out, const replay *r, const over_time *t)
{
    chart c = { .title = "What the batch is made of",
                .about = "Tokens computed in a step: one for each request that decodes, chunks of "
                         "the inputs of others.",
                .x_label = "serving time (s)", .y_label = "tokens in a step", .x_unit = "s",
                .y_unit = "tokens", .begin = t->begin, .end = t->end, .count = r->num_steps,
                .num_series = 2, .fold = CHART_MEAN };
    c.series[0].name = "decode";
    c.series[0].y = t->y[Y_DECODE];
    c.series[1].name = "prefill";
    c.series[1].y = t->y[Y_PREFILL];
    chart_write(out, &c);
}

static void write_memory(FILE *out, const replay *r, const over_time *t)
{
    char pool[32], about[160];
    chart_number((double)(r->config.num_pages * serve_page_bytes(&r->config)), CHART_BYTES, pool,
                 sizeof pool);
    snprintf(about, sizeof about, "The pool holds %s; what is neither in use nor cached is free.",
             pool);
    chart c = { .title = "Keys and values in memory", .about = about, .x_label = "serving time (s)",
                .y_label = "bytes, all layers", .x_unit = "s", .y_unit = "", .begin = t->begin,
                .end = t->end, .count = r->num_steps, .num_series = 2, .unit = CHART_BYTES,
                .fold = CHART_MEAN };
    c.series[0].name = "in use by requests";
    c.series[0].y = t->y[Y_USED];
    c.series[1].name = "cached prefixes";
    c.series[1].y = t->y[Y_CACHED];
    chart_write(out, &c);
}

/* ---- distributions ---- */

enum { BINS = 60 };

/* Bins of equal width up to p99; the rest counts in the last one. */
static void write_histogram(FILE *out, const char *title, const char *about, const char *y_label,
                            sample *s)
{
    double begin[BINS], end[BINS], count[BINS] = { 0 };
    const double longest = sample_percentile(s, 99), scale = longest >= 2 ? 1 : 1e3,
                 top = scale * longest;
    const char *unit = longest >= 2 ? "s" : "ms";
    char x_label[64];
    snprintf(x_label, sizeof x_label, "%s (the last column holds all that took longer)", unit);
    if (s->count < 2 || !(top > 0))
        return;
    for (int i = 0; i < BINS; i++) {
        begin[i] = top * i / BINS;
        end[i] = top * (i + 1) / BINS;
    }
    for (int64_t i = 0; i < s->count; i++)
        count[min_i64(BINS - 1, (int64_t)(scale * s->x[i] / top * BINS))]++;
    chart c = { .title = title, .about = about, .x_label = x_label, .y_label = y_label,
                .x_unit = unit, .y_unit = y_label, .begin = begin, .end = end, .count = BINS,
                .num_series = 1 };
    c.series[0].name = "seen";
    c.series[0].y = count;
    chart_write(out, &c);
}

/* ---- the heaviest step's plan ---- */

static void write_base64(FILE *out, const char *text)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t n = strlen(text);
    for (size_t i = 0; i < n; i += 3) {
        const uint32_t a = (uint8_t)text[i], b = i + 1 < n ? (uint8_t)text[i + 1] : 0,
                       c = i + 2 < n ? (uint8_t)text[i + 2] : 0;
        const uint32_t x = a << 16 | b << 8 | c;
        fputc(digits[x >> 18], out);
        fputc(digits[x >> 12 & 63], out);
        fputc(i + 1 < n ? digits[x >> 6 & 63] : '=', out);
        fputc(i + 2 < n ? digits[x & 63] : '=', out);
    }
}

/* As a document of its own inside the page: its style sheet and the page's cannot meet, its hover
 * texts work. */
static void write_plan(FILE *out, const replay *r)
{
    if (!r->heaviest_plan)
        return;
    const replay_step *s = &r->steps[r->heaviest_step];
    fprintf(out,
            "<h2>The plan of the heaviest step</h2><figure class=\"plan\"><figcaption><p>Step %lld "
            "at %.2f s: %lld tokens of "
            "inputs and %lld decodes in %lld requests. Time runs down, workers stand side by side, "
            "one colour a request; "
            "drawn from the planner's cost model.</p></figcaption><object aria-label=\"pieces of "
            "work of each worker\" type=\"image/svg+xml\" "
            "data=\"data:image/svg+xml;base64,",
            (long long)r->heaviest_step, s->start, (long long)s->prefill_rows,
            (long long)s->decode_rows, (long long)s->requests);
    write_base64(out, r->heaviest_plan);
    fputs("\"></object></figure>\n", out);
}

void report_write(FILE *out, replay *r, const summary *s)
{
    char text[256];
    over_time t = make_over_time(r);
    fputs(head, out);
    fputs("<h1>Foveal replay: ", out);
    write_text(out, r->file_name);
    fputs("</h1><p>", out);
    replay_describe(r, text, sizeof text);
    write_text(out, text);
    fputs("</p>\n", out);
    write_tiles(out, r, s);
    write_step_times(out, r, &t);
    write_make_up(out, r, &t);
    write_memory(out, r, &t);
    write_histogram(
        out, "Time to first token",
        "Of the attention part alone: plans, appends and attention of the layers that were served.",
        "requests", &r->scheduler.ttft);
    write_histogram(out, "Time between tokens",
                    "Of the attention part alone, over all tokens after each request's first.",
                    "tokens", &r->scheduler.itl);
    write_plan(out, r);
    write_table(out, s);
    fprintf(out,
            "<footer>foveal %s. The serving clock counts the time of plan, append and attention of "
            "the layers that were served%s. "
            "Keys, values and queries are random numbers; which tokens are equal is the "
            "trace's.</footer>\n</main></body></html>\n",
            fv_version(), r->scheduling.speed > 0 ? ", and waiting for arrivals" : "");
    free_over_time(&t);
}
