/* SPDX-License-Identifier: Apache-2.0 */
/* checkplan_scenarios.c -- settings with names: the long request among short ones, padding,
 * neighbours of an invariant request, lists in another order, prefixes that are found, and every
 * way in which given segments can be wrong. */
#include "checkplan.h"
#include "plan_cut.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool good_plan(totals *t, scene *s, made *m, const char *what)
{
    char why[400];
    t->scene = what;
    if (!expect(t, make_plan(m, s, 0x77) == FV_OK, "%s: %s", m->err.field, m->err.text))
        return false;
    return expect(t, guards_hold(m) && check_plan(s, m, why, sizeof why), "%s", why);
}

/* n requests of the same rows and keys. */
static void equal_requests(scene *s, int64_t n, int32_t rows, int32_t keys, int32_t page_size)
{
    int32_t *q = malloc((size_t)(n + 1) * sizeof *q), *k = malloc((size_t)(n + 1) * sizeof *k);
    for (int64_t i = 0; i < n; i++) {
        q[i] = rows;
        k[i] = keys;
    }
    scene_clear(s);
    scene_requests(s, n, q, k, page_size);
    free(q);
    free(k);
}

/* ---- balance ---- */

static const fv__cost_model *const models[] = { &fv__cost_cpu, &fv__cost_cpu_amx, &fv__cost_sm80,
                                                &fv__cost_sm90 };

/* One request of 200000 keys among 63 of 1000: the longest worker within 1.1 of the mean,
 * without any allowance. */
static void long_among_short(totals *t, scene *s, made *m)
{
    for (int i = 0; i < FV__COUNT(models); i++)
        for (int place = 0; place < 64; place += 21) {
            equal_requests(s, 64, 1, 1000, 16);
            int32_t rows[64], keys[64];
            for (int r = 0; r < 64; r++) {
                rows[r] = 1;
                keys[r] = r == place ? 200000 : 1000;
            }
            scene_clear(s);
            scene_requests(s, 64, rows, keys, 16);
            scene_shape(s, 8, 4, 128, 132, models[i]);
            s->bounds.has_last = true;
            scene_limits(s);
            if (!good_plan(t, s, m, "one of 200000 and 63 of 1000")) continue;
            int64_t total;
            const int64_t longest = longest_worker(m->plan, &s->shape, &total);
            expect(t, longest * 10 * 132 <= total * 11, "%s: longest %lld, mean %lld",
                   models[i]->name, (long long)longest, (long long)(total / 132));
        }
}

static void zipf(totals *t, scene *s, made *m)
{
    int32_t rows[16], keys[16];
    for (int i = 0; i < 16; i++) {
        rows[i] = 1;
        keys[i] = 4846 / (i + 1);
    }
    for (int w = 2; w <= 132; w += 130) {
        scene_clear(s);
        scene_requests(s, 16, rows, keys, 16);
        scene_shape(s, 8, 4, 128, w, w == 2 ? &fv__cost_cpu : &fv__cost_sm90);
        scene_limits(s);
        if (!good_plan(t, s, m, "Zipf lengths")) continue;
        int64_t total;
        const int64_t longest = longest_worker(m->plan, &s->shape, &total);
        if (w == 2)
            expect(t, longest * 100 * w <= total * 103, "longest %lld, mean %lld",
                   (long long)longest, (long long)(total / w));
    }
}

/* A causal prefill reads the triangle and no more than a tile beside it. */
static void triangle(totals *t, scene *s, made *m)
{
    equal_requests(s, 1, 8192, 8192, 16);
    scene_shape(s, 8, 4, 256, 132, &fv__cost_sm90);
    s->bounds.has_last = true;
    scene_limits(s);
    if (!good_plan(t, s, m, "causal prefill of 8192")) return;
    expect(t, m->report.score_pairs == INT64_C(8192) * 8193 / 2 * 32, "%lld scores",
           (long long)m->report.score_pairs);
    expect(t, m->report.kv_tokens_read <= 8 * (INT64_C(8192) / 64 * (8192 + 64) / 2),
           "%lld keys read", (long long)m->report.kv_tokens_read);
}

/* A window's decode reads the window and no more than a block beside it. */
static void window(totals *t, scene *s, made *m)
{
    equal_requests(s, 20, 1, 100000, 64);
    scene_shape(s, 8, 4, 128, 132, &fv__cost_sm80);
    s->bounds = (fv__bounds){ .has_first = true, .has_last = true, .first = -4095 };
    scene_limits(s);
    if (!good_plan(t, s, m, "decode with a window of 4096")) return;
    expect(t, m->report.score_pairs == 20 * 32 * 4096, "%lld scores",
           (long long)m->report.score_pairs);
    expect(t, m->report.kv_tokens_read < 20 * 8 * (4096 + 64), "%lld keys read",
           (long long)m->report.kv_tokens_read);
}

/* ---- padding ---- */

typedef struct keyed {
    int64_t table;
    int32_t worker, row_first, num_rows, unit, key_first, num_keys;
} keyed;

/* Pieces with keys, by what they read: independent of how requests and rows are numbered. */
static int64_t keyed_pieces(const fv__plan_head *p, keyed *out)
{
    const fv__piece *x = FV__PLAN_ARRAY(p, fv__piece, pieces);
    const fv__segment *s = FV__PLAN_ARRAY(p, fv__segment, segments);
    const int32_t *first = FV__PLAN_ARRAY(p, int32_t, worker_first);
    int64_t n = 0;
    for (int32_t w = 0; w < p->num_workers; w++)
        for (int32_t i = first[w]; i < first[w + 1]; i++)
            if (x[i].num_keys > 0)
                out[n++] = (keyed){ s[x[i].segment].table, w,         x[i].row_first,
                                    x[i].num_rows,         x[i].unit, x[i].key_first,
                                    x[i].num_keys };
    return n;
}

/* Requests without keys between the others, thousands of them: each other piece stays with its
 * worker, and no worker has them all. */
static void padding(totals *t, scene *s, made *m, rng *r)
{
    keyed *a = malloc(60000 * sizeof *a), *b = malloc(60000 * sizeof *b);
    for (int round = 0; round < 20; round++) {
        int32_t rows[1200], keys[1200], padded_rows[1200], padded_keys[1200];
        const int n = (int)rng_between(r, 1, 60), workers = (int)rng_between(r, 1, 132),
                  spare = round == 0 ? 1000 : (int)rng_below(r, 100);
        int at = 0;
        for (int i = 0; i < n; i++) {
            rows[i] = (int32_t)rng_between(r, 1, 40);
            keys[i] = (int32_t)rng_between(r, rows[i], 3000);
            for (int k = rng_chance(r, 30) ? (int)rng_below(r, spare / 2) : 0; k > 0 && at < 1000;
                 k--) {
                padded_rows[at] = 1;
                padded_keys[at++] = 0;
            }
            padded_rows[at] = rows[i];
            padded_keys[at++] = keys[i];
        }
        for (int k = 0; k < spare && at < 1200; k++) {
            padded_rows[at] = 1;
            padded_keys[at++] = 0;
        }
        scene_clear(s);
        scene_requests(s, n, rows, keys, 16);
        scene_shape(s, 4, 4, 64, workers, &fv__cost_sm80);
        s->bounds.has_last = true;
        scene_limits(s);
        if (!good_plan(t, s, m, "without padding")) continue;
        const int64_t first = keyed_pieces(m->plan, a), cost = m->report.total_cost;
        scene_clear(s);
        scene_requests(s, at, padded_rows, padded_keys, 16);
        scene_shape(s, 4, 4, 64, workers, &fv__cost_sm80);
        s->bounds.has_last = true;
        scene_limits(s);
        if (!good_plan(t, s, m, "with padding")) continue;
        const int64_t second = keyed_pieces(m->plan, b);
        expect(t,
               first == second && !memcmp(a, b, (size_t)first * sizeof *a) &&
                   cost == m->report.total_cost,
               "padding moved a cut");
        const int32_t *begin = FV__PLAN_ARRAY(m->plan, int32_t, worker_first);
        const fv__piece *x = FV__PLAN_ARRAY(m->plan, fv__piece, pieces);
        int64_t most = 0;
        for (int32_t w = 0; w < workers; w++) {
            int64_t empty = 0;
            for (int32_t i = begin[w]; i < begin[w + 1]; i++) empty += x[i].num_keys == 0;
            most = fv__max64(most, empty);
        }
        expect(t, most <= (int64_t)(at - n) * 4 / workers + 1,
               "a worker has %lld pieces without keys", (long long)most);
    }
    free(a);
    free(b);
}

/* ---- the invariant mode ---- */

#define MAX_PARTS 400

/* Request A among neighbours, at any place, with any splits, sharing on or off: its chunks are
 * those of A alone. */
static void neighbours(totals *t, scene *s, made *m, rng *r)
{
    static chunk_part alone[MAX_PARTS], now[MAX_PARTS];
    for (int round = 0; round < 60; round++) {
        const int32_t keys_a = round < 20 ? 500 : (int32_t)rng_between(r, 1, 9000),
                      rows_a = (int32_t)rng_between(r, 1, fv__min64(keys_a, 200));
        const int32_t chunk = round % 3 == 0 ? 64 : round % 3 == 1 ? 1024 : 256;
        int n_alone = 0;
        for (int way = 0; way < 4; way++) {
            int32_t rows[40], keys[40];
            const int n = way == 0 ? 1 : 32, place = way == 0 ? 0 : (int)rng_below(r, n);
            for (int i = 0; i < n; i++) {
                keys[i] = i == place ? keys_a : (int32_t)rng_between(r, 0, 5000);
                rows[i] = i == place ? rows_a : (int32_t)rng_below(r, 30);
            }
            scene_clear(s);
            scene_requests(s, n, rows, keys, way == 0 ? 16 : way == 1 ? 1 : 48);
            scene_shape(s, 2, 4, 64, (int32_t)rng_between(r, 1, 132), &fv__cost_sm90);
            s->bounds.has_last = true;
            scene_limits(s);
            s->limits.invariant = true;
            s->limits.chunk = chunk;
            s->limits.splits = way == 2 ? 8 : way == 3 ? 1 : 0;
            if (!good_plan(t, s, m, "invariant")) continue;
            const int count = row_chunks(
                s, m->plan, s->batch.requests[place].row_first + rows_a - 1, now, MAX_PARTS);
            if (way == 0) {
                memcpy(alone, now, sizeof alone);
                n_alone = count;
                expect(t, count == fv__div_up(keys_a, chunk), "%d chunks of %d keys", count,
                       keys_a);
                continue;
            }
            expect(t,
                   count == n_alone &&
                       !memcmp(alone, now, (size_t)fv__min64(count, MAX_PARTS) * sizeof *now),
                   "the chunks of a request depend on its neighbours");
        }
    }
}

/* A row of a prefill has the chunks of the decode at its place, for splits 1, auto and 8. */
static void prefill_as_decode(totals *t, scene *s, made *m)
{
    static chunk_part decode[MAX_PARTS], prefill[MAX_PARTS];
    for (int split = 0; split < 3; split++)
        for (int32_t keys = 1; keys <= 200; keys += 7) {
            int32_t one = 1, all = 200;
            scene_clear(s);
            scene_requests(s, 1, &one, &keys, 16);
            scene_shape(s, 1, 4, 64, 16, &fv__cost_cpu);
            s->bounds.has_last = true;
            scene_limits(s);
            s->limits.invariant = true;
            s->limits.chunk = 64;
            s->limits.splits = split == 0 ? 0 : split == 1 ? 1 : 8;
            if (!good_plan(t, s, m, "invariant decode")) continue;
            const int n = row_chunks(s, m->plan, 0, decode, MAX_PARTS);
            const fv_plan_desc keep = s->limits;
            scene_clear(s);
            scene_requests(s, 1, &all, &all, 16);
            scene_shape(s, 1, 4, 64, 16, &fv__cost_cpu);
            s->bounds.has_last = true;
            scene_limits(s);
            s->limits.invariant = true;
            s->limits.chunk = 64;
            s->limits.splits = keep.splits;
            if (!good_plan(t, s, m, "invariant prefill")) continue;
            const int k = row_chunks(s, m->plan, keys - 1, prefill, MAX_PARTS);
            expect(t, n == k && !memcmp(decode, prefill, (size_t)n * sizeof *decode),
                   "row %d: decode and prefill differ in their chunks", keys - 1);
        }
}

/* ---- found prefixes ---- */

/* Requests share pages: request r's first shared[r] pages are those of request from[r]. */
static void share_pages(scene *s, const int *from, const int *shared)
{
    int32_t *ids = (int32_t *)s->given.pages.ids.host;
    for (int64_t r = 0; r < s->batch.num_requests; r++)
        if (shared[r])
            memcpy(ids + s->batch.tables[r], ids + s->batch.tables[from[r]],
                   (size_t)shared[r] * sizeof *ids);
}

static int64_t cost_with(totals *t, scene *s, made *m, fv_sharing sharing, int32_t levels,
                         const char *what)
{
    scene_limits(s);
    s->limits.sharing = sharing;
    s->limits.max_levels = levels;
    return good_plan(t, s, m, what) ? m->report.total_cost : -1;
}

typedef struct machine {
    const fv__cost_model *cost;
    int32_t workers;
    const char *shares[4];              /* of prefixes of 256, 1024, 4096, 32768 keys: by 2, 16, 64, 256 requests */
} machine;

/* n requests, `each` of them with a prefix in common and 128 keys of their own, 32/8 heads. Returns the longest worker's cost. */
static int64_t longest_with(totals *t, scene *s, made *m, const machine *on, int32_t n, int32_t each, int32_t prefix, fv_sharing sharing)
{
    int from[256] = { 0 }, shared[256] = { 0 };
    equal_requests(s, n, 1, prefix + 128, 16);
    for (int32_t r = 0; r < n; r++) {
        from[r] = r / each * each;
        shared[r] = r % each ? prefix / 16 : 0;
    }
    share_pages(s, from, shared);
    scene_shape(s, 8, 4, 128, on->workers, on->cost);
    s->bounds.has_last = true;
    scene_limits(s);
    s->limits.sharing = sharing;
    s->limits.max_levels = 2;
    return good_plan(t, s, m, "a prefix of many sizes") ? m->report.max_worker_cost : -1;
}

/* The same pieces on the same workers? */
static bool same_pieces(const fv__plan_head *a, const fv__plan_head *b)
{
    const fv__piece *x = FV__PLAN_ARRAY(a, fv__piece, pieces), *y = FV__PLAN_ARRAY(b, fv__piece, pieces);
    bool same = a->num_pieces == b->num_pieces && a->num_workers == b->num_workers;
    for (int32_t i = 0; i < a->num_pieces && same; i++)
        same = x[i].segment == y[i].segment && x[i].unit == y[i].unit && x[i].key_first == y[i].key_first && x[i].num_keys == y[i].num_keys;
    return same && !memcmp(FV__PLAN_ARRAY(a, int32_t, worker_first), FV__PLAN_ARRAY(b, int32_t, worker_first),
                           (size_t)(a->num_workers + 1) * sizeof(int32_t));
}

/* Steps that are soon done do not keep all workers of a core busy: pieces are few and equal. */
static void short_steps(totals *t, scene *s, made *m)
{
    made split = { 0 };
    static const struct {
        int32_t requests, keys, pieces;
    } steps[] = { { 1, 512, 64 }, { 1, 4096, 128 }, { 1, 16384, 264 }, { 4, 512, 128 }, { 4, 1024, 128 }, { 4, 4096, 256 }, { 16, 512, 128 },
                  { 16, 1024, 256 }, { 16, 4096, 384 }, { 16, 16384, 384 }, { 256, 4096, 2364 } };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        equal_requests(s, steps[i].requests, 1, steps[i].keys, 16);
        scene_shape(s, 8, 4, 64, 396, &fv__cost_sm80);
        s->shape.num_cores = 132;
        s->bounds.has_last = true;
        scene_limits(s);
        if (good_plan(t, s, m, "a short step"))
            expect(t, m->plan->num_pieces == steps[i].pieces, "%d requests of %d keys: %d pieces, not %d", steps[i].requests, steps[i].keys,
                   m->plan->num_pieces, steps[i].pieces);
        const int32_t items = 8 * steps[i].requests;
        if (steps[i].pieces % items || steps[i].keys / 64 % (steps[i].pieces / items)) continue;
        s->limits.splits = steps[i].pieces / items;
        if (good_plan(t, s, &split, "the same step by given splits"))
            expect(t, same_pieces(m->plan, split.plan), "%d requests of %d keys: not as %d given parts", steps[i].requests, steps[i].keys,
                   s->limits.splits);
    }
    made_free(&split);
}

/* What requests share is read once exactly where the longest worker is done earlier for it. */
static void sharing_pays(totals *t, scene *s, made *m)
{
    static const machine machines[] = {
        { &fv__cost_cpu, 16, { "0111", "1111", "1111", "1111" } },
        { &fv__cost_cpu_amx, 16, { "0111", "1111", "1111", "1111" } },
        { &fv__cost_sm80, 264, { "0001", "1001", "1111", "1111" } },
    };
    static const int32_t prefix[] = { 256, 1024, 4096, 32768 }, requests[] = { 2, 16, 64, 256 };
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++)
        for (int k = 0; k < 16; k++) {
            const machine *on = &machines[i];
            const int32_t n = requests[k % 4], keys = prefix[k / 4];
            const int64_t flat = longest_with(t, s, m, on, n, n, keys, FV_SHARING_OFF), found = longest_with(t, s, m, on, n, n, keys, FV_SHARING_FIND);
            const bool shares = m->report.num_shared_segments > 0;
            expect(t, shares == (on->shares[k / 4][k % 4] == '1') && (shares ? found < flat : found == flat),
                   "%s: %d requests, prefix of %d: %s, longest worker %lld, flat %lld", on->cost->name, n, keys, shares ? "shared" : "flat",
                   (long long)found, (long long)flat);
        }
    for (int each = 4; each <= 16; each *= 4) {         /* 16 prefixes side by side */
        const int64_t flat = longest_with(t, s, m, &machines[2], 16 * each, each, 1024, FV_SHARING_OFF),
                      found = longest_with(t, s, m, &machines[2], 16 * each, each, 1024, FV_SHARING_FIND);
        expect(t, m->report.num_shared_segments == 16 && found < flat, "16 x %d: %lld segments, longest worker %lld, flat %lld", each,
               (long long)m->report.num_shared_segments, (long long)found, (long long)flat);
    }
}

static void prefixes(totals *t, scene *s, made *m)
{
    int from[64] = { 0 }, shared[64] = { 0 };
    made other = { 0 };
    for (int group = 1; group <= 4;
         group *= 4) { /* 32/32 and 32/8 heads: 16 requests, 4096 keys shared of 4160 */
        equal_requests(s, 16, 1, 4160, 16);
        for (int r = 1; r < 16; r++) shared[r] = 256;
        share_pages(s, from, shared);
        scene_shape(s, 32 / group, group, 256, 2, &fv__cost_cpu_amx);
        s->bounds.has_last = true;
        const int64_t flat = cost_with(t, s, m, FV_SHARING_OFF, 1, "16 requests, flat"),
                      found = cost_with(t, s, m, FV_SHARING_FIND, 0, "16 requests, shared");
        expect(t, m->report.num_shared_segments == 1 && found * (group == 1 ? 4 : 2) <= flat,
               "sharing costs %lld, flat %lld", (long long)found, (long long)flat);
    }
    /* Alone, or with a prefix that is not worth a merge: the flat plan, byte for byte. */
    for (int round = 0; round < 2; round++) {
        equal_requests(s, round == 0 ? 1 : 2, 1, 4096, 16);
        shared[1] = 1;
        if (round == 1) share_pages(s, from, shared);
        scene_shape(s, 8, 4, 64, 4, &fv__cost_cpu);
        cost_with(t, s, m, FV_SHARING_FIND, 2, "nothing worth sharing");
        cost_with(t, s, &other, FV_SHARING_OFF, 2, "nothing worth sharing");
        expect(t,
               m->plan->bytes == other.plan->bytes &&
                   !memcmp(m->blob, other.blob, (size_t)m->plan->bytes),
               "a plan that shares nothing is not the flat one");
    }
    /* A tree of 1 x 4 x 16 with 2048, 512 and 128 keys: more levels cost less. */
    equal_requests(s, 64, 1, 2048 + 512 + 128, 16);
    for (int r = 1; r < 64; r++) {
        from[r] = r % 16 ? r / 16 * 16 : 0;
        shared[r] = r % 16 ? 128 + 32 : 128;
    }
    share_pages(s, from, shared);
    scene_shape(s, 8, 4, 256, 8, &fv__cost_cpu);
    int64_t last = INT64_MAX;
    for (int levels = 1; levels <= 3; levels++) {
        const int64_t cost = cost_with(t, s, m, levels == 1 ? FV_SHARING_OFF : FV_SHARING_FIND,
                                       levels, "tree of 1 x 4 x 16");
        expect(t, cost < last, "%d levels cost %lld, one less %lld", levels, (long long)cost,
               (long long)last);
        last = cost;
    }
    expect(t, m->report.num_shared_segments == 5, "%lld shared segments",
           (long long)m->report.num_shared_segments);
    /* The same page ids at other positions are not a shared prefix. */
    equal_requests(s, 2, 1, 4096, 16);
    shared[1] = 256;
    share_pages(s, from, shared);
    ((fv__request *)s->batch.requests)[1].first_position = 16;
    scene_shape(s, 8, 4, 64, 4, &fv__cost_cpu);
    cost_with(t, s, m, FV_SHARING_FIND, 2, "other positions");
    expect(t, m->report.num_shared_segments == 0, "pages at other positions are shared");
    made_free(&other);
}

/* ---- lists in another order ---- */

#define BLOCKS 12

/* A block-sparse mask as a segment for each (block row, block column): sorted, backwards,
 * shuffled; then one block twice. */
static void block_lists(totals *t, scene *s, made *m, rng *r)
{
    made other = { 0 };
    fv_segment x[BLOCKS * BLOCKS + 1] = { 0 };
    int64_t n = 0;
    equal_requests(s, 1, BLOCKS * 16, BLOCKS * 16, 16);
    scene_shape(s, 2, 4, 64, 8, &fv__cost_sm80);
    for (int row = 0; row < BLOCKS; row++)
        for (int column = 0; column < BLOCKS; column++)
            if (rng_chance(r, 40))
                x[n++] = (fv_segment){ .row_first = row * 16,
                                       .num_rows = 16,
                                       .first_page = column,
                                       .num_pages = 1,
                                       .num_keys = 16,
                                       .first_position = column * 16 };
    s->given.segments = x;
    s->given.num_segments = n;
    scene_limits(s);
    s->limits.max_levels = BLOCKS;
    s->limits.max_pages = BLOCKS * BLOCKS + 1;
    s->limits.max_kv_tokens = 16 * (BLOCKS * BLOCKS + 1);
    if (!good_plan(t, s, m, "blocks in order")) return;
    for (int round = 0; round < 5; round++) {
        scene_shuffle_segments(s, r);
        if (good_plan(t, s, &other, "blocks in any order"))
            expect(t,
                   m->plan->bytes == other.plan->bytes &&
                       !memcmp(m->blob, other.blob, (size_t)m->plan->bytes),
                   "the order of the blocks shows in the plan");
    }
    x[n] = x[n / 2];
    s->given.num_segments = n + 1;
    scene_limits(s);
    s->limits.max_levels = BLOCKS + 1;
    s->limits.max_pages = BLOCKS * BLOCKS + 1;
    t->scene = "a block twice";
    const fv_status status = make_plan(m, s, 0);
    expect(t,
           status == FV_E_INVALID && !strncmp(m->err.field, "batch.segments[", 15) &&
               strstr(m->err.text, "twice"),
           "a block that is given twice: %d %s", status, m->err.text);
    made_free(&other);
}

/* ---- nothing to do ---- */

static void nothing(totals *t, scene *s, made *m)
{
    const int32_t none[3] = { 0, 0, 0 }, one[3] = { 1, 1, 1 };
    for (int paged = 0; paged < 2; paged++)
        for (int kind = 0; kind < 3; kind++) {
            scene_clear(s);
            scene_requests(s, kind == 0 ? 0 : 3, kind == 1 ? none : one, none, paged ? 16 : 0);
            scene_shape(s, 8, 4, 64, 7, &fv__cost_cpu);
            scene_limits(s);
            if (!good_plan(t, s, m, "nothing to compute")) continue;
            expect(t, m->plan->num_pieces == (kind == 2 ? 24 : 0) && m->report.total_cost == 0,
                   "%d pieces", m->plan->num_pieces);
        }
}

/* A captured launch: the number of workers does not depend on the batch, and the cap is kept. */
static void caps(totals *t, scene *s, made *m)
{
    for (int32_t cap = 1; cap <= 200; cap += 33) {
        equal_requests(s, 9, 3, 700, 16);
        scene_shape(s, 4, 2, 64, 132, &fv__cost_sm80);
        scene_limits(s);
        s->limits.workers = cap;
        if (good_plan(t, s, m, "worker cap"))
            expect(t, m->plan->num_workers == fv__min32(cap, 132), "%d workers",
                   m->plan->num_workers);
    }
}

/* Workers that can take pieces as they come: a prompt's tiles, which end small, are a queue and not cut; equal ones are shared out. */
static void queue(totals *t, scene *s, made *m)
{
    for (int i = 0; i < 2; i++) {
        if (i == 0) equal_requests(s, 2, 2048, 2048, 16);
        else equal_requests(s, 64, 1, 4096, 16);
        scene_shape(s, 8, 4, 128, 64, &fv__cost_sm80);
        s->shape.queue = 1;
        s->bounds = (fv__bounds){ .has_last = true };
        scene_limits(s);
        if (!good_plan(t, s, m, "queue")) continue;
        expect(t, m->plan->queue == (i == 0), "%d: queue %d", i, m->plan->queue);
        expect(t, i || (m->plan->num_slots == 0 && m->plan->num_pieces == 2 * 64 * 8), "%d pieces", m->plan->num_pieces);
        s->shape.queue = 0;
        if (good_plan(t, s, m, "no queue")) expect(t, !m->plan->queue, "a queue that nobody asked for");
        s->shape.queue = 128;
        if (good_plan(t, s, m, "tiles as wide as asked for")) expect(t, m->plan->queue == (i == 0), "%d: queue %d", i, m->plan->queue);
        s->shape.queue = 129;
        if (good_plan(t, s, m, "wider tiles asked for")) expect(t, !m->plan->queue, "a queue of narrow tiles");
    }
}

/* Do the worker's pieces have the same rows and keys, of units that follow one another? */
static bool one_bundle(const fv__plan_head *p, int32_t worker, int32_t units)
{
    const int32_t *first = FV__PLAN_ARRAY(p, int32_t, worker_first);
    const fv__piece *a = FV__PLAN_ARRAY(p, fv__piece, pieces) + first[worker];
    bool same = first[worker + 1] - first[worker] == units;
    for (int32_t i = 1; i < units && same; i++)
        same = a[i].segment == a->segment && a[i].row_first == a->row_first && a[i].key_first == a->key_first &&
               a[i].num_keys == a->num_keys && a[i].unit == a->unit + i;
    return same;
}

/* A few rows of few requests: units go together and keys are cut, where a worker would have had a unit, or a part of one. Not where each has enough
 * units anyway, where its blocks are few, or rows are many. */
static void bundles(totals *t, scene *s, made *m)
{
    static const struct {
        int32_t requests, rows, keys, together, bundle, parts;
    } cases[] = { { 1, 1, 4096, 8, 4, 8 }, { 2, 1, 4096, 8, 4, 4 }, { 5, 1, 4096, 8, 8, 3 }, { 8, 1, 4096, 8, 0, 0 }, { 1, 1, 1024, 8, 2, 4 },
                  { 1, 1, 256, 8, 0, 0 }, { 1, 2, 4096, 8, 4, 8 }, { 1, 3, 4096, 8, 0, 0 }, { 1, 1, 4096, 2, 2, 4 }, { 1, 1, 4096, 0, 0, 0 } };
    for (int i = 0; i < FV__COUNT(cases); i++) {
        equal_requests(s, cases[i].requests, cases[i].rows, cases[i].keys, 16);
        scene_shape(s, 8, 4, 64, 16, &fv__cost_cpu);
        s->shape.together = cases[i].together;
        s->shape.together_rows = 8;
        scene_limits(s);
        if (!good_plan(t, s, m, "bundles")) continue;
        int32_t found = 0;
        for (int32_t w = 0; w < m->plan->num_workers && cases[i].bundle; w++) found += one_bundle(m->plan, w, cases[i].bundle);
        const int32_t pieces = cases[i].requests * 8 * cases[i].parts;
        expect(t, !cases[i].bundle || (found == pieces / cases[i].bundle && m->plan->num_pieces == pieces), "%d: %d workers with bundles, %d pieces", i, found,
               m->plan->num_pieces);
        expect(t, cases[i].bundle || m->plan->num_pieces <= cases[i].requests * 8 + 15, "%d: %d pieces", i, m->plan->num_pieces);
    }
}

/* Places taken one after another are those taken each for itself. */
static void steps(totals *t, rng *r)
{
    for (int i = 0; i < 40; i++) {
        const int64_t most = i < 20 ? 1000 : INT32_MAX, unit = i < 30 ? 1 : INT64_C(1) << 30;
        const int64_t total = i < 4 ? i : rng_between(r, 0, most) * unit;
        const int32_t workers = (int32_t)rng_between(r, 1, 500);
        fv__cut_steps at = fv__cut_steps_of(total, workers);
        int64_t sum = 0;
        bool same = true;
        for (int32_t w = 1; w <= workers; w++) {
            sum += fv__cut_step(&at);
            same = same && sum == at.place && at.place == fv__cut_place(total, w, workers);
        }
        expect(t, same && sum == total, "steps of %lld by %d workers", (long long)total, workers);
    }
}

void check_scenarios(totals *t, rng *r)
{
    scene s = { 0 };
    made m = { 0 };
    const int64_t passed = t->passed, failed = t->failed;
    long_among_short(t, &s, &m);
    zipf(t, &s, &m);
    triangle(t, &s, &m);
    window(t, &s, &m);
    padding(t, &s, &m, r);
    neighbours(t, &s, &m, r);
    prefill_as_decode(t, &s, &m);
    prefixes(t, &s, &m);
    sharing_pays(t, &s, &m);
    short_steps(t, &s, &m);
    block_lists(t, &s, &m, r);
    nothing(t, &s, &m);
    caps(t, &s, &m);
    queue(t, &s, &m);
    bundles(t, &s, &m);
    steps(t, r);
    printf("scenarios: %lld checks, %lld failed\n",
           (long long)(t->passed - passed + t->failed - failed), (long long)(t->failed - failed));
    made_free(&m);
    free(s.memory.base);
}

/* ---- refusals ---- */

typedef struct refusal {
    const char *field;
    fv_status status;
    int64_t value, limit;
    fv_segment segment;                 /* the second of two; 0 fields as given */
} refusal;

static const int32_t falling[] = { 3, 2 }, outside[] = { 3, 10 }, below[] = { -1, 3 },
                     same[] = { 4, 4 };
static const int32_t far[] = { 0, (1 << 30) + 1 }, negative[] = { 0, -5 };

/* 10 rows, 2 kv heads, 8 page entries of 16; the plan holds 2 segments, 20 rows, 128 keys, 8
 * pages, 2 levels. */
static const refusal refusals[] = {
    { "batch.segments[1].num_rows",
      FV_E_INVALID,
      -1,
      0,
      { .num_rows = -1, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].num_rows",
      FV_E_INVALID,
      11,
      10,
      { .num_rows = 11, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].row_first",
      FV_E_INVALID,
      -1,
      0,
      { .row_first = -1, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].row_first",
      FV_E_INVALID,
      9,
      8,
      { .row_first = 9, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].row_first",
      FV_E_INVALID,
      INT64_MAX,
      8,
      { .row_first = INT64_MAX, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].rows[1]",
      FV_E_INVALID,
      2,
      3,
      { .rows = falling, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].rows[1]",
      FV_E_INVALID,
      4,
      4,
      { .rows = same, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].rows[1]",
      FV_E_INVALID,
      10,
      10,
      { .rows = outside, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].rows[0]",
      FV_E_INVALID,
      -1,
      10,
      { .rows = below, .num_rows = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].kv_head_first",
      FV_E_INVALID,
      -1,
      0,
      { .num_rows = 2, .kv_head_first = -1, .num_kv_heads = 1, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].kv_head_first",
      FV_E_INVALID,
      1,
      0,
      { .num_rows = 2, .kv_head_first = 1, .num_kv_heads = 2, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].kv_head_first",
      FV_E_INVALID,
      1,
      0,
      { .num_rows = 2, .kv_head_first = 1, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].num_kv_heads",
      FV_E_INVALID,
      -1,
      0,
      { .num_rows = 2, .num_kv_heads = -1, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].first_page",
      FV_E_INVALID,
      -1,
      0,
      { .num_rows = 2, .first_page = -1, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].first_page",
      FV_E_INVALID,
      7,
      6,
      { .num_rows = 2, .first_page = 7, .num_pages = 2, .num_keys = 16 } },
    { "batch.segments[1].num_pages",
      FV_E_INVALID,
      9,
      8,
      { .num_rows = 2, .num_pages = 9, .num_keys = 16 } },
    { "batch.segments[1].num_pages",
      FV_E_INVALID,
      -1,
      0,
      { .num_rows = 2, .num_pages = -1, .num_keys = 0 } },
    { "batch.segments[1].num_keys",
      FV_E_INVALID,
      33,
      32,
      { .num_rows = 2, .num_pages = 2, .num_keys = 33 } },
    { "batch.segments[1].num_keys",
      FV_E_INVALID,
      -1,
      (1 << 30) - 1,
      { .num_rows = 2, .num_pages = 2, .num_keys = -1 } },
    { "batch.segments[1].first_position",
      FV_E_INVALID,
      -1,
      (1 << 30) - 16,
      { .num_rows = 2, .first_position = -1, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].first_position",
      FV_E_INVALID,
      1 << 30,
      (1 << 30) - 16,
      { .num_rows = 2, .first_position = 1 << 30, .num_pages = 1, .num_keys = 16 } },
    { "batch.segments[1].page_positions[1]",
      FV_E_INVALID,
      (1 << 30) + 1,
      (1 << 30) - 16,
      { .num_rows = 2, .num_pages = 2, .num_keys = 32, .page_positions = far } },
    { "batch.segments[1].page_positions[1]",
      FV_E_INVALID,
      -5,
      (1 << 30) - 16,
      { .num_rows = 2, .num_pages = 2, .num_keys = 32, .page_positions = negative } },
    { "batch.segments[1].num_keys",
      FV_E_CAPACITY,
      112,
      120,
      { .num_rows = 2, .first_page = 1, .num_pages = 7, .num_keys = 112 } },
    { "batch.segments[1].reserved",
      FV_E_INVALID,
      7,
      0,
      { .num_rows = 2, .num_pages = 1, .num_keys = 16, .reserved = { 0, 7 } } },
    { "batch.segments[1]",
      FV_E_INVALID,
      0,
      0,
      { .num_rows = 2, .num_pages = 1, .num_keys = 16 } }, /* page 0 again */
};

static void two_segments(scene *s, int32_t page_size)
{
    const int32_t rows[2] = { 4, 6 }, keys[2] = { 64, 64 };
    scene_clear(s);
    scene_requests(s, 2, rows, keys, page_size);
    scene_shape(s, 2, 4, 64, 3, &fv__cost_cpu);
    fv_segment *x = arena_take(&s->memory, 4, sizeof *x);
    x[0] = (fv_segment){ .num_rows = 10, .num_pages = page_size ? 1 : 0, .num_keys = 16 };
    s->given.segments = x;
    s->given.num_segments = 2;
    s->limits = (fv_plan_desc){ .max_requests = 2,
                                .max_rows = 10,
                                .max_kv_tokens = 120,
                                .max_pages = 8,
                                .max_segments = 2,
                                .max_segment_rows = 20,
                                .max_levels = 2 };
}

static void refuse(totals *t, made *m, const scene *s, const char *field, fv_status status,
                   int64_t value, int64_t limit)
{
    const fv_status got = make_plan(m, s, 0x5A);
    char number[24];
    snprintf(number, sizeof number, "%lld", (long long)value);
    t->scene = field;
    expect(t,
           got == status && m->err.status == status && !strcmp(m->err.field, field) &&
               m->err.value == value && m->err.limit == limit && strstr(m->err.text, number) &&
               guards_hold(m),
           "status %d, field %s, value %lld, limit %lld: %s", got, m->err.field,
           (long long)m->err.value, (long long)m->err.limit, m->err.text);
    t->scene = "refusals";
}

static void wrong_segments(totals *t, scene *s, made *m)
{
    for (int i = 0; i < FV__COUNT(refusals); i++) {
        two_segments(s, 16);
        ((fv_segment *)s->given.segments)[1] = refusals[i].segment;
        refuse(t, m, s, refusals[i].field, refusals[i].status, refusals[i].value,
               refusals[i].limit);
    }
    /* A good one in its place is taken, so that each refusal is for its own reason. */
    two_segments(s, 16);
    ((fv_segment *)s->given.segments)[1] = (fv_segment){
        .num_rows = 2, .first_page = 1, .num_pages = 1, .num_keys = 16, .first_position = 16
    };
    good_plan(t, s, m, "two good segments");
}

static void wrong_counts(totals *t, scene *s, made *m)
{
    fv_segment *x;
    two_segments(s, 16);                /* too many segments */
    x = (fv_segment *)s->given.segments;
    x[1] = x[2] = (fv_segment){
        .num_rows = 1, .first_page = 1, .num_pages = 1, .num_keys = 16, .first_position = 16
    };
    s->given.num_segments = 3;
    refuse(t, m, s, "batch.num_segments", FV_E_CAPACITY, 3, 2);
    two_segments(s, 16);                /* a plan without room for any */
    s->limits.max_segments = 0;
    refuse(t, m, s, "batch.num_segments", FV_E_CAPACITY, 2, 0);
    two_segments(s, 16);                /* too many rows */
    x = (fv_segment *)s->given.segments;
    x[1] = (fv_segment){
        .num_rows = 10, .first_page = 1, .num_pages = 1, .num_keys = 16, .first_position = 16
    };
    s->limits.max_segment_rows = 19;
    refuse(t, m, s, "batch.segments[1].num_rows", FV_E_CAPACITY, 10, 19);
    two_segments(s, 16);                /* too many levels */
    x = (fv_segment *)s->given.segments;
    x[1] = (fv_segment){
        .num_rows = 1, .first_page = 1, .num_pages = 1, .num_keys = 16, .first_position = 16
    };
    s->limits.max_levels = 1;
    refuse(t, m, s, "batch.segments", FV_E_CAPACITY, 2, 1);
    two_segments(s, 16);                /* the same heads are needed for that */
    x = (fv_segment *)s->given.segments;
    x[0].num_kv_heads = 1;
    x[1] = (fv_segment){
        .num_rows = 1, .kv_head_first = 1, .num_kv_heads = 1, .num_pages = 1, .num_keys = 16
    };
    s->limits.max_levels = 1;
    good_plan(t, s, m, "other heads");
    two_segments(s, 16);                /* pages of all segments */
    x = (fv_segment *)s->given.segments;
    x[1] = (fv_segment){ .num_rows = 1, .num_pages = 8, .num_keys = 16, .first_position = 16 };
    refuse(t, m, s, "batch.segments[1].num_pages", FV_E_CAPACITY, 8, 8);
}

/* Invariant mode: rows of two segments keep a partial for each chunk; more than there is room for are
 * refused where segments are given, and shared prefixes that would need them are not used. */
static void too_many_chunks(totals *t, scene *s, made *m)
{
    int from[20] = { 0 }, shared[20] = { 0 };
    equal_requests(s, 20, 3, 6400, 16);
    for (int r = 1; r < 20; r++) shared[r] = 375;
    share_pages(s, from, shared);
    scene_shape(s, 2, 4, 64, 2, &fv__cost_cpu);
    scene_limits(s);
    s->limits.sharing = FV_SHARING_FIND;
    if (good_plan(t, s, m, "shared"))
        expect(t, m->report.num_shared_segments == 1, "%lld shared segments",
               (long long)m->report.num_shared_segments);
    s->limits.invariant = true;
    s->limits.chunk = 64;
    if (good_plan(t, s, m, "too many chunks to share"))
        expect(t, m->report.num_shared_segments == 0, "%lld shared segments",
               (long long)m->report.num_shared_segments);

    fv_segment x[2] = { { .num_rows = 60, .num_pages = 375, .num_keys = 6000 },
                        { .num_rows = 40, .first_page = 775, .num_pages = 25, .num_keys = 400,
                          .first_position = 6000 } };
    s->given.segments = x;
    s->given.num_segments = 2;
    scene_limits(s);
    s->limits.sharing = FV_SHARING_OFF;
    s->limits.max_levels = 2;
    t->scene = "too many chunks given";
    const fv_status status = make_plan(m, s, 0);
    expect(t, status == FV_E_CAPACITY && !strcmp(m->err.field, "limits.chunk") && guards_hold(m),
           "%d %s", status, m->err.text);
}

static void wrong_ragged(totals *t, scene *s, made *m)
{
    const int32_t positions[1] = { 0 };
    two_segments(s, 0);
    fv_segment *x = (fv_segment *)s->given.segments;
    x[1] = (fv_segment){ .num_rows = 1,
                         .first_page = 16,
                         .num_keys = 16,
                         .first_position = 16,
                         .page_positions = positions };
    refuse(t, m, s, "batch.segments[1].page_positions", FV_E_INVALID, 1, 0);
    two_segments(s, 0);
    x = (fv_segment *)s->given.segments;
    x[1] = (fv_segment){ .num_rows = 1, .first_page = 15, .num_keys = 16, .first_position = 5 };
    refuse(t, m, s, "batch.segments[1]", FV_E_INVALID, 15, 0);
    x[1].first_page = 16;
    good_plan(t, s, m, "ragged segments side by side");
}

/* Maxima that would need more than 2^31 pieces, or more bytes than there are. */
static void wrong_maxima(totals *t, scene *s)
{
    fv__plan_capacity c;
    fv_error err;
    two_segments(s, 16);
    s->limits = (fv_plan_desc){ .max_requests = 1 << 30,
                                .max_rows = 1 << 30,
                                .max_kv_tokens = INT64_C(1) << 48,
                                .max_pages = INT64_C(1) << 40 };
    expect(t,
           fv__plan_capacity_of(&s->shape, &s->limits, true, &c, &err) == FV_E_INVALID &&
               !strcmp(err.field, "limits.max_rows"),
           "%s: %s", err.field, err.text);
    s->limits = (fv_plan_desc){ .max_requests = 1, .max_rows = 1 << 20, .splits = 4096 };
    expect(t, fv__plan_capacity_of(&s->shape, &s->limits, true, &c, &err) == FV_E_INVALID,
           "too many splits are taken");
    s->limits = (fv_plan_desc){ 0 };
    expect(t,
           fv__plan_capacity_of(&s->shape, &s->limits, false, &c, &err) == FV_OK &&
               c.blob_bytes > 0,
           "maxima of nothing");
    s->limits = (fv_plan_desc){ .max_requests = 1000,
                                .max_rows = 1000,
                                .max_kv_tokens = INT64_C(1) << 40,
                                .invariant = true,
                                .chunk = 64 };
    expect(t,
           fv__plan_capacity_of(&s->shape, &s->limits, false, &c, &err) == FV_E_INVALID &&
               !strcmp(err.field, "limits.chunk"),
           "%s: %s", err.field, err.text);
}

void check_refusals(totals *t)
{
    scene s = { 0 };
    made m = { 0 };
    const int64_t passed = t->passed, failed = t->failed;
    wrong_segments(t, &s, &m);
    wrong_counts(t, &s, &m);
    wrong_ragged(t, &s, &m);
    too_many_chunks(t, &s, &m);
    wrong_maxima(t, &s);
    printf("refusals: %lld checks, %lld failed\n",
           (long long)(t->passed - passed + t->failed - failed), (long long)(t->failed - failed));
    made_free(&m);
    free(s.memory.base);
}
