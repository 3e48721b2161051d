/* SPDX-License-Identifier: Apache-2.0 */
/* cases_gen.c -- the numbers of a row and the answer to it, as cases/README.md defines them.
 *
 * Everything is a function of (row, token, head, dim): nothing is stored, so that a row of any size
 * can be written wherever a test wants it. A token number counts over all requests; a shared key is
 * the token of the request that owns it, hence has the same numbers and the same scales.
 */
#include "cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const double case_fp4_magnitudes[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };

uint32_t case_hash(uint32_t seed, uint32_t i)
{
    uint32_t x = i + seed * 0x9E3779B9u;

    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

double case_g(uint32_t seed, uint32_t i, int grid)
{
    return (double)((int)(case_hash(seed, i) % (uint32_t)(2 * grid + 1)) - grid) / grid;
}

int case_fp4_code(uint32_t seed, uint32_t i)
{
    return (int)(case_hash(seed, i) % 16);
}

double case_fp4_scale(uint32_t seed, uint32_t group)
{
    return (8 + case_hash(seed + 3, group) % 8) / 32.0;
}

static double fp4(uint32_t seed, uint32_t i)
{
    const int code = case_fp4_code(seed, i);
    const double x = case_fp4_magnitudes[code & 7] * case_fp4_scale(seed, i / 16);

    return code & 8 ? -x : x;
}

int case_int4_group(const case_row *row)
{
    return row->kv_dtype == CASE_KV_INT4G32 ? 32 : row->kv_dtype == CASE_KV_INT4G64 ? 64 : 0;
}

double case_int4_scale(uint32_t seed, uint32_t group)
{
    return (8 + case_hash(seed + 3, group) % 8) / 64.0;
}

double case_int4_zero(uint32_t seed, uint32_t group)
{
    return case_hash(seed + 5, group) % 31 / 2.0;
}

static double int4(uint32_t seed, uint32_t i, uint32_t size)
{
    const double zero = case_int4_zero(seed, i / size);

    return (case_hash(seed, i) % 16 - zero) * case_int4_scale(seed, i / size);
}

/* ------------------------------------------------------------------------------------- elements */

/* Indices wrap at 2^32 by definition. */
static uint32_t flat(int64_t token, int heads, int head, int width, int dim)
{
    return (uint32_t)(((uint64_t)token * (uint64_t)heads + (uint64_t)head) * (uint64_t)width
                      + (uint64_t)dim);
}

static double overridden(const case_sets *sets, int64_t token, int head, int dim, double x)
{
    for (int i = 0; i < sets->n; i++) {
        const case_set *s = &sets->at[i];
        if ((s->token < 0 || s->token == token) && (s->head < 0 || s->head == head)
            && (s->dim < 0 || s->dim == dim))
            x = s->value;
    }
    return x;
}

static double cache_element(const case_row *row, const case_data *data, uint32_t seed, uint32_t i)
{
    if (data->kind != CASE_DATA_GEN)
        return data->value;
    if (row->x.int8)
        return row->kv_grid * case_g(seed, i, row->kv_grid);
    if (case_int4_group(row))
        return int4(seed, i, (uint32_t)case_int4_group(row));
    return row->kv_dtype == CASE_KV_FP4G16 ? fp4(seed, i) : case_g(seed, i, row->kv_grid);
}

double case_q(const case_row *row, int64_t token, int head, int dim)
{
    double x = row->qdata.value;

    if (row->qdata.kind == CASE_DATA_GEN)
        x = row->q_amp * case_g(1, flat(token, row->hq, head, row->dk, dim), 64);
    return overridden(&row->qset, token, head, dim, x);
}

double case_k(const case_row *row, int64_t token, int head, int dim)
{
    const double x = cache_element(row, &row->kdata, 2, flat(token, row->hk, head, row->dk, dim));

    return overridden(&row->kset, token, head, dim, x);
}

double case_v(const case_row *row, int64_t token, int head, int dim)
{
    const double x = cache_element(row, &row->vdata, 3, flat(token, row->hk, head, row->dv, dim));

    return overridden(&row->vset, token, head, dim, x);
}

int64_t case_q_token(const case_row *row, int request, int64_t i)
{
    return row->q_same ? i : row->q_base[request] + i;
}

int64_t case_kv_token(const case_row *row, int request, int64_t key)
{
    while (row->share && row->share[request].from >= 0 && key < row->share[request].keys)
        request = row->share[request].from;
    return row->kv_base[request] + key;
}

int64_t case_first_position(const case_row *row, int request)
{
    return row->x.first.n ? row->x.first.at[request] : 0;
}

float case_frequency(int dim, int pair)
{
    return (float)pow(10000, -2.0 * pair / dim);
}

double case_head_scale(int head)
{
    return ldexp(1, head % 3 - 1);
}

double case_k_token_scale(int64_t token, int head)
{
    return ldexp(1, (int)((token + head) % 5) - 2);
}

double case_v_token_scale(int64_t token, int head)
{
    return ldexp(1, (int)((2 * token + head) % 5) - 2);
}

double case_k_factor(const case_row *row, int64_t token, int head)
{
    const double scale = row->x.head_scales ? row->k_scale * case_head_scale(head) : row->k_scale;

    return row->token_head_scales ? scale * case_k_token_scale(token, head) : scale;
}

double case_v_factor(const case_row *row, int64_t token, int head)
{
    const double scale = row->x.head_scales ? row->v_scale * case_head_scale(head) : row->v_scale;

    return row->token_head_scales ? scale * case_v_token_scale(token, head) : scale;
}

double case_alibi_slope(const case_row *row, int head)
{
    return exp2(-8.0 * (head + 1) / row->hq);
}

double case_sink(const case_row *row, int head)
{
    return row->sink_a * head + row->sink_b;
}

bool case_state_empty(const case_row *row, int state, int64_t item)
{
    if (!row->state_empty.n)
        return false;
    const char *pattern = row->state_empty.at[state];
    return pattern[item % (int64_t)strlen(pattern)] == '1';
}

double case_state_o(const case_row *row, int state, int64_t item, int dim)
{
    if (case_state_empty(row, state, item))
        return 0;
    return case_g((uint32_t)(3 + state),
                  (uint32_t)((uint64_t)item * (uint64_t)row->dv + (uint64_t)dim), 64);
}

double case_state_lse(const case_row *row, int state, int64_t item)
{
    return case_state_empty(row, state, item)
               ? -INFINITY
               : 4 * case_g((uint32_t)(11 + state), (uint32_t)item, 64);
}

/* ------------------------------------------------------------------------------ rules for ref.c */

static int64_t *widened(const case_ints *list)
{
    int64_t *out = malloc((size_t)(list->n + 1) * sizeof *out);

    for (int64_t i = 0; out && i < list->n; i++)
        out[i] = list->at[i];
    return out;
}

static uint8_t *flat_digits(const case_lines *lines, int64_t width)
{
    uint8_t *out = malloc((size_t)(lines->n * width + 1));

    for (int64_t i = 0; out && i < lines->n; i++)
        for (int64_t j = 0; j < width; j++)
            out[i * width + j] = lines->at[i][j] == '1';
    return out;
}

static double *per_head(const case_row *row, double (*value)(const case_row *, int))
{
    double *out = malloc((size_t)row->hq * sizeof *out);

    for (int h = 0; out && h < row->hq; h++)
        out[h] = value(row, h);
    return out;
}

static bool make_rope(const case_row *row, case_rules *out)
{
    const int pairs = row->x.rope_dim / 2;

    if (!pairs)
        return true;
    out->freq = malloc((size_t)pairs * sizeof *out->freq);
    for (int i = 0; out->freq && i < pairs; i++)
        out->freq[i] = case_frequency(row->x.rope_dim, i);
    out->rope = (ref_rope){ row->x.rope_dim, row->x.interleaved, out->freq, NULL };
    out->problem.rope = &out->rope;
    return out->freq;
}

bool case_rules_make(const case_row *row, case_rules *out)
{
    *out = (case_rules){ .problem = {
        .hq = row->hq, .hk = row->hk, .dk = row->dk, .dv = row->dv, .scale = row->sm_scale,
        .causal = row->causal, .window_left = row->window_left, .window_right = row->window_right,
        .softcap = row->softcap,
    } };
    if (row->alibi)
        out->problem.slope = out->slope = per_head(row, case_alibi_slope);
    if (row->has_sink)
        out->problem.sink = out->sink = per_head(row, case_sink);
    out->items = widened(&row->items);
    out->block_rows = widened(&row->block_rows);
    out->block_cols = widened(&row->block_cols);
    if (row->block_map.n)
        out->block_map = flat_digits(&row->block_map, row->block_cols.n);
    return (!row->alibi || out->slope) && (!row->has_sink || out->sink) && out->items
           && out->block_rows && out->block_cols && (!row->block_map.n || out->block_map)
           && make_rope(row, out);
}

void case_rules_free(case_rules *rules)
{
    free(rules->slope);
    free(rules->sink);
    free(rules->items);
    free(rules->block_rows);
    free(rules->block_cols);
    free(rules->block_map);
    free(rules->freq);
    *rules = (case_rules){ 0 };
}

static void query_row(void *user, int64_t i, int head, double *out)
{
    const case_request *request = user;
    const int64_t token = case_q_token(request->row, request->index, i);

    for (int d = 0; d < request->row->dk; d++)
        out[d] = case_q(request->row, token, head, d);
}

static void fill_key(const case_row *row, int64_t token, double *k, double *v)
{
    for (int h = 0; h < row->hk; h++) {
        const double kf = case_k_factor(row, token, h), vf = case_v_factor(row, token, h);
        double *kh = k + (int64_t)h * row->dk, *vh = v + (int64_t)h * row->dv;
        for (int d = 0; d < row->dk; d++)
            kh[d] = kf * case_k(row, token, h, d);
        for (int d = 0; d < row->dv; d++)
            vh[d] = row->mla ? kh[d] : vf * case_v(row, token, h, d);
    }
}

bool case_bad(const case_row *row, int request, int64_t key)
{
    const int64_t token = case_kv_token(row, request, key);

    for (int i = 0; i < row->x.bad.n; i++)
        if (token >= row->x.bad.at[i].lo && token < row->x.bad.at[i].hi)
            return true;
    return false;
}

/* [keys]: keys [lo, lo + keys) that x_bad takes away. NULL: no memory. */
static uint8_t *bad_keys(const case_row *row, int request, int64_t lo, int64_t keys)
{
    uint8_t *out = malloc((size_t)keys + 1);

    for (int64_t j = 0; out && j < keys; j++)
        out[j] = case_bad(row, request, lo + j);
    return out;
}

/* The lists of the row that hold for one request. */
static void set_lists(const case_row *row, const case_rules *rules, int index, ref_request *r)
{
    r->first_position = case_first_position(row, index);
    r->parent = row->x.tree.n ? row->x.tree.at + row->q_base[index] : NULL;
    r->diag = row->diag;
    r->ranges = row->key_ranges.at;
    r->num_ranges = row->key_ranges.n;
    r->bidir = row->bidir.at;
    r->num_bidir = row->bidir.n;
    r->items = row->items.n ? rules->items : NULL;
    r->num_items = (int)row->items.n;
    r->block_map = rules->block_map;
    r->block_rows = rules->block_rows;
    r->block_cols = rules->block_cols;
    r->num_block_rows = (int)row->block_rows.n;
    r->num_block_cols = (int)row->block_cols.n;
}

bool case_request_make(const case_row *row, const case_rules *rules, int index, int64_t lo,
                       int64_t hi, case_request *out)
{
    const int64_t keys = hi - lo, rows = row->q.at[index];

    *out = (case_request){ .row = row, .index = index };
    out->r = (ref_request){ .rows = rows, .keys = keys, .query = query_row, .query_user = out };
    out->k = malloc((size_t)(keys * row->hk * row->dk + 1) * sizeof *out->k);
    out->v = malloc((size_t)(keys * row->hk * row->dv + 1) * sizeof *out->v);
    if (row->bits.n)
        out->bits = malloc((size_t)(rows * keys + 1));
    if (row->x.bad.n)
        out->absent = bad_keys(row, index, lo, keys);
    if (!out->k || !out->v || (row->bits.n && !out->bits) || (row->x.bad.n && !out->absent)) {
        case_request_free(out);
        return false;
    }
    for (int64_t j = 0; j < keys; j++)
        fill_key(row, case_kv_token(row, index, lo + j), out->k + j * row->hk * row->dk,
                 out->v + j * row->hk * row->dv);
    for (int64_t i = 0; row->bits.n && i < rows; i++)
        for (int64_t j = 0; j < keys; j++)
            out->bits[i * keys + j] = row->bits.at[row->q_base[index] + i][lo + j] == '1';
    out->r.k = out->k;
    out->r.v = out->v;
    out->r.bits = out->bits;
    out->r.absent = out->absent;
    set_lists(row, rules, index, &out->r);
    return true;
}

void case_request_free(case_request *request)
{
    free(request->k);
    free(request->v);
    free(request->bits);
    free(request->absent);
    request->k = request->v = NULL;
    request->bits = request->absent = NULL;
}

/* ----------------------------------------------------------------------------------- the answer */

/* Which rows of a request of q rows are compared: all, or the first and last `check`. Fills rows
 * (local). */
static int64_t compared(const case_row *row, int64_t q, int64_t *rows)
{
    int64_t n = 0;

    for (int64_t i = 0; i < q; i++)
        if (!row->check || i < row->check || i >= q - row->check)
            rows[n++] = i;
    return n;
}

static void summarise(const case_row *row, case_answer *a)
{
    const int64_t items = a->n * row->hq;
    double sum = 0;

    for (int64_t i = 0; i < items * row->dv; i++)
        sum += fabs(a->o[i]);
    a->mo = items ? sum / (double)(items * row->dv) : 0;
    for (int64_t i = 0; i < items; i++)
        a->n_empty += a->lse[i] == -INFINITY;
    if (items) {
        a->last_o = a->o[(items - 1) * row->dv];
        a->last_l = a->lse[items - 1];
    }
}

static bool solve_request(const case_row *row, const case_rules *rules, int r, int threads,
                          case_answer *a)
{
    int64_t *rows = a->rows + a->n;
    const int64_t n = compared(row, row->q.at[r], rows), first = a->n * row->hq;
    case_request request;

    if (n == 0)
        return true;
    if (!case_request_make(row, rules, r, 0, row->kv.at[r], &request))
        return false;
    const bool ok = ref_attend(&rules->problem, &request.r, rows, n, threads,
                               a->o + first * row->dv, a->lse + first);
    if (ok && a->key_sums
        && !ref_key_sums(&rules->problem, &request.r, a->key_sums + row->kv_base[r] * row->hk)) {
        case_request_free(&request);
        return false;
    }
    case_request_free(&request);
    for (int64_t i = 0; i < n; i++)
        rows[i] += row->q_base[r];
    a->n += n;
    return ok;
}

/* LSE of each part of a `cut` row, last head. */
static bool solve_parts(const case_row *row, const case_rules *rules, case_answer *a)
{
    int64_t lo = 0;

    a->part_l = malloc((size_t)(row->cut.n + 1) * sizeof *a->part_l);
    for (int64_t part = 0; a->part_l && part <= row->cut.n; part++) {
        const int64_t hi = part < row->cut.n ? row->cut.at[part] : row->kv.at[0];
        case_request request;
        case_answer one = { .o = malloc((size_t)(row->hq * row->dv) * sizeof(double)),
                            .lse = malloc((size_t)row->hq * sizeof(double)) };
        bool ok = one.o && one.lse && case_request_make(row, rules, 0, lo, hi, &request);
        if (ok) {
            const int64_t position = row->kv.at[0] - 1 + case_first_position(row, 0);
            request.r.first_position = lo + case_first_position(row, 0);
            request.r.row_position = &position;
            ok = ref_attend(&rules->problem, &request.r, NULL, 1, 1, one.o, one.lse);
            a->part_l[part] = ok ? one.lse[row->hq - 1] : NAN;
            case_request_free(&request);
        }
        case_answer_free(&one);
        if (!ok)
            return false;
        lo = hi;
    }
    return a->part_l != NULL;
}

/* state_o: room for states * dv doubles; at: for states pointers. */
static void merge_item(const case_row *row, int64_t item, double *state_o, const double **at,
                       double *lse, case_answer *a)
{
    for (int s = 0; s < row->states; s++) {
        at[s] = state_o + (int64_t)s * row->dv;
        lse[s] = case_state_lse(row, s, item);
        for (int d = 0; d < row->dv; d++)
            state_o[(int64_t)s * row->dv + d] = case_state_o(row, s, item, d);
    }
    ref_merge(row->states, row->dv, at, lse, a->o + item * row->dv, &a->lse[item]);
}

static bool solve_merge(const case_row *row, case_answer *a)
{
    double *state_o = malloc((size_t)row->states * (size_t)row->dv * sizeof *state_o);
    double *lse = malloc((size_t)row->states * sizeof *lse);
    const double **at = malloc((size_t)row->states * sizeof *at);
    const bool ok = state_o && lse && at;

    for (int64_t item = 0; ok && item < (int64_t)row->tokens * row->hq; item++)
        merge_item(row, item, state_o, at, lse, a);
    for (int t = 0; ok && t < row->tokens; t++)
        a->rows[a->n++] = t;
    free(state_o);
    free(lse);
    free(at);
    return ok;
}

static int64_t count_compared(const case_row *row)
{
    int64_t n = row->merge ? row->tokens : 0;

    for (int r = 0; !row->merge && r < row->num_requests; r++) {
        const int64_t q = row->q.at[r];
        n += !row->check || q < 2 * (int64_t)row->check ? q : 2 * (int64_t)row->check;
    }
    return n;
}

static bool solve_attention(const case_row *row, double (*kept)(double), int threads, case_answer *a)
{
    case_rules rules;
    bool ok = case_rules_make(row, &rules);

    rules.rope.kept = kept;
    if (row->x.key_sums)
        a->key_sums = calloc((size_t)(row->total_kv * row->hk) + 1, sizeof *a->key_sums);
    ok = ok && (!row->x.key_sums || a->key_sums);
    for (int r = 0; ok && r < row->num_requests; r++)
        ok = solve_request(row, &rules, r, threads, a);
    if (ok && row->cut.n)
        ok = solve_parts(row, &rules, a);
    case_rules_free(&rules);
    return ok;
}

bool case_solve(const case_row *row, double (*kept)(double), int threads, case_answer *out)
{
    const int64_t n = count_compared(row);

    *out = (case_answer){ .rows = malloc((size_t)(n + 1) * sizeof *out->rows),
                          .o = malloc((size_t)(n * row->hq * row->dv + 1) * sizeof *out->o),
                          .lse = malloc((size_t)(n * row->hq + 1) * sizeof *out->lse) };
    if (!out->rows || !out->o || !out->lse
        || !(row->merge ? solve_merge(row, out) : solve_attention(row, kept, threads, out))) {
        case_answer_free(out);
        return false;
    }
    summarise(row, out);
    return true;
}

void case_answer_free(case_answer *answer)
{
    free(answer->rows);
    free(answer->o);
    free(answer->lse);
    free(answer->part_l);
    free(answer->key_sums);
    for (int i = 0; answer->ends && i < 2; i++)
        case_answer_free(&answer->ends[i]);
    free(answer->ends);
    *answer = (case_answer){ 0 };
}

static bool any_row_sees(const case_rules *rules, const ref_request *r, int64_t key)
{
    const int64_t own = key - (r->keys - r->rows);      /* the row at the key's position: if any,
                                                           then most often it */

    if (own >= 0 && own < r->rows && ref_visible(&rules->problem, r, own, key, 0))
        return true;
    for (int64_t i = 0; i < r->rows; i++)
        if (ref_visible(&rules->problem, r, i, key, 0))
            return true;
    return false;
}

uint8_t *case_seen(const case_row *row)
{
    uint8_t *seen = calloc((size_t)row->total_kv + 1, 1);
    case_rules rules;

    if (!seen || !case_rules_make(row, &rules)) {
        free(seen);
        return NULL;
    }
    for (int r = 0; r < row->num_requests; r++) {
        const int64_t rows = row->q.at[r], keys = row->kv.at[r];
        ref_request request = { .rows = rows, .keys = keys };
        uint8_t *bits = row->bits.n ? malloc((size_t)(rows * keys + 1)) : NULL;
        for (int64_t i = 0; bits && i < rows * keys; i++)
            bits[i] = row->bits.at[row->q_base[r] + i / keys][i % keys] == '1';
        set_lists(row, &rules, r, &request);
        request.bits = bits;
        for (int64_t j = 0; j < keys; j++)
            seen[row->kv_base[r] + j] = !case_bad(row, r, j) && any_row_sees(&rules, &request, j);
        free(bits);
    }
    case_rules_free(&rules);
    return seen;
}
