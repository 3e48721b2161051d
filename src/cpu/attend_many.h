/* SPDX-License-Identifier: Apache-2.0 */
/* attend_many.h -- the path for many packed rows (and, in the invariant mode, for any number): two small matrix products with the softmax between.
 *
 *   scores   S[key][row] = sum over d of K[key][d] Q[d][row]: lanes along rows, K broadcast, sums in the order of d
 *   softmax  lanes along rows: no step mixes lanes, so that a row's bits do not depend on its neighbours
 *   values   O[row][d] = O alpha + sum over keys of P[key][row] V[key][d]: lanes along d, P broadcast, each block summed from zero in key order
 *
 * A key that a row does not see has weight 0 exactly, and a block of which it sees nothing has alpha 1: neither changes a bit of the row's state.
 *
 * Part of attend_tmpl.c. */

enum { STEP = V_QK_VECS * V_QK_KEYS };  /* keys: ranges of keys are rounded to it; a tile of one vector of rows takes so many */

typedef struct chunk {
    int first, vecs, rows;              /* packed rows [first, first + rows), rows = vecs * V_LANES */
    int key_first, key_end;             /* what some row of it sees lies in this range of the block */
    asking *ahead;                      /* what to ask for meanwhile: values while scores are made, the next keys while values are added */
} chunk;

static int rows_of_chunk(const work *w, int at) { return fv__min32(w->padded - at, CHUNK); }

/* The chunk of packed rows from `at` on, a multiple of CHUNK. */
static chunk chunk_at(const work *w, int at)
{
    const int rows = rows_of_chunk(w, at);
    return (chunk){ .first = at, .vecs = rows / V_LANES, .rows = rows };
}

static int down(int key) { return key / STEP * STEP; }
static int up(int key) { return (key + STEP - 1) / STEP * STEP; }

/* ------------------------------------------------------------------------------------------------------------ scores */

enum { PAUSE = 32 };                    /* steps of d or keys between two asks */

/* vecs x keys accumulators over dk. vecs and keys are constants; vecs * keys <= STEP. `share` rows are asked for now and then. */
VFN void scores_tile(int vecs, int keys, const float *q, const float *k, int64_t k_step, int dk, float scale, float *s, asking *ahead, int share)
{
    const int rows = vecs * V_LANES;
    v_f32 acc[STEP];
    V_UNROLL
    for (int i = 0; i < vecs * keys; i++) acc[i] = v_set(0.0f);
    for (int d = 0; d < dk; ) {
        const int stop = d + PAUSE < dk ? d + PAUSE : dk;
        ask_rows(ahead, share);
        for (; d < stop; d++) {
            v_f32 x[V_QK_VECS];
            V_UNROLL
            for (int v = 0; v < vecs; v++) x[v] = v_load(q + (int64_t)d * rows + v * V_LANES);
            V_UNROLL
            for (int j = 0; j < keys; j++) {
                const v_f32 y = v_set(k[j * k_step + d]);
                V_UNROLL
                for (int v = 0; v < vecs; v++) acc[j * vecs + v] = v_fma(x[v], y, acc[j * vecs + v]);
            }
        }
    }
    V_UNROLL
    for (int j = 0; j < keys; j++)
        V_UNROLL
        for (int v = 0; v < vecs; v++) v_store(s + j * rows + v * V_LANES, acc[j * vecs + v] * scale);
}

/* So many rows with each of `times` asks. */
static int share_of(const asking *a, int times) { return (a->end + times - 1) / times; }

VFN void scores_of(work *w, int vecs, int keys, const chunk *c)
{
    const float *q = w->q + (int64_t)c->first * w->dk;
    const int first = down(c->key_first), tiles = (c->key_end - first + keys - 1) / keys;
    const int share = share_of(c->ahead, tiles * ((w->dk + PAUSE - 1) / PAUSE));
    for (int key = first; key < c->key_end; key += keys)
        scores_tile(vecs, keys, q, w->k + (int64_t)key * w->dk_pad, w->dk_pad, w->dk, w->score_scale, w->s + (int64_t)key * vecs * V_LANES,
                    c->ahead, share);
}

static void scores(work *w, const chunk *c)
{
    switch (c->vecs) {
    case 1: scores_of(w, 1, STEP, c); break;
#if V_QK_VECS >= 2
    case 2: scores_of(w, 2, STEP / 2, c); break;
#endif
#if V_QK_VECS >= 3
    case 3: scores_of(w, 3, STEP / 4, c); break;
#endif
#if V_QK_VECS >= 4
    case 4: scores_of(w, 4, STEP / 4, c); break;
#endif
    }
}

/* --------------------------------------------------------------------------------------------------- hooks on scores */

/* One row's scores through the hooks, in the order of the variants; what replaces the softmax comes last, wherever it stands. */
static void hook_scores(work *w, block *b, const row *r, int head, float *line)
{
    const fv__at at = place_block(w, b, r, head);
    for (int u = 0; u < w->p->num_uses; u++)
        if (w->hooks[u]->score) w->hooks[u]->score(line, b->n, w->run->args[u], &at);
    for (int u = 0; w->has_weight && u < w->p->num_uses; u++)
        if (w->hooks[u]->weight) w->hooks[u]->weight(line, b->n, w->run->args[u], &at);
}

/* Scales of tokens, before hooks see the scores. */
static void scale_tokens(const work *w, const block *b, const chunk *c)
{
    for (int i = c->key_first; i < c->key_end; i++)
        if (b->seen >> i & 1) scale_line(w->s + (int64_t)i * c->rows, c->rows, token_scale(&w->run->k_scale, b->k_scale_at, i));
}

/* A row's scores lie a stride apart; hooks want them together: V_LANES rows at a time are turned into lines, and back. */
static void hook_chunk(work *w, block *b, const chunk *c)
{
    float lines[V_LANES * KEYS];
    const int from = c->key_first / V_LANES * V_LANES;
    memset(lines, 0, sizeof lines);
    for (int first = 0; first < c->rows && c->first + first < w->packed; first += V_LANES) {
        float *s = w->s + first;
        for (int key = from; key < c->key_end; key += V_LANES) turn_square(s + (int64_t)key * c->rows, c->rows, lines + key, KEYS);
        for (int i = 0; i < V_LANES && c->first + first + i < w->packed; i++) {
            const int at = c->first + first + i;
            if (b->whole || b->mask[at]) hook_scores(w, b, &w->rows[at / w->unit_heads], at % w->unit_heads, lines + i * KEYS);
        }
        for (int key = from; key < c->key_end; key += V_LANES) turn_square(lines + key, KEYS, s + (int64_t)key * c->rows, c->rows);
    }
}

/* ----------------------------------------------------------------------------------------------------------- softmax */

static v_mask sees(v_i32 lo, v_i32 hi, int key)
{
    return key < 32 ? (v_i32)((v_u32)lo << (31 - key)) >> 31 : (v_i32)((v_u32)hi << (63 - key)) >> 31;
}

/* What a row does not see becomes `nothing`: -inf as a score, 0 as a weight. */
static void mask_scores(const work *w, const chunk *c, float nothing)
{
    for (int v = 0; v < c->vecs; v++) {
        const v_i32 lo = v_loadi(w->mask_lo + c->first + v * V_LANES), hi = v_loadi(w->mask_hi + c->first + v * V_LANES);
        for (int key = c->key_first; key < c->key_end; key++) {
            float *s = w->s + (int64_t)key * c->rows + v * V_LANES;
            v_store(s, v_select(sees(lo, hi, key), v_load(s), v_set(nothing)));
        }
    }
}

/* Scores to weights; the states' m and l, and the factor alpha that o owes. */
static void softmax(work *w, const chunk *c)
{
    const v_f32 factor = v_set(w->to_base2);
    for (int v = 0; v < c->vecs; v++) {
        const int at = c->first + v * V_LANES;
        float *s = w->s + v * V_LANES;
        const v_f32 old = v_load(w->m + at);
        v_f32 top = v_set(-infinity);
        for (int key = c->key_first; key < c->key_end; key++) top = v_max(v_load(s + (int64_t)key * c->rows), top);
        top = v_max(top * factor, old);
        const v_f32 base = v_select(v_eq(top, v_set(-infinity)), v_set(0.0f), top);        /* nothing seen yet: -inf - 0 stays -inf */
        const v_f32 alpha = v_exp2_neg(old - base);
        v_f32 sum = v_set(0.0f);
        for (int key = c->key_first; key < c->key_end; key++) {
            const v_f32 p = v_exp2_neg(v_load(s + (int64_t)key * c->rows) * factor - base);     /* rounded as base was: the largest leaves 0 */
            v_store(s + (int64_t)key * c->rows, p);
            sum = sum + p;
        }
        v_store(w->m + at, top);
        v_store(w->l + at, v_fma(v_load(w->l + at), alpha, sum));
        v_store(w->alpha + at, alpha);
    }
}

/* Weights that replace the softmax just add up: m stays 0, so that states merge with factor 1. */
static void plain_weights(work *w, const chunk *c)
{
    for (int i = c->first; i < c->first + c->rows; i++) {
        w->m[i] = 0;
        w->alpha[i] = 1;
    }
}

static void scale_weights(const work *w, const block *b, const chunk *c)
{
    for (int i = c->key_first; i < c->key_end; i++)
        if (b->seen >> i & 1) scale_line(w->s + (int64_t)i * c->rows, c->rows, token_scale(&w->run->v_scale, b->v_scale_at, i));
}

/* ------------------------------------------------------------------------------------------------------------ values */

typedef struct product {                /* O[row][d] += over keys of P[key][row] V[key][d] */
    const float *p;                     /* of the first row at key 0 */
    int64_t p_step, v_step, o_step;     /* from key to key; from row to row */
    const float *v;
    const float *alpha;
    float *o;
    int key_first, key_end;
    asking *ahead;
    int share;
} product;

VFN void values_tile(int rows, int vecs, const product *x, int row_at, int d)
{
    v_f32 acc[V_PV_ROWS * V_PV_VECS];
    V_UNROLL
    for (int i = 0; i < rows * vecs; i++) acc[i] = v_set(0.0f);
    for (int key = x->key_first; key < x->key_end; ) {
        const int stop = key + PAUSE < x->key_end ? key + PAUSE : x->key_end;
        ask_rows(x->ahead, x->share);
        for (; key < stop; key++) {
            v_f32 y[V_PV_VECS];
            V_UNROLL
            for (int v = 0; v < vecs; v++) y[v] = v_load(x->v + key * x->v_step + d + v * V_LANES);
            V_UNROLL
            for (int r = 0; r < rows; r++) {
                const v_f32 p = v_set(x->p[key * x->p_step + row_at + r]);
                V_UNROLL
                for (int v = 0; v < vecs; v++) acc[r * vecs + v] = v_fma(p, y[v], acc[r * vecs + v]);
            }
        }
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        const v_f32 alpha = v_set(x->alpha[row_at + r]);
        V_UNROLL
        for (int v = 0; v < vecs; v++) {
            float *o = x->o + (row_at + r) * x->o_step + d + v * V_LANES;
            v_store(o, v_fma(v_load(o), alpha, acc[r * vecs + v]));
        }
    }
}

VFN void values_strip(int vecs, const product *x, int rows, int d)
{
    int r = 0;
    for (; r + V_PV_ROWS <= rows; r += V_PV_ROWS) values_tile(V_PV_ROWS, vecs, x, r, d);
    for (; r < rows; r++) values_tile(1, vecs, x, r, d);
}

static void values(work *w, const chunk *c)
{
    const bool shared = w->v_from_k;
    const int wide = V_PV_VECS * V_LANES;
    const int tiles = (c->rows + V_PV_ROWS - 1) / V_PV_ROWS * (w->dv_pad / wide + w->dv_pad % wide / V_LANES);
    const product x = { .p = w->s, .p_step = c->rows, .v_step = shared ? w->dk_pad : w->dv_pad, .o_step = w->dv_pad, .v = shared ? w->k : w->v,
                        .alpha = w->alpha + c->first, .o = w->o + (int64_t)c->first * w->dv_pad, .key_first = c->key_first,
                        .key_end = c->key_end, .ahead = c->ahead,
                        .share = share_of(c->ahead, tiles * ((c->key_end - c->key_first + PAUSE - 1) / PAUSE)) };
    int d = 0;
    for (; d + wide <= w->dv_pad; d += wide) values_strip(V_PV_VECS, &x, c->rows, d);
    for (; d < w->dv_pad; d += V_LANES) values_strip(1, &x, c->rows, d);
}

/* ------------------------------------------------------------------------------------------------------------ a block */

static uint64_t chunk_seen(const block *b, const chunk *c)
{
    uint64_t seen = 0;
    if (b->whole) return b->seen;
    for (int i = 0; i < c->rows; i++) seen |= b->mask[c->first + i];
    return seen;
}

/* The keys that the chunk sees, and where it finds what to ask for meanwhile. False: it sees none. */
static bool enter_chunk(const block *b, chunk *c, asking *ahead)
{
    const uint64_t seen = chunk_seen(b, c);
    if (!seen) return false;
    c->key_first = lowest(seen);
    c->key_end = above_highest(seen);
    c->ahead = ahead;
    return true;
}

static void split_masks(work *w, const block *b)
{
    for (int i = 0; i < w->padded; i++) {
        w->mask_lo[i] = (int32_t)(uint32_t)b->mask[i];
        w->mask_hi[i] = (int32_t)(uint32_t)(b->mask[i] >> 32);
    }
}

/* The first chunk of a block unpacks the values, having asked for them, and asks for the next block's keys (NULL: there is none). */
static bool attend_chunk(work *w, block *b, chunk *c, bool is_first, const block *next)
{
    asking ahead;
    if (!enter_chunk(b, c, &ahead)) return false;
    plan_asking(w, is_first && !w->p->v_in_k ? b : NULL, false, &ahead);
    scores(w, c);
    if (w->run->k_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_key) scale_tokens(w, b, c);
    if (w->has_score || w->has_weight) hook_chunk(w, b, c);
    if (!b->whole) mask_scores(w, c, w->has_weight ? 0.0f : -infinity);
    if (w->has_weight) plain_weights(w, c);
    else softmax(w, c);
    if (w->run->v_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_value) scale_weights(w, b, c);
    if (is_first && !w->v_from_k) fetch_values(w, b, lowest(b->seen), above_highest(b->seen));
    plan_asking(w, is_first ? next : NULL, true, &ahead);
    values(w, c);
    return true;
}

static void attend_many(work *w, block *b, const block *next)
{
    bool is_first = true;
    fetch_keys(w, b, down(lowest(b->seen)), up(above_highest(b->seen)));
    if (!b->whole) split_masks(w, b);
    for (int at = 0; at < w->padded; at += CHUNK) {
        chunk c = chunk_at(w, at);
        if (attend_chunk(w, b, &c, is_first, next)) is_first = false;
    }
}

/* Q of every chunk, transposed. */
static void load_many(work *w)
{
    float *one = w->o;                  /* free until the first block */
    for (int i = 0; i < w->padded; i++) {
        const int at = i / CHUNK * CHUNK, rows = rows_of_chunk(w, at);
        float *out = w->q + (int64_t)at * w->dk + (i - at);
        if (i < w->packed) load_query(w, &w->rows[i / w->unit_heads], i % w->unit_heads, one);
        for (int d = 0; d < w->dk; d++) out[(int64_t)d * rows] = i < w->packed ? one[d] : 0.0f;
    }
}
