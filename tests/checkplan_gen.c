/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan_gen.c -- random scenes: batches of every kind that the planner may be given, valid
 * by construction. */
#include "checkplan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- random numbers and memory ---- */

uint64_t rng_next(rng *r)
{
    uint64_t z = (r->state += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

int64_t rng_below(rng *r, int64_t n) { return n <= 1 ? 0 : (int64_t)(rng_next(r) % (uint64_t)n); }
int64_t rng_between(rng *r, int64_t low, int64_t high)
{
    return low + rng_below(r, high - low + 1);
}
bool rng_chance(rng *r, int percent) { return rng_below(r, 100) < percent; }

void *arena_take(arena *a, int64_t count, size_t size)
{
    const size_t bytes = ((size_t)count * size + 63) / 64 * 64;
    if (a->used + bytes > a->size) {
        if (a->used > 0) {
            fprintf(stderr, "checkplan: the arena of %zu bytes is full\n", a->size);
            exit(2);
        }
        free(a->base);
        a->size = bytes > (size_t)64 << 20 ? bytes : (size_t)64 << 20;
        a->base = malloc(a->size);
        if (!a->base) exit(2);
    }
    char *at = a->base + a->used;
    a->used += bytes;
    memset(at, 0, bytes);
    return at;
}

void scene_clear(scene *s)
{
    const arena keep = { s->memory.base, 0, s->memory.size };
    memset(s, 0, sizeof *s);
    s->memory = keep;
}

/* ---- shapes ---- */

void scene_shape(scene *s, int32_t num_kv_heads, int32_t group, int32_t max_packed, int32_t workers,
                 const fv__cost_model *cost)
{
    fv__kernel_shape *k = &s->shape;
    snprintf(k->name, sizeof k->name, "test");
    k->max_packed = max_packed > group ? max_packed : group;
    k->unit_heads = group;
    k->units_per_kv_head = 1;
    k->num_units = num_kv_heads;
    k->workers = workers;
    k->num_cores = 0;
    k->together = k->together_rows = 0;
    k->num_tiles = 0;
    for (int32_t tile = 16; tile < k->max_packed; tile *= 4) k->tiles[k->num_tiles++] = tile;
    k->tiles[k->num_tiles++] = k->max_packed;
    k->partial_bytes = (int64_t)group * (128 + 2) * 4;
    k->cost = cost;
}

static void random_shape(scene *s, rng *r)
{
    static const fv__cost_model *const models[] = { &fv__cost_cpu, &fv__cost_cpu_amx,
                                                    &fv__cost_sm80, &fv__cost_sm90 };
    static const int32_t groups[] = { 1, 1, 2, 3, 4, 4, 7, 8, 16 },
                         packed[] = { 1, 16, 64, 64, 128, 256 },
                         workers[] = { 1, 2, 2, 3, 8, 16, 64, 108, 132 };
    const int32_t group = groups[rng_below(r, FV__COUNT(groups))];
    scene_shape(s, (int32_t)rng_between(r, 1, rng_chance(r, 80) ? 4 : 16), group,
                packed[rng_below(r, FV__COUNT(packed))],
                rng_chance(r, 50) ? workers[rng_below(r, FV__COUNT(workers))]
                                  : (int32_t)rng_between(r, 1, 132),
                models[rng_below(r, FV__COUNT(models))]);
    if (rng_chance(r, 10) && group % 2 == 0) {          /* a group in two units */
        s->shape.unit_heads = group / 2;
        s->shape.units_per_kv_head = 2;
        s->shape.num_units *= 2;
    }
    s->shape.queue = rng_chance(r, 40);
    if (rng_chance(r, 50)) {
        s->shape.together = (int32_t)rng_between(r, 2, 8);
        s->shape.together_rows = (int32_t)rng_between(r, 1, 16);
    }
    if (rng_chance(r, 20)) {
        s->cost = (fv__cost_model){ "random",          rng_below(r, 5000), rng_between(r, 1, 5000),
                                    rng_below(r, 500), rng_below(r, 300),  rng_below(r, 300), 0, 0 };
        s->shape.cost = &s->cost;
    }
    if (rng_chance(r, 20)) {            /* up to three workers a core */
        s->shape.num_cores = (s->shape.workers + 2) / 3;
        s->cost = *s->shape.cost;
        s->cost.second = rng_below(r, 100000);
        s->cost.third = s->cost.second + rng_below(r, 1000000);
        s->shape.cost = &s->cost;
    }
}

/* ---- requests ---- */

static fv_index index_of(scene *s, const int64_t *values, int64_t n, rng *r)
{
    const int64_t stride = r && rng_chance(r, 20) ? rng_between(r, 2, 3) : 1;
    fv_index x = { .count = n, .stride = stride };
    if (r && rng_chance(r, 30)) {
        int64_t *wide = arena_take(&s->memory, n * stride + 1, sizeof *wide);
        for (int64_t i = 0; i < n; i++) wide[i * stride] = values[i];
        x.host = wide;
        x.type = FV_INDEX_I64;
        return x;
    }
    int32_t *narrow = arena_take(&s->memory, n * stride + 1, sizeof *narrow);
    for (int64_t i = 0; i < n; i++) narrow[i * stride] = (int32_t)values[i];
    x.host = narrow;
    x.type = FV_INDEX_I32;
    return x;
}

/* Page tables: each request's pages, `ids` in order of requests; a CSR list, or (r) a table with
 * spare columns. */
static void place_pages(scene *s, const int64_t *ids, const int64_t *first, int64_t n, rng *r)
{
    fv_pages *p = &s->given.pages;
    int64_t *tables = (int64_t *)s->batch.tables;
    int64_t width = 0;
    for (int64_t i = 0; i < n; i++) width = fv__max64(width, first[i + 1] - first[i]);
    if (!r || rng_chance(r, 60) || width * n > 300000) {
        p->ids = index_of(s, ids, first[n], r);
        p->indptr = index_of(s, first, n + 1, r);
        memcpy(tables, first, (size_t)n * sizeof *tables);
        return;
    }
    p->table_width = width + rng_below(r, 3);
    p->table_stride = p->table_width + rng_below(r, 3);
    int64_t *table = arena_take(&s->memory, n * p->table_stride + 1, sizeof *table);
    for (int64_t i = 0; i < n * p->table_stride; i++) table[i] = -1;
    for (int64_t i = 0; i < n; i++) {
        tables[i] = i * p->table_stride;
        memcpy(table + tables[i], ids + first[i], (size_t)(first[i + 1] - first[i]) * sizeof *ids);
    }
    p->ids = index_of(s, table, n * p->table_stride, r);
}

static void begin_requests(scene *s, int64_t n, const int32_t *rows, const int32_t *keys,
                           int32_t page_size)
{
    fv__request *q = arena_take(&s->memory, n + 1, sizeof *q);
    int64_t *tables = arena_take(&s->memory, n + 1, sizeof *tables);
    int64_t total = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        q[i] = (fv__request){ (int32_t)total, rows[i], keys[i], 0 };
        total += rows[i];
        all += keys[i];
    }
    s->batch = (fv__batch){ .num_requests = n,
                            .total_rows = total,
                            .total_keys = all,
                            .given = &s->given,
                            .requests = q,
                            .tables = tables };
    s->given.num_requests = n;
    s->given.pages.page_size = page_size;
}

static void place_ragged(scene *s)
{
    int64_t *tables = (int64_t *)s->batch.tables, at = 0;
    for (int64_t i = 0; i < s->batch.num_requests; i++) {
        tables[i] = at;
        at += s->batch.requests[i].num_keys;
    }
}

void scene_requests(scene *s, int64_t n, const int32_t *rows, const int32_t *keys,
                    int32_t page_size)
{
    begin_requests(s, n, rows, keys, page_size);
    if (!page_size) {
        place_ragged(s);
        return;
    }
    int64_t *first = arena_take(&s->memory, n + 1, sizeof *first);
    for (int64_t i = 0; i < n; i++) first[i + 1] = first[i] + fv__div_up(keys[i], page_size);
    int64_t *ids = arena_take(&s->memory, first[n] + 1, sizeof *ids);
    for (int64_t i = 0; i < first[n]; i++) ids[i] = i;
    s->given.pages.num_pages = first[n];
    place_pages(s, ids, first, n, NULL);
}

static int32_t random_length(rng *r, int64_t most)
{
    static const int32_t edges[] = { 0,  1,   2,   15,  16,   17,   63,  64,
                                     65, 127, 128, 129, 1023, 1024, 1025 };
    if (rng_chance(r, 30)) return (int32_t)fv__min64(edges[rng_below(r, FV__COUNT(edges))], most);
    int64_t x = rng_below(r, most + 1);
    while (rng_chance(r, 50)) x /= 4;   /* long ones are rare */
    return (int32_t)x;
}

/* Pages of one request: some of an earlier one first (`share`), then fresh ids. */
static void random_ids(scene *s, rng *r, int64_t *ids, const int64_t *first, int64_t n, bool share)
{
    int64_t fresh = 1;
    const int64_t pool = first[n] + 1 + rng_below(r, 50);
    for (int64_t i = 0; i < n; i++) {
        const int64_t pages = first[i + 1] - first[i];
        int64_t common = 0;
        if (share && i > 0 && rng_chance(r, 80)) {
            const int64_t other = rng_chance(r, 50) ? 0 : rng_below(r, i);
            common = fv__min64(pages, first[other + 1] - first[other]);
            if (rng_chance(r, 50)) common = rng_below(r, common + 1);
            for (int64_t p = 0; p < common; p++) ids[first[i] + p] = ids[first[other] + p];
        }
        for (int64_t p = common; p < pages; p++) ids[first[i] + p] = fresh++;
    }
    s->given.pages.num_pages = pool;
}

static void random_requests(scene *s, rng *r, bool share)
{
    static const int32_t page_sizes[] = { 0, 1, 2, 3, 7, 16, 16, 16, 64, 64, 100, 544 };
    const int kind = (int)rng_below(r, 5); /* decode, prefill, chunked, mixed, padded */
    const int64_t n = rng_chance(r, 3)    ? 0
                      : rng_chance(r, 70) ? rng_between(r, 1, 8)
                                          : rng_between(r, 1, 60);
    const int64_t longest = share && rng_chance(r, 60) ? 3000
                            : n > 20                   ? 1500
                            : rng_chance(r, 3)         ? 200000
                            : rng_chance(r, 50)        ? 300
                                                       : 6000;
    const int64_t many = n > 20 ? 20 : rng_chance(r, 5) ? 600 : 90;
    int32_t page_size = page_sizes[rng_below(r, FV__COUNT(page_sizes))];
    if (share && !page_size) page_size = 16;
    if (longest > 10000 && page_size < 16) page_size = 16;
    int32_t *rows = arena_take(&s->memory, n + 1, sizeof *rows),
            *keys = arena_take(&s->memory, n + 1, sizeof *keys);
    for (int64_t i = 0; i < n; i++) {
        keys[i] = share && rng_chance(r, 60) ? (int32_t)rng_between(r, longest / 2, longest)
                                             : random_length(r, longest);
        const bool decode =
            kind == 0 || (kind == 3 && rng_chance(r, 70)) || (kind == 4 && rng_chance(r, 50));
        rows[i] = decode ? 1 : random_length(r, many);
        if (kind == 1) keys[i] = rows[i];
        if (kind == 4 && rng_chance(r, 40)) keys[i] = 0;
        if (!decode && rng_chance(r, 10)) rows[i] = 0;
        if (rng_chance(r, 90) && keys[i] && rows[i] > keys[i]) rows[i] = keys[i];
    }
    snprintf(s->name, sizeof s->name, "kind %d, %lld requests", kind, (long long)n);
    begin_requests(s, n, rows, keys, page_size);
    s->batch.decode = kind == 0;
    if (!page_size) {
        place_ragged(s);
        return;
    }
    int64_t *first = arena_take(&s->memory, n + 1, sizeof *first);
    for (int64_t i = 0; i < n; i++)
        first[i + 1] =
            first[i] + fv__div_up(keys[i], page_size) + (rng_chance(r, 10) ? rng_below(r, 3) : 0);
    int64_t *ids = arena_take(&s->memory, first[n] + 1, sizeof *ids);
    random_ids(s, r, ids, first, n, share);
    place_pages(s, ids, first, n, r);
}

/* ---- positions and bounds ---- */

static void random_positions(scene *s, rng *r)
{
    fv__request *q = (fv__request *)s->batch.requests;
    const int64_t n = s->batch.num_requests, size = fv__max64(1, s->given.pages.page_size);
    if (rng_chance(r, 25)) {
        const bool same = rng_chance(r, 50);
        int64_t p = rng_below(r, 40) * size;
        for (int64_t i = 0; i < n; i++) {
            if (!same) p = rng_chance(r, 50) ? rng_below(r, 40) * size : rng_below(r, 5000);
            q[i].first_position = (int32_t)p;
        }
    }
    if (!rng_chance(r, 12)) return;
    int64_t *positions = arena_take(&s->memory, s->batch.total_rows + 1, sizeof *positions);
    int32_t *low = arena_take(&s->memory, n + 1, sizeof *low),
            *high = arena_take(&s->memory, n + 1, sizeof *high);
    s->row_positions = arena_take(&s->memory, s->batch.total_rows + 1, sizeof *s->row_positions);
    for (int64_t i = 0; i < n; i++) {
        low[i] = INT32_MAX;
        high[i] = INT32_MIN;
        for (int64_t row = q[i].row_first; row < q[i].row_first + q[i].num_rows; row++) {
            positions[row] = q[i].first_position + rng_between(r, -20, q[i].num_keys + 20);
            s->row_positions[row] = (int32_t)positions[row];
            low[i] = fv__min32(low[i], s->row_positions[row]);
            high[i] = fv__max32(high[i], s->row_positions[row]);
        }
    }
    s->given.row_positions = index_of(s, positions, s->batch.total_rows, r);
    s->batch.min_position = low;
    s->batch.max_position = high;
}

/* Ranges for every request, ascending and apart. */
static void random_list(scene *s, rng *r, fv_ranges *out)
{
    const int64_t n = s->batch.num_requests, lists = rng_chance(r, 30) ? 1 : n;
    int32_t *indptr = arena_take(&s->memory, n + 1, sizeof *indptr),
            *ranges = arena_take(&s->memory, 2 * 6 * lists + 2, sizeof *ranges);
    int32_t at = 0;
    for (int64_t i = 0; i < lists; i++) {
        int32_t p = (int32_t)rng_below(r, 300);
        for (int64_t k = rng_below(r, 6); k > 0; k--, at++) {
            ranges[2 * at] = p;
            ranges[2 * at + 1] = p += (int32_t)rng_between(r, 1, 400);
            p += (int32_t)rng_below(r, 300);
        }
        indptr[i + 1 > n ? n : i + 1] = at;
    }
    *out = (fv_ranges){ ranges, lists == n && n != 1 ? indptr : NULL, at, 0 };
}

static void random_bounds(scene *s, rng *r)
{
    fv__bounds *b = &s->bounds;
    const int kind = (int)rng_below(r, 6);
    if (kind == 0) return;
    if (kind <= 4) b->has_last = true;
    if (kind == 2) b->last = rng_between(r, -3, 200);
    if (kind >= 3) {
        b->has_first = true;
        b->first = -rng_below(r, rng_chance(r, 50) ? 100 : 3000);
    }
    if (kind == 5 && rng_chance(r, 20)) b->first = rng_between(r, 0, 10);
    if (!rng_chance(r, 15)) return;
    b->lifted = true;
    b->num_lists = (int)rng_between(r, 1, 2);
    for (int i = 0; i < b->num_lists; i++) {
        random_list(s, r, &s->lists[i]);
        b->lists[i] = &s->lists[i];
    }
}

/* ---- given segments ---- */

typedef struct giver {
    scene *s;
    rng *r;
    fv_segment *out;
    int64_t n, most;
    int64_t *ids, entries, most_entries;
    int32_t heads, page_size;
} giver;

/* `keys` fresh keys, in pages that nobody else lists. */
static void fresh_keys(giver *g, fv_segment *x, int64_t keys)
{
    x->num_keys = keys;
    x->first_page = g->entries;
    if (!g->page_size) {
        g->entries += keys;
        return;
    }
    x->num_pages = fv__div_up(keys, g->page_size) + (rng_chance(g->r, 10) ? 1 : 0);
    for (int64_t i = 0; i < x->num_pages; i++, g->entries++) g->ids[g->entries] = g->entries;
}

static void list_rows(giver *g, fv_segment *x, const int32_t *rows, int64_t n)
{
    int32_t *copy = arena_take(&g->s->memory, n + 1, sizeof *copy);
    memcpy(copy, rows, (size_t)n * sizeof *copy);
    x->rows = copy;
    x->num_rows = n;
}

static bool room_for(const giver *g, int64_t keys)
{
    return g->n < g->most &&
           g->entries + (g->page_size ? keys / g->page_size + 3 : keys) < g->most_entries;
}

/* A prefix tree over rows [first, end): a node for all, then the rows in parts. Depth levels at
 * most. */
static void give_tree(giver *g, int64_t first, int64_t end, int64_t position, int depth)
{
    const int64_t keys = random_length(g->r, 600);
    if (first >= end || depth == 0 || !room_for(g, keys)) return;
    fv_segment *x = &g->out[g->n++];
    *x = (fv_segment){ .row_first = first, .num_rows = end - first, .first_position = position };
    fresh_keys(g, x, keys);
    const int64_t middle = end - first > 1 ? rng_between(g->r, first + 1, end - 1) : end;
    give_tree(g, first, middle, position + keys, depth - 1);
    give_tree(g, middle, end, position + keys, depth - 1);
}

/* Block rows with pages at positions of their own, per group of kv heads. */
static void give_blocks(giver *g)
{
    const int64_t rows = g->s->batch.total_rows, step = rng_between(g->r, 1, 12);
    const int32_t heads = rng_chance(g->r, 60) ? g->heads : (int32_t)rng_between(g->r, 1, g->heads);
    for (int32_t h = 0; h < g->heads; h += heads)
        for (int64_t row = 0; row < rows; row += step) {
            const int64_t pages = rng_between(g->r, 0, 9);
            if (rng_chance(g->r, 10) || !room_for(g, pages * g->page_size)) continue;
            fv_segment *x = &g->out[g->n++];
            *x = (fv_segment){ .row_first = row, .num_rows = fv__min64(step, rows - row),
                               .kv_head_first = h, .num_kv_heads = fv__min32(heads, g->heads - h) };
            fresh_keys(g, x, pages * g->page_size);
            x->num_keys = fv__max64(0, x->num_keys - rng_below(g->r, g->page_size));
            int32_t *positions = arena_take(&g->s->memory, x->num_pages + 1, sizeof *positions),
                    p = (int32_t)rng_below(g->r, 50);
            for (int64_t i = 0; i < x->num_pages;
                 i++, p += g->page_size * (int32_t)rng_between(g->r, 1, 4))
                positions[i] = p;
            for (int64_t i = x->num_pages; i > 1 && rng_chance(g->r, 30); i--) { /* out of order */
                const int64_t k = rng_below(g->r, i);
                const int32_t keep = positions[k];
                positions[k] = positions[i - 1];
                positions[i - 1] = keep;
            }
            if (rng_chance(g->r, 80)) x->page_positions = positions;
        }
}

/* Any rows, any heads, at most `depth` of them over a row. */
static void give_any(giver *g, int depth)
{
    const int64_t rows = g->s->batch.total_rows;
    int32_t *list = arena_take(&g->s->memory, rows + 1, sizeof *list);
    for (int d = 0; d < depth; d++) {
        int64_t row = rng_below(g->r, 5);
        while (row < rows && g->n < g->most) {
            int64_t n = 0;
            const int percent = (int)rng_between(g->r, 30, 100);
            for (int64_t end = fv__min64(rows, row + rng_between(g->r, 1, 30)); row < end; row++)
                if (rng_chance(g->r, percent)) list[n++] = (int32_t)row;
            const int64_t keys = random_length(g->r, 500);
            if (!room_for(g, keys)) return;
            fv_segment *x = &g->out[g->n++];
            *x = (fv_segment){ .first_position = rng_below(g->r, 3000) };
            list_rows(g, x, list, n);
            fresh_keys(g, x, keys);
            if (rng_chance(g->r, 30)) {
                x->kv_head_first = (int32_t)rng_below(g->r, g->heads);
                x->num_kv_heads = (int32_t)rng_between(g->r, 1, g->heads - x->kv_head_first);
            }
            row += rng_below(g->r, 8);
        }
    }
}

static int random_segments(scene *s, rng *r)
{
    const int depth = (int)rng_between(r, 1, 5), kind = (int)rng_below(r, 3);
    giver g = { .s = s,
                .r = r,
                .most = 400,
                .most_entries = 60000,
                .heads = s->shape.num_units / s->shape.units_per_kv_head,
                .page_size = s->given.pages.page_size };
    g.out = arena_take(&s->memory, g.most + 1, sizeof *g.out);
    g.ids = arena_take(&s->memory, g.most_entries + 64, sizeof *g.ids);
    if (kind == 1 && g.page_size) give_blocks(&g);
    else if (kind == 0)
        give_tree(&g, rng_below(r, 2), s->batch.total_rows, rng_below(r, 200), depth);
    else give_any(&g, depth);
    s->given.segments = g.out;
    s->given.num_segments = g.n;
    if (g.page_size) {
        s->given.pages = (fv_pages){ .page_size = g.page_size,
                                     .num_pages = g.entries + 1,
                                     .ids = index_of(s, g.ids, g.entries, r) };
        memset((void *)s->batch.tables, 0, (size_t)s->batch.num_requests * sizeof *s->batch.tables);
    }
    snprintf(s->name + strlen(s->name), sizeof s->name - strlen(s->name),
             ", %lld segments of kind %d", (long long)g.n, kind);
    return depth;
}

void scene_shuffle_segments(scene *s, rng *r)
{
    fv_segment *x = (fv_segment *)s->given.segments;
    for (int64_t i = s->given.num_segments; i > 1; i--) {
        const int64_t k = rng_below(r, i);
        const fv_segment keep = x[k];
        x[k] = x[i - 1];
        x[i - 1] = keep;
    }
}

/* ---- limits ---- */

void scene_limits(scene *s)
{
    fv_plan_desc *l = &s->limits;
    l->max_requests = s->batch.num_requests;
    l->max_rows = s->batch.total_rows;
    l->max_kv_tokens = s->batch.total_keys;
    l->max_pages = s->given.pages.page_size ? s->given.pages.ids.count : 0;
    l->max_segments = s->given.num_segments;
    l->max_segment_rows = 0;
    if (!s->given.segments) return;
    l->max_kv_tokens = 0;
    for (int64_t i = 0; i < s->given.num_segments; i++) {
        l->max_kv_tokens += s->given.segments[i].num_keys;
        l->max_segment_rows += s->given.segments[i].num_rows;
    }
    l->max_segments = fv__max64(1, l->max_segments);
}

static int64_t slack(rng *r, int64_t x) { return rng_chance(r, 50) ? x : x + rng_below(r, x + 10); }

static void random_limits(scene *s, rng *r, bool share, int depth)
{
    static const int32_t chunks[] = { 0, 64, 128, 256, 1024, 4096 };
    fv_plan_desc *l = &s->limits;
    scene_limits(s);
    l->max_requests = slack(r, l->max_requests);
    l->max_rows = fv__max64(slack(r, l->max_rows), rng_chance(r, 10) ? l->max_requests : 0);
    l->max_kv_tokens = slack(r, l->max_kv_tokens);
    l->max_pages = slack(r, l->max_pages);
    if (s->given.segments) l->max_segments = slack(r, l->max_segments);
    l->max_levels = s->given.segments ? (int32_t)rng_between(r, depth, FV__MAX_LEVELS)
                    : share           ? (int32_t)rng_below(r, 5)
                                      : (int32_t)rng_below(r, 3);
    l->sharing = share ? FV_SHARING_FIND : FV_SHARING_OFF;
    l->invariant = rng_chance(r, 30);
    l->chunk = chunks[rng_below(r, FV__COUNT(chunks))];
    l->splits = rng_chance(r, 80) ? 0 : (int32_t)rng_between(r, 1, 9);
    l->workers = rng_chance(r, 80) ? 0 : (int32_t)rng_between(r, 1, 140);
}

void scene_random(scene *s, rng *r)
{
    const bool segments = rng_chance(r, 20), share = !segments && rng_chance(r, 25);
    int depth = 1;
    scene_clear(s);
    random_shape(s, r);
    random_requests(s, r, share);
    random_positions(s, r);
    if (segments) depth = random_segments(s, r);
    random_bounds(s, r);
    random_limits(s, r, share, depth);
    s->bits = rng_chance(r, 10);
    if (rng_chance(r, 5)) s->given.lengths.device = s;  /* live lengths: never followed here */
    if (share) strcat(s->name, ", sharing");
}
