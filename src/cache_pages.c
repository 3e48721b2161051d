/* SPDX-License-Identifier: Apache-2.0 */
/* cache_pages.c -- pages of the KV cache: free list, prefix tree, eviction queue. Each call is O(1) but for pruning, which is O(pages pruned),
 * and the walk to the deepest cached page. Pages here are indices; sequences and ids are in cache.c. */
#include "cache.h"

#include <assert.h>
#include <stdio.h>

/* ---- the free list and the queue ---- */

static void push_free(fv_cache *cache, int32_t page)
{
    cache->pages[page].next = cache->free_head;
    cache->free_head = page;
    cache->stats.free_pages++;
}

static void join_queue(fv_cache *cache, int32_t page)
{
    fv__cache_page *p = &cache->pages[page];
    p->let_go = ++cache->clock;
    p->next = FV__NO_PAGE;
    p->prev = cache->queue_tail;
    if (p->prev == FV__NO_PAGE) cache->queue_head = page;
    else cache->pages[p->prev].next = page;
    cache->queue_tail = page;
    cache->stats.cached_pages++;
}

static void leave_queue(fv_cache *cache, int32_t page)
{
    const fv__cache_page *p = &cache->pages[page];
    if (p->prev == FV__NO_PAGE) cache->queue_head = p->next;
    else cache->pages[p->prev].next = p->next;
    if (p->next == FV__NO_PAGE) cache->queue_tail = p->prev;
    else cache->pages[p->next].prev = p->prev;
    cache->stats.cached_pages--;
}

static void count_used(fv_cache *cache, int by)
{
    cache->stats.used_pages += by;
    cache->stats.peak_used_pages = fv__max64(cache->stats.peak_used_pages, cache->stats.used_pages);
}

void fv__cache_pages_init(fv_cache *cache)
{
    cache->free_head = cache->queue_head = cache->queue_tail = FV__NO_PAGE;
    for (uint64_t i = 0; i <= cache->slot_mask; i++) cache->slots[i] = FV__NO_PAGE;
    for (int32_t page = cache->num_pages; page-- > 0; push_free(cache, page))      /* the lowest id is given first */
        cache->pages[page] = (fv__cache_page){ .parent = FV__NO_PAGE, .first_child = FV__NO_PAGE };
}

/* ---- the tree ---- */

/* splitmix64's finisher: keys may be small integers. */
static uint64_t home(const fv_cache *cache, int32_t parent, uint64_t key)
{
    uint64_t x = key + ((uint64_t)(uint32_t)parent + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) & cache->slot_mask;
}

/* The slot that holds the node, or the empty one where it would go. */
static uint64_t slot_of(const fv_cache *cache, int32_t parent, uint64_t key)
{
    uint64_t i = home(cache, parent, key);
    for (; cache->slots[i] != FV__NO_PAGE; i = (i + 1) & cache->slot_mask) {
        const fv__cache_page *p = &cache->pages[cache->slots[i]];
        if (p->key == key && p->parent == parent) break;
    }
    return i;
}

int32_t fv__cache_find(const fv_cache *cache, int32_t parent, uint64_t key) { return cache->slots[slot_of(cache, parent, key)]; }

/* Closes the gap behind a removed entry: moves back each follower whose home does not lie between the gap and itself. */
static void empty_slot(fv_cache *cache, uint64_t gap)
{
    const uint64_t mask = cache->slot_mask;
    for (uint64_t i = (gap + 1) & mask; cache->slots[i] != FV__NO_PAGE; i = (i + 1) & mask) {
        const fv__cache_page *p = &cache->pages[cache->slots[i]];
        if (((i - home(cache, p->parent, p->key)) & mask) < ((i - gap) & mask)) continue;
        cache->slots[gap] = cache->slots[i];
        gap = i;
    }
    cache->slots[gap] = FV__NO_PAGE;
}

void fv__cache_insert(fv_cache *cache, int32_t page, int32_t parent, uint64_t key)
{
    fv__cache_page *p = &cache->pages[page];
    assert(!p->is_node && p->holders > 0);
    const uint64_t slot = slot_of(cache, parent, key);
    assert(cache->slots[slot] == FV__NO_PAGE);
    cache->slots[slot] = page;
    p->is_node = true;
    p->key = key;
    p->parent = parent;
    p->first_child = p->next_sibling = p->prev_sibling = FV__NO_PAGE;
    if (parent == FV__NO_PAGE) return;
    fv__cache_page *up = &cache->pages[parent];
    p->next_sibling = up->first_child;
    if (up->first_child != FV__NO_PAGE) cache->pages[up->first_child].prev_sibling = page;
    up->first_child = page;
}

/* A node without children leaves the tree. Returns 1 if that made it free. */
static int64_t remove_leaf(fv_cache *cache, int32_t page)
{
    fv__cache_page *p = &cache->pages[page];
    assert(p->first_child == FV__NO_PAGE);
    empty_slot(cache, slot_of(cache, p->parent, p->key));
    if (p->prev_sibling != FV__NO_PAGE) cache->pages[p->prev_sibling].next_sibling = p->next_sibling;
    else if (p->parent != FV__NO_PAGE) cache->pages[p->parent].first_child = p->next_sibling;
    if (p->next_sibling != FV__NO_PAGE) cache->pages[p->next_sibling].prev_sibling = p->prev_sibling;
    p->is_node = false;
    p->parent = FV__NO_PAGE;
    if (p->holders > 0) return 0;
    leave_queue(cache, page);
    push_free(cache, page);
    cache->stats.evicted_pages++;
    return 1;
}

int64_t fv__cache_prune(fv_cache *cache, int32_t page)
{
    int64_t freed = 0;
    for (int32_t node = page;;) {
        while (cache->pages[node].first_child != FV__NO_PAGE) node = cache->pages[node].first_child;
        const int32_t parent = cache->pages[node].parent;
        freed += remove_leaf(cache, node);
        if (node == page) return freed;
        node = parent;
    }
}

/* The cached child that was let go first. */
static int32_t oldest_cached_child(const fv_cache *cache, int32_t page)
{
    int32_t oldest = FV__NO_PAGE;
    for (int32_t c = cache->pages[page].first_child; c != FV__NO_PAGE; c = cache->pages[c].next_sibling)
        if (cache->pages[c].holders == 0 && (oldest == FV__NO_PAGE || cache->pages[c].let_go < cache->pages[oldest].let_go)) oldest = c;
    return oldest;
}

int64_t fv__cache_evict_one(fv_cache *cache)
{
    int32_t victim = cache->queue_head;
    assert(victim != FV__NO_PAGE);
    for (int32_t child = victim; child != FV__NO_PAGE; child = oldest_cached_child(cache, victim)) victim = child;
    return fv__cache_prune(cache, victim);
}

/* ---- holders ---- */

int32_t fv__cache_take(fv_cache *cache)
{
    if (cache->free_head == FV__NO_PAGE) fv__cache_evict_one(cache);
    const int32_t page = cache->free_head;
    cache->free_head = cache->pages[page].next;
    cache->stats.free_pages--;
    cache->pages[page].holders = 1;
    count_used(cache, 1);
    return page;
}

void fv__cache_hold(fv_cache *cache, int32_t page)
{
    if (cache->pages[page].holders++ > 0) return;
    leave_queue(cache, page);
    count_used(cache, 1);
}

void fv__cache_let_go(fv_cache *cache, int32_t page)
{
    assert(cache->pages[page].holders > 0);
    if (--cache->pages[page].holders > 0) return;
    count_used(cache, -1);
    if (cache->pages[page].is_node) join_queue(cache, page);
    else push_free(cache, page);
}
