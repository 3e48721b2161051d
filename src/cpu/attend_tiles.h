/* SPDX-License-Identifier: Apache-2.0 */
/* attend_tiles.h -- the path for many packed rows where the level has matrix tiles: the same blocks, masks, hooks and states as attend_many.h, with
 * both products in bf16 pairs summed in f32.
 *
 *   set      up to SET blocks, whose K and V are made right operands once: K turned in pairs of d, V in pairs of keys
 *   strip    up to STRIP packed rows: their Q and weights are left operands, their scores and O sums
 *   job      a strip x a block of the set: scores S[row][key], lanes along keys, become weights P[row][key]
 *
 * The unit that multiplies tiles works beside the one for vectors only where instructions of both stand close together. So three things run at once:
 * the scores of the next job, the weights of this one, and O += P V of the strip before, a few rows of weights after every two products; the next
 * set's memory is asked for meanwhile.
 *
 * A row's m stands HEADROOM above the first score that it met, in base 2, and moves only when another passes it: then by whole powers of two, so that
 * what is summed already is scaled exactly. Weights therefore need no maximum of their block; floats have room for it on both sides. They are rounded
 * to bf16, as on GPUs; l sums them unrounded, for lse, and a second sum those that are multiplied, for O: what one key dominates keeps its value.
 * Where a hook asks for the maximum of a row, m is that.
 *
 * Exact before the products: Q is bf16; K and V are bf16 or narrower types, whose every value bf16 holds (4-bit ones with their group's scale too).
 * Sums run over keys in order, whatever the sets: a row's bits depend on no other row.
 *
 * Floors for 64 keys x 64 packed rows, d = 128: 128 tile products of 16 cycles; 256 vectors of weights of 13 instructions, two a cycle.
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
    return fits_bf16(p->k) && fits_bf16(p->v);
}

/* ------------------------------------------------------------------------------------------------------------ operands
 * 16-bit operands lie tile by tile, 1 KB each, two side by side: PAIR elements are what one step of a product of 32 x 32 sums takes of one side.
 *
 *   tile_q   [rows / 32][dk / 32][2][16 rows][32 d]
 *   tile_k   [block][2 halves][dk / 32][2][16 pairs of d][16 keys][2]
 *   tile_p   [2 strips][rows / 32][halves of the set][2][16 rows][32 keys]: key i beside key i + 16
 *   tile_v   [dv / 32][halves of the set][2][16 pairs of keys][16 d][2]: the same pairs; d 0..3, 8..11, 16..19, 24..27, then the others
 *   tile_o   [rows / 32][dv / 32][2][2][16 rows][16 d], columns as those of tile_v */

enum { TILE_HALF = TILE * TILE_DEPTH, TILE_PAIR = 2 * TILE_HALF, PAIR_ROWS = 2 * TILE, SET_HALVES = SET * KEYS / TILE_DEPTH };

/* Where row i of an operand of row pairs begins, from the pair's first step on. */
static int row_in_pair(unsigned i) { return (int)(i / TILE % 2 * TILE_HALF + i % TILE * TILE_DEPTH); }

/* Rows of floats to rows of bf16, exactly, from their own place on: step <= 2 * from_step. Zeros up to step. */
static void narrow_rows(float *rows, int from_step, int n, int step)
{
    for (int i = 0; i < KEYS; i++) {
        const float *from = rows + (int64_t)i * from_step;
        uint16_t *to = (uint16_t *)rows + (int64_t)i * step;
        for (int d = 0; d < n; d += V_LANES) v_store_u16(to + d, v_bits_of(v_load(from + d)) >> 16);
        for (int d = n; d < step; d++) to[d] = 0;
    }
}

/* Copies rows of n elements to rows of `step`, zeros behind, and points at the copies. */
static void widen_rows(const char **rows, int n, int step, float *buffer)
{
    for (int i = 0; i < KEYS; i++) {
        char *to = (char *)buffer + (int64_t)i * step * 2;
        memcpy(to, rows[i], 2 * (size_t)n);
        memset(to + 2 * n, 0, 2 * (size_t)(step - n));
        rows[i] = to;
    }
}

/* Where the block's rows of K lie as bf16 with zeros up to whole steps: in the cache or made here. Zeros for what nobody sees. */
static void find_keys(work *w, block *b, const char **rows)
{
    const int step = tile_steps(w->dk) * TILE_DEPTH;
    if (w->p->k != FV__DTYPE_bf16 || w->p->qk_tail) {
        fetch_keys(w, b, 0, KEYS);
        narrow_rows(w->k, w->dk_pad, w->dk, step);
        for (int i = 0; i < KEYS; i++) rows[i] = (const char *)w->k + (int64_t)i * step * 2;
        return;
    }
    for (int i = 0; i < KEYS; i++) rows[i] = b->seen >> i & 1 ? w->run->k.data + 2 * b->k_at[i] : (const char *)w->zeros;
    if (step != w->dk) widen_rows(rows, w->dk, step, w->k);
}

static void find_values(work *w, block *b, const char **keys, const char **rows)
{
    const int step = tile_steps(w->dv) * TILE_DEPTH;
    if (!w->v_from_k && (w->p->v != FV__DTYPE_bf16 || w->p->v_in_k)) {
        fetch_values(w, b, 0, KEYS);
        narrow_rows(w->v, w->dv_pad, w->dv, step);
        for (int i = 0; i < KEYS; i++) rows[i] = (const char *)w->v + (int64_t)i * step * 2;
        return;
    }
    for (int i = 0; i < KEYS; i++) {
        if (w->v_from_k) rows[i] = keys[i];
        else rows[i] = b->seen >> i & 1 ? w->run->v.data + 2 * b->v_at[i] : (const char *)w->zeros;
    }
    if (step != w->dv) widen_rows(rows, w->dv, step, w->v);
}

static void pack_keys(const char *const *rows, int steps, uint16_t *to)
{
    for (int key = 0; key < KEYS; key += TILE)
        for (int i = 0; i < steps; i++) {
            v_i32 x[TILE];
            uint16_t *out = to + ((int64_t)(key / TILE_DEPTH) * steps + i) * TILE_PAIR + key / TILE % 2 * TILE_HALF;
            V_UNROLL
            for (int j = 0; j < TILE; j++) x[j] = v_loadi((const int32_t *)(const void *)(rows[key + j] + 64 * i));
            turn(x);
            V_UNROLL
            for (int j = 0; j < TILE; j++) v_storei((int32_t *)(void *)(out + j * TILE_DEPTH), x[j]);
        }
}

/* `to`: of the block's first half and d 0. */
static void pack_values(const char *const *rows, int steps, uint16_t *to)
{
    for (int key = 0; key < KEYS; key += TILE_DEPTH)
        for (int j = 0; j < TILE; j++) {
            const char *low = rows[key + j], *high = rows[key + j + TILE];
            uint16_t *at = to + key / TILE_DEPTH * TILE_PAIR + j * TILE_DEPTH;
            for (int i = 0; i < steps; i++, low += 64, high += 64, at += SET_HALVES * TILE_PAIR) {
                const half_words a = (half_words)v_loadi((const int32_t *)(const void *)low);
                const half_words b = (half_words)v_loadi((const int32_t *)(const void *)high);
                v_storei((int32_t *)(void *)at, (v_i32)PAIR_WORDS(a, b, 0));
                v_storei((int32_t *)(void *)(at + TILE_HALF), (v_i32)PAIR_WORDS(a, b, 4));
            }
        }
}

/* Q of a packed row as whole steps of bf16: where it lies, or put together in `line`. */
static const char *find_query(const work *w, int at, int step, char *line)
{
    const fv__view *q = &w->run->q, *tail = &w->run->q_tail;
    const int own = w->p->qk_tail, main = w->dk - own;
    if (at >= w->packed) return (const char *)w->zeros;
    const int64_t place = w->rows[at / w->unit_heads].batch_row, head = w->q_head + at % w->unit_heads;
    const char *from = q->data + 2 * (place * q->stride[0] + head * q->stride[1]);
    if (step == main) return from;
    memset(line, 0, 2 * (size_t)step);
    memcpy(line, from, 2 * (size_t)main);
    if (own) memcpy(line + 2 * main, tail->data + 2 * (place * tail->stride[0] + head * tail->stride[1]), 2 * (size_t)own);
    return line;
}

static void load_tiles(work *w)
{
    const int steps = tile_steps(w->dk), rows = whole_pairs(w->packed);
    for (int i = 0; i < rows; i++) {
        uint16_t *to = w->tile_q + (int64_t)(i / PAIR_ROWS) * steps * TILE_PAIR + row_in_pair((unsigned)i);
        const char *from = find_query(w, i, steps * TILE_DEPTH, (char *)w->line);
        for (int d = 0; d < steps; d++, to += TILE_PAIR, from += 64) v_storei((int32_t *)(void *)to, v_loadi((const int32_t *)(const void *)from));
    }
}

/* -------------------------------------------------------------------------------------------------------------- supply */

typedef struct set {
    block *blocks[SET];
    int n;
} set;

/* Rows of K and V that the next set will pack, asked for one by one. */
typedef struct supply {
    const work *w;
    const set *set;
    int lists;                          /* begun: K and V of each block */
    asking rows;
} supply;

/* The lists that there are. */
static int num_lists(const work *w, const set *s) { return w->p->v_in_k ? s->n : 2 * s->n; }

/* Into the second-level cache: the first holds what is multiplied. */
static __attribute__((noinline)) void ask_next(supply *x)
{
    asking *a = &x->rows;
    const int n = num_lists(x->w, x->set);
    while (a->at == a->end) {
        if (x->lists == n) return;
        plan_asking(x->w, x->set->blocks[x->lists % x->set->n], x->lists < x->set->n, a);
        x->lists++;
    }
    for (int i = 0; i < a->bytes; i += 64) __builtin_prefetch(a->rows[a->at] + i, 0, 2);
    a->at++;
}

/* ------------------------------------------------------------------------------------------------------------- weights */

enum { HEADROOM = 30 };
#define ONE_EXPONENT 8388608.0f         /* 2^23: one in the exponent of a float */

/* Bits of a where mask has ones, else of b. */
#ifdef V_PICK_BITS
#define PICK_BITS(mask, a, b) V_PICK_BITS(mask, a, b)
#else
#define PICK_BITS(mask, a, b) (((a) & (mask)) | ((b) & ~(mask)))
#endif

#ifndef V_ANY_BITS
#define V_ANY_BITS(a, b) v_any(V_TRUTH(((a) & (b)) != 0))
#endif

/* What weights are made with, to be kept in registers. From memory: a constant of the text would be made anew for every row. */
typedef struct powers {
    v_i32 low, one, half, upper, passed;
    v_f32 none, c[5];
} powers;

static const struct {
    int32_t low, one, half, upper, passed;
    float c[5];
} power_table = { 0x7FFFFF, 0x3F800000, 0x8000, (int32_t)0xFFFF0000, (int32_t)0xC0000000,
                  { 0.5098705291748047f, 0.3121471405029297f, 0.16661739349365234f, -0.0021905899047851562f, 0.013555526733398438f } };

VFN powers load_powers(void)
{
    const int32_t *bits = &power_table.low;
    const float *c = power_table.c;
    __asm__("" : "+r"(bits), "+r"(c));
    return (powers){ .low = v_seti(bits[0]), .one = v_seti(bits[1]), .half = v_seti(bits[2]), .upper = v_seti(bits[3]), .passed = v_seti(bits[4]),
                     .none = v_set(0.0f), .c = { v_set(c[0]), v_set(c[1]), v_set(c[2]), v_set(c[3]), v_set(c[4]) } };
}

/* 2^x of 2^23 (x + 127), given as the integer: its upper bits are the exponent already, its lower 23 a straight line for which a polynomial of
 * [1, 2) stands in: relative error 4e-6, exact at both ends. 0 gives 0. */
VFN v_f32 power_of(v_i32 e, const powers *k)
{
    const v_f32 x = v_of_bits((v_u32)PICK_BITS(k->low, e, k->one));
    v_f32 y = k->c[4];
    for (int i = 3; i >= 0; i--) y = v_fma(y, x, k->c[i]);
    return v_of_bits((v_u32)PICK_BITS(k->low, (v_i32)v_bits_of(y), e));
}

/* Two weights as bf16, to nearest, low in the lower half. Halves go up: half of what they are has no bit there. */
VFN v_i32 pair_weights(v_f32 low, v_f32 high, const powers *k)
{
    return PICK_BITS(k->upper, (v_i32)v_bits_of(high) + k->half, (v_i32)((v_bits_of(low) + (v_u32)k->half) >> 16));
}

/* sum += the weights of two pairs, as they will be multiplied. */
VFN v_f32 add_weights(v_f32 sum, v_i32 a, v_i32 b)
{
#ifdef V_DOT_BF16
    const v_i32 ones = v_seti(0x3F803F80);
    return V_DOT_BF16(a, ones, V_DOT_BF16(b, ones, sum));
#else
    const v_i32 upper = v_seti((int32_t)0xFFFF0000);
    const v_f32 low = v_of_bits((v_u32)a << 16) + v_of_bits((v_u32)b << 16);
    return sum + (low + (v_of_bits((v_u32)(a & upper)) + v_of_bits((v_u32)(b & upper))));
#endif
}

VFN v_mask lanes_of(uint64_t bits, int vec)
{
    return V_TRUTH((v_seti((int32_t)(bits >> (vec * V_LANES) & 0xFFFF)) & (v_seti(1) << v_iota())) != 0);
}

enum { ROW_VECS = KEYS / V_LANES };


/* The weights of a job on their way, some rows at a time. */
typedef struct softening {
    work *w;
    block *b;
    float *s;                           /* scores [rows][KEYS] */
    uint16_t *p;                        /* the strip's weights from the block's first half on */
    int done;                           /* halves of the strip before this block */
    int first, row, rows;               /* packed row of the strip's row 0; the next row, how many there are */
    int credit, rate;                   /* rows that are due, in 256ths */
    supply *ask;                        /* NULL: nothing more is asked for */
    int ask_credit, ask_rate;
} softening;

static uint16_t *weights_at(const softening *x, unsigned i)
{
    return x->p + i / PAIR_ROWS * (SET_HALVES * TILE_PAIR) + row_in_pair(i);
}

VFN void set_top(work *w, int at, float m)
{
    w->m[at] = m;
    w->bias[at] = (127.0f - m) * ONE_EXPONENT;
}

/* A row's m has to rise above `top`, or to `top` where it is asked for: the sum, O and the weights that wait to be multiplied follow. */
static void follow(const softening *x, int at, float top)
{
    work *w = x->w;
    const float old = w->m[at], grow = w->has_row_max ? top - old : __builtin_ceilf(top + w->headroom - old);
    const int steps = tile_steps(w->dv);
    float *l = w->tile_l + (int64_t)at * 2 * V_LANES;
    if (w->has_row_max && !(top > old)) return;
    set_top(w, at, old == -infinity || w->has_row_max ? top + w->headroom : old + grow);
    if (!(top < infinity)) v_store(l, v_set(top - top));                /* no number: nor is the row's output */
    if (old == -infinity) return;
    const v_f32 alpha = v_exp2_neg(v_set(-grow));
    float *o = w->tile_o + (int64_t)(at / PAIR_ROWS) * steps * TILE_PAIR + at / TILE % 2 * TILE_HALF + at % TILE * TILE;
    v_store(l, v_load(l) * alpha);
    v_store(l + V_LANES, v_load(l + V_LANES) * alpha);
    for (int d = 0; d < steps; d++, o += TILE_PAIR) {
        v_store(o, v_load(o) * alpha);
        v_store(o + TILE * TILE, v_load(o + TILE * TILE) * alpha);
    }
    const powers k = load_powers();
    for (int i = 1; i <= x->done; i++) {
        uint16_t *p = weights_at(x, (unsigned)(at - x->first)) - i * TILE_PAIR;
        v_f32 low, high;
        v_split_bf16(p, &low, &high);
        v_storei((int32_t *)(void *)p, pair_weights(low * alpha, high * alpha, &k));
    }
}

static __attribute__((noinline)) void raise_row(const softening *x, int at, const float *s, uint64_t bits)
{
    v_f32 top = v_set(-infinity);
    v_mask bad = v_false();
    for (int i = 0; i < ROW_VECS; i++) {
        const v_f32 y = v_select(lanes_of(bits, i), v_load(s + i * V_LANES) * v_set(x->w->weight_scale), v_set(-infinity));
        top = v_max(y, top);
        bad = v_or(bad, v_ne(y, y));
    }
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    follow(x, at, v_any(bad) ? infinity : v_lane(top, 0));
}

/* Exponents of the row's weights; those of unseen keys are 0. Says whether a score passes what m allows. */
VFN bool exponents(const work *w, int at, const float *s, uint64_t bits, const powers *k, v_i32 *e)
{
    const v_f32 scale = v_set(w->exponent_scale), bias = v_set(w->bias[at]);
    V_UNROLL
    for (int i = 0; i < ROW_VECS; i++) {
        v_f32 y = v_max(k->none, v_fma(v_load(s + i * V_LANES), scale, bias));
        if (~bits) y = v_select(lanes_of(bits, i), y, k->none);
        e[i] = v_int(y);
    }
    return V_ANY_BITS(e[0] | e[1] | e[2] | e[3], k->passed);
}

/* Weights that replace the softmax: m stays 0, so that states merge with factor 1. Or a row that sees nothing: its weights are 0. */
static __attribute__((noinline)) void keep_weights(work *w, int at, const float *s, uint64_t bits, uint16_t *p)
{
    const powers k = load_powers();
    v_f32 x[ROW_VECS];
    for (int i = 0; i < ROW_VECS; i++) x[i] = v_select(lanes_of(bits, i), v_load(s + i * V_LANES), v_set(0.0f));
    if (w->has_weight) w->m[at] = 0;
    v_storei((int32_t *)(void *)p, pair_weights(x[0], x[1], &k));
    v_storei((int32_t *)(void *)(p + TILE_PAIR), pair_weights(x[2], x[3], &k));
}

/* The row's scores through the hooks. */
static __attribute__((noinline)) void hook_row(const softening *x, int at, float *s)
{
    scale_line(s, KEYS, x->w->score_scale);
    hook_scores(x->w, x->b, &x->w->rows[at / x->w->unit_heads], at % x->w->unit_heads, s);
}

VFN void soften_row(const softening *x, unsigned i, const powers *k)
{
    work *w = x->w;
    const int at = x->first + (int)i;
    const uint64_t bits = x->b->whole ? x->b->seen : x->b->mask[at];
    float *s = x->s + i * KEYS;
    uint16_t *p = weights_at(x, i);
    v_i32 e[ROW_VECS];
    v_f32 y[ROW_VECS];
    if (bits && (w->has_score || w->has_weight)) hook_row(x, at, s);
    if (!bits || w->has_weight) {
        keep_weights(w, at, s, bits, p);
        return;
    }
    if (w->m[at] == -infinity) set_top(w, at, s[lowest(bits)] * w->weight_scale + w->headroom);  /* the first key stands for the maximum */
    if (w->has_row_max) raise_row(x, at, s, bits);
    if (exponents(w, at, s, bits, k, e)) {
        raise_row(x, at, s, bits);
        exponents(w, at, s, bits, k, e);
    }
    V_UNROLL
    for (int j = 0; j < ROW_VECS; j++) y[j] = power_of(e[j], k);
    const v_i32 a = pair_weights(y[0], y[1], k), b = pair_weights(y[2], y[3], k);
    float *l = w->tile_l + (int64_t)at * 2 * V_LANES;
    v_storei((int32_t *)(void *)p, a);
    v_storei((int32_t *)(void *)(p + TILE_PAIR), b);
    v_store(l, v_load(l) + ((y[0] + y[1]) + (y[2] + y[3])));
    v_store(l + V_LANES, add_weights(v_load(l + V_LANES), a, b));
}

/* What is done while tiles are multiplied. */
VFN void soften(softening *x, const powers *k)
{
    x->credit += x->rate;
    for (; x->credit >= 256 && x->row < x->rows; x->credit -= 256) soften_row(x, (unsigned)x->row++, k);
    x->ask_credit += x->ask_rate;
    for (; x->ask_credit >= 256; x->ask_credit -= 256) ask_next(x->ask);
}

static void soften_rest(softening *x)
{
    const powers k = load_powers();
    while (x->row < x->rows) soften_row(x, (unsigned)x->row++, &k);
}

/* ------------------------------------------------------------------------------------------------------------ products */

enum { PAUSES = 2 };                    /* of a step of a product */

/* 32 x 32 sums at c += left right: `depth` steps of TILE_PAIR elements on either side. right, below: bytes to the neighbours of a tile of sums. */
VFN void multiply(const uint16_t *a, const uint16_t *b, int depth, float *c, int64_t c_row, int64_t right, int64_t below, bool from_zero,
                  softening *x)
{
    char *at = (char *)c;
    const powers k = load_powers();
    if (from_zero) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, at, c_row);
        TILE_LOAD(1, at + right, c_row);
        TILE_LOAD(2, at + below, c_row);
        TILE_LOAD(3, at + below + right, c_row);
    }
    for (int i = 0; i < depth; i++, a += TILE_PAIR, b += TILE_PAIR) {
        TILE_LOAD(4, a, 64);
        TILE_LOAD(6, b, 64);
        TILE_LOAD(7, b + TILE_HALF, 64);
        TILE_ADD(0, 4, 6);
        TILE_ADD(1, 4, 7);
        soften(x, &k);
        TILE_LOAD(5, a + TILE_HALF, 64);
        TILE_ADD(2, 5, 6);
        TILE_ADD(3, 5, 7);
        soften(x, &k);
    }
    TILE_STORE(0, at, c_row);
    TILE_STORE(1, at + right, c_row);
    TILE_STORE(2, at + below, c_row);
    TILE_STORE(3, at + below + right, c_row);
}

/* ---------------------------------------------------------------------------------------------------------------- sets */

typedef struct strip {
    int first, rows;                    /* packed rows */
    uint64_t seen[SET];                 /* of each block, by some row */
    int begin, end;                     /* halves of the set from the first seen one on */
    uint16_t *p;
} strip;

static void gather_set(work *w, set *s, block *room, walk *x)
{
    for (s->n = 0; s->n < SET; s->n++)
        if (!(s->blocks[s->n] = next_block(w, &room[s->n], x))) break;
}

static void pack_set(work *w, const set *s)
{
    const char *keys[KEYS], *rows[KEYS];
    const int dk = tile_steps(w->dk), dv = tile_steps(w->dv);
    for (int i = 0; i < s->n; i++) {
        find_keys(w, s->blocks[i], keys);
        pack_keys(keys, dk, w->tile_k + (int64_t)i * 2 * dk * TILE_PAIR);
        find_values(w, s->blocks[i], keys, rows);
        pack_values(rows, dv, w->tile_v + i * 2 * TILE_PAIR);
    }
}

static uint64_t seen_by(const block *b, int first, int rows)
{
    uint64_t seen = 0;
    if (b->whole) return b->seen;
    for (int i = first; i < first + rows; i++) seen |= b->mask[i];
    return seen;
}

/* False: its rows see nothing of the set. */
static bool begin_strip(work *w, const set *s, int first, uint16_t *p, strip *out)
{
    *out = (strip){ .first = first, .rows = fv__min32(STRIP, w->packed - first), .begin = SET_HALVES, .p = p };
    for (int i = 0; i < s->n; i++) {
        const uint64_t seen = out->seen[i] = seen_by(s->blocks[i], first, out->rows);
        if (!seen) continue;
        out->begin = fv__min32(out->begin, 2 * i + lowest(seen) / TILE_DEPTH);
        out->end = 2 * i + (above_highest(seen) - 1) / TILE_DEPTH + 1;
    }
    for (int i = out->begin / 2; i < (out->end + 1) / 2; i++)           /* a block in between of which they see nothing weighs nothing */
        for (int j = 0; j < STRIP && !out->seen[i]; j += PAIR_ROWS)
            memset(p + (j / PAIR_ROWS * SET_HALVES + 2 * i) * TILE_PAIR, 0, 2 * TILE_PAIR * sizeof *p);
    return out->begin < out->end;
}

static int row_pairs(const strip *s) { return whole_pairs(s->rows) / PAIR_ROWS; }

/* Scores of a block's keys; halves that no row of the strip sees are left out. */
static void multiply_keys(work *w, const strip *s, int which, float *to, softening *x)
{
    const int steps = tile_steps(w->dk);
    for (int half = 0; half < 2; half++) {
        const uint16_t *k = w->tile_k + (int64_t)(2 * which + half) * steps * TILE_PAIR;
        if (!(s->seen[which] >> (half * TILE_DEPTH) & 0xFFFFFFFF)) continue;
        for (int i = 0; i < row_pairs(s); i++)
            multiply(w->tile_q + (int64_t)(s->first / PAIR_ROWS + i) * steps * TILE_PAIR, k, steps, to + i * PAIR_ROWS * KEYS + half * TILE_DEPTH,
                     KEYS * 4, 64, TILE * KEYS * 4, true, x);
    }
}

/* O += P V for steps [from, to) of d; the strip's first set makes O. */
static void multiply_values(work *w, const strip *s, int from, int to, softening *x)
{
    const int steps = tile_steps(w->dv);
    const bool from_zero = !(w->begun >> (s->first / STRIP) & 1);
    for (int d = from; d < to; d++)
        for (int i = 0; i < row_pairs(s); i++)
            multiply(s->p + (i * SET_HALVES + s->begin) * TILE_PAIR, w->tile_v + ((int64_t)d * SET_HALVES + s->begin) * TILE_PAIR, s->end - s->begin,
                     w->tile_o + ((int64_t)(s->first / PAIR_ROWS + i) * steps + d) * TILE_PAIR, 64, TILE * TILE * 4, 2 * TILE * TILE * 4,
                     from_zero, x);
    if (to == steps) w->begun |= 1u << (s->first / STRIP);
}

static int steps_of_keys(const work *w, const strip *s, int which)
{
    const uint64_t seen = s->seen[which];
    return tile_steps(w->dk) * row_pairs(s) * (((seen & 0xFFFFFFFF) != 0) + ((seen >> 32) != 0));
}

static int steps_of_values(const strip *s) { return row_pairs(s) * (s->end - s->begin); }

/* The scores of a job that is to be softened next. */
static softening soften_job(work *w, const set *all, const strip *s, int which, float *scores)
{
    return (softening){ .w = w, .b = all->blocks[which], .s = scores, .p = s->p + 2 * which * TILE_PAIR, .done = 2 * which, .first = s->first,
                        .rows = s->rows };
}

/* ---- the pipeline ---- */

typedef struct job {
    const strip *strip;                 /* NULL: none */
    int block;
} job;

enum { STRIPS = LARGEST_TILE / STRIP };

static int list_jobs(work *w, const set *s, strip *strips, job *jobs)
{
    int n = 0, used = 0;
    for (int first = 0; first < w->packed; first += STRIP) {
        strip *x = &strips[used];
        if (!begin_strip(w, s, first, w->tile_p + used % 2 * STRIP * SET * KEYS, x)) continue;
        used++;
        for (int i = 0; i < s->n; i++)
            if (x->seen[i]) jobs[n++] = (job){ x, i };
    }
    return n;
}

/* How many jobs of the list, from one on, are of one strip. */
static int jobs_of_strip(const job *jobs, int at, int n)
{
    int count = 1;
    while (at + count < n && jobs[at + count].strip == jobs[at].strip) count++;
    return count;
}

static void attend_set(work *w, const set *s, const set *following)
{
    strip strips[STRIPS];
    job jobs[STRIPS * SET + 1];
    const strip *before = NULL;
    softening idle = { 0 };
    const int n = list_jobs(w, s, strips, jobs), d = tile_steps(w->dv);
    supply ask = { .w = w, .set = following };
    if (n) multiply_keys(w, jobs[0].strip, jobs[0].block, w->tile_s, &idle);
    for (int i = 0; i < n; ) {
        const int end = i + jobs_of_strip(jobs, i, n), count = end - i;
        for (int part = 0; part < count; part++, i++) {
            const job *now = &jobs[i], *next = i + 1 < n ? &jobs[i + 1] : NULL;
            const int d_from = d * part / count, d_to = d * (part + 1) / count;
            softening x = soften_job(w, s, now->strip, now->block, w->tile_s + i % 2 * STRIP * KEYS);
            const int steps = (next ? steps_of_keys(w, next->strip, next->block) : 0) + (before ? (d_to - d_from) * steps_of_values(before) : 0);
            x.rate = 256 * x.rows / (PAUSES * steps + 1) + 1;
            x.ask = &ask;
            x.ask_rate = 256 * num_lists(w, following) * KEYS / n / (PAUSES * steps + 1) + 1;
            if (next) multiply_keys(w, next->strip, next->block, w->tile_s + (i + 1) % 2 * STRIP * KEYS, &x);
            if (before) multiply_values(w, before, d_from, d_to, &x);
            soften_rest(&x);
        }
        before = jobs[end - 1].strip;
    }
    if (before) multiply_values(w, before, 0, d, &idle);
}

/* -------------------------------------------------------------------------------------------------------------- a walk */

static void begin_tiles(work *w)
{
    const int64_t rows = whole_pairs(w->packed);
    memset(w->tile_l, 0, (size_t)rows * 2 * V_LANES * sizeof *w->tile_l);
    for (int64_t i = 0; i < rows; i++) w->m[i] = -infinity;
    w->begun = 0;
    w->weight_scale = w->has_score ? 1.0f : w->score_scale;
    w->exponent_scale = w->weight_scale * ONE_EXPONENT;
    w->headroom = w->has_row_max ? 0 : HEADROOM;
}

static float sum_of(const float *lanes)
{
    float sum = 0;
    for (int i = 0; i < V_LANES; i++) sum += lanes[i];
    return sum;
}

/* The states' sums and outputs as the rest of the kernel has them: o is owed the sum of the weights that it was made with. */
static void end_tiles(work *w)
{
    const int steps = tile_steps(w->dv);
    for (int i = 0; i < w->packed; i++) {
        const float *from = w->tile_o + (int64_t)(i / PAIR_ROWS) * steps * TILE_PAIR + i / TILE % 2 * TILE_HALF + i % TILE * TILE;
        float *to = w->o + (int64_t)i * w->dv_pad;
        const float *l = w->tile_l + (int64_t)i * 2 * V_LANES;
        const float sum = w->l[i] = sum_of(l), rounded = sum_of(l + V_LANES);
        const v_f32 factor = v_set(rounded > 0 ? sum / rounded : 1.0f);
        if (!(w->begun >> (i / STRIP) & 1)) {
            memset(to, 0, (size_t)w->dv_pad * sizeof *to);
            continue;
        }
        for (int d = 0; d < w->dv_pad; d += 2 * TILE, from += TILE_PAIR) {
            const v_i32 a = (v_i32)v_bits_of(v_load(from) * factor), b = (v_i32)v_bits_of(v_load(from + TILE * TILE) * factor);
            v_storei((int32_t *)(void *)(to + d), V_PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
            if (d + TILE < w->dv_pad)
                v_storei((int32_t *)(void *)(to + d + TILE), V_PICK(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
        }
    }
}

/* The states of the walk's keys. */
static void walk_tiles(work *w, walk *x)
{
    set now, next;
    begin_tiles(w);
    gather_set(w, &now, w->blocks, x);
    for (int side = 1; now.n; side ^= 1) {
        gather_set(w, &next, w->blocks + side * SET, x);
        pack_set(w, &now);
        attend_set(w, &now, &next);
        now = next;
    }
    end_tiles(w);
}
