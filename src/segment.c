/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c -- a batch to segments: the short form, and given segments (checked, put in order,
 * given levels); which keys a row tile sees.
 *
 * Given segments
 *   - a segment whose rows follow one another inside one request becomes a range, any other a
 *     list of (row, request)
 *   - segments without rows or keys vanish; a (row, head) in no segment joins a segment of no
 *     keys, so that its output is written
 *   - `cells` holds for each (row, head unit) how many segments it lies in; the level of a
 *     segment is one more than the highest level of earlier ones that share a cell with it
 *   - two segments of one row and head that name the same page (ragged: token) at overlapping
 *     positions are refused: its keys would count twice
 * Cost: O(rows x head units of all segments + pages), and a pairwise look only at segments that
 * share cells and positions. */
#include "segment.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#define FAR (INT64_MAX / 4)             /* further than any position */

/* ---- tiles ---- */

int32_t fv__tile_rows(const fv__kernel_shape *shape, int64_t num_rows)
{
    int32_t rows = 1;
    for (int i = 0; i < shape->num_tiles; i++) {
        rows = fv__max32(1, shape->tiles[i] / shape->unit_heads);
        if (rows >= num_rows) break;
    }
    return rows;
}

typedef struct span { int64_t first, last; } span;      /* inclusive */

/* Positions of a tile's rows. */
static span tile_positions(const fv__maker *m, const fv__segment *s, const fv__tile *t)
{
    if (s->request >= 0 && !m->batch->min_position) {
        const int64_t p = fv__row_position(m, (int64_t)s->row_first + t->row_first, s->request);
        return (span){ p, p + t->num_rows - 1 };
    }
    span out = { FAR, -FAR };
    for (int32_t i = 0; i < t->num_rows; i++) {
        const fv__listed_row row = fv__segment_row(m, s, t->row_first + i);
        const int64_t p = fv__row_position(m, row.row, row.request);
        out.first = fv__min64(out.first, p);
        out.last = fv__max64(out.last, p);
    }
    return out;
}

/* Widens `keys` by the ranges of the request's lists that hold a position between p.first and
 * p.last. Ranges ascend: the first whose end lies behind p.first is found by halving. */
static void lift_request(const fv__bounds *b, int32_t request, span p, span *keys)
{
    for (int l = 0; l < b->num_lists; l++) {
        const fv_ranges *list = b->lists[l];
        int64_t lo = list->indptr ? list->indptr[request] : 0;
        const int64_t end = list->indptr ? list->indptr[request + 1] : list->count;
        for (int64_t hi = end; lo < hi; ) {
            const int64_t mid = lo + (hi - lo) / 2;
            if (list->ranges[2 * mid + 1] <= p.first) lo = mid + 1;
            else hi = mid;
        }
        for (; lo < end && list->ranges[2 * lo] <= p.last; lo++) {
            keys->first = fv__min64(keys->first, list->ranges[2 * lo]);
            keys->last = fv__max64(keys->last, (int64_t)list->ranges[2 * lo + 1] - 1);
        }
    }
}

/* Key positions that rows at positions p of one request may see. */
static span visible(const fv__bounds *b, int32_t request, span p)
{
    span keys = { b->has_first ? p.first + b->first : -FAR, b->has_last ? p.last + b->last : FAR };
    if (b->lifted) lift_request(b, request, p, &keys);
    return keys;
}

static span tile_visible(const fv__maker *m, const fv__segment *s, const fv__tile *t)
{
    const fv__bounds *b = m->bounds;
    if (!b->has_first && !b->has_last) return (span){ -FAR, FAR };
    const bool by_row = b->lifted && (s->request < 0 || m->batch->min_position);
    if (!by_row) return visible(b, s->request, tile_positions(m, s, t));
    span keys = { FAR, -FAR };
    for (int32_t i = 0; i < t->num_rows; i++) {
        const fv__listed_row row = fv__segment_row(m, s, t->row_first + i);
        const int64_t p = fv__row_position(m, row.row, row.request);
        const span one = visible(b, row.request, (span){ p, p });
        keys.first = fv__min64(keys.first, one.first);
        keys.last = fv__max64(keys.last, one.last);
    }
    return keys;
}

/* Keys of page `page` at positions of its own between keys.first and keys.last: [first, last +
 * 1) within the page; empty: first > last. */
static span page_keys(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                      int32_t page, span keys)
{
    const int64_t size = m->head->page_size, used = fv__min64(size, s->num_keys - page * size),
                  at = info->page_positions[page];
    return (span){ fv__max64(0, keys.first - at), fv__min64(used - 1, keys.last - at) };
}

static bool page_hidden(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                        int32_t page, span keys)
{
    const span x = page_keys(m, s, info, page, keys);
    return x.first > x.last;
}

/* The keys of such a segment: from the first to the last that is visible. */
static void reach_pages(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                        span keys, int32_t *lo, int32_t *hi)
{
    const int64_t size = m->head->page_size;
    int32_t first = 0, last = info->num_pages;
    *lo = *hi = 0;
    if (info->ascending) {
        for (int32_t end = last; first < end;) { /* the first that does not end before keys.first */
            const int32_t mid = first + (end - first) / 2;
            if (info->page_positions[mid] + size - 1 < keys.first) first = mid + 1;
            else end = mid;
        }
        for (int32_t begin = first; begin < last; ) {   /* the first that begins behind keys.last */
            const int32_t mid = begin + (last - begin) / 2;
            if (info->page_positions[mid] > keys.last) last = mid;
            else begin = mid + 1;
        }
    }
    while (first < last && page_hidden(m, s, info, first, keys)) first++;
    while (last > first && page_hidden(m, s, info, last - 1, keys)) last--;
    if (first == last) return;
    *lo = fv__cut_floor(0, first * size + page_keys(m, s, info, first, keys).first);
    *hi = (int32_t)((last - 1) * size + page_keys(m, s, info, last - 1, keys).last + 1);
}

void fv__tile_reach(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                    fv__tile *tile)
{
    const span keys = tile_visible(m, s, tile);
    const int64_t origin = fv__maker_origin(m, s, info);
    tile->free_keys = 0;
    if (info->page_positions) {
        reach_pages(m, s, info, keys, &tile->key_first, &tile->key_end);
        return;
    }
    fv__cut_reach(keys.first, keys.last, s->first_position, s->num_keys, origin, &tile->key_first,
                  &tile->key_end);
    if (!s->live || !m->bounds->has_first || m->batch->min_position) return;
    /* A live length below the planned one moves the rows, and what they see, to earlier keys
     * (row positions that are given stay). */
    if (tile->key_first == tile->key_end)
        fv__cut_reach(-FAR, keys.last, s->first_position, s->num_keys, origin, &tile->key_first,
                      &tile->key_end);
    /* Chunks count from a piece's first key, and lists leave nothing to skip by: all in full. */
    if (m->chunk || m->bounds->lifted) tile->key_first = 0;
    else tile->free_keys = tile->key_first;
}

/* sum over x in [from, from + n) of x clamped to [0, top] */
static int64_t clamped_sum(int64_t from, int64_t n, int64_t top)
{
    const int64_t to = from + n;
    const int64_t a = fv__min64(fv__max64(from, 0), top),
                  b = fv__max64(fv__min64(to, top), a); /* the slope */
    const int64_t above = fv__max64(0, to - fv__max64(from, top));
    return (a + b - 1) * (b - a) / 2 + above * top;
}

int64_t fv__tile_pairs(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                       const fv__tile *t)
{
    const fv__bounds *b = m->bounds;
    if (!b->has_first && !b->has_last) return (int64_t)t->num_rows * s->num_keys;
    /* Pages at positions of their own: by the tile, close enough for a count. */
    if (info->page_positions) return (int64_t)t->num_rows * (t->key_end - t->key_first);
    if (s->request >= 0 && !m->batch->min_position && !b->lifted) {
        const int64_t p = fv__row_position(m, (int64_t)s->row_first + t->row_first, s->request) -
                          s->first_position;
        const int64_t upto = b->has_last ? clamped_sum(p + b->last + 1, t->num_rows, s->num_keys)
                                         : (int64_t)t->num_rows * s->num_keys;
        const int64_t before =
            b->has_first ? clamped_sum(p + b->first, t->num_rows, s->num_keys) : 0;
        return fv__max64(0, upto - before);
    }
    int64_t sum = 0;
    for (int32_t i = 0; i < t->num_rows; i++) {
        const fv__listed_row row = fv__segment_row(m, s, t->row_first + i);
        const int64_t p = fv__row_position(m, row.row, row.request);
        const span keys = visible(b, row.request, (span){ p, p });
        const int64_t from = fv__max64(0, keys.first - s->first_position),
                      to = fv__min64(s->num_keys, keys.last - s->first_position + 1);
        sum += fv__max64(0, to - from);
    }
    return sum;
}

/* ---- the short form ---- */

void fv__segments_plain(fv__maker *m, const int32_t *begin, const int32_t *level)
{
    const int32_t page_size = m->head->page_size, num_units = m->shape->num_units, live = m->live;
    fv__segment *out = m->segments + m->num_segments;
    fv__segment_info *info = m->infos + m->num_segments;
    for (int64_t r = 0; r < m->batch->num_requests; r++) {
        const fv__request *q = &m->batch->requests[r];
        const int32_t first = begin ? begin[r] : 0;
        if (q->num_rows == 0 || (first > 0 && first == q->num_keys)) continue;
        *out++ = (fv__segment){
            .table = m->batch->tables[r] + (first ? first / page_size : 0),
            .row_first = q->row_first,
            .num_rows = q->num_rows,
            .request = (int32_t)r,
            .num_units = num_units,
            .num_keys = q->num_keys - first,
            .first_position = q->first_position + first,
            .page_positions = -1,
            .live = live,
            .level = level ? level[r] : 0,
        };
        *info++ = (fv__segment_info){ .tile_rows = fv__tile_rows(m->shape, q->num_rows),
                                      .joined = level && level[r] > 0 };
    }
    m->num_segments = (int32_t)(out - m->segments);
}

/* ---- given segments: checks ---- */

static fv_status refuse(const fv__maker *m, fv_status status, int64_t index, const char *member,
                        int64_t value, int64_t limit, const char *what)
{
    char field[96];
    snprintf(field, sizeof field, "batch.segments[%lld].%s", (long long)index, member);
    return fv__fail(m->err, status, field, value, limit, "segment %lld has %s = %lld; %s %lld",
                    (long long)index, member, (long long)value, what, (long long)limit);
}

/* A list of a segment's own. */
static fv_status check_aligned(const fv__maker *m, const int32_t *list, const char *member, int64_t i)
{
    char field[96];
    snprintf(field, sizeof field, "batch.segments[%lld].%s", (long long)i, member);
    return fv__aligned_check(list, sizeof *list, field, m->err);
}

static fv_status check_rows(const fv__maker *m, const fv_segment *s, int64_t i)
{
    const int64_t total = m->batch->total_rows;
    if (s->num_rows < 0)
        return refuse(m, FV_E_INVALID, i, "num_rows", s->num_rows, 0, "it is at least");
    if (s->num_rows > total)
        return refuse(m, FV_E_INVALID, i, "num_rows", s->num_rows, total, "the batch's rows are");
    if (!s->rows) {
        if (s->row_first < 0)
            return refuse(m, FV_E_INVALID, i, "row_first", s->row_first, 0, "it is at least");
        if (s->row_first > total - s->num_rows)
            return refuse(m, FV_E_INVALID, i, "row_first", s->row_first, total - s->num_rows,
                          "with its num_rows and the batch's rows it is at most");
        return FV_OK;
    }
    FV_TRY(check_aligned(m, s->rows, "rows", i));
    for (int64_t k = 0; k < s->num_rows; k++) {
        char member[48];
        snprintf(member, sizeof member, "rows[%lld]", (long long)k);
        if (s->rows[k] < 0 || s->rows[k] >= total)
            return refuse(m, FV_E_INVALID, i, member, s->rows[k], total,
                          "rows lie between 0 and the batch's");
        if (k > 0 && s->rows[k] <= s->rows[k - 1])
            return refuse(m, FV_E_INVALID, i, member, s->rows[k], s->rows[k - 1],
                          "listed rows ascend and the one before is");
    }
    return FV_OK;
}

static fv_status check_heads(const fv__maker *m, const fv_segment *s, int64_t i)
{
    const int64_t heads = m->shape->num_units / m->shape->units_per_kv_head;
    if (s->kv_head_first < 0)
        return refuse(m, FV_E_INVALID, i, "kv_head_first", s->kv_head_first, 0, "it is at least");
    if (s->num_kv_heads < 0)
        return refuse(m, FV_E_INVALID, i, "num_kv_heads", s->num_kv_heads, 0, "it is at least");
    if (s->num_kv_heads == 0 && s->kv_head_first != 0)
        return refuse(m, FV_E_INVALID, i, "kv_head_first", s->kv_head_first, 0,
                      "with num_kv_heads = 0 (all of them) it is");
    if (s->num_kv_heads > heads)
        return refuse(m, FV_E_INVALID, i, "num_kv_heads", s->num_kv_heads, heads, "it is at most");
    if (s->kv_head_first > heads - s->num_kv_heads)
        return refuse(m, FV_E_INVALID, i, "kv_head_first", s->kv_head_first,
                      heads - s->num_kv_heads,
                      "with its num_kv_heads and the problem's kv heads it is at most");
    return FV_OK;
}

static fv_status check_keys(const fv__maker *m, const fv_segment *s, int64_t i)
{
    const int64_t size = m->head->page_size, entries = m->head->table_entries;
    if (s->num_keys < 0 || s->num_keys >= FV__NO_BOUND)
        return refuse(m, FV_E_INVALID, i, "num_keys", s->num_keys, FV__NO_BOUND - 1,
                      "it lies between 0 and");
    if (s->first_page < 0)
        return refuse(m, FV_E_INVALID, i, "first_page", s->first_page, 0, "it is at least");
    if (!size) {
        if (s->page_positions)
            return refuse(m, FV_E_INVALID, i, "page_positions", 1, 0,
                          "keys are ragged (batch.pages.page_size is 0), so the pages are");
        if (s->first_page > (INT64_C(1) << 48))
            return refuse(m, FV_E_INVALID, i, "first_page", s->first_page, INT64_C(1) << 48,
                          "tokens lie below");
        return FV_OK;
    }
    if (s->num_pages < 0)
        return refuse(m, FV_E_INVALID, i, "num_pages", s->num_pages, 0, "it is at least");
    if (s->num_pages > entries)
        return refuse(m, FV_E_INVALID, i, "num_pages", s->num_pages, entries,
                      "the page ids given are");
    if (s->first_page > entries - s->num_pages)
        return refuse(m, FV_E_INVALID, i, "first_page", s->first_page, entries - s->num_pages,
                      "with its num_pages and the page ids given it is at most");
    if (s->num_keys > s->num_pages * size)
        return refuse(m, FV_E_INVALID, i, "num_keys", s->num_keys, s->num_pages * size,
                      "its num_pages times the page size is");
    return FV_OK;
}

static fv_status check_positions(const fv__maker *m, const fv_segment *s, int64_t i)
{
    const int64_t size = m->head->page_size;
    if (!s->page_positions) {
        if (s->first_position < 0 || s->first_position > FV__NO_BOUND - s->num_keys)
            return refuse(m, FV_E_INVALID, i, "first_position", s->first_position,
                          FV__NO_BOUND - s->num_keys,
                          "its keys' positions lie between 0 and 2^30, so it is at most");
        return FV_OK;
    }
    FV_TRY(check_aligned(m, s->page_positions, "page_positions", i));
    for (int64_t k = 0; k < s->num_pages; k++)
        if (s->page_positions[k] < 0 || s->page_positions[k] > FV__NO_BOUND - size) {
            char member[48];
            snprintf(member, sizeof member, "page_positions[%lld]", (long long)k);
            return refuse(m, FV_E_INVALID, i, member, s->page_positions[k], FV__NO_BOUND - size,
                          "positions lie between 0 and 2^30, so it is at most");
        }
    return FV_OK;
}

static fv_status check_given(const fv__maker *m)
{
    const fv_batch *b = m->batch->given;
    const fv_plan_desc *limits = m->planner->limits;
    int64_t rows = 0, keys = 0, pages = 0;
    if (b->num_segments > limits->max_segments || limits->max_segments == 0)
        return fv__fail(m->err, FV_E_CAPACITY, "batch.num_segments", b->num_segments,
                        limits->max_segments,
                        "batch.segments is given, with %lld segments; the plan was created with max_segments = %lld",
                        (long long)b->num_segments, (long long)limits->max_segments);
    for (int64_t i = 0; i < b->num_segments; i++) {
        const fv_segment *s = &b->segments[i];
        char field[96];
        snprintf(field, sizeof field, "batch.segments[%lld].reserved", (long long)i);
        FV_TRY(fv__check_reserved(s->reserved, FV__COUNT(s->reserved), field, m->err));
        FV_TRY(check_rows(m, s, i));
        FV_TRY(check_heads(m, s, i));
        FV_TRY(check_keys(m, s, i));
        FV_TRY(check_positions(m, s, i));
        rows += s->num_rows;
        keys += s->num_keys;
        pages += m->head->page_size ? s->num_pages : 0;
        if (rows > m->max_segment_rows)
            return refuse(m, FV_E_CAPACITY, i, "num_rows", s->num_rows, m->max_segment_rows,
                          "rows of all segments together exceed limits.max_segment_rows =");
        if (keys > limits->max_kv_tokens)
            return refuse(m, FV_E_CAPACITY, i, "num_keys", s->num_keys, limits->max_kv_tokens,
                          "keys of all segments together exceed limits.max_kv_tokens =");
        if (pages > limits->max_pages)
            return refuse(m, FV_E_CAPACITY, i, "num_pages", s->num_pages, limits->max_pages,
                          "pages of all segments together exceed limits.max_pages =");
    }
    return FV_OK;
}

/* ---- given segments: their order ---- */

static int64_t sign(int64_t a, int64_t b) { return (a > b) - (a < b); }
static int32_t first_row(const fv_segment *s)
{
    return s->rows ? s->rows[0] : (int32_t)s->row_first;
}
static int64_t start_of(const fv_segment *s)
{
    return s->page_positions && s->num_pages ? s->page_positions[0] : s->first_position;
}

/* A total order of what segments say; rows and keys come first, the rest only makes it total. */
static int64_t compare(const fv_segment *a, const fv_segment *b)
{
    int64_t c = sign(start_of(a), start_of(b));
    if (!c) c = sign(a->num_rows, b->num_rows);
    if (!c && a->num_rows > 0) c = sign(first_row(a), first_row(b));
    if (!c) c = sign(a->first_page, b->first_page);
    if (!c) c = sign(a->num_keys, b->num_keys);
    if (!c) c = sign(a->kv_head_first, b->kv_head_first);
    if (!c) c = sign(a->num_kv_heads, b->num_kv_heads);
    if (!c) c = sign(a->num_pages, b->num_pages);
    for (int64_t i = 1; !c && i < a->num_rows && (a->rows || b->rows); i++)
        c = sign(a->rows ? a->rows[i] : a->row_first + i, b->rows ? b->rows[i] : b->row_first + i);
    if (!c) c = sign(a->page_positions != NULL, b->page_positions != NULL);
    for (int64_t i = 0; !c && a->page_positions && i < a->num_pages; i++)
        c = sign(a->page_positions[i], b->page_positions[i]);
    return c;
}

/* Merge sort of m->order: no memory but order2, and nothing to do when the caller's order is
 * ours. */
static void sort_given(fv__maker *m)
{
    const fv_segment *s = m->batch->given->segments;
    const int64_t n = m->batch->given->num_segments;
    int32_t *from = m->order, *to = m->order2;
    bool sorted = true;
    for (int64_t i = 0; i < n; i++) from[i] = (int32_t)i;
    for (int64_t i = 1; i < n && sorted; i++) sorted = compare(&s[i - 1], &s[i]) <= 0;
    for (int64_t width = 1; width < n && !sorted; width *= 2) {
        for (int64_t lo = 0; lo < n; lo += 2 * width) {
            const int64_t mid = fv__min64(lo + width, n), end = fv__min64(lo + 2 * width, n);
            for (int64_t a = lo, b = mid, k = lo; k < end; k++) {
                const bool left = a < mid && (b >= end || compare(&s[from[a]], &s[from[b]]) <= 0);
                to[k] = left ? from[a++] : from[b++];
            }
        }
        int32_t *swap = from;
        from = to;
        to = swap;
    }
    m->order = from;
    m->order2 = to;
}

/* ---- given segments: a page may not count twice ---- */

typedef struct extent {
    int32_t unit_first, unit_end;
    int64_t start, end;
} extent; /* heads, positions */

static extent extent_of(const fv__maker *m, const fv_segment *s)
{
    const int32_t per = m->shape->units_per_kv_head;
    extent e = { 0, m->shape->num_units, s->first_position, s->first_position + s->num_keys };
    if (s->num_kv_heads) {
        e.unit_first = s->kv_head_first * per;
        e.unit_end = e.unit_first + s->num_kv_heads * per;
    }
    if (s->page_positions) {
        e.start = FAR;
        e.end = -FAR;
        for (int64_t i = 0; i < s->num_pages; i++) {
            e.start = fv__min64(e.start, s->page_positions[i]);
            e.end = fv__max64(e.end, (int64_t)s->page_positions[i] + m->head->page_size);
        }
    }
    return e;
}

static int64_t row_of(const fv_segment *s, int64_t i)
{
    return s->rows ? s->rows[i] : s->row_first + i;
}

static bool share_row(const fv_segment *a, const fv_segment *b)
{
    for (int64_t i = 0, k = 0; i < a->num_rows && k < b->num_rows; ) {
        const int64_t x = row_of(a, i), y = row_of(b, k);
        if (x == y) return true;
        if (row_of(a, a->num_rows - 1) < y || row_of(b, b->num_rows - 1) < x) return false;
        if (x < y) i = a->rows ? i + 1 : fv__min64(y - a->row_first, a->num_rows);
        else       k = b->rows ? k + 1 : fv__min64(x - b->row_first, b->num_rows);
    }
    return false;
}

static int64_t page_slot(const fv__maker *m, int64_t id)
{
    const int64_t mask = m->num_page_slots - 1;
    int64_t at = (int64_t)(((uint64_t)id * 0x9E3779B97F4A7C15u) >> 32) & mask;
    while (m->page_slots[at] != -1 && m->page_slots[at] != (int32_t)id) at = (at + 1) & mask;
    return at;
}

static int64_t used_pages(const fv__maker *m, const fv_segment *s)
{
    return fv__div_up(s->num_keys, m->head->page_size);
}

static int64_t page_id(const fv__maker *m, const fv_segment *s, int64_t i)
{
    const int64_t id = fv__index_at(&m->batch->given->pages.ids, s->first_page + i);
    return id < 0 || id >= m->head->num_pages ? -1 : id;        /* -1: the kernel reports it */
}

/* A page (token) that both list; -1: none. The marks of a are there. */
static int64_t common_page(const fv__maker *m, const fv_segment *a, const fv_segment *b)
{
    if (!m->head->page_size) {
        const int64_t lo = fv__max64(a->first_page, b->first_page);
        return lo < fv__min64(a->first_page + a->num_keys, b->first_page + b->num_keys) ? lo : -1;
    }
    for (int64_t i = 0; i < used_pages(m, b); i++) {
        const int64_t id = page_id(m, b, i);
        if (id >= 0 && m->page_slots[page_slot(m, id)] == id) return id;
    }
    return -1;
}

static void mark_pages(fv__maker *m, const fv_segment *s)
{
    memset(m->page_slots, 0xFF, (size_t)m->num_page_slots * sizeof *m->page_slots);
    for (int64_t i = 0; i < used_pages(m, s); i++) {
        const int64_t id = page_id(m, s, i);
        if (id >= 0) m->page_slots[page_slot(m, id)] = (int32_t)id;
    }
}

/* Segment order[k] shares cells and positions with an earlier one: look for a page of both. */
static fv_status check_twice(fv__maker *m, int64_t k)
{
    const fv_segment *all = m->batch->given->segments, *s = &all[m->order[k]];
    const extent e = extent_of(m, s);
    if (m->head->page_size) mark_pages(m, s);
    for (int64_t i = 0; i < k; i++) {
        const fv_segment *t = &all[m->order[i]];
        if (t->num_rows == 0 || t->num_keys == 0) continue;
        const extent f = extent_of(m, t);
        if (f.end <= e.start || f.start >= e.end || f.unit_end <= e.unit_first ||
            f.unit_first >= e.unit_end || !share_row(s, t))
            continue;
        const int64_t page = common_page(m, s, t);
        if (page < 0) continue;
        char field[96];
        const int32_t later = fv__max32(m->order[i], m->order[k]),
                      earlier = fv__min32(m->order[i], m->order[k]);
        snprintf(field, sizeof field, "batch.segments[%d]", later);
        return fv__fail(m->err, FV_E_INVALID, field, page, earlier,
                        "segments %d and %d share a row and a head, and both list %s %lld: its "
                        "keys would count twice",
                        earlier, later, m->head->page_size ? "page" : "token", (long long)page);
    }
    return FV_OK;
}

/* ---- given segments: cells and levels ---- */

typedef struct cell_range { int32_t first, end; } cell_range;       /* of a row's cells */

static cell_range cells_of(const fv__maker *m, int32_t unit_first, int32_t num_units)
{
    if (m->cell_units == 1) return (cell_range){ 0, 1 };
    return (cell_range){ unit_first, unit_first + num_units };
}

static fv__cell *cell_at(const fv__maker *m, int64_t row, int32_t unit)
{
    return &m->cells[row * m->cell_units + unit];
}

/* Gives the segment its level and marks its cells. */
static fv_status place(fv__maker *m, int64_t k, fv__segment *out)
{
    const int32_t index = m->order[k];
    const extent e = extent_of(m, &m->batch->given->segments[index]);
    const cell_range c = cells_of(m, out->unit_first, out->num_units);
    bool meets = false;
    for (int32_t i = 0; i < out->num_rows; i++)
        for (int32_t u = c.first; u < c.end; u++) {
            const fv__listed_row row = fv__segment_row(m, out, i);
            const fv__cell *cell = cell_at(m, row.row, u);
            out->level = fv__max32(out->level, cell->level);
            meets = meets || cell->end > e.start;
            if (cell->count >= m->levels)
                return fv__fail_request(m->err, FV_E_CAPACITY, "batch.segments", row.request,
                                        cell->count + 1, m->levels,
                                        "row %d lies in %d segments for one head; the plan was "
                                        "created with max_levels = %d",
                                        row.row, cell->count + 1, m->levels);
        }
    if (meets) FV_TRY(check_twice(m, k));
    for (int32_t i = 0; i < out->num_rows; i++)
        for (int32_t u = c.first; u < c.end; u++) {
            fv__cell *cell = cell_at(m, fv__segment_row(m, out, i).row, u);
            cell->level = out->level + 1;
            cell->count++;
            cell->end = (int32_t)fv__max64(cell->end, e.end);
        }
    return FV_OK;
}

/* Rows to a range of one request, or to the list. */
static void take_rows(fv__maker *m, const fv_segment *s, fv__segment *out)
{
    const int64_t first = row_of(s, 0), last = row_of(s, s->num_rows - 1);
    const int32_t request = m->row_request[first];
    out->num_rows = (int32_t)s->num_rows;
    if (last - first == s->num_rows - 1 && request == m->row_request[last]) {
        out->row_first = (int32_t)first;
        out->request = request;
        return;
    }
    out->row_first = m->num_listed;
    out->request = -1;
    for (int64_t i = 0; i < s->num_rows; i++) {
        const int32_t row = (int32_t)row_of(s, i);
        m->listed[m->num_listed++] = (fv__listed_row){ row, m->row_request[row] };
    }
}

static bool ascends(const int32_t *x, int64_t n)
{
    for (int64_t i = 1; i < n; i++)
        if (x[i] <= x[i - 1]) return false;
    return true;
}

static fv_status add_given(fv__maker *m, int64_t k)
{
    const fv_segment *s = &m->batch->given->segments[m->order[k]];
    if (s->num_rows == 0 || s->num_keys == 0) return FV_OK;
    const extent e = extent_of(m, s);
    fv__segment *out = &m->segments[m->num_segments];
    fv__segment_info *info = &m->infos[m->num_segments++];
    *out = (fv__segment){
        .table = s->first_page,
        .unit_first = e.unit_first,
        .num_units = e.unit_end - e.unit_first,
        .num_keys = (int32_t)s->num_keys,
        .first_position = s->page_positions ? 0 : (int32_t)s->first_position,
        .page_positions = -1,
    };
    take_rows(m, s, out);
    *info = (fv__segment_info){ .page_positions = s->page_positions,
                                .num_pages = s->page_positions ? (int32_t)used_pages(m, s) : 0,
                                .tile_rows = fv__tile_rows(m->shape, s->num_rows) };
    info->ascending = info->page_positions && ascends(s->page_positions, info->num_pages);
    return place(m, k, out);
}

/* ---- rows that lie in no segment ---- */

static bool uncovered(const fv__maker *m, int64_t row, int32_t unit)
{
    return cell_at(m, row, unit)->count == 0;
}

/* Does cell column `unit` miss the same rows as the one before it? */
static bool like_previous(const fv__maker *m, int32_t unit)
{
    for (int64_t row = 0; row < m->batch->total_rows; row++)
        if (uncovered(m, row, unit) != uncovered(m, row, unit - 1)) return false;
    return true;
}

static void add_uncovered(fv__maker *m)
{
    const int32_t per_cell = m->cell_units == 1 ? m->shape->num_units : 1;
    int32_t open = -1;                  /* the segment of the column before */
    for (int32_t u = 0; u < m->cell_units; u++) {
        if (u > 0 && like_previous(m, u)) {
            if (open >= 0) m->segments[open].num_units += per_cell;
            continue;
        }
        const int32_t first = m->num_listed;
        for (int64_t row = 0; row < m->batch->total_rows; row++)
            if (uncovered(m, row, u))
                m->listed[m->num_listed++] = (fv__listed_row){ (int32_t)row, m->row_request[row] };
        open = -1;
        if (m->num_listed == first) continue;
        open = m->num_segments++;
        m->segments[open] = (fv__segment){ .row_first = first,
                                           .num_rows = m->num_listed - first,
                                           .request = -1,
                                           .unit_first = u * per_cell,
                                           .num_units = per_cell,
                                           .page_positions = -1 };
        m->infos[open] =
            (fv__segment_info){ .tile_rows = fv__tile_rows(m->shape, m->num_listed - first) };
    }
}

static void note_joined(fv__maker *m)
{
    for (int32_t s = 0; s < m->num_segments; s++) {
        const fv__segment *seg = &m->segments[s];
        const cell_range c = cells_of(m, seg->unit_first, seg->num_units);
        for (int32_t i = 0; i < seg->num_rows && !m->infos[s].joined; i++)
            for (int32_t u = c.first; u < c.end; u++)
                if (cell_at(m, fv__segment_row(m, seg, i).row, u)->count > 1)
                    m->infos[s].joined = true;
    }
}

static fv_status segments_given(fv__maker *m)
{
    const fv_batch *b = m->batch->given;
    FV_TRY(check_given(m));
    m->cell_units = 1;
    for (int64_t i = 0; i < b->num_segments; i++) {
        const extent e = extent_of(m, &b->segments[i]);
        if (e.unit_end - e.unit_first < m->shape->num_units) m->cell_units = m->shape->num_units;
    }
    memset(m->cells, 0, (size_t)(m->batch->total_rows * m->cell_units) * sizeof *m->cells);
    for (int64_t r = 0; r < m->batch->num_requests; r++)
        for (int32_t i = 0; i < m->batch->requests[r].num_rows; i++)
            m->row_request[m->batch->requests[r].row_first + i] = (int32_t)r;

    sort_given(m);
    for (int64_t k = 0; k < b->num_segments; k++) FV_TRY(add_given(m, k));
    add_uncovered(m);
    if (m->levels > 1) note_joined(m);
    return FV_OK;
}

fv_status fv__segments_make(fv__maker *m)
{
    m->num_segments = m->num_listed = m->cell_units = 0;
    m->saved = 0;
    if (m->batch->given->segments) return segments_given(m);
    if (m->planner->limits->sharing == FV_SHARING_FIND && m->levels > 1 && fv__segments_share(m))
        return FV_OK;
    fv__segments_plain(m, NULL, NULL);
    return FV_OK;
}
