/* SPDX-License-Identifier: Apache-2.0 */
/* plan_valid.c -- fv__plan_is_valid: the numbered invariants of plan.h, checked from the plan's
 * data alone. Nothing here is shared with the planner but the structs and the cost model: what
 * is derived there is looked at from the result's side here. For tests and debug builds. */
#include "plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct checker {
    const fv__plan_head *plan;
    const fv__kernel_shape *shape;
    const fv__bounds *bounds;           /* NULL: visibility is not checked */
    const fv__piece *pieces;
    const fv__segment *segments;
    const fv__request *requests;
    const fv__listed_row *listed;
    const fv__record *records;
    const int32_t *parts, *worker_first, *row_record;
    int32_t *order;                     /* pieces by segment, unit, row, key */
    int32_t *count;                     /* [total_rows][num_units] pieces that hold it */
    unsigned char *used;                /* [num_slots] */
    int64_t tiles;                      /* row tiles x head units */
    int32_t longest_tile;
    char *why;
    size_t size;
} checker;

static int broken(const checker *c, int number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static int broken(const checker *c, int number, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    if (c->size) vsnprintf(c->why, c->size, format, list);
    va_end(list);
    return number;
}

#define CHECK(number, condition, ...)                                   \
    do {                                                                \
        if (!(condition)) return broken(c, (number), __VA_ARGS__);      \
    } while (0)

#define FIRST(call)                                                     \
    do {                                                                \
        const int first_broken = (call);                                \
        if (first_broken) return first_broken;                          \
    } while (0)

/* ---- (8) ---- */

static bool inside(const checker *c, int64_t at, int64_t count, int64_t size)
{
    return count == 0 ||
           (at >= (int64_t)sizeof *c->plan && at % 16 == 0 && at <= c->plan->bytes - count * size);
}

static int check_arrays(checker *c)
{
    const fv__plan_head *p = c->plan;
    CHECK(8,
          p->num_workers >= 1 && p->num_pieces >= 0 && p->num_segments >= 0 &&
              p->num_records >= 0 && p->num_parts >= 0 && p->num_slots >= 0 &&
              p->num_listed_rows >= 0 && p->num_requests >= 0 && p->total_rows >= 0 &&
              p->num_units >= 1,
          "a count is negative");
    CHECK(8, inside(c, p->worker_first, p->num_workers + 1, 4), "worker_first lies outside");
    CHECK(8, inside(c, p->pieces, p->num_pieces, sizeof(fv__piece)), "pieces lie outside");
    CHECK(8, inside(c, p->segments, p->num_segments, sizeof(fv__segment)), "segments lie outside");
    CHECK(8, inside(c, p->requests, p->num_requests, sizeof(fv__request)), "requests lie outside");
    CHECK(8, inside(c, p->listed_rows, p->num_listed_rows, sizeof(fv__listed_row)),
          "listed rows lie outside");
    CHECK(8, inside(c, p->records, p->num_records, sizeof(fv__record)), "records lie outside");
    CHECK(8, inside(c, p->parts, p->num_parts, 4), "parts lie outside");
    CHECK(8, !p->row_record || inside(c, p->row_record, p->total_rows, 4),
          "row records lie outside");
    CHECK(8, inside(c, p->page_positions, p->num_page_positions, 4), "page positions lie outside");
    CHECK(8, !p->invariant || (p->chunk > 0 && p->chunk % FV__KEY_BLOCK == 0), "chunk is %d",
          p->chunk);
    return 0;
}

static int check_segments(const checker *c)
{
    const fv__plan_head *p = c->plan;
    for (int32_t i = 0; i < p->num_segments; i++) {
        const fv__segment *s = &c->segments[i];
        const int64_t pages = p->page_size ? fv__div_up(s->num_keys, p->page_size) : s->num_keys;
        CHECK(8,
              s->num_rows >= 1 && s->num_keys >= 0 && s->num_units >= 1 && s->unit_first >= 0 &&
                  s->unit_first + s->num_units <= p->num_units,
              "segment %d: rows, keys or head units", i);
        CHECK(8, s->request >= -1 && s->request < p->num_requests, "segment %d: request %d", i,
              s->request);
        CHECK(8,
              s->row_first >= 0 && (int64_t)s->row_first + s->num_rows <=
                                       (s->request < 0 ? p->num_listed_rows : p->total_rows),
              "segment %d: rows end outside", i);
        CHECK(8,
              s->table >= 0 &&
                  s->table + pages <= fv__max64(p->table_entries, s->num_keys ? 0 : INT64_MAX),
              "segment %d: its pages end outside of the table", i);
        CHECK(8,
              s->page_positions >= -1 &&
                  s->page_positions + (s->page_positions < 0 ? 0 : pages) <= p->num_page_positions,
              "segment %d: page positions end outside", i);
        CHECK(8, s->reserved[0] == 0 && s->reserved[1] == 0, "segment %d: reserved words", i);
        if (s->request < 0) continue;
        const fv__request *q = &c->requests[s->request];
        CHECK(8,
              s->row_first >= q->row_first &&
                  s->row_first + s->num_rows <= q->row_first + q->num_rows,
              "segment %d: rows of another request", i);
    }
    for (int32_t i = 0; i < p->num_listed_rows; i++) {
        const fv__listed_row r = c->listed[i];
        CHECK(8, r.request >= 0 && r.request < p->num_requests, "listed row %d: request %d", i,
              r.request);
        const fv__request *q = &c->requests[r.request];
        CHECK(8, r.row >= q->row_first && r.row < q->row_first + q->num_rows,
              "listed row %d: row %d is not of request %d", i, r.row, r.request);
    }
    return 0;
}

static int check_pieces(const checker *c)
{
    const fv__plan_head *p = c->plan;
    CHECK(8, c->worker_first[0] == 0 && c->worker_first[p->num_workers] == p->num_pieces,
          "workers do not have all pieces");
    for (int32_t w = 0; w < p->num_workers; w++)
        CHECK(8, c->worker_first[w] <= c->worker_first[w + 1],
              "worker %d begins before the one in front", w);
    for (int32_t i = 0; i < p->num_pieces; i++) {
        const fv__piece *x = &c->pieces[i];
        CHECK(8, x->segment >= 0 && x->segment < p->num_segments, "piece %d: segment %d", i,
              x->segment);
        const fv__segment *s = &c->segments[x->segment];
        CHECK(8, x->row_first >= 0 && x->num_rows >= 1 && x->row_first + x->num_rows <= s->num_rows,
              "piece %d: rows", i);
        CHECK(8, x->unit >= s->unit_first && x->unit < s->unit_first + s->num_units,
              "piece %d: head unit %d", i, x->unit);
        CHECK(8,
              x->key_first >= 0 && x->num_keys >= 0 &&
                  (int64_t)x->key_first + x->num_keys <= s->num_keys,
              "piece %d: keys", i);
        CHECK(8, x->num_rows * p->unit_heads <= c->shape->max_packed || x->num_rows == 1,
              "piece %d: %d rows of %d heads are more than a tile", i, x->num_rows, p->unit_heads);
        CHECK(8, x->record >= -2 && x->record < p->num_records, "piece %d: record %d", i,
              x->record);
        CHECK(8, (x->record == -1) == (x->slot == -1), "piece %d: record %d but slot %d", i,
              x->record, x->slot);
        CHECK(8,
              x->slot == -1 || (x->slot >= 0 &&
                                (int64_t)x->slot + (int64_t)x->num_rows * fv__plan_parts(p, s, x) <=
                                    p->num_slots),
              "piece %d: slots end outside", i);
        CHECK(8, x->record != -2 || p->row_record, "piece %d: record -2 without row records", i);
    }
    return 0;
}

/* ---- (1), (2) ---- */

static fv__listed_row row_at(const checker *c, const fv__segment *s, int32_t i)
{
    if (s->request < 0) return c->listed[s->row_first + i];
    return (fv__listed_row){ s->row_first + i, s->request };
}

static int by_place(const void *a, const void *b, void *arg)
{
    const checker *c = arg;
    const fv__piece *x = &c->pieces[*(const int32_t *)a], *y = &c->pieces[*(const int32_t *)b];
    if (x->segment != y->segment) return x->segment < y->segment ? -1 : 1;
    if (x->unit != y->unit) return x->unit < y->unit ? -1 : 1;
    if (x->row_first != y->row_first) return x->row_first < y->row_first ? -1 : 1;
    if (x->key_first != y->key_first) return x->key_first < y->key_first ? -1 : 1;
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

/* The item's first and last key against what its rows may see. */
static int check_visible(const checker *c, const fv__piece *item, int64_t first, int64_t end)
{
    const fv__segment *s = &c->segments[item->segment];
    const fv__bounds *b = c->bounds;
    if (!b || b->lifted || c->plan->row_positions || s->page_positions >= 0) return 0;
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int32_t i = 0; i < item->num_rows; i++) {
        const fv__listed_row r = row_at(c, s, item->row_first + i);
        const fv__request *q = &c->requests[r.request];
        const int64_t p =
            (int64_t)q->first_position + q->num_keys - q->num_rows + r.row - q->row_first;
        low = fv__min64(low, p);
        high = fv__max64(high, p);
    }
    int64_t from = b->has_first && !(s->live && c->plan->has_live_first)
                       ? low + b->first - s->first_position
                       : 0;
    int64_t to = b->has_last ? high + b->last - s->first_position + 1 : s->num_keys;
    from = fv__max64(from, 0);
    to = fv__min64(to, s->num_keys);
    if (from >= to) {
        CHECK(1, first == end, "segment %d, row %d: keys %lld to %lld, but none is visible",
              item->segment, item->row_first, (long long)first, (long long)end);
        return 0;
    }
    const int64_t origin = fv__plan_origin(c->plan, s);
    CHECK(1, first <= from && end == to,
          "segment %d, row %d: keys %lld to %lld, visible are %lld to %lld", item->segment,
          item->row_first, (long long)first, (long long)end, (long long)from, (long long)to);
    CHECK(1, first == 0 || (first + origin) / FV__KEY_BLOCK == (from + origin) / FV__KEY_BLOCK,
          "segment %d, row %d: block of key %lld is not visible", item->segment, item->row_first,
          (long long)first);
    return 0;
}

/* Pieces order[i .. end) are one item. */
static int check_item(checker *c, int32_t i, int32_t end)
{
    const fv__plan_head *p = c->plan;
    const fv__piece *first = &c->pieces[c->order[i]];
    const fv__segment *s = &c->segments[first->segment];
    const int64_t origin = fv__plan_origin(p, s), grid = p->invariant ? p->chunk : FV__KEY_BLOCK;
    int64_t key = first->key_first;
    int32_t empty = 0;
    for (int32_t k = i; k < end; k++) {
        const fv__piece *x = &c->pieces[c->order[k]];
        CHECK(1, x->num_rows == first->num_rows, "segment %d, row %d: pieces of %d and %d rows",
              x->segment, x->row_first, first->num_rows, x->num_rows);
        CHECK(1, x->key_first == key, "segment %d, row %d, unit %d: key %lld is followed by %d",
              x->segment, x->row_first, x->unit, (long long)key, x->key_first);
        CHECK(1, key == first->key_first || x->num_keys == 0 || (key + origin) % grid == 0,
              "segment %d, row %d: cut at key %lld", x->segment, x->row_first, (long long)key);
        key += x->num_keys;
        empty += x->num_keys == 0;
    }
    CHECK(1, empty == 0 || end - i == 1 || p->splits > 1,
          "segment %d, row %d: an empty piece of several", first->segment, first->row_first);
    CHECK(1, first->key_first == 0 || (first->key_first + origin) % FV__KEY_BLOCK == 0,
          "segment %d, row %d: begins at key %d", first->segment, first->row_first,
          first->key_first);
    FIRST(check_visible(c, first, first->key_first, key));
    for (int32_t r = 0; r < first->num_rows; r++)
        c->count[(int64_t)row_at(c, s, first->row_first + r).row * p->num_units + first->unit] +=
            end - i;
    c->longest_tile = fv__max32(c->longest_tile, first->num_rows);
    c->tiles++;
    return 0;
}

static int check_coverage(checker *c)
{
    const fv__plan_head *p = c->plan;
    int32_t segment = -1, unit = -1, row = 0;
    int64_t columns = 0, expected = 0;
    for (int32_t i = 0; i < p->num_pieces; i++) c->order[i] = i;
    qsort_r(c->order, (size_t)p->num_pieces, sizeof *c->order, by_place, c);
    for (int32_t i = 0; i < p->num_pieces; ) {
        const fv__piece *x = &c->pieces[c->order[i]];
        int32_t end = i + 1;
        while (end < p->num_pieces && c->pieces[c->order[end]].segment == x->segment &&
               c->pieces[c->order[end]].unit == x->unit &&
               c->pieces[c->order[end]].row_first == x->row_first)
            end++;
        if (x->segment != segment || x->unit != unit) {
            CHECK(1, segment < 0 || row == c->segments[segment].num_rows,
                  "segment %d: rows from %d on are in no piece", segment, row);
            segment = x->segment;
            unit = x->unit;
            row = 0;
            columns++;
        }
        CHECK(1, x->row_first == row, "segment %d: row %d is followed by %d", segment, row,
              x->row_first);
        row += x->num_rows;
        FIRST(check_item(c, i, end));
        i = end;
    }
    CHECK(1, segment < 0 || row == c->segments[segment].num_rows,
          "segment %d: rows from %d on are in no piece", segment, row);
    for (int32_t i = 0; i < p->num_segments; i++) expected += c->segments[i].num_units;
    CHECK(1, columns == expected, "%lld (segment, head unit) have pieces; there are %lld",
          (long long)columns, (long long)expected);
    for (int64_t i = 0; i < (int64_t)p->total_rows * p->num_units; i++)
        CHECK(2, c->count[i] >= 1, "row %lld, head unit %lld is in no piece",
              (long long)(i / p->num_units), (long long)(i % p->num_units));
    return 0;
}

/* ---- (3), (4) ---- */

static int32_t record_of(const checker *c, const fv__piece *x, int32_t i)
{
    if (x->record >= 0) return x->record + i;
    return c->row_record[row_at(c, &c->segments[x->segment], x->row_first + i).row] + x->unit;
}

static int check_records(checker *c)
{
    const fv__plan_head *p = c->plan;
    int64_t parts = 0;
    for (int32_t i = 0; i < p->num_pieces; i++) {
        const fv__piece *x = &c->pieces[i];
        const fv__segment *s = &c->segments[x->segment];
        for (int32_t r = 0; r < x->num_rows; r++) {
            const int32_t row = row_at(c, s, x->row_first + r).row;
            const int64_t count = c->count[(int64_t)row * p->num_units + x->unit];
            if (x->record == -1) {
                CHECK(3, count == 1, "piece %d writes row %d itself, which is in %lld pieces", i,
                      row, (long long)count);
                continue;
            }
            CHECK(8, x->record != -2 || c->row_record[row] >= 0, "piece %d: row %d has no records",
                  i, row);
            const int32_t at = record_of(c, x, r);
            CHECK(8, at >= 0 && at < p->num_records, "piece %d: record %d", i, at);
            CHECK(4, c->records[at].row == row && c->records[at].unit == x->unit,
                  "piece %d: record %d is of row %d, unit %d", i, at, c->records[at].row,
                  c->records[at].unit);
            CHECK(4, c->records[at].arrivals == count, "record %d waits for %d pieces of %lld", at,
                  c->records[at].arrivals, (long long)count);
        }
    }
    for (int32_t i = 0; i < p->num_records; i++) {
        const fv__record *r = &c->records[i];
        CHECK(8,
              r->row >= 0 && r->row < p->total_rows && r->unit >= 0 && r->unit < p->num_units &&
                  r->reserved == 0,
              "record %d: row or unit", i);
        CHECK(8,
              r->num_parts >= 0 && r->part_first >= 0 &&
                  (int64_t)r->part_first + r->num_parts <= p->num_parts,
              "record %d: parts end outside", i);
        CHECK(4, (r->num_parts == 0) == (r->arrivals == 0), "record %d: %d parts of %d pieces", i,
              r->num_parts, r->arrivals);
        parts += r->num_parts;
    }
    CHECK(4, parts == p->num_parts, "records have %lld parts of %d", (long long)parts,
          p->num_parts);
    return 0;
}

static int by_level(const void *a, const void *b, void *arg)
{
    const checker *c = arg;
    const int32_t x = c->segments[c->pieces[*(const int32_t *)a].segment].level,
                  y = c->segments[c->pieces[*(const int32_t *)b].segment].level;
    if (x != y) return x < y ? -1 : 1;
    return by_place(a, b, arg);
}

/* Walks the pieces level by level, key by key: each finds its slots as the next parts of its
 * rows' records. */
static int check_parts(checker *c)
{
    const fv__plan_head *p = c->plan;
    int32_t *next = calloc((size_t)p->num_records + 1, sizeof *next);
    int result = next ? 0 : -1;
    qsort_r(c->order, (size_t)p->num_pieces, sizeof *c->order, by_level, c);
    for (int32_t k = 0; k < p->num_pieces && !result; k++) {
        const fv__piece *x = &c->pieces[c->order[k]];
        const int32_t parts = fv__plan_parts(p, &c->segments[x->segment], x);
        for (int32_t i = 0; i < x->num_rows && x->record != -1 && !result; i++)
            for (int32_t n = 0; n < parts && !result; n++) {
                const fv__record *r = &c->records[record_of(c, x, i)];
                const int32_t slot = x->slot + n * x->num_rows + i, at = next[record_of(c, x, i)]++;
                if (at >= r->num_parts || c->parts[r->part_first + at] != slot)
                    result = broken(c, 4, "row %d, unit %d: part %d is not slot %d of piece %d",
                                    r->row, r->unit, at, slot, c->order[k]);
                else if (c->used[slot]++) result = broken(c, 4, "slot %d is used twice", slot);
            }
    }
    for (int32_t i = 0; i < p->num_slots && !result; i++)
        if (!c->used[i]) result = broken(c, 4, "slot %d is not used", i);
    free(next);
    return result;
}

/* ---- (5), (6) ---- */

static int check_balance(const checker *c, int64_t *costs)
{
    const fv__plan_head *p = c->plan;
    const fv__cost_model *m = c->shape->cost;
    const int64_t bundles = p->invariant ? 0 : (int64_t)p->num_workers * fv__min32(c->shape->together, p->num_units);
    const int64_t extra = p->splits ? 0 : fv__max64(p->num_workers - 1, bundles);
    CHECK(5, p->num_pieces <= c->tiles * fv__max32(1, p->splits) + extra, "%d pieces of %lld items",
          p->num_pieces, (long long)c->tiles);

    int64_t total = 0, longest = 0, dearest = 0, merges = 0;
    int32_t busy = 0;
    fv__plan_worker_costs(p, c->shape, costs);
    for (int32_t w = 0; w < p->num_workers; w++) {
        busy += costs[w] > 0;
        total += costs[w];
        longest = fv__max64(longest, costs[w]);
    }
    busy = c->shape->num_cores ? fv__max32(busy, 1) : p->num_workers;
    const int64_t packed = (int64_t)c->longest_tile * p->unit_heads,
                  blocks = p->invariant ? p->chunk / FV__KEY_BLOCK + 1 : 1;
    int64_t allowed =
        m->piece + packed * (m->row + 3 * m->part) + blocks * (m->block + packed * m->block_row);
    for (int32_t i = 0; i < p->num_pieces && (p->splits || p->invariant || p->queue); i++) {
        const fv__piece *x = &c->pieces[i];
        const int64_t rows = (int64_t)x->num_rows * p->unit_heads,
                      n = fv__div_up(x->num_keys, FV__KEY_BLOCK) + 1;
        const int64_t merge = rows * m->part * fv__plan_parts(p, &c->segments[x->segment], x);
        dearest = fv__max64(dearest, m->piece + rows * m->row + merge +
                                         n * (m->block + rows * m->block_row));
        if (p->invariant && x->slot < 0 && x->num_keys > 0) merges += merge;
    }
    total += merges; /* the line of the invariant mode has a merge for each chunk */
    /* In the invariant mode items whose chunks would not fit are not cut; they do where every
     * request has one row at most. */
    allowed = fv__max64(
        allowed, p->splits || p->queue || (p->invariant && p->total_rows > p->num_requests) ? dearest : 0);
    CHECK(6, longest <= total / busy * 11 / 10 + allowed,
          "the longest worker costs %lld, the mean is %lld", (long long)longest,
          (long long)(total / busy));
    return 0;
}

static int check(checker *c, int64_t *costs)
{
    FIRST(check_segments(c));
    FIRST(check_pieces(c));
    FIRST(check_coverage(c));
    FIRST(check_records(c));
    FIRST(check_parts(c));
    return check_balance(c, costs);
}

int fv__plan_is_valid(const fv__plan_head *plan, const fv__kernel_shape *shape,
                      const fv__bounds *bounds, char *why, size_t size)
{
    checker c = { .plan = plan, .shape = shape, .bounds = bounds, .why = why, .size = size };
    if (size) why[0] = 0;
    const int arrays = check_arrays(&c);
    if (arrays) return arrays;
    c.pieces = FV__PLAN_ARRAY(plan, fv__piece, pieces);
    c.segments = FV__PLAN_ARRAY(plan, fv__segment, segments);
    c.requests = FV__PLAN_ARRAY(plan, fv__request, requests);
    c.listed = FV__PLAN_ARRAY(plan, fv__listed_row, listed_rows);
    c.records = FV__PLAN_ARRAY(plan, fv__record, records);
    c.parts = FV__PLAN_ARRAY(plan, int32_t, parts);
    c.worker_first = FV__PLAN_ARRAY(plan, int32_t, worker_first);
    c.row_record = plan->row_record ? FV__PLAN_ARRAY(plan, int32_t, row_record) : NULL;
    c.order = calloc((size_t)plan->num_pieces + 1, sizeof *c.order);
    c.count = calloc((size_t)plan->total_rows * (size_t)plan->num_units + 1, sizeof *c.count);
    c.used = calloc((size_t)plan->num_slots + 1, 1);
    int64_t *costs = calloc((size_t)plan->num_workers, sizeof *costs);
    const int result = c.order && c.count && c.used && costs ? check(&c, costs) : -1;
    if (result == -1) broken(&c, -1, "no memory to check the plan");
    free(c.order);
    free(c.count);
    free(c.used);
    free(costs);
    return result;
}
