/* SPDX-License-Identifier: Apache-2.0 */
/* attend_pages.h -- pages in the order "tiles" of fv_problem.
 *
 *   place    where the row of a token would lie in a page of rows. Places hold what fv_problem says: K a square of 16 tokens x 16 pairs of d, turned;
 *            V the elements of two tokens, side by side
 *
 * A segment begins with a page, so that key k of it is token k % SQUARE of its square and k % 2 of its pair. Paths that multiply pairs read places
 * (square_places, pair_places); for all others a block is put into rows first (untile_keys, untile_values) and read from there.
 *
 * Part of attend_tmpl.c. */

static const char *k_base(const work *w) { return w->tiled ? w->k_plain : w->run->k.data; }
static const char *v_base(const work *w) { return w->tiled ? w->v_plain : w->run->v.data; }
static const int64_t *k_places(const work *w, const block *b) { return w->tiled ? w->k_plain_at : b->k_at; }
static const int64_t *v_places(const work *w, const block *b) { return w->tiled ? w->v_plain_at : b->v_at; }

/* ------------------------------------------------------------------------------------------------------------- places */

/* Keys [*first, *first + n) are a square (n: SQUARE) or a pair (2) of which the block may have a part: the first of its keys that some row sees, and the
 * place of *first. NULL: it sees none of them. */
static const char *first_place(const block *b, const fv__view *v, const int64_t *at, int first, int n)
{
    const uint64_t seen = b->seen & bit_range(first, first + n);
    if (!seen) return NULL;
    const int key = lowest(seen);
    return v->data + 2 * (at[key] + (first - key) * v->stride[1]);
}

/* The places of K and V by key; zeros for squares, pairs of which no row sees anything. Of whole squares. */
static void find_places(const block *b, const fv__view *v, const int64_t *at, int n, const char *nothing, const char **places)
{
    for (int key = 0; key < KEYS; key += n) {
        const char *first = first_place(b, v, at, key, n);
        for (int i = 0; i < n; i++) places[key + i] = first ? first + 2 * i * v->stride[1] : nothing;
    }
}

static void square_places(const work *w, const block *b, const char **places)
{
    find_places(b, &w->run->k, b->k_at, SQUARE, (const char *)w->zeros, places);
}

static void pair_places(const work *w, const block *b, const char **places)
{
    find_places(b, &w->run->v, b->v_at, 2, (const char *)w->zeros, places);
}

/* Pairs one token of which nobody sees are copied, with zeros for it, to `copies` [KEYS][dv]: a weight of 0 times what lies there might be NaN. K does
 * without: its scores are masked. */
static void clean_pairs(const work *w, const block *b, const char **places, void *copies)
{
    for (int key = 0; key < KEYS; key += 2) {
        const uint64_t seen = b->seen >> key & 3;
        if (seen == 0 || seen == 3) continue;
        const uint16_t keep[2] = { seen & 1 ? 0xFFFF : 0, seen & 2 ? 0xFFFF : 0 };
        for (int half = 0; half < 2; half++) {
            uint16_t *to = (uint16_t *)copies + (int64_t)(key + half) * w->dv;
            memcpy(to, places[key + half], 2 * (size_t)w->dv);
            for (int d = 0; d < w->dv; d++) to[d] &= keep[d % 2];
            places[key + half] = (const char *)to;
        }
    }
}

/* --------------------------------------------------------------------------------------------------------------- rows */

/* One square: rows of tokens to `to`, `width` elements each. */
static void untile_square(const char *at, int64_t step, int width, char *to)
{
    for (int d = 0; d < width; d += 2 * SQUARE)
        for (int i = 0; i < SQUARE; i += V_LANES)
            for (int j = 0; j < SQUARE; j += V_LANES) {
                v_i32 x[V_LANES];
                V_UNROLL
                for (int k = 0; k < V_LANES; k++) x[k] = v_loadi((const int32_t *)(const void *)(at + (i + k) * step + 2 * d + 4 * j));
                turn(x);
                V_UNROLL
                for (int k = 0; k < V_LANES; k++) v_storei((int32_t *)(void *)(to + 2 * ((int64_t)(j + k) * width + d) + 4 * i), x[k]);
            }
}

/* The block's keys in rows: key i is row SQUARE + i. What nobody sees is what lies there. */
static void untile_keys(work *w, const block *b)
{
    const fv__view *k = &w->run->k;
    for (int key = -(int)(b->first % SQUARE); key < b->n; key += SQUARE) {
        const char *at = first_place(b, k, b->k_at, key, SQUARE);
        if (at) untile_square(at, 2 * k->stride[1], w->dk, w->k_plain + (int64_t)(SQUARE + key) * w->dk * 2);
    }
}

static void untile_pair(const char *at, int64_t step, int width, uint16_t *to)
{
    for (int half = 0; half < 2; half++, at += step, to += width / 2)
        for (int d = 0; d < width / 2; d++) {
            memcpy(&to[d], at + 4 * d, 2);
            memcpy(&to[width + d], at + 4 * d + 2, 2);
        }
}

static void untile_values(work *w, const block *b)
{
    const fv__view *v = &w->run->v;
    for (int key = -(int)(b->first % 2); key < b->n; key += 2) {
        const char *at = first_place(b, v, b->v_at, key, 2);
        if (at) untile_pair(at, 2 * v->stride[1], w->dv, (uint16_t *)(void *)w->v_plain + (int64_t)(SQUARE + key) * w->dv);
    }
}

#if V_TILES
/* Does the block consist of whole squares? Blocks that count from a position (the invariant mode) may begin within one. */
static bool has_squares(const block *b) { return b->first % SQUARE == 0; }

/* Pairs of a block that has no whole ones, from its rows: to `pairs` [KEYS][dv]. */
static void pair_again(const work *w, const block *b, uint16_t *pairs, const char **places)
{
    const uint16_t *rows = (const uint16_t *)(const void *)w->v_plain + (int64_t)SQUARE * w->dv;
    for (int key = 0; key < KEYS; key++) {
        uint16_t *to = pairs + (int64_t)(key & ~1) * w->dv + key % 2;
        for (int d = 0; d < w->dv; d++) to[2 * d] = b->seen >> key & 1 ? rows[(int64_t)key * w->dv + d] : 0;
        places[key] = (const char *)(pairs + (int64_t)key * w->dv);
    }
}
#endif
