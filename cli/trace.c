/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c -- the two readers. Both work on lines of a text in memory; neither reads past a line's
 * end. */
#include "trace.h"
#include "cli.h"

#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    trace *out;
    trace_error *err;
    int64_t line, room, block_room, max_tokens;
    bool started;
    double origin, last;                /* arrivals of the file's first and latest request */
    bool (*read_line)(struct reader *r, const char *line, size_t size);
} reader;

static bool expected(reader *r, const char *what)
{
    r->err->line = r->line;
    snprintf(r->err->text, sizeof r->err->text, "expected %s", what);
    return false;
}

static trace_request *add_request(reader *r)
{
    trace *t = r->out;
    if (t->count == r->room) {
        r->room = r->room ? 2 * r->room : 256;
        t->requests = need_more(t->requests, (size_t)r->room, sizeof *t->requests);
    }
    trace_request *q = &t->requests[t->count++];
    *q = (trace_request){ .line = r->line, .block_first = t->num_blocks };
    return q;
}

static void add_block(reader *r, uint64_t value)
{
    trace *t = r->out;
    if (t->num_blocks == r->block_room) {
        r->block_room = r->block_room ? 2 * r->block_room : 4096;
        t->blocks = need_more(t->blocks, (size_t)r->block_room, sizeof *t->blocks);
    }
    t->blocks[t->num_blocks++] = value;
}

/* Arrival times count from the first request and never run backwards. */
static bool set_arrival(reader *r, trace_request *q, double seconds)
{
    if (!r->started)
        r->origin = r->last = seconds;
    r->started = true;
    if (seconds < r->last)
        return expected(r, "a timestamp that is not before the one of the line above");
    r->last = seconds;
    q->arrival = seconds - r->origin;
    return true;
}

/* ---- Azure ---- */

static const char azure_header[] = "TIMESTAMP,ContextTokens,GeneratedTokens";

typedef struct cursor {
    const char *at, *end;
} cursor;

/* Exactly `digits` digits (0: one or more) that make a number of at most `limit`. */
static bool take_number(cursor *c, int digits, int64_t limit, int64_t *out)
{
    int64_t x = 0;
    int n = 0;
    for (; c->at < c->end && isdigit((unsigned char)*c->at) && (!digits || n < digits);
         c->at++, n++) {
        x = 10 * x + (*c->at - '0');
        if (x > limit)
            return false;
    }
    *out = x;
    return digits ? n == digits : n > 0;
}

static bool take(cursor *c, char what)
{
    if (c->at >= c->end || *c->at != what)
        return false;
    c->at++;
    return true;
}

/* Days from 1970-01-01 to a date of the Gregorian calendar: a year that begins in March makes leap
 * days its last ones. */
static int64_t days_of(int64_t year, int64_t month, int64_t day)
{
    const int64_t y = month <= 2 ? year - 1 : year, m = month <= 2 ? month + 9 : month - 3;
    return 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719468;
}

static int64_t days_in(int64_t year, int64_t month)
{
    return month == 12 ? 31 : days_of(year, month + 1, 1) - days_of(year, month, 1);
}

/* ".ffffff", of any length: the first nine digits count. */
static bool take_fraction(cursor *c, double *out)
{
    double place = 0.1;
    const char *begin = c->at;
    *out = 0;
    for (; c->at < c->end && isdigit((unsigned char)*c->at); c->at++, place *= 0.1)
        if (c->at - begin < 9)
            *out += place * (*c->at - '0');
    return c->at > begin;
}

/* "+hh:mm" or "-hh:mm" behind a time. */
static bool take_offset(cursor *c, int64_t *seconds)
{
    *seconds = 0;
    if (c->at >= c->end || (*c->at != '+' && *c->at != '-'))
        return true;
    const int sign = *c->at++ == '-' ? -1 : 1;
    int64_t h, m;
    if (!take_number(c, 2, 23, &h) || !take(c, ':') || !take_number(c, 2, 59, &m))
        return false;
    *seconds = sign * (h * 3600 + m * 60);
    return true;
}

/* YYYY-MM-DD hh:mm:ss[.fraction][+hh:mm] */
static bool take_time(cursor *c, double *seconds)
{
    int64_t year, month, day, h, m, s, offset;
    double fraction = 0;
    if (!take_number(c, 4, 9999, &year) || !take(c, '-') || !take_number(c, 2, 12, &month) ||
        !take(c, '-') || !take_number(c, 2, 31, &day) || !take(c, ' ') || month < 1 || day < 1 ||
        day > days_in(year, month))
        return false;
    if (!take_number(c, 2, 23, &h) || !take(c, ':') || !take_number(c, 2, 59, &m) ||
        !take(c, ':') || !take_number(c, 2, 60, &s))
        return false;
    if (take(c, '.') && !take_fraction(c, &fraction))
        return false;
    if (!take_offset(c, &offset))
        return false;
    const int64_t whole = days_of(year, month, day) * 86400 + h * 3600 + m * 60 + s - offset;
    *seconds = (double)whole + fraction;
    return true;
}

static bool azure_line(reader *r, const char *line, size_t size)
{
    cursor c = { line, line + size };
    if (r->line == 1) {
        if (size != sizeof azure_header - 1 || memcmp(line, azure_header, size))
            return expected(r,
                            "the header TIMESTAMP,ContextTokens,GeneratedTokens, or a JSON object");
        return true;
    }
    double seconds;
    trace_request *q = add_request(r);
    if (!take_time(&c, &seconds))
        return expected(r, "a time like 2023-11-16 18:15:46.6805900 in column 1 (TIMESTAMP), of a "
                           "day that its month has");
    if (!take(&c, ','))
        return expected(r, "a comma behind column 1 (TIMESTAMP)");
    if (!take_number(&c, 0, TRACE_MAX_TOKENS, &q->input) || q->input < 1)
        return expected(r, "a whole number from 1 to 16777216 in column 2 (ContextTokens)");
    if (!take(&c, ','))
        return expected(r, "a comma behind column 2 (ContextTokens)");
    if (!take_number(&c, 0, TRACE_MAX_TOKENS, &q->output))
        return expected(r, "a whole number from 0 to 16777216 in column 3 (GeneratedTokens)");
    if (c.at != c.end)
        return expected(r, "the end of the line behind column 3 (GeneratedTokens)");
    return set_arrival(r, q, seconds);
}

/* ---- Mooncake ---- */

static bool only_known_fields(reader *r, json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        if (!strcmp(key, "timestamp") || !strcmp(key, "input_length") ||
            !strcmp(key, "output_length") || !strcmp(key, "hash_ids"))
            continue;
        char what[200];
        snprintf(what, sizeof what,
                 "only timestamp, input_length, output_length and hash_ids, not \"%.40s\"", key);
        return expected(r, what);
    }
    return true;
}

static bool tokens_of(json_t *object, const char *name, json_int_t least, int64_t *out)
{
    const json_t *x = json_object_get(object, name);
    if (!json_is_integer(x) || json_integer_value(x) < least ||
        json_integer_value(x) > TRACE_MAX_TOKENS)
        return false;
    *out = json_integer_value(x);
    return true;
}

static bool read_blocks(reader *r, json_t *object, trace_request *q)
{
    const json_t *ids = json_object_get(object, "hash_ids");
    const int64_t want = div_up(q->input, TRACE_BLOCK);
    if (!json_is_array(ids) || (int64_t)json_array_size(ids) != want) {
        char what[160];
        snprintf(
            what, sizeof what,
            "\"hash_ids\" to be a list of %lld numbers: one for every 512 of %lld input tokens",
            (long long)want, (long long)q->input);
        return expected(r, what);
    }
    uint64_t chain = 0;
    for (int64_t i = 0; i < want; i++) {
        const json_t *id = json_array_get(ids, (size_t)i);
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return expected(r, "\"hash_ids\" to hold whole numbers from 0");
        chain = mix64(chain, (uint64_t)json_integer_value(id));
        add_block(r, chain);
    }
    q->num_blocks = want;
    return true;
}

static bool mooncake_object(reader *r, json_t *object)
{
    trace_request *q = add_request(r);
    const json_t *time = json_object_get(object, "timestamp");
    if (!json_is_number(time) || !(json_number_value(time) >= 0))
        return expected(r, "\"timestamp\" to be a number of milliseconds from 0");
    if (!tokens_of(object, "input_length", 1, &q->input))
        return expected(r, "\"input_length\" to be a whole number from 1 to 16777216");
    if (!tokens_of(object, "output_length", 0, &q->output))
        return expected(r, "\"output_length\" to be a whole number from 0 to 16777216");
    return read_blocks(r, object, q) && only_known_fields(r, object) &&
           set_arrival(r, q, json_number_value(time) / 1000);
}

static bool mooncake_line(reader *r, const char *line, size_t size)
{
    json_error_t problem;
    json_t *object = json_loadb(line, size, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(object)) {
        char what[220];
        const bool too_large =
            !object && json_error_code(&problem) == json_error_numeric_overflow;
        snprintf(what, sizeof what, "%s: %.150s",
                 too_large ? "numbers below 2^63 (one is too large)"
                           : "one JSON object on the line",
                 object ? "this is another value" : problem.text);
        json_decref(object);
        return expected(r, what);
    }
    const bool good = mooncake_object(r, object);
    json_decref(object);
    return good;
}

/* ---- both ---- */

/* Drops the request that was just read if it is too long. */
static void leave_out(reader *r)
{
    trace *t = r->out;
    const trace_request *q = t->count ? &t->requests[t->count - 1] : NULL;
    if (!q || q->line != r->line || q->input + q->output <= r->max_tokens)
        return;
    t->num_blocks = q->block_first;
    t->count--;
    t->left_out++;
}

/* Calls read_line for each line, without its end (\n or \r\n), until there are enough requests. */
static bool read_lines(reader *r, const char *text, size_t size, int64_t max_requests)
{
    for (size_t at = cli_mark_size(text, size); at < size && r->out->count < max_requests;) {
        const char *line = text + at, *end = memchr(line, '\n', size - at);
        size_t n = end ? (size_t)(end - line) : size - at;
        at += n + 1;
        r->line++;
        if (n && line[n - 1] == '\r')
            n--;
        if (n == 0)
            return expected(r, "a request, not an empty line");
        if (!r->read_line(r, line, n))
            return false;
        leave_out(r);
    }
    if (r->out->count > 0)
        return true;
    r->line++;
    r->err->too_long = r->out->left_out > 0;
    return expected(r, r->out->left_out ? "at least one request that is not left out as too long"
                                        : "at least one request");
}

bool trace_read(const char *text, size_t size, int64_t max_requests, int64_t max_tokens, trace *out,
                trace_error *err)
{
    const size_t mark = cli_mark_size(text, size);
    const bool json = size > mark && text[mark] == '{';
    *err = (trace_error){ 0 };
    *out = (trace){ .format = json ? "Mooncake JSONL" : "Azure CSV" };
    reader r = { .out = out, .err = err, .max_tokens = max_tokens,
                 .read_line = json ? mooncake_line : azure_line };
    if (read_lines(&r, text, size, max_requests))
        return true;
    trace_free(out);
    return false;
}

void trace_free(trace *t)
{
    free(t->requests);
    free(t->blocks);
    *t = (trace){ 0 };
}

uint64_t trace_token(const trace *t, int64_t r, int64_t position)
{
    const trace_request *q = &t->requests[r];
    if (position < q->input && q->num_blocks)
        return mix64(t->blocks[q->block_first + position / TRACE_BLOCK], (uint64_t)position);
    return mix64(mix64(0x6f776e, (uint64_t)r), (uint64_t)position);
}

int64_t trace_page_keys(const trace *t, int64_t r, int64_t page_size, uint64_t *keys)
{
    const trace_request *q = &t->requests[r];
    if (!q->num_blocks)
        return 0;
    const int64_t n = q->input / page_size;
    for (int64_t p = 0; p < n; p++) {
        const int64_t last = (p + 1) * page_size - 1;
        keys[p] = mix64(t->blocks[q->block_first + last / TRACE_BLOCK], (uint64_t)p);
    }
    return n;
}
