/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c -- the planner, fv__plan_make: segments to row tiles, tiles to the cost line, the line to
 * pieces, and the merges that pieces owe. See plan.h for the nouns and the numbered invariants,
 * plan_cut.h for the arithmetic, plan_room.c for how large all of it can get.
 *
 *     segment.c       lay_tiles          find_cuts        write_pieces        collect_parts
 *   batch -> segments --------> tiles, line -----> W - 1 cuts -----> pieces, records ---> parts
 *
 *   - Tiles that see no key are not on the line: they cost nothing and move no cut. Their pieces
 *     are dealt out evenly behind each worker's own.
 *   - The cut for worker w lies where w/W of the line lie, moved to a block (chunk) border, or
 *     to the item's end where little would be left. Each cut is found on its own: cuts do not
 *     add up their rounding.
 *   - Slots of an item are consecutive in the order of its keys, so the parts of a cut item need
 *     no list. Rows of several segments ("joined") count their parts first and collect them in
 *     the order of segments, then keys.
 *
 * Cost: O(segments + tiles + pieces + workers log tiles + parts). Allocates nothing. */
#include "segment.h"

#include <limits.h>
#include <string.h>

/* ---- tiles and the line ---- */

typedef struct line {
    int64_t length;
    int64_t pieces;                     /* without cuts */
    int64_t slots,
        empty_slots; /* of joined tiles and given splits; of tiles without keys among them */
    int64_t pairs, keys;                /* for the report */
} line;

static bool tile_joined(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                        const fv__tile *t)
{
    if (!info->joined || m->cell_units == 0) return info->joined;
    const int32_t first = m->cell_units == 1 ? 0 : s->unit_first,
                  end = m->cell_units == 1 ? 1 : s->unit_first + s->num_units;
    for (int32_t i = 0; i < t->num_rows; i++)
        for (int32_t u = first; u < end; u++)
            if (m->cells[(int64_t)fv__segment_row(m, s, t->row_first + i).row * m->cell_units + u]
                    .count > 1)
                return true;
    return false;
}

static fv__cut_item item_of(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                            const fv__tile *t)
{
    return (fv__cut_item){ fv__tile_cost(m, t->num_rows),
                           t->cost,
                           fv__maker_origin(m, s, info),
                           t->key_first,
                           t->key_end,
                           m->chunk };
}

/* Given splits: how often an item is cut, how many parts and what they cost together. */
static void split_tile(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                       fv__tile *t, int64_t slots_left)
{
    const fv__cut_item item = item_of(m, s, info, t);
    int64_t cost = 0;
    int32_t parts = 0;
    for (int32_t i = 0; i < m->splits; i++) {
        const int32_t from = fv__cut_split(&item, i, m->splits),
                      to = fv__cut_split(&item, i + 1, m->splits);
        const int32_t n = fv__cut_parts(item.origin, from, to - from, m->chunk);
        cost += fv__cut_piece_cost(&item.cost, fv__cut_blocks(item.origin, from, to - from), n);
        parts += n;
    }
    if (m->chunk && (int64_t)parts * t->num_rows * s->num_units > slots_left)
        return; /* the bits are the same uncut */
    t->cost = cost;
    t->parts = parts;
    t->pieces = m->splits;
}

/* What a tile takes of the line, its parts and pieces. In the invariant mode a merge is counted
 * for each chunk, as cut items owe it: so that no worker has more than its share, whichever
 * items are cut. */
static void measure_tile(const fv__maker *m, const fv__segment *s, const fv__segment_info *info,
                         fv__tile *t, int64_t slots_left)
{
    const int64_t origin = fv__maker_origin(m, s, info);
    const int32_t num_keys = t->key_end - t->key_first;
    const fv__cut_cost c = fv__tile_cost(m, t->num_rows);
    t->parts = m->chunk ? fv__cut_parts(origin, t->key_first, num_keys, m->chunk) : 1;
    t->pieces = 1;
    t->cost = fv__cut_piece_cost(&c,
                                 m->chunk ? fv__cut_blocks(origin, t->key_first, num_keys)
                                          : (num_keys + FV__KEY_BLOCK - 1) / FV__KEY_BLOCK,
                                 t->joined || m->chunk ? t->parts : 0);
    if (m->splits > 1 && num_keys > 0) split_tile(m, s, info, t, slots_left);
}

/* Puts a tile on the line, at the front of m->tiles, or, without keys, at their back. */
static inline void lay_tile(fv__maker *m, line *l, const fv__segment *s, const fv__tile *t)
{
    if (t->key_first == t->key_end) {
        m->tiles[m->max_tiles - ++m->num_empty] = *t;
        if (t->joined) l->empty_slots += (int64_t)t->num_rows * s->num_units;
    } else {
        l->length += t->cost * s->num_units;
        l->keys += (int64_t)(t->key_end - t->key_first) * s->num_units;
        m->tiles[m->num_tiles++] = *t;
    }
    l->pieces += (int64_t)t->pieces * s->num_units;
    if (t->joined || t->pieces > 1) l->slots += (int64_t)t->parts * t->num_rows * s->num_units;
}

/* Any segment, the straight way. */
static void lay_segment(fv__maker *m, line *l, int32_t index)
{
    const fv__segment *s = &m->segments[index];
    const fv__segment_info *info = &m->infos[index];
    for (int32_t row = 0; row < s->num_rows; row += info->tile_rows) {
        fv__tile t = { .segment = index,
                       .row_first = row,
                       .num_rows = fv__min32(info->tile_rows, s->num_rows - row),
                       .start = l->length };
        fv__tile_reach(m, s, info, &t);
        t.joined = tile_joined(m, s, info, &t);
        measure_tile(m, s, info, &t, m->capacity->max_slots - l->slots);
        if (info->page_positions && t.key_first < t.key_end)
            l->pairs += fv__tile_pairs(m, s, info, &t) * s->num_units;
        lay_tile(m, l, s, &t);
    }
}

/* The common kind: rows that follow one another in one request, nothing but bounds. The same
 * tiles in a fraction of the time. */
static bool common_kind(const fv__maker *m, const fv__segment *s, const fv__segment_info *info)
{
    return s->request >= 0 && !info->joined && !info->page_positions && !m->batch->min_position &&
           !m->bounds->lifted && !m->chunk && m->splits <= 1 && !(s->live && m->bounds->has_first);
}

static void lay_common(fv__maker *m, line *l, int32_t index)
{
    const fv__segment *s = &m->segments[index];
    const fv__bounds *b = m->bounds;
    const int32_t tile_rows = m->infos[index].tile_rows;
    const int64_t position = fv__row_position(m, s->row_first, s->request) - s->first_position;
    fv__tile t = { .segment = index, .num_rows = tile_rows, .parts = 1, .pieces = 1 };
    fv__cut_cost c = fv__tile_cost(m, tile_rows);
    for (int32_t row = 0; row < s->num_rows; row += tile_rows) {
        if (row + tile_rows > s->num_rows) c = fv__tile_cost(m, t.num_rows = s->num_rows - row);
        t.row_first = row;
        t.start = l->length;
        const int64_t first = b->has_first ? fv__max64(0, position + row + b->first) : 0;
        const int64_t end = b->has_last
                                ? fv__min64(s->num_keys, position + row + t.num_rows + b->last)
                                : s->num_keys;
        t.key_first = first < end ? (int32_t)first & -FV__KEY_BLOCK : 0;
        t.key_end = first < end ? (int32_t)end : 0;
        t.cost = fv__cut_piece_cost(&c, fv__cut_blocks(0, t.key_first, t.key_end - t.key_first), 0);
        lay_tile(m, l, s, &t);
    }
}

static void lay_tiles(fv__maker *m, line *l)
{
    *l = (line){ 0 };
    m->num_tiles = m->num_empty = 0;
    for (int32_t i = 0; i < m->num_segments; i++) {
        const fv__segment *s = &m->segments[i];
        if (common_kind(m, s, &m->infos[i])) lay_common(m, l, i);
        else lay_segment(m, l, i);
        const fv__tile all = { .num_rows = s->num_rows };
        if (!m->infos[i].page_positions)
            l->pairs += fv__tile_pairs(m, s, &m->infos[i], &all) * s->num_units;
    }
}

/* ---- cuts ---- */

typedef struct cut_counts {
    int64_t pieces, slots, records;     /* that cuts add */
    int64_t slots_left;
    int32_t tile, unit, at;             /* the last cut inside of an item */
} cut_counts;

/* Given splits: the part border nearest to `at`. */
static int32_t nearest_part(const fv__maker *m, const fv__cut_item *item, int32_t num_parts,
                            int64_t at)
{
    int64_t before = 0;
    for (int32_t i = 0; i < num_parts; i++) {
        const int32_t from = fv__cut_split(item, i, num_parts),
                      to = fv__cut_split(item, i + 1, num_parts);
        const int64_t cost =
            fv__cut_piece_cost(&item->cost, fv__cut_blocks(item->origin, from, to - from),
                               fv__cut_parts(item->origin, from, to - from, m->chunk));
        if (2 * (at - before) < cost) return i;
        before += cost;
    }
    return num_parts;
}

/* A new cut inside of an item: what it adds. Returns false where the invariant mode has no slots
 * left for the item's chunks. */
static inline bool count_cut(const fv__tile *t, const fv__cut *cut, cut_counts *c, int32_t chunk)
{
    const bool same_item = c->at >= 0 && c->tile == cut->tile && c->unit == cut->unit;
    if (same_item && c->at == cut->at) return true;
    const int64_t rows = t->num_rows;
    int64_t slots = rows; /* one more part; the first cut also gives the first part a slot */
    if (chunk) slots = same_item || t->joined ? 0 : rows * t->parts;
    else if (!same_item && !t->joined) slots = 2 * rows;
    if (chunk && slots > c->slots_left - c->slots) return false;
    c->pieces++;
    c->slots += slots;
    if (!same_item && !t->joined) c->records += rows;
    c->tile = cut->tile;
    c->unit = cut->unit;
    c->at = cut->at;
    return true;
}

/* The place in an item that has as great a part of its blocks in front as `at` has of its cost: each of
 * its pieces will cost `piece`, not the first alone. */
static inline int64_t in_blocks(const fv__cut_item *item, int64_t at)
{
    return item->cost.piece + at * (item->length - item->cost.piece) / item->length;
}

/* Where the line is cut at `place` inside of tile k. `plain`: see is_plain. */
static inline fv__cut cut_tile(const fv__maker *m, int32_t k, int64_t place, int64_t slack,
                               bool even, cut_counts *counts, bool plain)
{
    const fv__tile *t = &m->tiles[k];
    const fv__segment *s = &m->segments[t->segment];
    const fv__cut_item item =
        plain ? (fv__cut_item){ fv__tile_cost(m, t->num_rows), t->cost, 0, t->key_first,
                                t->key_end, 0 }
              : item_of(m, s, &m->infos[t->segment], t);
    fv__cut cut = { k, (int32_t)((place - t->start) / t->cost), -1 };
    const int64_t at = (place - t->start) % t->cost;
    int32_t key, first = item.key_first, end = item.key_end;
    if (!plain && m->head->queue) {
        key = 2 * at < t->cost ? first : end;
    } else if (!plain && m->splits) {   /* in parts, not in keys */
        first = 0;
        end = t->pieces;
        key = t->pieces == 1 ? (2 * at < t->cost ? 0 : 1) : nearest_part(m, &item, t->pieces, at);
    } else {
        key = fv__cut_key(&item, even ? in_blocks(&item, at) : at, slack);
    }
    cut.at = key;
    if (key > first && key < end && (plain || !m->splits) &&
        !count_cut(t, &cut, counts, plain ? 0 : m->chunk))
        key = 2 * at < t->cost ? first : end;
    if (key > first && key < end) return cut;
    cut.at = -1;
    if (key >= end) cut.unit++;
    if (cut.unit == s->num_units) return (fv__cut){ k + 1, 0, -1 };
    return cut;
}

/* The last tile of [k, end) that begins at or before `place`, as tile k does. Places ascend, so
 * it is near: one of the next few, or by doubled steps, then by halves. */
static int32_t tile_at(const fv__maker *m, int32_t k, int64_t place)
{
    const fv__tile *tiles = m->tiles;
    for (int32_t few = 0; few < 4; few++, k++)
        if (k + 1 == m->num_tiles || tiles[k + 1].start > place) return k;
    int32_t end = k + 1;
    for (int32_t step = 1; end < m->num_tiles && tiles[end].start <= place; step *= 2) {
        k = end;
        end = fv__min32(m->num_tiles, end + step);
    }
    while (end - k > 1) {
        const int32_t mid = k + (end - k) / 2;
        if (tiles[mid].start <= place) k = mid;
        else end = mid;
    }
    return k;
}

/* Is there a queue to be made? Its last pieces, those of the first tiles, must be small, or the last to come is waited for. Those of few rows, which a
 * worker would rather do together, must be few. */
static bool queue_pays(const fv__maker *m, const line *l)
{
    const int64_t share = l->length / m->workers;
    if (!m->shape->queue || m->splits) return false;
    int64_t items = 0, narrow = 0;
    for (int32_t k = 0; k < m->num_tiles; k++) {
        const fv__tile *t = &m->tiles[k];
        const int32_t units = m->segments[t->segment].num_units;
        if (t->cost * (items < m->workers / 2 ? 16 : 3) > share) return false;
        if (t->num_rows * m->shape->unit_heads < m->shape->queue) narrow += t->cost * units;
        items += units;
    }
    return items >= 2 * m->workers && narrow * 16 <= l->length;
}

/* The usual kind of plan: no queue, no splits, no chunks. What follows from that is known to the
 * compiler where it is told: most of a plan's time is spent in such copies. */
static bool is_plain(const fv__maker *m)
{
    return !m->head->queue && !m->splits && !m->chunk;
}

/* How many items there are, if all cost the same, else 0. */
static int64_t equal_items(const fv__maker *m)
{
    int64_t items = 0;
    for (int32_t k = 0; k < m->num_tiles; k++) {
        if (m->tiles[k].cost != m->tiles[0].cost) return 0;
        items += m->segments[m->tiles[k].segment].num_units;
    }
    return items;
}

/* So many workers share the line, spread over all. Where several are on a core, a short line does not
 * keep more than one or two of each busy: they would take each other's time, and rows have more parts
 * to merge. Equal items are cut into as many equal parts each (*even), if few workers stay out. */
static int32_t busy_workers(const fv__maker *m, const line *l, bool *even)
{
    const fv__cost_model *c = m->shape->cost;
    const int64_t cores = m->shape->num_cores;
    *even = false;
    if (!cores || m->splits || m->head->queue) return m->workers;
    const int64_t each = l->length / cores, items = equal_items(m);
    const int64_t most = fv__min64(m->workers, each < c->second  ? cores
                                               : each < c->third ? 2 * cores
                                                                 : m->workers);
    if (items == 0 || items > most) return (int32_t)most;
    const int64_t blocks = fv__div_up(m->tiles[0].key_end - m->tiles[0].key_first, FV__KEY_BLOCK),
                  parts = fv__min64(most / items, blocks);
    *even = parts == blocks || parts * items * 8 >= most * 7;
    return (int32_t)(*even ? parts * items : most);
}

/* Few equal tiles of few rows, each the work of several workers: units that go together stay together, and their keys are cut. A unit alone would
 * need fewer parts, but a worker finds keys once for all units that it does, and reads memory in order. Four do nearly as well as more, which leave
 * more to merge. */
static void find_bundles(fv__maker *m, const line *l, cut_counts *counts)
{
    enum { ENOUGH = 4, LEAST_BLOCKS = 4 };
    const fv__kernel_shape *shape = m->shape;
    const fv__tile *t = &m->tiles[0];
    m->bundle = 0;
    if (shape->together < 2 || !is_plain(m) || shape->num_cores || !m->num_tiles) return;
    const int32_t units = m->segments[t->segment].num_units, each = m->workers / m->num_tiles;
    const int32_t blocks = fv__cut_blocks(0, t->key_first, t->key_end - t->key_first);
    if (each < 2 || each * m->num_tiles * 8 < m->workers * 7 || t->num_rows * shape->unit_heads > shape->together_rows) return;
    for (int32_t k = 0; k < m->num_tiles; k++) {
        const fv__tile *x = &m->tiles[k];
        if (x->joined || x->num_rows != t->num_rows || m->segments[x->segment].num_units != units) return;
        if (fv__cut_blocks(0, x->key_first, x->key_end - x->key_first) != blocks) return;
    }
    int32_t bundle = 0, parts = 1;
    for (int32_t b = 2; b <= fv__min32(units, shape->together) && bundle < ENOUGH; b++) {
        if (units % b || each % (units / b) || each / (units / b) * LEAST_BLOCKS > blocks) continue;
        bundle = b;
        parts = each / (units / b);
    }
    const int64_t items = (int64_t)m->num_tiles * units, slots = items * parts * t->num_rows;
    if (parts < 2 || slots + l->slots > m->capacity->max_slots) return;
    m->bundle = bundle;
    m->bundle_parts = parts;
    *counts = (cut_counts){ .pieces = items * (parts - 1), .slots = slots, .records = items * t->num_rows, .at = -1 };
}

/* Worker w does shares [w busy / W, (w + 1) busy / W), rounded: one or none. Equal items lie where
 * as many given splits would put them. */
static inline void walk_cuts(fv__maker *m, const line *l, cut_counts *counts, bool plain)
{
    bool even;
    const int32_t busy = busy_workers(m, l, &even);
    const int64_t slack = l->length / busy / 64;
    fv__cut_steps at = fv__cut_steps_of(l->length, busy);
    int32_t k = 0, share = 0;
    for (int32_t w = 1; w < m->workers; w++) {
        const int32_t next =
            busy == m->workers ? w : (int32_t)((2 * (int64_t)w * busy + m->workers) / (2 * m->workers));
        for (; share < next; share++) fv__cut_step(&at);
        if (share < busy) k = tile_at(m, k, at.place);
        m->cuts[w - 1] = share < busy ? cut_tile(m, k, at.place, slack, even, counts, plain)
                                      : (fv__cut){ m->num_tiles, 0, -1 };
    }
}

static void find_cuts(fv__maker *m, const line *l, cut_counts *counts)
{
    find_bundles(m, l, counts);
    if (m->bundle) return;
    *counts = (cut_counts){ .at = -1, .slots_left = m->capacity->max_slots - l->slots };
    if (m->num_tiles == 0)
        for (int32_t w = 1; w < m->workers; w++) m->cuts[w - 1] = (fv__cut){ 0, 0, -1 };
    else if (is_plain(m))
        walk_cuts(m, l, counts, true);
    else
        walk_cuts(m, l, counts, false);
}

/* ---- pieces ---- */

typedef struct writer {
    fv__maker *m;
    fv__piece *pieces;
    fv__record *records;
    int32_t *parts, *row_record, *worker_first;
    int64_t n;                          /* pieces written */
    int32_t slot, record, part;         /* next */
    int32_t worker, cut;                /* in hand; next cut, of the next worker */
    int64_t cost;                       /* of the worker in hand */
    int64_t total, longest;
    int32_t empty_tile, empty_unit;     /* next piece without keys */
    int32_t empty_slot;                 /* next slot of such pieces: behind all others */
    int64_t empty_pieces;
    fv__cut_steps empty_shares;         /* of the next worker */
} writer;

static void count_parts(writer *w, const fv__segment *s, const fv__piece *p, int32_t parts)
{
    for (int32_t i = 0; i < p->num_rows; i++) {
        fv__record *r =
            &w->records[w->row_record[fv__segment_row(w->m, s, p->row_first + i).row] + p->unit];
        r->arrivals++;
        r->num_parts += parts;
    }
}

/* What pieces of one tile have in common. */
typedef struct tile_facts {
    const fv__tile *tile;
    const fv__segment *segment;
    int64_t origin;
    fv__cut_cost cost;
} tile_facts;

static inline tile_facts facts_of(const fv__maker *m, const fv__tile *t, bool plain)
{
    const fv__segment *s = &m->segments[t->segment];
    return (tile_facts){ t, s, plain ? 0 : fv__maker_origin(m, s, &m->infos[t->segment]),
                         fv__tile_cost(m, t->num_rows) };
}

/* A piece that owes a merge. `record`: of its first row, -2: of each row. */
static inline void put_partial(writer *w, const tile_facts *f, int32_t unit, int32_t key_first,
                               int32_t key_end, int32_t record, bool plain)
{
    const fv__tile *t = f->tile;
    const int32_t parts =
        fv__cut_parts(f->origin, key_first, key_end - key_first, plain ? 0 : w->m->chunk);
    const int32_t from = key_first == t->key_first ? key_first - t->free_keys : key_first;
    const int32_t to = key_end == t->key_first ? key_end - t->free_keys : key_end;
    fv__piece *p = &w->pieces[w->n++];
    *p = (fv__piece){ t->segment, t->row_first, t->num_rows, unit,
                      from,       to - from,    w->slot,     record };
    w->slot += parts * t->num_rows;
    w->cost += fv__cut_piece_cost(
        &f->cost, fv__cut_blocks(f->origin, key_first, key_end - key_first), parts);
    if (record == -2) count_parts(w, f->segment, p, parts);
}

/* Items [first, end) of a tile, uncut. */
static void put_items(writer *w, const fv__tile *t, int32_t first, int32_t end)
{
    const fv__segment *s = &w->m->segments[t->segment];
    if (t->joined) {
        const tile_facts f = facts_of(w->m, t, false);
        for (int32_t u = first; u < end; u++)
            put_partial(w, &f, s->unit_first + u, t->key_first, t->key_end, -2, false);
        return;
    }
    const int32_t key_first = t->key_first - t->free_keys;
    /* Heads of a tile are copies but for the unit: two 16-byte stores each. Most of a large
     * plan's time is spent here. */
    typedef int32_t quad __attribute__((vector_size(16)));
    quad low = { t->segment, t->row_first, t->num_rows, s->unit_first + first };
    const quad high = { key_first, t->key_end - key_first, -1, -1 }, next = { 0, 0, 0, 1 };
    char *out = (char *)(w->pieces + w->n);
    for (int32_t u = first; u < end; u++, low += next, out += sizeof(fv__piece)) {
        memcpy(out, &low, sizeof low);
        memcpy(out + sizeof low, &high, sizeof high);
    }
    w->n += end - first;
    w->cost += (t->cost -
                (w->m->chunk && t->cost ? t->parts * fv__tile_cost(w->m, t->num_rows).part : 0)) *
               (end - first);
}

/* This worker's share of the pieces without keys, behind its others; the next worker begins. */
static void next_worker(writer *w)
{
    const fv__maker *m = w->m;
    int64_t count = fv__cut_step(&w->empty_shares);
    const int32_t slot = w->slot;       /* those of an item that is cut here stay together */
    w->slot = w->empty_slot;
    while (count > 0) {
        const fv__tile *t = &m->tiles[m->max_tiles - 1 - w->empty_tile];
        const int32_t units = m->segments[t->segment].num_units,
                      take = (int32_t)fv__min64(units - w->empty_unit, count);
        put_items(w, t, w->empty_unit, w->empty_unit + take);
        count -= take;
        w->empty_unit += take;
        if (w->empty_unit < units) continue;
        w->empty_tile++;
        w->empty_unit = 0;
    }
    w->empty_slot = w->slot;
    w->slot = slot;
    w->total += w->cost;
    w->longest = fv__max64(w->longest, w->cost);
    w->cost = 0;
    w->worker_first[++w->worker] = (int32_t)w->n;
}

/* The item has been written in pieces whose slots lie `step` apart from `slot` on: the records of
 * its rows. */
static inline void put_records(writer *w, const fv__tile *t, int32_t unit, int32_t slot,
                               int32_t step, int32_t pieces, bool plain)
{
    const fv__maker *m = w->m;
    const fv__segment *s = &m->segments[t->segment];
    const int32_t parts = plain ? pieces : (w->slot - slot) / t->num_rows;
    for (int32_t i = 0; i < t->num_rows; i++) {
        w->records[w->record++] = (fv__record){ .row = fv__segment_row(m, s, t->row_first + i).row,
                                                .unit = unit,
                                                .part_first = w->part,
                                                .num_parts = parts,
                                                .arrivals = pieces };
        for (int32_t k = 0; k < parts; k++) w->parts[w->part++] = slot + k * step + i;
    }
}

static bool cut_here(const writer *w, int32_t k, int32_t unit)
{
    if (w->cut >= w->m->workers - 1) return false;
    const fv__cut *c = &w->m->cuts[w->cut];
    return c->tile == k && c->unit == unit;
}

static inline void put_cut_item(writer *w, int32_t k, int32_t unit, bool plain)
{
    const fv__tile *t = &w->m->tiles[k];
    const int32_t u = w->m->segments[t->segment].unit_first + unit, slot = w->slot,
                  record = t->joined ? -2 : w->record;
    const tile_facts f = facts_of(w->m, t, plain);
    int32_t key = t->key_first, pieces = 0;
    for (; cut_here(w, k, unit); w->cut++) {
        const int32_t at = w->m->cuts[w->cut].at;
        if (at > key) {
            put_partial(w, &f, u, key, at, record, plain);
            pieces++;
        }
        key = at;
        next_worker(w);
    }
    put_partial(w, &f, u, key, t->key_end, record, plain);
    if (!t->joined) put_records(w, t, u, slot, t->num_rows, pieces + 1, plain);
}

static void put_split_item(writer *w, int32_t k, int32_t unit)
{
    const fv__maker *m = w->m;
    const fv__tile *t = &m->tiles[k];
    const fv__segment *s = &m->segments[t->segment];
    const fv__cut_item item = item_of(m, s, &m->infos[t->segment], t);
    const tile_facts f = facts_of(m, t, false);
    const int32_t slot = w->slot, record = t->joined ? -2 : w->record;
    for (int32_t i = 0; i < t->pieces; i++) {
        for (; cut_here(w, k, unit) && m->cuts[w->cut].at <= i; w->cut++) next_worker(w);
        put_partial(w, &f, s->unit_first + unit, fv__cut_split(&item, i, t->pieces),
                    fv__cut_split(&item, i + 1, t->pieces), record, false);
    }
    if (!t->joined) put_records(w, t, s->unit_first + unit, slot, t->num_rows, t->pieces, false);
}

static inline void write_tile(writer *w, int32_t k, bool plain)
{
    const fv__maker *m = w->m;
    const fv__tile *t = &m->tiles[k];
    const int32_t units = m->segments[t->segment].num_units;
    for (int32_t u = 0; u < units; ) {
        const fv__cut *c = w->cut < m->workers - 1 ? &m->cuts[w->cut] : NULL;
        if (c && c->tile != k) c = NULL;
        if (!plain && t->pieces > 1) {
            put_split_item(w, k, u++);
        } else if (!c || c->unit > u) {         /* all units up to the cut */
            put_items(w, t, u, c ? c->unit : units);
            u = c ? c->unit : units;
        } else if (c->at >= 0) {
            put_cut_item(w, k, u++, plain);
        } else {                        /* a worker begins here, or before where no item is left */
            next_worker(w);
            w->cut++;
        }
    }
}

/* Units [first, first + bundle) of a tile, part by part: each part is one worker's. */
static void put_bundle(writer *w, const fv__tile *t, int32_t first)
{
    const fv__maker *m = w->m;
    const tile_facts f = facts_of(m, t, true);
    const fv__cut_item item = { f.cost, t->cost, 0, t->key_first, t->key_end, 0 };
    const int32_t n = m->bundle, slot = w->slot, record = w->record, unit = f.segment->unit_first + first;
    for (int32_t i = 0; i < m->bundle_parts; i++) {
        const int32_t from = fv__cut_split(&item, i, m->bundle_parts), to = fv__cut_split(&item, i + 1, m->bundle_parts);
        for (int32_t u = 0; u < n; u++) put_partial(w, &f, unit + u, from, to, record + u * t->num_rows, true);
        if (w->worker < m->workers - 1) next_worker(w);
    }
    for (int32_t u = 0; u < n; u++)
        put_records(w, t, unit + u, slot + u * t->num_rows, n * t->num_rows, m->bundle_parts, true);
}

static void write_pieces(writer *w)
{
    const bool plain = is_plain(w->m);
    for (int32_t k = 0; k < w->m->num_tiles && w->m->bundle; k++)
        for (int32_t u = 0; u < w->m->segments[w->m->tiles[k].segment].num_units; u += w->m->bundle)
            put_bundle(w, &w->m->tiles[k], u);
    if (w->m->bundle) {
        while (w->worker < w->m->workers) next_worker(w);
        return;
    }
    for (int32_t k = 0; k < w->m->num_tiles && plain; k++) write_tile(w, k, true);
    for (int32_t k = 0; k < w->m->num_tiles && !plain; k++) write_tile(w, k, false);
    while (w->worker < w->m->workers) next_worker(w);
}

/* ---- merges of rows that lie in several segments ---- */

static void collect_part(writer *w, int64_t piece)
{
    const fv__maker *m = w->m;
    const fv__piece *p = &w->pieces[piece];
    const fv__segment *s = &m->segments[p->segment];
    if (p->record != -2) return;
    const int64_t origin = fv__maker_origin(m, s, &m->infos[p->segment]);
    const int32_t parts = fv__cut_parts(origin, p->key_first, p->num_keys, m->chunk);
    for (int32_t i = 0; i < p->num_rows; i++) {
        fv__record *r =
            &w->records[w->row_record[fv__segment_row(m, s, p->row_first + i).row] + p->unit];
        for (int32_t k = 0; k < parts; k++)
            w->parts[r->part_first + r->reserved++] = p->slot + k * p->num_rows + i;
    }
}

/* Parts in the order of segments, then keys. Pieces with keys are in that order, and so are
 * those without, which lie behind each worker's others. */
static void collect_parts(writer *w, int32_t first_record)
{
    const fv__maker *m = w->m;
    for (int32_t i = first_record; i < w->record; i++) {
        w->records[i].part_first = w->part;
        w->part += w->records[i].num_parts;
    }
    int32_t empty_worker = 0;
    int64_t empty = -1, empty_end = -1;
    for (int32_t worker = 0; worker <= m->workers; worker++) {
        const bool last = worker == m->workers;
        const int64_t own = last ? 1
                                 : w->worker_first[worker + 1] -
                                       (fv__cut_place(w->empty_pieces, worker + 1, m->workers) -
                                        fv__cut_place(w->empty_pieces, worker, m->workers));
        for (int64_t i = last ? 0 : w->worker_first[worker]; i < own; i++) {
            const int32_t segment = last ? INT32_MAX : w->pieces[i].segment;
            while (empty_worker < m->workers || empty < empty_end) {
                if (empty == empty_end) {
                    empty_end = w->worker_first[empty_worker + 1];
                    empty =
                        empty_end - (fv__cut_place(w->empty_pieces, empty_worker + 1, m->workers) -
                                     fv__cut_place(w->empty_pieces, empty_worker, m->workers));
                    empty_worker++;
                    continue;
                }
                if (w->pieces[empty].segment > segment) break;
                collect_part(w, empty++);
            }
            if (!last) collect_part(w, i);
        }
    }
    for (int32_t i = first_record; i < w->record; i++) w->records[i].reserved = 0;
}

/* ---- the blob ---- */

/* Places an array of `count` behind what is there and clears the gap in front of the next, so
 * that equal plans are equal bytes. */
static int64_t place(fv__plan_head *head, int64_t count, int64_t size)
{
    const int64_t at = head->bytes, end = at + count * size;
    head->bytes = fv__round_up(end, 16);
    memset((char *)head + end, 0, (size_t)(head->bytes - end));
    return at;
}

static void begin_blob(fv__maker *m, fv__plan_head *head)
{
    const fv__batch *b = m->batch;
    const bool paged = b->given->pages.page_size != 0;
    memset(head, 0, (size_t)fv__round_up(sizeof *head, 16));
    *head = (fv__plan_head){
        .num_workers = m->workers,
        .num_requests = (int32_t)b->num_requests,
        .total_rows = (int32_t)b->total_rows,
        .num_units = m->shape->num_units,
        .unit_heads = m->shape->unit_heads,
        .units_per_kv_head = m->shape->units_per_kv_head,
        .page_size = b->given->pages.page_size,
        .invariant = m->chunk > 0,
        .chunk = m->chunk,
        .num_pages = paged ? b->given->pages.num_pages : 0,
        .table_entries = paged ? b->given->pages.ids.count : 0,
        .splits = m->splits,
        .row_positions = b->min_position != NULL,
        .bytes = fv__round_up(sizeof *head, 16),
    };
    if (m->live && m->bounds->has_first && !m->bounds->lifted && !b->given->segments &&
        !b->min_position) {
        head->has_live_first = 1;
        head->live_first = m->bounds->first;
    }
    head->worker_first = place(head, m->workers + 1, sizeof(int32_t));
    head->requests = place(head, b->num_requests, sizeof(fv__request));
    if (b->num_requests > 0)
        memcpy((char *)head + head->requests, b->requests,
               (size_t)b->num_requests * sizeof(fv__request));
    head->segments = head->bytes;
    m->head = head;
    m->segments = FV__PLAN_ARRAY(head, fv__segment, segments);
}

static void place_page_positions(fv__maker *m)
{
    fv__plan_head *head = m->head;
    int64_t n = 0;
    for (int32_t i = 0; i < m->num_segments; i++)
        n += m->infos[i].page_positions ? m->infos[i].num_pages : 0;
    head->page_positions = place(head, n, sizeof(int32_t));
    head->num_page_positions = (int32_t)n;
    int32_t *out = FV__PLAN_ARRAY(head, int32_t, page_positions), at = 0;
    for (int32_t i = 0; i < m->num_segments && n > 0; i++) {
        const fv__segment_info *info = &m->infos[i];
        if (!info->page_positions) continue;
        memcpy(out + at, info->page_positions, (size_t)info->num_pages * sizeof *out);
        m->segments[i].page_positions = at;
        at += info->num_pages;
    }
}

static void place_bits(fv__maker *m)
{
    fv__plan_head *head = m->head;
    if (!m->capacity->bits) return;
    head->bits_offsets = place(head, m->batch->num_requests + 1, sizeof(int64_t));
    int64_t *out = FV__PLAN_ARRAY(head, int64_t, bits_offsets), at = 0;
    for (int64_t r = 0; r < m->batch->num_requests; r++) {
        out[r] = at;
        at = fv__round_up(
            at + (int64_t)m->batch->requests[r].num_rows * m->batch->requests[r].num_keys, 8);
    }
    out[m->batch->num_requests] = at;
}

/* Everything in front of the pieces. */
static void place_segments(fv__maker *m)
{
    fv__plan_head *head = m->head;
    int64_t tokens = 0;
    head->num_segments = m->num_segments;
    place(head, m->num_segments, sizeof(fv__segment));
    head->num_listed_rows = m->num_listed;
    head->listed_rows = place(head, m->num_listed, sizeof(fv__listed_row));
    if (m->num_listed > 0)
        memcpy((char *)head + head->listed_rows, m->listed,
               (size_t)m->num_listed * sizeof *m->listed);
    place_page_positions(m);
    if (!head->page_size) {
        for (int32_t i = 0; i < m->num_segments; i++)
            tokens = fv__max64(tokens, m->segments[i].table + m->segments[i].num_keys);
        head->table_entries = tokens;
    }
    place_bits(m);
}

/* Numbers the rows of joined tiles; each gets a record per head unit. Returns how many. */
static int64_t number_joined(fv__maker *m, int32_t *row_record)
{
    int64_t n = 0;
    memset(row_record, 0xFF, (size_t)m->batch->total_rows * sizeof *row_record);
    for (int32_t k = 0; k < m->num_tiles + m->num_empty; k++) {
        const fv__tile *t =
            k < m->num_tiles ? &m->tiles[k] : &m->tiles[m->max_tiles - 1 - (k - m->num_tiles)];
        if (!t->joined) continue;
        for (int32_t i = 0; i < t->num_rows; i++) {
            const int32_t row = fv__segment_row(m, &m->segments[t->segment], t->row_first + i).row;
            if (row_record[row] >= 0) continue;
            row_record[row] = (int32_t)n;
            n += m->shape->num_units;
        }
    }
    return n;
}

static void begin_joined_records(const fv__maker *m, writer *w, int64_t first)
{
    const int32_t units = m->shape->num_units;
    for (int64_t row = 0; row < m->batch->total_rows; row++) {
        if (w->row_record[row] < 0) continue;
        w->row_record[row] += (int32_t)first;
        for (int32_t u = 0; u < units; u++)
            w->records[w->row_record[row] + u] = (fv__record){ .row = (int32_t)row, .unit = u };
    }
}

static fv_status over_capacity(const fv__maker *m, const char *what, int64_t need, int64_t have)
{
    return fv__fail(m->err, FV_E_CAPACITY, m->chunk ? "limits.chunk" : "limits.max_rows", need,
                    have, "this step needs %lld %s; the plan holds %lld: create it with %s",
                    (long long)need, what, (long long)have,
                    m->chunk ? "a larger chunk or more max_segment_rows" : "larger maxima");
}

static fv_status check_room(const fv__maker *m, int64_t pieces, int64_t records, int64_t slots)
{
    const fv__plan_capacity *c = m->capacity;
    if (m->num_segments > c->max_segments)
        return over_capacity(m, "segments", m->num_segments, c->max_segments);
    if (pieces > c->max_pieces) return over_capacity(m, "pieces", pieces, c->max_pieces);
    if (records > c->max_records) return over_capacity(m, "merge records", records, c->max_records);
    if (slots > c->max_slots) return over_capacity(m, "partial results", slots, c->max_slots);
    return FV_OK;
}

/* ---- make ---- */

static int64_t count_empty_pieces(const fv__maker *m)
{
    int64_t n = 0;
    for (int32_t k = 0; k < m->num_empty; k++)
        n += m->segments[m->tiles[m->max_tiles - 1 - k].segment].num_units;
    return n;
}

static int64_t split_records(const fv__maker *m)
{
    int64_t n = 0;
    for (int32_t k = 0; k < m->num_tiles && m->splits > 1; k++)
        if (m->tiles[k].pieces > 1 && !m->tiles[k].joined)
            n += (int64_t)m->tiles[k].num_rows * m->segments[m->tiles[k].segment].num_units;
    return n;
}

static fv_status write_plan(fv__maker *m, const line *l, const cut_counts *cuts,
                            fv__plan_report *report)
{
    fv__plan_head *head = m->head;
    int64_t joined = 0;
    writer w = { .m = m, .empty_pieces = count_empty_pieces(m) };
    w.empty_shares = fv__cut_steps_of(w.empty_pieces, m->workers);
    if (m->capacity->row_records) {
        head->row_record = place(head, m->batch->total_rows, sizeof(int32_t));
        w.row_record = FV__PLAN_ARRAY(head, int32_t, row_record);
        joined = number_joined(m, w.row_record);
    }
    const int64_t single = cuts->records + split_records(m), pieces = l->pieces + cuts->pieces,
                  slots = l->slots + cuts->slots;
    FV_TRY(check_room(m, pieces, single + joined, slots));
    head->pieces = place(head, pieces, sizeof(fv__piece));
    head->records = place(head, single + joined, sizeof(fv__record));
    head->parts = place(head, slots, sizeof(int32_t));
    w.pieces = FV__PLAN_ARRAY(head, fv__piece, pieces);
    w.records = FV__PLAN_ARRAY(head, fv__record, records);
    w.parts = FV__PLAN_ARRAY(head, int32_t, parts);
    w.worker_first = FV__PLAN_ARRAY(head, int32_t, worker_first);
    w.worker_first[0] = 0;
    w.empty_slot = (int32_t)(slots - l->empty_slots);
    if (joined) begin_joined_records(m, &w, single);

    write_pieces(&w);
    if (joined) {
        w.record = (int32_t)(single + joined);
        collect_parts(&w, (int32_t)single);
    }
    head->num_pieces = (int32_t)w.n;
    head->num_records = w.record;
    head->num_parts = w.part;
    head->num_slots = w.empty_slot;
    *report = (fv__plan_report){ .total_cost = w.total, .max_worker_cost = w.longest,
                                 .kv_tokens_read = l->keys,
                                 .score_pairs = l->pairs * m->shape->unit_heads };
    for (int32_t i = 0; i < m->num_segments; i++)
        report->num_shared_segments += m->segments[i].request < 0 && m->segments[i].num_keys > 0;
    return FV_OK;
}

/* Nothing is shared. */
static void flat_segments(fv__maker *m)
{
    m->num_segments = m->num_listed = m->cell_units = 0;
    m->saved = 0;
    fv__segments_plain(m, NULL, NULL);
}

/* One plan. flat: without the prefixes that could be found. */
static fv_status make_one(fv__maker *m, fv__plan_head *blob, bool flat, line *l,
                          fv__plan_report *report)
{
    cut_counts cuts;
    begin_blob(m, blob);
    if (flat) flat_segments(m);
    else FV_TRY(fv__segments_make(m));
    lay_tiles(m, l);
    if (m->saved > 0 && m->chunk && l->slots > m->capacity->max_slots) { /* too many chunks to keep */
        flat_segments(m);
        lay_tiles(m, l);
    }
    if (l->slots > m->capacity->max_slots)
        return over_capacity(m, "partial results", l->slots, m->capacity->max_slots);
    m->head->queue = queue_pays(m, l);
    find_cuts(m, l, &cuts);
    place_segments(m);
    return write_plan(m, l, &cuts, report);
}

/* Found prefixes make the line shorter. They are kept if they make the longest worker's share
 * shorter, too: where the flat plan's shares are longer on the average, that is known without
 * making it. */
static fv_status make_shorter(fv__maker *m, fv__plan_head *blob, fv__plan_report *report)
{
    line l;
    FV_TRY(make_one(m, blob, false, &l, report));
    const int64_t shared = report->max_worker_cost;
    if (m->saved == 0 || shared <= (l.length + m->saved) / m->workers) return FV_OK;
    FV_TRY(make_one(m, blob, true, &l, report));
    return report->max_worker_cost <= shared ? FV_OK : make_one(m, blob, false, &l, report);
}

fv_status fv__plan_make(const fv__planner *planner, const fv__batch *batch,
                        const fv__bounds *bounds, fv__plan_head *blob, fv__plan_report *report,
                        fv_error *err)
{
    const fv__room r = fv__room_of(planner->shape, planner->limits);
    fv__maker m = { .planner = planner,
                    .shape = planner->shape,
                    .capacity = planner->capacity,
                    .batch = batch,
                    .bounds = bounds,
                    .err = err,
                    .workers = r.workers,
                    .levels = r.levels,
                    .splits = r.splits,
                    .chunk = r.chunk,
                    .max_segment_rows = r.given_rows,
                    .live = batch->given->lengths.device != NULL,
                    .max_tiles = (int32_t)r.tiles,
                    .num_page_slots = r.page_slots };
    fv__room_carve(&r, planner->temp, &m);
    return make_shorter(&m, blob, report);
}

/* ---- costs of a plan that is there ---- */

/* Keys in front of a live segment's piece that no row is planned to see. */
static int64_t unseen_keys(const fv__plan_head *plan, const fv__segment *s, const fv__piece *p)
{
    if (!plan->has_live_first || plan->invariant || !s->live || p->key_first > 0) return 0;
    const fv__request *q = FV__PLAN_ARRAY(plan, fv__request, requests) + s->request;
    const int64_t position = (int64_t)q->first_position + q->num_keys - q->num_rows + s->row_first +
                             p->row_first - q->row_first;
    const int64_t first = position + plan->live_first - s->first_position;
    if (first <= 0 || first >= p->num_keys) return 0;
    return fv__cut_floor(fv__plan_origin(plan, s), first);
}

int64_t fv__plan_piece_cost(const fv__plan_head *plan, const fv__kernel_shape *shape,
                            const fv__piece *p)
{
    const fv__cost_model *m = shape->cost;
    const fv__segment *s = FV__PLAN_ARRAY(plan, fv__segment, segments) + p->segment;
    const int64_t packed = (int64_t)p->num_rows * plan->unit_heads,
                  unseen = unseen_keys(plan, s, p);
    const fv__cut_cost c = { m->piece + packed * m->row, m->block + packed * m->block_row,
                             packed * m->part };
    return fv__cut_piece_cost(
        &c, fv__cut_blocks(fv__plan_origin(plan, s), p->key_first + unseen, p->num_keys - unseen),
        p->slot >= 0 ? fv__plan_parts(plan, s, p) : 0);
}

void fv__plan_worker_costs(const fv__plan_head *plan, const fv__kernel_shape *shape, int64_t *out)
{
    const int32_t *first = FV__PLAN_ARRAY(plan, int32_t, worker_first);
    const fv__piece *pieces = FV__PLAN_ARRAY(plan, fv__piece, pieces);
    for (int32_t w = 0; w < plan->num_workers; w++) {
        out[w] = 0;
        for (int32_t i = first[w]; i < first[w + 1]; i++)
            out[w] += fv__plan_piece_cost(plan, shape, &pieces[i]);
    }
}
