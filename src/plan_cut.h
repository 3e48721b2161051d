/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cut.h -- the arithmetic of the planner: which keys a row tile may see, what a piece
 * costs, where the cost line is cut. Plain functions of integers, no libc: the same text
 * compiles for the host and for a device (define FV__CUT_FN for the latter and declare int32_t,
 * int64_t and uint64_t before it), so that both cut at the same key.
 *
 * Words
 *   item     a row tile x a head unit: what pieces are cut from. The items of a tile have the
 *            same cost
 *   line     all items laid end to end, each as long as its cost. Worker w of W does what lies
 *            between w/W and (w + 1)/W of it
 *   grid     keys j of a segment lie on blocks and chunks counted from `origin`: block (origin +
 *            j) / 64, chunk (origin + j) / chunk. origin is 0, in the invariant mode the
 *            position of the segment's first key (see fv__plan_origin). Neither is below 0
 * */
#ifndef FV__PLAN_CUT_H
#define FV__PLAN_CUT_H

#ifndef FV__CUT_FN
#include <stdint.h>
#define FV__CUT_FN static inline
#endif

#define FV__CUT_BLOCK 64                /* FV__KEY_BLOCK */

/* ---- the grid ---- */

FV__CUT_FN int32_t fv__cut_blocks(int64_t origin, int64_t first, int64_t num)
{
    const uint64_t from = (uint64_t)(origin + first); /* unsigned: a division is a shift */
    return num > 0 ? (int32_t)((from + (uint64_t)num - 1) / FV__CUT_BLOCK - from / FV__CUT_BLOCK) +
                         1
                   : 0;
}

/* Parts that keys [first, first + num) give: one a chunk, one where there are no chunks, one
 * (the identity) of no keys. */
FV__CUT_FN int32_t fv__cut_parts(int64_t origin, int64_t first, int64_t num, int32_t chunk)
{
    return chunk && num > 0
               ? (int32_t)((origin + first + num - 1) / chunk - (origin + first) / chunk + 1)
               : 1;
}

/* The first key of the block that holds key j, at least 0. */
FV__CUT_FN int32_t fv__cut_floor(int64_t origin, int64_t j)
{
    const int64_t k = (origin + j) / FV__CUT_BLOCK * FV__CUT_BLOCK - origin;
    return k > 0 ? (int32_t)k : 0;
}

/* ---- visible keys ---- */

/* Keys of a segment whose first of num_keys sits at `position` that may be visible between key
 * positions first and last: [*lo, *hi), *lo on the grid. None: *lo == *hi. */
FV__CUT_FN void fv__cut_reach(int64_t first, int64_t last, int64_t position, int32_t num_keys,
                              int64_t origin, int32_t *lo, int32_t *hi)
{
    int64_t from = first - position, to = last - position + 1;
    if (from < 0) from = 0;
    if (to > num_keys) to = num_keys;
    *lo = *hi = 0;
    if (from >= to) return;
    *lo = fv__cut_floor(origin, from);
    *hi = (int32_t)to;
}

/* ---- cost ---- */

typedef struct fv__cut_cost {           /* of an item's pieces */
    int64_t piece;                      /* each piece, whatever its keys */
    int64_t block;                      /* each key block */
    int64_t part;                       /* each part that is merged */
} fv__cut_cost;

/* Pieces without keys are free: padding must not move a cut. */
FV__CUT_FN int64_t fv__cut_piece_cost(const fv__cut_cost *c, int32_t blocks, int32_t merged_parts)
{
    return blocks > 0 ? c->piece + blocks * c->block + merged_parts * c->part : 0;
}

/* ---- the cut ---- */

/* Place w/W of a line of length `total`, without overflow. */
FV__CUT_FN int64_t fv__cut_place(int64_t total, int32_t w, int32_t num_workers)
{
    return total / num_workers * w + total % num_workers * w / num_workers;
}

/* The same places one after another, without a division each. */
typedef struct fv__cut_steps {
    int64_t place;                      /* of the last step; 0 before the first */
    int64_t whole, rest;                /* total / num_workers, total % num_workers */
    int64_t carry;                      /* below num_workers: what `place` leaves out, times num_workers */
    int32_t num_workers;
} fv__cut_steps;

FV__CUT_FN fv__cut_steps fv__cut_steps_of(int64_t total, int32_t num_workers)
{
    const fv__cut_steps s = { 0, total / num_workers, total % num_workers, 0, num_workers };
    return s;
}

/* To the next place. Returns how far it lies from the one before. */
FV__CUT_FN int64_t fv__cut_step(fv__cut_steps *s)
{
    int64_t step = s->whole;
    s->carry += s->rest;
    if (s->carry >= s->num_workers) {
        s->carry -= s->num_workers;
        step++;
    }
    s->place += step;
    return step;
}

typedef struct fv__cut_item {
    fv__cut_cost cost;
    int64_t length;                     /* on the line */
    int64_t origin;
    int32_t key_first, key_end;         /* its keys, at least one */
    int32_t chunk;                      /* 0: cuts lie on block borders */
} fv__cut_item;

/* Where the item is cut for the line's place `at` (0 <= at < length, from the item's start): the
 * first key of the right side; key_first: the whole item goes right, key_end: left. Falls never
 * as `at` grows. Cuts that would move the place by no more than `slack` and a merge are not
 * made: a piece and its merge cost more than they even out. */
FV__CUT_FN int32_t fv__cut_key(const fv__cut_item *item, int64_t at, int64_t slack)
{
    const int32_t lo = item->key_first, hi = item->key_end;
    const int32_t blocks = fv__cut_blocks(item->origin, lo, hi - lo);
    const int64_t own = blocks * item->cost.block, all = item->length - item->cost.piece;
    const int64_t per_block =
        all == own ? item->cost.block : all / blocks; /* merged parts of chunks included */
    int64_t k = at > item->cost.piece ? (at - item->cost.piece + per_block / 2) / per_block : 0;
    if (k > blocks) k = blocks;

    int64_t key =
        (item->origin + lo) / FV__CUT_BLOCK * FV__CUT_BLOCK + k * FV__CUT_BLOCK; /* on the grid */
    if (item->chunk) key = (key + item->chunk / 2) / item->chunk * item->chunk;
    key -= item->origin;
    if (k == 0 || key <= lo) return lo;
    if (key >= hi) return hi;

    const int64_t near = slack + item->cost.part;
    const int near_first = fv__cut_blocks(item->origin, lo, key - lo) * per_block <= near;
    const int near_end = fv__cut_blocks(item->origin, key, hi - key) * per_block <= near;
    if (near_first && near_end) return 2 * at < item->length ? lo : hi;
    return near_first ? lo : near_end ? hi : (int32_t)key;
}

/* First key of part `i` of `num_parts` equal ones (given splits); i == num_parts: key_end. Parts
 * may be empty. */
FV__CUT_FN int32_t fv__cut_split(const fv__cut_item *item, int32_t i, int32_t num_parts)
{
    const int32_t lo = item->key_first, hi = item->key_end;
    const int64_t unit = item->chunk ? item->chunk : FV__CUT_BLOCK;
    const int64_t from = (item->origin + lo) / unit, n = (item->origin + hi - 1) / unit - from + 1;
    const int64_t key = (from + n * i / num_parts) * unit - item->origin;
    return key <= lo ? lo : key >= hi ? hi : (int32_t)key;
}

#endif
