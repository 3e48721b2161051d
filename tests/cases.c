/* SPDX-License-Identifier: Apache-2.0 */
/* cases.c -- the parser of case files.
 *
 *   text -> lines -> pairs (key, value, line) of a row -> set_key for each -> finish: defaults,
 *   checks
 *
 * A row keeps its pairs, so that a fault ("with these keys changed ...") is the same road with a
 * few more pairs at the end. Every error names file, line and row.
 */
#include "cases.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LINE = 4000 };
enum { MAX_LIST = 1 << 26 };            /* items of a list: a typo in AxN should not take all
                                           memory */

const char *const case_dtype_names[] = { "f16", "bf16", "f32" };
const char *const case_kv_names[] = { "same", "e4m3", "e5m2", "fp4g16", "int4g32", "int4g64" };
const char *const case_mem_names[] = { "paged", "ragged" };
const char *const case_layout_names[] = { "nhd", "hnd" };
const char *const case_place_names[] = { "identity", "reversed", "random", "scattered" };
const char *const case_view_names[] = { "contig",   "kvpage", "kvtoken", "qslice", "opad",
                                        "layers32", "off2",   "off4",    "off8",   "hs0",
                                        "hs1",      "hsbig",  "mixed" };
const char *const case_lse_names[] = { "th", "ht" };
static const char *const same_names[] = { "page", "request", "split" };

/* ---------------------------------------------------------------------------- errors and memory */

typedef struct parser {
    case_file *file;
    case_row *row;                      /* being read */
    int line;
    bool fault;                         /* reading the changes of a fault: causal=2 is legal,
                                           tables may be left over */
    char *message;
    size_t size;
} parser;

__attribute__((format(printf, 2, 3)))
static bool fail(parser *p, const char *format, ...)
{
    va_list args;
    const int n =
        snprintf(p->message, p->size, "%s:%d: %s%s", p->file->name, p->line,
                 p->row && p->row->id ? p->row->id : "", p->row && p->row->id ? ": " : "");

    if (n >= 0 && (size_t)n < p->size) {
        va_start(args, format);
        vsnprintf(p->message + n, p->size - (size_t)n, format, args);
        va_end(args);
    }
    return false;
}

typedef struct block {                  /* blocks of a file form a list; the payload follows */
    struct block *next;
    max_align_t payload[];
} block;

static void *grab(case_file *file, size_t bytes)
{
    block *b = calloc(1, sizeof *b + bytes + 1);

    if (!b)
        return NULL;
    b->next = file->blocks;
    file->blocks = b;
    return b->payload;
}

static char *copy(case_file *file, const char *text, size_t n)
{
    char *out = grab(file, n + 1);

    if (out)
        memcpy(out, text, n);
    return out;
}

/* Appends one item of `size` bytes to an array of n: room doubles at powers of two, old room
 * stays in the file. */
static void *append(case_file *file, void *array, int64_t n, size_t size)
{
    if (n & (n - 1))
        return array;
    void *bigger = grab(file, (size_t)(n ? 2 * n : 1) * size);
    if (bigger && n)
        memcpy(bigger, array, (size_t)n * size);
    return bigger;
}

/* -------------------------------------------------------------------------------- scalar values */

static bool read_int64(parser *p, const char *text, int64_t lo, int64_t hi, int64_t *out)
{
    char *end;

    errno = 0;
    const long long x = strtoll(text, &end, 10);
    if (end == text || *end || isspace((unsigned char)*text) || *text == '+')
        return fail(p, "'%s' is not a whole number", text);
    if (errno || x < lo || x > hi)
        return fail(p, "%s lies outside of %lld to %lld", text, (long long)lo, (long long)hi);
    *out = x;
    return true;
}

static bool read_int(parser *p, const char *text, int lo, int hi, int *out)
{
    int64_t x;

    if (!read_int64(p, text, lo, hi, &x))
        return false;
    *out = (int)x;
    return true;
}

static bool read_bool(parser *p, const char *text, bool *out)
{
    int x;

    if (!read_int(p, text, 0, 1, &x))
        return false;
    *out = x == 1;
    return true;
}

static bool read_num(parser *p, const char *text, double *out)
{
    char *end;
    const double x = strtod(text, &end);

    if (end == text || *end || isspace((unsigned char)*text))
        return fail(p, "'%s' is not a number", text);
    *out = x;
    return true;
}

static bool read_finite(parser *p, const char *text, double *out)
{
    return read_num(p, text, out) && (isfinite(*out) || fail(p, "%s is not finite", text));
}

static int find_word(const char *word, const char *const *names, int n)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(word, names[i]))
            return i;
    return -1;
}

static bool read_word(parser *p, const char *text, const char *const *names, int n, int *out)
{
    *out = find_word(text, names, n);
    return *out >= 0 || fail(p, "'%s' is none of the words that belong here", text);
}

/* ---------------------------------------------------------------------------------------- lists */

/* Cuts the next item off a comma list: *rest moves behind it. NULL at the end. Blanks around it
 * are dropped. */
static char *next_item(char **rest)
{
    char *item = *rest;

    if (!item)
        return NULL;
    char *comma = strchr(item, ',');
    *rest = comma ? comma + 1 : NULL;
    if (comma)
        *comma = 0;
    while (isspace((unsigned char)*item))
        item++;
    for (char *end = item + strlen(item); end > item && isspace((unsigned char)end[-1]); )
        *--end = 0;
    return item;
}

static bool push_int(parser *p, case_ints *list, int32_t x)
{
    list->at = append(p->file, list->at, list->n, sizeof *list->at);
    if (!list->at)
        return fail(p, "no memory");
    list->at[list->n++] = x;
    return true;
}

/* "A" or "AxN". */
static bool push_repeated(parser *p, char *item, int64_t lo, int64_t hi, case_ints *list)
{
    char *x = strchr(item, 'x');
    int64_t value, times = 1;

    if (x)
        *x++ = 0;
    if (!read_int64(p, item, lo, hi, &value) || (x && !read_int64(p, x, 0, INT32_MAX, &times)))
        return false;
    if (list->n + times > MAX_LIST)
        return fail(p, "a list of more than %d items", MAX_LIST);
    while (times-- > 0)
        if (!push_int(p, list, (int32_t)value))
            return false;
    return true;
}

static bool read_ints(parser *p, const char *text, int64_t lo, int64_t hi, case_ints *out)
{
    char *rest = copy(p->file, text, strlen(text));

    *out = (case_ints){ 0 };
    if (!rest)
        return fail(p, "no memory");
    if (!strcmp(text, "none"))
        return true;
    for (char *item; (item = next_item(&rest)); )
        if (!push_repeated(p, item, lo, hi, out))
            return false;
    return true;
}

/* splits: numbers and the word auto. */
static bool read_splits(parser *p, const char *text, case_ints *out)
{
    char *rest = copy(p->file, text, strlen(text));

    *out = (case_ints){ 0 };
    if (!rest)
        return fail(p, "no memory");
    for (char *item; (item = next_item(&rest)); )
        if (!strcmp(item, "auto") ? !push_int(p, out, CASE_SPLITS_AUTO)
                                  : !push_repeated(p, item, 1, INT32_MAX, out))
            return false;
    return true;
}

static bool read_ranges(parser *p, const char *text, case_ranges *out)
{
    char *rest = copy(p->file, text, strlen(text));

    *out = (case_ranges){ 0 };
    if (!rest)
        return fail(p, "no memory");
    if (!strcmp(text, "none"))
        return true;
    for (char *item; (item = next_item(&rest)); ) {
        char *colon = strchr(item, ':');
        int64_t lo, hi;
        if (!colon)
            return fail(p, "'%s' is not a range lo:hi", item);
        *colon = 0;
        if (!read_int64(p, item, 0, INT32_MAX, &lo) || !read_int64(p, colon + 1, 0, INT32_MAX, &hi))
            return false;
        if (hi < lo)
            return fail(p, "range %lld:%lld ends before it begins", (long long)lo, (long long)hi);
        out->at = append(p->file, out->at, out->n, sizeof *out->at);
        if (!out->at)
            return fail(p, "no memory");
        out->at[out->n++] = (ref_range){ lo, hi };
    }
    return true;
}

static bool read_words(parser *p, const char *text, const char *const *names, int n, unsigned *out)
{
    char *rest = copy(p->file, text, strlen(text));
    int word;

    *out = 0;
    if (!rest)
        return fail(p, "no memory");
    for (char *item; (item = next_item(&rest)); *out |= 1u << word)
        if (!read_word(p, item, names, n, &word))
            return false;
    return true;
}

static bool read_nums(parser *p, const char *text, double **at, int *n)
{
    char *rest = copy(p->file, text, strlen(text));

    *n = 0;
    *at = NULL;
    if (!rest)
        return fail(p, "no memory");
    for (char *item; (item = next_item(&rest)); (*n)++) {
        *at = append(p->file, *at, *n, sizeof **at);
        if (!*at)
            return fail(p, "no memory");
        if (!read_num(p, item, &(*at)[*n]))
            return false;
    }
    return true;
}

/* One line of a 0/1 table; `none` empties the table. */
static bool read_digits(parser *p, const char *text, case_lines *out)
{
    const size_t n = strlen(text);

    if (!strcmp(text, "none")) {
        *out = (case_lines){ 0 };
        return true;
    }
    if (strspn(text, "01") != n)
        return fail(p, "only the digits 0 and 1 belong here");
    out->at = append(p->file, out->at, out->n, sizeof *out->at);
    if (!out->at || !(out->at[out->n] = copy(p->file, text, n)))
        return fail(p, "no memory");
    out->n++;
    return true;
}

/* gen, zero, or const C. */
static bool read_data(parser *p, const char *text, case_data *out)
{
    *out = (case_data){ 0 };
    if (!strcmp(text, "gen"))
        return true;
    if (!strcmp(text, "zero")) {
        out->kind = CASE_DATA_ZERO;
        return true;
    }
    if (strncmp(text, "const", 5) || !isspace((unsigned char)text[5]))
        return fail(p, "'%s' is none of gen, zero, const C", text);
    for (text += 5; isspace((unsigned char)*text); )
        text++;
    out->kind = CASE_DATA_CONST;
    return read_finite(p, text, &out->value);
}

static bool read_place(parser *p, const char *text, int32_t *out)
{
    int x = -1;

    if (strcmp(text, "*") && !read_int(p, text, 0, INT32_MAX, &x))
        return false;
    *out = x;
    return true;
}

/* T,H,D,C */
static bool read_set(parser *p, const char *text, case_sets *out)
{
    char *rest = copy(p->file, text, strlen(text));
    char *part[4];

    if (!rest)
        return fail(p, "no memory");
    if (!strcmp(text, "none")) {
        *out = (case_sets){ 0 };
        return true;
    }
    for (int i = 0; i < 4; i++)
        if (!(part[i] = next_item(&rest)))
            return fail(p, "'%s' is not T,H,D,C", text);
    if (rest)
        return fail(p, "'%s' has more than T,H,D,C", text);
    out->at = append(p->file, out->at, out->n, sizeof *out->at);
    if (!out->at)
        return fail(p, "no memory");
    case_set *s = &out->at[out->n++];
    return read_place(p, part[0], &s->token) && read_place(p, part[1], &s->head)
        && read_place(p, part[2], &s->dim) && read_finite(p, part[3], &s->value);
}

static bool read_sink(parser *p, const char *text, case_row *row)
{
    double *at;
    int n;

    row->has_sink = false;
    if (!strcmp(text, "none"))
        return true;
    if (!read_nums(p, text, &at, &n))
        return false;
    if (n != 2 || !isfinite(at[0]) || !isfinite(at[1]))
        return fail(p, "'%s' is not A,B", text);
    row->has_sink = true;
    row->sink_a = at[0];
    row->sink_b = at[1];
    return true;
}

/* The count of entries is compared with that of requests by finish(): `num_share` is only known
 * here. */
typedef struct share_list {
    case_share *at;
    int64_t n;
} share_list;

static bool read_share(parser *p, const char *text, share_list *out)
{
    char *rest = copy(p->file, text, strlen(text));

    *out = (share_list){ 0 };
    if (!rest)
        return fail(p, "no memory");
    if (!strcmp(text, "none"))
        return true;
    for (char *item; (item = next_item(&rest)); ) {
        case_share s = { .from = -1 };
        char *colon = strchr(item, ':');
        if (strcmp(item, "-")) {
            if (!colon)
                return fail(p, "'%s' is neither R:N nor -", item);
            *colon = 0;
            if (!read_int(p, item, 0, INT32_MAX, &s.from)
                || !read_int(p, colon + 1, 0, INT32_MAX, &s.keys))
                return false;
        }
        out->at = append(p->file, out->at, out->n, sizeof *out->at);
        if (!out->at)
            return fail(p, "no memory");
        out->at[out->n++] = s;
    }
    return true;
}

/* KEY=VALUE[;KEY=VALUE...] M words */
static bool read_fault(parser *p, const char *text, case_row *row)
{
    const size_t n = strcspn(text, " \t");
    const char *number = text + n + strspn(text + n, " \t");
    const size_t digits = strcspn(number, " \t");
    const char *words = number + digits + strspn(number + digits, " \t");

    if (!memchr(text, '=', n) || !digits)
        return fail(p, "a fault is KEY=VALUE[;KEY=VALUE...] M words");
    row->faults = append(p->file, row->faults, row->num_faults, sizeof *row->faults);
    char *m = copy(p->file, number, digits);
    if (!row->faults || !m)
        return fail(p, "no memory");
    case_fault *f = &row->faults[row->num_faults++];
    f->changes = copy(p->file, text, n);
    f->words = copy(p->file, words, strlen(words));
    if (!f->changes || !f->words)
        return fail(p, "no memory");
    return read_finite(p, m, &f->mo);
}

/* ----------------------------------------------------------------------------------------- keys */

/* What finish() needs besides the row: which keys were given. */
typedef struct given {
    bool q, kv, hq, hk, dk, dv, sm_scale, tokens, states;
    share_list share;
} given;

static bool set_text(parser *p, const char *value, char **out)
{
    *out = copy(p->file, value, strlen(value));
    return *out || fail(p, "no memory");
}

typedef enum kind {
    K_TEXT, K_BOOL, K_INT, K_INT64, K_FINITE, K_INTS, K_RANGES, K_DIGITS, K_DATA, K_SET,
    K_DTYPE, K_MEM, K_LAYOUT, K_PLACE, K_VIEW, K_LSE, K_SAME, K_KV
} kind;

/* One line a key: where its value goes, how it is read, and the bounds of whole numbers. */
typedef struct key_spec {
    const char *name;
    kind kind;
    size_t offset;
    int64_t lo, hi;
    size_t given;                       /* offset in `given` + 1, 0: nobody asks */
} key_spec;

#define AT(field) offsetof(case_row, field)
#define SEEN(field) (offsetof(given, field) + 1)

static const key_spec keys[] = {
    { "class", K_TEXT, AT(cls), 0, 0, 0 },
    { "pain", K_TEXT, AT(pain), 0, 0, 0 },
    { "ref", K_TEXT, AT(ref), 0, 0, 0 },
    { "note", K_TEXT, AT(note), 0, 0, 0 },
    { "q", K_INTS, AT(q), 0, INT32_MAX, SEEN(q) },
    { "kv", K_INTS, AT(kv), 0, INT32_MAX, SEEN(kv) },
    { "hq", K_INT, AT(hq), 1, INT32_MAX, SEEN(hq) },
    { "hk", K_INT, AT(hk), 1, INT32_MAX, SEEN(hk) },
    { "dk", K_INT, AT(dk), 1, INT32_MAX, SEEN(dk) },
    { "dv", K_INT, AT(dv), 1, INT32_MAX, SEEN(dv) },
    { "mla", K_BOOL, AT(mla), 0, 0, 0 },
    { "sm_scale", K_FINITE, AT(sm_scale), 0, 0, SEEN(sm_scale) },
    { "causal", K_INT, AT(causal), 0, 2, 0 },
    { "window_left", K_INT, AT(window_left), -1, INT32_MAX, 0 },
    { "window_right", K_INT, AT(window_right), -1, INT32_MAX, 0 },
    { "softcap", K_FINITE, AT(softcap), 0, 0, 0 },
    { "alibi", K_BOOL, AT(alibi), 0, 0, 0 },
    { "bits", K_DIGITS, AT(bits), 0, 0, 0 },
    { "diag", K_BOOL, AT(diag), 0, 0, 0 },
    { "key_ranges", K_RANGES, AT(key_ranges), 0, 0, 0 },
    { "bidir", K_RANGES, AT(bidir), 0, 0, 0 },
    { "items", K_INTS, AT(items), 0, INT32_MAX, 0 },
    { "block_map", K_DIGITS, AT(block_map), 0, 0, 0 },
    { "block_rows", K_INTS, AT(block_rows), 0, INT32_MAX, 0 },
    { "block_cols", K_INTS, AT(block_cols), 0, INT32_MAX, 0 },
    { "q_amp", K_FINITE, AT(q_amp), 0, 0, 0 },
    { "kv_grid", K_INT, AT(kv_grid), 1, 1 << 30, 0 },
    { "qdata", K_DATA, AT(qdata), 0, 0, 0 },
    { "kdata", K_DATA, AT(kdata), 0, 0, 0 },
    { "vdata", K_DATA, AT(vdata), 0, 0, 0 },
    { "qset", K_SET, AT(qset), 0, 0, 0 },
    { "kset", K_SET, AT(kset), 0, 0, 0 },
    { "vset", K_SET, AT(vset), 0, 0, 0 },
    { "q_same", K_BOOL, AT(q_same), 0, 0, 0 },
    { "dtype", K_DTYPE, AT(dtype), 0, 0, 0 },
    { "kv_dtype", K_KV, AT(kv_dtype), 0, 0, 0 },
    { "k_scale", K_FINITE, AT(k_scale), 0, 0, 0 },
    { "v_scale", K_FINITE, AT(v_scale), 0, 0, 0 },
    { "mem", K_MEM, AT(mem), 0, 0, 0 },
    { "page", K_INTS, AT(page), 1, INT32_MAX, 0 },
    { "layout", K_LAYOUT, AT(layout), 0, 0, 0 },
    { "placement", K_PLACE, AT(placement), 0, 0, 0 },
    { "pages", K_INTS, AT(pages), 0, INT32_MAX, 0 },
    { "first_page", K_INT64, AT(first_page), 0, INT32_MAX, 0 },
    { "page_stride", K_INT64, AT(page_stride), 1, INT32_MAX, 0 },
    { "table_width", K_INT, AT(table_width), 0, INT32_MAX, 0 },
    { "view", K_VIEW, AT(view), 0, 0, 0 },
    { "pad_rows", K_INT, AT(pad_rows), 0, INT32_MAX, 0 },
    { "lse_layout", K_LSE, AT(lse_layout), 0, 0, 0 },
    { "lse_pad", K_INT, AT(lse_pad), 0, INT32_MAX, 0 },
    { "repeat", K_INT, AT(repeat), 1, INT32_MAX, 0 },
    { "check", K_INT, AT(check), 0, INT32_MAX, 0 },
    { "same_bits", K_SAME, AT(same_bits), 0, 0, 0 },
    { "poison_left", K_BOOL, AT(poison_left), 0, 0, 0 },
    { "heavy", K_BOOL, AT(heavy), 0, 0, 0 },
    { "cut", K_INTS, AT(cut), 0, INT32_MAX, 0 },
    { "tokens", K_INT, AT(tokens), 0, INT32_MAX, SEEN(tokens) },
    { "states", K_INT, AT(states), 1, INT32_MAX, SEEN(states) },
    { "state_empty", K_DIGITS, AT(state_empty), 0, 0, 0 },
    { "inplace", K_BOOL, AT(inplace), 0, 0, 0 },
    { "x_rope", K_INT, AT(x.rope_dim), 0, INT32_MAX, 0 },
    { "x_interleaved", K_BOOL, AT(x.interleaved), 0, 0, 0 },
    { "x_tree", K_INTS, AT(x.tree), -1, INT32_MAX, 0 },
    { "x_first", K_INTS, AT(x.first), 0, INT32_MAX, 0 },
    { "x_tail", K_INT, AT(x.tail), 0, INT32_MAX, 0 },
    { "x_int8", K_BOOL, AT(x.int8), 0, 0, 0 },
    { "x_key_sums", K_BOOL, AT(x.key_sums), 0, 0, 0 },
    { "x_head_scales", K_BOOL, AT(x.head_scales), 0, 0, 0 },
    { "x_v_ids", K_BOOL, AT(x.v_ids), 0, 0, 0 },
    { "x_tiled", K_BOOL, AT(x.tiled), 0, 0, 0 },
    { "x_bad", K_RANGES, AT(x.bad), 0, 0, 0 },
};

static bool read_value(parser *p, const key_spec *k, const char *v, void *to)
{
    switch (k->kind) {
    case K_TEXT: return set_text(p, v, to);
    case K_BOOL: return read_bool(p, v, to);
    case K_INT: return read_int(p, v, (int)k->lo, (int)k->hi, to);
    case K_INT64: return read_int64(p, v, k->lo, k->hi, to);
    case K_FINITE: return read_finite(p, v, to);
    case K_INTS: return read_ints(p, v, k->lo, k->hi, to);
    case K_RANGES: return read_ranges(p, v, to);
    case K_DIGITS: return read_digits(p, v, to);
    case K_DATA: return read_data(p, v, to);
    case K_SET: return read_set(p, v, to);
    case K_DTYPE: return read_words(p, v, case_dtype_names, CASE_DTYPES, to);
    case K_MEM: return read_words(p, v, case_mem_names, CASE_MEMS, to);
    case K_LAYOUT: return read_words(p, v, case_layout_names, CASE_LAYOUTS, to);
    case K_PLACE: return read_words(p, v, case_place_names, CASE_PLACES, to);
    case K_VIEW: return read_words(p, v, case_view_names, CASE_VIEWS, to);
    case K_LSE: return read_words(p, v, case_lse_names, CASE_LSES, to);
    case K_SAME:
        return !strcmp(v, "none") ? (*(unsigned *)to = 0, true)
                                  : read_words(p, v, same_names, 3, to);
    case K_KV: return read_word(p, v, case_kv_names, CASE_KVS, to);
    }
    return fail(p, "unreachable kind of key");
}

/* The keys whose value sets more than one field. */
static int set_special(parser *p, const char *key, const char *v, given *g)
{
    static const char *const ops[] = { "attn", "merge" };
    static const char *const scales[] = { "tensor", "token_head" };
    case_row *row = p->row;
    int word;
    bool ok;

    if (!strcmp(key, "op")) {
        if ((ok = read_word(p, v, ops, 2, &word)))
            row->merge = word == 1;
    } else if (!strcmp(key, "scales")) {
        if ((ok = read_word(p, v, scales, 2, &word)))
            row->token_head_scales = word == 1;
    } else if (!strcmp(key, "sink")) {
        ok = read_sink(p, v, row);
    } else if (!strcmp(key, "share")) {
        ok = read_share(p, v, &g->share);
    } else if (!strcmp(key, "splits")) {
        ok = read_splits(p, v, &row->splits);
    } else if (!strcmp(key, "ulp")) {
        row->ulp = -1;
        ok = !strcmp(v, "none") || read_int(p, v, 0, INT32_MAX, &row->ulp);
    } else if (!strcmp(key, "pad_id")) {
        ok = row->has_pad_id = read_int64(p, v, INT32_MIN, INT32_MAX, &row->pad_id);
    } else if (!strcmp(key, "fault")) {
        ok = read_fault(p, v, row);
    } else if (!strcmp(key, "mO")) {
        ok = row->has_mo = read_finite(p, v, &row->mo);
    } else if (!strcmp(key, "o")) {
        ok = row->has_o = read_finite(p, v, &row->o);
    } else if (!strcmp(key, "L")) {
        ok = row->has_l = read_num(p, v, &row->l);
    } else if (!strcmp(key, "n_empty")) {
        ok = read_int64(p, v, 0, INT64_MAX, &row->n_empty);
    } else if (!strcmp(key, "part_L")) {
        ok = read_nums(p, v, &row->part_l, &row->num_part_l);
    } else {
        return -1;
    }
    return ok;
}

static bool set_key(parser *p, const char *key, const char *value, given *g)
{
    const int special = set_special(p, key, value, g);

    if (special >= 0)
        return special;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(key, keys[i].name) && (p->file->extended || strncmp(key, "x_", 2))) {
            if (keys[i].given)
                *((bool *)g + (keys[i].given - 1)) = true;
            return read_value(p, &keys[i], value, (char *)p->row + keys[i].offset);
        }
    return fail(p, "unknown key '%s'", key);
}

/* ----------------------------------------------------------------------------------- whole rows */

static void row_defaults(case_row *row, case_file *file)
{
    static int32_t pages[] = { 1, 16, 64 }, splits[] = { 1, CASE_SPLITS_AUTO, 8 };
    char *id = row->id;
    const int line = row->line;

    *row = (case_row){
        .id = id,
        .line = line,
        .file = file,
        .cls = "",
        .pain = "",
        .ref = "",
        .note = "",
        .window_left = -1,
        .window_right = -1,
        .q_amp = 8,
        .kv_grid = 64,
        .k_scale = 1,
        .v_scale = 1,
        .dtype = 7,
        .mem = 3,
        .layout = 3,
        .placement = 1u << CASE_PLACE_RANDOM,
        .view = 1u << CASE_VIEW_CONTIG,
        .lse_layout = 1u << CASE_LSE_TH,
        .page = { pages, 3 },
        .splits = { splits, 3 },
        .first_page = -1,
        .page_stride = -1,
        .table_width = -1,
        .repeat = 1,
        .ulp = -1,
    };
}

static bool sums(parser *p, case_row *row)
{
    row->q_base = grab(p->file, (size_t)(row->num_requests + 1) * sizeof *row->q_base);
    row->kv_base = grab(p->file, (size_t)(row->num_requests + 1) * sizeof *row->kv_base);
    if (!row->q_base || !row->kv_base)
        return fail(p, "no memory");
    for (int r = 0; r < row->num_requests; r++) {
        row->q_base[r + 1] = row->q_base[r] + row->q.at[r];
        row->kv_base[r + 1] = row->kv_base[r] + row->kv.at[r];
    }
    row->total_q = row->q_base[row->num_requests];
    row->total_kv = row->kv_base[row->num_requests];
    return true;
}

static bool finish_requests(parser *p, case_row *row, const given *g)
{
    if (!g->kv)
        return fail(p, "kv is required");
    row->num_requests = (int)row->kv.n;
    if (!g->q)
        for (int r = 0; r < row->num_requests; r++)
            if (!push_int(p, &row->q, 1))
                return false;
    if (row->q.n != row->kv.n)
        return fail(p, "q lists %lld requests and kv %lld", (long long)row->q.n,
                    (long long)row->kv.n);
    return sums(p, row);
}

static bool finish_heads(parser *p, case_row *row, const given *g)
{
    if (!g->hq || !g->dk)
        return fail(p, "%s is required", g->hq ? "dk" : "hq");
    if (!g->hk)
        row->hk = row->hq;
    if (!g->dv)
        row->dv = row->dk;
    if (!g->sm_scale)
        row->sm_scale = 1 / sqrt(row->dk);
    if (row->hq % row->hk)
        return fail(p, "%d query heads cannot share %d KV heads evenly", row->hq, row->hk);
    if (row->mla && (row->hk != 1 || row->dv > row->dk))
        return fail(p, "mla needs hk=1 and dv <= dk");
    return true;
}

static bool finish_share(parser *p, case_row *row, const given *g)
{
    row->share = NULL;
    if (!g->share.n)
        return true;
    if (g->share.n != row->num_requests)
        return fail(p, "share has %lld entries for %d requests", (long long)g->share.n,
                    row->num_requests);
    row->share = g->share.at;
    for (int r = 0; r < row->num_requests; r++) {
        const case_share *s = &row->share[r];
        if (s->from >= r)
            return fail(p, "request %d shares with request %d, which is not earlier", r, s->from);
        if (s->from >= 0 && (s->keys > row->kv.at[r] || s->keys > row->kv.at[s->from]))
            return fail(p, "request %d shares %d keys, more than there are", r, s->keys);
    }
    return true;
}

static int64_t sum_of(const case_ints *list)
{
    int64_t sum = 0;

    for (int64_t i = 0; i < list->n; i++)
        sum += list->at[i];
    return sum;
}

static bool finish_bits(parser *p, const case_row *row)
{
    if (!row->bits.n)
        return true;
    if (row->bits.n != row->total_q)
        return fail(p, "%lld lines of bits for %lld rows", (long long)row->bits.n,
                    (long long)row->total_q);
    for (int r = 0; r < row->num_requests; r++)
        for (int64_t i = row->q_base[r]; i < row->q_base[r + 1]; i++)
            if ((int64_t)strlen(row->bits.at[i]) != row->kv.at[r])
                return fail(p, "bits of row %lld: %zu digits for %d keys", (long long)i,
                            strlen(row->bits.at[i]), row->kv.at[r]);
    return true;
}

static bool finish_blocks(parser *p, const case_row *row)
{
    if (!row->block_map.n)
        return !(row->block_rows.n || row->block_cols.n) || p->fault
               || fail(p, "block sizes without block_map");
    if (row->block_map.n != row->block_rows.n)
        return fail(p, "%lld lines of block_map for %lld block rows", (long long)row->block_map.n,
                    (long long)row->block_rows.n);
    for (int64_t i = 0; i < row->block_map.n; i++)
        if ((int64_t)strlen(row->block_map.at[i]) != row->block_cols.n)
            return fail(p, "line %lld of block_map: %zu digits for %lld block columns",
                        (long long)i, strlen(row->block_map.at[i]), (long long)row->block_cols.n);
    for (int r = 0; r < row->num_requests; r++)
        if (row->q.at[r] != sum_of(&row->block_rows) || row->kv.at[r] != sum_of(&row->block_cols))
            return fail(p, "block sizes do not add up to the rows and keys of request %d", r);
    return true;
}

static bool finish_masks(parser *p, const case_row *row)
{
    if (row->causal == 2 && !p->fault)
        return fail(p, "causal=2 belongs into fault lines only");
    for (int r = 0; row->items.n && r < row->num_requests; r++)
        if (row->kv.at[r] != sum_of(&row->items))
            return fail(p, "items add up to %lld, request %d has %d keys",
                        (long long)sum_of(&row->items), r, row->kv.at[r]);
    return finish_bits(p, row) && finish_blocks(p, row);
}

static bool finish_pages(parser *p, case_row *row)
{
    if (row->share || row->pages.n || row->first_page >= 0)
        row->mem = 1u << CASE_MEM_PAGED;
    if (!row->page.n || !row->splits.n)
        return fail(p, "page and splits may not be empty");
    if (row->pages.n && row->num_requests != 1)
        return fail(p, "pages is for one request, this row has %d", row->num_requests);
    for (int64_t i = 0; row->pages.n && i < row->page.n; i++)
        if ((row->kv.at[0] + row->page.at[i] - 1) / row->page.at[i] != row->pages.n)
            return fail(p, "%lld pages of %d tokens for %d keys", (long long)row->pages.n,
                        row->page.at[i], row->kv.at[0]);
    return true;
}

static bool finish_cut(parser *p, const case_row *row)
{
    int32_t last = 0;

    if (!row->cut.n)
        return !row->num_part_l || fail(p, "part_L without cut");
    if (row->num_requests != 1 || row->q.at[0] != 1)
        return fail(p, "cut is for one request with one row");
    for (int64_t i = 0; i < row->cut.n; last = row->cut.at[i++])
        if (row->cut.at[i] < last || row->cut.at[i] > row->kv.at[0])
            return fail(p, "cut %d is out of order or behind the last key", row->cut.at[i]);
    if (row->num_part_l && row->num_part_l != row->cut.n + 1)
        return fail(p, "%d values of part_L for %lld parts", row->num_part_l,
                    (long long)row->cut.n + 1);
    return true;
}

static bool finish_tiled(parser *p, const case_row *row)
{
    const bool narrow = row->kv_dtype != CASE_KV_SAME || row->x.int8;

    if (!row->x.tiled)
        return true;
    if (row->mem != 1u << CASE_MEM_PAGED || row->mla || row->x.tail || row->dk % 32 || row->dv % 32)
        return fail(p, "x_tiled: mem=paged, dims of multiples of 32, neither mla nor x_tail");
    if (narrow || row->dtype & 1u << CASE_DTYPE_F32)
        return fail(p, "x_tiled: dtype=f16,bf16 and no other kv_dtype");
    for (int64_t i = 0; i < row->page.n; i++)
        if (row->page.at[i] % 16)
            return fail(p, "x_tiled: a page of %d tokens", row->page.at[i]);
    return true;
}

/* x_bad takes whole pages away, whatever their size. */
static bool finish_bad(parser *p, const case_row *row)
{
    if (!row->x.bad.n)
        return true;
    if (row->mem != 1u << CASE_MEM_PAGED)
        return fail(p, "x_bad is about pages: mem=paged");
    for (int64_t i = 0; i < row->page.n; i++)
        for (int r = 0; r < row->num_requests; r++)
            for (int64_t j = 1; j < row->kv.at[r]; j++)
                if (j % row->page.at[i] && case_bad(row, r, j) != case_bad(row, r, j - 1))
                    return fail(p, "x_bad takes a part of a page of %d tokens away, at key %lld of request %d", row->page.at[i],
                                (long long)j, r);
    return true;
}

static bool finish_extra(parser *p, const case_row *row)
{
    const case_extra *x = &row->x;

    if (!finish_tiled(p, row))
        return false;

    if (x->rope_dim > row->dk || x->rope_dim % 2)
        return fail(p, "x_rope=%d is odd or more than dk", x->rope_dim);
    if (x->tail && x->tail >= row->dk)
        return fail(p, "x_tail=%d is not less than dk", x->tail);
    if (x->first.n && row->block_map.n)
        return fail(p, "x_first with block_map: block columns count from position 0");
    if (x->v_ids && row->mla)
        return fail(p, "x_v_ids with mla: V lies in K");
    if (x->tree.n && x->tree.n != row->total_q)
        return fail(p, "x_tree has %lld entries for %lld rows", (long long)x->tree.n,
                    (long long)row->total_q);
    if (x->first.n && x->first.n != row->num_requests)
        return fail(p, "x_first has %lld entries for %d requests", (long long)x->first.n,
                    row->num_requests);
    for (int r = 0; x->tree.n && r < row->num_requests; r++)
        for (int64_t i = 0; i < row->q.at[r]; i++)
            if (x->tree.at[row->q_base[r] + i] >= i)
                return fail(p, "x_tree: the parent of row %lld of request %d is not an earlier row",
                            (long long)i, r);
    return true;
}

static bool finish_merge(parser *p, case_row *row, const given *g)
{
    if (!g->tokens || !g->hq || !g->dv || !g->states)
        return fail(p, "a merge needs tokens, hq, dv and states");
    if (row->state_empty.n && row->state_empty.n != row->states)
        return fail(p, "%lld patterns of state_empty for %d states", (long long)row->state_empty.n,
                    row->states);
    for (int64_t i = 0; i < row->state_empty.n; i++)
        if (!*row->state_empty.at[i])
            return fail(p, "an empty pattern of state_empty");
    row->hk = row->hq;
    row->dk = row->dv;
    return true;
}

/* Reads the row's pairs into `row`, then fills what follows from them and checks what must
 * agree. */
static bool fill_row(parser *p, case_row *row)
{
    const case_pair *pairs = row->pairs;
    const int n = row->num_pairs;
    given g = { 0 };

    row_defaults(row, p->file);
    row->pairs = (case_pair *)pairs;
    row->num_pairs = n;
    p->row = row;
    for (int i = 0; i < n; i++) {
        p->line = pairs[i].line;
        if (!set_key(p, pairs[i].key, pairs[i].value, &g))
            return false;
    }
    p->line = row->line;
    if (row->merge)
        return finish_merge(p, row, &g);
    return finish_requests(p, row, &g) && finish_heads(p, row, &g) && finish_share(p, row, &g)
        && finish_masks(p, row) && finish_pages(p, row) && finish_cut(p, row)
        && finish_extra(p, row) && finish_bad(p, row);
}

static bool add_pair(parser *p, case_row *row, const char *key, const char *value, int line)
{
    row->pairs = append(p->file, row->pairs, row->num_pairs, sizeof *row->pairs);
    if (!row->pairs)
        return fail(p, "no memory");
    row->pairs[row->num_pairs++] = (case_pair){
        copy(p->file, key, strlen(key)), copy(p->file, value, strlen(value)), line
    };
    const case_pair *last = &row->pairs[row->num_pairs - 1];
    return (last->key && last->value) || fail(p, "no memory");
}

bool case_apply_fault(const case_row *row, int i, case_row *out, char *message, size_t size)
{
    parser p = {
        .file = row->file, .line = row->line, .fault = true, .message = message, .size = size
    };
    char *rest = copy(row->file, row->faults[i].changes, strlen(row->faults[i].changes));
    char *next;

    /* The old pairs are copied: appending to a full array in place would write into the row's
     * own. */
    *out = (case_row){ .id = row->id, .line = row->line, .file = row->file };
    p.row = out;
    for (int k = 0; k < row->num_pairs; k++)
        if (!add_pair(&p, out, row->pairs[k].key, row->pairs[k].value, row->pairs[k].line))
            return false;
    for (char *item = rest; item && *item; item = next) {
        char *semicolon = strchr(item, ';'), *equals = strchr(item, '=');
        next = semicolon ? semicolon + 1 : NULL;
        if (semicolon)
            *semicolon = 0;
        if (!equals || (semicolon && equals > semicolon))
            return fail(&p, "'%s' is not KEY=VALUE", item);
        *equals = 0;
        if (!add_pair(&p, out, item, equals + 1, row->line))
            return false;
    }
    return fill_row(&p, out);
}

/* ---------------------------------------------------------------------------------- whole files */

static bool begin_row(parser *p, const char *id)
{
    case_file *file = p->file;

    p->row = NULL;
    if (!*id || strpbrk(id, " \t"))
        return fail(p, "id '%s' is empty or holds blanks", id);
    for (int i = 0; i < file->num_rows; i++)
        if (!strcmp(file->rows[i].id, id))
            return fail(p, "id %s is already that of line %d", id, file->rows[i].line);
    file->rows = append(file, file->rows, file->num_rows, sizeof *file->rows);
    if (!file->rows)
        return fail(p, "no memory");
    p->row = &file->rows[file->num_rows++];
    *p->row = (case_row){ .id = copy(file, id, strlen(id)), .line = p->line, .file = file };
    return p->row->id || fail(p, "no memory");
}

/* One line, without its end, writable. */
static bool read_line(parser *p, char *line, size_t n)
{
    char *key = line, *end = line + n;

    if (n > MAX_LINE)
        return fail(p, "%zu characters, more than %d", n, MAX_LINE);
    if (memchr(line, 0, n))
        return fail(p, "a zero byte");
    while (isspace((unsigned char)*key))
        key++;
    while (end > key && isspace((unsigned char)end[-1]))
        *--end = 0;
    if (!*key || *key == '#')
        return true;

    char *value = strchr(key, '=');
    if (!value)
        return fail(p, "neither key=value nor a remark");
    for (char *back = value; back > key && isspace((unsigned char)back[-1]); )
        *--back = 0;
    *value++ = 0;
    while (isspace((unsigned char)*value))
        value++;
    if (!*key)
        return fail(p, "a value without a key");
    if (!strcmp(key, "id"))
        return begin_row(p, value);
    if (!p->row)
        return fail(p, "'%s' before the first id", key);
    return add_pair(p, p->row, key, value, p->line);
}

static bool read_text(parser *p, char *text, size_t length)
{
    for (char *at = text, *stop = text + length; at < stop; ) {
        char *end = memchr(at, '\n', (size_t)(stop - at));
        char *next = end ? end + 1 : stop;
        if (!end)
            end = stop;
        *end = 0;                       /* the copy of the text has one byte more than the text */
        p->line++;
        if (!read_line(p, at, (size_t)(end - at)))
            return false;
        at = next;
    }
    for (int i = 0; i < p->file->num_rows; i++)
        if (!fill_row(p, &p->file->rows[i]))
            return false;
    return true;
}

case_file *case_parse(const char *name, const char *text, size_t length, bool extended,
                      char *message, size_t size)
{
    case_file *file = calloc(1, sizeof *file);
    parser p = { .file = file, .message = message, .size = size };

    if (!file) {
        snprintf(message, size, "%s: no memory", name);
        return NULL;
    }
    file->extended = extended;
    file->name = copy(file, name, strlen(name));
    char *own = copy(file, text, length);
    if (!file->name || !own)
        snprintf(message, size, "%s: no memory", name);
    else if (read_text(&p, own, length))
        return file;
    case_free(file);
    return NULL;
}

static char *slurp(FILE *f, size_t *length)
{
    size_t room = 1 << 16, n = 0;
    char *text = malloc(room);

    for (size_t got; text && (got = fread(text + n, 1, room - n, f)) > 0; ) {
        n += got;
        if (n == room) {
            char *bigger = realloc(text, room *= 2);
            if (!bigger)
                free(text);
            text = bigger;
        }
    }
    *length = n;
    return text;
}

case_file *case_read(const char *path, bool extended, char *message, size_t size)
{
    FILE *f = fopen(path, "rb");
    size_t length;

    if (!f) {
        snprintf(message, size, "%s: %s", path, strerror(errno));
        return NULL;
    }
    char *text = slurp(f, &length);
    const bool bad = ferror(f);
    fclose(f);
    if (!text || bad) {
        free(text);
        snprintf(message, size, "%s: cannot be read", path);
        return NULL;
    }
    case_file *file = case_parse(path, text, length, extended, message, size);
    free(text);
    return file;
}

void case_free(case_file *file)
{
    if (!file)
        return;
    for (block *b = file->blocks, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(file);
}
