/* SPDX-License-Identifier: Apache-2.0 */
/* cache.c -- the public functions of the KV cache: sequences, their lengths and their rows of the page table. Pages, the tree and eviction are in
 * cache_pages.c; states, invariants and the order of eviction are told in cache.h.
 *
 * Each function checks everything first and only then changes anything. Cost: what changes, never what exists; commit also walks the keys from
 * the start when the page before the first new one is not in the tree. */
#include "cache.h"

#include "status.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* ---- creation ---- */

static fv_status check_range(const char *field, int64_t value, int64_t least, int64_t most, fv_error *err)
{
    if (value >= least && value <= most) return FV_OK;
    return fv__fail(err, FV_E_INVALID, field, value, value < least ? least : most, "%s is %lld; it must be in [%lld, %lld]", field, (long long)value,
                    (long long)least, (long long)most);
}

static fv_status check_desc(const fv_cache_desc *d, fv_error *err)
{
    FV_TRY(check_range("desc.page_size", d->page_size, 1, INT32_MAX, err));
    FV_TRY(check_range("desc.max_sequences", d->max_sequences, 1, INT32_MAX, err));
    FV_TRY(check_range("desc.num_pages", d->num_pages, 0, INT32_MAX, err));
    FV_TRY(check_range("desc.first_id", d->first_id, 0, INT32_MAX - d->num_pages, err));
    FV_TRY(check_range("desc.max_pages_per_sequence", d->max_pages_per_sequence, 1, INT32_MAX, err));
    return fv__check_reserved(d->reserved, FV__COUNT(d->reserved), "desc.reserved", err);
}

/* Places of the arrays in the block, and its size. */
typedef struct layout {
    size_t pages, slots, sequences, table, bytes;
    uint64_t num_slots;
} layout;

/* Adds `count` elements of `size` bytes on a 64-byte border; false: more bytes than an address can count. */
static bool add_array(layout *l, size_t *place, uint64_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow((size_t)count, size, &bytes)) return false;
    *place = l->bytes;
    return !__builtin_add_overflow(l->bytes, bytes, &l->bytes) && !__builtin_add_overflow(l->bytes, (size_t)63, &l->bytes) &&
           ((l->bytes &= ~(size_t)63), true);
}

static bool lay_out(const fv_cache_desc *d, layout *l)
{
    uint64_t slots = 2;
    while (slots < 2 * (uint64_t)d->num_pages) slots *= 2;
    *l = (layout){ .bytes = (sizeof(fv_cache) + 63) & ~(size_t)63, .num_slots = slots };
    return add_array(l, &l->pages, (uint64_t)d->num_pages, sizeof(fv__cache_page)) && add_array(l, &l->slots, slots, sizeof(int32_t)) &&
           add_array(l, &l->sequences, (uint64_t)d->max_sequences, sizeof(fv__cache_sequence)) &&
           add_array(l, &l->table, (uint64_t)d->max_sequences * (uint64_t)d->max_pages_per_sequence, sizeof(int32_t));
}

static void close_sequence(fv_cache *cache, int32_t sequence)
{
    cache->sequences[sequence] = (fv__cache_sequence){ .next_free = cache->free_sequence };
    cache->free_sequence = sequence;
}

static void init(fv_cache *cache, fv_ctx *ctx, const fv_cache_desc *d, const layout *l)
{
    char *base = (char *)cache;
    *cache = (fv_cache){
        .ctx = ctx, .bytes = l->bytes, .page_size = d->page_size, .num_pages = (int32_t)d->num_pages, .first_id = (int32_t)d->first_id,
        .max_sequences = d->max_sequences, .table_width = (int32_t)d->max_pages_per_sequence, .no_prefix = d->no_prefix,
        .pages = (fv__cache_page *)(base + l->pages), .slots = (int32_t *)(base + l->slots), .slot_mask = l->num_slots - 1,
        .sequences = (fv__cache_sequence *)(base + l->sequences), .table = (int32_t *)(base + l->table), .free_sequence = -1,
    };
    cache->stats.num_pages = d->num_pages;
    fv__cache_pages_init(cache);
    for (int32_t s = d->max_sequences; s-- > 0;) close_sequence(cache, s);
    memset(cache->table, 0xff, (size_t)d->max_sequences * (size_t)d->max_pages_per_sequence * sizeof(int32_t));    /* FV__NO_PAGE */
}

fv_status fv_cache_create(fv_ctx *ctx, const fv_cache_desc *desc, fv_cache **cache, fv_error *err)
{
    if (!ctx) return fv__fail(err, FV_E_INVALID, "ctx", 0, 0, "ctx is NULL");
    if (!desc) return fv__fail(err, FV_E_INVALID, "desc", 0, 0, "desc is NULL");
    if (!cache) return fv__fail(err, FV_E_INVALID, "cache", 0, 0, "the place for the cache is NULL");
    FV_TRY(check_desc(desc, err));
    layout l;
    const bool countable = lay_out(desc, &l) && l.bytes <= INT64_MAX;
    fv_cache *made = countable ? fv__ctx_alloc(ctx, l.bytes) : NULL;
    if (!made)
        return fv__fail(err, FV_E_NO_MEMORY, "cache", countable ? (int64_t)l.bytes : INT64_MAX, 0, "no memory for a cache of %lld pages and a table of %d x %lld entries",
                        (long long)desc->num_pages, desc->max_sequences, (long long)desc->max_pages_per_sequence);
    init(made, ctx, desc, &l);
    __atomic_fetch_add(&ctx->users, 1, __ATOMIC_SEQ_CST);
    *cache = made;
    return FV_OK;
}

fv_status fv_cache_destroy(fv_cache **cache)
{
    if (!cache || !*cache) return FV_OK;
    fv_ctx *ctx = (*cache)->ctx;
    fv__ctx_free(ctx, *cache, (*cache)->bytes);
    __atomic_fetch_sub(&ctx->users, 1, __ATOMIC_SEQ_CST);
    *cache = NULL;
    return FV_OK;
}

/* ---- what every function checks ---- */

static fv_status check_cache(const fv_cache *cache, fv_error *err)
{
    return cache ? FV_OK : fv__fail(err, FV_E_INVALID, "cache", 0, 0, "cache is NULL");
}

static fv_status check_sequence(const fv_cache *cache, int32_t sequence, fv_error *err)
{
    FV_TRY(check_cache(cache, err));
    if (sequence < 0 || sequence >= cache->max_sequences)
        return fv__fail(err, FV_E_INVALID, "sequence", sequence, cache->max_sequences, "sequence is %d; the cache has %d", sequence,
                        cache->max_sequences);
    if (!cache->sequences[sequence].open)
        return fv__fail(err, FV_E_INVALID, "sequence", sequence, cache->max_sequences, "sequence %d is not open", sequence);
    return FV_OK;
}

static fv_status check_keys(const uint64_t *page_keys, int64_t num_keys, fv_error *err)
{
    if (num_keys < 0) return fv__fail(err, FV_E_INVALID, "num_keys", num_keys, 0, "num_keys is %lld", (long long)num_keys);
    if (num_keys > 0 && !page_keys)
        return fv__fail(err, FV_E_INVALID, "page_keys", 0, num_keys, "page_keys is NULL and num_keys is %lld", (long long)num_keys);
    return FV_OK;
}

static fv_status check_given(const void *pointer, const char *field, fv_error *err)
{
    return pointer ? FV_OK : fv__fail(err, FV_E_INVALID, field, 0, 0, "%s is NULL", field);
}

/* Tokens that the sequence has: 0 .. its length, and not before what it has given back. */
static fv_status check_tokens(const char *field, int64_t tokens, int64_t least, const fv__cache_sequence *s, fv_error *err)
{
    if (tokens < least)
        return fv__fail(err, FV_E_INVALID, field, tokens, least, "%s is %lld; the sequence holds tokens from %lld on", field, (long long)tokens,
                        (long long)least);
    if (tokens > s->length)
        return fv__fail(err, FV_E_INVALID, field, tokens, s->length, "%s is %lld; the sequence has %lld tokens", field, (long long)tokens,
                        (long long)s->length);
    return FV_OK;
}

static fv_status full_pool(const fv_cache *cache, const char *field, int64_t needed, int64_t missing, fv_error *err)
{
    return fv__fail(err, FV_E_CAPACITY, field, missing, cache->num_pages,
                    "%lld pages are needed and %lld are missing: of %d, %lld are held by %lld sequences; release one or give the pool more pages",
                    (long long)needed, (long long)missing, cache->num_pages, (long long)cache->stats.used_pages,
                    (long long)cache->stats.num_sequences);
}

static fv_status check_free_sequence(const fv_cache *cache, fv_error *err)
{
    if (cache->free_sequence >= 0) return FV_OK;
    return fv__fail(err, FV_E_CAPACITY, "desc.max_sequences", (int64_t)cache->max_sequences + 1, cache->max_sequences,
                    "all %d sequences are open; release one or raise desc.max_sequences", cache->max_sequences);
}

/* ---- table rows ---- */

static int32_t *row_of(const fv_cache *cache, int32_t sequence) { return cache->table + (int64_t)sequence * cache->table_width; }
static int32_t page_at(const fv_cache *cache, int32_t sequence, int32_t i) { return row_of(cache, sequence)[i] - cache->first_id; }

static int32_t open_sequence(fv_cache *cache)
{
    const int32_t sequence = cache->free_sequence;
    cache->free_sequence = cache->sequences[sequence].next_free;
    cache->sequences[sequence] = (fv__cache_sequence){ .open = true };
    cache->stats.num_sequences++;
    return sequence;
}

static void append_page(fv_cache *cache, int32_t sequence, int32_t page)
{
    row_of(cache, sequence)[cache->sequences[sequence].num_pages++] = cache->first_id + page;
}

/* Lets go of entries [first, last), the last of them first: of pages that are let go together the deepest is evicted first. */
static void drop_pages(fv_cache *cache, int32_t sequence, int32_t first, int32_t last)
{
    int32_t *row = row_of(cache, sequence);
    for (int32_t i = last; i-- > first; row[i] = FV__NO_PAGE)
        if (row[i] != FV__NO_PAGE) fv__cache_let_go(cache, row[i] - cache->first_id);
}

/* ---- finding prefixes ---- */

/* The node that the first `count` keys lead to and how many of them were found. */
static int32_t walk(const fv_cache *cache, const uint64_t *page_keys, int64_t count, int64_t *found)
{
    int32_t node = FV__NO_PAGE;
    for (*found = 0; *found < count; ++*found) {
        const int32_t next = fv__cache_find(cache, node, page_keys[*found]);
        if (next == FV__NO_PAGE) break;
        node = next;
    }
    return node;
}

fv_status fv_cache_match(const fv_cache *cache, const uint64_t *page_keys, int64_t num_keys, int64_t *tokens, fv_error *err)
{
    FV_TRY(check_cache(cache, err));
    FV_TRY(check_keys(page_keys, num_keys, err));
    FV_TRY(check_given(tokens, "tokens", err));
    int64_t found;
    walk(cache, page_keys, num_keys, &found);
    *tokens = found * cache->page_size;
    return FV_OK;
}

fv_status fv_cache_open(fv_cache *cache, const uint64_t *page_keys, int64_t num_keys, int64_t max_tokens, int32_t *sequence, int64_t *tokens,
                        fv_error *err)
{
    FV_TRY(check_cache(cache, err));
    FV_TRY(check_keys(page_keys, num_keys, err));
    FV_TRY(check_range("max_tokens", max_tokens, 0, INT64_MAX, err));
    FV_TRY(check_given(sequence, "sequence", err));
    FV_TRY(check_given(tokens, "tokens", err));
    FV_TRY(check_free_sequence(cache, err));

    const int32_t id = open_sequence(cache);
    fv__cache_sequence *s = &cache->sequences[id];
    const int64_t most = fv__min64(num_keys, max_tokens / cache->page_size);
    for (int32_t node = FV__NO_PAGE; s->num_pages < most;) {
        node = fv__cache_find(cache, node, page_keys[s->num_pages]);
        if (node == FV__NO_PAGE) break;
        fv__cache_hold(cache, node);
        append_page(cache, id, node);
    }
    s->committed = s->num_pages;
    s->length = (int64_t)s->num_pages * cache->page_size;
    cache->stats.hit_tokens += s->length;
    cache->stats.asked_tokens += num_keys * cache->page_size;
    *sequence = id;
    *tokens = s->length;
    return FV_OK;
}

/* ---- growing ---- */

fv_status fv_cache_extend(fv_cache *cache, int32_t sequence, int64_t tokens, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    fv__cache_sequence *s = &cache->sequences[sequence];
    FV_TRY(check_range("tokens", tokens, 0, INT64_MAX - s->length - cache->page_size, err));
    const int64_t pages = fv__div_up(s->length + tokens, cache->page_size), needed = pages - s->num_pages;
    if (pages > cache->table_width)
        return fv__fail(err, FV_E_CAPACITY, "desc.max_pages_per_sequence", pages - cache->table_width, cache->table_width,
                        "%lld tokens need %lld pages; a sequence may have %d", (long long)(s->length + tokens), (long long)pages, cache->table_width);
    const int64_t missing = needed - fv__cache_available(cache);
    if (missing > 0) return full_pool(cache, "tokens", needed, missing, err);

    for (int64_t i = 0; i < needed; i++) append_page(cache, sequence, fv__cache_take(cache));
    s->length += tokens;
    return FV_OK;
}

/* Is there a tree path to the page before entry `i`, and where does it end? */
static bool find_parent(const fv_cache *cache, int32_t sequence, int32_t i, const uint64_t *page_keys, int32_t *parent)
{
    *parent = FV__NO_PAGE;
    if (i == 0) return true;
    const int32_t entry = row_of(cache, sequence)[i - 1];
    if (entry != FV__NO_PAGE && cache->pages[entry - cache->first_id].is_node) {
        *parent = entry - cache->first_id;
        return true;
    }
    int64_t found;                      /* it has been given back, or is a private copy of a page that is in the tree */
    *parent = walk(cache, page_keys, i, &found);
    return found == i;
}

static void commit_page(fv_cache *cache, int32_t sequence, int32_t i, const uint64_t *page_keys)
{
    const int32_t entry = row_of(cache, sequence)[i];
    if (entry == FV__NO_PAGE || cache->pages[entry - cache->first_id].is_node) return;
    int32_t parent;
    if (!find_parent(cache, sequence, i, page_keys, &parent)) return;       /* unreachable: stays private */
    if (fv__cache_find(cache, parent, page_keys[i]) != FV__NO_PAGE) return; /* another sequence was first: stays private */
    fv__cache_insert(cache, entry - cache->first_id, parent, page_keys[i]);
}

fv_status fv_cache_commit(fv_cache *cache, int32_t sequence, int64_t tokens, const uint64_t *page_keys, int64_t num_keys, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    fv__cache_sequence *s = &cache->sequences[sequence];
    FV_TRY(check_keys(page_keys, num_keys, err));
    FV_TRY(check_tokens("tokens", tokens, 0, s, err));
    if (cache->no_prefix) return FV_OK;
    for (const int64_t last = fv__min64(tokens / cache->page_size, num_keys); s->committed < last; s->committed++)
        commit_page(cache, sequence, s->committed, page_keys);
    return FV_OK;
}

fv_status fv_cache_fork(fv_cache *cache, int32_t sequence, int32_t *child, fv_copy *copy, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    FV_TRY(check_given(child, "child", err));
    FV_TRY(check_given(copy, "copy", err));
    FV_TRY(check_free_sequence(cache, err));
    const fv__cache_sequence *from = &cache->sequences[sequence];
    const bool partial = from->length % cache->page_size != 0;
    if (partial && fv__cache_available(cache) == 0) return full_pool(cache, "sequence", 1, 1, err);

    const int32_t id = open_sequence(cache), full = from->num_pages - partial;
    const int32_t *row = row_of(cache, sequence);
    for (int32_t i = from->slid; i < full; i++) fv__cache_hold(cache, row[i] - cache->first_id);
    memcpy(row_of(cache, id), row, (size_t)full * sizeof *row);
    cache->sequences[id] = *from;
    cache->sequences[id].num_pages = full;
    *copy = (fv_copy){ -1, -1 };
    if (partial) {
        append_page(cache, id, fv__cache_take(cache));
        *copy = (fv_copy){ row[full], row_of(cache, id)[full] };
    }
    *child = id;
    return FV_OK;
}

/* ---- shrinking ---- */

fv_status fv_cache_slide(fv_cache *cache, int32_t sequence, int64_t first, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    fv__cache_sequence *s = &cache->sequences[sequence];
    FV_TRY(check_tokens("first", first, 0, s, err));
    const int32_t slid = (int32_t)(first / cache->page_size);
    if (slid <= s->slid) return FV_OK;
    drop_pages(cache, sequence, s->slid, slid);
    s->slid = slid;
    return FV_OK;
}

/* Entry `i` keeps some of its tokens and will be written to again: its page must have one holder and be no node. */
static void make_private(fv_cache *cache, int32_t sequence, int32_t i, fv_copy *copy)
{
    const int32_t page = page_at(cache, sequence, i);
    const fv__cache_page *p = &cache->pages[page];
    if (p->holders == 1 && !p->is_node) return;
    if (p->holders == 1 && fv__cache_available(cache) == 0) {
        fv__cache_prune(cache, page);   /* nobody else holds it: better forgotten than refused */
        return;
    }
    const int32_t own = fv__cache_take(cache);
    *copy = (fv_copy){ cache->first_id + page, cache->first_id + own };
    row_of(cache, sequence)[i] = copy->dst;
    fv__cache_let_go(cache, page);
}

/* Would dropping entries [first, last) let go of a page for good? */
static bool any_sole_holder(const fv_cache *cache, int32_t sequence, int32_t first, int32_t last)
{
    for (int32_t i = first; i < last; i++)
        if (cache->pages[page_at(cache, sequence, i)].holders == 1) return true;
    return false;
}

fv_status fv_cache_truncate(fv_cache *cache, int32_t sequence, int64_t tokens, fv_copy *copy, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    fv__cache_sequence *s = &cache->sequences[sequence];
    FV_TRY(check_tokens("tokens", tokens, (int64_t)s->slid * cache->page_size, s, err));
    FV_TRY(check_given(copy, "copy", err));
    const int32_t keep = (int32_t)fv__div_up(tokens, cache->page_size), full = (int32_t)(tokens / cache->page_size);
    const bool cut = keep > full && tokens < s->length;         /* through page `full` */
    if (cut && fv__cache_available(cache) == 0 && cache->pages[page_at(cache, sequence, full)].holders > 1 &&
        !any_sole_holder(cache, sequence, keep, s->num_pages))
        return full_pool(cache, "sequence", 1, 1, err);

    drop_pages(cache, sequence, keep, s->num_pages);
    *copy = (fv_copy){ -1, -1 };
    if (cut) make_private(cache, sequence, full, copy);
    s->num_pages = keep;
    s->length = tokens;
    s->committed = fv__min32(s->committed, full);
    return FV_OK;
}

fv_status fv_cache_release(fv_cache *cache, int32_t sequence, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    drop_pages(cache, sequence, 0, cache->sequences[sequence].num_pages);
    close_sequence(cache, sequence);
    cache->stats.num_sequences--;
    return FV_OK;
}

fv_status fv_cache_evict(fv_cache *cache, int64_t pages, int64_t *freed, fv_error *err)
{
    FV_TRY(check_cache(cache, err));
    FV_TRY(check_range("pages", pages, 0, INT64_MAX, err));
    FV_TRY(check_given(freed, "freed", err));
    for (*freed = 0; *freed < pages && cache->stats.cached_pages > 0;) *freed += fv__cache_evict_one(cache);
    return FV_OK;
}

/* ---- questions ---- */

fv_status fv_cache_length(const fv_cache *cache, int32_t sequence, int64_t *tokens, fv_error *err)
{
    FV_TRY(check_sequence(cache, sequence, err));
    FV_TRY(check_given(tokens, "tokens", err));
    *tokens = cache->sequences[sequence].length;
    return FV_OK;
}

fv_status fv_cache_pages(const fv_cache *cache, const int32_t *sequences, int64_t count, fv_pages *pages, fv_error *err)
{
    FV_TRY(check_cache(cache, err));
    FV_TRY(check_range("count", count, 0, INT32_MAX, err));
    if (count > 0) FV_TRY(check_given(sequences, "sequences", err));
    FV_TRY(check_given(pages, "pages", err));
    for (int64_t i = 0; i < count; i++) FV_TRY(check_sequence(cache, sequences[i], err));
    *pages = (fv_pages){
        .page_size = cache->page_size, .num_pages = (int64_t)cache->first_id + cache->num_pages,
        .ids = fv_i32(cache->table, (int64_t)cache->max_sequences * cache->table_width), .table_rows = fv_i32(sequences, count),
        .table_width = cache->table_width, .table_stride = cache->table_width,
    };
    return FV_OK;
}

fv_status fv_cache_query(const fv_cache *cache, fv_cache_stats *out, fv_error *err)
{
    FV_TRY(check_cache(cache, err));
    FV_TRY(check_given(out, "out", err));
    *out = cache->stats;
    return FV_OK;
}
