/* SPDX-License-Identifier: Apache-2.0 */
/* plan_room.c -- how large a plan can get: exact sizes from a kernel shape and the maxima alone,
 * monotone in every maximum, and the one layout of the memory that fv__plan_make works in.
 * Sums and products stop at INT64_MAX instead of wrapping; whatever reaches it is refused. */
#include "segment.h"

#include <limits.h>

#define INVARIANT_CHUNKS 16 /* of a full tile that each worker has slots for, see capacity */

/* ---- sizes that stop at the largest number instead of wrapping ---- */

static int64_t add(int64_t a, int64_t b)
{
    int64_t c;
    return __builtin_add_overflow(a, b, &c) ? INT64_MAX : c;
}

static int64_t mul(int64_t a, int64_t b)
{
    int64_t c;
    return __builtin_mul_overflow(a, b, &c) ? INT64_MAX : c;
}

/* ---- what maxima need ---- */

static int64_t power_of_two(int64_t x)
{
    int64_t p = 4;
    while (p < x) p *= 2;
    return p;
}

/* Row tiles of at most `segments` segments with `rows` rows together. */
static int64_t tiles_of(int64_t segments, int64_t rows, int64_t tile_rows)
{
    segments = fv__min64(segments, rows);
    return add(segments, (rows - segments) / tile_rows);
}

static int32_t levels_of(const fv_plan_desc *limits)
{
    return limits->max_levels ? limits->max_levels : limits->sharing == FV_SHARING_FIND ? 2 : 1;
}

static void measure_segments(fv__room *r, const fv_plan_desc *limits, int64_t tile_rows)
{
    const int64_t plain = fv__min64(r->requests, r->rows), above = r->share ? r->levels - 1 : 0;
    const int64_t found = mul(above, plain / 2),
                  tiles_found = mul(above, tiles_of(plain / 2, r->rows, tile_rows));
    r->segments = add(plain, found);
    r->tiles = add(tiles_of(plain, r->rows, tile_rows), tiles_found);
    r->pieces = mul(r->tiles, r->units);
    r->listed = mul(above, r->rows);
    r->segment_rows = add(r->rows, r->listed);
    if (!r->given) return;
    /* Rows in no segment: at most a segment for each head unit, which has them all. */
    const int64_t rows = r->given_rows,
                  tiles = tiles_of(limits->max_segments, rows, tile_rows);
    const int64_t uncovered = mul(r->units, fv__div_up(r->rows, tile_rows));
    r->segments = fv__max64(r->segments, add(limits->max_segments, r->units));
    r->tiles = fv__max64(r->tiles, add(tiles, uncovered));
    r->pieces = fv__max64(r->pieces, add(mul(tiles, r->units), uncovered));
    r->listed = fv__max64(r->listed, add(rows, mul(r->rows, r->units)));
    r->segment_rows = fv__max64(r->segment_rows, rows);
    r->page_positions = limits->max_pages;
    r->cells = mul(r->rows, r->units);
    r->page_slots =
        r->levels > 1
            ? power_of_two(fv__min64(mul(2, fv__max64(limits->max_pages, 1)), INT64_C(1) << 41))
            : 0;
}

/* Partials. Auto: a worker owes at most two (its first and its last piece), or those of a bundle; a
 * row of several segments one a segment. Invariant: a cut item keeps a partial for each of its chunks. Items of
 * one row always have room; larger ones as far as INVARIANT_CHUNKS go, and are not cut beyond. */
static void measure_slots(fv__room *r, const fv_plan_desc *limits, int64_t tile_rows,
                          int64_t few_rows)
{
    const int64_t bundles = mul(mul(r->workers, r->together), few_rows);
    const int64_t cuts = mul(r->workers - 1, tile_rows),
                  joined = r->levels > 1 ? mul(r->segment_rows, r->units) : 0;
    const int64_t row_units = mul(r->rows, r->units);
    r->records =
        add(r->splits > 1 ? row_units : fv__min64(fv__max64(cuts, bundles), row_units), r->levels > 1 ? row_units : 0);
    if (!r->chunk) {
        r->slots = r->splits > 1
                       ? mul(mul(fv__max64(r->rows, r->levels > 1 ? r->segment_rows : 0), r->units),
                             r->splits)
                       : add(fv__max64(mul(2, cuts), bundles), joined);
        return;
    }
    const int64_t chunks = add(fv__div_up(limits->max_kv_tokens, r->chunk), mul(2, r->requests));
    const int64_t whole = mul(mul(r->workers, tile_rows), INVARIANT_CHUNKS);
    r->slots = add(add(whole, mul(r->units, chunks)), mul(joined, r->given ? 8 : 2));
    if (r->splits > 1) r->slots = add(r->slots, mul(row_units, r->splits));
}

fv__room fv__room_of(const fv__kernel_shape *shape, const fv_plan_desc *limits)
{
    fv__room r = {
        .requests = limits->max_requests,
        .rows = limits->max_rows,
        .units = shape->num_units,
        .workers =
            limits->workers > 0 ? fv__min32(limits->workers, shape->workers) : shape->workers,
        .levels = levels_of(limits),
        .splits = limits->splits,
        .together = limits->splits || limits->invariant ? 0 : fv__min32(shape->together, shape->num_units),
        .chunk = !limits->invariant ? 0
                 : limits->chunk    ? limits->chunk
                                    : 1024,
        .given = limits->max_segments > 0,
        .given_rows = limits->max_segment_rows ? limits->max_segment_rows
                                               : mul(limits->max_rows, levels_of(limits)),
    };
    r.share = limits->sharing == FV_SHARING_FIND && r.levels > 1;
    const int64_t tile_rows = fv__tile_rows(shape, INT32_MAX);
    measure_segments(&r, limits, tile_rows);
    if (r.splits > 1) r.pieces = mul(r.pieces, r.splits);
    if (r.splits == 0) r.pieces = add(r.pieces, fv__max64(r.workers - 1, mul(r.workers, r.together)));
    measure_slots(&r, limits, fv__max64(1, fv__min64(tile_rows, r.rows)),
                  fv__min64(shape->together_rows / shape->unit_heads, r.rows));
    r.hash_slots = r.share ? power_of_two(2 * r.requests) : 0;
    return r;
}

/* ---- the two blocks of memory ---- */

typedef struct carver {
    char *base;                         /* NULL: only measure */
    int64_t used;
} carver;

static void *carve(carver *c, int64_t count, int64_t size)
{
    void *at = c->base ? c->base + c->used : NULL;
    const int64_t bytes = mul(count, size);
    c->used = add(c->used, bytes > INT64_MAX - 64 ? bytes : fv__round_up(bytes, 64));
    return at;
}

int64_t fv__room_carve(const fv__room *r, void *temp, fv__maker *m)
{
    carver carved = { temp, 0 }, *c = &carved;
    fv__share_memory *s = &m->share;
    const int64_t shared = r->share ? r->requests : 0, given = r->given ? r->segments : 0;
    m->infos = carve(c, r->segments, sizeof *m->infos);
    m->listed = carve(c, r->listed, sizeof *m->listed);
    m->tiles = carve(c, r->tiles, sizeof *m->tiles);
    m->cuts = carve(c, r->workers, sizeof *m->cuts);
    m->order = carve(c, given, sizeof *m->order);
    m->order2 = carve(c, given, sizeof *m->order2);
    m->row_request = carve(c, r->given ? r->rows : 0, sizeof *m->row_request);
    m->cells = carve(c, r->cells, sizeof *m->cells);
    m->page_slots = carve(c, r->page_slots, sizeof *m->page_slots);
    s->slots = carve(c, r->hash_slots, sizeof *s->slots);
    s->heads = carve(c, shared, sizeof *s->heads);
    s->tail = carve(c, shared, sizeof *s->tail);
    s->next = carve(c, shared, sizeof *s->next);
    s->members = carve(c, shared, sizeof *s->members);
    s->common = carve(c, shared, sizeof *s->common);
    s->begin = carve(c, shared, sizeof *s->begin);
    s->level = carve(c, shared, sizeof *s->level);
    s->nodes = carve(c, shared, sizeof *s->nodes);
    return carved.used;
}

/* Bytes of an array in the blob. */
static int64_t blob_array(int64_t count, int64_t size)
{
    return count > (INT64_MAX - 16) / size ? INT64_MAX : fv__round_up(count * size, 16);
}

static fv_status fits_int(const char *what, const char *maximum, int64_t value, int64_t given,
                          fv_error *err)
{
    if (value <= INT32_MAX) return FV_OK;
    return fv__fail(err, FV_E_INVALID, maximum, given, INT32_MAX,
                    "with these maxima a plan could need %lld %s; it holds at most %d: lower %s",
                    (long long)value, what, INT32_MAX, maximum);
}

fv_status fv__plan_capacity_of(const fv__kernel_shape *shape, const fv_plan_desc *limits, bool bits,
                               fv__plan_capacity *out, fv_error *err)
{
    const fv__room r = fv__room_of(shape, limits);
    *out = (fv__plan_capacity){
        .max_segments = r.segments,
        .max_listed_rows = r.listed,
        .max_page_positions = r.page_positions,
        .max_pieces = r.pieces,
        .max_records = r.records,
        .max_parts = r.slots,
        .max_slots = r.slots,
        .max_requests = r.requests,
        .max_rows = r.rows,
        .bits = bits,
        .row_records = r.levels > 1,
    };
    FV_TRY(fits_int("pieces", "limits.max_rows", r.pieces, r.rows, err));
    FV_TRY(fits_int("listed rows", "limits.max_segment_rows", r.listed, limits->max_segment_rows,
                    err));
    FV_TRY(fits_int("segments", "limits.max_segments", r.segments, limits->max_segments, err));
    FV_TRY(
        fits_int("page positions", "limits.max_pages", r.page_positions, limits->max_pages, err));
    FV_TRY(fits_int("partial results",
                    r.splits > 1 ? "limits.splits"
                    : r.chunk    ? "limits.chunk"
                                 : "limits.max_rows",
                    r.slots,
                    r.splits > 1 ? r.splits
                    : r.chunk    ? r.chunk
                                 : r.rows,
                    err));
    FV_TRY(fits_int("merge records", "limits.max_rows", r.records, r.rows, err));

    int64_t blob = blob_array(1, sizeof(fv__plan_head));
    blob = add(blob, blob_array(r.workers + 1, sizeof(int32_t)));
    blob = add(blob, blob_array(r.requests, sizeof(fv__request)));
    blob = add(blob, blob_array(r.segments, sizeof(fv__segment)));
    blob = add(blob, blob_array(r.listed, sizeof(fv__listed_row)));
    blob = add(blob, blob_array(r.page_positions, sizeof(int32_t)));
    blob = add(blob, blob_array(out->row_records ? r.rows : 0, sizeof(int32_t)));
    blob = add(blob, blob_array(bits ? r.requests + 1 : 0, sizeof(int64_t)));
    blob = add(blob, blob_array(r.pieces, sizeof(fv__piece)));
    blob = add(blob, blob_array(r.records, sizeof(fv__record)));
    out->blob_bytes = add(blob, blob_array(r.slots, sizeof(int32_t)));

    fv__maker unused;
    out->temp_bytes = fv__room_carve(&r, NULL, &unused);
    if (out->blob_bytes == INT64_MAX || out->temp_bytes == INT64_MAX ||
        mul(r.slots, fv__max64(shape->partial_bytes, 1)) == INT64_MAX)
        return fv__fail(err, FV_E_INVALID, "limits.max_rows", r.rows, INT32_MAX,
                        "a plan of these maxima has more bytes than 64 bits count");
    return FV_OK;
}
