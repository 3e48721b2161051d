/* SPDX-License-Identifier: Apache-2.0 */
/* cache_valid.c -- the invariants of cache.h, checked by number. For tests: O(pages + table), allocates its counters with malloc. */
#include "cache.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct checker {
    const fv_cache *cache;
    int32_t *seen;                      /* [num_pages] table entries that name the page */
    int broken;                         /* the first broken invariant */
    char *why;
    size_t size;
} checker;

__attribute__((format(printf, 3, 4))) static void broken(checker *c, int number, const char *format, ...)
{
    if (c->broken) return;
    c->broken = number;
    va_list list;
    va_start(list, format);
    vsnprintf(c->why, c->size, format, list);
    va_end(list);
}

static void check_entry(checker *c, int32_t s, const fv__cache_sequence *q, int32_t i)
{
    const fv_cache *cache = c->cache;
    const int32_t id = cache->table[(int64_t)s * cache->table_width + i];
    if (i < q->slid || i >= q->num_pages) {
        if (id != FV__NO_PAGE) broken(c, 4, "sequence %d: entry %d is %d and should be empty", s, i, id);
        return;
    }
    const int32_t page = id - cache->first_id;
    if (page < 0 || page >= cache->num_pages) {
        broken(c, 4, "sequence %d: entry %d is %d, not a page", s, i, id);
        return;
    }
    c->seen[page]++;
    const bool partial = (int64_t)(i + 1) * cache->page_size > q->length;
    if (partial && (cache->pages[page].holders != 1 || cache->pages[page].is_node))
        broken(c, 5, "sequence %d: page %d is partly filled, has %d holders%s", s, page, cache->pages[page].holders,
               cache->pages[page].is_node ? " and is a node" : "");
}

static void check_sequences(checker *c)
{
    const fv_cache *cache = c->cache;
    int64_t open = 0;
    for (int32_t s = 0; s < cache->max_sequences; s++) {
        const fv__cache_sequence *q = &cache->sequences[s];
        open += q->open;
        if (q->open && q->num_pages != fv__div_up(q->length, cache->page_size))
            broken(c, 4, "sequence %d: %d pages for %lld tokens", s, q->num_pages, (long long)q->length);
        if (!q->open && q->num_pages) broken(c, 4, "sequence %d is closed and has %d pages", s, q->num_pages);
        if (q->slid > q->num_pages || q->committed > q->num_pages) broken(c, 4, "sequence %d: slid or committed pages past its end", s);
        for (int32_t i = 0; i < cache->table_width; i++) check_entry(c, s, q, i);
    }
    if (open != cache->stats.num_sequences) broken(c, 4, "%lld sequences are open, counted %lld", (long long)open, (long long)cache->stats.num_sequences);
}

static void check_node(checker *c, int32_t page)
{
    const fv_cache *cache = c->cache;
    const fv__cache_page *p = &cache->pages[page];
    if (fv__cache_find(cache, p->parent, p->key) != page) broken(c, 3, "page %d is a node and is not found", page);
    if (p->parent != FV__NO_PAGE && !cache->pages[p->parent].is_node) broken(c, 3, "page %d: its parent %d is no node", page, p->parent);
    int32_t before = FV__NO_PAGE, steps = 0;
    for (int32_t child = p->first_child; child != FV__NO_PAGE && steps <= cache->num_pages; child = cache->pages[child].next_sibling, steps++) {
        const fv__cache_page *q = &cache->pages[child];
        if (!q->is_node || q->parent != page || q->prev_sibling != before) broken(c, 3, "page %d is not well linked as a child of %d", child, page);
        before = child;
    }
    if (steps > cache->num_pages) broken(c, 3, "the children of page %d are a ring", page);
}

/* Every node is in its parent's list, and no more nodes are in lists or in the hash table than there are. */
static void check_tree(checker *c)
{
    const fv_cache *cache = c->cache;
    int64_t nodes = 0, roots = 0, children = 0, hashed = 0;
    for (int32_t page = 0; page < cache->num_pages; page++) {
        const fv__cache_page *p = &cache->pages[page];
        if (!p->is_node) continue;
        nodes++;
        roots += p->parent == FV__NO_PAGE;
        check_node(c, page);
        if (c->broken) return;
        for (int32_t child = p->first_child; child != FV__NO_PAGE; child = cache->pages[child].next_sibling) children++;
    }
    for (uint64_t i = 0; i <= cache->slot_mask; i++) hashed += cache->slots[i] != FV__NO_PAGE;
    if (roots + children != nodes || hashed != nodes)
        broken(c, 3, "%lld nodes: %lld at the start of sequences, %lld children, %lld hashed", (long long)nodes, (long long)roots,
               (long long)children, (long long)hashed);
}

static void check_pages(checker *c)
{
    const fv_cache *cache = c->cache;
    int64_t held = 0, cached = 0, listed = 0, queued = 0;
    for (int32_t page = 0; page < cache->num_pages; page++) {
        const fv__cache_page *p = &cache->pages[page];
        if (p->holders != c->seen[page]) broken(c, 2, "page %d has %d holders, %d table entries name it", page, p->holders, c->seen[page]);
        held += p->holders > 0;
        cached += p->holders == 0 && p->is_node;
    }
    for (int32_t page = cache->free_head; page != FV__NO_PAGE && listed <= cache->num_pages; page = cache->pages[page].next, listed++)
        if (cache->pages[page].holders || cache->pages[page].is_node) broken(c, 1, "page %d is in the free list and in use", page);
    int32_t before = FV__NO_PAGE;
    for (int32_t page = cache->queue_head; page != FV__NO_PAGE && queued <= cache->num_pages; page = cache->pages[page].next, queued++) {
        const fv__cache_page *p = &cache->pages[page];
        if (p->holders || !p->is_node || p->prev != before) broken(c, 1, "page %d does not belong in the queue", page);
        if (before != FV__NO_PAGE && cache->pages[before].let_go >= p->let_go) broken(c, 1, "the queue is out of order at page %d", page);
        before = page;
    }
    const fv_cache_stats *t = &cache->stats;
    if (held != t->used_pages || cached != t->cached_pages || queued != cached || listed != t->free_pages ||
        held + cached + listed != cache->num_pages || cache->queue_tail != before)
        broken(c, 1, "%d pages: %lld held, %lld cached, %lld queued, %lld free; counted %lld, %lld, %lld", cache->num_pages, (long long)held,
               (long long)cached, (long long)queued, (long long)listed, (long long)t->used_pages, (long long)t->cached_pages,
               (long long)t->free_pages);
}

int fv__cache_is_valid(const fv_cache *cache, char *why, size_t size)
{
    checker c = { cache, calloc((size_t)cache->num_pages + 1, sizeof(int32_t)), 0, why, size };
    if (!c.seen) return 0;
    check_sequences(&c);
    check_tree(&c);
    check_pages(&c);
    free(c.seen);
    return c.broken;
}
