/* SPDX-License-Identifier: Apache-2.0 */
/* attend_tiles.h -- the path for many packed rows where the level has matrix tiles: the same blocks, masks, hooks and states as attend_many.h, with
 * both products in bf16 pairs summed in f32.
 *
 *   set      up to SET blocks, whose K and V are made right operands once: K turned in pairs of d, V in pairs of keys
 *   strip    up to STRIP packed rows: their Q and weights are left operands, their scores and O sums
 *   job      a strip x a block of the set: scores S[row][key], lanes along keys, become weights P[row][key]
 *
 * The unit that multiplies tiles works beside the one for vectors only where instructions of both stand close together. So four things run at once,
 * from the first set of a walk to the last: the scores of the next job, the weights of this one, O += P V of the strip before, and the next set's
 * operands. Weights are made a row after every two products, operands in portions between products of 32 x 32 sums. A product's first operands
 * are loaded before the sums of the one before leave their tiles, and those leave between its first steps: stores wait for products, and what stands
 * behind them would wait as well.
 *
 * A row's m stands HEADROOM above the largest score of the first block that it sees, in base 2, and moves only when another passes it: then by whole
 * powers of two, so that what is summed already is scaled exactly. Weights therefore need no maximum of their block; floats have room for it on both
 * sides. They are rounded to bf16, as on GPUs; l sums them unrounded, for lse, and a second sum those that are multiplied, for O: what one key dominates
 * keeps its value. Where a hook asks for the maximum of a row, m is that.
 *
 * Exact before the products: Q is bf16; K and V are bf16 or narrower types, whose every value bf16 holds (4-bit ones with their group's scale too).
 * Sums run over keys in order, whatever the sets: a row's bits depend on no other row.
 *
 * Floors for 64 keys x 64 packed rows, d = 128: 128 tile products of 16 cycles; 256 vectors of weights of 10.5 instructions, two a cycle.
 *
 * Part of attend_tmpl.c. */

/* -------------------------------------------------------------------------------------------------------- the machine
 * Tiles 0..3 are sums, 4 and 5 left operands, 6 and 7 right ones; each 16 rows of 64 bytes. c += a b, where word pairs (2k, 2k+1) of a row of a meet
 * those of row k of b. TILE_STREAM loads what need not stay in the first-level cache. */
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
            for (int k = 0; k < 2 * TILE; k++)
                tile_file[c].f[i][j] += half_value(tile_file[a].h[i][k]) * half_value(tile_file[b].h[k / 2][2 * j + k % 2]);
}
#define TILE_LOAD(t, base, step) move_tile(t, (char *)(uintptr_t)(base), step, false)
#define TILE_STREAM(t, base, step) TILE_LOAD(t, base, step)
#define TILE_STORE(t, base, step) move_tile(t, (char *)(base), step, true)
#define TILE_ZERO(t) memset(&tile_file[t], 0, sizeof tile_file[t])
#define TILE_ADD(c, a, b) multiply_tiles(c, a, b)
static void open_tiles(void) { }
static void close_tiles(void) { }
static unsigned drop_tiny(void) { return 0; }
static void keep_tiny(unsigned before) { (void)before; }
#else
#define TILE_LOAD(t, base, step) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(base), "r"((int64_t)(step)) : "memory")
#define TILE_STREAM(t, base, step) __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t : : "r"(base), "r"((int64_t)(step)) : "memory")
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

/* Results below 2^-126 become 0, as those of tile products do: each such weight of a key far below the maximum would take the machine some 150
 * cycles. */
static unsigned drop_tiny(void)
{
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8000);
    return before;
}
static void keep_tiny(unsigned before) { __builtin_ia32_ldmxcsr(before); }
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
 *   tile_k   [2 sets][block][2 halves][dk / 32][2][16 pairs of d][16 keys][2]
 *   tile_s   [2 jobs][rows / 32][2][2 halves][2][16 rows][16 keys]
 *   tile_p   [2 strips][rows / 32][halves of the set][2][16 rows][32 keys]
 *   tile_v   [3 sets][dv / 32][halves of the set][2][16 pairs of keys][16 d][2]: d 0..3, 8..11, 16..19, 24..27, then the others; of pages in the
 *            order "tiles" 0..15, then the others
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

/* Where the block's rows of K (tiled: its places, if it has whole squares) lie as bf16 with zeros up to whole steps: in the cache or made here.
 * Zeros for what nobody sees. */
static void find_keys(work *w, block *b, const char **rows)
{
    const int step = tile_steps(w->dk) * TILE_DEPTH;
    if (w->tiled && has_squares(b)) {
        square_places(w, b, rows);
        return;
    }
    if (w->tiled) {
        untile_keys(w, b);
        for (int i = 0; i < KEYS; i++) rows[i] = b->seen >> i & 1 ? w->k_plain + 2 * w->k_plain_at[i] : (const char *)w->zeros;
        return;
    }
    if (w->p->k != FV__DTYPE_bf16 || w->p->qk_tail) {
        fetch_keys(w, b, 0, KEYS);
        narrow_rows(w->k, w->dk_pad, w->dk, step);
        for (int i = 0; i < KEYS; i++) rows[i] = (const char *)w->k + (int64_t)i * step * 2;
        return;
    }
    for (int i = 0; i < KEYS; i++) rows[i] = b->seen >> i & 1 ? w->run->k.data + 2 * b->k_at[i] : (const char *)w->zeros;
    if (step != w->dk) widen_rows(rows, w->dk, step, w->k);
}

/* The same of V; tiled: places of pairs, whatever the block. */
static void find_values(work *w, block *b, const char **keys, const char **rows)
{
    const int step = tile_steps(w->dv) * TILE_DEPTH;
    if (w->tiled && has_squares(b)) {
        pair_places(w, b, rows);
        clean_pairs(w, b, rows, w->v);
        return;
    }
    if (w->tiled) {
        untile_values(w, b);
        pair_again(w, b, (uint16_t *)(void *)w->v, rows);
        return;
    }
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

/* Q is read once, from memory: more rows on their way than the machine asks for by itself. */
enum { QUERIES_AHEAD = 24 };
static void ask_query(const work *w, int at)
{
    const fv__view *q = &w->run->q;
    if (at >= w->packed) return;
    const char *from = q->data + 2 * (w->rows[at / w->unit_heads].batch_row * q->stride[0] + (w->q_head + at % w->unit_heads) * q->stride[1]);
    for (int i = 0; i < 2 * w->dk; i += 64) __builtin_prefetch(from + i, 0, 2);
}

static void load_tiles(work *w)
{
    const int steps = tile_steps(w->dk), rows = whole_pairs(w->packed);
    for (int i = 0; i < rows; i++) {
        uint16_t *to = w->tile_q + (int64_t)(i / PAIR_ROWS) * steps * TILE_PAIR + row_in_pair((unsigned)i);
        const char *from = find_query(w, i, steps * TILE_DEPTH, (char *)w->line);
        ask_query(w, i + QUERIES_AHEAD);
        for (int d = 0; d < steps; d++, to += TILE_PAIR, from += 64) v_storei((int32_t *)(void *)to, v_loadi((const int32_t *)(const void *)from));
    }
}

/* --------------------------------------------------------------------------------------------------------------- sets */

enum { STRIPS = LARGEST_TILE / STRIP };

typedef struct strip {
    int first, rows;                    /* packed rows */
    uint64_t seen[SET];                 /* of each block, by some row */
    bool all[SET];                      /* every row sees all keys of the block */
    int begin, end;                     /* halves of the set from the first seen one on */
    uint16_t *p;
    const uint16_t *v;                  /* V of its set */
} strip;

typedef struct job {
    const strip *strip;
    int block;
} job;

typedef struct set {
    block *blocks[SET];
    int n;
    uint16_t *k, *v;                    /* their operands */
    strip strips[STRIPS];
    job jobs[STRIPS * SET];
    int num_jobs;
} set;

/* As many blocks as leave room for Q and O in the second-level cache. */
static int set_blocks(const work *w)
{
    enum { MOST = 1 << 19 };
    const int64_t bytes = KEYS * TILE_DEPTH * 2 * (2 * tile_steps(w->dk) + 3 * tile_steps(w->dv));
    return fv__max32(2, fv__min32(SET, (int)(MOST / bytes)));
}

/* Operands of the next set have places of their own: K's are free when the set's last scores are made, V's a strip later. */
static bool gather_set(work *w, set *s, int count, walk *x)
{
    const int most = set_blocks(w);
    for (s->n = 0; s->n < most; s->n++)
        if (!(s->blocks[s->n] = next_block(w, &w->blocks[count % 2 * SET + s->n], x))) break;
    s->k = w->tile_k + (int64_t)(count % 2) * SET * KEYS * TILE_DEPTH * tile_steps(w->dk);
    s->v = w->tile_v + (int64_t)(count % 3) * SET * KEYS * TILE_DEPTH * tile_steps(w->dv);
    return s->n > 0;
}

/* ------------------------------------------------------------------------------------------------------------- supply
 * What the next set needs, in portions of about a hundred instructions that are done between products: first its rows of K and V are asked for, then
 * they are made operands. */

enum { ASK_ROWS = 4, VALUE_PAIRS = 4 };

typedef struct supply {
    work *w;
    const set *set;
    int lists, list;                    /* of rows to ask for: K and V of each block; those begun */
    asking rows;
    int block, portion;                 /* operands: the next portion */
    const char *keys[KEYS], *values[KEYS];
    int credit, rate;                   /* portions that are due, in 256ths */
} supply;

/* Into the second-level cache: the first holds what is multiplied. False: all is asked for. */
static bool ask_some(supply *x)
{
    asking *a = &x->rows;
    while (a->at == a->end) {
        if (x->list == x->lists) return false;
        plan_asking(x->w, x->set->blocks[x->list % x->set->n], x->list < x->set->n, a);
        x->list++;
    }
    for (int n = ASK_ROWS; n > 0 && a->at < a->end; n--, a->at++)
        for (int i = 0; i < a->bytes; i += 64) __builtin_prefetch(a->rows[a->at] + i, 0, 2);
    return true;
}

/* 16 keys x 32 of d, turned already or not. */
static void pack_keys(const char *const *rows, int step, bool turned, uint16_t *to)
{
    v_i32 x[TILE];
    V_UNROLL
    for (int j = 0; j < TILE; j++) x[j] = v_loadi((const int32_t *)(const void *)(rows[j] + 64 * step));
    if (!turned) turn(x);
    V_UNROLL
    for (int j = 0; j < TILE; j++) v_storei((int32_t *)(void *)(to + j * TILE_DEPTH), x[j]);
}

/* VALUE_PAIRS pairs of keys, all of d. */
static void pack_values(const char *const *rows, int steps, uint16_t *to)
{
    for (int j = 0; j < VALUE_PAIRS; j++) {
        const char *low = rows[2 * j], *high = rows[2 * j + 1];
        uint16_t *at = to + j * TILE_DEPTH;
        for (int i = 0; i < steps; i++, low += 64, high += 64, at += SET_HALVES * TILE_PAIR) {
            const half_words a = (half_words)v_loadi((const int32_t *)(const void *)low);
            const half_words b = (half_words)v_loadi((const int32_t *)(const void *)high);
            v_storei((int32_t *)(void *)at, (v_i32)PAIR_WORDS(a, b, 0));
            v_storei((int32_t *)(void *)(at + TILE_HALF), (v_i32)PAIR_WORDS(a, b, 4));
        }
    }
}

/* The same of pairs that lie side by side: columns of the operand are d in order. */
static void copy_pairs(const char *const *places, int dv, uint16_t *to)
{
    for (int j = 0; j < VALUE_PAIRS; j++)
        for (int at = 0; at < 2 * dv; at += TILE_DEPTH) {
            const char *from = at < dv ? places[2 * j] + 2 * at : places[2 * j + 1] + 2 * (at - dv);
            uint16_t *out = to + j * TILE_DEPTH + at / (2 * TILE_DEPTH) * SET_HALVES * TILE_PAIR + at / TILE_DEPTH % 2 * TILE_HALF;
            v_storei((int32_t *)(void *)out, v_loadi((const int32_t *)(const void *)from));
        }
}

static int key_portions(const work *w) { return KEYS / TILE * tile_steps(w->dk); }
static int portions(const work *w) { return key_portions(w) + KEYS / 2 / VALUE_PAIRS; }

static void pack_some(supply *x)
{
    work *w = x->w;
    const int dk = tile_steps(w->dk), i = x->portion, of_keys = key_portions(w);
    block *b = x->set->blocks[x->block];
    if (i == 0) find_keys(w, b, x->keys);
    if (i < of_keys) {
        const int key = i / dk * TILE, step = i % dk;
        pack_keys(x->keys + key, step, w->tiled && has_squares(b),
                  x->set->k + ((int64_t)(x->block * 2 + key / TILE_DEPTH) * dk + step) * TILE_PAIR + key / TILE % 2 * TILE_HALF);
    } else {
        const int pair = (i - of_keys) * VALUE_PAIRS;
        if (!pair) find_values(w, b, x->keys, x->values);
        uint16_t *to = x->set->v + (x->block * 2 + pair / TILE) * TILE_PAIR + pair % TILE * TILE_DEPTH;
        if (w->tiled) copy_pairs(x->values + 2 * pair, w->dv, to);
        else pack_values(x->values + 2 * pair, tile_steps(w->dv), to);
    }
    if (++x->portion == portions(w)) {
        x->portion = 0;
        x->block++;
    }
}

/* For `calls` calls of supply_some. */
static supply begin_supply(work *w, const set *s, int calls)
{
    supply x = { .w = w, .set = s, .lists = w->p->v_in_k ? s->n : 2 * s->n };
    x.rate = 256 * (x.lists * KEYS / ASK_ROWS + s->n * portions(w)) / (calls + 1) + 1;
    return x;
}

static __attribute__((noinline)) void supply_some(supply *x)
{
    for (x->credit += x->rate; x->credit >= 256 && x->block < x->set->n; x->credit -= 256)
        if (!ask_some(x)) pack_some(x);
}

static void supply_rest(supply *x)
{
    while (x->block < x->set->n) pack_some(x);
}

/* ------------------------------------------------------------------------------------------------------------- weights */

enum { HEADROOM = 30, ROW_VECS = KEYS / V_LANES, PAIR_SUMS = PAIR_ROWS * KEYS };

#ifdef V_FRACTION
VFN v_f32 fraction(v_f32 x) { return V_FRACTION(x); }
VFN v_f32 scaled(v_f32 x, v_f32 y) { return V_SCALE(x, y); }
#else
VFN v_f32 whole_of(v_f32 x)
{
    const v_f32 y = v_max(v_set(-252.0f), v_min(v_set(252.0f), x)), n = v_float(v_int(y));
    return n - v_select(v_gt(n, y), v_set(1.0f), v_set(0.0f));
}
VFN v_f32 fraction(v_f32 x) { return v_max(v_set(-252.0f), v_min(v_set(252.0f), x)) - whole_of(x); }
VFN v_f32 scaled(v_f32 x, v_f32 y)      /* x 2^floor(y) */
{
    const v_i32 n = v_int(whole_of(y)), half = n >> 1;
    return x * v_of_bits((v_u32)(half + 127) << 23) * v_of_bits((v_u32)(n - half + 127) << 23);
}
#endif

/* A lane is above y, or no number. */
VFN bool any_above(v_f32 x, v_f32 y)
{
#ifdef V_ANY_ABOVE
    return V_ANY_ABOVE(x, y);
#else
    return v_any(v_not(v_le(x, y)));
#endif
}

/* What weights are made with, to be kept in registers. From memory: a constant of the text would be made anew for every row. */
typedef struct powers {
    v_f32 scale, limit, c[5];
    v_i32 ones;
} powers;

static const struct {
    float limit, c[5];
    int32_t ones;
} power_table = { 8.0f, { 1.0f, 0.6930322647094727f, 0.2413787841796875f, 0.052031517028808594f, 0.013555526733398438f }, 0x3F803F80 };

VFN powers load_powers(const work *w)
{
    const float *c = power_table.c;
    __asm__("" : "+r"(c));
    return (powers){ .scale = v_set(w->weight_scale), .limit = v_set(c[-1]), .c = { v_set(c[0]), v_set(c[1]), v_set(c[2]), v_set(c[3]), v_set(c[4]) },
                     .ones = v_seti(power_table.ones) };
}

/* 2^x: a polynomial of the fraction, relative error 4e-6, exact at whole numbers, and the machine's own scaling. */
VFN v_f32 power_of(v_f32 x, const powers *k)
{
    const v_f32 f = fraction(x);
    v_f32 y = k->c[4];
    V_UNROLL
    for (int i = 3; i >= 0; i--) y = v_fma(y, f, k->c[i]);
    return scaled(y, x);
}

/* sum += the weights of two pairs, as they will be multiplied. */
VFN v_f32 add_weights(v_f32 sum, v_i32 a, v_i32 b, const powers *k)
{
#ifdef V_DOT_BF16
    return V_DOT_BF16(a, k->ones, V_DOT_BF16(b, k->ones, sum));
#else
    const v_i32 upper = v_seti((int32_t)0xFFFF0000);
    const v_f32 low = v_of_bits((v_u32)a << 16) + v_of_bits((v_u32)b << 16);
    (void)k;
    return sum + (low + (v_of_bits((v_u32)(a & upper)) + v_of_bits((v_u32)(b & upper))));
#endif
}

VFN v_mask lanes_of(uint64_t bits, int vec)
{
    return V_TRUTH((v_seti((int32_t)(bits >> (vec * V_LANES) & 0xFFFF)) & (v_seti(1) << v_iota())) != 0);
}

/* Rows of a job: with hooks; without, all of which see all keys; without, some of which do not. */
typedef enum rows_kind { ANY_ROWS, WHOLE_ROWS, MASKED_ROWS } rows_kind;

/* The weights of a job on their way, some rows at a time. */
typedef struct softening {
    work *w;
    block *b;
    float *s;                           /* scores as tile_s */
    uint16_t *p;                        /* the strip's weights from the block's first half on */
    int done;                           /* halves of the strip before this block */
    int first, row, rows;               /* packed row of the strip's row 0; the next row, how many there are */
    const float *from;                  /* the next row's first scores, and its weights */
    uint16_t *to;
    rows_kind kind;
    int every, wait, several;           /* rows are done at every so many pauses, several at once */
    supply *supply;                     /* NULL: nothing more is made ready */
} softening;

static uint16_t *weights_at(const softening *x, unsigned i) { return x->p + i / PAIR_ROWS * (SET_HALVES * TILE_PAIR) + row_in_pair(i); }

/* The first of a row's vectors of scores, which lie a tile apart. */
static float *scores_at(const softening *x, unsigned i)
{
    return x->s + i / PAIR_ROWS * PAIR_SUMS + i / TILE % 2 * (PAIR_SUMS / 2) + i % TILE * TILE;
}

/* The row after: that of the next line, in whole tiles of rows. */
VFN void go_on(softening *x)
{
    x->row++;
    x->from += TILE;
    x->to += TILE_DEPTH;
    if (x->row % TILE == 0) {
        x->from = scores_at(x, (unsigned)x->row);
        x->to = weights_at(x, (unsigned)x->row);
    }
}

VFN void keep_weights(work *w, int at, const v_f32 *y, uint16_t *p, const powers *k)
{
    const v_i32 a = v_join_bf16(y[0], y[1]), b = v_join_bf16(y[2], y[3]);
    float *l = w->tile_l + (int64_t)at * 2 * V_LANES;
    v_storei((int32_t *)(void *)p, a);
    v_storei((int32_t *)(void *)(p + TILE_PAIR), b);
    v_store(l, v_load(l) + ((y[0] + y[1]) + (y[2] + y[3])));
    v_store(l + V_LANES, add_weights(v_load(l + V_LANES), a, b, k));
}

/* ---- rows with exceptions ---- */

/* bias infinite: a row that has met nothing yet has weights that are too large, whatever its scores. */
static void set_top(work *w, int at, float m)
{
    w->m[at] = m;
    w->bias[at] = -m;
}

/* A row's m has to rise above `top`, or to `top` where it is asked for: the sum, O and the weights that wait to be multiplied follow. What has risen
 * once may do so with each block (a penalty by distance): it gets twice the room. */
static void follow(const softening *x, int at, float top)
{
    work *w = x->w;
    const float old = w->m[at], grow = w->has_row_max ? top - old : __builtin_ceilf(top + 2 * w->headroom - old);
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
    for (int i = 1; i <= x->done; i++) {
        uint16_t *p = weights_at(x, (unsigned)(at - x->first)) - i * TILE_PAIR;
        v_f32 even, odd;
        v_split_bf16(p, &even, &odd);
        v_storei((int32_t *)(void *)p, (v_i32)((v_bits_of(odd * alpha) & 0xFFFF0000u) | v_bits_of(even * alpha) >> 16));
    }
}

/* The largest of a row's scores in base 2, of those that it sees; infinite where one is no number. */
VFN float largest_of(const float *s, int step, uint64_t bits, v_f32 scale)
{
    v_f32 top = v_set(-infinity);
    v_mask bad = v_false();
    V_UNROLL
    for (int i = 0; i < ROW_VECS; i++) {
        v_f32 y = v_load(s + i * step) * scale;
        if (bits != ~(uint64_t)0) y = v_select(lanes_of(bits, i), y, v_set(-infinity));
        top = v_max(y, top);
        bad = v_or(bad, v_ne(y, y));
    }
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    top = v_max(top, (v_f32)V_PICK((v_i32)top, (v_i32)top, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v_any(bad) ? infinity : v_lane(top, 0);
}

static void raise_row(const softening *x, int at, const float *s, uint64_t bits)
{
    follow(x, at, largest_of(s, V_LANES, bits, v_set(x->w->weight_scale)));
}

/* Weights of what the row sees. Says whether a score passes what m allows. */
static bool weigh_seen(const work *w, int at, const float *s, uint64_t bits, const powers *k, v_f32 *y)
{
    const v_f32 bias = v_set(w->bias[at]);
    V_UNROLL
    for (int i = 0; i < ROW_VECS; i++) y[i] = power_of(v_fma(v_load(s + i * V_LANES), k->scale, bias), k);
    if (bits != ~(uint64_t)0)
        for (int i = 0; i < ROW_VECS; i++) y[i] = v_select(lanes_of(bits, i), y[i], v_set(0.0f));
    return any_above((y[0] + y[1]) + (y[2] + y[3]), k->limit);
}

/* Weights that replace the softmax: m stays 0, so that states merge with factor 1. Or a row that sees nothing: its weights are 0. */
static void take_weights(work *w, int at, const float *s, uint64_t bits, uint16_t *p)
{
    v_f32 x[ROW_VECS];
    for (int i = 0; i < ROW_VECS; i++) x[i] = v_select(lanes_of(bits, i), v_load(s + i * V_LANES), v_set(0.0f));
    if (w->has_weight) w->m[at] = 0;
    v_storei((int32_t *)(void *)p, v_join_bf16(x[0], x[1]));
    v_storei((int32_t *)(void *)(p + TILE_PAIR), v_join_bf16(x[2], x[3]));
}

static __attribute__((noinline)) void soften_any(const softening *x, unsigned i)
{
    work *w = x->w;
    const int at = x->first + (int)i;
    const uint64_t bits = x->b->whole ? x->b->seen : x->b->mask[at];
    const powers k = load_powers(w);
    const float *from = scores_at(x, i);
    float s[KEYS];
    v_f32 y[ROW_VECS];
    const bool hooked = bits && (w->has_score || w->has_weight);
    const v_f32 scale = v_set(hooked ? w->score_scale : 1.0f);
    for (int j = 0; j < ROW_VECS; j++) v_store(s + j * V_LANES, v_load(from + j * TILE * TILE) * scale);
    if (hooked) hook_scores(w, x->b, &w->rows[at / w->unit_heads], at % w->unit_heads, s);
    if (!bits || w->has_weight) {
        take_weights(w, at, s, bits, weights_at(x, i));
        return;
    }
    if (w->m[at] == -infinity) set_top(w, at, largest_of(s, V_LANES, bits, k.scale) + w->headroom);
    if (w->has_row_max) raise_row(x, at, s, bits);
    if (weigh_seen(w, at, s, bits, &k, y)) {
        raise_row(x, at, s, bits);
        weigh_seen(w, at, s, bits, &k, y);
    }
    keep_weights(w, at, y, weights_at(x, i), &k);
}

/* ---- rows without ---- */

VFN void soften_plain(const softening *x, rows_kind kind, const powers *k)
{
    work *w = x->w;
    const int at = x->first + x->row;
    const float *s = x->from;
    const v_f32 bias = v_set(w->bias[at]);
    v_f32 y[ROW_VECS];
    V_UNROLL
    for (int j = 0; j < ROW_VECS; j++) {
        y[j] = power_of(v_fma(v_load(s + j * TILE * TILE), k->scale, bias), k);
        if (kind == MASKED_ROWS) y[j] = v_select(lanes_of(x->b->mask[at], j), y[j], v_set(0.0f));
    }
    if (__builtin_expect(any_above((y[0] + y[1]) + (y[2] + y[3]), k->limit), 0)) soften_any(x, (unsigned)x->row);
    else keep_weights(w, at, y, x->to, k);
}

/* What is done while tiles are multiplied. */
VFN void soften(softening *x, rows_kind kind, const powers *k)
{
    if (--x->wait > 0) return;
    x->wait = x->every;
    for (int n = x->several; n > 0 && x->row < x->rows; n--) {
        if (kind == ANY_ROWS) soften_any(x, (unsigned)x->row);
        else soften_plain(x, kind, k);
        go_on(x);
    }
}

static void soften_rest(softening *x)
{
    for (; x->row < x->rows; x->row++) soften_any(x, (unsigned)x->row);
}

/* ------------------------------------------------------------------------------------------------------------ products */

enum { PAUSES = 2 };                    /* of a step of a product */

typedef struct tile_product {
    const uint16_t *a, *b;              /* steps of TILE_PAIR elements */
    int depth;
    float *c;                           /* 2 x 2 tiles of sums: one beside the other, `below` bytes to those below */
    int64_t below;
    bool from_zero;
} tile_product;

/* Sums that wait in tiles 0..3 to be stored. */
typedef struct owed {
    char *at;                           /* NULL: none */
    int64_t below;
} owed;

enum { RIGHT = TILE * TILE * 4 };

VFN void load_operands(const uint16_t *a, const uint16_t *b)
{
    TILE_LOAD(4, a, 64);
    TILE_STREAM(6, b, 64);
    TILE_STREAM(7, b + TILE_HALF, 64);
    TILE_LOAD(5, a + TILE_HALF, 64);
}

/* A sum of the product before leaves its tile, one of this product enters it and takes its first step. */
#define CHANGE_SUM(t, old, p, left, right) do { \
    if ((old).at) TILE_STORE(t, (old).at + ((t) / 2 * (old).below + (t) % 2 * RIGHT), 64); \
    if ((p)->from_zero) TILE_ZERO(t); \
    else TILE_LOAD(t, (char *)(p)->c + ((t) / 2 * (p)->below + (t) % 2 * RIGHT), 64); \
    TILE_ADD(t, left, right); \
} while (0)

/* 32 x 32 sums += a b, for each product of a list. The last one's sums stay in their tiles. */
VFN void multiply_as(const tile_product *p, int count, owed *sums, softening *x, rows_kind kind)
{
    const powers k = kind == ANY_ROWS ? (powers){ 0 } : load_powers(x->w);
    owed old = *sums;
    load_operands(p->a, p->b);
    for (; count > 0; count--, p++) {
        CHANGE_SUM(0, old, p, 4, 6);
        CHANGE_SUM(1, old, p, 4, 7);
        soften(x, kind, &k);
        CHANGE_SUM(2, old, p, 5, 6);
        CHANGE_SUM(3, old, p, 5, 7);
        soften(x, kind, &k);
        for (int i = 1; i < p->depth; i++) {
            load_operands(p->a + i * TILE_PAIR, p->b + i * TILE_PAIR);
            TILE_ADD(0, 4, 6);
            TILE_ADD(1, 4, 7);
            soften(x, kind, &k);
            TILE_ADD(2, 5, 6);
            TILE_ADD(3, 5, 7);
            soften(x, kind, &k);
        }
        old = (owed){ (char *)p->c, p->below };
        if (count > 1) load_operands(p[1].a, p[1].b);
        if (x->supply) supply_some(x->supply);
    }
    *sums = old;
}

static __attribute__((noinline)) void multiply_any(const tile_product *p, int n, owed *sums, softening *x)
{
    multiply_as(p, n, sums, x, ANY_ROWS);
}
static __attribute__((noinline)) void multiply_whole(const tile_product *p, int n, owed *sums, softening *x)
{
    multiply_as(p, n, sums, x, WHOLE_ROWS);
}
static __attribute__((noinline)) void multiply_masked(const tile_product *p, int n, owed *sums, softening *x)
{
    multiply_as(p, n, sums, x, MASKED_ROWS);
}

static void multiply(const tile_product *p, int count, owed *sums, softening *x)
{
    if (!count) return;
    switch (x->kind) {
    case ANY_ROWS: multiply_any(p, count, sums, x); break;
    case WHOLE_ROWS: multiply_whole(p, count, sums, x); break;
    case MASKED_ROWS: multiply_masked(p, count, sums, x); break;
    }
}

static void store_sums(owed *sums)
{
    if (!sums->at) return;
    TILE_STORE(0, sums->at, 64);
    TILE_STORE(1, sums->at + RIGHT, 64);
    TILE_STORE(2, sums->at + sums->below, 64);
    TILE_STORE(3, sums->at + sums->below + RIGHT, 64);
    sums->at = NULL;
}

/* -------------------------------------------------------------------------------------------------------------- strips */

static uint64_t seen_by(const block *b, int first, int rows, bool *all)
{
    uint64_t seen = 0, by_all = ~(uint64_t)0;
    if (b->whole) seen = by_all = b->seen;
    for (int i = first; i < first + rows && !b->whole; i++) {
        seen |= b->mask[i];
        by_all &= b->mask[i];
    }
    *all = by_all == ~(uint64_t)0;
    return seen;
}

/* False: its rows see nothing of the set. */
static bool begin_strip(work *w, const set *s, int first, uint16_t *p, strip *out)
{
    *out = (strip){ .first = first, .rows = fv__min32(STRIP, w->packed - first), .begin = SET_HALVES, .p = p, .v = s->v };
    for (int i = 0; i < s->n; i++) {
        const uint64_t seen = out->seen[i] = seen_by(s->blocks[i], first, out->rows, &out->all[i]);
        if (!seen) continue;
        out->begin = fv__min32(out->begin, 2 * i + lowest(seen) / TILE_DEPTH);
        out->end = 2 * i + (above_highest(seen) - 1) / TILE_DEPTH + 1;
    }
    return out->begin < out->end;
}

/* A block in between of which the strip's rows see nothing weighs nothing. When the place for its weights is its own. */
static void clear_unseen(const strip *s)
{
    for (int i = s->begin / 2; i < (s->end + 1) / 2; i++)
        for (int j = 0; j < STRIP && !s->seen[i]; j += PAIR_ROWS)
            memset(s->p + (j / PAIR_ROWS * SET_HALVES + 2 * i) * TILE_PAIR, 0, 2 * TILE_PAIR * sizeof *s->p);
}

/* Strips take turns with the two places for weights: what waits to be multiplied stays. */
static void list_jobs(work *w, set *s, int *turns)
{
    int used = 0;
    s->num_jobs = 0;
    for (int first = 0; first < w->packed; first += STRIP) {
        strip *x = &s->strips[used];
        if (!begin_strip(w, s, first, w->tile_p + *turns % 2 * STRIP * SET * KEYS, x)) continue;
        used++;
        (*turns)++;
        for (int i = 0; i < s->n; i++)
            if (x->seen[i]) s->jobs[s->num_jobs++] = (job){ x, i };
    }
}

static int row_pairs(const strip *s) { return whole_pairs(s->rows) / PAIR_ROWS; }

/* Does some row see a key of the half? */
static bool sees_half(const strip *s, int which, int half) { return s->seen[which] >> (half * TILE_DEPTH) & 0xFFFFFFFF; }

/* Products of a job at most: scores, and all values of a strip. */
enum { STRIP_PAIRS = STRIP / PAIR_ROWS, MOST_PRODUCTS = STRIP_PAIRS * (2 + FV__MAX_DIM / TILE_DEPTH) };

/* Scores of a block's keys; halves that no row of the strip sees are left out. Returns how many products. */
static int list_keys(const work *w, const set *s, const job *j, float *to, tile_product *out)
{
    const int steps = tile_steps(w->dk);
    int n = 0;
    for (int half = 0; half < 2; half++) {
        if (!sees_half(j->strip, j->block, half)) continue;
        for (int i = 0; i < row_pairs(j->strip); i++)
            out[n++] = (tile_product){ .a = w->tile_q + (int64_t)(j->strip->first / PAIR_ROWS + i) * steps * TILE_PAIR,
                                       .b = s->k + (int64_t)(2 * j->block + half) * steps * TILE_PAIR, .depth = steps,
                                       .c = to + i * PAIR_SUMS + half * 2 * TILE * TILE, .below = PAIR_SUMS / 2 * 4, .from_zero = true };
    }
    return n;
}

/* O += P V for steps [from, to) of d; the strip's first set makes O. */
static __attribute__((noinline)) int list_values(work *w, const strip *s, int from, int to, tile_product *out)
{
    const int steps = tile_steps(w->dv);
    const bool from_zero = !(w->begun >> (s->first / STRIP) & 1);
    int n = 0;
    for (int d = from; d < to; d++)
        for (int i = 0; i < row_pairs(s); i++)
            out[n++] = (tile_product){ .a = s->p + (i * SET_HALVES + s->begin) * TILE_PAIR,
                                       .b = s->v + ((int64_t)d * SET_HALVES + s->begin) * TILE_PAIR, .depth = s->end - s->begin,
                                       .c = w->tile_o + ((int64_t)(s->first / PAIR_ROWS + i) * steps + d) * TILE_PAIR,
                                       .below = 2 * TILE * TILE * 4, .from_zero = from_zero };
    if (to == steps) w->begun |= 1u << (s->first / STRIP);
    return n;
}

static int steps_of_keys(const work *w, const job *j)
{
    return tile_steps(w->dk) * row_pairs(j->strip) * (sees_half(j->strip, j->block, 0) + sees_half(j->strip, j->block, 1));
}

static int steps_of_values(const strip *s) { return row_pairs(s) * (s->end - s->begin); }

static rows_kind kind_of(const work *w, const set *s, const job *j)
{
    if (w->has_score || w->has_weight || w->has_row_max) return ANY_ROWS;
    if (j->strip->all[j->block]) return WHOLE_ROWS;
    return s->blocks[j->block]->whole ? ANY_ROWS : MASKED_ROWS;
}

/* Rows that meet their first keys: the largest score of the block stands for the maximum. Its weight is a power of two then, which bf16 holds
 * exactly, and where weights differ little, all lie where bf16 is finest (docs/kernels/cpu.md). */
static void meet_keys(const softening *x)
{
    work *w = x->w;
    const v_f32 scale = v_set(w->weight_scale);
    for (int i = 0; i < x->rows && x->kind != ANY_ROWS; i++) {
        const uint64_t bits = x->kind == WHOLE_ROWS ? ~(uint64_t)0 : x->b->mask[x->first + i];
        if (w->m[x->first + i] != -infinity || !bits) continue;
        set_top(w, x->first + i, largest_of(scores_at(x, (unsigned)i), TILE * TILE, bits, scale) + w->headroom);
    }
}

/* The scores of a job that is to be softened beside `steps` steps of products. */
static softening soften_job(work *w, const set *s, const job *j, float *scores, int steps)
{
    const int pauses = PAUSES * steps, rows = j->strip->rows;
    softening x = { .w = w, .b = s->blocks[j->block], .s = scores, .p = j->strip->p + 2 * j->block * TILE_PAIR, .done = 2 * j->block, .from = scores,
                    .first = j->strip->first, .rows = rows, .kind = kind_of(w, s, j), .every = fv__max32(1, pauses / rows), .several = 1 };
    if (pauses < rows && pauses) x.several = fv__max32(1, (rows + pauses / 2) / pauses);
    x.to = x.p;
    x.wait = x.every;
    if (!(w->begun >> (j->strip->first / STRIP) & 1) || x.kind == MASKED_ROWS) meet_keys(&x);
    return x;
}

/* ------------------------------------------------------------------------------------------------------------ pipeline */

/* Where the walk is. */
typedef struct stream {
    work *w;
    set sets[2];
    int count;                          /* sets gathered */
    int turns;                          /* strips begun */
    int scores;                         /* jobs whose scores have been made */
    strip before;                       /* its values wait to be multiplied; rows 0: none */
    owed sums;                          /* values of that strip, or none */
    tile_product list[MOST_PRODUCTS];   /* to be done next */
    softening idle;
} stream;

static float *scores_place(const stream *x, int i) { return x->w->tile_s + i % 2 * STRIP * KEYS; }

/* The values of the strip before that wait still, alone. */
static void finish_before(stream *x)
{
    if (x->before.rows) multiply(x->list, list_values(x->w, &x->before, 0, tile_steps(x->w->dv), x->list), &x->sums, &x->idle);
    store_sums(&x->sums);
    x->before.rows = 0;
}

/* A job's weights, beside the next one's scores and part `part` of `parts` of the strip before. */
static void attend_job(stream *x, const set *s, const job *now, const set *of_next, const job *next, int part, int parts, supply *ask)
{
    work *w = x->w;
    const int d = tile_steps(w->dv), from = d * part / parts, to = d * (part + 1) / parts;
    const int steps = (next ? steps_of_keys(w, next) : 0) + (x->before.rows ? (to - from) * steps_of_values(&x->before) : 0);
    softening soft = soften_job(w, s, now, scores_place(x, x->scores - 1), steps);
    int n = next ? list_keys(w, of_next, next, scores_place(x, x->scores++), x->list) : 0;
    const int of_keys = n;
    if (x->before.rows) n += list_values(w, &x->before, from, to, x->list + n);
    soft.supply = ask;
    multiply(x->list, n, &x->sums, &soft);
    if (n == of_keys || part + 1 == parts) store_sums(&x->sums);        /* scores are read next, O may be when its strip has its turn */
    soften_rest(&soft);
}

static int jobs_of_strip(const set *s, int at)
{
    int count = 1;
    while (at + count < s->num_jobs && s->jobs[at + count].strip == s->jobs[at].strip) count++;
    return count;
}

/* The jobs of a set. With the last one go the first scores of the set that follows. */
static void attend_set(stream *x, set *s, set *following)
{
    const int calls = s->num_jobs * (row_pairs(&s->strips[0]) * (2 + tile_steps(x->w->dv) / SET));
    supply ask = begin_supply(x->w, following, calls);
    for (int i = 0; i < s->num_jobs; ) {
        const int parts = jobs_of_strip(s, i);
        clear_unseen(s->jobs[i].strip);
        for (int part = 0; part < parts; part++, i++) {
            const bool last = i + 1 == s->num_jobs;
            if (last) {
                supply_rest(&ask);
                list_jobs(x->w, following, &x->turns);
            }
            const set *of_next = last ? following : s;
            const job *next = !last ? &s->jobs[i + 1] : following->num_jobs ? &following->jobs[0] : NULL;
            attend_job(x, s, &s->jobs[i], of_next, next, part, parts, last ? NULL : &ask);
        }
        const strip *done = s->jobs[i - 1].strip;
        x->before = *done;
        const bool again = i == s->num_jobs && following->num_jobs && following->strips[0].first == done->first;
        if (again) finish_before(x);    /* O must be whole when m rises */
    }
}

/* -------------------------------------------------------------------------------------------------------------- a walk */

static void begin_tiles(work *w)
{
    const int64_t rows = whole_pairs(w->packed);
    memset(w->tile_l, 0, (size_t)rows * 2 * V_LANES * sizeof *w->tile_l);
    for (int i = 0; i < rows; i++) set_top(w, i, -infinity);
    w->begun = 0;
    w->weight_scale = w->has_score ? V_LOG2E : w->score_scale;
    w->headroom = w->has_row_max ? 0 : HEADROOM;
}

static float sum_of(const float *lanes)
{
    v_f32 x = v_load(lanes);
    x = x + V_PICK(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x = x + V_PICK(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = x + V_PICK(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v_lane(x, 0) + v_lane(x, 1);
}

/* The state of a row as the rest of the kernel has it: o is owed the sum of the weights that it was made with. */
static void end_row(work *w, int i, float *to)
{
    const int steps = tile_steps(w->dv);
    const float *from = w->tile_o + (int64_t)(i / PAIR_ROWS) * steps * TILE_PAIR + i / TILE % 2 * TILE_HALF + i % TILE * TILE;
    const float *l = w->tile_l + (int64_t)i * 2 * V_LANES;
    const float sum = w->l[i] = sum_of(l), rounded = sum_of(l + V_LANES);
    const v_f32 factor = v_set(rounded > 0 ? sum / rounded : 1.0f);
    if (!(w->begun >> (i / STRIP) & 1)) {
        memset(to, 0, (size_t)w->dv_pad * sizeof *to);
        return;
    }
    for (int d = 0; d < w->dv_pad; d += 2 * TILE, from += TILE_PAIR) {
        const v_i32 a = (v_i32)v_bits_of(v_load(from) * factor), b = (v_i32)v_bits_of(v_load(from + TILE * TILE) * factor);
        if (w->tiled) {
            v_storei((int32_t *)(void *)(to + d), a);
            v_storei((int32_t *)(void *)(to + d + TILE), b);
            continue;
        }
        v_storei((int32_t *)(void *)(to + d), V_PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        if (d + TILE < w->dv_pad)
            v_storei((int32_t *)(void *)(to + d + TILE), V_PICK(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}

static void walk_sets(work *w, walk *x)
{
    stream s = { .w = w };
    begin_tiles(w);
    if (!gather_set(w, &s.sets[0], s.count++, x)) return;
    supply first = begin_supply(w, &s.sets[0], 1);
    while (ask_some(&first)) { }
    supply_rest(&first);
    list_jobs(w, &s.sets[0], &s.turns);
    if (s.sets[0].num_jobs) {
        multiply(s.list, list_keys(w, &s.sets[0], &s.sets[0].jobs[0], scores_place(&s, s.scores++), s.list), &s.sums, &s.idle);
        store_sums(&s.sums);
    }
    for (set *now = &s.sets[0], *next = &s.sets[1]; now->n; ) {
        set *done = now;
        gather_set(w, next, s.count++, x);
        next->num_jobs = 0;
        attend_set(&s, now, next);
        now = next;
        next = done;
    }
    finish_before(&s);
}

/* The states of the walk's keys are in tiles. */
static void walk_tiles(work *w, walk *x)
{
    const unsigned before = drop_tiny();
    walk_sets(w, x);
    keep_tiny(before);
}

static void end_tiles(work *w)
{
    for (int i = 0; i < w->packed; i++) end_row(w, i, w->o + (int64_t)i * w->dv_pad);
}

/* States that are whole go out row by row, and never lie in memory as floats. */
static void write_tiles(work *w)
{
    enum { AHEAD = 8 };
    const fv__view *o = &w->run->o;
    const int bytes = w->dv * bits_as(w->p->o) / 8;
    for (int i = 0; i < w->packed; i++) {
        const int next = fv__min32(i + AHEAD, w->packed - 1);
        const int64_t to = w->rows[next / w->unit_heads].batch_row * o->stride[0] + (w->q_head + next % w->unit_heads) * o->stride[1];
        for (int k = 0; k < bytes; k += 64) __builtin_prefetch(o->data + to * bits_as(w->p->o) / 8 + k, 1, 3);
        end_row(w, i, w->line);
        write_head(w, &w->rows[i / w->unit_heads], i % w->unit_heads, w->m[i], w->l[i], w->line);
    }
}
