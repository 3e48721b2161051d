/* SPDX-License-Identifier: Apache-2.0 */
/* attend_few_squares.h -- few packed rows over bf16 on levels with matrix tiles: K and V are operands as they lie in their pages.
 *
 *   square   16 keys x 32 d: rows of 64 bytes, a token apart, in one page
 *   scores   S[key][row] = K Q^T: a square of K is a left operand, its pairs of d meet those of Q
 *   values   a square of V is a right operand whose pairs are neighbours in d of one key: a weight with a zero behind it sums even d, one with a zero
 *            before it odd d, so that nothing of V has to be moved. A weight is two numbers of bf16, the second what the first leaves: 16 bits. A
 *            packed row is four rows of the left operand, {even, odd d} x {first, second}
 *
 * Three rows and more. For a key and 4 rows of d = 128 that is 8 rows of tiles loaded, 8 cycles of products and 16 instructions: 8 for weights and 3
 * that pack them, 1 for scores, 4 for O, and those that ask ahead. By vectors it is 16 dot products, 32 multiply-adds, 24 instructions that make their
 * operands, 11 that sum across lanes, 7 for weights.
 *
 * As in attend_tiles.h m stands above the first score that a row meets, and moves when a score passes it. Blocks that some row does not see, and rows
 * with hooks, have the softmax of attend_few.h. Part of attend_tmpl.c. */

enum { SQUARES = KEYS / TILE, WEIGHT_ROWS = 4, TILE_SIZE = 1024, FIRST_LINES = 12, LAST_LINES = TILE - FIRST_LINES };

/* One or two rows are as fast by vectors. */
static bool fits_squares(const work *w)
{
    if (w->packed <= 2 || w->packed > FEW) return false;
    return w->tiles && !w->tiled && w->k_direct && w->v_direct && !w->has_weight && w->p->k == FV__DTYPE_bf16 && w->p->v == FV__DTYPE_bf16
           && w->dk % TILE_DEPTH == 0 && w->dv % TILE_DEPTH == 0;
}

/* Tiles of rows of weights. */
static int weight_tiles(int rows) { return rows * WEIGHT_ROWS > TILE ? 2 : 1; }

/* As ask_ahead. Of the lines that a product reads as many are asked for: FIRST_LINES beside it, the others beside weights and sums, so that memory is
 * never idle. */
VFN void ask_lines(ahead *next, int lines)
{
    const char *at = next->at;
    if (next->end - at < 64 * lines) {
        ask_ahead(next, 64 * lines);
        return;
    }
    V_UNROLL
    for (int i = 0; i < lines; i++) __builtin_prefetch(at + 64 * i, 0, 1);
    next->at = at + 64 * lines;
}

/* ------------------------------------------------------------------------------------------------------------- scratch
 * That of the path for many: Q in tile_k, [unit][pair of d][row] pairs; scores in tile_s, [key][row]; weights in tile_p, [square][tile of rows]
 * [16][16 keys] pairs; their sums with V in tile_o, [32 d][tile of rows][16][16]. A tile of fewer columns is stored row by row over what the row before has
 * too much, and loaded with what follows in columns that nobody reads. */

static char *square_q(const work *w, int at) { return (char *)w->tile_k + 2 * (int64_t)at * whole_few(w->packed) * w->dk; }

static void load_squares(work *w, int at)
{
    const int rows = whole_few(w->packed);
    char *to = square_q(w, at);
    for (int r = 0; r < rows; r++) {
        const char *from = find_query(w, r, w->dk, (char *)w->line);
        for (int i = 0; i < w->dk / 2; i++) memcpy(to + 4 * ((int64_t)i * rows + r), from + 4 * i, 4);
    }
    memset(w->tile_p, 0, SQUARES * 2 * TILE_SIZE);
}

/* Where the squares of a block and unit lie, and how far apart their tokens are. */
typedef struct squares {
    const char *at[SQUARES];
    int64_t step;
} squares;

/* Keys some of which nobody sees, or that do not lie in one page, are put together in `copies`. */
static squares find_squares(const work *w, const block *b, const fv__view *v, const char *const *rows, int at, int dim, float *copies)
{
    const int64_t shift = unit_shift(w, v, FV__DTYPE_bf16, at), bytes = 2 * (int64_t)dim;
    const char *from[KEYS];
    squares x;
    if (b->seen == ~(uint64_t)0 && b->first % TILE == 0 && w->plan->page_size % TILE == 0) {
        for (int i = 0; i < SQUARES; i++) x.at[i] = rows[i * TILE] + shift;
        x.step = 2 * v->stride[w->plan->page_size ? 1 : 0];
        return x;
    }
    move_rows(w, b, rows, shift, from);
    for (int i = 0; i < KEYS; i++)
        for (int64_t d = 0; d < bytes; d += 64)
            v_storei((int32_t *)(void *)((char *)copies + i * bytes + d), v_loadi((const int32_t *)(const void *)(from[i] + d)));
    for (int i = 0; i < SQUARES; i++) x.at[i] = (char *)copies + i * TILE * bytes;
    x.step = bytes;
    return x;
}

/* -------------------------------------------------------------------------------------------------------------- scores */

#define ZERO_SUMS() do { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3); } while (0)
#define STORE_SUMS(to, apart, step) do { \
    TILE_STORE(0, to, step); \
    TILE_STORE(1, (to) + (apart), step); \
    TILE_STORE(2, (to) + 2 * (apart), step); \
    TILE_STORE(3, (to) + 3 * (apart), step); \
} while (0)

static __attribute__((noinline)) void score_squares(const work *w, const block *b, int at, ahead *next)
{
    const squares k = find_squares(w, b, &w->run->k, b->k_row, at, w->dk, w->k);
    const int64_t narrow = 4 * whole_few(w->packed);
    const char *q = square_q(w, at);
    char *s = (char *)w->tile_s;
    ZERO_SUMS();
    for (int d = 0; d < 2 * w->dk; d += 64, q += TILE * narrow) {
        TILE_LOAD(4, q, narrow);
        TILE_LOAD(5, k.at[0] + d, k.step);
        TILE_ADD(0, 5, 4);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(6, k.at[1] + d, k.step);
        TILE_ADD(1, 6, 4);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(7, k.at[2] + d, k.step);
        TILE_ADD(2, 7, 4);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(5, k.at[3] + d, k.step);
        TILE_ADD(3, 5, 4);
        ask_lines(next, FIRST_LINES);
    }
    STORE_SUMS(s, TILE * narrow, narrow);
}

/* ------------------------------------------------------------------------------------------------------------- weights */

#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31

/* [key][row] of V_LANES keys to vectors of rows. */
VFN void part_rows(int rows, const float *from, v_i32 *y)
{
    v_i32 z[FEW];
    V_UNROLL
    for (int i = 0; i < rows; i++) y[i] = (v_i32)v_bits_of(v_load(from + i * V_LANES));
    V_UNROLL
    for (int n = 1; n < rows; n *= 2) {
        V_UNROLL
        for (int i = 0; i < rows / 2; i++) {
            z[i] = V_PICK(y[2 * i], y[2 * i + 1], EVEN_LANES);
            z[rows / 2 + i] = V_PICK(y[2 * i], y[2 * i + 1], ODD_LANES);
        }
        V_UNROLL
        for (int i = 0; i < rows; i++) y[i] = z[i];
    }
}

/* The same of all keys, to [row][KEYS]. */
VFN void part_block(int rows, const float *from, float *to)
{
    for (int key = 0; key < KEYS; key += V_LANES, from += rows * V_LANES) {
        v_i32 y[FEW];
        part_rows(rows, from, y);
        V_UNROLL
        for (int r = 0; r < rows; r++) v_store(to + r * KEYS + key, v_of_bits((v_u32)y[r]));
    }
}

/* Weights of a row and a square. */
VFN void pack_square(v_f32 x, char *p)
{
    const v_u32 first = v_bits_of(x) & 0xFFFF0000u, second = (v_bits_of(x - v_of_bits(first)) + 0x8000) & 0xFFFF0000u;
    int32_t *to = (int32_t *)(void *)p;
    v_storei(to, (v_i32)(first >> 16));
    v_storei(to + TILE, (v_i32)(second >> 16));
    v_storei(to + 2 * TILE, (v_i32)first);
    v_storei(to + 3 * TILE, (v_i32)second);
}

/* Rows all of which see all keys, with m as it is. Says whether no score passes what m allows; `anyway`: then it is no number. */
VFN bool weigh_all(work *w, int rows, bool anyway, ahead *next)
{
    const powers k = load_powers(w);
    const float *from = w->tile_s;
    char *p = (char *)w->tile_p;
    v_f32 sums[EIGHT];
    bool good = true;
    V_UNROLL
    for (int r = 0; r < EIGHT; r++) sums[r] = v_set(0.0f);
    for (int key = 0; key < KEYS; key += V_LANES, from += rows * V_LANES, p += weight_tiles(rows) * TILE_SIZE) {
        v_i32 y[FEW];
        part_rows(rows, from, y);
        V_UNROLL
        for (int r = 0; r < rows; r++) {
            const v_f32 x = power_of(v_fma(v_of_bits((v_u32)y[r]), v_set(w->score_scale), v_set(-w->m[r])), &k);
            sums[r] = sums[r] + x;
            pack_square(x, p + r * WEIGHT_ROWS * 64);
        }
        for (int i = w->dk / TILE_DEPTH; i > 0; i--) ask_lines(next, LAST_LINES);
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) good &= !any_above(sums[r], k.limit);
    if (good || anyway) store_eight(w->l, v_load(w->l) + sum_eight(sums));
    return good;
}

/* m of all rows to HEADROOM above what they have met, or as it is. */
VFN void raise_all(work *w, int rows)
{
    v_f32 lanes[EIGHT];
    V_UNROLL
    for (int r = 0; r < EIGHT; r++) lanes[r] = v_set(-infinity);
    for (int r = 0; r < rows; r++)
        for (int key = 0; key < KEYS; key += V_LANES) lanes[r] = v_max(v_load(w->s + r * KEYS + key) * v_set(w->score_scale), lanes[r]);
    const v_f32 old = v_load(w->m), top = v_max(max_eight(lanes) + v_set((float)HEADROOM), old), alpha = v_exp2_neg(old - top);
    store_eight(w->m, top);
    store_eight(w->l, v_load(w->l) * alpha);
    store_eight(w->alpha, alpha);
}

VFN void weigh_squares(work *w, block *b, int rows, ahead *next)
{
    if (b->whole && b->seen == ~(uint64_t)0 && !w->has_score && !w->has_row_max) {
        store_eight(w->alpha, v_set(1.0f));
        if (w->m[0] != -infinity && weigh_all(w, rows, false, next)) return;
        part_block(rows, w->tile_s, w->s);
        raise_all(w, rows);
        weigh_all(w, rows, true, next);
        return;
    }
    part_block(rows, w->tile_s, w->s);
    few_weigh(w, b);
    for (int key = 0; key < KEYS; key += TILE)
        for (int r = 0; r < rows; r++)
            pack_square(v_load(w->s + r * KEYS + key), (char *)w->tile_p + (key / TILE * weight_tiles(rows) * TILE + r * WEIGHT_ROWS) * 64);
    ask_ahead(next, KEYS * 2 * w->dk / (TILE / LAST_LINES));
}

static __attribute__((noinline)) void weigh_four(work *w, block *b, ahead *next) { weigh_squares(w, b, 4, next); }
static __attribute__((noinline)) void weigh_eight(work *w, block *b, ahead *next) { weigh_squares(w, b, 8, next); }

/* -------------------------------------------------------------------------------------------------------------- values
 * Sums of some columns of squares, 32 d each, and one or two tiles of rows. */

VFN void value_4_columns(const char *p, const squares *v, char *to, ahead *next)
{
    ZERO_SUMS();
    for (int i = 0; i < SQUARES; i++, p += TILE_SIZE) {
        TILE_LOAD(4, p, 64);
        TILE_LOAD(5, v->at[i], v->step);
        TILE_ADD(0, 4, 5);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(6, v->at[i] + 64, v->step);
        TILE_ADD(1, 4, 6);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(7, v->at[i] + 128, v->step);
        TILE_ADD(2, 4, 7);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(5, v->at[i] + 192, v->step);
        TILE_ADD(3, 4, 5);
        ask_lines(next, FIRST_LINES);
    }
    STORE_SUMS(to, TILE_SIZE, 64);
}

VFN void value_2_columns(const char *p, const squares *v, char *to, ahead *next)
{
    ZERO_SUMS();
    for (int i = 0; i < SQUARES; i++, p += 2 * TILE_SIZE) {
        TILE_LOAD(4, p, 64);
        TILE_LOAD(6, v->at[i], v->step);
        TILE_ADD(0, 4, 6);
        TILE_LOAD(5, p + TILE_SIZE, 64);
        TILE_ADD(1, 5, 6);
        ask_lines(next, FIRST_LINES);
        TILE_LOAD(7, v->at[i] + 64, v->step);
        TILE_ADD(2, 4, 7);
        TILE_ADD(3, 5, 7);
        ask_lines(next, FIRST_LINES);
    }
    STORE_SUMS(to, TILE_SIZE, 64);
}

VFN void value_column(const char *p, int tiles, const squares *v, char *to, ahead *next)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int i = 0; i < SQUARES; i++, p += tiles * TILE_SIZE) {
        TILE_LOAD(7, v->at[i], v->step);
        TILE_LOAD(4, p, 64);
        TILE_ADD(0, 4, 7);
        if (tiles > 1) {
            TILE_LOAD(5, p + TILE_SIZE, 64);
            TILE_ADD(1, 5, 7);
        }
        ask_lines(next, FIRST_LINES);
    }
    TILE_STORE(0, to, 64);
    if (tiles > 1) TILE_STORE(1, to + TILE_SIZE, 64);
}

static __attribute__((noinline)) void value_squares(const work *w, const block *b, int at, ahead *next)
{
    squares v = find_squares(w, b, &w->run->v, b->v_row, at, w->dv, w->v);
    const int tiles = weight_tiles(whole_few(w->packed)), columns = w->dv / TILE_DEPTH;
    const char *p = (const char *)w->tile_p;
    char *to = (char *)w->tile_o;
    for (int i = 0, n; i < columns; i += n, to += n * tiles * TILE_SIZE) {
        n = tiles == 1 && columns - i >= 4 ? 4 : tiles == 2 && columns - i >= 2 ? 2 : 1;
        if (n == 4) value_4_columns(p, &v, to, next);
        else if (n == 2) value_2_columns(p, &v, to, next);
        else value_column(p, tiles, &v, to, next);
        for (int k = 0; k < SQUARES; k++) v.at[k] += n * 64;
    }
}

/* o alpha + even and odd d, each of two parts. */
static __attribute__((noinline)) void keep_squares(const work *w, ahead *next)
{
    const int rows = whole_few(w->packed), dv = w->dv, step = weight_tiles(rows) * TILE * TILE;
    for (int r = 0; r < rows; r++) {
        const float *from = w->tile_o + r / WEIGHT_ROWS * TILE * TILE + r % WEIGHT_ROWS * WEIGHT_ROWS * TILE;
        float *o = w->o + (int64_t)r * w->dv_pad;
        const v_f32 alpha = v_set(w->alpha[r]);
        for (int d = 0; d < dv; d += TILE_DEPTH, from += step, o += TILE_DEPTH) {
            v_f32 y[2] = { v_load(from) + v_load(from + TILE), v_load(from + 2 * TILE) + v_load(from + 3 * TILE) };
            join_parts(y);
            v_store(o, v_fma(v_load(o), alpha, y[0]));
            v_store(o + V_LANES, v_fma(v_load(o + V_LANES), alpha, y[1]));
            if (rows < FEW || r % 2 == 0) ask_lines(next, LAST_LINES);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------- a block */

static void attend_squares(work *w, block *b, int at, ahead next[NEXTS])
{
    score_squares(w, b, at, &next[NEXT_K]);
    (whole_few(w->packed) == 4 ? weigh_four : weigh_eight)(w, b, &next[NEXT_K]);
    value_squares(w, b, at, &next[NEXT_V]);
    keep_squares(w, &next[NEXT_V]);
}
