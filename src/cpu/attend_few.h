/* SPDX-License-Identifier: Apache-2.0 */
/* attend_few.h -- the path for few packed rows (decode): K and V are streamed from where they lie, once for all rows, lanes along d.
 *
 *   scores   V_FEW_ACCS accumulators (rows x keys), each over d; a transposing sum then makes a vector of V_LANES dot products of as many
 *   values   rows x vectors of d accumulators, each block of keys summed from zero in key order
 *
 * Heads of a token lie side by side, and a block is done head by head: memory would be read in pieces, strided. So a whole block is asked for into
 * the second-level cache, in the order of memory, while the one before it is multiplied. Elements of 4 bits, rows that are no whole number of
 * vectors, and rows that hooks change are unpacked first. Where the level multiplies pairs of bf16, queries of bf16 stay as they are and elements of
 * keys that bf16 holds exactly are brought into pairs.
 *
 * Part of attend_tmpl.c. */

/* --------------------------------------------------------------------------------------------------- transposing sums */

/* Lane i of the result is the sum over the lanes of x[i]. One step halves the vectors: blend and swap hold [a's low, b's high] and [a's high, b's
 * low] halves of groups of 2 * half lanes. */
#if V_LANES == 1
VFN v_f32 sum_lanes(v_f32 *x) { return x[0]; }
VFN v_f32 max_lanes(v_f32 *x) { return x[0]; }
#define sum_eight sum_lanes
#define max_eight max_lanes
#else
#if V_LANES == 16
#define BLEND_8 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31
#define SWAP_8 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
#define BLEND_4 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31
#define SWAP_4 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27
#define BLEND_2 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31
#define SWAP_2 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29
#define BLEND_1 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31
#define SWAP_1 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30
#elif V_LANES == 8
#define BLEND_4 0, 1, 2, 3, 12, 13, 14, 15
#define SWAP_4 4, 5, 6, 7, 8, 9, 10, 11
#define BLEND_2 0, 1, 10, 11, 4, 5, 14, 15
#define SWAP_2 2, 3, 8, 9, 6, 7, 12, 13
#define BLEND_1 0, 9, 2, 11, 4, 13, 6, 15
#define SWAP_1 1, 8, 3, 10, 5, 12, 7, 14
#else
#define BLEND_2 0, 1, 6, 7
#define SWAP_2 2, 3, 4, 5
#define BLEND_1 0, 5, 2, 7
#define SWAP_1 1, 4, 3, 6
#endif
#define HALVE(half, join)                                                                                                               \
    V_UNROLL                                                                                                                           \
    for (int i = 0; i < half; i++)                                                                                                     \
        x[i] = join(V_PICK(x[i], x[i + half], BLEND_##half), V_PICK(x[i], x[i + half], SWAP_##half))
#if V_LANES == 16
#define HALVE_ALL(join) HALVE(8, join); HALVE(4, join); HALVE(2, join); HALVE(1, join)
#elif V_LANES == 8
#define HALVE_ALL(join) HALVE(4, join); HALVE(2, join); HALVE(1, join)
#else
#define HALVE_ALL(join) HALVE(2, join); HALVE(1, join)
#endif

VFN v_f32 sum_lanes(v_f32 *x)
{
    HALVE_ALL(v_add);
    return x[0];
}

VFN v_f32 max_lanes(v_f32 *x)
{
    HALVE_ALL(v_max);
    return x[0];
}

/* The same of eight vectors at most; in the lanes behind are no numbers. */
#if V_LANES == 16
VFN v_f32 sum_eight(v_f32 *x)
{
    HALVE(4, v_add); HALVE(2, v_add); HALVE(1, v_add);
    return x[0] + V_PICK(x[0], x[0], SWAP_8);
}

VFN v_f32 max_eight(v_f32 *x)
{
    HALVE(4, v_max); HALVE(2, v_max); HALVE(1, v_max);
    return v_max(x[0], V_PICK(x[0], x[0], SWAP_8));
}
#else
#define sum_eight sum_lanes
#define max_eight max_lanes
#endif
#endif
enum { EIGHT = V_LANES < 8 ? V_LANES : 8 };

/* --------------------------------------------------------------------------------------------------- streamed elements
 * bf16 is read two vectors at a time, even places and odd places: a shift and a mask, no shuffle. Q lies in the same order; sums of values are put
 * back in order when a block is done. */

VFN bool splits(int dtype) { return dtype == FV__DTYPE_bf16 && V_LANES > 1; }

VFN void load_parts(int dtype, int parts, const char *base, int d, v_f32 *y)
{
    if (parts == 2 && splits(dtype)) {
        v_split_bf16(base + 2 * (int64_t)d, &y[0], &y[1]);
        return;
    }
    V_UNROLL
    for (int i = 0; i < parts; i++) y[i] = load_as(dtype, base, d + i * V_LANES);
}

/* Pairs of d as they lie. */
VFN v_i32 load_pairs(int dtype, const char *base, int d)
{
    if (dtype == FV__DTYPE_bf16) return v_pairs_bf16(base + 2 * (int64_t)d);
    return v_join_bf16(load_as(dtype, base, d), load_as(dtype, base, d + V_LANES));
}

/* Q of one row into the order in which load_parts reads keys. */
static void split_query(float *q, int dim)
{
    float even[V_LANES], odd[V_LANES];
    for (int d = 0; d + 2 * V_LANES <= dim; d += 2 * V_LANES) {
        for (int i = 0; i < V_LANES; i++) {
            even[i] = q[d + 2 * i];
            odd[i] = q[d + 2 * i + 1];
        }
        memcpy(q + d, even, sizeof even);
        memcpy(q + d + V_LANES, odd, sizeof odd);
    }
}

/* ------------------------------------------------------------------------------------------------------------ scores */

enum { ACCS = V_FEW_ACCS, ASK_EVERY = 64 };      /* elements of d and keys between one asking and the next, or more */

/* acc[row][key] += over `parts` vectors of d. Whichever of rows and keys are fewer wait in registers. */
VFN void few_step(int rows, int keys, int parts, int dtype, const float *q, int dim, const char *const *k, int d, v_f32 *acc)
{
    if (rows <= keys) {
        v_f32 x[2 * FEW];
        V_UNROLL
        for (int i = 0; i < rows * parts; i++) x[i] = v_load(q + (int64_t)(i / parts) * dim + d + i % parts * V_LANES);
        V_UNROLL
        for (int j = 0; j < keys; j++) {
            v_f32 y[2];
            load_parts(dtype, parts, k[j], d, y);
            V_UNROLL
            for (int i = 0; i < rows * parts; i++) acc[i / parts * keys + j] = v_fma(x[i], y[i % parts], acc[i / parts * keys + j]);
        }
    } else {
        v_f32 y[2 * ACCS];
        V_UNROLL
        for (int j = 0; j < keys; j++) load_parts(dtype, parts, k[j], d, y + j * parts);
        V_UNROLL
        for (int i = 0; i < rows * parts; i++) {
            const v_f32 x = v_load(q + (int64_t)(i / parts) * dim + d + i % parts * V_LANES);
            V_UNROLL
            for (int j = 0; j < keys; j++) acc[i / parts * keys + j] = v_fma(x, y[j * parts + i % parts], acc[i / parts * keys + j]);
        }
    }
}

/* The same over 2 * V_LANES of d, in pairs of bf16. */
VFN void few_dots(int rows, int keys, int dtype, const char *q, int dim, const char *const *k, int d, v_f32 *acc)
{
    v_i32 x[FEW];
    V_UNROLL
    for (int i = 0; i < rows; i++) x[i] = v_pairs_bf16(q + 2 * ((int64_t)i * dim + d));
    V_UNROLL
    for (int j = 0; j < keys; j++) {
        const v_i32 y = load_pairs(dtype, k[j], d);
        V_UNROLL
        for (int i = 0; i < rows; i++) acc[i * keys + j] = v_dot_bf16(x[i], y, acc[i * keys + j]);
    }
}

/* What the next block's rows of K (V) are asked for by: token by token, all units of a token together, as they lie in memory. A run is as much of a
 * token as lies in one place: the rows of all units, or one row. */
typedef struct ahead {
    const char *const *rows;            /* [KEYS] of the first unit */
    int64_t shift[UNITS];               /* bytes from there to the token's runs */
    int runs, bytes;                    /* of a token; of a run */
    int row_bytes;
    int token, run;                     /* the next; token KEYS: none */
    const char *at, *end;               /* what is left of the one before */
} ahead;

/* Asks for `bytes` more. */
VFN void ask_ahead(ahead *a, int64_t bytes)
{
    while (bytes > 0) {
        if (a->at >= a->end) {
            if (a->token >= KEYS) return;
            a->at = a->rows[a->token] + a->shift[a->run];
            a->end = a->at + a->bytes;
            a->run = a->run + 1 < a->runs ? a->run + 1 : 0;
            a->token += a->run == 0;
        }
        const int64_t n = bytes < a->end - a->at ? bytes : a->end - a->at;
        for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(a->at + i, 0, 2);
        a->at += n;
        bytes -= n;
    }
}

/* Rows to read, and those to ask for meanwhile: as many. */
typedef struct few_rows {
    const char *const *now;             /* [KEYS] */
    int first, end;                     /* keys that some row sees */
    ahead *next;
} few_rows;

/* s[row][key] for keys [0, end), rounded up to the keys of a step. */
VFN void few_scores(int rows, int dtype, bool dots, const float *q, int dim, const few_rows *k, float *s)
{
    const int step = ACCS / rows, share = step * k->next->row_bytes * V_LANES / dim;
    const bool spread = step * (dots || splits(dtype) ? 2 : 1) * V_LANES >= ASK_EVERY;
    for (int key = 0; key < k->end; key += step) {
        v_f32 acc[ACCS];
        float sums[ACCS];
        V_UNROLL
        for (int i = 0; i < ACCS; i++) acc[i] = v_set(0.0f);
        for (int d = 0, parts; d < dim; d += parts * V_LANES) {
            parts = dots || (splits(dtype) && d + 2 * V_LANES <= dim) ? 2 : 1;
            if (dots) few_dots(rows, step, dtype, (const char *)q, dim, k->now + key, d, acc);
            else if (parts == 2) few_step(rows, step, 2, dtype, q, dim, k->now + key, d, acc);
            else few_step(rows, step, 1, dtype, q, dim, k->now + key, d, acc);
            if (spread) ask_ahead(k->next, parts * share);
        }
        V_UNROLL
        for (int i = 0; i < ACCS; i += V_LANES) v_store(sums + i, sum_lanes(acc + i));
        V_UNROLL
        for (int r = 0; r < rows; r++) memcpy(s + r * KEYS + key, sums + r * step, (size_t)step * sizeof *s);
        if (!spread) ask_ahead(k->next, step * k->next->row_bytes);
    }
}

/* ------------------------------------------------------------------------------------------------------------ values */

typedef struct few_sums {
    const float *p;                     /* [row][KEYS] */
    few_rows v;
    int dim;
    const float *alpha;
    float *o;                           /* [row][dim] */
} few_sums;

enum { MAX_VECS = 8 };

/* `vecs` vectors of d from `d` on, in parts of `parts`. Every few keys ask for their share of what is wanted next. */
VFN void few_strip(int rows, int dtype, int vecs, int parts, const few_sums *x, int d)
{
    v_f32 acc[FEW * MAX_VECS];
    const int every = vecs * V_LANES < ASK_EVERY ? ASK_EVERY / (vecs * V_LANES) : 1;
    const int share = every * x->v.next->row_bytes * vecs * V_LANES / x->dim;
    V_UNROLL
    for (int i = 0; i < rows * vecs; i++) acc[i] = v_set(0.0f);
    for (int key = x->v.first; key < x->v.end; key++) {
        v_f32 y[MAX_VECS];
        V_UNROLL
        for (int i = 0; i < vecs; i += parts) load_parts(dtype, parts, x->v.now[key], d + i * V_LANES, y + i);
        V_UNROLL
        for (int r = 0; r < rows; r++) {
            const v_f32 p = v_set(x->p[r * KEYS + key]);
            V_UNROLL
            for (int i = 0; i < vecs; i++) acc[r * vecs + i] = v_fma(p, y[i], acc[r * vecs + i]);
        }
        if (key % every == 0) ask_ahead(x->v.next, share);
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        const v_f32 a = v_set(x->alpha[r]);
        V_UNROLL
        for (int i = 0; i < vecs; i++) {
            float *o = x->o + (int64_t)r * x->dim + d + i * V_LANES;
            if (parts == 2 && i % 2 == 0) join_parts(acc + r * vecs + i);
            v_store(o, v_fma(v_load(o), a, acc[r * vecs + i]));
        }
    }
}

VFN void few_values(int rows, int dtype, const few_sums *x)
{
    const int vecs = ACCS / rows > MAX_VECS ? MAX_VECS : ACCS / rows, parts = splits(dtype) && vecs > 1 ? 2 : 1;
    int d = 0;
    for (; d + vecs * V_LANES <= x->dim; d += vecs * V_LANES) few_strip(rows, dtype, vecs, parts, x, d);
    for (; vecs > 2 && d + 2 * V_LANES <= x->dim; d += 2 * V_LANES) few_strip(rows, dtype, 2, parts, x, d);
    for (; d < x->dim; d += V_LANES) few_strip(rows, dtype, 1, 1, x, d);
}

/* -------------------------------------------------------------------------------------------- by rows and element type */

typedef void scores_fn(const float *q, int dim, const few_rows *k, float *s);
typedef void values_fn(const few_sums *x);

#define FEW_SCORES(rows, type)                                                                                                         \
    static void scores_##rows##_##type(const float *q, int dim, const few_rows *k, float *s)                                           \
    { few_scores(rows, FV__DTYPE_##type, false, q, dim, k, s); }
#define FEW_DOTS(rows, type)                                                                                                           \
    static void dots_##rows##_##type(const float *q, int dim, const few_rows *k, float *s)                                             \
    { few_scores(rows, FV__DTYPE_##type, true, q, dim, k, s); }
#define FEW_VALUES(rows, type) static void values_##rows##_##type(const few_sums *x) { few_values(rows, FV__DTYPE_##type, x); }

/* The element types that are read as they lie: f32 and f16, and those that bf16 holds exactly. */
#define FEW_SHORT(make, rows) make(rows, bf16) make(rows, int8) make(rows, fp8_e4m3) make(rows, fp8_e5m2)
#define FEW_TYPES(make, rows) make(rows, f32) make(rows, f16) FEW_SHORT(make, rows)
#define FEW_ROWS(types, make) types(make, 1) types(make, 2) types(make, 4) types(make, 8)
FEW_ROWS(FEW_TYPES, FEW_SCORES)
FEW_ROWS(FEW_TYPES, FEW_VALUES)

/* [1, 2, 4, 8 rows][type_index] */
#define FEW_SCORES_OF(rows, type) scores_##rows##_##type,
#define FEW_VALUES_OF(rows, type) values_##rows##_##type,
#define FEW_TABLE(types, make) { { types(make, 1) }, { types(make, 2) }, { types(make, 4) }, { types(make, 8) } }
enum { NUM_TYPES = 6, FIRST_SHORT = 2 };
static scores_fn *const scores_table[4][NUM_TYPES] = FEW_TABLE(FEW_TYPES, FEW_SCORES_OF);
static values_fn *const values_table[4][NUM_TYPES] = FEW_TABLE(FEW_TYPES, FEW_VALUES_OF);
#if V_DOTS
FEW_ROWS(FEW_SHORT, FEW_DOTS)
#define FEW_DOTS_OF(rows, type) dots_##rows##_##type,
static scores_fn *const dots_table[4][NUM_TYPES - FIRST_SHORT] = FEW_TABLE(FEW_SHORT, FEW_DOTS_OF);
#endif

static int type_index(int dtype)
{
    switch (dtype) {
    case FV__DTYPE_f32: return 0;
    case FV__DTYPE_f16: return 1;
    case FV__DTYPE_bf16: return 2;
    case FV__DTYPE_int8: return 3;
    case FV__DTYPE_fp8_e4m3: return 4;
    default: return 5;                  /* fp8_e5m2 */
    }
}
static int rows_index(int packed) { return packed > 4 ? 3 : packed > 2 ? 2 : packed - 1; }

/* Rows that there is room for, of so many packed ones. */
static int whole_few(int packed) { return packed > FEW ? MOST_FEW : 1 << rows_index(packed); }

#if V_WORDS
#include "attend_few8.h"
#endif

/* ------------------------------------------------------------------------------------------------------------ softmax */

VFN v_mask mask_bits(uint64_t bits, int key)
{
#if V_LANES == 1
    return -(v_i32)(bits >> key & 1);
#else
    const v_i32 word = v_seti((int32_t)(uint32_t)(bits >> key));
    return V_TRUTH((word & (v_seti(1) << v_iota())) != 0);
#endif
}

/* What lies behind them is of other rows. */
VFN void store_eight(float *to, v_f32 x) { memcpy(to, &x, EIGHT * sizeof *to); }

/* Scores of EIGHT rows and fewer to weights, and their states: what is one number a row is one lane of a vector. seen[row]: the places it sees. */
static void few_softmax(work *w, int at, int rows, const uint64_t *seen)
{
    const v_f32 scale = v_set(w->has_score ? V_LOG2E : w->score_scale);
    v_f32 lanes[EIGHT];
    float base[V_LANES];
    V_UNROLL
    for (int r = 0; r < EIGHT; r++) lanes[r] = v_set(-infinity);
    for (int r = 0; r < rows; r++) {
        float *s = w->s + (int64_t)(at + r) * KEYS;
        for (int key = 0; key < KEYS; key += V_LANES) {
            v_f32 x = v_load(s + key) * scale;
            if (seen[at + r] != ~(uint64_t)0) x = v_select(mask_bits(seen[at + r], key), x, v_set(-infinity));
            v_store(s + key, x);
            lanes[r] = v_max(x, lanes[r]);
        }
    }
    const v_f32 old = v_load(w->m + at), top = v_max(max_eight(lanes), old);
    const v_f32 zero = v_select(v_eq(top, v_set(-infinity)), v_set(0.0f), top);             /* nothing seen yet: -inf - 0 stays -inf */
    const v_f32 alpha = v_exp2_neg(old - zero);
    v_store(base, zero);
    V_UNROLL
    for (int r = 0; r < EIGHT; r++) lanes[r] = v_set(0.0f);
    for (int r = 0; r < rows; r++) {
        float *s = w->s + (int64_t)(at + r) * KEYS;
        for (int key = 0; key < KEYS; key += V_LANES) {
            const v_f32 p = v_exp2_neg(v_load(s + key) - v_set(base[r]));
            v_store(s + key, p);
            lanes[r] = lanes[r] + p;
        }
    }
    store_eight(w->m + at, top);
    store_eight(w->l + at, v_fma(v_load(w->l + at), alpha, sum_eight(lanes)));
    store_eight(w->alpha + at, alpha);
}

/* Weights instead of a softmax: they add up as they are. */
static void few_weights(work *w, int i, uint64_t seen, float *s)
{
    for (int key = 0; key < KEYS; key += V_LANES) v_store(s + key, v_select(mask_bits(seen, key), v_load(s + key), v_set(0.0f)));
    w->m[i] = 0;
    w->alpha[i] = 1;
}

/* Factors by token: of K on the scores, of V on the weights. */
static void few_token_scales(const fv__scale *scale, const block *b, const int64_t *at, float *s)
{
    for (int key = 0; key < b->n; key++)
        if (b->seen >> key & 1) s[key] *= scale->data[at[key]];
}

static void few_hooks(work *w, block *b, int i, float *s)
{
    for (int key = 0; key < KEYS; key += V_LANES) v_store(s + key, v_load(s + key) * w->score_scale);
    hook_scores(w, b, &w->rows[i / w->unit_heads], i % w->unit_heads, s);
}

/* Scores to weights, for all rows of the unit. */
static void few_weigh(work *w, block *b)
{
    uint64_t seen[FEW + V_LANES];
    for (int i = 0; i < w->packed; i++) {
        float *s = w->s + i * KEYS;
        if (w->run->k_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_key) few_token_scales(&w->run->k_scale, b, b->k_scale_at, s);
        if (w->has_score || w->has_weight) few_hooks(w, b, w->part + i, s);
        seen[i] = b->whole ? b->seen : b->mask[w->part + i];
        if (w->has_weight) few_weights(w, i, seen[i], s);
    }
    for (int i = 0; i < w->packed && !w->has_weight; i += EIGHT) few_softmax(w, i, fv__min32(EIGHT, w->packed - i), seen);
    for (int i = 0; i < w->packed && w->run->v_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_value; i++)
        few_token_scales(&w->run->v_scale, b, b->v_scale_at, w->s + i * KEYS);
}

/* ------------------------------------------------------------------------------------------------------------ a block */

/* Where the rows of a block lie for the first unit: in the cache, or zeros for what nobody sees. */
static void point_rows(const work *w, block *b)
{
    const fv__run *r = w->run;
    const int k_bits = bits_as(w->p->k), v_bits = bits_as(w->p->v);
    for (int i = 0; i < KEYS; i++) {
        const bool seen = b->seen >> i & 1;
        b->k_row[i] = seen ? r->k.data + b->k_at[i] * k_bits / 8 : (const char *)w->zeros;
        b->v_row[i] = seen ? r->v.data + b->v_at[i] * v_bits / 8 : (const char *)w->zeros;
        if (w->k4) b->k_pair[i] = seen ? r->k_block_scale.data + 2 * b->k_group_at[i] : (const char *)w->zeros;
        if (w->v4) b->v_pair[i] = seen ? r->v_block_scale.data + 2 * b->v_group_at[i] : (const char *)w->zeros;
    }
    if (w->tiled && w->k_direct) square_places(w, b, b->k_row);
    if (w->tiled && w->v_direct) pair_places(w, b, b->v_row);
}

/* The same rows of another head, `by` bytes away. */
static void move_rows(const work *w, const block *b, const char *const *from, int64_t by, const char **to)
{
    if (b->seen == ~(uint64_t)0)
        for (int i = 0; i < KEYS; i++) to[i] = from[i] + by;
    else
        for (int i = 0; i < KEYS; i++) to[i] = from[i] == (const char *)w->zeros ? from[i] : from[i] + by;
}

static void point_unpacked(const char **rows, const float *base, int step)
{
    for (int i = 0; i < KEYS; i++) rows[i] = (const char *)(base + (int64_t)i * step);
}

/* Bytes from the first unit's rows of K (V) to those of unit `at`. */
static int64_t unit_shift(const work *w, const fv__view *v, int dtype, int at)
{
    const int axis = w->plan->page_size ? 2 : 1;
    return (w->units[at].kv_head - w->units[0].kv_head) * v->stride[axis] * bits_as(dtype) / 8;
}

/* The rows of `v` that lie at rows[KEYS] for the first unit; NULL: there are none to ask for. */
static void plan_runs(const work *w, const fv__view *v, int dtype, int units, const char *const *rows, ahead *out)
{
    const int bytes = (int)((int64_t)v->width * bits_as(dtype) / 8);
    *out = (ahead){ .rows = rows, .row_bytes = bytes, .bytes = bytes, .runs = units, .token = KEYS };
    if (!rows) return;
    out->token = 0;
    for (int i = 0; i < units; i++) out->shift[i] = unit_shift(w, v, dtype, i);
    if (out->shift[units - 1] == (int64_t)(units - 1) * bytes) {
        out->runs = 1;
        out->bytes = units * bytes;
    }
}

/* The rows of K and V, and their scales of groups, in a block that follows; NULL: there is none. */
enum { NEXT_K, NEXT_V, NEXT_K_PAIRS, NEXT_V_PAIRS, NEXTS };

static void plan_ahead(const work *w, const block *b, int units, ahead out[NEXTS])
{
    const fv__run *r = w->run;
    const bool values = b && !w->p->v_in_k;
    plan_runs(w, &r->k, w->p->k, units, b ? b->k_row : NULL, &out[NEXT_K]);
    plan_runs(w, &r->v, w->p->v, units, values ? b->v_row : NULL, &out[NEXT_V]);
    plan_runs(w, &r->k_block_scale, FV__DTYPE_f16, units, b && w->k4 ? b->k_pair : NULL, &out[NEXT_K_PAIRS]);
    plan_runs(w, &r->v_block_scale, FV__DTYPE_f16, units, values && w->v4 ? b->v_pair : NULL, &out[NEXT_V_PAIRS]);
}

#include "attend_few4.h"
#include "attend_few_tiled.h"

static scores_fn *choose_scores(const work *w)
{
    const int rows = rows_index(w->packed);
    if (w->tiled && w->k_direct) return tiled_scores_table[w->k_dots][rows];
#if V_DOTS
    if (w->k_dots) return dots_table[rows][type_index(w->p->k) - FIRST_SHORT];
#endif
    return scores_table[rows][type_index(w->k_direct ? w->p->k : FV__DTYPE_f32)];
}

static values_fn *choose_values(const work *w)
{
    if (w->tiled && w->v_direct) return tiled_values_table[rows_index(w->packed)];
    return values_table[rows_index(w->packed)][type_index(w->v_direct ? w->p->v : FV__DTYPE_f32)];
}

static void score_rows(const work *w, const few_rows *k)
{
#if V_WORDS
    if (w->q_words) {
        word_scores_table[rows_index(w->packed)](w->q, w->dk_pad, k, w->s);
        return;
    }
#endif
    choose_scores(w)(w->q, w->dk_pad, k, w->s);
}

static void sum_values(const work *w, const few_sums *x)
{
#if V_WORDS
    word_weights words;
    if (w->v_words && make_words(w->s, 1 << rows_index(w->packed), &words)) {
        word_values_table[rows_index(w->packed)](&words, x);
        return;
    }
#endif
    choose_values(w)(x);
}

static void score_few(work *w, block *b, int at, ahead *next)
{
    const fv__run *r = w->run;
    const char *k_now[KEYS];
    const few_rows k = { k_now, lowest(b->seen), above_highest(b->seen), next };
    if (w->k_direct) move_rows(w, b, b->k_row, unit_shift(w, &r->k, w->p->k, at), k_now);
    else {
        fetch_keys(w, b, 0, KEYS);
        point_unpacked(k_now, w->k, w->dk_pad);
    }
    score_rows(w, &k);
}

static void value_few(work *w, block *b, int at, ahead *next)
{
    const fv__run *r = w->run;
    const int first = lowest(b->seen), end = above_highest(b->seen);
    const char *v_now[KEYS];
    const few_rows v = { v_now, first, end, next };
    const bool from_k = w->v_from_k && !w->k_direct;                    /* unpacked already */
    if (w->v_direct) {
        move_rows(w, b, b->v_row, unit_shift(w, &r->v, w->p->v, at), v_now);
        if (w->tiled) clean_pairs(w, b, v_now, w->v);
    } else {
        if (!from_k) fetch_values(w, b, first, end);
        point_unpacked(v_now, from_k ? w->k : w->v, from_k ? w->dk_pad : w->dv_pad);
    }
    const few_sums x = { w->s, v, w->dv_pad, w->alpha, w->o };
    sum_values(w, &x);
}

/* The part at hand of unit `at` of those that are done together. */
static void attend_part(work *w, block *b, int at, ahead next[NEXTS])
{
#if V_BYTES
    if (w->k4) score_few4(w, b, at, &next[NEXT_K], &next[NEXT_K_PAIRS]);
    else
#endif
        score_few(w, b, at, &next[NEXT_K]);
    few_weigh(w, b);
#if V_BYTES
    if (w->v4) value_few4(w, b, at, &next[NEXT_V], &next[NEXT_V_PAIRS]);
    else
#endif
        value_few(w, b, at, &next[NEXT_V]);
}

/* Row i of Q as the scores read it: floats, in the order of load_parts; bf16; or words, where false says that the row cannot be. */
static bool load_few_row(work *w, int i, int rows, bool words)
{
    float *out = w->q + (int64_t)i * w->dk_pad, *line = w->k_dots || w->k4 || words ? w->line : out;
    if (i < w->packed) load_query(w, &w->rows[(w->part + i) / w->unit_heads], (w->part + i) % w->unit_heads, line);
    else memset(line, 0, (size_t)w->dk_pad * sizeof *line);
#if V_WORDS
    if (words) return load_words(w, i, rows, line);
#endif
    (void)rows;
#if V_BYTES
    if (w->k4) quantise_query(line, w->dk, group_of(&w->run->k_block_scale, w->dk), out);
#endif
    if (w->k_dots) pack(FV__DTYPE_bf16, w->q, (int64_t)i * w->dk_pad, w->dk, line);
    else if (w->k_direct && splits(w->p->k) && !w->tiled) split_query(out, w->dk);
    return true;
}

/* The queries of the part at hand. Says whether they became words. */
static bool load_queries(work *w)
{
    const int rows = 1 << rows_index(w->packed);
    bool words = w->k_words;
    for (int i = 0; i < rows; i++)
        if (!load_few_row(w, i, rows, words)) {
            words = false;
            i = -1;
        }
    for (int i = 0; i < rows; i++) w->alpha[i] = 1;
    memset(w->s, 0, FEW * KEYS * sizeof *w->s);
    return words;
}

/* More than FEW rows are done in parts, each with its own pass over a block: K and V are in the second-level cache when the second one comes. Packed
 * rows [first, first + FEW) of unit `at`; end_parts: all of them. */
static void enter_part(work *w, int at, int first)
{
    const unit_work *u = &w->units[at];
    enter_unit(w, at);
    w->part = first;
    w->packed = fv__min32(FEW, w->num_rows * w->unit_heads - first);
    w->q += (int64_t)first * w->dk_pad;
    w->o += (int64_t)first * w->dv_pad;
    w->m += first;
    w->l += first;
    w->alpha += first;
    w->q_words = u->q_words >> (first / FEW) & 1;
}

static void end_parts(work *w, int at)
{
    enter_unit(w, at);
    w->part = 0;
    w->packed = w->num_rows * w->unit_heads;
}

static void load_few(work *w, int at)
{
    const int packed = w->packed;
    w->units[at].q_words = 0;
    for (int first = 0; first < packed; first += FEW) {
        enter_part(w, at, first);
        w->units[at].q_words |= (unsigned)load_queries(w) << (first / FEW);
    }
    end_parts(w, at);
}

static void attend_few(work *w, block *b, int at, ahead next[NEXTS])
{
    const int packed = w->packed;
    for (int first = 0; first < packed; first += FEW) {
        enter_part(w, at, first);
        attend_part(w, b, at, next);
    }
    end_parts(w, at);
}
