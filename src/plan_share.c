/* SPDX-License-Identifier: Apache-2.0 */
/* plan_share.c -- finds requests whose page lists begin with the same ids, and reads what they
 * share once where that costs less.
 *
 * Requests are grouped by their first page; each group becomes a prefix tree whose nodes are the
 * longest common page lists of two or more members (at most MAX_DEPTH nodes deep; what lies
 * deeper is not shared). A node that is chosen becomes a segment with the rows of all its
 * members; a member's own segment begins where its deepest chosen node ends. Saved: every key
 * block of the node that the members would read one by one. Paid: the node's pieces, and a part
 * to merge for each of its rows and once for each member's own.
 *
 * choose() uses the closed form of that; keep_if_cheaper() then adds up the line with and
 * without a group's nodes, tile by tile, and drops them all unless they cost less. So the line
 * with sharing is never longer than the flat one. Whether its longest worker is done before the
 * flat plan's is another matter, which fv__plan_make decides: pieces of many rows do not get
 * small, however many workers there are.
 *
 * Invariant mode: shared keys end on a chunk border, so that the chunks of a row, and its bits,
 * are those of the flat plan. Cost: O(requests + shared page ids); no decision depends on
 * addresses or time. */
#include "segment.h"

#include <string.h>

#define MAX_DEPTH 16

typedef struct finder {
    fv__maker *m;
    fv__share_memory *s;
    const fv_index *ids, *v_ids;        /* v_ids NULL: the same */
    int32_t page_size, num_nodes;
} finder;

/* ---- page ids ---- */

static int64_t id_at(const finder *f, int32_t request, int64_t page)
{
    return fv__index_at(f->ids, f->m->batch->tables[request] + page);
}

static bool same_page(const finder *f, int32_t a, int32_t b, int64_t page)
{
    const int64_t *tables = f->m->batch->tables;
    if (id_at(f, a, page) != id_at(f, b, page)) return false;
    return !f->v_ids ||
           fv__index_at(f->v_ids, tables[a] + page) == fv__index_at(f->v_ids, tables[b] + page);
}

static int64_t full_pages(const finder *f, int32_t request)
{
    return f->m->batch->requests[request].num_keys / f->page_size;
}

/* Pages that a and b share, from `page` on and below `end`. Dense 32-bit tables, the usual ones,
 * are compared without the detour. */
static int64_t common_pages(const finder *f, int32_t a, int32_t b, int64_t page, int64_t end)
{
    const int64_t *tables = f->m->batch->tables;
    if (!f->v_ids && f->ids->type == FV_INDEX_I32 && f->ids->stride == 1) {
        const int32_t *x = (const int32_t *)f->ids->host + tables[a],
                      *y = (const int32_t *)f->ids->host + tables[b];
        while (page + 16 <= end && !memcmp(x + page, y + page, 16 * sizeof *x)) page += 16;
        while (page < end && x[page] == y[page]) page++;
        return page;
    }
    while (page < end && same_page(f, a, b, page)) page++;
    return page;
}

/* ---- groups ---- */

static bool alike(const finder *f, int32_t a, int32_t b, int64_t page)
{
    return same_page(f, a, b, page) &&
           f->m->batch->requests[a].first_position == f->m->batch->requests[b].first_position;
}

/* Puts members [first, first + num) that have a page `page` into chains of equal ids: `heads`
 * gets each chain's first member, `next` the rest. Those without such a page become chains of
 * one. Returns how many chains; they are in order of their first members. */
static int32_t chain(finder *f, int32_t first, int32_t num, int64_t page)
{
    fv__share_memory *s = f->s;
    int64_t size = 4;
    int32_t heads = 0;
    while (size < 2 * (int64_t)num) size *= 2;
    memset(s->slots, 0xFF, (size_t)size * sizeof *s->slots);
    for (int32_t i = first; i < first + num; i++) {
        const int32_t r = s->members[i];
        s->next[r] = -1;
        s->tail[r] = r;
        if (full_pages(f, r) <= page) {
            s->heads[heads++] = r;
            continue;
        }
        int64_t at =
            (int64_t)(((uint64_t)id_at(f, r, page) * 0x9E3779B97F4A7C15u) >> 32) & (size - 1);
        while (s->slots[at] >= 0 && !alike(f, s->slots[at], r, page)) at = (at + 1) & (size - 1);
        const int32_t head = s->slots[at];
        if (head < 0) {
            s->slots[at] = s->heads[heads++] = r;
        } else {
            s->next[s->tail[head]] = r;
            s->tail[head] = r;
        }
    }
    return heads;
}

/* Keys of `pages` whole pages, in the invariant mode down to a chunk border. */
static int32_t whole_keys(const finder *f, int32_t request, int64_t pages)
{
    int64_t keys = pages * f->page_size;
    const int32_t chunk = f->m->chunk;
    if (!chunk) return (int32_t)keys;
    const int64_t position = f->m->batch->requests[request].first_position;
    for (int32_t tries = 0; keys > 0 && (position + keys) % chunk != 0; tries++) {
        if (tries == chunk) return 0;   /* no page border is a chunk border */
        keys -= f->page_size;
    }
    return (int32_t)fv__max64(keys, 0);
}

/* Fills in a node whose members share `page` pages at least. Returns how many they share. */
static int64_t measure(finder *f, fv__share_node *node, int64_t page)
{
    fv__share_memory *s = f->s;
    const int32_t lead = s->members[node->member_first];
    int64_t pages = full_pages(f, lead);
    int64_t rows = 0, own_tiles = 0;
    for (int32_t i = node->member_first; i < node->member_first + node->num_members; i++) {
        const int32_t r = s->members[i], n = f->m->batch->requests[r].num_rows;
        const int64_t end = fv__min64(pages, full_pages(f, r));
        if (r != lead) pages = common_pages(f, lead, r, fv__min64(page, end), end);
        rows += n;
        own_tiles += fv__div_up(n, fv__tile_rows(f->m->shape, n));
    }
    node->num_rows = (int32_t)rows;
    node->tiles_saved = (int32_t)(own_tiles - fv__div_up(rows, fv__tile_rows(f->m->shape, rows)));
    node->end = whole_keys(f, lead, pages);
    return pages;
}

/* Makes a node of each chain with two members or more, and orders the members from `first` on by
 * chain. */
static void add_nodes(finder *f, int32_t parent, int32_t first, int32_t heads)
{
    fv__share_memory *s = f->s;
    int32_t at = first, last = -1;
    for (int32_t h = 0; h < heads; h++) {
        if (s->next[s->heads[h]] < 0) {
            s->members[at++] = s->heads[h];
            continue;
        }
        fv__share_node *node = &s->nodes[f->num_nodes];
        *node = (fv__share_node){ .parent = parent, .first_child = -1, .next_child = -1,
                                  .member_first = at,
                                  .depth = parent < 0 ? 0 : s->nodes[parent].depth + 1 };
        for (int32_t r = s->heads[h]; r >= 0; r = s->next[r]) s->members[at++] = r;
        node->num_members = at - node->member_first;
        if (parent >= 0 && last < 0) s->nodes[parent].first_child = f->num_nodes;
        if (last >= 0) s->nodes[last].next_child = f->num_nodes;
        last = f->num_nodes++;
    }
}

/* The forest: roots first, then level by level. */
static void grow(finder *f)
{
    fv__share_memory *s = f->s;
    const int64_t n = f->m->batch->num_requests;
    int32_t num = 0;
    for (int64_t r = 0; r < n; r++)
        if (f->m->batch->requests[r].num_rows > 0) s->members[num++] = (int32_t)r;
    add_nodes(f, -1, 0, chain(f, 0, num, 0));
    for (int32_t i = 0; i < f->num_nodes; i++) {
        fv__share_node *node = &s->nodes[i];
        const int64_t known = node->parent < 0 ? 0 : s->common[node->parent];
        const int64_t pages = measure(f, node, known);
        s->common[i] = (int32_t)pages;
        if (node->depth + 1 < MAX_DEPTH)
            add_nodes(f, i, node->member_first,
                      chain(f, node->member_first, node->num_members, pages));
    }
}

/* ---- choice ---- */

/* What the node's segment from key `begin` saves, by the closed form. `joined`: its members owe
 * merges already. */
static int64_t gain(const finder *f, const fv__share_node *node, int32_t begin, bool joined)
{
    const fv__cost_model *c = f->m->shape->cost;
    const int64_t packed = (int64_t)node->num_rows * f->m->shape->unit_heads;
    const int64_t tiles = fv__div_up(node->num_rows, fv__tile_rows(f->m->shape, node->num_rows));
    const int64_t saved =
        c->block * node->tiles_saved * fv__max32(0, node->end - begin) / FV__KEY_BLOCK;
    return saved - tiles * c->piece - packed * (c->row + c->part) - (joined ? 0 : packed * c->part);
}

/* The best that one node on each path below (or at) `node` saves. */
static int64_t best_single(const finder *f, int32_t index, int32_t begin, bool joined)
{
    const fv__share_node *node = &f->s->nodes[index];
    int64_t below = 0;
    for (int32_t c = node->first_child; c >= 0; c = f->s->nodes[c].next_child)
        below += best_single(f, c, begin, joined);
    return fv__max64(below, fv__max64(0, gain(f, node, begin, joined)));
}

static int64_t best_below(const finder *f, const fv__share_node *node, int32_t begin, bool joined)
{
    int64_t sum = 0;
    for (int32_t c = node->first_child; c >= 0; c = f->s->nodes[c].next_child)
        sum += best_single(f, c, begin, joined);
    return sum;
}

/* `left`: segments that may still be chosen on this path, besides the members' own. */
static void choose(finder *f, int32_t index, int32_t begin, bool joined, int32_t left)
{
    fv__share_node *node = &f->s->nodes[index];
    if (left == 0) return;
    const int64_t with =
        gain(f, node, begin, joined) + (left > 1 ? best_below(f, node, node->end, true) : 0);
    node->begin = begin;
    node->chosen = node->end > begin && with > best_below(f, node, begin, joined);
    if (node->chosen) {
        begin = node->end;
        joined = true;
        left--;
    }
    for (int32_t c = node->first_child; c >= 0; c = f->s->nodes[c].next_child)
        choose(f, c, begin, joined, left);
}

/* ---- the line with and without ---- */

static fv__segment own_segment(const finder *f, int32_t r, int32_t begin)
{
    const fv__request *q = &f->m->batch->requests[r];
    return (fv__segment){ .row_first = q->row_first,
                          .num_rows = q->num_rows,
                          .request = r,
                          .num_keys = q->num_keys - begin,
                          .first_position = q->first_position + begin,
                          .page_positions = -1 };
}

/* Cost of one head unit of a segment's tiles. */
static int64_t line_cost(const finder *f, const fv__segment *s, bool joined)
{
    const fv__segment_info info = { .tile_rows = fv__tile_rows(f->m->shape, s->num_rows) };
    const int64_t origin = fv__maker_origin(f->m, s, &info);
    int64_t sum = 0;
    for (int32_t row = 0; row < s->num_rows; row += info.tile_rows) {
        fv__tile t = { .row_first = row, .num_rows = fv__min32(info.tile_rows, s->num_rows - row) };
        fv__tile_reach(f->m, s, &info, &t);
        const fv__cut_cost c = fv__tile_cost(f->m, t.num_rows);
        const int32_t parts =
            fv__cut_parts(origin, t.key_first, t.key_end - t.key_first, f->m->chunk);
        sum += fv__cut_piece_cost(&c, fv__cut_blocks(origin, t.key_first, t.key_end - t.key_first),
                                  joined ? parts : 0);
    }
    return sum;
}

static fv__segment node_segment(const finder *f, const fv__share_node *node, int32_t first_listed)
{
    const int32_t lead = f->s->members[node->member_first];
    return (fv__segment){
        .table = f->m->batch->tables[lead] + node->begin / f->page_size,
        .row_first = first_listed,
        .num_rows = node->num_rows,
        .request = -1,
        .num_units = f->m->shape->num_units,
        .num_keys = node->end - node->begin,
        .first_position = f->m->batch->requests[lead].first_position + node->begin,
        .page_positions = -1,
    };
}

static void list_rows(finder *f, const fv__share_node *node)
{
    fv__maker *m = f->m;
    for (int32_t i = node->member_first; i < node->member_first + node->num_members; i++) {
        const int32_t r = f->s->members[i];
        for (int32_t row = 0; row < m->batch->requests[r].num_rows; row++)
            m->listed[m->num_listed++] =
                (fv__listed_row){ m->batch->requests[r].row_first + row, r };
    }
}

/* begin[] and level[] of a chosen node's members. Parents come before children, so the deepest
 * stays. */
static void mark_members(finder *f, const fv__share_node *node)
{
    for (int32_t i = node->member_first; i < node->member_first + node->num_members; i++) {
        f->s->begin[f->s->members[i]] = node->end;
        f->s->level[f->s->members[i]]++;
    }
}

/* Sum over the nodes below `index` of their segments' costs; lists rows behind m->num_listed for
 * the count and takes them back. */
static int64_t nodes_cost(finder *f, int32_t index)
{
    const fv__share_node *node = &f->s->nodes[index];
    int64_t sum = 0;
    if (node->chosen) {
        const int32_t first = f->m->num_listed;
        list_rows(f, node);
        const fv__segment s = node_segment(f, node, first);
        sum = line_cost(f, &s, true);
        f->m->num_listed = first;
        mark_members(f, node);
    }
    for (int32_t c = node->first_child; c >= 0; c = f->s->nodes[c].next_child)
        sum += nodes_cost(f, c);
    return sum;
}

static void drop(finder *f, int32_t index)
{
    f->s->nodes[index].chosen = false;
    for (int32_t c = f->s->nodes[index].first_child; c >= 0; c = f->s->nodes[c].next_child)
        drop(f, c);
}

static bool any_chosen(const finder *f, int32_t index)
{
    if (f->s->nodes[index].chosen) return true;
    for (int32_t c = f->s->nodes[index].first_child; c >= 0; c = f->s->nodes[c].next_child)
        if (any_chosen(f, c)) return true;
    return false;
}

/* Keeps the tree's nodes if that makes the line shorter; begin[] and level[] of its members say
 * what was kept. */
static bool keep_if_cheaper(finder *f, int32_t root)
{
    const fv__share_node *node = &f->s->nodes[root];
    if (!any_chosen(f, root)) return false;
    int64_t shared = nodes_cost(f, root), flat = 0;
    for (int32_t i = node->member_first; i < node->member_first + node->num_members; i++) {
        const int32_t r = f->s->members[i], begin = f->s->begin[r];
        const fv__segment all = own_segment(f, r, 0), rest = own_segment(f, r, begin);
        const int64_t whole = line_cost(f, &all, false);
        flat += whole;
        shared += begin == 0 ? whole : rest.num_keys ? line_cost(f, &rest, true) : 0;
    }
    if (shared < flat) {
        f->m->saved += (flat - shared) * f->m->shape->num_units;
        return true;
    }
    drop(f, root);
    for (int32_t i = node->member_first; i < node->member_first + node->num_members; i++)
        f->s->begin[f->s->members[i]] = f->s->level[f->s->members[i]] = 0;
    return false;
}

/* ---- segments ---- */

static void emit(finder *f, int32_t index, int32_t level)
{
    fv__maker *m = f->m;
    const fv__share_node *node = &f->s->nodes[index];
    if (node->chosen) {
        fv__segment *out = &m->segments[m->num_segments];
        *out = node_segment(f, node, m->num_listed);
        out->level = level++;
        m->infos[m->num_segments++] =
            (fv__segment_info){ .tile_rows = fv__tile_rows(m->shape, node->num_rows),
                                .joined = true };
        list_rows(f, node);
    }
    for (int32_t c = node->first_child; c >= 0; c = f->s->nodes[c].next_child) emit(f, c, level);
}

bool fv__segments_share(fv__maker *m)
{
    const fv_pages *pages = &m->batch->given->pages;
    const int64_t n = m->batch->num_requests;
    if (!m->head->page_size || n < 2 || !pages->ids.host) return false;
    finder f = { m,
                 &m->share,
                 &pages->ids,
                 fv__index_given(&pages->v_ids) && pages->v_ids.host ? &pages->v_ids : NULL,
                 m->head->page_size,
                 0 };
    grow(&f);
    if (f.num_nodes == 0) return false;
    memset(m->share.begin, 0, (size_t)n * sizeof *m->share.begin);
    memset(m->share.level, 0, (size_t)n * sizeof *m->share.level);

    bool any = false;
    for (int32_t i = 0; i < f.num_nodes && m->share.nodes[i].parent < 0; i++) {
        choose(&f, i, 0, false, m->levels - 1);
        any = keep_if_cheaper(&f, i) || any;
    }
    if (!any) return false;
    for (int32_t i = 0; i < f.num_nodes && m->share.nodes[i].parent < 0; i++) emit(&f, i, 0);
    fv__segments_plain(m, m->share.begin, m->share.level);
    return true;
}
