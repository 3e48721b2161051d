/* SPDX-License-Identifier: Apache-2.0 */
/* attend_tiles.h -- the path for many packed rows where the level has matrix tiles: the same blocks, masks, hooks and states as attend_many.h, with
 * both products in bf16 pairs summed in f32.
 *
 *   scores   S[key][row] = K[key][d] Q^T[d][row]: K's rows copied together, Q packed in pairs of d once a piece
 *   softmax  lanes along rows, as ever; weights become bf16, two keys side by side, where the scores lay
 *   values   O^T[d][row] = O^T alpha + V^T[d][key] P[key][row]: V turned once a block; O lies turned until the piece or chunk ends
 *
 * A row's m follows its maximum only where that has grown by more than 2^8: o, which lies in the second-level cache, is rarely scaled then.
 *
 * Exact before the products: Q is bf16; K and V are bf16 or narrower types, whose every value bf16 holds (4-bit ones with their group's scale too).
 * Weights are rounded to bf16, as on GPUs. A column of a tile is a packed row and does not depend on its neighbours.
 *
 * Floors for a block of 64 keys, d = 128, 64 packed rows: 128 tile products of 16 cycles; 256 vectors of weights; 32 KB of K and V.
 *
 * Part of attend_tmpl.c. */

/* -------------------------------------------------------------------------------------------------------- the machine
 * Tiles 0..3 are sums, 4 and 5 left operands, 6 and 7 right ones; each 16 rows of 64 bytes. c += a b, where word pairs (2k, 2k+1) of a row of a meet
 * those of row k of b. */
enum { TILE = 16, TILE_DEPTH = 32 };    /* rows and columns of a sum; elements that one product sums */

#ifdef V_EMULATE_TILES
typedef union tile {
    float f[TILE][TILE];
    uint16_t h[TILE][2 * TILE];
} tile;
static _Thread_local tile tile_file[8];

static float half_value(uint16_t h)
{
    const uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static void move_tile(int t, char *base, int64_t step, bool store)
{
    for (int i = 0; i < TILE; i++) {
        if (store) memcpy(base + i * step, tile_file[t].f[i], 64);
        else memcpy(tile_file[t].f[i], base + i * step, 64);
    }
}
static void multiply_tiles(int c, int a, int b)
{
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++)
            for (int k = 0; k < 2 * TILE; k++) tile_file[c].f[i][j] += half_value(tile_file[a].h[i][k]) * half_value(tile_file[b].h[k / 2][2 * j + k % 2]);
}
#define TILE_LOAD(t, base, step) move_tile(t, (char *)(uintptr_t)(base), step, false)
#define TILE_STORE(t, base, step) move_tile(t, (char *)(base), step, true)
#define TILE_ZERO(t) memset(&tile_file[t], 0, sizeof tile_file[t])
#define TILE_ADD(c, a, b) multiply_tiles(c, a, b)
static void open_tiles(void) { }
static void close_tiles(void) { }
#else
#define TILE_LOAD(t, base, step) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(base), "r"((int64_t)(step)) : "memory")
#define TILE_STORE(t, base, step) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(base), "r"((int64_t)(step)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")
#define TILE_ADD(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

static void open_tiles(void)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = { .palette = 1, .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 }, .rows = { 16, 16, 16, 16, 16, 16, 16, 16 } };
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
}

/* Tiles in use make every switch of threads save 8 KB. */
static void close_tiles(void) { __asm__ volatile("tilerelease"); }
#endif

static bool fits_tiles(const fv__problem *p)
{
    const uint32_t changes = 1u << FV__HOOK_QUERY | 1u << FV__HOOK_KEY | 1u << FV__HOOK_VALUE;
    if (p->q != FV__DTYPE_bf16 || p->hooks & changes || p->k_scale == FV__SCALE_TOKEN_HEAD || p->v_scale == FV__SCALE_TOKEN_HEAD) return false;
    return p->k != FV__DTYPE_f32 && p->k != FV__DTYPE_f16 && p->v != FV__DTYPE_f32 && p->v != FV__DTYPE_f16;
}

/* ------------------------------------------------------------------------------------------------------------ turning */

#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define TURN_STEP(h)                                                                                                                   \
    V_UNROLL                                                                                                                           \
    for (int i = 0; i < 8; i++) {                                                                                                      \
        const int at = i / h * 2 * h + i % h;                                                                                          \
        const v_i32 a = x[at], b = x[at + h];                                                                                          \
        x[at] = V_PICK(a, b, LOW_##h);                                                                                                 \
        x[at + h] = V_PICK(a, b, HIGH_##h);                                                                                            \
    }

/* x[i] lane j becomes x[j] lane i. */
VFN void turn(v_i32 *x)
{
    TURN_STEP(8)
    TURN_STEP(4)
    TURN_STEP(2)
    TURN_STEP(1)
}

/* ------------------------------------------------------------------------------------------------------------ operands */

static int tile_depth(int n) { return (n + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; }

/* Elements from row to row of the narrow K: whole products. */
static int k_step(const work *w) { return tile_depth(w->dk); }

/* Rows of floats to rows of bf16, exactly, from their own place on: step <= 2 * from_step. Zeros up to step. */
static void narrow_rows(float *rows, int from_step, int n, int step, int first, int end)
{
    for (int i = first; i < end; i++) {
        const float *from = rows + (int64_t)i * from_step;
        uint16_t *to = (uint16_t *)rows + (int64_t)i * step;
        for (int d = 0; d < n; d += V_LANES) v_store_u16(to + d, v_bits_of(v_load(from + d)) >> 16);
        for (int d = n; d < step; d++) to[d] = 0;
    }
}

/* Keys [first, end) as rows of bf16 in w->k; zeros for what nobody sees. */
static void narrow_keys(work *w, block *b, int first, int end)
{
    const int step = k_step(w), bytes = 2 * w->dk;
    if (w->p->k != FV__DTYPE_bf16 || w->p->qk_tail) {
        fetch_keys(w, b, first, end);
        narrow_rows(w->k, w->dk_pad, w->dk, step, first, end);
        return;
    }
    for (int i = first; i < end; i++) {
        char *to = (char *)w->k + (int64_t)i * step * 2;
        if (b->seen >> i & 1) memcpy(to, w->run->k.data + 2 * b->k_at[i], (size_t)bytes);
        else memset(to, 0, (size_t)bytes);
        memset(to + bytes, 0, (size_t)(2 * step - bytes));
    }
}

/* Where the rows of V lie as bf16: in the cache, in K, or made here. */
static void find_values(work *w, block *b, int first, int end, const char **rows)
{
    const bool direct = w->p->v == FV__DTYPE_bf16 && !w->p->v_in_k;
    if (!direct && !w->v_from_k) {
        fetch_values(w, b, first, end);
        narrow_rows(w->v, w->dv_pad, w->dv, w->dv_pad, first, end);
    }
    for (int i = first; i < end; i++) {
        if (w->v_from_k) rows[i] = (const char *)w->k + (int64_t)i * k_step(w) * 2;
        else if (!direct) rows[i] = (const char *)w->v + (int64_t)i * w->dv_pad * 2;
        else rows[i] = b->seen >> i & 1 ? w->run->v.data + 2 * b->v_at[i] : (const char *)w->zeros;
    }
}

/* Pairs of keys of TILE elements from d on; those past dv are zeros. */
VFN v_i32 pair_keys(const char *low, const char *high, int d, int n)
{
    if (n >= TILE) return (v_i32)(v_load_u16(low + 2 * d) | v_load_u16(high + 2 * d) << 16);
    char a[2 * TILE] = { 0 }, b[2 * TILE] = { 0 };
    memcpy(a, low + 2 * d, (size_t)(2 * n));
    memcpy(b, high + 2 * d, (size_t)(2 * n));
    return (v_i32)(v_load_u16(a) | v_load_u16(b) << 16);
}

/* Values of keys [first, end), both multiples of TILE_DEPTH, to w->turned[d][KEYS]. */
static void turn_values(work *w, block *b, int first, int end)
{
    const char *rows[KEYS];
    find_values(w, b, first, end, rows);
    for (int key = first; key < end; key += TILE_DEPTH)
        for (int d = 0; d < w->dv_pad; d += TILE) {
            v_i32 x[TILE];
            uint16_t *to = w->turned + (int64_t)d * KEYS + key;
            V_UNROLL
            for (int i = 0; i < TILE; i++) x[i] = pair_keys(rows[key + 2 * i], rows[key + 2 * i + 1], d, w->dv - d);
            turn(x);
            V_UNROLL
            for (int i = 0; i < TILE; i++) v_storei((int32_t *)(void *)(to + i * KEYS), x[i]);
        }
}

/* Q of TILE packed rows from `at` on as rows of bf16 in w->k, which is free before the first block. */
static void narrow_queries(work *w, int at)
{
    const fv__view *q = &w->run->q, *tail = &w->run->q_tail;
    const int step = k_step(w), own = w->p->qk_tail, main = w->dk - own;
    for (int i = 0; i < TILE; i++) {
        uint16_t *to = (uint16_t *)w->k + (int64_t)i * step;
        memset(to, 0, (size_t)step * sizeof *to);
        if (at + i >= w->packed) continue;
        const int64_t place = w->rows[(at + i) / w->unit_heads].batch_row, head = w->q_head + (at + i) % w->unit_heads;
        memcpy(to, q->data + 2 * (place * q->stride[0] + head * q->stride[1]), 2 * (size_t)main);
        if (own) memcpy(to + main, tail->data + 2 * (place * tail->stride[0] + head * tail->stride[1]), 2 * (size_t)own);
    }
}

/* Q of every chunk in pairs: [d / 2][rows of the chunk]. */
static void load_tiles(work *w)
{
    const int step = k_step(w);
    for (int at = 0; at < w->padded; at += TILE) {
        const int first = at / CHUNK * CHUNK, rows = rows_of_chunk(w, first);
        narrow_queries(w, at);
        for (int d = 0; d < step; d += 2 * TILE) {
            v_i32 x[TILE];
            float *to = w->q + (int64_t)first * step / 2 + (int64_t)d / 2 * rows + (at - first);
            V_UNROLL
            for (int i = 0; i < TILE; i++) x[i] = v_loadi((const int32_t *)(const void *)((const uint16_t *)w->k + (int64_t)i * step + d));
            turn(x);
            V_UNROLL
            for (int i = 0; i < TILE; i++) v_storei((int32_t *)(void *)(to + (int64_t)i * rows), x[i]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------ products */

/* Asks for the next rows, into the second-level cache: the first holds what is multiplied. */
VFN void ask_far(asking *a, int n)
{
    for (; n > 0 && a->at < a->end; n--, a->at++)
        for (int i = 0; i < a->bytes; i += 64) __builtin_prefetch(a->rows[a->at] + i, 0, 2);
}

/* The tiles of one product: two by two, or fewer at an edge. Sums are at c[0..1][0..1]. */
typedef struct grid {
    const char *a, *b;                  /* first left and right operand at depth 0 */
    int64_t a_row, b_row;               /* bytes from row to row of an operand */
    int64_t a_deep, b_deep;             /* bytes from one depth step to the next */
    int64_t b_next;                     /* bytes to the right operand of the next column of tiles */
    char *c;
    int64_t c_row;
    int depth;                          /* steps */
} grid;

/* sums += left right. tall, wide: 1 or 2. `from_zero`: else the sums are read first. */
VFN void multiply(const grid *g, int tall, int wide, bool from_zero)
{
    const int64_t down = TILE * g->a_row, below = TILE * g->c_row;
    if (from_zero) {
        TILE_ZERO(0);
        if (wide > 1) TILE_ZERO(1);
        if (tall > 1) TILE_ZERO(2);
        if (tall > 1 && wide > 1) TILE_ZERO(3);
    } else {
        TILE_LOAD(0, g->c, g->c_row);
        if (wide > 1) TILE_LOAD(1, g->c + 64, g->c_row);
        if (tall > 1) TILE_LOAD(2, g->c + below, g->c_row);
        if (tall > 1 && wide > 1) TILE_LOAD(3, g->c + below + 64, g->c_row);
    }
    for (int i = 0; i < g->depth; i++) {
        const char *a = g->a + i * g->a_deep, *b = g->b + i * g->b_deep;
        TILE_LOAD(4, a, g->a_row);
        TILE_LOAD(6, b, g->b_row);
        TILE_ADD(0, 4, 6);
        if (wide > 1) {
            TILE_LOAD(7, b + g->b_next, g->b_row);
            TILE_ADD(1, 4, 7);
        }
        if (tall > 1) {
            TILE_LOAD(5, a + down, g->a_row);
            TILE_ADD(2, 5, 6);
        }
        if (tall > 1 && wide > 1) TILE_ADD(3, 5, 7);
    }
    TILE_STORE(0, g->c, g->c_row);
    if (wide > 1) TILE_STORE(1, g->c + 64, g->c_row);
    if (tall > 1) TILE_STORE(2, g->c + below, g->c_row);
    if (tall > 1 && wide > 1) TILE_STORE(3, g->c + below + 64, g->c_row);
}

static void multiply_some(const grid *g, int tall, int wide, bool from_zero)
{
    if (tall > 1 && wide > 1) multiply(g, 2, 2, from_zero);
    else if (tall > 1) multiply(g, 2, 1, from_zero);
    else if (wide > 1) multiply(g, 1, 2, from_zero);
    else multiply(g, 1, 1, from_zero);
}

/* [first, end): multiples of TILE. */
static void tile_scores(work *w, const chunk *c, int first, int end)
{
    const int step = k_step(w);
    const char *q = (const char *)w->q + (int64_t)c->first * step * 2;
    const int tiles = (end - first + 2 * TILE - 1) / (2 * TILE) * ((c->vecs + 1) / 2), share = share_of(c->ahead, tiles);
    for (int key = first; key < end; key += 2 * TILE)
        for (int v = 0; v < c->vecs; v += 2) {
            const grid g = { .a = (const char *)w->k + (int64_t)key * step * 2, .b = q + v * 64, .a_row = step * 2, .b_row = c->rows * 4, .a_deep = 64,
                             .b_deep = TILE * c->rows * 4, .b_next = 64, .c = (char *)(w->s + (int64_t)key * c->rows + v * TILE),
                             .c_row = c->rows * 4, .depth = step / TILE_DEPTH };
            ask_far(c->ahead, share);
            multiply_some(&g, end - key > TILE ? 2 : 1, c->vecs - v > 1 ? 2 : 1, true);
        }
}

/* [first, end): multiples of TILE_DEPTH. */
static void tile_values(work *w, const chunk *c, int first, int end)
{
    float *o = w->o + (int64_t)c->first * w->dv_pad;
    const int tiles = (w->dv_pad + 2 * TILE - 1) / (2 * TILE) * ((c->vecs + 1) / 2), share = share_of(c->ahead, tiles);
    for (int d = 0; d < w->dv_pad; d += 2 * TILE)
        for (int v = 0; v < c->vecs; v += 2) {
            const grid g = { .a = (const char *)(w->turned + (int64_t)d * KEYS + first), .b = (const char *)(w->s + (int64_t)first / 2 * c->rows + v * TILE),
                             .a_row = KEYS * 2, .b_row = c->rows * 4, .a_deep = 64, .b_deep = TILE * c->rows * 4, .b_next = 64,
                             .c = (char *)(o + (int64_t)d * c->rows + v * TILE), .c_row = c->rows * 4, .depth = (end - first) / TILE_DEPTH };
            ask_far(c->ahead, share);
            multiply_some(&g, w->dv_pad - d > TILE ? 2 : 1, c->vecs - v > 1 ? 2 : 1, false);
        }
}

/* ------------------------------------------------------------------------------------------------------------ softmax */

/* Are scores multiplied with their scale only in the exponential? Else before hooks see them. */
static bool scales_late(const work *w) { return !w->has_score && !w->has_weight && w->score_scale > 0; }

/* Hooks and masks. */
static void finish_scores(work *w, block *b, const chunk *c)
{
    const int64_t at = (int64_t)c->key_first * c->rows, n = (int64_t)(c->key_end - c->key_first) * c->rows;
    for (int64_t i = at; i < at + n && !scales_late(w); i += V_LANES) v_store(w->s + i, v_load(w->s + i) * v_set(w->score_scale));
    if (w->has_score || w->has_weight) hook_chunk(w, b, c);
    if (!b->whole) mask_scores(w, c, w->has_weight ? 0.0f : -infinity);
}

/* Scores of keys [first, end) that the chunk has no use for: as if unseen. */
static void drop_scores(work *w, const chunk *c, int first, int end)
{
    for (int64_t i = (int64_t)first * c->rows; i < (int64_t)end * c->rows; i++) w->s[i] = w->has_weight ? 0.0f : -infinity;
}

/* Two weights as bf16, to nearest, of the lower key first. Halves go up: half of what they are has no bit there. */
VFN v_i32 pair_weights(v_f32 low, v_f32 high)
{
    const v_u32 half = (v_u32)v_seti(0x8000);
    return (v_i32)((v_bits_of(low) + half) >> 16 | ((v_bits_of(high) + half) & (v_u32)v_seti((int32_t)0xFFFF0000)));
}

#define LAZY 8.0f                        /* by how much, in base 2, scores may exceed m where nobody asks for it */

/* Scores of keys [first, end) to pairs of weights, [key / 2][row] from the place of `first` / 2 on: never ahead of what is still to be read. */
static void tile_softmax(work *w, const chunk *c, int first, int end)
{
    const v_f32 scale = v_set(scales_late(w) ? w->score_scale : 1.0f), none = v_set(-infinity), lazy = v_set(w->has_row_max ? 0.0f : LAZY);
    for (int v = 0; v < c->vecs; v++) {
        const int at = c->first + v * V_LANES;
        const float *s = w->s + v * V_LANES;
        const v_f32 old = v_load(w->m + at);
        v_f32 top = none, other = none, sum = v_set(0.0f);
        for (int key = first; key < end; key += 2) {
            top = v_max(v_load(s + (int64_t)key * c->rows), top);
            other = v_max(v_load(s + (int64_t)(key + 1) * c->rows), other);
        }
        top = v_max(top, other) * scale;
        const v_f32 m = v_select(v_gt(top - old, lazy), top, old);
        const v_f32 base = v_select(v_eq(m, none), v_set(0.0f), m);         /* nothing seen yet: -inf - 0 stays -inf */
        for (int key = first; key < end; key += 2) {
            const v_f32 low = v_exp2_neg(v_fma(v_load(s + (int64_t)key * c->rows), scale, -base));
            const v_f32 high = v_exp2_neg(v_fma(v_load(s + (int64_t)(key + 1) * c->rows), scale, -base));
            sum = sum + (low + high);
            v_storei((int32_t *)(void *)(w->s + (int64_t)key / 2 * c->rows + v * V_LANES), pair_weights(low, high));
        }
        const v_f32 alpha = v_exp2_neg(old - base);
        v_store(w->m + at, m);
        v_store(w->l + at, v_fma(v_load(w->l + at), alpha, sum));
        v_store(w->alpha + at, alpha);
    }
}

/* Weights that replace the softmax. */
static void tile_weights(work *w, const chunk *c, int first, int end)
{
    plain_weights(w, c);
    for (int key = first; key < end; key += 2)
        for (int v = 0; v < c->rows; v += V_LANES) {
            const float *s = w->s + (int64_t)key * c->rows + v;
            v_storei((int32_t *)(void *)(w->s + (int64_t)key / 2 * c->rows + v), pair_weights(v_load(s), v_load(s + c->rows)));
        }
}

/* The states' outputs times alpha. A factor of 1 changes no bit: where all of a vector are, it is left out. */
static void scale_outputs(work *w, const chunk *c)
{
    for (int v = 0; v < c->rows; v += V_LANES) {
        const v_f32 alpha = v_load(w->alpha + c->first + v);
        float *o = w->o + (int64_t)c->first * w->dv_pad + v;
        if (!v_any(v_ne(alpha, v_set(1.0f)))) continue;
        for (int d = 0; d < w->dv_pad; d++) v_store(o + (int64_t)d * c->rows, v_load(o + (int64_t)d * c->rows) * alpha);
    }
}

/* ------------------------------------------------------------------------------------------------------------ a block */

static void ask_block(const work *w, const block *next, bool keys, asking *out)
{
    out->at = out->end = 0;
    if (!keys && w->p->v_in_k) return;
    plan_asking(w, next, keys, out);
}

/* The first chunk turns the values. `next`: the block whose memory to ask for meanwhile, or NULL. */
static bool tile_chunk(work *w, block *b, chunk *c, bool is_first, const block *next)
{
    asking ahead;
    if (!enter_chunk(b, c, &ahead)) return false;
    const int first = c->key_first / TILE_DEPTH * TILE_DEPTH, end = tile_depth(c->key_end);
    ask_block(w, is_first ? next : NULL, true, &ahead);
    tile_scores(w, c, first, end);
    finish_scores(w, b, c);
    drop_scores(w, c, first, c->key_first);
    drop_scores(w, c, c->key_end, end);
    if (w->has_weight) tile_weights(w, c, first, end);
    else tile_softmax(w, c, first, end);
    if (is_first) turn_values(w, b, lowest(b->seen) / TILE_DEPTH * TILE_DEPTH, tile_depth(above_highest(b->seen)));
    scale_outputs(w, c);
    ask_block(w, is_first ? next : NULL, false, &ahead);
    tile_values(w, c, first, end);
    return true;
}

static void attend_tiles(work *w, block *b, const block *next)
{
    bool is_first = true;
    narrow_keys(w, b, lowest(b->seen) / TILE_DEPTH * TILE_DEPTH, tile_depth(above_highest(b->seen)));
    if (!b->whole) split_masks(w, b);
    for (int at = 0; at < w->padded; at += CHUNK) {
        chunk c = chunk_at(w, at);
        if (tile_chunk(w, b, &c, is_first, next)) is_first = false;
    }
}

/* O as rows of dv_pad again. */
static void turn_outputs(work *w)
{
    for (int at = 0; at < w->padded; at += CHUNK) {
        const int rows = rows_of_chunk(w, at);
        float *o = w->o + (int64_t)at * w->dv_pad;
        memcpy(w->turning, o, (size_t)rows * (size_t)w->dv_pad * sizeof *o);
        for (int v = 0; v < rows; v += TILE)
            for (int d = 0; d < w->dv_pad; d += TILE) {
                v_i32 x[TILE];
                V_UNROLL
                for (int i = 0; i < TILE; i++) x[i] = v_loadi((const int32_t *)(const void *)(w->turning + (int64_t)(d + i) * rows + v));
                turn(x);
                V_UNROLL
                for (int i = 0; i < TILE; i++) v_storei((int32_t *)(void *)(o + (int64_t)(v + i) * w->dv_pad + d), x[i]);
            }
    }
}
