/* SPDX-License-Identifier: Apache-2.0 */
/* attend_few_tiled.h -- few packed rows over pages of bf16 in the order "tiles": places are read as they lie, see attend_pages.h.
 *
 *   scores   lanes along keys: a vector of a square holds the same pair of d of V_LANES keys, which meets one pair of each row of Q. Nothing has to be
 *            summed across lanes
 *   values   lanes along d: a vector of a pair of keys holds the same V_LANES d of both
 *
 * Part of attend_tmpl.c. */

#if V_LANES == 1
/* Scalar code reads rows. */
static scores_fn *const tiled_scores_table[2][4];
static values_fn *const tiled_values_table[4];
#else

/* Where `rows` of Q hold the pair (d, d + 1): in bf16 or as floats. */
VFN v_i32 query_pair(const float *q, int64_t d)
{
    int32_t pair;
    memcpy(&pair, (const char *)q + 2 * d, sizeof pair);
    return v_seti(pair);
}

/* Pair i of 2 * SQUARE of d from `d` on: acc[row][vec] += . */
VFN void tiled_step(int rows, int vecs, bool dots, const float *q, int dim, int d, const char *const *at, v_f32 *acc)
{
    v_f32 even[KEYS / V_LANES], odd[KEYS / V_LANES];
    v_i32 pair[KEYS / V_LANES];
    V_UNROLL
    for (int v = 0; v < vecs; v++) {
        if (dots) pair[v] = v_loadi((const int32_t *)(const void *)at[v]);
        else v_split_bf16(at[v], &even[v], &odd[v]);
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        const v_i32 both = dots ? query_pair(q, (int64_t)r * dim + d) : v_seti(0);
        const v_f32 x = v_set(dots ? 0.0f : q[(int64_t)r * dim + d]), y = v_set(dots ? 0.0f : q[(int64_t)r * dim + d + 1]);
        V_UNROLL
        for (int v = 0; v < vecs; v++) {
            v_f32 *sum = &acc[r * vecs + v];
            *sum = dots ? v_dot_bf16(both, pair[v], *sum) : v_fma(y, odd[v], v_fma(x, even[v], *sum));
        }
    }
}

/* s[row][key] for keys [0, end), rounded up to the keys of a step. */
VFN void tiled_scores(int rows, bool dots, const float *q, int dim, const few_rows *k, float *s)
{
    const int vecs = ACCS / rows < KEYS / V_LANES ? ACCS / rows : KEYS / V_LANES, step = vecs * V_LANES;
    const int share = 2 * step * k->next->row_bytes / dim;
    for (int key = 0; key < k->end; key += step) {
        v_f32 acc[ACCS];
        V_UNROLL
        for (int i = 0; i < rows * vecs; i++) acc[i] = v_set(0.0f);
        for (int i = 0; i < SQUARE; i++) {
            const char *at[KEYS / V_LANES];
            V_UNROLL
            for (int v = 0; v < vecs; v++) {
                const int first = key + v * V_LANES;
                at[v] = k->now[first / SQUARE * SQUARE + i] + 4 * (first % SQUARE);
            }
            for (int d = 2 * i; d < dim; d += 2 * SQUARE) {
                tiled_step(rows, vecs, dots, q, dim, d, at, acc);
                V_UNROLL
                for (int v = 0; v < vecs; v++) at[v] += 4 * SQUARE;
                ask_ahead(k->next, share);
            }
        }
        V_UNROLL
        for (int i = 0; i < rows * vecs; i++) v_store(s + i / vecs * KEYS + key + i % vecs * V_LANES, acc[i]);
    }
}

/* `vecs` vectors of d from `d` on. The first half of a pair's elements lies in its first place. */
VFN void tiled_strip(int rows, int vecs, const few_sums *x, int d)
{
    v_f32 acc[FEW * MAX_VECS];
    const int every = vecs * V_LANES < ASK_EVERY / 2 ? ASK_EVERY / (vecs * V_LANES) : 2;
    const int share = every * x->v.next->row_bytes * vecs * V_LANES / x->dim;
    V_UNROLL
    for (int i = 0; i < rows * vecs; i++) acc[i] = v_set(0.0f);
    for (int key = x->v.first & ~1; key < x->v.end; key += 2) {
        V_UNROLL
        for (int i = 0; i < vecs; i++) {
            const int at = 2 * (d + i * V_LANES), second = at >= x->dim;
            v_f32 y[2];
            v_split_bf16(x->v.now[key + second] + 2 * (at - second * x->dim), &y[0], &y[1]);
            V_UNROLL
            for (int r = 0; r < rows; r++) {
                const float *p = x->p + r * KEYS + key;
                acc[r * vecs + i] = v_fma(v_set(p[1]), y[1], v_fma(v_set(p[0]), y[0], acc[r * vecs + i]));
            }
        }
        if (key % every == 0) ask_ahead(x->v.next, share);
    }
    V_UNROLL
    for (int i = 0; i < rows * vecs; i++) {
        float *o = x->o + (int64_t)(i / vecs) * x->dim + d + i % vecs * V_LANES;
        v_store(o, v_fma(v_load(o), v_set(x->alpha[i / vecs]), acc[i]));
    }
}

VFN void tiled_values(int rows, const few_sums *x)
{
    const int vecs = ACCS / rows > MAX_VECS ? MAX_VECS : ACCS / rows;
    int d = 0;
    for (; d + vecs * V_LANES <= x->dim; d += vecs * V_LANES) tiled_strip(rows, vecs, x, d);
    for (; vecs > 2 && d + 2 * V_LANES <= x->dim; d += 2 * V_LANES) tiled_strip(rows, 2, x, d);
    for (; d < x->dim; d += V_LANES) tiled_strip(rows, 1, x, d);
}

#define FEW_TILED(rows)                                                                                                                \
    static void tiled_scores_##rows(const float *q, int dim, const few_rows *k, float *s) { tiled_scores(rows, false, q, dim, k, s); } \
    static void tiled_dots_##rows(const float *q, int dim, const few_rows *k, float *s) { tiled_scores(rows, V_DOTS, q, dim, k, s); }  \
    static void tiled_values_##rows(const few_sums *x) { tiled_values(rows, x); }
FEW_TILED(1) FEW_TILED(2) FEW_TILED(4) FEW_TILED(8)

/* [by pairs of bf16][1, 2, 4, 8 rows] */
static scores_fn *const tiled_scores_table[2][4] = { { tiled_scores_1, tiled_scores_2, tiled_scores_4, tiled_scores_8 },
                                                     { tiled_dots_1, tiled_dots_2, tiled_dots_4, tiled_dots_8 } };
static values_fn *const tiled_values_table[4] = { tiled_values_1, tiled_values_2, tiled_values_4, tiled_values_8 };
#endif
