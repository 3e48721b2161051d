/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_setup.c -- one way of a row in memory: geometry, page tables, data, outputs,
 * descriptors.
 *
 * Order: slices (who asks) -> pages (which ids) -> geometry (strides) -> areas, poisoned -> data ->
 * tables -> problem, limits, batch, tensors. Whatever no row may read holds poison: keys that no
 * row of their request sees, unused slots of pages, pages that nobody owns (page 0 is one of them),
 * gaps of strided views, rows behind the last one, scratch memory.
 */
#include "checkattn.h"
#include "checkattn_gpu.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLACK_TOKENS = 3 };              /* ragged with room: tokens behind each request */

__attribute__((format(printf, 2, 3)))
static bool fail(setup *s, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(s->why, sizeof s->why, format, args);
    va_end(args);
    return false;
}

static int axis(const setup *s, int which)
{
    return s->way.axis[which];
}

static int64_t keys_of(const setup *s, int i)
{
    return s->slices[i].hi - s->slices[i].lo;
}

static int64_t rows_of(const setup *s, int i)
{
    return s->slices[i].row_hi - s->slices[i].row_lo;
}

static int64_t pages_of(const setup *s, int i)
{
    return (keys_of(s, i) + s->page - 1) / s->page;
}

void *setup_twin(setup *s, void *bytes, size_t count)
{
    if (!gpu_on())
        return bytes;
    void *twin = s->num_twins < (int)(sizeof s->twins / sizeof *s->twins) ? gpu_alloc(count) : NULL;
    if (!twin)
        return NULL;
    s->twins[s->num_twins++] = twin;
    return gpu_upload(twin, bytes, count) ? twin : NULL;
}

int64_t setup_position(const setup *s, int i, int64_t k)
{
    const int r = s->slices[i].request;

    return case_first_position(s->row, r) + s->row->kv.at[r] - s->row->q.at[r] + s->slices[i].row_lo
           + k;
}

void *setup_list(setup *s, size_t bytes)
{
    if (s->num_lists == (int)(sizeof s->lists / sizeof *s->lists))
        return NULL;
    void *list = calloc(bytes ? bytes : 1, 1);
    if (list)
        s->lists[s->num_lists++] = list;
    return list;
}

/* ------------------------------------------------------------------------------------ the pages */

/* A small generator for placements: the same way gives the same ids. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += 0x9E3779B97F4A7C15u;

    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static void shuffle(int64_t *ids, int64_t n, uint64_t seed)
{
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = (int64_t)(next_random(&seed) % (uint64_t)(i + 1)), x = ids[i];
        ids[i] = ids[j];
        ids[j] = x;
    }
}

/* Physical ids of `n` distinct pages, and the size of the pool. Page 0 is never one of them,
 * unless the row says so. */
static bool place_pages(setup *s, int64_t n, int64_t *ids)
{
    const case_row *row = s->row;
    const int place = axis(s, CASE_AXIS_PLACE);
    const uint64_t seed = case_hash(7, (uint32_t)s->page) ^ (uint64_t)n << 20;

    for (int64_t i = 0; row->pages.n && i < n; i++)
        ids[i] = row->pages.at[i];
    for (int64_t i = 0; row->first_page >= 0 && i < n; i++)
        ids[i] = row->first_page + i;
    if (row->pages.n || row->first_page >= 0) {
        s->num_pages = 1;
        for (int64_t i = 0; i < n; i++)
            s->num_pages = ids[i] >= s->num_pages ? ids[i] + 1 : s->num_pages;
        return true;
    }
    s->num_pages = place == CASE_PLACE_SCATTERED ? 10 * (n + 1) : n + 3;
    for (int64_t i = 0; i < n; i++)
        ids[i] = place == CASE_PLACE_REVERSED ? n - i : i + 1;
    if (place == CASE_PLACE_IDENTITY || place == CASE_PLACE_REVERSED)
        return true;
    int64_t *pool = malloc((size_t)s->num_pages * sizeof *pool);
    if (!pool)
        return fail(s, "no memory for page ids");
    for (int64_t i = 0; i + 1 < s->num_pages; i++)
        pool[i] = i + 1;
    shuffle(pool, s->num_pages - 1, seed);
    memcpy(ids, pool, (size_t)n * sizeof *ids);
    free(pool);
    return true;
}

/* Pages that slice i has in common with an earlier one: those wholly inside the shared part. */
static int64_t common_pages(const setup *s, int i, int *with)
{
    const case_share *share = s->whole && s->row->share ? &s->row->share[i] : NULL;

    if (!share || share->from < 0)
        return 0;
    *with = share->from;
    return share->keys / s->page;
}

static bool make_pages(setup *s)
{
    int64_t distinct = 0, at = 0;
    int with = 0;

    s->page_at = setup_list(s, (size_t)(s->num_slices + 1) * sizeof *s->page_at);
    if (!s->page_at)
        return fail(s, "no memory");
    for (int i = 0; i < s->num_slices; i++) {
        s->page_at[i + 1] = s->page_at[i] + pages_of(s, i);
        distinct += pages_of(s, i) - common_pages(s, i, &with);
    }
    s->page_ids = setup_list(s, (size_t)s->page_at[s->num_slices] * sizeof *s->page_ids);
    s->v_page_ids = setup_list(s, (size_t)s->page_at[s->num_slices] * sizeof *s->v_page_ids);
    int64_t *ids = setup_list(s, (size_t)distinct * sizeof *ids);
    if (!s->page_ids || !s->v_page_ids || !ids || !place_pages(s, distinct, ids))
        return s->why[0] ? false : fail(s, "no memory for page ids");
    for (int i = 0; i < s->num_slices; i++) {
        const int64_t common = common_pages(s, i, &with);
        for (int64_t p = 0; p < pages_of(s, i); p++) {
            const int64_t to = s->page_at[i] + p, from = s->page_at[with] + p;
            s->page_ids[to] = p < common ? s->page_ids[from] : ids[at];
            s->v_page_ids[to] =
                p < common ? s->v_page_ids[from] : ids[s->row->x.v_ids ? (at + 1) % distinct : at];
            at += p >= common;
        }
    }
    return true;
}

static bool make_tokens(setup *s)
{
    const int64_t room = axis(s, CASE_AXIS_TABLE) == CASE_TABLE_SLACK ? SLACK_TOKENS : 0;

    s->token_at = setup_list(s, (size_t)(s->num_slices + 1) * sizeof *s->token_at);
    if (!s->token_at)
        return fail(s, "no memory");
    for (int i = 0; i < s->num_slices; i++)
        s->token_at[i + 1] = s->token_at[i] + keys_of(s, i) + room;
    return true;
}

/* --------------------------------------------------------------------------------- the geometry */

static bool page_stride_fits(setup *s, int64_t need)
{
    if (s->row->page_stride < 0 || s->row->page_stride >= need)
        return true;
    return fail(s, "page_stride=%lld is less than the %lld elements of a page",
                (long long)s->row->page_stride, (long long)need);
}

/* One tensor of `width`, `tokens` per page (or all tokens, ragged), alone in its area. */
static geometry plain(const case_row *row, int64_t tokens, int width, bool hnd)
{
    geometry g = { .token = (int64_t)row->hk * width,
                   .head = width,
                   .page = tokens * row->hk * width };

    if (hnd) {
        g.token = width;
        g.head = tokens * width;
    }
    return g;
}

static void head_strides(setup *s, int view)
{
    static const int64_t odd[] = { 0, 1, (int64_t)1 << 40 };

    if (view >= CASE_VIEW_HS0 && view <= CASE_VIEW_HSBIG)
        s->kg.head = s->vg.head = odd[view - CASE_VIEW_HS0];
}

static bool make_geometry(setup *s)
{
    const case_row *row = s->row;
    const int view = axis(s, CASE_AXIS_VIEW);
    const bool hnd = axis(s, CASE_AXIS_LAYOUT) == CASE_LAYOUT_HND;
    const int64_t tokens = s->page ? s->page : s->token_at[s->num_slices];

    const int width = row->dk - row->x.tail;

    s->kg = plain(row, tokens, width, hnd || view == CASE_VIEW_MIXED);
    s->tg = plain(row, tokens, row->x.tail, hnd || view == CASE_VIEW_MIXED);
    s->vg = plain(row, tokens, row->dv, hnd && view != CASE_VIEW_MIXED);
    const int64_t k_page = s->kg.page, v_page = s->vg.page;
    head_strides(s, view);
    if (view == CASE_VIEW_KVTOKEN) {
        s->joint = true;
        s->kg.token = s->vg.token = (int64_t)row->hk * (width + row->dv);
        s->vg.base = (int64_t)row->hk * width;
        s->kg.page = s->vg.page = tokens * s->kg.token;
    } else if (view == CASE_VIEW_KVPAGE) {
        s->joint = true;
        s->vg.base = k_page;
        s->kg.page = s->vg.page = k_page + v_page;
    } else if (view == CASE_VIEW_LAYERS32) {
        s->kg = (geometry){ 5 * k_page, 32 * k_page, s->kg.token, s->kg.head };
        s->vg = (geometry){ 5 * v_page, 32 * v_page, s->vg.token, s->vg.head };
        return true;
    }
    if (s->page && row->page_stride >= 0) {
        if (!page_stride_fits(s, s->kg.page) || (!row->mla && !page_stride_fits(s, s->vg.page)))
            return false;
        s->kg.page = s->vg.page = row->page_stride;
    }
    return true;
}

/* Elements from the start of the area to the end of the last head of the last token. */
static int64_t extent(const setup *s, const geometry *g, int width)
{
    const int64_t pages = s->page ? s->num_pages : 1,
                  tokens = s->page ? s->page : s->token_at[s->num_slices];

    if (pages == 0 || tokens == 0)
        return 0;
    return g->base + (pages - 1) * g->page + (tokens - 1) * g->token
         + (s->row->hk > 1 ? (s->row->hk - 1) * g->head : 0) + width;
}

/* ------------------------------------------------------------------------------------ the areas */

static int offset_for(const setup *s, int num_type)
{
    const int view = axis(s, CASE_AXIS_VIEW);
    const int bytes = num_types[num_type].bits < 8 ? 1 : num_types[num_type].bits / 8;
    const int offset = view == CASE_VIEW_OFF2   ? 2
                       : view == CASE_VIEW_OFF4 ? 4
                       : view == CASE_VIEW_OFF8 ? 8
                                                : 0;

    return offset % bytes ? 0 : offset;
}

enum { SPARSE_FROM = 64 << 20, SPARSE_PAGES = 20000 };

/* Few owned pages in a large pool: reserve the range, make only the owned pages (and page 0)
 * real. */
static bool is_sparse(const setup *s, int64_t bytes)
{
    const int64_t owned = s->page ? s->page_at[s->num_slices] : 0;

    return s->page && bytes > SPARSE_FROM && owned < SPARSE_PAGES && owned * 8 < s->num_pages;
}

/* The bytes of one page in an area of this geometry, made real. */
static bool back_page(area *a, const geometry *g, int type, int64_t id, int64_t elements)
{
    const int64_t first = (g->base + id * g->page) * num_types[type].bits / 8;
    const int64_t bytes = num_bytes(type, elements);

    return area_back(a, first, first + bytes > a->bytes ? a->bytes - first : bytes);
}

static bool back_pages(setup *s, area *a, const geometry *g, int type, int64_t elements)
{
    const int64_t n = s->page_at[s->num_slices];
    bool ok = back_page(a, g, type, 0, elements);

    for (int64_t i = 0; ok && i < n; i++)
        ok = back_page(a, g, type, s->page_ids[i], elements)
             && back_page(a, g, type, s->v_page_ids[i], elements);
    return ok
           || fail(s, "no memory for %lld pages of %lld elements", (long long)n,
                   (long long)elements);
}

/* An area for a tensor of the cache. `elements` is its whole size, `one` that of one page. */
static bool make_cache_area(setup *s, area *a, const geometry *g, int type, int64_t elements,
                            int64_t one)
{
    const int64_t bytes = num_bytes(type, elements);
    const bool sparse = is_sparse(s, bytes);

    if (!area_make(a, bytes, offset_for(s, type), type, num_poison(type, axis(s, CASE_AXIS_POISON)),
                   sparse))
        return fail(s, "no memory for %lld bytes of cache", (long long)bytes);
    return !sparse || back_pages(s, a, g, type, one);
}

static geometry scale_geometry(const setup *s, int width)
{
    return plain(s->row, s->page ? s->page : s->token_at[s->num_slices], width, false);
}

static int64_t page_extent(const setup *s, const geometry *g, int width)
{
    const int64_t tokens = s->page ? s->page : s->token_at[s->num_slices];

    return tokens
               ? (tokens - 1) * g->token + (s->row->hk > 1 ? (s->row->hk - 1) * g->head : 0) + width
               : 0;
}

static bool make_scale_area(setup *s, area *a, int type, int width)
{
    const geometry g = scale_geometry(s, width);

    return make_cache_area(s, a, &g, type, extent(s, &g, width), page_extent(s, &g, width));
}

static bool make_cache_areas(setup *s)
{
    const case_row *row = s->row;
    const int type = s->st->kv_type;
    const int width = row->dk - row->x.tail;
    int64_t k_all = extent(s, &s->kg, width), v_all = extent(s, &s->vg, row->dv);
    int64_t k_one = page_extent(s, &s->kg, width), v_one = page_extent(s, &s->vg, row->dv);

    if (s->joint) {
        k_all = v_all > k_all ? v_all : k_all;
        k_one = s->vg.base + v_one > k_one ? s->vg.base + v_one : k_one;
    }
    if (!make_cache_area(s, &s->k, &s->kg, type, k_all, k_one))
        return false;
    if (!s->joint && !row->mla && !make_cache_area(s, &s->v, &s->vg, type, v_all, v_one))
        return false;
    if (row->x.tail && !make_cache_area(s, &s->k_tail, &s->tg, type, extent(s, &s->tg, row->x.tail),
                                        page_extent(s, &s->tg, row->x.tail)))
        return false;
    if (row->token_head_scales && !make_scale_area(s, &s->k_scale, NUM_F32, 1))
        return false;
    if (row->token_head_scales && !row->mla && !make_scale_area(s, &s->v_scale, NUM_F32, 1))
        return false;
    if (s->st->block_type < 0)
        return true;
    if (!make_scale_area(s, &s->k_block, s->st->block_type, stored_blocks(s->st, row->dk)))
        return false;
    return row->mla || make_scale_area(s, &s->v_block, s->st->block_type, stored_blocks(s->st, row->dv));
}

/* ------------------------------------------------------------------------------------- the data */

/* Where token `slot` of page (or ragged start) `id` lies. */
static int64_t element_at(const geometry *g, int64_t id, int64_t slot, int head)
{
    return g->base + id * g->page + slot * g->token + (int64_t)head * g->head;
}

static void put_row(area *a, int type, int64_t at, const uint8_t *from, int64_t bytes)
{
    memcpy(a->base + at * num_types[type].bits / 8, from, (size_t)bytes);
}

/* A token's place: its slot in a page of K and one of V; ragged: page 0 of both. */
typedef struct place {
    int64_t k_page, v_page, slot;
} place;

static void put_scales(setup *s, int64_t token, const place *p, int h)
{
    const stored *st = s->st;
    const case_row *row = s->row;
    const int64_t from = token * row->hk + h;
    const int k_blocks = stored_blocks(st, row->dk), v_blocks = stored_blocks(st, row->dv);
    const geometry one = scale_geometry(s, 1), kb = scale_geometry(s, k_blocks),
                   vb = scale_geometry(s, v_blocks);

    if (row->token_head_scales) {
        num_store(NUM_F32, s->k_scale.base, element_at(&one, p->k_page, p->slot, h),
                  case_k_factor(row, token, h));
        if (!row->mla)
            num_store(NUM_F32, s->v_scale.base, element_at(&one, p->v_page, p->slot, h),
                      case_v_factor(row, token, h));
    }
    if (st->block_type >= 0) {
        const int64_t k_bytes = num_bytes(st->block_type, k_blocks), v_bytes = num_bytes(st->block_type, v_blocks);
        put_row(&s->k_block, st->block_type, element_at(&kb, p->k_page, p->slot, h), st->k_block + from * k_bytes, k_bytes);
        if (!row->mla)
            put_row(&s->v_block, st->block_type, element_at(&vb, p->v_page, p->slot, h), st->v_block + from * v_bytes, v_bytes);
    }
}

/* Where pages in the order "tiles" (fv_problem) have element d of the token in `slot`: a row of the
 * page and an element of it. */
static void tiled_place(bool is_key, int width, int64_t slot, int d, int64_t *row, int64_t *at)
{
    const int64_t word = 2 * d + slot % 2;      /* of the pair of tokens */

    *row = is_key ? slot / 16 * 16 + d % 32 / 2 : slot / 2 * 2 + word / width;
    *at = is_key ? d / 32 * 32 + slot % 16 * 2 + d % 2 : word % width;
}

static void put_tiled(setup *s, int64_t token, const place *p)
{
    const stored *st = s->st;
    const case_row *row = s->row;
    int64_t to, at;

    for (int h = 0; h < row->hk; h++) {
        const int64_t from = token * row->hk + h;
        for (int d = 0; d < row->dk; d++) {
            tiled_place(true, row->dk, p->slot, d, &to, &at);
            put_row(&s->k, st->kv_type, element_at(&s->kg, p->k_page, to, h) + at,
                    st->k + from * st->k_row + 2 * d, 2);
        }
        for (int d = 0; d < row->dv; d++) {
            tiled_place(false, row->dv, p->slot, d, &to, &at);
            put_row(s->joint ? &s->k : &s->v, st->kv_type,
                    element_at(&s->vg, p->v_page, to, h) + at, st->v + from * st->v_row + 2 * d, 2);
        }
        put_scales(s, token, p, h);
    }
}

static void put_token(setup *s, int64_t token, const place *p)
{
    const stored *st = s->st;
    const case_row *row = s->row;
    const int64_t tail = num_bytes(st->kv_type, row->x.tail), head = st->k_row - tail;

    for (int h = 0; h < row->hk; h++) {
        const int64_t from = token * row->hk + h;
        put_row(&s->k, st->kv_type, element_at(&s->kg, p->k_page, p->slot, h),
                st->k + from * st->k_row, head);
        if (tail)
            put_row(&s->k_tail, st->kv_type, element_at(&s->tg, p->k_page, p->slot, h),
                    st->k + from * st->k_row + head, tail);
        if (!row->mla)
            put_row(s->joint ? &s->k : &s->v, st->kv_type,
                    element_at(&s->vg, p->v_page, p->slot, h), st->v + from * st->v_row, st->v_row);
        put_scales(s, token, p, h);
    }
}

/* Keys that some row of their request sees. A key on a page of several requests is written if
 * one of them sees it. */
static void put_cache(setup *s)
{
    for (int i = 0; i < s->num_slices; i++)
        for (int64_t j = 0; j < keys_of(s, i); j++) {
            const int r = s->slices[i].request;
            const int64_t key = s->slices[i].lo + j, token = case_kv_token(s->row, r, key);
            if (!s->sh->seen[s->row->kv_base[r] + key])
                continue;
            place p = { .slot = s->page ? j % s->page : s->token_at[i] + j };
            if (s->page) {
                p.k_page = s->page_ids[s->page_at[i] + j / s->page];
                p.v_page = s->v_page_ids[s->page_at[i] + j / s->page];
            }
            if (s->row->x.tiled)
                put_tiled(s, token, &p);
            else
                put_token(s, token, &p);
        }
}

/* Rows of `width` elements per head, `skip` bytes into each stored one. */
static bool make_query_area(setup *s, area *a, int64_t stride, int width, int64_t skip)
{
    const case_row *row = s->row;
    const int type = s->st->q_type;
    const int64_t rows = s->total_rows + row->pad_rows;
    const int64_t elements = rows ? (rows - 1) * stride + (int64_t)row->hq * width : 0;
    int64_t at = 0;

    if (!area_make(a, num_bytes(type, elements), offset_for(s, type), type,
                   num_poison(type, axis(s, CASE_AXIS_POISON)), false))
        return fail(s, "no memory for Q");
    for (int i = 0; i < s->num_slices; i++)
        for (int64_t k = 0; k < rows_of(s, i); k++, at++)
            for (int h = 0; h < row->hq; h++) {
                const int64_t from =
                    (row->q_base[s->slices[i].request] + s->slices[i].row_lo + k) * row->hq + h;
                put_row(a, type, at * stride + (int64_t)h * width,
                        s->st->q + from * s->st->q_row + skip, num_bytes(type, width));
            }
    return true;
}

static bool make_queries(setup *s)
{
    const case_row *row = s->row;
    const int tail = row->x.tail, width = row->dk - tail;
    const bool slice_of_qkv = axis(s, CASE_AXIS_VIEW) == CASE_VIEW_QSLICE;

    s->q_stride = (row->hq + (slice_of_qkv ? 2 * (int64_t)row->hk : 0)) * width;
    return make_query_area(s, &s->q, s->q_stride, width, 0)
           && (!tail
               || make_query_area(s, &s->q_tail, (int64_t)row->hq * tail, tail,
                                  num_bytes(s->st->q_type, width)));
}

static bool make_outputs(setup *s)
{
    const case_row *row = s->row;
    const int type = s->st->q_type, view = axis(s, CASE_AXIS_VIEW);
    const int64_t rows = s->total_rows + row->pad_rows, width = (int64_t)row->hq * row->dv;

    s->o_stride = view == CASE_VIEW_OPAD ? ((3 * width + 1) / 2 + 7) / 8 * 8 : width;
    const int64_t elements = rows ? (rows - 1) * s->o_stride + width : 0;
    if (!area_make(&s->o, num_bytes(type, elements), offset_for(s, type), type,
                   num_encode(type, 12345), false))
        return fail(s, "no memory for O");
    if (axis(s, CASE_AXIS_LSE) == CASE_LSE_HT) {
        s->lse_lines = row->hq;
        s->lse_line = rows + row->lse_pad;
        s->lse_row = 1;
        s->lse_head = s->lse_line;
    } else {
        s->lse_lines = rows;
        s->lse_line = row->hq + row->lse_pad;
        s->lse_row = s->lse_line;
        s->lse_head = 1;
    }
    s->sums_stride = s->total_keys + row->lse_pad;
    if (row->x.key_sums
        && !area_make(&s->sums, num_bytes(NUM_F32, row->hk * s->sums_stride),
                      offset_for(s, NUM_F32), NUM_F32, num_encode(NUM_F32, 12345), false))
        return fail(s, "no memory for key sums");
    return area_make(&s->lse, num_bytes(NUM_F32, s->lse_lines * s->lse_line),
                     offset_for(s, NUM_F32), NUM_F32, num_encode(NUM_F32, 12345), false)
           || fail(s, "no memory for LSE");
}

bool setup_fetch(setup *s)
{
    return !gpu_on() || (gpu_sync() && area_pull(&s->o) && area_pull(&s->lse) && area_pull(&s->sums)
                         && area_pull(&s->work));
}

bool setup_reset(setup *s)
{
    const case_row *row = s->row;
    const int type = s->st->q_type;

    area_fill(&s->o, num_encode(type, 12345));
    area_fill(&s->lse, num_encode(NUM_F32, 12345));
    for (int64_t i = 0; i < s->total_rows; i++) {
        for (int64_t e = 0; e < (int64_t)row->hq * row->dv; e++)
            num_put(type, s->o.base, i * s->o_stride + e, num_poison(type, CASE_POISON_NAN));
        for (int h = 0; h < row->hq; h++)
            num_put(NUM_F32, s->lse.base, i * s->lse_row + h * s->lse_head,
                    num_poison(NUM_F32, CASE_POISON_NAN));
    }
    if (s->sums.map)
        area_fill(&s->sums, num_encode(NUM_F32, 12345));
    for (int h = 0; s->sums.map && h < row->hk; h++)
        for (int64_t j = 0; j < s->total_keys; j++)
            num_put(NUM_F32, s->sums.base, h * s->sums_stride + j,
                    num_poison(NUM_F32, CASE_POISON_NAN));
    if (s->work.map)
        area_fill(&s->work, num_poison(NUM_F32, axis(s, CASE_AXIS_POISON)));
    return area_push(&s->o) && area_push(&s->lse) && area_push(&s->sums) && area_push(&s->work);
}

/* --------------------------------------------------------------------------------- index arrays */

/* Values as i32, dense; or as i64, every second entry of an array whose other entries are traps. */
static bool make_index(setup *s, const int64_t *values, int64_t n, bool wide, fv_index *out)
{
    int32_t *narrow = wide ? NULL : setup_list(s, (size_t)n * sizeof *narrow);
    int64_t *spread = wide ? setup_list(s, (size_t)(2 * n) * sizeof *spread) : NULL;

    if (!narrow && !spread)
        return fail(s, "no memory for an index array");
    for (int64_t i = 0; i < n; i++)
        if (wide) {
            spread[2 * i] = values[i];
            spread[2 * i + 1] = -77777;
        } else {
            narrow[i] = (int32_t)values[i];
        }
    *out = wide ? fv_i64(spread, n) : fv_i32(narrow, n);
    if (wide)
        out->stride = 2;
    return true;
}

/* The same, also on the device by turns: then these are the values that kernels read. */
static bool make_live_index(setup *s, const int64_t *values, int64_t n, bool wide, fv_index *out)
{
    if (!make_index(s, values, n, wide, out))
        return false;
    if (gpu_on() && axis(s, CASE_AXIS_ROOM))
        out->device = setup_twin(s, (void *)out->host, (size_t)n * (wide ? 16 : 4));
    return !gpu_on() || !axis(s, CASE_AXIS_ROOM) || out->device
           || fail(s, "no memory for an index array");
}

static bool wide_indices(const setup *s)
{
    const int table = axis(s, CASE_AXIS_TABLE);

    return table == CASE_TABLE_CSR_LAST || table == CASE_TABLE_2D_ROWS || table == CASE_TABLE_SLACK;
}

/* The id array lies between guards. `ids` holds n entries. */
static bool make_ids(setup *s, area *a, const int64_t *ids, int64_t n, bool wide, fv_index *out)
{
    const int64_t bytes = n * (wide ? 16 : 4);
    const int32_t pad = (int32_t)case_pad_id(s->row, &s->way);

    if (!area_make(a, bytes, 0, NUM_F32, (uint32_t)pad, false))
        return fail(s, "no memory for page ids");
    for (int64_t i = 0; i < n; i++)
        if (wide)
            memcpy(a->base + 16 * i, &(int64_t[2]){ ids[i], pad }, 16);
        else
            memcpy(a->base + 4 * i, &(int32_t){ (int32_t)ids[i] }, 4);
    *out = wide ? fv_i64((const int64_t *)a->base, n) : fv_i32((const int32_t *)a->base, n);
    if (wide)
        out->stride = 2;
    if (gpu_on() && axis(s, CASE_AXIS_ROOM))
        out->device = area_address(a, 0);
    return true;
}

/* An id that no page has. Of 64 bits: also some whose low 32 bits alone would name a page. */
static int64_t bad_id(const setup *s, int64_t entry, bool wide)
{
    const int64_t ids[] = { s->num_pages, -1, INT32_MAX, INT32_MIN, (int64_t)1 << 32 | 1, -((int64_t)1 << 40) + 1 };

    return ids[entry % (wide ? 6 : 4)];
}

/* Slice i's page ids to `to`, bad ones in place of those that x_bad takes away. */
static void copy_ids(setup *s, int i, const int64_t *page_ids, bool wide, int64_t *to)
{
    const bool both = !s->row->x.v_ids, of_v = page_ids == s->v_page_ids;

    for (int64_t p = 0; p < pages_of(s, i); p++) {
        const bool bad = case_bad(s->row, s->slices[i].request, s->slices[i].lo + p * s->page) && (both || of_v == (p & 1));
        to[p] = bad ? bad_id(s, p, wide) : page_ids[s->page_at[i] + p];
        s->bad_entries += bad;
    }
}

/* Lays page ids out: slice i's at entry at[i]; what is between and behind holds the pad. */
static bool lay_ids(setup *s, area *a, const int64_t *page_ids, const int64_t *at, int64_t total,
                    bool wide, fv_index *out)
{
    int64_t *ids = malloc((size_t)(total + 1) * sizeof *ids);

    if (!ids)
        return fail(s, "no memory for a page table");
    for (int64_t i = 0; i < total; i++)
        ids[i] = case_pad_id(s->row, &s->way);
    for (int i = 0; i < s->num_slices; i++)
        copy_ids(s, i, page_ids, wide, ids + at[i]);
    const bool ok = make_ids(s, a, ids, total, wide, out);
    free(ids);
    return ok;
}

static bool lay_tables(setup *s, const int64_t *at, int64_t total, bool wide)
{
    return lay_ids(s, &s->ids, s->page_ids, at, total, wide, &s->batch.pages.ids)
           && (!s->row->x.v_ids
               || lay_ids(s, &s->v_ids, s->v_page_ids, at, total, wide, &s->batch.pages.v_ids));
}

static bool make_csr(setup *s, bool last)
{
    const int64_t n = s->num_slices, spare = last ? 0 : 1;
    int64_t *indptr = setup_list(s, (size_t)(n + 1) * sizeof *indptr);
    int64_t *fill = setup_list(s, (size_t)n * sizeof *fill);

    if (!indptr || !fill)
        return fail(s, "no memory for a page table");
    for (int i = 0; i < n; i++) {
        const int64_t pages = pages_of(s, i);
        indptr[i + 1] = indptr[i] + pages + spare;
        fill[i] = pages ? keys_of(s, i) - (pages - 1) * s->page : 0;
    }
    s->limits.max_pages = indptr[n];
    return make_index(s, indptr, n + 1, last, &s->batch.pages.indptr)
           && lay_tables(s, indptr, indptr[n] + 2, last)
           && (!last || make_index(s, fill, n, true, &s->batch.last_page_lengths));
}

/* Named: a table of two rows more than needed, its rows in another order, with gaps between
 * them. */
static bool make_2d(setup *s, bool named)
{
    const int64_t n = s->num_slices, lines = named ? n + 2 : n;
    int64_t *line = setup_list(s, (size_t)n * sizeof *line),
            *at = setup_list(s, (size_t)n * sizeof *at);
    int64_t width = 0;

    for (int i = 0; i < n; i++)
        width = pages_of(s, i) >= width ? pages_of(s, i) : width;
    if (s->row->table_width >= 0 && s->row->table_width < width)
        return fail(s, "table_width=%d is less than the %lld pages of a request",
                    s->row->table_width, (long long)width);
    if (!line || !at)
        return fail(s, "no memory for a page table");
    width = s->row->table_width >= 0 ? s->row->table_width : width + 1;
    const int64_t stride = named ? width + 3 : width;
    for (int i = 0; i < n; i++) {
        line[i] = named ? n + 1 - i : i;
        at[i] = line[i] * stride;
    }
    s->batch.pages.table_width = width;
    s->batch.pages.table_stride = stride;
    s->limits.max_pages = n * width;
    return lay_tables(s, at, lines * stride, named)
        && (!named || make_index(s, line, n, true, &s->batch.pages.table_rows));
}

static bool make_table(setup *s)
{
    s->batch.pages.page_size = s->page;
    s->batch.pages.num_pages = s->num_pages;
    switch (axis(s, CASE_AXIS_TABLE)) {
    case CASE_TABLE_CSR: return make_csr(s, false);
    case CASE_TABLE_CSR_LAST: return make_csr(s, true);
    case CASE_TABLE_2D: return make_2d(s, false);
    default: return make_2d(s, true);
    }
}

/* Rows, lengths, tables or offsets; positions where a slice does not hold all keys of its
 * request. */
static bool make_batch(setup *s)
{
    const int n = s->num_slices;
    const bool wide = wide_indices(s);
    int64_t *rows = setup_list(s, (size_t)(n + 1) * sizeof *rows),
            *lengths = setup_list(s, (size_t)n * sizeof *lengths);
    int64_t *first = setup_list(s, (size_t)n * sizeof *first);
    int64_t *positions = setup_list(s, (size_t)s->total_rows * sizeof *positions);
    bool decode = true;

    if (!rows || !lengths || !first || !positions)
        return fail(s, "no memory for a batch");
    for (int i = 0; i < n; i++) {
        rows[i + 1] = rows[i] + rows_of(s, i);
        lengths[i] = keys_of(s, i);
        first[i] = s->slices[i].lo + case_first_position(s->row, s->slices[i].request);
        decode = decode && rows_of(s, i) == 1;
        for (int64_t k = 0; k < rows_of(s, i); k++)
            positions[rows[i] + k] = setup_position(s, i, k);
    }
    s->batch.num_requests = n;
    if (!(decode && wide)
        && !make_index(s, rows, n + 1, wide, &s->batch.rows)) /* absent: one row each */
        return false;
    if ((!s->whole || s->row->x.first.n)
        && !make_index(s, first, n, wide, &s->batch.first_positions))
        return false;
    if (!s->whole && !make_index(s, positions, s->total_rows, wide, &s->batch.row_positions))
        return false;
    if (!s->page && !make_index(s, s->token_at, n + 1, wide, &s->batch.kv_indptr))
        return false;
    const int table = axis(s, CASE_AXIS_TABLE);
    if (table != CASE_TABLE_CSR_LAST && table != CASE_TABLE_TIGHT
        && !make_live_index(s, lengths, n, wide, &s->batch.lengths))
        return false;
    return !s->page || make_table(s);
}

/* ------------------------------------------------------------------------------ the descriptors */

static fv_tensor tensor(const area *a, int type, int64_t first)
{
    return (fv_tensor){ .data = area_address(a, first * num_types[type].bits / 8),
                        .dtype = num_types[type].name };
}

static void add_axis(fv_tensor *t, int64_t extent_, int64_t stride)
{
    t->shape[t->ndim] = extent_;
    t->stride[t->ndim++] = stride;
}

/* The cache's axes: pages and slots, or tokens; heads; and `width` unless it is 0. */
static fv_tensor cache_tensor(const setup *s, const area *a, const geometry *g, int type, int width)
{
    fv_tensor t = tensor(a, type, g->base);

    if (s->page) {
        add_axis(&t, s->num_pages, g->page);
        add_axis(&t, s->page, g->token);
    } else {
        add_axis(&t, s->token_at[s->num_slices], g->token);
    }
    add_axis(&t, s->row->hk, g->head);
    if (width)
        add_axis(&t, width, 1);
    return t;
}

static void make_tensors(setup *s)
{
    const case_row *row = s->row;
    const int type = s->st->q_type, width = row->dk - row->x.tail;
    const int64_t rows = s->total_rows + row->pad_rows;
    fv_tensors *t = &s->tensors;

    t->q = tensor(&s->q, type, 0);
    add_axis(&t->q, rows, s->q_stride);
    add_axis(&t->q, row->hq, width);
    add_axis(&t->q, width, 1);
    if (row->x.tail) {
        t->q_tail = tensor(&s->q_tail, type, 0);
        add_axis(&t->q_tail, rows, (int64_t)row->hq * row->x.tail);
        add_axis(&t->q_tail, row->hq, row->x.tail);
        add_axis(&t->q_tail, row->x.tail, 1);
        t->k_tail = cache_tensor(s, &s->k_tail, &s->tg, s->st->kv_type, row->x.tail);
    }
    t->o = tensor(&s->o, type, 0);
    add_axis(&t->o, rows, s->o_stride);
    add_axis(&t->o, row->hq, row->dv);
    add_axis(&t->o, row->dv, 1);
    t->lse = tensor(&s->lse, NUM_F32, 0);
    add_axis(&t->lse, rows, s->lse_row);
    add_axis(&t->lse, row->hq, s->lse_head);
    t->k = cache_tensor(s, &s->k, &s->kg, s->st->kv_type, width);
    if (!row->mla)
        t->v = cache_tensor(s, s->joint ? &s->k : &s->v, &s->vg, s->st->kv_type, row->dv);
}

static void add_run_arg(setup *s, const char *name, double number, const fv_tensor *t)
{
    fv_arg *a = &s->run_args[s->num_run_args++];

    *a = (fv_arg){ .name = name, .number = number };
    if (t) {
        s->arg_tensors[s->num_arg_tensors] = *t;
        a->tensor = &s->arg_tensors[s->num_arg_tensors++];
    }
}

/* One of the three kinds, or none. False: no memory. */
static bool make_scale(setup *s, const char *name, double number, const area *a, const char **kind)
{
    const geometry one = scale_geometry(s, 1);

    if (a->map) {
        const fv_tensor t = cache_tensor(s, a, &one, NUM_F32, 0);
        *kind = "token_head";
        add_run_arg(s, name, 0, &t);
    } else if (s->row->x.head_scales) {
        float *x = setup_list(s, (size_t)s->row->hk * sizeof *x);
        if (!x)
            return fail(s, "no memory for scales");
        for (int h = 0; h < s->row->hk; h++)
            x[h] = (float)(number * case_head_scale(h));
        const fv_tensor t = { .data = setup_twin(s, x, (size_t)s->row->hk * sizeof *x),
                              .dtype = "f32",
                              .ndim = 1,
                              .shape = { s->row->hk },
                              .stride = { 1 } };
        *kind = "head";
        add_run_arg(s, name, 0, &t);
    } else if (number != 1) {
        *kind = "tensor";
        add_run_arg(s, name, number, NULL);
    }
    return true;
}

static void make_block_scales(setup *s)
{
    const case_row *row = s->row;
    const int type = s->st->block_type, k_blocks = stored_blocks(s->st, row->dk), v_blocks = stored_blocks(s->st, row->dv);
    const geometry kb = scale_geometry(s, k_blocks), vb = scale_geometry(s, v_blocks);
    const fv_tensor kt = cache_tensor(s, &s->k_block, &kb, type, k_blocks);

    add_run_arg(s, "k_block_scale", 0, &kt);
    if (!row->mla) {
        const fv_tensor vt = cache_tensor(s, &s->v_block, &vb, type, v_blocks);
        add_run_arg(s, "v_block_scale", 0, &vt);
    }
}

static bool make_scales(setup *s)
{
    const case_row *row = s->row;

    if (!make_scale(s, "k_scale", row->k_scale, &s->k_scale, &s->problem.k_scale))
        return false;
    if (!row->mla && !make_scale(s, "v_scale", row->v_scale, &s->v_scale, &s->problem.v_scale))
        return false;
    if (s->st->block_type >= 0)
        make_block_scales(s);
    return true;
}

static void make_problem(setup *s)
{
    const case_row *row = s->row;
    const char *q = num_types[s->st->q_type].name, *kv = num_types[s->st->kv_type].name;

    s->problem =
        (fv_problem){ .q = q,
                      .k = kv,
                      .v = kv,
                      .o = q,
                      .num_q_heads = row->hq,
                      .num_kv_heads = row->hk,
                      .dim_qk = row->dk,
                      .dim_v = row->dv,
                      .scale = row->sm_scale,
                      .v_in_k = row->mla,
                      .qk_tail = row->x.tail,
                      .page_order = row->x.tiled ? "tiles" : NULL,
                      .lse_base2 = axis(s, CASE_AXIS_BASE) == CASE_BASE_2,
                      .alignment =
                          offset_for(s, s->st->kv_type) || offset_for(s, s->st->q_type) ? 1 : 0 };
}

/* Exactly what the batch needs, or more of everything. */
static void make_limits(setup *s)
{
    const int64_t more = axis(s, CASE_AXIS_ROOM) ? 7 : 0;
    fv_plan_desc *l = &s->limits;

    l->max_requests = s->num_slices + more;
    l->max_rows = s->total_rows + 2 * more;
    l->max_kv_tokens = s->total_keys + 1000 * more;
    if (s->page)
        l->max_pages += 100 * more;
    l->splits = axis(s, CASE_AXIS_SPLITS);
    l->invariant = axis(s, CASE_AXIS_INVARIANT) == 1;
    l->sharing = axis(s, CASE_AXIS_SHARING) == CASE_SHARING_FIND ? FV_SHARING_FIND : FV_SHARING_OFF;
}

slice whole_slice(const case_row *row, int request)
{
    return (slice){ request, 0, row->kv.at[request], 0, row->q.at[request] };
}

static bool is_whole(const slice *a, const case_row *row, int request)
{
    const slice b = whole_slice(row, request);

    return a->request == b.request && a->lo == b.lo && a->hi == b.hi && a->row_lo == b.row_lo
           && a->row_hi == b.row_hi;
}

static bool freeze_inputs(setup *s)
{
    area *const areas[] = { &s->q,       &s->q_tail,  &s->k,       &s->v,   &s->k_tail, &s->k_scale,
                            &s->v_scale, &s->k_block, &s->v_block, &s->ids, &s->v_ids };

    for (size_t i = 0; i < sizeof areas / sizeof *areas; i++)
        if (!area_push(areas[i]) || !area_freeze(areas[i]))
            return false;
    return true;
}

bool setup_make(setup *s, const shared *sh, const stored *st, const case_way *way,
                const slice *slices, int num_slices)
{
    const int page = way->axis[CASE_AXIS_PAGE];

    *s = (setup){ .sh = sh, .row = sh->row, .st = st, .way = *way, .slices = slices,
                  .num_slices = num_slices, .page = page > 0 ? page : 0 };
    s->whole = num_slices == s->row->num_requests;
    for (int i = 0; i < num_slices; i++) {
        s->total_rows += rows_of(s, i);
        s->total_keys += keys_of(s, i);
        s->whole = s->whole && is_whole(&slices[i], s->row, i);
    }
    if (!(s->page ? make_pages(s) : make_tokens(s)) || !make_geometry(s) || !make_cache_areas(s))
        return false;
    put_cache(s);
    if (!make_queries(s) || !make_outputs(s) || !make_batch(s))
        return false;
    make_problem(s);
    if (!make_scales(s))
        return false;
    make_tensors(s);
    make_limits(s);
    if (s->row->sm_scale == 0)
        return fail(s, "a scale of 0 means the default to the engine");
    if (!setup_variants(s))
        return false;
    s->problem.variants = s->uses;
    s->problem.num_variants = s->num_uses;
    s->batch.args = s->batch_args;
    s->batch.num_args = s->num_batch_args;
    s->tensors.args = s->run_args;
    s->tensors.num_args = s->num_run_args;
    return freeze_inputs(s) || fail(s, "memory cannot be made read-only");
}

void setup_free(setup *s)
{
    area *const areas[] = { &s->k,       &s->v,       &s->k_tail, &s->k_scale, &s->v_scale,
                            &s->k_block, &s->v_block, &s->q,      &s->q_tail,  &s->o,
                            &s->lse,     &s->sums,    &s->ids,    &s->v_ids,   &s->work };

    for (size_t i = 0; i < sizeof areas / sizeof *areas; i++)
        area_free(areas[i]);
    for (int i = 0; i < s->num_lists; i++)
        free(s->lists[i]);
    for (int i = 0; i < s->num_twins; i++)
        gpu_free(s->twins[i]);
    s->num_lists = s->num_twins = 0;
}
