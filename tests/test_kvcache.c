/* SPDX-License-Identifier: Apache-2.0 */
/* test_kvcache.c -- the KV cache: directed cases, and random operations against a naive model.
 *
 * The random test keeps what a serving engine would keep beside the cache: the tokens of every sequence, and the memory of every page. It writes new
 * tokens through the page table, makes the copies that it is asked for, and reads everything back: a page that is shared, reused or evicted
 * wrongly shows as a wrong token. The model beside it predicts who holds what, what is found, what is evicted and what is refused; it scans
 * where the cache has lists. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cache.h"
#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fv_ctx *ctx;
static fv_error err;

static int open_ctx(void **state)
{
    (void)state;
    return fv_open(&(fv_open_desc){ .device = "cpu", .num_threads = 1 }, &ctx, NULL) != FV_OK;
}

/* Closing fails while anything of the context is alive: no test may leave a cache behind. */
static int close_ctx(void **state)
{
    (void)state;
    return fv_close(&ctx) != FV_OK;
}

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        if ((call) != FV_OK) fail_msg("%s: %s", #call, err.text);                                                      \
    } while (0)

static void check_valid(const fv_cache *cache)
{
    char why[200];
    const int broken = fv__cache_is_valid(cache, why, sizeof why);
    if (broken) fail_msg("invariant %d: %s", broken, why);
}

static fv_cache *make(int32_t page_size, int64_t num_pages, int32_t max_sequences, int64_t width)
{
    fv_cache *cache = NULL;
    OK(fv_cache_create(ctx, &(fv_cache_desc){ .page_size = page_size, .num_pages = num_pages, .max_sequences = max_sequences,
                                              .max_pages_per_sequence = width }, &cache, &err));
    check_valid(cache);
    return cache;
}

static void done(fv_cache *cache)
{
    check_valid(cache);
    OK(fv_cache_destroy(&cache));
    assert_null(cache);
}

/* A new sequence of `tokens` tokens, all of them committed under `keys`. */
static int32_t fill(fv_cache *cache, const uint64_t *keys, int64_t num_keys, int64_t tokens)
{
    int32_t s = -1;
    int64_t had = -1;
    OK(fv_cache_open(cache, keys, num_keys, tokens, &s, &had, &err));
    OK(fv_cache_extend(cache, s, tokens - had, &err));
    OK(fv_cache_commit(cache, s, tokens, keys, num_keys, &err));
    return s;
}

static int64_t match(const fv_cache *cache, const uint64_t *keys, int64_t num_keys)
{
    int64_t tokens = -1;
    OK(fv_cache_match(cache, keys, num_keys, &tokens, &err));
    return tokens;
}

static int32_t entry(const fv_cache *cache, int32_t sequence, int64_t i) { return cache->table[(int64_t)sequence * cache->table_width + i]; }

static fv_cache_stats stats(const fv_cache *cache)
{
    fv_cache_stats t;
    OK(fv_cache_query(cache, &t, &err));
    return t;
}

/* ---- directed ---- */

static void prefixes_are_found_again(void **state)
{
    (void)state;
    fv_cache *cache = make(16, 32, 4, 8);
    const uint64_t a[] = { 1, 2, 3, 4 }, b[] = { 1, 2, 9 }, c[] = { 2, 3 };
    const int32_t s = fill(cache, a, 4, 70);
    assert_int_equal(match(cache, a, 4), 64);                   /* while it lives */
    assert_int_equal(match(cache, b, 3), 32);
    assert_int_equal(match(cache, c, 2), 0);                    /* not from the middle */
    OK(fv_cache_release(cache, s, &err));
    assert_int_equal(match(cache, a, 4), 64);                   /* and after */
    assert_int_equal(stats(cache).cached_pages, 4);
    assert_int_equal(stats(cache).free_pages, 28);              /* the partly filled page is not kept */

    int32_t t;
    int64_t tokens;
    OK(fv_cache_open(cache, a, 4, 63, &t, &tokens, &err));      /* whole pages within max_tokens */
    assert_int_equal(tokens, 48);
    assert_int_equal(stats(cache).used_pages, 3);
    assert_int_equal(stats(cache).hit_tokens, 48);
    assert_int_equal(stats(cache).asked_tokens, 64 + 64);
    OK(fv_cache_length(cache, t, &tokens, &err));
    assert_int_equal(tokens, 48);
    OK(fv_cache_release(cache, t, &err));
    done(cache);
}

static void data_is_found_only_after_commit(void **state)
{
    (void)state;
    fv_cache *cache = make(4, 8, 2, 8);
    const uint64_t keys[] = { 1, 2, 3 };
    int32_t s;
    int64_t tokens;
    OK(fv_cache_open(cache, keys, 3, 12, &s, &tokens, &err));
    OK(fv_cache_extend(cache, s, 12, &err));
    assert_int_equal(match(cache, keys, 3), 0);
    OK(fv_cache_commit(cache, s, 7, keys, 3, &err));
    assert_int_equal(match(cache, keys, 3), 4);
    OK(fv_cache_commit(cache, s, 12, keys, 2, &err));           /* the third page has no key yet: private */
    assert_int_equal(match(cache, keys, 3), 8);
    OK(fv_cache_commit(cache, s, 12, keys, 3, &err));
    assert_int_equal(match(cache, keys, 3), 12);
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

/* 64 parents, each with a child of the same key: the hash table is half full, so many of them are neighbours in it. */
static void a_key_means_something_only_below_its_parent(void **state)
{
    (void)state;
    enum { PARENTS = 64 };
    fv_cache *cache = make(1, 2 * PARENTS, PARENTS + 1, 4);
    for (uint64_t i = 0; i < PARENTS; i++) assert_int_equal(fill(cache, (const uint64_t[]){ i, 777 }, 2, 2), i);
    assert_int_equal(stats(cache).free_pages, 0);
    for (uint64_t i = 0; i < PARENTS; i++) {
        const int32_t again = fill(cache, (const uint64_t[]){ i, 777 }, 2, 2);
        for (int j = 0; j < 2; j++) assert_int_equal(entry(cache, again, j), entry(cache, (int32_t)i, j));
        OK(fv_cache_release(cache, again, &err));
    }
    assert_int_equal(match(cache, (const uint64_t[]){ 777 }, 1), 0);
    done(cache);
}

static void the_same_prefix_written_twice_stays_two_copies(void **state)
{
    (void)state;
    fv_cache *cache = make(2, 16, 4, 8);
    const uint64_t a[] = { 1, 2, 3 }, b[] = { 1, 2, 4, 5 };
    int32_t s, t;
    int64_t tokens;
    OK(fv_cache_open(cache, a, 3, 6, &s, &tokens, &err));
    OK(fv_cache_open(cache, b, 4, 8, &t, &tokens, &err));
    OK(fv_cache_extend(cache, s, 6, &err));
    OK(fv_cache_extend(cache, t, 8, &err));
    const int32_t before = entry(cache, t, 0);
    OK(fv_cache_commit(cache, s, 6, a, 3, &err));
    OK(fv_cache_commit(cache, t, 8, b, 4, &err));
    assert_int_equal(entry(cache, t, 0), before);
    assert_int_not_equal(entry(cache, t, 0), entry(cache, s, 0));
    assert_int_equal(match(cache, b, 4), 8);                    /* its own pages hang below the first copy */
    OK(fv_cache_release(cache, t, &err));
    assert_int_equal(stats(cache).free_pages, 16 - 3 - 2);      /* its two copies are free, its two nodes cached */
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

static void evicts_least_recently_let_go_deepest_first(void **state)
{
    (void)state;
    fv_cache *cache = make(1, 8, 4, 8);
    const uint64_t a[] = { 10, 11, 12 }, b[] = { 20, 21 };
    const int32_t s = fill(cache, a, 3, 3), t = fill(cache, b, 2, 2);
    OK(fv_cache_release(cache, s, &err));
    OK(fv_cache_release(cache, t, &err));
    OK(fv_cache_release(cache, fill(cache, a, 1, 1), &err));    /* touches a[0] only */
    static const int64_t left_a[] = { 2, 1, 1, 1, 0 }, left_b[] = { 2, 2, 1, 0, 0 };
    for (int i = 0; i < 5; i++) {
        int64_t freed;
        OK(fv_cache_evict(cache, 1, &freed, &err));
        assert_int_equal(freed, 1);
        assert_int_equal(match(cache, a, 3), left_a[i]);
        assert_int_equal(match(cache, b, 2), left_b[i]);
        check_valid(cache);
    }
    int64_t freed = 7;
    OK(fv_cache_evict(cache, 1, &freed, &err));
    assert_int_equal(freed, 0);
    assert_int_equal(stats(cache).evicted_pages, 5);
    assert_int_equal(stats(cache).free_pages, 8);
    done(cache);
}

static void extending_evicts_only_what_it_needs(void **state)
{
    (void)state;
    fv_cache *cache = make(1, 6, 4, 8);
    const uint64_t a[] = { 1, 2, 3, 4 };
    OK(fv_cache_release(cache, fill(cache, a, 4, 4), &err));
    int32_t s;
    int64_t tokens;
    OK(fv_cache_open(cache, NULL, 0, 0, &s, &tokens, &err));
    OK(fv_cache_extend(cache, s, 3, &err));                     /* 2 free ones and 1 cached */
    assert_int_equal(match(cache, a, 4), 3);
    assert_int_equal(stats(cache).evicted_pages, 1);
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

static void fork_shares_full_pages_and_copies_the_last(void **state)
{
    (void)state;
    fv_cache *cache = make(4, 8, 3, 4);
    int32_t s, child, other;
    int64_t tokens;
    fv_copy copy;
    OK(fv_cache_open(cache, NULL, 0, 0, &s, &tokens, &err));
    OK(fv_cache_extend(cache, s, 10, &err));
    OK(fv_cache_fork(cache, s, &child, &copy, &err));
    assert_int_equal(entry(cache, child, 0), entry(cache, s, 0));
    assert_int_equal(entry(cache, child, 1), entry(cache, s, 1));
    assert_int_equal(copy.src, entry(cache, s, 2));
    assert_int_equal(copy.dst, entry(cache, child, 2));
    assert_int_not_equal(copy.src, copy.dst);
    assert_int_equal(stats(cache).used_pages, 4);
    OK(fv_cache_length(cache, child, &tokens, &err));
    assert_int_equal(tokens, 10);
    OK(fv_cache_release(cache, s, &err));                       /* the child lives on */
    check_valid(cache);
    OK(fv_cache_extend(cache, child, 2, &err));
    OK(fv_cache_fork(cache, child, &other, &copy, &err));       /* 12 tokens: nothing to copy */
    assert_int_equal(copy.src, -1);
    assert_int_equal(copy.dst, -1);
    assert_int_equal(stats(cache).used_pages, 3);
    OK(fv_cache_release(cache, child, &err));
    OK(fv_cache_release(cache, other, &err));
    assert_int_equal(stats(cache).free_pages, 8);
    done(cache);
}

static void slide_gives_back_passed_pages(void **state)
{
    (void)state;
    fv_cache *cache = make(4, 4, 2, 16);
    int32_t s;
    int64_t tokens;
    OK(fv_cache_open(cache, NULL, 0, 0, &s, &tokens, &err));
    for (int64_t length = 0; length < 60; length++) {           /* a window of 8 in a pool of 16 tokens */
        OK(fv_cache_extend(cache, s, 1, &err));
        OK(fv_cache_slide(cache, s, length >= 8 ? length - 8 : 0, &err));
        check_valid(cache);
    }
    assert_int_equal(entry(cache, s, 11), -1);
    assert_int_not_equal(entry(cache, s, 12), -1);              /* token 51 is the first of the window: page 12 */
    assert_int_equal(stats(cache).used_pages, 3);
    OK(fv_cache_slide(cache, s, 3, &err));                      /* never back */
    OK(fv_cache_length(cache, s, &tokens, &err));
    assert_int_equal(tokens, 60);
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

static void a_slid_prefix_stays_until_room_is_needed(void **state)
{
    (void)state;
    fv_cache *cache = make(1, 6, 3, 8);
    const uint64_t a[] = { 1, 2, 3, 4, 5 };
    const int32_t s = fill(cache, a, 5, 5);
    OK(fv_cache_slide(cache, s, 1, &err));
    OK(fv_cache_slide(cache, s, 3, &err));                      /* pages 0..2 are cached, 3 and 4 held */
    assert_int_equal(match(cache, a, 5), 5);
    int64_t freed;
    OK(fv_cache_evict(cache, 1, &freed, &err));                 /* the deepest of the cached ones, not the start */
    assert_int_equal(freed, 1);
    assert_int_equal(match(cache, a, 5), 2);
    OK(fv_cache_extend(cache, s, 3, &err));                     /* 2 free ones, 1 more evicted */
    assert_int_equal(match(cache, a, 5), 1);
    check_valid(cache);
    OK(fv_cache_release(cache, s, &err));                       /* 3 and 4 can no longer be found: free */
    assert_int_equal(stats(cache).cached_pages, 1);
    done(cache);
}

static void truncate_leaves_shared_pages_alone(void **state)
{
    (void)state;
    fv_cache *cache = make(4, 8, 3, 8);
    const uint64_t keys[] = { 1, 2 };
    const int32_t s = fill(cache, keys, 2, 11);
    fv_copy copy = { 5, 5 };
    OK(fv_cache_truncate(cache, s, 9, &copy, &err));            /* its own page: nothing to copy */
    assert_int_equal(copy.dst, -1);
    const int32_t second = entry(cache, s, 1);
    OK(fv_cache_truncate(cache, s, 6, &copy, &err));            /* into a page that others can find */
    assert_int_equal(copy.src, second);
    assert_int_equal(copy.dst, entry(cache, s, 1));
    assert_int_not_equal(copy.dst, second);
    assert_int_equal(match(cache, keys, 2), 8);
    assert_int_equal(entry(cache, s, 2), -1);
    check_valid(cache);

    int32_t child;
    OK(fv_cache_extend(cache, s, 2, &err));
    OK(fv_cache_fork(cache, s, &child, &copy, &err));
    OK(fv_cache_truncate(cache, child, 5, &copy, &err));        /* into a page that the other sequence holds */
    assert_int_equal(copy.src, entry(cache, s, 1));
    assert_int_equal(copy.dst, entry(cache, child, 1));
    OK(fv_cache_truncate(cache, child, 5, &copy, &err));
    assert_int_equal(copy.src, -1);
    OK(fv_cache_truncate(cache, child, 0, &copy, &err));
    OK(fv_cache_release(cache, child, &err));
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

static void truncate_without_a_spare_page_forgets_rather_than_refuses(void **state)
{
    (void)state;
    fv_cache *cache = make(2, 2, 2, 8);
    const uint64_t keys[] = { 1, 2 };
    const int32_t s = fill(cache, keys, 2, 4);
    fv_copy copy;
    OK(fv_cache_truncate(cache, s, 3, &copy, &err));
    assert_int_equal(copy.src, -1);
    assert_int_equal(match(cache, keys, 2), 2);
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

/* Calls that must fail leave every byte of the cache as it was. */
#define REFUSED(cache, status_, field_, value_, limit_, call)                                                          \
    do {                                                                                                               \
        unsigned char *before = malloc((cache)->bytes);                                                                \
        memcpy(before, (cache), (cache)->bytes);                                                                       \
        memset(&err, 0, sizeof err);                                                                                   \
        assert_int_equal((call), (status_));                                                                           \
        assert_memory_equal(before, (cache), (cache)->bytes);                                                          \
        free(before);                                                                                                  \
        assert_string_equal(err.field, (field_));                                                                      \
        assert_int_equal(err.value, (value_));                                                                         \
        assert_int_equal(err.limit, (limit_));                                                                         \
        assert_true(err.text[0] != 0);                                                                                 \
    } while (0)

static void a_full_pool_refuses_and_changes_nothing(void **state)
{
    (void)state;
    fv_cache *cache = make(4, 6, 3, 8);
    const uint64_t keys[] = { 1, 2 };
    const int32_t s = fill(cache, keys, 2, 10);
    OK(fv_cache_release(cache, fill(cache, (const uint64_t[]){ 7 }, 1, 4), &err));     /* one cached page, two free */
    REFUSED(cache, FV_E_CAPACITY, "tokens", 1, 6, fv_cache_extend(cache, s, 15, &err));
    REFUSED(cache, FV_E_CAPACITY, "desc.max_pages_per_sequence", 1, 8, fv_cache_extend(cache, s, 23, &err));
    OK(fv_cache_extend(cache, s, 12, &err));                    /* 22 tokens, all six pages */
    assert_int_equal(stats(cache).peak_used_pages, 6);
    int32_t child = 77, third;
    int64_t tokens;
    fv_copy copy = { 5, 6 };
    REFUSED(cache, FV_E_CAPACITY, "sequence", 1, 6, fv_cache_fork(cache, s, &child, &copy, &err));
    assert_int_equal(child, 77);
    assert_int_equal(copy.dst, 6);
    OK(fv_cache_extend(cache, s, 2, &err));
    OK(fv_cache_fork(cache, s, &child, &copy, &err));           /* 24 tokens: full pages only */
    REFUSED(cache, FV_E_CAPACITY, "sequence", 1, 6, fv_cache_truncate(cache, child, 21, &copy, &err));
    OK(fv_cache_open(cache, keys, 2, 8, &third, &tokens, &err));
    REFUSED(cache, FV_E_CAPACITY, "desc.max_sequences", 4, 3, fv_cache_open(cache, keys, 2, 8, &third, &tokens, &err));
    REFUSED(cache, FV_E_CAPACITY, "desc.max_sequences", 4, 3, fv_cache_fork(cache, s, &third, &copy, &err));
    for (int32_t i = 0; i < 3; i++) OK(fv_cache_release(cache, i, &err));
    done(cache);
}

static void wrong_arguments_are_named(void **state)
{
    (void)state;
    fv_cache *cache = make(4, 6, 3, 8);
    const uint64_t keys[] = { 1, 2 };
    const int32_t s = fill(cache, keys, 2, 10);
    int64_t tokens;
    int32_t id;
    fv_copy copy;
    fv_pages pages;
    REFUSED(cache, FV_E_INVALID, "sequence", 3, 3, fv_cache_extend(cache, 3, 1, &err));
    REFUSED(cache, FV_E_INVALID, "sequence", -1, 3, fv_cache_release(cache, -1, &err));
    REFUSED(cache, FV_E_INVALID, "sequence", 2, 3, fv_cache_release(cache, 2, &err));
    REFUSED(cache, FV_E_INVALID, "tokens", -1, 0, fv_cache_extend(cache, s, -1, &err));
    REFUSED(cache, FV_E_INVALID, "tokens", 11, 10, fv_cache_truncate(cache, s, 11, &copy, &err));
    REFUSED(cache, FV_E_INVALID, "tokens", 11, 10, fv_cache_commit(cache, s, 11, keys, 2, &err));
    REFUSED(cache, FV_E_INVALID, "first", 11, 10, fv_cache_slide(cache, s, 11, &err));
    REFUSED(cache, FV_E_INVALID, "num_keys", -2, 0, fv_cache_match(cache, keys, -2, &tokens, &err));
    REFUSED(cache, FV_E_INVALID, "page_keys", 0, 2, fv_cache_open(cache, NULL, 2, 8, &id, &tokens, &err));
    REFUSED(cache, FV_E_INVALID, "max_tokens", -8, 0, fv_cache_open(cache, keys, 2, -8, &id, &tokens, &err));
    REFUSED(cache, FV_E_INVALID, "tokens", 0, 0, fv_cache_match(cache, keys, 2, NULL, &err));
    REFUSED(cache, FV_E_INVALID, "pages", -1, 0, fv_cache_evict(cache, -1, &tokens, &err));
    REFUSED(cache, FV_E_INVALID, "sequence", 2, 3, fv_cache_pages(cache, (int32_t[]){ s, 2 }, 2, &pages, &err));
    OK(fv_cache_slide(cache, s, 9, &err));
    REFUSED(cache, FV_E_INVALID, "tokens", 7, 8, fv_cache_truncate(cache, s, 7, &copy, &err));     /* given back already */
    assert_int_equal(fv_cache_release(NULL, 0, NULL), FV_E_INVALID);
    OK(fv_cache_release(cache, s, &err));
    done(cache);

    static const struct { fv_cache_desc desc; const char *field; } bad[] = {
        { { .page_size = 0, .max_sequences = 1, .num_pages = 1, .max_pages_per_sequence = 1 }, "desc.page_size" },
        { { .page_size = 1, .max_sequences = 0, .num_pages = 1, .max_pages_per_sequence = 1 }, "desc.max_sequences" },
        { { .page_size = 1, .max_sequences = 1, .num_pages = -1, .max_pages_per_sequence = 1 }, "desc.num_pages" },
        { { .page_size = 1, .max_sequences = 1, .num_pages = 9, .first_id = INT32_MAX - 8, .max_pages_per_sequence = 1 }, "desc.first_id" },
        { { .page_size = 1, .max_sequences = 1, .num_pages = 1, .max_pages_per_sequence = 0 }, "desc.max_pages_per_sequence" },
        { { .page_size = 1, .max_sequences = 1, .num_pages = 1, .max_pages_per_sequence = 1, .reserved = { 0, 1 } }, "desc.reserved" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        fv_cache *none = NULL;
        assert_int_equal(fv_cache_create(ctx, &bad[i].desc, &none, &err), FV_E_INVALID);
        assert_non_null(strstr(err.field, bad[i].field));
        assert_null(none);
    }
}

static void memory_that_is_not_there_is_refused(void **state)
{
    (void)state;
    fv_cache *cache = NULL;
    const fv_cache_desc desc = { .page_size = 16, .max_sequences = 2, .num_pages = 8, .max_pages_per_sequence = 8 };
    fv__os_fail_at = 1;
    assert_int_equal(fv_cache_create(ctx, &desc, &cache, &err), FV_E_NO_MEMORY);
    fv__os_fail_at = 0;
    assert_null(cache);
    const fv_cache_desc huge = { .page_size = 1, .max_sequences = INT32_MAX, .num_pages = INT32_MAX, .max_pages_per_sequence = INT32_MAX };
    assert_int_equal(fv_cache_create(ctx, &huge, &cache, &err), FV_E_NO_MEMORY);       /* 2^64 bytes of table */
    assert_null(cache);
    assert_int_equal(fv_cache_destroy(&cache), FV_OK);
    assert_int_equal(fv_cache_destroy(NULL), FV_OK);
}

static void the_page_table_is_a_batch_of_its_own(void **state)
{
    (void)state;
    fv_cache *cache = NULL;
    OK(fv_cache_create(ctx, &(fv_cache_desc){ .page_size = 8, .num_pages = 10, .first_id = 100, .max_sequences = 4, .max_pages_per_sequence = 5 },
                       &cache, &err));
    const int32_t a = fill(cache, NULL, 0, 20), b = fill(cache, NULL, 0, 9);
    const int32_t order[] = { b, a };
    fv_pages pages;
    OK(fv_cache_pages(cache, order, 2, &pages, &err));
    assert_int_equal(pages.page_size, 8);
    assert_int_equal(pages.num_pages, 110);                     /* ids are below it */
    assert_int_equal(pages.ids.type, FV_INDEX_I32);
    assert_int_equal(pages.ids.count, 20);
    assert_int_equal(pages.table_rows.count, 2);
    assert_ptr_equal(pages.table_rows.host, order);
    assert_int_equal(pages.table_width, 5);
    const int32_t *row = (const int32_t *)pages.ids.host + order[1] * pages.table_stride;
    for (int i = 0; i < 3; i++) assert_in_range(row[i], 100, 109);
    assert_int_equal(row[3], -1);
    OK(fv_cache_extend(cache, a, 5, &err));                     /* the same memory shows the new page */
    assert_in_range(row[3], 100, 109);
    assert_int_equal(fv_close(&ctx), FV_E_BUSY);
    OK(fv_cache_release(cache, a, &err));
    assert_int_equal(row[0], -1);
    OK(fv_cache_release(cache, b, &err));
    done(cache);
}

static void a_pool_of_no_pages_serves_empty_sequences(void **state)
{
    (void)state;
    fv_cache *cache = make(16, 0, 1, 1);
    int32_t s;
    int64_t tokens;
    fv_copy copy;
    OK(fv_cache_open(cache, NULL, 0, 0, &s, &tokens, &err));
    OK(fv_cache_extend(cache, s, 0, &err));
    OK(fv_cache_truncate(cache, s, 0, &copy, &err));
    REFUSED(cache, FV_E_CAPACITY, "tokens", 1, 0, fv_cache_extend(cache, s, 1, &err));
    OK(fv_cache_release(cache, s, &err));
    done(cache);
}

/* ---- random operations against the model ---- */

enum { PAGES = 40, SEQUENCES = 6, WIDTH = 12, MAX_PAGE = 5, MAX_TOKENS = WIDTH * MAX_PAGE };

typedef struct model_page {
    bool is_free, is_node;
    int parent;
    uint64_t key;
    long let_go;                        /* when the last holder left; cached pages only */
    int tokens[MAX_PAGE];               /* what stands in its memory */
} model_page;

typedef struct model_sequence {
    bool open;
    int length, slid, committed;
    int pages[WIDTH];
    int tokens[MAX_TOKENS];             /* its history */
} model_sequence;

typedef struct world {
    fv_cache *cache;
    int page_size, num_pages, num_sequences, width, first_id;
    bool no_prefix;
    uint64_t seed;
    model_page page[PAGES];
    model_sequence seq[SEQUENCES];
    long clock, evicted, hits, asked, peak;
    long done[12], refused[12];         /* by operation */
} world;

static uint32_t draw(world *w, uint32_t below)
{
    w->seed = w->seed * 6364136223846793005u + 1442695040888963407u;
    return below ? (uint32_t)((w->seed >> 33) % below) : 0;
}

static int num_entries(const world *w, const model_sequence *s) { return (s->length + w->page_size - 1) / w->page_size; }

static int holders(const world *w, int page)
{
    int n = 0;
    for (int s = 0; s < w->num_sequences; s++)
        if (w->seq[s].open)
            for (int i = w->seq[s].slid; i < num_entries(w, &w->seq[s]); i++) n += w->seq[s].pages[i] == page;
    return n;
}

static bool is_cached(const world *w, int page) { return w->page[page].is_node && holders(w, page) == 0; }

static int count(const world *w, bool cached)
{
    int n = 0;
    for (int p = 0; p < w->num_pages; p++) n += cached ? is_cached(w, p) : w->page[p].is_free;
    return n;
}

static int available(const world *w) { return count(w, true) + count(w, false); }

static int find(const world *w, int parent, uint64_t key)
{
    for (int p = 0; p < w->num_pages; p++)
        if (w->page[p].is_node && w->page[p].parent == parent && w->page[p].key == key) return p;
    return -1;
}

/* Takes the subtree out of the tree; what nobody holds is free. */
static int prune(world *w, int page)
{
    int freed = 0;
    for (int p = 0; p < w->num_pages; p++)
        if (w->page[p].is_node && w->page[p].parent == page) freed += prune(w, p);
    w->page[page].is_node = false;
    if (holders(w, page) > 0) return freed;
    w->page[page].is_free = true;
    w->evicted++;
    return freed + 1;
}

static int oldest(const world *w, bool any_parent, int parent)
{
    int best = -1;
    for (int p = 0; p < w->num_pages; p++)
        if (is_cached(w, p) && (any_parent || w->page[p].parent == parent) && (best < 0 || w->page[p].let_go < w->page[best].let_go)) best = p;
    return best;
}

static int evict_one(world *w)
{
    int victim = oldest(w, true, 0);
    for (int child = victim; child >= 0; child = oldest(w, false, victim)) victim = child;
    return prune(w, victim);
}

/* The cache chose `id` for an entry: it must have been free, after an eviction if nothing was. */
static void take(world *w, int id)
{
    if (count(w, false) == 0) evict_one(w);
    const int page = id - w->first_id;
    assert_in_range(page, 0, w->num_pages - 1);
    assert_true(w->page[page].is_free);
    w->page[page].is_free = false;
}

static void count_peak(world *w)
{
    const long used = w->num_pages - available(w);
    if (used > w->peak) w->peak = used;
}

/* The sequence no longer names entries [first, last). */
static void let_go(world *w, model_sequence *s, int first, int last)
{
    for (int i = last; i-- > first;) {
        const int page = s->pages[i];
        if (page < 0) continue;
        s->pages[i] = -1;
        if (holders(w, page) > 0) continue;
        if (w->page[page].is_node) w->page[page].let_go = ++w->clock;
        else w->page[page].is_free = true;
    }
}

/* Keys as an engine makes them: of all tokens up to the page's end. */
static int make_keys(const world *w, const int *tokens, int length, uint64_t *keys)
{
    uint64_t h = 1469598103934665603u;
    for (int i = 0; i < length; i++) {
        h = (h ^ (uint64_t)(tokens[i] + 1)) * 1099511628211u;
        if ((i + 1) % w->page_size == 0) keys[i / w->page_size] = h;
    }
    return length / w->page_size;
}

static void write_tokens(world *w, model_sequence *s, int from)
{
    for (int i = from; i < s->length; i++) w->page[s->pages[i / w->page_size]].tokens[i % w->page_size] = s->tokens[i];
}

static void obey(world *w, fv_copy copy)
{
    if (copy.src < 0) return;
    memcpy(w->page[copy.dst - w->first_id].tokens, w->page[copy.src - w->first_id].tokens, sizeof w->page[0].tokens);
}

static void do_open(world *w)
{
    int tokens[MAX_TOKENS], length = (int)draw(w, (uint32_t)(w->width * w->page_size + 1));
    for (int i = 0; i < length; i++) tokens[i] = (int)draw(w, 8) == 0;          /* few kinds: prefixes meet often */
    uint64_t keys[WIDTH + 1];
    const int num_keys = make_keys(w, tokens, length, keys), most = (int)draw(w, (uint32_t)length + 2);
    int32_t id = -1;
    int64_t had = -1;
    int slot = 0;
    while (slot < w->num_sequences && w->seq[slot].open) slot++;
    if (slot == w->num_sequences) {
        REFUSED(w->cache, FV_E_CAPACITY, "desc.max_sequences", slot + 1, slot, fv_cache_open(w->cache, keys, num_keys, most, &id, &had, &err));
        w->refused[0]++;
        return;
    }
    OK(fv_cache_open(w->cache, keys, num_keys, most, &id, &had, &err));
    assert_in_range(id, 0, w->num_sequences - 1);
    model_sequence *s = &w->seq[id];
    assert_false(s->open);
    *s = (model_sequence){ .open = true };
    memset(s->pages, -1, sizeof s->pages);
    for (int node = -1, i = 0; i < num_keys && i < most / w->page_size; i++) {
        node = find(w, node, keys[i]);
        if (node < 0) break;
        s->pages[i] = node;
        s->length = (i + 1) * w->page_size;
    }
    s->committed = s->length / w->page_size;
    memcpy(s->tokens, tokens, sizeof tokens);
    assert_int_equal(had, s->length);
    w->hits += had;
    w->asked += num_keys * w->page_size;
    count_peak(w);
}

static void do_extend(world *w, int id)
{
    model_sequence *s = &w->seq[id];
    const int more = (int)draw(w, (uint32_t)(draw(w, 2) ? 3 : 3 * w->page_size)), old = s->length;
    const int pages = (old + more + w->page_size - 1) / w->page_size, needed = pages - num_entries(w, s);
    if (pages > w->width) {
        REFUSED(w->cache, FV_E_CAPACITY, "desc.max_pages_per_sequence", pages - w->width, w->width, fv_cache_extend(w->cache, id, more, &err));
        w->refused[1]++;
    } else if (needed > available(w)) {
        REFUSED(w->cache, FV_E_CAPACITY, "tokens", needed - available(w), w->num_pages, fv_cache_extend(w->cache, id, more, &err));
        w->refused[2]++;
    } else {
        OK(fv_cache_extend(w->cache, id, more, &err));
        for (int i = num_entries(w, s); i < pages; i++) {
            take(w, entry(w->cache, id, i));
            s->pages[i] = entry(w->cache, id, i) - w->first_id;
            s->length = (i + 1) * w->page_size;                 /* so that the page counts as held */
        }
        s->length = old + more;
        for (int i = old; i < s->length; i++) s->tokens[i] = (int)draw(w, 8) == 0;
        write_tokens(w, s, old);
        count_peak(w);
    }
}

static void do_commit(world *w, int id)
{
    model_sequence *s = &w->seq[id];
    uint64_t keys[WIDTH + 1];
    const int all = make_keys(w, s->tokens, s->length, keys), num_keys = draw(w, 4) ? all : (int)draw(w, (uint32_t)all + 1);
    const int tokens = draw(w, 4) ? s->length : (int)draw(w, (uint32_t)s->length + 1);
    OK(fv_cache_commit(w->cache, id, tokens, keys, num_keys, &err));
    if (w->no_prefix) return;
    int last = tokens / w->page_size;
    if (last > num_keys) last = num_keys;
    for (; s->committed < last; s->committed++) {
        const int i = s->committed, page = s->pages[i];
        if (page < 0 || w->page[page].is_node) continue;
        int parent = -1;
        if (i > 0 && s->pages[i - 1] >= 0 && w->page[s->pages[i - 1]].is_node) {
            parent = s->pages[i - 1];
        } else {
            int k = 0;
            for (; k < i && (parent = find(w, parent, keys[k])) >= 0; k++) { }
            if (k < i) continue;
        }
        if (find(w, parent, keys[i]) >= 0) continue;
        w->page[page].is_node = true;
        w->page[page].parent = parent;
        w->page[page].key = keys[i];
    }
}

static void do_fork(world *w, int id)
{
    const bool partial = w->seq[id].length % w->page_size != 0;
    int32_t child = -1;
    fv_copy copy;
    bool room = false;
    for (int s = 0; s < w->num_sequences; s++) room |= !w->seq[s].open;
    if (!room) {
        REFUSED(w->cache, FV_E_CAPACITY, "desc.max_sequences", w->num_sequences + 1, w->num_sequences,
                fv_cache_fork(w->cache, id, &child, &copy, &err));
        w->refused[3]++;
        return;
    }
    if (partial && available(w) == 0) {
        REFUSED(w->cache, FV_E_CAPACITY, "sequence", 1, w->num_pages, fv_cache_fork(w->cache, id, &child, &copy, &err));
        w->refused[4]++;
        return;
    }
    OK(fv_cache_fork(w->cache, id, &child, &copy, &err));
    model_sequence *s = &w->seq[child];
    assert_false(s->open);
    const int last = num_entries(w, &w->seq[id]) - 1;
    if (partial) {
        take(w, entry(w->cache, child, last));
        assert_int_equal(copy.src, w->seq[id].pages[last] + w->first_id);
        assert_int_equal(copy.dst, entry(w->cache, child, last));
    } else {
        assert_int_equal(copy.src, -1);
        assert_int_equal(copy.dst, -1);
    }
    *s = w->seq[id];
    if (partial) s->pages[last] = copy.dst - w->first_id;
    obey(w, copy);
    count_peak(w);
}

static void do_slide(world *w, int id)
{
    model_sequence *s = &w->seq[id];
    const int first = (int)draw(w, (uint32_t)s->length + 1), slid = first / w->page_size;
    OK(fv_cache_slide(w->cache, id, first, &err));
    if (slid <= s->slid) return;
    let_go(w, s, s->slid, slid);
    s->slid = slid;
}

static void do_truncate(world *w, int id)
{
    model_sequence *s = &w->seq[id];
    const int least = s->slid * w->page_size;
    const int back = (int)draw(w, (uint32_t)(s->length - least) + 1), tokens = s->length - (draw(w, 2) ? back : back / 4);
    const int keep = (tokens + w->page_size - 1) / w->page_size, full = tokens / w->page_size, last = num_entries(w, s);
    const bool cut = keep > full && tokens < s->length;
    fv_copy copy = { -7, -7 };
    int dropped = 0;
    for (int i = keep; i < last; i++) dropped += holders(w, s->pages[i]) == 1;
    const bool shared = cut && holders(w, s->pages[full]) > 1, node = cut && w->page[s->pages[full]].is_node;
    if (shared && available(w) + dropped == 0) {
        REFUSED(w->cache, FV_E_CAPACITY, "sequence", 1, w->num_pages, fv_cache_truncate(w->cache, id, tokens, &copy, &err));
        assert_int_equal(copy.src, -7);
        w->refused[5]++;
        return;
    }
    OK(fv_cache_truncate(w->cache, id, tokens, &copy, &err));
    let_go(w, s, keep, last);
    s->length = tokens;
    if (s->committed > full) s->committed = full;
    if (!shared && (!node || available(w) == 0)) {
        if (node) prune(w, s->pages[full]);
        assert_int_equal(copy.src, -1);
        assert_int_equal(copy.dst, -1);
        return;
    }
    assert_int_equal(copy.src, s->pages[full] + w->first_id);
    take(w, copy.dst);
    if (w->num_pages - available(w) > w->peak) w->peak = w->num_pages - available(w);       /* for a moment it has both */
    obey(w, copy);
    let_go(w, s, full, full + 1);
    s->pages[full] = copy.dst - w->first_id;
}

static void do_release(world *w, int id)
{
    OK(fv_cache_release(w->cache, id, &err));
    let_go(w, &w->seq[id], 0, num_entries(w, &w->seq[id]));
    w->seq[id].open = false;
}

static void do_evict(world *w)
{
    const int pages = (int)draw(w, 4);
    int64_t freed = -1;
    int want = 0;
    while (want < pages && count(w, true) > 0) want += evict_one(w);
    OK(fv_cache_evict(w->cache, pages, &freed, &err));
    assert_int_equal(freed, want);
}

static void do_match(world *w)
{
    int tokens[MAX_TOKENS];
    const int length = (int)draw(w, (uint32_t)(w->width * w->page_size + 1));
    for (int i = 0; i < length; i++) tokens[i] = (int)draw(w, 8) == 0;
    uint64_t keys[WIDTH + 1];
    const int num_keys = make_keys(w, tokens, length, keys);
    int found = 0;
    for (int node = -1; found < num_keys && (node = find(w, node, keys[found])) >= 0; found++) { }
    assert_int_equal(match(w->cache, keys, num_keys), found * w->page_size);
}

/* Table, lengths, counts; and every token of every sequence is where the table says. */
static void compare(const world *w)
{
    check_valid(w->cache);
    int open = 0;
    for (int s = 0; s < w->num_sequences; s++) {
        const model_sequence *q = &w->seq[s];
        open += q->open;
        assert_int_equal(w->cache->sequences[s].open, q->open);
        if (!q->open) continue;
        int64_t length;
        OK(fv_cache_length(w->cache, s, &length, &err));
        assert_int_equal(length, q->length);
        for (int i = 0; i < num_entries(w, q); i++) assert_int_equal(entry(w->cache, s, i), i < q->slid ? -1 : q->pages[i] + w->first_id);
        for (int i = q->slid * w->page_size; i < q->length; i++)
            assert_int_equal(w->page[q->pages[i / w->page_size]].tokens[i % w->page_size], q->tokens[i]);
    }
    const fv_cache_stats t = stats(w->cache);
    assert_int_equal(t.num_sequences, open);
    assert_int_equal(t.free_pages, count(w, false));
    assert_int_equal(t.cached_pages, count(w, true));
    assert_int_equal(t.used_pages, w->num_pages - available(w));
    assert_int_equal(t.evicted_pages, w->evicted);
    assert_int_equal(t.hit_tokens, w->hits);
    assert_int_equal(t.asked_tokens, w->asked);
    assert_int_equal(t.peak_used_pages, w->peak);
    for (int p = 0; p < w->num_pages; p++) assert_int_equal(w->cache->pages[p].is_node, w->page[p].is_node);
}

static void step(world *w)
{
    static const int weights[] = { 3, 8, 6, 2, 1, 2, 3, 1, 1 };
    static void (*const on_sequence[])(world *, int) = { NULL, do_extend, do_commit, do_fork, do_slide, do_truncate, do_release };
    int op = 0;
    for (int left = (int)draw(w, 27); left >= weights[op]; op++) left -= weights[op];
    if (op == 0) do_open(w);
    else if (op == 7) do_evict(w);
    else if (op == 8) do_match(w);
    else {
        const int id = (int)draw(w, (uint32_t)w->num_sequences);
        if (!w->seq[id].open) return;
        on_sequence[op](w, id);
    }
    w->done[op]++;
}

static void play(world *w, int steps)
{
    w->page_size = 1 + (int)draw(w, MAX_PAGE);
    w->num_pages = (int)draw(w, draw(w, 2) ? 12 : PAGES + 1);          /* small pools are full most of the time */
    w->num_sequences = 1 + (int)draw(w, SEQUENCES);
    w->width = 1 + (int)draw(w, WIDTH);
    w->first_id = draw(w, 2) ? (int)draw(w, 1000) : 0;
    w->no_prefix = draw(w, 10) == 0;
    for (int p = 0; p < w->num_pages; p++) w->page[p] = (model_page){ .is_free = true };
    memset(w->seq, 0, sizeof w->seq);
    w->clock = w->evicted = w->hits = w->asked = w->peak = 0;
    OK(fv_cache_create(ctx, &(fv_cache_desc){ .page_size = w->page_size, .num_pages = w->num_pages, .first_id = w->first_id,
                                              .max_sequences = w->num_sequences, .max_pages_per_sequence = w->width, .no_prefix = w->no_prefix },
                       &w->cache, &err));
    for (int i = 0; i < steps; i++) {
        step(w);
        compare(w);
    }
    done(w->cache);                     /* with sequences open: destroying frees all */
}

static void random_operations_agree_with_the_model(void **state)
{
    (void)state;
    const char *given = getenv("FV_TEST_SEED");
    const uint64_t first = given ? strtoull(given, NULL, 0) : 1;
    world *w = calloc(1, sizeof *w);
    for (uint64_t i = 0; i < 500; i++) {
        w->seed = first + i * 7919;
        play(w, 200);
    }
    print_message("100000 operations in 500 caches, seed %llu:", (unsigned long long)first);
    for (int i = 0; i < 9; i++) print_message(" %ld", w->done[i]);
    print_message(" done, refused:");
    for (int i = 0; i < 6; i++) print_message(" %ld", w->refused[i]);
    print_message("\n");
    bool tried = true;
    for (int i = 0; i < 9; i++) tried &= w->done[i] > 100;
    for (int i = 0; i < 6; i++) tried &= w->refused[i] > 5;
    free(w);
    assert_true(tried);                 /* nothing was left untried */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefixes_are_found_again),
        cmocka_unit_test(data_is_found_only_after_commit),
        cmocka_unit_test(a_key_means_something_only_below_its_parent),
        cmocka_unit_test(the_same_prefix_written_twice_stays_two_copies),
        cmocka_unit_test(evicts_least_recently_let_go_deepest_first),
        cmocka_unit_test(extending_evicts_only_what_it_needs),
        cmocka_unit_test(fork_shares_full_pages_and_copies_the_last),
        cmocka_unit_test(slide_gives_back_passed_pages),
        cmocka_unit_test(a_slid_prefix_stays_until_room_is_needed),
        cmocka_unit_test(truncate_leaves_shared_pages_alone),
        cmocka_unit_test(truncate_without_a_spare_page_forgets_rather_than_refuses),
        cmocka_unit_test(a_full_pool_refuses_and_changes_nothing),
        cmocka_unit_test(wrong_arguments_are_named),
        cmocka_unit_test(memory_that_is_not_there_is_refused),
        cmocka_unit_test(the_page_table_is_a_batch_of_its_own),
        cmocka_unit_test(a_pool_of_no_pages_serves_empty_sequences),
        cmocka_unit_test(random_operations_agree_with_the_model),
    };
    return cmocka_run_group_tests(tests, open_ctx, close_ctx);
}
