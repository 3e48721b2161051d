/* SPDX-License-Identifier: Apache-2.0 */
/* attend_tmpl.c -- attention on the CPU, for one level: a worker's pieces, or those that it takes, one after another, block of keys by block of keys.
 *
 *   attend_work.h    constants, rows, scratch          attend_few.h     few rows: streamed
 *   attend_block.h   who sees which key, addresses     attend_many.h    many rows, and all rows in the invariant mode: matrix products
 *   attend_out.h     merging, slots, output            attend_tiles.h   the same for levels with matrix tiles
 *   attend_few8.h    few rows over 8-bit integers      attend_few4.h    few rows over 4-bit integers with scales of groups
 *   attend_turn.h    a square of numbers turned        attend_sums.h    the weights of keys, a second pass
 *   attend_pages.h   pages in the order "tiles"         attend_few_tiled.h   few rows over them
 *   attend_few_squares.h   few rows over bf16 by matrix tiles
 *
 * Numbers: scores, weights and states are f32; every block of 64 keys is summed from zero and then added, so that long rows lose nothing; maxima and
 * exponents are in base 2. The blocks of a piece count from its first key, in the invariant mode they and its chunks of plan->chunk keys from
 * position 0: the same wherever rows and keys are cut. */
#include "attend_work.h"

#include "attend_turn.h"
#include "attend_block.h"
#include "attend_out.h"
#include "attend_many.h"
#if V_TILES
#include "attend_tiles.h"
#endif
#include "attend_few.h"
#if V_TILES
#include "attend_few_squares.h"
#endif
#include "attend_sums.h"

fv_status V_NAME(fv__attend_shape)(const fv__problem *problem, const fv_plan_desc *limits, int workers, fv__kernel_shape *out, fv_error *err);
size_t V_NAME(fv__attend_scratch)(const fv__problem *problem, const fv__kernel_shape *shape);
/* The queue's next piece; NULL: there is none. */
static const fv__piece *take_piece(const fv__run *run)
{
    const int32_t left = run->plan->num_pieces - __atomic_fetch_add(run->queue, 1, __ATOMIC_RELAXED);
    return left > 0 ? &FV__PLAN_ARRAY(run->plan, const fv__piece, pieces)[left - 1] : NULL;
}

void V_NAME(fv__attend)(const fv__run *run, const fv__kernel_shape *shape, int worker, void *scratch);
void V_NAME(fv__key_sums)(const fv__run *run, const fv__kernel_shape *shape, int part, int num_parts, void *scratch);

/* ------------------------------------------------------------------------------------------------------------- shape */

enum { TILE_BYTES = 1 << 20 };          /* Q and O of a tile stay in the second-level cache */

static int largest_tile(const fv__problem *p)
{
    int rows = 256, q_bytes = 4;
#if V_TILES
    if (fits_tiles(p)) {
        rows = LARGEST_TILE;
        q_bytes = 2;
    }
#endif
    while (rows > 64 && (int64_t)rows * (pad_lanes(p->dim_qk) * q_bytes + pad_lanes(p->dim_v) * 4) > TILE_BYTES) rows /= 2;
    return rows;
}

fv_status V_NAME(fv__attend_shape)(const fv__problem *problem, const fv_plan_desc *limits, int workers, fv__kernel_shape *out, fv_error *err)
{
    (void)limits;
    (void)err;
    const int largest = largest_tile(problem);
    int units = 1;
    while (problem->group % units || problem->group / units > largest) units++;
    *out = (fv__kernel_shape){ .max_packed = largest, .unit_heads = problem->group / units, .units_per_kv_head = units,
                               .num_units = problem->num_kv_heads * units, .workers = workers, .together = UNITS / 2, .together_rows = MOST_FEW,
                               .queue = MOST_FEW + 1, .cost = &fv__cost_cpu };
#if V_TILES
    if (fits_tiles(problem)) {
        out->cost = &fv__cost_cpu_amx;
        out->together_rows = FEW;
    }
#endif
    strcpy(out->name, "attend_" V_TEXT(FV_ISA_NAME));
    for (int rows = 16; rows <= largest; rows *= 4)
        if (rows >= out->unit_heads) out->tiles[out->num_tiles++] = rows;
    if (!out->num_tiles || out->tiles[out->num_tiles - 1] != largest) out->tiles[out->num_tiles++] = largest;
    out->partial_bytes = slot_floats(out->unit_heads, pad_lanes(problem->dim_v)) * (int64_t)sizeof(float);
    return FV_OK;
}

size_t V_NAME(fv__attend_scratch)(const fv__problem *problem, const fv__kernel_shape *shape)
{
    work w;
    return lay_out(&w, NULL, problem, shape);
}

/* ------------------------------------------------------------------------------------------------------------ pieces */

static block *other_block(work *w, const block *b) { return b == &w->blocks[0] ? &w->blocks[1] : &w->blocks[0]; }

/* Many rows: by tiles where the level has them and the problem fits, else by vectors. */
static void begin_many(work *w)
{
#if V_TILES
    if (w->tiles) load_tiles(w);
    else
#endif
        load_many(w);
}

/* Makes the states of the walk's keys. */
static void attend_walk(work *w, walk x)
{
#if V_TILES
    if (w->tiles) {
        walk_tiles(w, &x);
        end_tiles(w);
        return;
    }
#endif
    begin_states(w, w->padded, w->m, w->l, w->o);
    block *b = next_block(w, &w->blocks[0], &x);
    while (b) {
        block *next = next_block(w, other_block(w, b), &x);
        attend_many(w, b, next);
        b = next;
    }
}

/* Invariant mode: every chunk of keys that the piece has makes states of its own, seen or not. */
static void attend_invariant(work *w)
{
    const walk x = walk_blocks(w, w->piece);
    const int64_t chunk_keys = w->plan->chunk, first = (x.origin + x.key) / chunk_keys;
    const int64_t last = (x.origin + fv__max64(x.end - 1, x.key)) / chunk_keys;
    begin_many(w);
    begin_states(w, w->padded, w->m_all, w->l_all, w->o_all);
    for (int64_t i = first; i <= last; i++) {
        attend_walk(w, (walk){ fv__max64(x.key, i * chunk_keys - x.origin), fv__min64(x.end, (i + 1) * chunk_keys - x.origin), x.origin });
        end_chunk(w, (int)(i - first));
    }
    end_piece(w);
}

static void attend_plain(work *w)
{
    walk x = walk_blocks(w, w->piece);
    begin_many(w);
#if V_TILES
    if (w->tiles && w->piece->slot < 0) {
        walk_tiles(w, &x);
        write_tiles(w);
        return;
    }
#endif
    attend_walk(w, x);
    end_piece(w);
}

/* Q of the unit at hand, and a block of it: few rows. */
static void begin_streamed(work *w, int at)
{
#if V_TILES
    if (w->squares) {
        load_squares(w, at);
        return;
    }
#endif
    load_few(w, at);
}

static void attend_streamed_block(work *w, block *b, int at, ahead next[NEXTS])
{
#if V_TILES
    if (w->squares) {
        attend_squares(w, b, at, next);
        return;
    }
#endif
    attend_few(w, b, at, next);
}

/* `units` pieces of the same rows and keys, of different head units. */
static void attend_streamed(work *w, const fv__piece *pieces, int units)
{
    const int rows = whole_few(w->packed);
    walk x = walk_blocks(w, pieces);
#if V_TILES
    w->squares = fits_squares(w);
#endif
    for (int u = 0; u < units; u++) place_unit(w, u, rows, &pieces[u]);
    for (int u = 0; u < units; u++) {
        enter_unit(w, u);
        begin_streamed(w, u);
        begin_states(w, rows, w->m, w->l, w->o);
    }
    enter_unit(w, 0);
    block *b = next_block(w, &w->blocks[0], &x);
    if (b) point_rows(w, b);
    while (b) {
        block *next = next_block(w, other_block(w, b), &x);
        ahead ask_for[NEXTS];
        if (next) point_rows(w, next);
        plan_ahead(w, next, units, ask_for);
#if V_BYTES
        begin_few4(w, b, units);
#endif
        for (int u = 0; u < units; u++) {
            enter_unit(w, u);
            if (u) shift_block(w, b, w->units[u].kv_head - w->units[u - 1].kv_head);
            attend_streamed_block(w, b, u, ask_for);
        }
        enter_unit(w, 0);
        b = next;
    }
    for (int u = 0; u < units; u++) {
        enter_unit(w, u);
        end_piece(w);
    }
    enter_unit(w, 0);
}

/* How many of the pieces from the first on can be done together. */
static int together(const work *w, const fv__piece *p, int count)
{
    const int most = fv__min32(UNITS, w->max_packed / whole_few(w->packed));
    int n = 1;
    if (w->refine_any && w->by_head) return 1;          /* the units do not share their masks */
    while (n < count && n < most && p[n].segment == p->segment && p[n].row_first == p->row_first && p[n].num_rows == p->num_rows
           && p[n].key_first == p->key_first && p[n].num_keys == p->num_keys)
        n++;
    return n;
}

/* Does the first of `count` pieces, and maybe more. Returns how many. */
static int attend_pieces(work *w, const fv__piece *pieces, int count)
{
    begin_piece(w, pieces);
    if (!w->plan->invariant && w->packed <= (w->tiles ? FEW : MOST_FEW) && !(w->tiled && pieces->key_first % SQUARE)) {
        const int n = together(w, pieces, count);
        attend_streamed(w, pieces, n);
        return n;
    }
    if (w->plan->invariant) attend_invariant(w);
    else attend_plain(w);
    return 1;
}

void V_NAME(fv__attend)(const fv__run *run, const fv__kernel_shape *shape, int worker, void *scratch)
{
    const fv__plan_head *plan = run->plan;
    const int32_t *first = FV__PLAN_ARRAY(plan, const int32_t, worker_first);
    const fv__piece *pieces = FV__PLAN_ARRAY(plan, const fv__piece, pieces);
    work *w = scratch;
    if (worker >= plan->num_workers || (!plan->queue && first[worker] == first[worker + 1])) return;
    memset(w, 0, sizeof *w);
    lay_out(w, scratch, run->problem, shape);
    begin(w, run);
    w->max_packed = shape->max_packed;
#if V_TILES
    w->tiles = fits_tiles(w->p);
    if (w->tiles) open_tiles();
#endif
    if (plan->queue)
        for (const fv__piece *p; (p = take_piece(run)); ) attend_pieces(w, p, 1);
    else
        for (int32_t i = first[worker]; i < first[worker + 1]; ) i += attend_pieces(w, &pieces[i], first[worker + 1] - i);
#if V_TILES
    if (w->tiles) close_tiles();
#endif
}

void V_NAME(fv__key_sums)(const fv__run *run, const fv__kernel_shape *shape, int part, int num_parts, void *scratch)
{
    work *w = scratch;
    memset(w, 0, sizeof *w);
    lay_out(w, scratch, run->problem, shape);
    begin(w, run);
    sum_keys(w, shape, part, num_parts);
}
