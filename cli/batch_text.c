/* SPDX-License-Identifier: Apache-2.0 */
/* batch_text.c -- see batch_text.h. A line is cut into words at blanks; the first is the
 * statement. */
#include "batch_text.h"
#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORDS = 12, MAX_LINE = 512 };

typedef struct reader {
    batch_text *out;
    batch_text_error *err;
    int64_t line;
    char text[MAX_LINE];                /* the line, cut up */
    char *words[MAX_WORDS];
    int num_words;
    unsigned seen;                    /* statements that may come once: bit by place in the table */
} reader;

static bool expected(reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool expected(reader *r, const char *format, ...)
{
    char what[180];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    r->err->line = r->line;
    snprintf(r->err->text, sizeof r->err->text, "expected %s", what);
    return false;
}

static bool is_name(const char *s)
{
    const size_t n = strlen(s);
    return n > 0 && n < BATCH_NAME &&
           strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == n;
}

/* "key=value" with this key: the value, else NULL. */
static const char *value_of(const char *word, const char *key)
{
    const size_t n = strlen(key);
    return !strncmp(word, key, n) && word[n] == '=' ? word + n + 1 : NULL;
}

/* ---- statements ---- */

static bool read_heads(reader *r)
{
    batch_text *b = r->out;
    char *slash = r->num_words == 2 ? strchr(r->words[1], '/') : NULL;
    if (slash)
        *slash = 0;
    if (!slash || !cli_int(r->words[1], 1, 1024, &b->q_heads) ||
        !cli_int(slash + 1, 1, 1024, &b->kv_heads) || b->q_heads % b->kv_heads)
        return expected(r, "heads Q/KV, like heads 32/8, Q a multiple of KV, both at most 1024");
    b->heads_line = r->line;
    return true;
}

static bool read_dim(reader *r)
{
    batch_text *b = r->out;
    const char *v = r->num_words == 3 ? value_of(r->words[2], "v") : NULL;
    if (r->num_words < 2 || r->num_words > 3 || !cli_int(r->words[1], 1, 576, &b->dim_qk) ||
        (r->num_words == 3 && (!v || !cli_int(v, 1, 576, &b->dim_v))))
        return expected(r, "dim N or dim N v=M, from 1 to 576");
    b->dim_line = r->line;
    return true;
}

static bool read_type(reader *r, char *into, int64_t *line)
{
    if (r->num_words != 2 || !is_name(r->words[1]))
        return expected(r, "the name of one element type, like bf16");
    snprintf(into, BATCH_NAME, "%s", r->words[1]);
    *line = r->line;
    return true;
}

static bool read_dtype(reader *r) { return read_type(r, r->out->dtype, &r->out->dtype_line); }
static bool read_kv_dtype(reader *r)
{
    return read_type(r, r->out->kv_dtype, &r->out->kv_dtype_line);
}

static bool read_page_size(reader *r)
{
    if (r->num_words != 2 || !cli_int(r->words[1], 1, 1 << 20, &r->out->page_size))
        return expected(r, "page-size N, from 1 to 1048576");
    return true;
}

static bool read_variant(reader *r)
{
    batch_text *b = r->out;
    if (b->num_variants == BATCH_MAX_VARIANTS)
        return expected(r, "at most %d variants", BATCH_MAX_VARIANTS);
    if (r->num_words < 2 || !is_name(r->words[1]) || r->num_words - 2 > BATCH_MAX_ARGS)
        return expected(r, "variant NAME [PARAMETER=NUMBER ...], at most %d parameters",
                        BATCH_MAX_ARGS);
    batch_variant *v = &b->variants[b->num_variants++];
    snprintf(v->name, sizeof v->name, "%s", r->words[1]);
    v->line = r->line;
    for (int i = 2; i < r->num_words; i++) {
        char *equals = strchr(r->words[i], '=');
        if (equals)
            *equals = 0;
        if (!equals || !is_name(r->words[i]) ||
            !cli_real(equals + 1, -1e300, 1e300, &v->numbers[v->num_args]))
            return expected(r, "PARAMETER=NUMBER behind the variant's name");
        snprintf(v->arg_names[v->num_args++], BATCH_NAME, "%s", r->words[i]);
    }
    return true;
}

static int find_run(const batch_text *b, const char *name)
{
    for (int i = 0; i < b->num_runs; i++)
        if (!strcmp(b->runs[i].name, name))
            return i;
    return -1;
}

static bool read_run(reader *r)
{
    batch_text *b = r->out;
    int64_t keys;
    const char *value = r->num_words == 3 ? value_of(r->words[2], "keys") : NULL;
    if (b->num_runs == BATCH_MAX_RUNS)
        return expected(r, "at most %d runs", BATCH_MAX_RUNS);
    if (!value || !is_name(r->words[1]) || !cli_int(value, 1, BATCH_MAX_KEYS, &keys))
        return expected(r, "run NAME keys=N, from 1 to %d", BATCH_MAX_KEYS);
    if (find_run(b, r->words[1]) >= 0)
        return expected(r, "a new name: there is a run %s already", r->words[1]);
    batch_run *run = &b->runs[b->num_runs++];
    *run = (batch_run){ .keys = keys, .line = r->line };
    snprintf(run->name, sizeof run->name, "%s", r->words[1]);
    return true;
}

static bool read_begins(reader *r, batch_request *q, const char *name)
{
    if (q->run >= 0)
        return expected(r, "begins=RUN only once");
    if ((q->run = find_run(r->out, name)) < 0)
        return expected(r, "begins= one of the runs named above; there is no run \"%.60s\"", name);
    return true;
}

static bool read_request_word(reader *r, batch_request *q, const char *word)
{
    const struct {
        const char *name;
        int64_t low, high, *into;
    } fields[] = {
        { "rows", 0, BATCH_MAX_ROWS, &q->rows },
        { "keys", 0, BATCH_MAX_KEYS, &q->keys },
        { "count", 1, BATCH_MAX_REQUESTS, &q->count },
    };
    const char *value;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (!(value = value_of(word, fields[i].name)))
            continue;
        if (*fields[i].into >= 0)
            return expected(r, "%s=N only once", fields[i].name);
        if (!cli_int(value, fields[i].low, fields[i].high, fields[i].into))
            return expected(r, "%s to be a whole number from %lld to %lld, not \"%.60s\"",
                            fields[i].name, (long long)fields[i].low, (long long)fields[i].high,
                            value);
        return true;
    }
    if ((value = value_of(word, "begins")))
        return read_begins(r, q, value);
    return expected(r, "rows=N, keys=N, count=N or begins=RUN, not \"%.60s\"", word);
}

static bool read_request(reader *r)
{
    batch_text *b = r->out;
    batch_request q = { .rows = -1, .keys = -1, .count = -1, .run = -1, .line = r->line };
    for (int i = 1; i < r->num_words; i++)
        if (!read_request_word(r, &q, r->words[i]))
            return false;
    if (q.rows < 0 || q.keys < 0)
        return expected(r, "request rows=N keys=N [begins=RUN] [count=N]");
    if (q.run >= 0 && b->runs[q.run].keys > q.keys)
        return expected(r, "at least %lld keys: the request begins with run %s",
                        (long long)b->runs[q.run].keys, b->runs[q.run].name);
    q.count = max_i64(q.count, 1);
    if (b->num_requests == b->room) {
        b->room = b->room ? 2 * b->room : 64;
        b->requests = need_more(b->requests, (size_t)b->room, sizeof *b->requests);
    }
    b->requests[b->num_requests++] = q;
    return true;
}

static const struct {
    const char *name;
    bool (*read)(reader *r);
    bool once;
} statements[] = {
    { "heads", read_heads, true },
    { "dim", read_dim, true },
    { "dtype", read_dtype, true },
    { "kv-dtype", read_kv_dtype, true },
    { "page-size", read_page_size, true },
    { "variant", read_variant, false },
    { "run", read_run, false },
    { "request", read_request, false },
};

static bool read_statement(reader *r)
{
    for (unsigned i = 0; i < sizeof statements / sizeof statements[0]; i++) {
        if (strcmp(statements[i].name, r->words[0]))
            continue;
        if (statements[i].once && r->seen & 1u << i)
            return expected(r, "%s only once", statements[i].name);
        r->seen |= 1u << i;
        return statements[i].read(r);
    }
    return expected(
        r, "heads, dim, dtype, kv-dtype, page-size, variant, run or request, not \"%.60s\"",
        r->words[0]);
}

/* ---- lines ---- */

/* Cuts a line into r->words; a comment ends it. */
static bool cut_line(reader *r, const char *line, size_t size)
{
    const char *comment = memchr(line, '#', size);
    size = comment ? (size_t)(comment - line) : size;
    if (size >= MAX_LINE || memchr(line, 0, size))
        return expected(r, "a line of text of at most %d characters", MAX_LINE - 1);
    memcpy(r->text, line, size);
    r->text[size] = 0;
    r->num_words = 0;
    char *rest;
    for (char *word = strtok_r(r->text, " \t\r", &rest); word;
         word = strtok_r(NULL, " \t\r", &rest)) {
        if (r->num_words == MAX_WORDS)
            return expected(r, "at most %d words on a line", MAX_WORDS);
        r->words[r->num_words++] = word;
    }
    return true;
}

/* What needs the whole file: runs fill pages, totals stay within the limits. */
static bool check_whole(reader *r)
{
    const batch_text *b = r->out;
    int64_t requests = 0, rows = 0, pages = 0;
    for (int i = 0; i < b->num_runs; i++) {
        r->line = b->runs[i].line;
        if (b->runs[i].keys % b->page_size)
            return expected(r, "keys to be a multiple of the page size %lld",
                            (long long)b->page_size);
        if ((pages += b->runs[i].keys / b->page_size) > BATCH_MAX_PAGES)
            return expected(r, "at most %d pages in all", BATCH_MAX_PAGES);
    }
    for (int64_t i = 0; i < b->num_requests; i++) {
        const batch_request *q = &b->requests[i];
        r->line = q->line;
        requests += q->count;
        rows += q->count * q->rows;
        pages += q->count * div_up(q->keys, b->page_size);
        if (requests > BATCH_MAX_REQUESTS || rows > BATCH_MAX_ROWS || pages > BATCH_MAX_PAGES)
            return expected(r, "at most %d requests, %d rows and %d pages in all",
                            BATCH_MAX_REQUESTS, BATCH_MAX_ROWS, BATCH_MAX_PAGES);
    }
    return true;
}

static bool read_lines(reader *r, const char *text, size_t size)
{
    for (size_t at = cli_mark_size(text, size); at < size;) {
        const char *line = text + at, *end = memchr(line, '\n', size - at);
        const size_t n = end ? (size_t)(end - line) : size - at;
        at += n + 1;
        r->line++;
        if (!cut_line(r, line, n) || (r->num_words && !read_statement(r)))
            return false;
    }
    if (r->out->num_requests == 0) {
        r->line++;
        return expected(r, "at least one request");
    }
    return check_whole(r);
}

bool batch_text_read(const char *text, size_t size, batch_text *out, batch_text_error *err)
{
    *out = (batch_text){
        .q_heads = 32, .kv_heads = 8, .dim_qk = 128, .page_size = 16, .dtype = "bf16"
    };
    reader r = { .out = out, .err = err };
    if (!read_lines(&r, text, size)) {
        batch_text_free(out);
        return false;
    }
    if (!out->kv_dtype[0])
        memcpy(out->kv_dtype, out->dtype, sizeof out->kv_dtype);
    return true;
}

void batch_text_free(batch_text *b)
{
    free(b->requests);
    *b = (batch_text){ 0 };
}

/* ---- arrays ---- */

static void count_all(const batch_text *b, batch_arrays *out)
{
    for (int64_t i = 0; i < b->num_requests; i++) {
        const batch_request *q = &b->requests[i];
        out->num_requests += q->count;
        out->total_rows += q->count * q->rows;
        out->total_keys += q->count * q->keys;
        out->total_pages += q->count * div_up(q->keys, b->page_size);
    }
}

void batch_text_unfold(const batch_text *b, batch_arrays *out)
{
    int32_t run_first[BATCH_MAX_RUNS], next = 0, row = 0, entry = 0;
    *out = (batch_arrays){ 0 };
    count_all(b, out);
    out->rows = need((size_t)out->num_requests + 1, sizeof *out->rows);
    out->lengths = need((size_t)out->num_requests, sizeof *out->lengths);
    out->page_indptr = need((size_t)out->num_requests + 1, sizeof *out->page_indptr);
    out->page_ids = need((size_t)out->total_pages, sizeof *out->page_ids);
    for (int i = 0; i < b->num_runs; i++) {
        run_first[i] = next;
        next += (int32_t)(b->runs[i].keys / b->page_size);
    }
    int64_t n = 0;
    for (int64_t i = 0; i < b->num_requests; i++)
        for (int64_t k = 0; k < b->requests[i].count; k++, n++) {
            const batch_request *q = &b->requests[i];
            const int64_t shared = q->run >= 0 ? b->runs[q->run].keys / b->page_size : 0,
                          pages = div_up(q->keys, b->page_size);
            for (int64_t p = 0; p < pages; p++)
                out->page_ids[entry++] = p < shared ? run_first[q->run] + (int32_t)p : next++;
            out->lengths[n] = (int32_t)q->keys;
            out->rows[n + 1] = row += (int32_t)q->rows;
            out->page_indptr[n + 1] = entry;
        }
    out->num_pages = next;
}

void batch_arrays_free(batch_arrays *a)
{
    free(a->rows);
    free(a->lengths);
    free(a->page_indptr);
    free(a->page_ids);
    *a = (batch_arrays){ 0 };
}

int batch_text_load(const char *path, batch_text *out)
{
    batch_text_error problem = { 0 };
    size_t size;
    char *text = cli_read_file(path, 256, &size);
    if (!text)
        return CLI_USAGE;
    const bool good = batch_text_read(text, size, out, &problem);
    free(text);
    return good ? CLI_OK : cli_misuse("%s:%lld: %s", cli_input_name(path), (long long)problem.line,
                                      problem.text);
}

int64_t batch_text_line(const batch_text *b, const char *field)
{
    int i;
    if (sscanf(field, "problem.variants[%d]", &i) == 1 && i >= 0 && i < b->num_variants)
        return b->variants[i].line;
    if (!strcmp(field, "problem.q") || !strcmp(field, "problem.o"))
        return b->dtype_line;
    if (!strcmp(field, "problem.k") || !strcmp(field, "problem.v"))
        return b->kv_dtype_line ? b->kv_dtype_line : b->dtype_line;
    if (!strncmp(field, "problem.num_", 12))
        return b->heads_line;
    return strncmp(field, "problem.dim_", 12) ? 0 : b->dim_line;
}

int batch_text_refused(const char *path, int64_t line, const fv_error *err)
{
    char where[24] = "";
    if (line)
        snprintf(where, sizeof where, ":%lld", (long long)line);
    cli_fail("%s%s: %s (%s)", cli_input_name(path), where,
             err->text[0] ? err->text : fv_status_text(err->status), fv_status_name(err->status));
    return err->status == FV_E_INVALID ? CLI_USAGE : CLI_FAILED;
}

fv_problem batch_text_problem(const batch_text *b, batch_uses *uses)
{
    *uses = (batch_uses){ 0 };
    for (int i = 0; i < b->num_variants; i++) {
        const batch_variant *from = &b->variants[i];
        for (int j = 0; j < from->num_args; j++)
            uses->args[i][j] = (fv_arg){ .name = from->arg_names[j], .number = from->numbers[j] };
        uses->uses[i] = (fv_variant_use){ .name = from->name, .args = uses->args[i],
                                          .num_args = from->num_args };
    }
    return (fv_problem){ .q = b->dtype, .k = b->kv_dtype, .v = b->kv_dtype, .o = b->dtype,
                         .num_q_heads = (int32_t)b->q_heads, .num_kv_heads = (int32_t)b->kv_heads,
                         .dim_qk = (int32_t)b->dim_qk, .dim_v = (int32_t)b->dim_v,
                         .variants = uses->uses, .num_variants = b->num_variants };
}
