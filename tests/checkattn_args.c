/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_args.c -- the rules of a row in the engine's words: variants, their arguments, segments
 * for block maps.
 *
 * Score first (cap, bias, sink), visibility after. With mask=bits all visibility is one dense mask;
 * otherwise each rule is its own variant, and a block map is a list of segments: one for each run
 * of visible blocks of a block row. Numbers and tensors that may be bound early or late are, by
 * turns.
 */
#include "checkattn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int axis(const setup *s, int which)
{
    return s->way.axis[which];
}

static bool fail(setup *s, const char *why)
{
    snprintf(s->why, sizeof s->why, "%s", why);
    return false;
}

/* --------------------------------------------------------------------------------- small pieces */

/* A new use; its arguments are those added by use_number and use_tensor until the next one. */
static void add_use(setup *s, const char *name)
{
    s->uses[s->num_uses++] =
        (fv_variant_use){ .name = name, .args = &s->use_args[s->num_use_args] };
}

static void use_number(setup *s, const char *name, double x)
{
    s->use_args[s->num_use_args++] = (fv_arg){ .name = name, .number = x };
    s->uses[s->num_uses - 1].num_args++;
}

/* Host data of a tensor argument is taken to where kernels read it. */
static const fv_tensor *keep_tensor(setup *s, fv_tensor t)
{
    size_t n = strcmp(t.dtype, "b1") ? 4 : 1;

    for (int i = 0; i < t.ndim; i++)
        n *= (size_t)t.shape[i];
    t.data = setup_twin(s, t.data, strcmp(t.dtype, "b1") ? n : n / 8 + 1);
    s->arg_tensors[s->num_arg_tensors] = t;
    return &s->arg_tensors[s->num_arg_tensors++];
}

static void use_tensor(setup *s, const char *name, fv_tensor t)
{
    s->use_args[s->num_use_args++] = (fv_arg){ .name = name, .tensor = keep_tensor(s, t) };
    s->uses[s->num_uses - 1].num_args++;
}

static void batch_tensor(setup *s, const char *name, fv_tensor t)
{
    s->batch_args[s->num_batch_args++] = (fv_arg){ .name = name, .tensor = keep_tensor(s, t) };
}

static void run_tensor(setup *s, const char *name, fv_tensor t)
{
    s->run_args[s->num_run_args++] = (fv_arg){ .name = name, .tensor = keep_tensor(s, t) };
}

static fv_tensor vector(void *data, const char *dtype, int64_t n)
{
    return (fv_tensor){ .data = data, .dtype = dtype, .ndim = 1, .shape = { n }, .stride = { 1 } };
}

static fv_tensor matrix(void *data, const char *dtype, int64_t rows, int64_t columns)
{
    return (fv_tensor){ .data = data, .dtype = dtype, .ndim = 2, .shape = { rows, columns },
                        .stride = { columns, 1 } };
}

/* Arguments that may come early come early in every second way. */
static bool early(const setup *s)
{
    return axis(s, CASE_AXIS_TABLE) % 2 == 1;
}

/* --------------------------------------------------------------------------------------- scores */

static bool per_head(setup *s, const char *variant, const char *name,
                     double (*value)(const case_row *, int))
{
    float *x = setup_list(s, (size_t)s->row->hq * sizeof *x);

    if (!x)
        return fail(s, "no memory for an argument");
    for (int h = 0; h < s->row->hq; h++)
        x[h] = (float)value(s->row, h);
    add_use(s, variant);
    if (early(s))
        use_tensor(s, name, vector(x, "f32", s->row->hq));
    else
        run_tensor(s, name, vector(x, "f32", s->row->hq));
    return true;
}

static bool add_scores(setup *s)
{
    const case_row *row = s->row;

    if (row->softcap > 0) {
        add_use(s, "softcap");
        if (early(s))
            use_number(s, "cap", row->softcap);
        else
            s->run_args[s->num_run_args++] = (fv_arg){ .name = "cap", .number = row->softcap };
    }
    return (!row->alibi || per_head(s, "alibi", "slopes", case_alibi_slope))
        && (!row->has_sink || per_head(s, "sink", "sinks", case_sink));
}

/* ----------------------------------------------------------------------------------- dense bits */

static bool bit(const uint8_t *bits, int64_t i)
{
    return bits[i / 8] >> (i % 8) & 1;
}

/* The bits of the slices, each from a byte border. */
static uint8_t *slice_bits(setup *s, int64_t *total)
{
    int64_t at = 0;

    for (int i = 0; i < s->num_slices; i++)
        at = (at + (s->slices[i].row_hi - s->slices[i].row_lo) * (s->slices[i].hi - s->slices[i].lo)
              + 7)
             / 8 * 8;
    *total = at;
    uint8_t *out = setup_list(s, (size_t)at / 8 + 1);
    at = 0;
    for (int i = 0; out && i < s->num_slices; i++, at = (at + 7) / 8 * 8) {
        const slice *c = &s->slices[i];
        for (int64_t k = c->row_lo; k < c->row_hi; k++)
            for (int64_t j = c->lo; j < c->hi; j++, at++)
                if (bit(s->sh->bits,
                        s->sh->bits_at[c->request] + k * s->row->kv.at[c->request] + j))
                    out[at / 8] |= (uint8_t)(1 << at % 8);
    }
    return out;
}

/* Two axes for one request, by turns; else one. */
static bool add_bits(setup *s)
{
    int64_t total = s->sh->bits_at[s->row->num_requests];
    uint8_t *bits = s->whole ? (uint8_t *)s->sh->bits : slice_bits(s, &total);

    if (!bits)
        return fail(s, "no memory for a mask");
    add_use(s, "mask");
    if (s->num_slices == 1 && axis(s, CASE_AXIS_ROOM))
        batch_tensor(s, "bits", matrix(bits, "b1", s->slices[0].row_hi - s->slices[0].row_lo,
                                       s->slices[0].hi - s->slices[0].lo));
    else
        batch_tensor(s, "bits", vector(bits, "b1", total));
    return true;
}

/* --------------------------------------------------------------------------------------- ranges */

static int by_start(const void *a, const void *b)
{
    const ref_range *x = a, *y = b;

    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Sorted, without empty ones; overlapping ones joined where only membership matters. */
static int tidy(ref_range *list, int n, bool join)
{
    int m = 0;

    qsort(list, (size_t)n, sizeof *list, by_start);
    for (int i = 0; i < n; i++) {
        if (list[i].lo == list[i].hi)
            continue;
        if (join && m && list[i].lo <= list[m - 1].hi)
            list[m - 1].hi = list[i].hi > list[m - 1].hi ? list[i].hi : list[m - 1].hi;
        else
            list[m++] = list[i];
    }
    return m;
}

/* The list as an argument: one for all requests, or (by turns) a copy for each with offsets. */
static bool add_ranges(setup *s, const char *name, const char *offsets, const ref_range *given,
                       int count, bool join)
{
    const int64_t copies = axis(s, CASE_AXIS_ROOM) && s->num_slices < 1000 ? s->num_slices : 1;
    ref_range *list = setup_list(s, (size_t)count * sizeof *list);
    int32_t *flat = setup_list(s, (size_t)(2 * copies * count) * sizeof *flat);
    int32_t *indptr = setup_list(s, (size_t)(copies + 1) * sizeof *indptr);

    if (!list || !flat || !indptr)
        return fail(s, "no memory for ranges");
    if (count)
        memcpy(list, given, (size_t)count * sizeof *list);
    count = tidy(list, count, join);
    for (int64_t c = 0; c < copies; c++) {
        for (int i = 0; i < count; i++) {
            flat[2 * (c * count + i)] = (int32_t)list[i].lo;
            flat[2 * (c * count + i) + 1] = (int32_t)list[i].hi;
        }
        indptr[c + 1] = (int32_t)((c + 1) * count);
    }
    batch_tensor(s, name, matrix(flat, "i32", copies * count, 2));
    if (copies == s->num_slices)
        batch_tensor(s, offsets, vector(indptr, "i32", copies + 1));
    return true;
}

static bool add_items(setup *s)
{
    const case_ints *items = &s->row->items;
    ref_range *list = setup_list(s, (size_t)items->n * sizeof *list);
    int64_t at = items->at[0];

    if (!list)
        return fail(s, "no memory for items");
    for (int64_t i = 1; i < items->n; i++) {
        list[i - 1] = (ref_range){ at, at + items->at[i] };
        at += items->at[i];
    }
    add_use(s, "items");
    return add_ranges(s, "items", "items_indptr", list, (int)items->n - 1, false);
}

/* ------------------------------------------------------------------------------------- segments */

static int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

typedef struct segment_maker {
    setup *s;
    int64_t n, rows, keys, pages;       /* made so far, and their sums */
    int levels, level;                  /* most runs of a block row, runs of this one */
    bool count_only;
} segment_maker;

/* Entry of the id array where the pages of slice `i` begin. */
static int64_t table_entry(const setup *s, int i)
{
    const int64_t n = s->num_slices;

    switch (axis(s, CASE_AXIS_TABLE)) {
    case CASE_TABLE_CSR: return s->page_at[i] + i;              /* a spare entry per request */
    case CASE_TABLE_CSR_LAST: return s->page_at[i];
    case CASE_TABLE_2D: return i * s->batch.pages.table_stride;
    default: return (n + 1 - i) * s->batch.pages.table_stride;
    }
}

/* Every second segment says of each page where it stands. */
static bool place_pages(setup *s, fv_segment *x)
{
    int32_t *at = setup_list(s, (size_t)x->num_pages * sizeof *at);

    for (int64_t k = 0; at && k < x->num_pages; k++)
        at[k] = (int32_t)(x->first_position + k * s->page);
    x->page_positions = at;
    return at || fail(s, "no memory for positions of pages");
}

/* Keys [lo, hi) of slice i, for batch rows [first, last). */
static bool add_segment(segment_maker *m, int i, int64_t first, int64_t last, int64_t lo,
                        int64_t hi)
{
    setup *s = m->s;
    const int64_t from = lo - s->slices[i].lo;

    if (first >= last || lo >= hi)
        return true;
    if (s->page && from % s->page)
        return fail(s, "a block border that is no page border cannot be a segment");
    const int64_t pages = s->page ? (hi - lo + s->page - 1) / s->page : 0;
    if (!m->count_only)
        s->segments[m->n] = (fv_segment){
            .row_first = first,
            .num_rows = last - first,
            .num_pages = pages,
            .num_keys = hi - lo,
            .first_page = s->page ? table_entry(s, i) + from / s->page : s->token_at[i] + from,
            .first_position = lo,
        };
    if (!m->count_only && s->page && m->n % 2 && !place_pages(s, &s->segments[m->n]))
        return false;
    m->n++;
    m->level++;
    m->rows += last - first;
    m->keys += hi - lo;
    m->pages += pages;
    return true;
}

/* The runs of visible block columns of one block row. */
static bool add_block_row(segment_maker *m, int i, const char *map, int64_t first, int64_t last)
{
    const case_ints *cols = &m->s->row->block_cols;
    const slice *c = &m->s->slices[i];
    int64_t at = 0, run = -1;           /* run: first key of the run that goes on, -1: none */

    m->level = 0;
    for (int64_t b = 0; b <= cols->n; b++) {
        const bool on = b < cols->n && map[b] == '1';
        if (on && run < 0)
            run = at;
        if (!on && run >= 0) {
            if (!add_segment(m, i, first, last, max(run, c->lo), min(at, c->hi)))
                return false;
            run = -1;
        }
        at += b < cols->n ? cols->at[b] : 0;
    }
    m->levels = m->level > m->levels ? m->level : m->levels;
    return true;
}

static bool add_segments(segment_maker *m)
{
    const case_row *row = m->s->row;
    int64_t batch_row = 0;

    for (int i = 0; i < m->s->num_slices; i++) {
        const slice *c = &m->s->slices[i];
        int64_t at = 0;
        for (int64_t b = 0; b < row->block_rows.n; at += row->block_rows.at[b++])
            if (!add_block_row(m, i, row->block_map.at[b],
                               batch_row + max(at, c->row_lo) - c->row_lo,
                               batch_row + min(at + row->block_rows.at[b], c->row_hi) - c->row_lo))
                return false;
        batch_row += c->row_hi - c->row_lo;
    }
    return true;
}

/* With segments lengths still place the rows, whatever form the tables had. */
static bool give_lengths(setup *s)
{
    int32_t *lengths = setup_list(s, (size_t)s->num_slices * sizeof *lengths);

    for (int i = 0; lengths && i < s->num_slices; i++)
        lengths[i] = (int32_t)(s->slices[i].hi - s->slices[i].lo);
    s->batch.lengths = fv_i32(lengths, s->num_slices);
    return lengths || fail(s, "no memory for lengths");
}

/* Segments instead of tables by request. */
static void use_segments(setup *s, int64_t n)
{
    s->batch.segments = s->segments;
    s->batch.num_segments = n;
    s->batch.pages.indptr = s->batch.pages.table_rows = s->batch.last_page_lengths =
        s->batch.kv_indptr = (fv_index){ 0 };
    s->batch.pages.table_width = s->batch.pages.table_stride = 0;
    s->limits.max_segments = (n ? n : 1) + (axis(s, CASE_AXIS_ROOM) ? 5 : 0);
}

static bool block_segments(setup *s)
{
    const bool room = axis(s, CASE_AXIS_ROOM);
    segment_maker count = { .s = s, .count_only = true }, make = { .s = s };

    if (!add_segments(&count))
        return false;
    if (s->batch.lengths.type == FV_INDEX_NONE && !give_lengths(s))
        return false;
    s->segments = setup_list(s, (size_t)(count.n + 1) * sizeof *s->segments);
    if (!s->segments)
        return fail(s, "no memory for segments");
    if (!add_segments(&make))
        return false;
    use_segments(s, make.n);
    s->limits.max_segment_rows = make.rows + (room ? 50 : 0);
    s->limits.max_levels = make.levels > 1 ? make.levels : 1;
    s->limits.max_kv_tokens = max(make.keys, s->limits.max_kv_tokens);
    s->limits.max_pages = max(make.pages, s->limits.max_pages);
    return true;
}

/* ----------------------------------------------------------------------- a common prefix, given */

/* Rows of all requests on the prefix of request 0; then each request's rows on the rest of its
 * own keys. */
static bool prefix_segments(setup *s)
{
    const int64_t prefix = case_common_prefix(s->row);
    int64_t row = 0, keys = prefix, pages = prefix / s->page, rows = s->total_rows;
    int32_t *all = setup_list(s, (size_t)s->total_rows * sizeof *all);

    s->segments = setup_list(s, (size_t)(s->num_slices + 1) * sizeof *s->segments);
    if (!s->segments || !all || (s->batch.lengths.type == FV_INDEX_NONE && !give_lengths(s)))
        return fail(s, "no memory for segments");
    for (int64_t i = 0; i < s->total_rows; i++)
        all[i] = (int32_t)i;
    const int64_t first = case_first_position(s->row, 0);
    s->segments[0] = (fv_segment){ .num_rows = s->total_rows,
                                   .rows = axis(s, CASE_AXIS_ROOM) ? all : NULL,
                                   .first_page = table_entry(s, 0),
                                   .num_pages = pages,
                                   .num_keys = prefix,
                                   .first_position = first };
    for (int i = 0; i < s->num_slices; i++) {
        const int64_t n = s->row->q.at[i], rest = s->row->kv.at[i] - prefix,
                      need = (rest + s->page - 1) / s->page;
        s->segments[i + 1] = (fv_segment){ .row_first = row,
                                           .num_rows = n,
                                           .num_pages = need,
                                           .num_keys = rest,
                                           .first_page = table_entry(s, i) + prefix / s->page,
                                           .first_position = first + prefix };
        row += n;
        rows += n;
        keys += rest;
        pages += need;
    }
    use_segments(s, s->num_slices + 1);
    s->limits.max_segment_rows = rows;
    s->limits.max_levels = 2;
    s->limits.max_kv_tokens = max(keys, s->limits.max_kv_tokens);
    s->limits.max_pages = max(pages, s->limits.max_pages);
    return true;
}

/* ----------------------------------------------------------------------------------- visibility */

static void add_window(setup *s)
{
    const case_row *row = s->row;

    add_use(s, "window");
    if (row->diag || row->window_left >= 0)
        use_number(s, "left", row->diag ? 0 : row->window_left);
    if (row->diag || row->window_right >= 0)
        use_number(s, "right", row->diag ? 0 : row->window_right);
}

/* Turns queries and keys before anything else: frequencies given, or left to the engine, by
 * turns. */
static bool add_rope(setup *s)
{
    const int dim = s->row->x.rope_dim;
    float *freq = setup_list(s, (size_t)dim * sizeof *freq);

    if (!freq)
        return fail(s, "no memory for frequencies");
    for (int i = 0; i < dim / 2; i++)
        freq[i] = case_frequency(dim, i);
    add_use(s, "rope");
    use_number(s, "rotary_dim", dim);
    if (s->row->x.interleaved)
        use_number(s, "interleaved", 1);
    if (early(s))
        use_tensor(s, "frequencies", vector(freq, "f32", dim / 2));
    return true;
}

/* Parents of the batch's rows, by row of the request. */
static bool add_tree(setup *s)
{
    int32_t *parents = setup_list(s, (size_t)s->total_rows * sizeof *parents);

    if (!parents || !s->whole)
        return fail(s, "a tree is for whole requests");
    memcpy(parents, s->row->x.tree.at, (size_t)s->total_rows * sizeof *parents);
    add_use(s, "tree");
    batch_tensor(s, "parents", vector(parents, "i32", s->total_rows));
    return true;
}

static bool add_lists(setup *s)
{
    const case_row *row = s->row;

    if (row->key_ranges.at) {
        add_use(s, "ranges");
        if (!add_ranges(s, "ranges", "ranges_indptr", row->key_ranges.at, row->key_ranges.n, true))
            return false;
    }
    return (!row->items.n || add_items(s)) && (!row->x.tree.n || add_tree(s));
}

static bool add_masks(setup *s)
{
    const case_row *row = s->row;

    if (axis(s, CASE_AXIS_MASK) == CASE_MASK_BITS)
        return add_bits(s);
    if (row->bits.n && !add_bits(s))    /* what the other rules hide is hidden in these bits as
                                           well: no harm */
        return false;
    if (row->causal) {
        add_use(s, "causal");
        if (row->bidir.at
            && !add_ranges(s, "lift", "lift_indptr", row->bidir.at, row->bidir.n, false))
            return false;
    }
    if (row->diag || row->window_left >= 0 || row->window_right >= 0)
        add_window(s);
    return add_lists(s) && (!row->block_map.n || block_segments(s));
}

static void add_sums(setup *s)
{
    fv_tensor *t = &s->arg_tensors[s->num_arg_tensors++];

    *t = matrix(area_address(&s->sums, 0), "f32", s->row->hk, s->total_keys);
    t->stride[0] = s->sums_stride;
    add_use(s, "key_sums");
    s->run_args[s->num_run_args++] = (fv_arg){ .name = "key_sums", .tensor = t };
}

bool setup_variants(setup *s)
{
    if (s->row->x.rope_dim && !add_rope(s))
        return false;
    if (!add_scores(s) || !add_masks(s))
        return false;
    if (s->row->x.key_sums)
        add_sums(s);
    return axis(s, CASE_AXIS_SHARING) != CASE_SHARING_GIVEN || !s->page || !s->whole
           || prefix_segments(s);
}
