/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan_check.c -- a plan against its scene, from scratch: what each row must read is worked
 * out from the batch, row by row; what it does read from the pieces; then the plan is "run" with
 * tickets and slots that hold names instead of numbers. Shares no arithmetic with the planner.
 *
 *     list       the keys that a row may be asked to read, as the batch says: its request's, or
 *                those of one given segment
 *     entry      a piece that holds a (row, head unit), seen as keys of one list */
#include "checkplan.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    int32_t list, first, num, piece;
} entry; /* keys [first, first + num) of the list */

typedef struct plan_check {
    const scene *s;
    const made *m;
    const fv__plan_head *p;
    const fv__piece *pieces;
    const fv__segment *segments;
    const fv__listed_row *listed;
    const fv__record *records;
    const int32_t *worker_first, *parts, *row_record;
    int32_t *row_request;
    int32_t *list_of; /* [num_segments]: given segment, or -1: the row's request */
    int64_t *first_entry;               /* [rows * units + 1] */
    entry *entries;
    char *why;
    size_t size;
} plan_check;

static bool fail(const plan_check *c, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool fail(const plan_check *c, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(c->why, c->size, format, list);
    va_end(list);
    return false;
}

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

/* ---- what a row may see ---- */

typedef struct range { int64_t first, end; } range;     /* half-open */

static int64_t position_of(const plan_check *c, int32_t row)
{
    if (c->s->row_positions) return c->s->row_positions[row];
    const fv__request *q = &c->s->batch.requests[c->row_request[row]];
    return (int64_t)q->first_position + q->num_keys - q->num_rows + (row - q->row_first);
}

/* Positions that a row may see: bounds, widened by every range that holds its position. */
static range visible_positions(const plan_check *c, int32_t row)
{
    const fv__bounds *b = &c->s->bounds;
    const int64_t p = position_of(c, row), far = INT64_C(1) << 40;
    range v = { b->has_first ? p + b->first : -far, b->has_last ? p + b->last + 1 : far };
    for (int l = 0; b->lifted && l < b->num_lists; l++) {
        const fv_ranges *x = b->lists[l];
        const int64_t from = x->indptr ? x->indptr[c->row_request[row]] : 0,
                      end = x->indptr ? x->indptr[c->row_request[row] + 1] : x->count;
        for (int64_t i = from; i < end; i++)
            if (x->ranges[2 * i] <= p && p < x->ranges[2 * i + 1]) {
                v.first = fv__min64(v.first, x->ranges[2 * i]);
                v.end = fv__max64(v.end, x->ranges[2 * i + 1]);
            }
    }
    return v;
}

typedef struct key_list {
    int64_t num_keys, first_position;
    const int32_t *page_positions;
} key_list;

/* List `id` for a row: -1 its request's. */
static key_list list_at(const plan_check *c, int32_t id, int32_t row)
{
    if (id < 0) {
        const fv__request *q = &c->s->batch.requests[c->row_request[row]];
        return (key_list){ q->num_keys, q->first_position, NULL };
    }
    const fv_segment *x = &c->s->given.segments[id];
    return (key_list){ x->num_keys, x->first_position, x->page_positions };
}

/* Keys of a list between positions: the hull where pages have positions of their own. */
static range visible_keys(const plan_check *c, const key_list *x, range positions)
{
    if (!x->page_positions) {
        const range v = { fv__max64(0, positions.first - x->first_position),
                          fv__min64(x->num_keys, positions.end - x->first_position) };
        return v.first < v.end ? v : (range){ 0, 0 };
    }
    range v = { INT64_MAX, 0 };
    const int64_t size = c->p->page_size;
    for (int64_t page = 0; page * size < x->num_keys; page++) {
        const int64_t at = x->page_positions[page], from = fv__max64(0, positions.first - at),
                      end = fv__min64(size, positions.end - at);
        if (from >= end || page * size + from >= x->num_keys) continue;
        v.first = fv__min64(v.first, page * size + from);
        v.end = fv__max64(v.end, fv__min64(x->num_keys, page * size + end));
    }
    return v.first < v.end ? v : (range){ 0, 0 };
}

/* ---- segments to lists ---- */

static int32_t segment_row(const plan_check *c, const fv__segment *s, int32_t i)
{
    return s->request < 0 ? c->listed[s->row_first + i].row : s->row_first + i;
}

static int64_t id_at(const fv_index *x, int64_t i)
{
    return x->type == FV_INDEX_I32 ? ((const int32_t *)x->host)[i * x->stride]
                                   : ((const int64_t *)x->host)[i * x->stride];
}

/* A short-form segment reads what its rows' requests list, from some page on. */
static bool check_plain_segment(const plan_check *c, int32_t index)
{
    const fv__segment *x = &c->segments[index];
    const int64_t size = c->p->page_size;
    for (int32_t i = 0; i < x->num_rows; i++) {
        const int32_t request = c->row_request[segment_row(c, x, i)];
        const fv__request *q = &c->s->batch.requests[request];
        const int64_t skip = x->first_position - q->first_position,
                      place = c->s->batch.tables[request];
        if (x->request >= 0 && x->request != request)
            return fail(c, "segment %d: row of request %d", index, request);
        if (skip < 0 || skip + x->num_keys > q->num_keys)
            return fail(c, "segment %d: keys %lld and on of request %d", index, (long long)skip,
                        request);
        if (!size && x->table != place + skip)
            return fail(c, "segment %d begins at token %lld", index, (long long)x->table);
        if (!size) continue;
        if (skip % size) return fail(c, "segment %d begins inside of a page", index);
        if (x->request >= 0 && x->table != place + skip / size)
            return fail(c, "segment %d begins at entry %lld", index, (long long)x->table);
        for (int64_t e = 0; x->request < 0 && e < ceil_div(x->num_keys, size); e++)
            if (id_at(&c->s->given.pages.ids, x->table + e) !=
                id_at(&c->s->given.pages.ids, place + skip / size + e))
                return fail(c, "segment %d: page %lld is not request %d's", index, (long long)e,
                            request);
    }
    return true;
}

static bool same_rows(const plan_check *c, const fv__segment *x, const fv_segment *g)
{
    if (x->num_rows != g->num_rows) return false;
    for (int32_t i = 0; i < x->num_rows; i++)
        if (segment_row(c, x, i) != (g->rows ? g->rows[i] : g->row_first + i)) return false;
    return true;
}

static bool same_positions(const plan_check *c, const fv__segment *x, const fv_segment *g)
{
    if (!g->page_positions) return x->page_positions < 0 && x->first_position == g->first_position;
    const int32_t *positions = FV__PLAN_ARRAY(c->p, int32_t, page_positions) + x->page_positions;
    return x->page_positions >= 0 &&
           !memcmp(positions, g->page_positions,
                   (size_t)ceil_div(g->num_keys, c->p->page_size) * sizeof *positions);
}

static bool find_given(const plan_check *c, int32_t index)
{
    const fv__segment *x = &c->segments[index];
    const int32_t per = c->p->units_per_kv_head;
    c->list_of[index] = -2;
    if (x->num_keys == 0) return true;  /* rows of no segment */
    for (int64_t g = 0; g < c->s->given.num_segments; g++) {
        const fv_segment *y = &c->s->given.segments[g];
        const int32_t units = y->num_kv_heads ? y->num_kv_heads * per : c->p->num_units;
        if (x->table != y->first_page || x->num_keys != y->num_keys ||
            x->unit_first != y->kv_head_first * per || x->num_units != units ||
            !same_rows(c, x, y) || !same_positions(c, x, y))
            continue;
        c->list_of[index] = (int32_t)g;
        return true;
    }
    return fail(c, "segment %d is none of those given", index);
}

/* ---- entries ---- */

static int by_key(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->list != y->list) return x->list < y->list ? -1 : 1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->num < y->num ? -1 : x->num > y->num;
}

static void collect_entries(plan_check *c)
{
    const int64_t cells = (int64_t)c->p->total_rows * c->p->num_units;
    c->first_entry = calloc((size_t)cells + 2, sizeof *c->first_entry);
    for (int32_t i = 0; i < c->p->num_pieces; i++) {
        const fv__piece *x = &c->pieces[i];
        for (int32_t k = 0; k < x->num_rows; k++)
            c->first_entry[(int64_t)segment_row(c, &c->segments[x->segment], x->row_first + k) *
                               c->p->num_units +
                           x->unit + 2]++;
    }
    for (int64_t i = 0; i < cells; i++) c->first_entry[i + 2] += c->first_entry[i + 1];
    c->entries = calloc((size_t)c->first_entry[cells + 1] + 1, sizeof *c->entries);
    for (int32_t i = 0; i < c->p->num_pieces; i++) {
        const fv__piece *x = &c->pieces[i];
        const fv__segment *s = &c->segments[x->segment];
        for (int32_t k = 0; k < x->num_rows; k++) {
            const int32_t row = segment_row(c, s, x->row_first + k);
            const int32_t skip =
                c->list_of[x->segment] == -1
                    ? s->first_position - c->s->batch.requests[c->row_request[row]].first_position
                    : 0;
            c->entries[c->first_entry[(int64_t)row * c->p->num_units + x->unit + 1]++] =
                (entry){ c->list_of[x->segment], skip + x->key_first, x->num_keys, i };
        }
    }
    for (int64_t i = 0; i < cells; i++)
        qsort(c->entries + c->first_entry[i], (size_t)(c->first_entry[i + 1] - c->first_entry[i]),
              sizeof *c->entries, by_key);
}

/* Does list `id` belong to (row, unit)? */
static bool lists_row(const plan_check *c, int32_t id, int32_t row, int32_t unit)
{
    const fv_segment *x = &c->s->given.segments[id];
    const int32_t per = c->p->units_per_kv_head;
    if (x->num_kv_heads &&
        (unit < x->kv_head_first * per || unit >= (x->kv_head_first + x->num_kv_heads) * per))
        return false;
    if (!x->rows) return row >= x->row_first && row < x->row_first + x->num_rows;
    for (int64_t i = 0; i < x->num_rows; i++)
        if (x->rows[i] == row) return true;
    return false;
}

/* Entries [i, end) are all of one list: no visible key is missing. */
static bool check_list(const plan_check *c, int64_t i, int64_t end, int32_t row, int32_t id,
                       range positions)
{
    const key_list x = list_at(c, id, row);
    const range v = visible_keys(c, &x, positions);
    int64_t key = v.first;
    for (; i < end; i++) {
        const entry *e = &c->entries[i];
        if (e->num == 0) continue;
        if (e->first > key && key < v.end)
            return fail(c, "row %d: key %lld of list %d is in no piece", row, (long long)key, id);
        key = fv__max64(key, e->first + e->num);
    }
    if (key < v.end)
        return fail(c, "row %d: key %lld of list %d is in no piece", row, (long long)key, id);
    return true;
}

/* No two entries of a list overlap, visible or not. */
static bool check_apart(const plan_check *c, int64_t i, int64_t end, int32_t row)
{
    for (int64_t k = i, last = -1; k < end; k++) {
        if (c->entries[k].num == 0) continue;
        if (last >= 0 && c->entries[last].list == c->entries[k].list &&
            c->entries[last].first + c->entries[last].num > c->entries[k].first)
            return fail(c, "row %d reads key %d of list %d twice", row, c->entries[k].first,
                        c->entries[k].list);
        last = k;
    }
    return true;
}

/* Invariant mode, short form: no chunk lies in two entries, so that every chunk of the row is
 * summed up in one go whatever is shared or cut. */
static bool check_chunks(const plan_check *c, int64_t i, int64_t end, int32_t row)
{
    const int64_t position = c->s->batch.requests[c->row_request[row]].first_position,
                  chunk = c->p->chunk;
    for (int64_t last = -1; i < end; i++) {
        const entry *e = &c->entries[i];
        if (e->num == 0) continue;
        if ((position + e->first) / chunk == last)
            return fail(c, "row %d: a chunk is cut at key %d", row, e->first);
        last = (position + e->first + e->num - 1) / chunk;
    }
    return true;
}

static bool check_row(const plan_check *c, int32_t row, int32_t unit)
{
    const int64_t cell = (int64_t)row * c->p->num_units + unit, end = c->first_entry[cell + 1];
    const range positions = visible_positions(c, row);
    int64_t i = c->first_entry[cell];
    if (i == end) return fail(c, "row %d, head unit %d is in no piece", row, unit);
    if (!check_apart(c, i, end, row)) return false;
    if (c->p->invariant && !c->s->given.segments && !check_chunks(c, i, end, row)) return false;
    if (!c->s->given.segments) return check_list(c, i, end, row, -1, positions);
    for (int32_t id = 0; id < c->s->given.num_segments; id++) {
        int64_t from = i, to;
        while (from < end && c->entries[from].list < id) from++;
        for (to = from; to < end && c->entries[to].list == id; ) to++;
        if (!lists_row(c, id, row, unit)) {
            if (to > from) return fail(c, "row %d, unit %d reads list %d", row, unit, id);
        } else if (!check_list(c, from, to, row, id, positions)) {
            return false;
        }
    }
    return true;
}

/* ---- tiles ---- */

/* Every tile reads the hull of what its rows may see, down to a block border, and the cuts lie
 * on the grid. */
static bool check_tile(const plan_check *c, int32_t index)
{
    const fv__piece *x = &c->pieces[index];
    const fv__segment *s = &c->segments[x->segment];
    const int64_t grid = c->p->invariant ? c->p->chunk : 64,
                  origin = c->p->invariant && s->page_positions < 0 ? s->first_position : 0;
    const key_list own = { s->num_keys, s->first_position,
                           s->page_positions < 0 ? NULL
                                                 : FV__PLAN_ARRAY(c->p, int32_t, page_positions) +
                                                       s->page_positions };
    range hull = { INT64_MAX, INT64_MIN };
    for (int32_t i = 0; i < x->num_rows; i++) {
        const range v = visible_positions(c, segment_row(c, s, x->row_first + i));
        hull = (range){ fv__min64(hull.first, v.first), fv__max64(hull.end, v.end) };
    }
    if (s->live && c->s->bounds.has_first && !c->s->row_positions)
        hull.first = INT64_MIN / 4; /* whatever the live length is */
    const range v = visible_keys(c, &own, hull);
    const int64_t end = x->key_first + x->num_keys;
    if (x->num_keys == 0)
        return v.first == v.end || c->p->splits > 1
                   ? true
                   : fail(c, "piece %d has no keys, visible are %lld to %lld", index,
                          (long long)v.first, (long long)v.end);
    if (x->key_first < v.first && (x->key_first + origin) / 64 != (v.first + origin) / 64)
        return fail(c, "piece %d begins at key %d, visible from %lld on", index, x->key_first,
                    (long long)v.first);
    if (end > v.end)
        return fail(c, "piece %d ends at key %lld, visible to %lld", index, (long long)end,
                    (long long)v.end);
    if (x->key_first > v.first && (x->key_first + origin) % grid)
        return fail(c, "piece %d is cut at key %d", index, x->key_first);
    if (end < v.end && (end + origin) % grid)
        return fail(c, "piece %d is cut at key %lld", index, (long long)end);
    return true;
}

/* ---- run: tickets, slots ---- */

typedef struct runner {
    int32_t *tickets;                   /* [num_records] */
    int64_t *slots;                     /* what was written: piece * 2^20 + chunk * ... */
    int32_t *slot_row;
    int64_t *written;                   /* [rows * units] outputs written */
} runner;

static int32_t parts_of(const plan_check *c, const fv__piece *x)
{
    const fv__segment *s = &c->segments[x->segment];
    if (!c->p->invariant || x->num_keys == 0) return 1;
    const int64_t at = (s->page_positions < 0 ? s->first_position : 0) + x->key_first;
    int32_t n = 1;
    for (int64_t border = (at / c->p->chunk + 1) * c->p->chunk; border < at + x->num_keys;
         border += c->p->chunk)
        n++;
    return n;
}

/* Whoever comes last merges: the parts must be all that the row's pieces wrote, by level, then
 * key. */
static bool merge(const plan_check *c, runner *r, int32_t at)
{
    const fv__record *x = &c->records[at];
    int64_t last_piece = -1, last_chunk = -1;
    int32_t pieces = 0;
    for (int32_t i = 0; i < x->num_parts; i++) {
        const int32_t slot = c->parts[x->part_first + i];
        if (slot < 0 || slot >= c->p->num_slots || r->slots[slot] < 0)
            return fail(c, "record %d: part %d was not written", at, i);
        if (r->slot_row[slot] != x->row)
            return fail(c, "record %d: slot %d is row %d's", at, slot, r->slot_row[slot]);
        const int64_t piece = r->slots[slot] >> 24, chunk = r->slots[slot] & 0xFFFFFF;
        if (c->pieces[piece].unit != x->unit)
            return fail(c, "record %d: slot %d is of another head unit", at, slot);
        if (piece == last_piece && chunk != last_chunk + 1)
            return fail(c, "record %d: chunks out of order", at);
        if (piece != last_piece) {
            const fv__piece *a = last_piece < 0 ? NULL : &c->pieces[last_piece],
                            *b = &c->pieces[piece];
            const int32_t la = a ? c->segments[a->segment].level : -1,
                          lb = c->segments[b->segment].level;
            if (chunk != 0)
                return fail(c, "record %d: piece %lld begins with chunk %lld", at, (long long)piece,
                            (long long)chunk);
            if (la > lb ||
                (la == lb && a && (a->segment != b->segment || a->key_first > b->key_first)))
                return fail(c, "record %d: parts out of order", at);
            pieces++;
        }
        r->slots[slot] = -1;            /* each is read once */
        last_piece = piece;
        last_chunk = chunk;
    }
    if (pieces != x->arrivals)
        return fail(c, "record %d: parts of %d pieces, %d arrived", at, pieces, x->arrivals);
    r->tickets[at] = 0;
    r->written[(int64_t)x->row * c->p->num_units + x->unit]++;
    return true;
}

static bool run_piece(const plan_check *c, runner *r, int32_t index)
{
    const fv__piece *x = &c->pieces[index];
    const int32_t parts = parts_of(c, x);
    for (int32_t i = 0; i < x->num_rows; i++) {
        const int32_t row = segment_row(c, &c->segments[x->segment], x->row_first + i);
        if (x->record == -1) {
            r->written[(int64_t)row * c->p->num_units + x->unit]++;
            continue;
        }
        for (int32_t k = 0; k < parts; k++) {
            const int64_t slot = (int64_t)x->slot + (int64_t)k * x->num_rows + i;
            if (slot < 0 || slot >= c->p->num_slots || r->slots[slot] != -2)
                return fail(c, "piece %d: slot %lld is taken", index, (long long)slot);
            r->slots[slot] = (int64_t)index << 24 | k;
            r->slot_row[slot] = row;
        }
        const int32_t at = x->record >= 0 ? x->record + i : c->row_record[row] + x->unit;
        if (at < 0 || at >= c->p->num_records || c->records[at].row != row ||
            c->records[at].unit != x->unit)
            return fail(c, "piece %d: record %d", index, at);
        if (++r->tickets[at] == c->records[at].arrivals && !merge(c, r, at)) return false;
    }
    return true;
}

static bool run_plan(const plan_check *c)
{
    const int64_t cells = (int64_t)c->p->total_rows * c->p->num_units;
    runner r = { calloc((size_t)c->p->num_records + 1, sizeof *r.tickets),
                 malloc(((size_t)c->p->num_slots + 1) * sizeof *r.slots),
                 calloc((size_t)c->p->num_slots + 1, sizeof *r.slot_row),
                 calloc((size_t)cells + 1, sizeof *r.written) };
    bool good = true;
    for (int32_t i = 0; i < c->p->num_slots; i++) r.slots[i] = -2;
    /* Workers take turns piece by piece: as good an order as any. */
    for (int32_t turn = 0, left = 1; left && good; turn++) {
        left = 0;
        for (int32_t w = 0; w < c->p->num_workers && good; w++) {
            const int32_t i = c->worker_first[w] + turn;
            if (i >= c->worker_first[w + 1]) continue;
            left = 1;
            good = run_piece(c, &r, i);
        }
    }
    for (int64_t i = 0; i < cells && good; i++)
        if (r.written[i] != 1)
            good = fail(c, "row %lld, unit %lld is written %lld times",
                        (long long)(i / c->p->num_units), (long long)(i % c->p->num_units),
                        (long long)r.written[i]);
    for (int32_t i = 0; i < c->p->num_records && good; i++)
        if (r.tickets[i]) good = fail(c, "record %d: ticket is left at %d", i, r.tickets[i]);
    for (int32_t i = 0; i < c->p->num_slots && good; i++)
        if (r.slots[i] != -1) good = fail(c, "slot %d is not used", i);
    free(r.tickets);
    free(r.slots);
    free(r.slot_row);
    free(r.written);
    return good;
}

/* ---- numbers ---- */

static int64_t cost_of(const plan_check *c, const fv__piece *x)
{
    const fv__segment *s = &c->segments[x->segment];
    const fv__cost_model *m = c->s->shape.cost;
    const int64_t rows = (int64_t)x->num_rows * c->p->unit_heads;
    if (x->num_keys == 0) return 0;
    int64_t first = x->key_first;
    const int64_t origin = c->p->invariant && s->page_positions < 0 ? s->first_position : 0;
    if (s->live && c->s->bounds.has_first && !c->p->invariant && first == 0 &&
        !c->s->row_positions && !c->s->bounds.lifted) { /* planned to be skipped */
        const int64_t from = position_of(c, segment_row(c, s, x->row_first)) + c->s->bounds.first -
                             s->first_position;
        if (from > 0 && from < x->num_keys) first = from / 64 * 64;
    }
    int64_t blocks = 0;
    for (int64_t k = first + origin; k < x->key_first + x->num_keys + origin; k = (k / 64 + 1) * 64)
        blocks++;
    return m->piece + rows * m->row + blocks * (m->block + rows * m->block_row) +
           (x->slot >= 0 ? parts_of(c, x) * rows * m->part : 0);
}

int64_t longest_worker(const fv__plan_head *plan, const fv__kernel_shape *shape, int64_t *total)
{
    int64_t *costs = calloc((size_t)plan->num_workers, sizeof *costs), longest = 0;
    fv__plan_worker_costs(plan, shape, costs);
    *total = 0;
    for (int32_t w = 0; w < plan->num_workers; w++) {
        *total += costs[w];
        longest = fv__max64(longest, costs[w]);
    }
    free(costs);
    return longest;
}

static int64_t tile_rows(const plan_check *c, int64_t rows)
{
    const fv__kernel_shape *k = &c->s->shape;
    for (int i = 0; i < k->num_tiles; i++)
        if (k->tiles[i] / k->unit_heads >= rows) return rows;
    return fv__max64(1, k->tiles[k->num_tiles - 1] / k->unit_heads);
}

/* Workers that share the line at least: all; where several are on a core, as many of each as its part of the line pays for, but for an eighth that equal
 * items may leave out. The line is at least what the pieces cost without what each can owe to a cut. */
static int64_t sharers(const plan_check *c, int64_t total, int64_t most_rows)
{
    const fv__cost_model *m = c->s->shape.cost;
    const int64_t rows = most_rows * c->p->unit_heads, cores = c->s->shape.num_cores, cuts = c->p->num_pieces;
    if (!cores || c->p->splits || c->p->queue) return c->p->num_workers;
    const int64_t each = (total - cuts * (m->piece + rows * (m->row + 2 * m->part))) / cores;
    const int64_t busy = each < m->second ? cores : each < m->third ? 2 * cores : c->p->num_workers;
    return fv__max64(1, fv__min64(busy, c->p->num_workers) * 7 / 8);
}

static bool check_numbers(const plan_check *c)
{
    const fv__plan_head *p = c->p;
    const fv__plan_capacity *cap = &c->m->capacity;
    const fv__cost_model *m = c->s->shape.cost;
    int64_t total = 0, longest = 0, keys = 0, items = 0, most_rows = 1, dearest = 0, merges = 0;
    for (int32_t w = 0; w < p->num_workers; w++) {
        int64_t cost = 0;
        for (int32_t i = c->worker_first[w]; i < c->worker_first[w + 1]; i++) {
            const int64_t x = cost_of(c, &c->pieces[i]);
            cost += x;
            dearest = fv__max64(dearest, x);
            if (p->invariant && x > 0 && c->pieces[i].slot < 0)
                merges += (int64_t)parts_of(c, &c->pieces[i]) * c->pieces[i].num_rows *
                          p->unit_heads * m->part;
            keys += c->pieces[i].num_keys;
            most_rows = fv__max64(most_rows, c->pieces[i].num_rows);
        }
        total += cost;
        longest = fv__max64(longest, cost);
    }
    if (total != c->m->report.total_cost || longest != c->m->report.max_worker_cost)
        return fail(c, "costs %lld and %lld, reported %lld and %lld", (long long)total,
                    (long long)longest, (long long)c->m->report.total_cost,
                    (long long)c->m->report.max_worker_cost);
    int64_t sum;
    if (longest_worker(p, &c->s->shape, &sum) != longest || sum != total)
        return fail(c, "worker costs add up to %lld, not %lld", (long long)sum, (long long)total);
    if (!c->s->given.lengths.device && keys != c->m->report.kv_tokens_read)
        return fail(c, "%lld keys are read, reported %lld", (long long)keys,
                    (long long)c->m->report.kv_tokens_read);

    for (int32_t i = 0; i < p->num_segments; i++)
        items += ceil_div(c->segments[i].num_rows, tile_rows(c, c->segments[i].num_rows)) *
                 c->segments[i].num_units;
    const int64_t units = fv__min32(c->s->shape.together, p->num_units), cuts = p->num_workers - 1,
                  bundles = p->invariant ? 0 : p->num_workers * units;
    if (p->num_pieces > items * fv__max32(1, p->splits) + (p->splits ? 0 : fv__max64(cuts, bundles)))
        return fail(c, "%d pieces of %lld items", p->num_pieces, (long long)items);

    /* Balance. Items whose chunks do not fit are not cut; those of one row a request always fit. */
    const int64_t rows = most_rows * p->unit_heads, blocks = p->invariant ? p->chunk / 64 + 1 : 1;
    int64_t allowed =
        m->piece + rows * (m->row + 3 * m->part) + blocks * (m->block + rows * m->block_row);
    if (p->splits || p->queue || (p->invariant && p->total_rows > p->num_requests))
        allowed = fv__max64(allowed, dearest);
    if (p->queue && (!c->s->shape.queue || p->splits || dearest * 3 > (total + merges) / p->num_workers + 3))
        return fail(c, "a queue of pieces of up to %lld of %lld", (long long)dearest, (long long)(total + merges));
    const int64_t busy = sharers(c, total, most_rows);
    if (longest * 10 > (total + merges) * 11 / busy + 10 * allowed + 10)
        return fail(c, "the longest worker costs %lld of %lld on %lld workers, one block is %lld",
                    (long long)longest, (long long)total, (long long)busy, (long long)allowed);

    if (p->num_pieces > cap->max_pieces || p->num_segments > cap->max_segments ||
        p->num_records > cap->max_records || p->num_parts > cap->max_parts ||
        p->num_slots > cap->max_slots || p->num_listed_rows > cap->max_listed_rows ||
        p->num_page_positions > cap->max_page_positions || p->bytes > cap->blob_bytes)
        return fail(c, "more than the capacity");
    const int32_t workers = c->s->limits.workers > 0
                                ? fv__min32(c->s->limits.workers, c->s->shape.workers)
                                : c->s->shape.workers;
    if (p->num_workers != workers) return fail(c, "%d workers of %d", p->num_workers, workers);
    return true;
}

/* (row, q head, key) by the bounds, one row at a time. */
static bool check_pairs(const plan_check *c)
{
    int64_t pairs = 0;
    for (int64_t g = 0; g < c->s->given.num_segments; g++)
        if (c->s->given.segments[g].page_positions &&
            (c->s->bounds.has_first || c->s->bounds.has_last))
            return true; /* counted by the tile */
    for (int32_t row = 0; row < c->p->total_rows; row++) {
        const range positions = visible_positions(c, row);
        for (int32_t unit = 0; unit < c->p->num_units; unit++) {
            if (!c->s->given.segments) {
                const key_list x = list_at(c, -1, row);
                const range v = visible_keys(c, &x, positions);
                pairs += (v.end - v.first) * c->p->num_units;
                break;
            }
            for (int32_t id = 0; id < c->s->given.num_segments; id++) {
                if (!lists_row(c, id, row, unit)) continue;
                const key_list x = list_at(c, id, row);
                const range v = visible_keys(c, &x, positions);
                pairs += v.end - v.first;
            }
        }
    }
    pairs *= c->p->unit_heads;
    return pairs == c->m->report.score_pairs
               ? true
               : fail(c, "%lld scores, reported %lld", (long long)pairs,
                      (long long)c->m->report.score_pairs);
}

static bool check_copies(const plan_check *c)
{
    const fv__plan_head *p = c->p;
    const size_t n = (size_t)c->s->batch.num_requests;
    if (p->num_requests != (int64_t)n || p->total_rows != c->s->batch.total_rows)
        return fail(c, "requests or rows");
    if (n && memcmp(FV__PLAN_ARRAY(p, fv__request, requests), c->s->batch.requests,
                    n * sizeof(fv__request)))
        return fail(c, "the requests differ");
    if (!c->s->bits) return true;
    const int64_t *offsets = FV__PLAN_ARRAY(p, int64_t, bits_offsets);
    int64_t bytes = 0;
    for (size_t r = 0; r < n; r++) {
        if (offsets[r] != bytes * 8)
            return fail(c, "mask of request %zu begins at bit %lld", r, (long long)offsets[r]);
        bytes += ceil_div(
            (int64_t)c->s->batch.requests[r].num_rows * c->s->batch.requests[r].num_keys, 8);
    }
    return offsets[n] == bytes * 8 ? true : fail(c, "masks end at bit %lld", (long long)offsets[n]);
}

/* ---- all ---- */

static bool check_all(plan_check *c)
{
    if (!check_copies(c)) return false;
    for (int32_t i = 0; i < c->p->num_segments; i++) {
        c->list_of[i] = -1;
        if (c->s->given.segments ? !find_given(c, i) : !check_plain_segment(c, i)) return false;
    }
    collect_entries(c);
    for (int32_t row = 0; row < c->p->total_rows; row++)
        for (int32_t unit = 0; unit < c->p->num_units; unit++)
            if (!check_row(c, row, unit)) return false;
    for (int32_t i = 0; i < c->p->num_pieces; i++)
        if (!check_tile(c, i)) return false;
    return run_plan(c) && check_numbers(c) && check_pairs(c);
}

static void open_check(plan_check *c, const scene *s, const fv__plan_head *p)
{
    c->s = s;
    c->p = p;
    c->pieces = FV__PLAN_ARRAY(p, fv__piece, pieces);
    c->segments = FV__PLAN_ARRAY(p, fv__segment, segments);
    c->listed = FV__PLAN_ARRAY(p, fv__listed_row, listed_rows);
    c->records = FV__PLAN_ARRAY(p, fv__record, records);
    c->parts = FV__PLAN_ARRAY(p, int32_t, parts);
    c->worker_first = FV__PLAN_ARRAY(p, int32_t, worker_first);
    c->row_record = FV__PLAN_ARRAY(p, int32_t, row_record);
    c->row_request = calloc((size_t)s->batch.total_rows + 1, sizeof *c->row_request);
    c->list_of = calloc((size_t)p->num_segments + 1, sizeof *c->list_of);
    for (int32_t r = 0; r < s->batch.num_requests; r++)
        for (int32_t i = 0; i < s->batch.requests[r].num_rows; i++)
            c->row_request[s->batch.requests[r].row_first + i] = r;
}

static void close_check(plan_check *c)
{
    free(c->row_request);
    free(c->list_of);
    free(c->first_entry);
    free(c->entries);
}

bool check_plan(const scene *s, const made *m, char *why, size_t size)
{
    char reason[300];
    plan_check c = { .m = m, .why = why, .size = size };
    const int broken = fv__plan_is_valid(m->plan, &s->shape, &s->bounds, reason, sizeof reason);
    if (broken) {
        snprintf(why, size, "invariant %d: %s", broken, reason);
        return false;
    }
    open_check(&c, s, m->plan);
    const bool good = check_all(&c);
    close_check(&c);
    return good;
}

int row_chunks(const scene *s, const fv__plan_head *plan, int32_t row, chunk_part *out, int max)
{
    plan_check c = { 0 };
    int n = 0;
    open_check(&c, s, plan);
    const range positions = visible_positions(&c, row);
    const key_list list = list_at(&c, -1, row);
    const range v = visible_keys(&c, &list, positions);
    for (int32_t level = 0; level <= FV__MAX_LEVELS; level++)
        for (int32_t i = 0; i < plan->num_pieces; i++) {
            const fv__piece *x = &c.pieces[i];
            const fv__segment *seg = &c.segments[x->segment];
            bool mine = false;
            for (int32_t k = 0; k < x->num_rows && x->unit == 0 && seg->level == level; k++)
                mine = mine || segment_row(&c, seg, x->row_first + k) == row;
            if (!mine) continue;
            const int64_t position = s->batch.requests[c.row_request[row]].first_position,
                          skip = seg->first_position - position;
            for (int64_t key = skip + x->key_first, end = key + x->num_keys; key < end; ) {
                const int64_t chunk = (position + key) / plan->chunk,
                              next = fv__min64(end, (chunk + 1) * plan->chunk - position);
                const int64_t from = fv__max64(key, v.first), to = fv__min64(next, v.end);
                if (from < to && n < max) out[n] = (chunk_part){ chunk, from, to - from };
                n += from < to;
                key = next;
            }
        }
    close_check(&c);
    return n;
}
