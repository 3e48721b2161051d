/* SPDX-License-Identifier: Apache-2.0 */
/* attend_few8.h -- few packed rows over integers of 8 bits, on levels that multiply pairs of 16-bit integers (VNNI).
 *
 * Making floats of 8-bit elements costs more than multiplying them: with floats, a block of int8 takes the time of bf16, half of the bytes
 * notwithstanding. So what is multiplied with them becomes integers instead, once a row and not once an element:
 *
 *   scores   a row of Q as words: the largest of its elements is 32767. Sums over d are exact in 32 bits
 *   values   the weights of a row in a block as words: the largest is 32767. Two keys' elements side by side are a pair; sums over the block are
 *            exact
 *
 * What a word loses: 2^-16 of the row's largest q, of the block's largest weight; a weight of bf16 would lose 2^-9 of itself. Instructions a key,
 * 4 rows of d = 128: scores 20, values 24; with floats 44 and 48.
 *
 * Queries of f32 and rows of Q that are not finite stay floats, as do blocks whose weights are not finite. Part of attend_tmpl.c. */

enum { WORD_MAX = 32767 };

/* --------------------------------------------------------------------------------------------------------------- rows */

/* The largest magnitude of n elements; false: not all are finite. */
static bool find_largest(const float *x, int n, float *out)
{
    v_f32 top = v_set(0.0f), odd = v_set(0.0f);
    for (int i = 0; i < n; i += V_LANES) {
        const v_f32 y = v_load(x + i);
        top = v_max(v_abs(y), top);
        odd = v_fma(y, v_set(0.0f), odd);
    }
    top = v_max(top, V_PICK(top, top, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    top = v_max(top, V_PICK(top, top, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    top = v_max(top, V_PICK(top, top, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    top = v_max(top, V_PICK(top, top, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    *out = v_lane(top, 0);
    return !v_any(v_ne(odd, odd));
}

/* Words of x * factor, to nearest even: |x * factor| <= WORD_MAX. The sum with 1.5 * 2^23 ends in them. */
VFN void store_words(uint16_t *to, v_f32 x, v_f32 factor) { v_store_u16(to, v_bits_of(v_fma(x, factor, v_set(12582912.0f)))); }

/* ------------------------------------------------------------------------------------------------------------- scores
 * Q of a unit: [rows][dim] words, then ACCS factors, one for each of the dot products that a step makes. */

static float *word_factors(float *q, int rows, int dim) { return q + (int64_t)rows * dim / 2; }

/* False: the row is not finite. */
static bool load_words(work *w, int i, int rows, const float *line)
{
    const int dim = w->dk_pad, most = fv__min32(WORD_MAX, (1 << 24) / dim - 1);         /* dim * 128 * most < 2^31 */
    uint16_t *to = (uint16_t *)w->q + (int64_t)i * dim;
    float top;
    if (!find_largest(line, dim, &top)) return false;
    const float factor = top > 0x1p-100f ? (float)most / top : 0;
    for (int d = 0; d < dim; d += V_LANES) store_words(to + d, v_load(line + d), v_set(factor));
    for (int k = 0; k < ACCS / rows; k++) word_factors(w->q, rows, dim)[i * (ACCS / rows) + k] = top / (float)most;
    return true;
}

VFN v_i32 words_of(const char *p)
{
    typedef uint8_t bytes __attribute__((vector_size(32), aligned(1), may_alias));
    return V_WIDEN_S8_16(*(const bytes *)p);
}

VFN v_i32 sum_integers(v_i32 *x)
{
    HALVE_ALL(v_iadd);
    return x[0];
}

/* As few_scores. */
VFN void few_word_scores(int rows, float *q, int dim, const few_rows *k, float *s)
{
    const int step = ACCS / rows, share = step * k->next->row_bytes * 2 * V_LANES / dim;
    const v_f32 factors = v_load(word_factors(q, rows, dim));
    for (int key = 0; key < k->end; key += step) {
        v_i32 acc[ACCS];
        float sums[ACCS];
        V_UNROLL
        for (int i = 0; i < ACCS; i++) acc[i] = v_seti(0);
        for (int d = 0; d < dim; d += 2 * V_LANES) {
            v_i32 x[FEW];
            V_UNROLL
            for (int i = 0; i < rows; i++) x[i] = v_pairs_bf16((const uint16_t *)q + (int64_t)i * dim + d);
            V_UNROLL
            for (int j = 0; j < step; j++) {
                const v_i32 y = words_of(k->now[key + j] + d);
                V_UNROLL
                for (int i = 0; i < rows; i++) acc[i * step + j] = V_DOT_S16(x[i], y, acc[i * step + j]);
            }
            ask_ahead(k->next, share);
        }
        v_store(sums, v_float(sum_integers(acc)) * factors);
        V_UNROLL
        for (int r = 0; r < rows; r++) memcpy(s + r * KEYS + key, sums + r * step, (size_t)step * sizeof *s);
    }
}

/* ------------------------------------------------------------------------------------------------------------- values */

/* Elements 0..3, 8..11, 16..19, 24..27 of 32, and the others, as pairs of key and next key. */
VFN void pair_rows(const char *a, const char *b, v_i32 *low, v_i32 *high)
{
    const half_words x = (half_words)words_of(a), y = (half_words)words_of(b);
    *low = (v_i32)PAIR_WORDS(x, y, 0);
    *high = (v_i32)PAIR_WORDS(x, y, 4);
}

VFN void unpair_sums(v_f32 *low, v_f32 *high)
{
    const v_f32 a = *low, b = *high;
    *low = V_PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    *high = V_PICK(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

/* Weights of a block as words, and what sums over them are multiplied with. */
typedef struct word_weights {
    uint16_t p[FEW][KEYS];
    float factor[FEW];
} word_weights;

/* False: a weight is not finite. */
static bool make_words(const float *s, int rows, word_weights *out)
{
    for (int r = 0; r < rows; r++, s += KEYS) {
        float top;
        if (!find_largest(s, KEYS, &top)) return false;
        out->factor[r] = top / WORD_MAX;
        const v_f32 factor = v_set(top > 0x1p-100f ? WORD_MAX / top : 0);
        for (int key = 0; key < KEYS; key += V_LANES) store_words(out->p[r] + key, v_load(s + key), factor);
    }
    return true;
}

VFN void few_word_strip(int rows, int vecs, const word_weights *x, const few_sums *o, int d)
{
    v_i32 acc[FEW * MAX_VECS];
    const int every = vecs * V_LANES < ASK_EVERY ? ASK_EVERY / (vecs * V_LANES) : 2;
    const int share = every * o->v.next->row_bytes * vecs * V_LANES / o->dim;
    V_UNROLL
    for (int i = 0; i < rows * vecs; i++) acc[i] = v_seti(0);
    for (int key = o->v.first & ~1; key < o->v.end; key += 2) {
        v_i32 y[MAX_VECS];
        V_UNROLL
        for (int i = 0; i < vecs; i += 2) pair_rows(o->v.now[key] + d + i * V_LANES, o->v.now[key + 1] + d + i * V_LANES, &y[i], &y[i + 1]);
        V_UNROLL
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, &x->p[r][key], sizeof pair);
            V_UNROLL
            for (int i = 0; i < vecs; i++) acc[r * vecs + i] = V_DOT_S16(y[i], v_seti(pair), acc[r * vecs + i]);
        }
        if (key % every == 0) ask_ahead(o->v.next, share);
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        const v_f32 a = v_set(o->alpha[r]), factor = v_set(x->factor[r]);
        V_UNROLL
        for (int i = 0; i < vecs; i += 2) {
            float *to = o->o + (int64_t)r * o->dim + d + i * V_LANES;
            v_f32 low = v_float(acc[r * vecs + i]), high = v_float(acc[r * vecs + i + 1]);
            unpair_sums(&low, &high);
            v_store(to, v_fma(v_load(to), a, low * factor));
            v_store(to + V_LANES, v_fma(v_load(to + V_LANES), a, high * factor));
        }
    }
}

VFN void few_word_values(int rows, const word_weights *x, const few_sums *o)
{
    const int vecs = ACCS / rows > MAX_VECS ? MAX_VECS : ACCS / rows;
    int d = 0;
    for (; d + vecs * V_LANES <= o->dim; d += vecs * V_LANES) few_word_strip(rows, vecs, x, o, d);
    for (; vecs > 2 && d < o->dim; d += 2 * V_LANES) few_word_strip(rows, 2, x, o, d);
}

/* ------------------------------------------------------------------------------------------------------------ by rows */

typedef void word_scores_fn(float *q, int dim, const few_rows *k, float *s);
typedef void word_values_fn(const word_weights *x, const few_sums *o);

#define WORD_ROWS(rows)                                                                                                                \
    static void word_scores_##rows(float *q, int dim, const few_rows *k, float *s) { few_word_scores(rows, q, dim, k, s); }            \
    static void word_values_##rows(const word_weights *x, const few_sums *o) { few_word_values(rows, x, o); }
WORD_ROWS(1)
WORD_ROWS(2)
WORD_ROWS(4)
WORD_ROWS(8)
static word_scores_fn *const word_scores_table[4] = { word_scores_1, word_scores_2, word_scores_4, word_scores_8 };
static word_values_fn *const word_values_table[4] = { word_values_1, word_values_2, word_values_4, word_values_8 };
