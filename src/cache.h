/* SPDX-License-Identifier: Apache-2.0 */
/* cache.h -- the KV cache's bookkeeping: who holds which page, and which prefixes can be found again. It holds no tensor and knows no device.
 *
 * Nouns
 *   page      index in the pool, [0, num_pages); the id that the caller sees is first_id + page
 *   holder    a sequence whose table names the page. A page may have many
 *   node      a page that the prefix tree knows: full, written, and named by the caller's key. One page is one node: its parent is the page
 *             before it (NONE: the start of a sequence), and (parent, key) finds it. Keys need only tell the children of one parent apart
 *   sequence  a path of pages and its length in tokens; also a row of the page table
 *
 *                 take                      commit + last holder gone
 *        free  -------->  held by 1..n  ---------------------------->  cached
 *          ^                |      ^                                     |  |
 *          |                |      +------------ open finds it ----------+  |
 *          +----------------+                                               |
 *          |   last holder gone, not in the tree                            |
 *          +----------------------------------------------------------------+   evict, least recently let go first
 *
 * Invariants (fv__cache_is_valid checks them by number)
 *   (1) a page is free (in the free list), cached (in the tree, no holder, in the queue) or held (in neither list)
 *   (2) a page's holders are exactly the table entries of open sequences that name it
 *   (3) the tree is one: a node's parent is a node or NONE, it is among that parent's children, and (parent, key) finds it
 *   (4) a sequence of `length` tokens has ceil(length / page_size) entries: the first `slid` are NO_PAGE, the others name pages; behind them
 *       the row is NO_PAGE
 *   (5) a partly filled last page has one holder and is no node: whoever writes to it disturbs nobody
 *   (6) nothing is allocated after creation, and a call that fails has changed nothing
 *
 * Eviction. The queue holds cached pages in the order in which their last holder let them go; of those let go in one call, the page furthest from
 * the start goes first. So children normally leave before their parents. Where they do not (a sliding window gave back the start of a path whose
 * end is still held, or two sequences wrote the same prefix twice), the walk goes down to the deepest cached page, oldest child first, and takes that:
 * the longest prefix stays findable. Held pages below a page that is taken leave the tree: no path from the start finds them any more.
 *
 * A sequence's pages never change under it: a page that another sequence has already put in the tree under the same key stays a private copy.
 * A {src, dst} that fork or truncate answers must be copied before the next call that takes pages: src may be free by then.
 */
#ifndef FV__CACHE_H
#define FV__CACHE_H

#include "ctx.h"

#define FV__NO_PAGE (-1)

typedef struct fv__cache_page {
    uint64_t key;                       /* of a node */
    int64_t let_go;                     /* cached: when (cache->clock) */
    int32_t holders;
    bool is_node;
    int32_t parent, first_child, next_sibling, prev_sibling;    /* of a node */
    int32_t next, prev;                 /* in the free list (next only) or in the queue */
} fv__cache_page;

typedef struct fv__cache_sequence {
    int64_t length;                     /* tokens */
    int32_t num_pages;                  /* table entries in use, slid ones included */
    int32_t slid;                       /* pages given back at the start */
    int32_t committed;                  /* pages that fv_cache_commit has dealt with */
    bool open;
    int32_t next_free;
} fv__cache_sequence;

struct fv_cache {
    fv_ctx *ctx;
    size_t bytes;                       /* of this block, which holds everything below */
    int32_t page_size, num_pages, first_id, max_sequences, table_width;
    bool no_prefix;

    fv__cache_page *pages;              /* [num_pages] */
    int32_t free_head;
    int32_t queue_head, queue_tail;     /* cached pages, next to be evicted first */
    int64_t clock;
    int32_t *slots;                     /* hash table of nodes: page or NO_PAGE, linear probing */
    uint64_t slot_mask;                 /* size - 1; at least twice as many slots as pages */

    fv__cache_sequence *sequences;      /* [max_sequences] */
    int32_t free_sequence;
    int32_t *table;                     /* [max_sequences][table_width] ids as the caller sees them, NO_PAGE */
    fv_cache_stats stats;
};

/* ---- pages and the tree (cache_pages.c) ---- */

void fv__cache_pages_init(fv_cache *cache);

/* Pages that fv__cache_take can give: free and cached ones. */
static inline int64_t fv__cache_available(const fv_cache *cache) { return cache->stats.free_pages + cache->stats.cached_pages; }

int32_t fv__cache_take(fv_cache *cache);                /* a page with one holder, evicting if it must; something must be available */
void fv__cache_hold(fv_cache *cache, int32_t page);     /* one more holder of a held or cached page */
void fv__cache_let_go(fv_cache *cache, int32_t page);   /* one holder less: it may become cached or free */
int64_t fv__cache_evict_one(fv_cache *cache);           /* pages that became free, >= 1; something must be cached */

int32_t fv__cache_find(const fv_cache *cache, int32_t parent, uint64_t key);    /* FV__NO_PAGE: not there */
void fv__cache_insert(fv_cache *cache, int32_t page, int32_t parent, uint64_t key);     /* a held page that is no node becomes one */
int64_t fv__cache_prune(fv_cache *cache, int32_t page); /* the node and all below it leave the tree; how many became free */

/* The number of the first invariant that is broken, 0: none; reason in words. For tests (cache_valid.c). */
int fv__cache_is_valid(const fv_cache *cache, char *why, size_t size);

#endif
