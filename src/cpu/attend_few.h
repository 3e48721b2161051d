/* SPDX-License-Identifier: Apache-2.0 */
/* attend_few.h -- the path for few packed rows (decode): K and V are streamed from where they lie, once for all rows, lanes along d.
 *
 *   scores   V_FEW_ACCS accumulators (rows x keys), each over d; a transposing sum then makes a vector of V_LANES dot products of as many
 *   values   rows x vectors of d accumulators, each block of keys summed from zero in key order
 *
 * While a block is multiplied, the lines of the next one are asked for. Element types other than f32, f16, bf16, rows that are no whole number
 * of vectors, and rows that hooks change are unpacked first.
 *
 * Part of attend_tmpl.c. */

/* --------------------------------------------------------------------------------------------------- transposing sums */

/* Lane i of the result is the sum over the lanes of x[i]. One step halves the vectors: blend and swap hold [a's low, b's high] and [a's high, b's
 * low] halves of groups of 2 * half lanes. */
#if V_LANES == 1
VFN v_f32 sum_lanes(v_f32 *x) { return x[0]; }
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
#define HALVE(half)                                                                                                                    \
    V_UNROLL                                                                                                                           \
    for (int i = 0; i < half; i++)                                                                                                     \
        x[i] = __builtin_shufflevector(x[i], x[i + half], BLEND_##half) + __builtin_shufflevector(x[i], x[i + half], SWAP_##half)

VFN v_f32 sum_lanes(v_f32 *x)
{
#if V_LANES >= 16
    HALVE(8);
#endif
#if V_LANES >= 8
    HALVE(4);
#endif
    HALVE(2);
    HALVE(1);
    return x[0];
}
#endif

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

/* (even, odd) to (low, high). */
#if V_LANES == 1
VFN void join_parts(v_f32 *y) { (void)y; }
#else
#if V_LANES == 16
#define JOIN_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define JOIN_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif V_LANES == 8
#define JOIN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define JOIN_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define JOIN_LOW 0, 4, 1, 5
#define JOIN_HIGH 2, 6, 3, 7
#endif
VFN void join_parts(v_f32 *y)
{
    const v_f32 low = __builtin_shufflevector(y[0], y[1], JOIN_LOW), high = __builtin_shufflevector(y[0], y[1], JOIN_HIGH);
    y[0] = low;
    y[1] = high;
}
#endif

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

/* Lines to ask for while something else is multiplied: rows[row .. end), `span` bytes of each, a few at a time. Into the second level: the first
 * holds what is multiplied now. In the order of memory, so that the machine's own prefetcher joins in. */
typedef struct ahead {
    const char *const *rows;
    int row, end, at, span;
    int lines;                          /* in all, rounded up */
} ahead;

static ahead ahead_of(const char *const *rows, int first, int end, int span)
{
    return (ahead){ rows, first, end, 0, span, (end - first) * ((span + 63) / 64) };
}

VFN void ask(ahead *a, int lines)
{
    while (lines > 0 && a->row < a->end) {
        const char *p = a->rows[a->row] + a->at;
        const int left = (a->span - a->at + 63) / 64, n = lines < left ? lines : left;
        for (int i = 0; i < n; i++) __builtin_prefetch(p + 64 * i, 0, 2);
        lines -= n;
        a->at += 64 * n;
        if (n < left) continue;
        a->at = 0;
        a->row++;
    }
}

/* ------------------------------------------------------------------------------------------------------------ scores */

enum { ACCS = V_FEW_ACCS };

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

/* s[row][key] for keys [0, end), rounded up to the keys of a step: k[] has KEYS readable rows. */
VFN void few_scores(int rows, int dtype, const float *q, int dim, const char *const *k, int end, ahead *next, float *s)
{
    const int step = ACCS / rows, lines = (next->lines * step + end - 1) / end;
    for (int key = 0; key < end; key += step) {
        v_f32 acc[ACCS];
        float sums[ACCS];
        int d = 0;
        V_UNROLL
        for (int i = 0; i < ACCS; i++) acc[i] = v_set(0.0f);
        for (; splits(dtype) && d + 2 * V_LANES <= dim; d += 2 * V_LANES) few_step(rows, step, 2, dtype, q, dim, k + key, d, acc);
        for (; d < dim; d += V_LANES) few_step(rows, step, 1, dtype, q, dim, k + key, d, acc);
        V_UNROLL
        for (int i = 0; i < ACCS; i += V_LANES) v_store(sums + i, sum_lanes(acc + i));
        V_UNROLL
        for (int r = 0; r < rows; r++) memcpy(s + r * KEYS + key, sums + r * step, (size_t)step * sizeof *s);
        ask(next, lines);
    }
}

/* ------------------------------------------------------------------------------------------------------------ values */

typedef struct few_sums {
    const float *p;                     /* [row][KEYS] */
    const char *const *v;               /* [KEYS] */
    int first, end, dim;
    ahead *next;
    const float *alpha;
    float *o;                           /* [row][dim] */
} few_sums;

enum { MAX_VECS = 8, ASK_KEYS = 8 };

/* `vecs` vectors of d from `d` on, in parts of `parts`. */
VFN void few_strip(int rows, int dtype, int vecs, int parts, const few_sums *x, int d, int lines)
{
    v_f32 acc[FEW * MAX_VECS];
    V_UNROLL
    for (int i = 0; i < rows * vecs; i++) acc[i] = v_set(0.0f);
    for (int key = x->first; key < x->end; ) {
        const int stop = key + ASK_KEYS < x->end ? key + ASK_KEYS : x->end;
        ask(x->next, lines);
        for (; key < stop; key++) {
            v_f32 y[MAX_VECS];
            V_UNROLL
            for (int i = 0; i < vecs; i += parts) load_parts(dtype, parts, x->v[key], d + i * V_LANES, y + i);
            V_UNROLL
            for (int r = 0; r < rows; r++) {
                const v_f32 p = v_set(x->p[r * KEYS + key]);
                V_UNROLL
                for (int i = 0; i < vecs; i++) acc[r * vecs + i] = v_fma(p, y[i], acc[r * vecs + i]);
            }
        }
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
    const int turns = (x->dim + vecs * V_LANES - 1) / (vecs * V_LANES) * ((x->end - x->first + ASK_KEYS - 1) / ASK_KEYS);
    const int lines = (x->next->lines + turns - 1) / turns;
    int d = 0;
    for (; d + vecs * V_LANES <= x->dim; d += vecs * V_LANES) few_strip(rows, dtype, vecs, parts, x, d, lines);
    for (; d < x->dim; d += V_LANES) few_strip(rows, dtype, 1, 1, x, d, lines);
}

/* -------------------------------------------------------------------------------------------- by rows and element type */

typedef void scores_fn(const float *q, int dim, const char *const *k, int end, ahead *next, float *s);
typedef void values_fn(const few_sums *x);

#define FEW_KERNELS(rows, type)                                                                                                        \
    static void scores_##rows##_##type(const float *q, int dim, const char *const *k, int end, ahead *next, float *s)                  \
    { few_scores(rows, FV__DTYPE_##type, q, dim, k, end, next, s); }                                                                   \
    static void values_##rows##_##type(const few_sums *x) { few_values(rows, FV__DTYPE_##type, x); }
#define FEW_TYPES(rows) FEW_KERNELS(rows, f32) FEW_KERNELS(rows, f16) FEW_KERNELS(rows, bf16)
FEW_TYPES(1)
FEW_TYPES(2)
FEW_TYPES(4)
FEW_TYPES(8)

/* [1, 2, 4, 8 rows][f32, f16, bf16] */
#define FEW_ROW(kind, rows) { kind##_##rows##_f32, kind##_##rows##_f16, kind##_##rows##_bf16 }
static scores_fn *const scores_table[4][3] = { FEW_ROW(scores, 1), FEW_ROW(scores, 2), FEW_ROW(scores, 4), FEW_ROW(scores, 8) };
static values_fn *const values_table[4][3] = { FEW_ROW(values, 1), FEW_ROW(values, 2), FEW_ROW(values, 4), FEW_ROW(values, 8) };

static int type_index(int dtype) { return dtype == FV__DTYPE_f16 ? 1 : dtype == FV__DTYPE_bf16 ? 2 : 0; }
static int rows_index(int packed) { return packed > 4 ? 3 : packed > 2 ? 2 : packed - 1; }

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

static float top_lane(v_f32 x)
{
    float lanes[V_LANES], top = -infinity;
    v_store(lanes, x);
    for (int i = 0; i < V_LANES; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

static float sum_lane(v_f32 x)
{
    float lanes[V_LANES];
    v_store(lanes, x);
    for (int half = V_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* One row's scores to weights. seen: the keys that it sees. */
static void few_softmax(work *w, int i, uint64_t seen, float *s)
{
    const v_f32 scale = v_set(w->has_score ? 1.0f : w->score_scale);
    v_f32 top = v_set(w->m[i]), sum = v_set(0.0f);
    for (int key = 0; key < KEYS; key += V_LANES) {
        const v_f32 x = v_select(mask_bits(seen, key), v_load(s + key) * scale, v_set(-infinity));
        v_store(s + key, x);
        top = v_max(x, top);
    }
    const float m = top_lane(top), base = m == -infinity ? 0.0f : m;
    for (int key = 0; key < KEYS; key += V_LANES) {
        const v_f32 p = v_exp2_neg(v_load(s + key) - v_set(base));
        v_store(s + key, p);
        sum = sum + p;
    }
    w->alpha[i] = v_lane(v_exp2_neg(v_set(w->m[i] - base)), 0);
    w->m[i] = m;
    w->l[i] = w->l[i] * w->alpha[i] + sum_lane(sum);
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
    for (int i = 0; i < b->n; i++)
        if (b->seen >> i & 1) s[i] *= scale->data[at[i]];
}

static void few_row(work *w, block *b, int i)
{
    float *s = w->s + i * KEYS;
    const bool hooks = w->has_score || w->has_weight;
    if (w->run->k_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_key) few_token_scales(&w->run->k_scale, b, b->k_scale_at, s);
    if (hooks) {
        scale_line(s, KEYS, w->score_scale);
        hook_scores(w, b, &w->rows[i / w->unit_heads], i % w->unit_heads, s);
    }
    const uint64_t seen = b->whole ? b->seen : b->mask[i];
    if (w->has_weight) few_weights(w, i, seen, s);
    else few_softmax(w, i, seen, s);
    if (w->run->v_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_value) few_token_scales(&w->run->v_scale, b, b->v_scale_at, s);
}

/* ------------------------------------------------------------------------------------------------------------ a block */

/* Where the rows of a block lie: in the cache, or zeros for what nobody sees. Unpacked rows are pointed at when they have been unpacked. */
static void point_rows(const work *w, block *b)
{
    const fv__run *r = w->run;
    const int k_bits = bits_as(w->p->k), v_bits = bits_as(w->p->v);
    for (int i = 0; i < KEYS; i++) {
        const bool seen = i < b->n && b->seen >> i & 1;
        b->k_row[i] = seen ? r->k.data + b->k_at[i] * k_bits / 8 : (const char *)w->zeros;
        b->v_row[i] = seen ? r->v.data + b->v_at[i] * v_bits / 8 : (const char *)w->zeros;
    }
}

static void point_unpacked(const char **rows, const float *base, int step)
{
    for (int i = 0; i < KEYS; i++) rows[i] = (const char *)(base + (int64_t)i * step);
}

/* What to ask for of the next block while unit `at` of `units` is at work. Where the heads of a token lie side by side, a share of the tokens with all
 * heads; else all tokens of this unit's head. */
static ahead ahead_rows(const work *w, const fv__view *v, int bits, const char *const *rows, int at, int units)
{
    const int64_t step = v->stride[w->plan->page_size ? 2 : 1];
    const int64_t heads = (w->units[units - 1].kv_head - w->units[0].kv_head) * step;
    if (step == v->width) return ahead_of(rows, KEYS * at / units, KEYS * (at + 1) / units, (int)((heads + v->width) * bits / 8));
    return ahead_of(rows, 0, KEYS, (int)(v->width * bits / 8));
}

/* next: the block that follows, found already for the first unit, or NULL. */
static void attend_few(work *w, block *b, const block *next, int at, int units)
{
    const fv__run *r = w->run;
    const int rows = rows_index(w->packed), first = lowest(b->seen), end = above_highest(b->seen);
    const char *k_rows[KEYS], *v_rows[KEYS];
    ahead none = { 0 }, k_ahead = none, v_ahead = none;
    if (next) k_ahead = ahead_rows(w, &r->k, bits_as(w->p->k), next->k_row, at, units);
    if (next && !w->p->v_in_k) v_ahead = ahead_rows(w, &r->v, bits_as(w->p->v), next->v_row, at, units);
    if (!w->k_direct) {
        fetch_keys(w, b, 0, KEYS);
        point_unpacked(k_rows, w->k, w->dk_pad);
    }
    const int k_type = w->k_direct ? type_index(w->p->k) : 0;
    scores_table[rows][k_type](w->q, w->dk_pad, w->k_direct ? b->k_row : k_rows, end, &k_ahead, w->s);
    for (int i = 0; i < w->packed; i++) few_row(w, b, i);
    const bool from_k = w->v_from_k && !w->k_direct;                    /* unpacked already */
    if (!w->v_direct) {
        if (!from_k) fetch_values(w, b, first, end);
        point_unpacked(v_rows, from_k ? w->k : w->v, from_k ? w->dk_pad : w->dv_pad);
    }
    const int v_type = w->v_direct ? type_index(w->p->v) : 0;
    const few_sums x = { w->s, w->v_direct ? b->v_row : v_rows, first, end, w->dv_pad, &v_ahead, w->alpha, w->o };
    values_table[rows][v_type](&x);
}

/* Q, rows as they are; the rows up to the kernel's are zero. */
static void load_few(work *w)
{
    const int kernel_rows = 1 << rows_index(w->packed);
    for (int i = 0; i < kernel_rows; i++) {
        float *out = w->q + (int64_t)i * w->dk_pad;
        if (i < w->packed) load_query(w, &w->rows[i / w->unit_heads], i % w->unit_heads, out);
        else memset(out, 0, (size_t)w->dk_pad * sizeof *out);
        if (w->k_direct && splits(w->p->k)) split_query(out, w->dk);
        w->alpha[i] = 1;
    }
    memset(w->s, 0, FEW * KEYS * sizeof *w->s);
}
