/* SPDX-License-Identifier: Apache-2.0 */
/* attend_few4.h -- few packed rows over int4: products of bytes, codes as they are unpacked (0 to 15) with q and weights in 16 bits.
 *
 * An element is (code - zero) * scale of its group of d, so the scores of a key and the values of a d are
 *   s[key]  = sum over groups scale[key] * (sum over d of q[d] code[key][d]  -  zero[key] * sum over d of q[d])
 *   o[d]    = sum over keys u[key] code[key][d]  -  sum over keys u[key] zero[key],    u = weight * scale of d's group
 * and the inner sums are integers: q is held as a whole number of 1/32512 of the row's largest, u of the largest of the block's 64 keys (in 16 bits:
 * four times as fine as f16's, and never in O of f32). A whole number is 256 * high + low, both signed bytes; a product of four pairs of bytes
 * is one instruction (v_dot_bytes), sums of 64 of them fit into 32 bits.
 *
 *   keys     lanes along keys: V_LANES rows are turned in units of 4 bytes (8 d); a unit's low halves are even d, its high halves odd d.
 *            Nothing has to be summed across lanes, scales and zeros of V_LANES keys are vectors
 *   values   lanes along d: bytes of 4 keys are brought side by side, the weights of 4 keys are one broadcast of 4 bytes
 *
 * Floor for 64 keys of a head, 4 rows, d 128, 16 lanes: 2,048 products of bytes, one or two start a cycle; beside them 256 shuffles that turn keys,
 * 256 that mix values, and some 30 instructions a key for weights, scales and addresses. Bytes: 9,216 with groups of 64.
 *
 * Part of attend_tmpl.c. */

#if V_BYTES

enum { UNIT = 4, UNIT_DIMS = 8, VEC_BYTES = 4 * V_LANES, QUADS = KEYS / 4, MAX_GROUPS = FV__MAX_DIM / 32, WHOLE = 127 * 256 };

/* ------------------------------------------------------------------------------------------------------------ shuffles
 * Within 16 bytes: ZIP of bytes, of pairs; across: blocks of 16 bytes of several vectors turned. */
typedef int8_t v_bytes __attribute__((vector_size(4 * V_LANES)));
typedef int16_t v_shorts __attribute__((vector_size(4 * V_LANES)));

#define ZIP_8(a, n) a, n + a, a + 1, n + a + 1, a + 2, n + a + 2, a + 3, n + a + 3, \
                    a + 4, n + a + 4, a + 5, n + a + 5, a + 6, n + a + 6, a + 7, n + a + 7
#define ZIP_4(a, n) a, n + a, a + 1, n + a + 1, a + 2, n + a + 2, a + 3, n + a + 3
#if V_LANES == 16
#define ZIP_ALL(zip, at, step, n) zip(at, n), zip(at + step, n), zip(at + 2 * step, n), zip(at + 3 * step, n)
#else
#define ZIP_ALL(zip, at, step, n) zip(at, n), zip(at + step, n)
#endif
#if defined __clang__ || __GNUC__ >= 12
#define SHUFFLE(type, a, b, ...) ((v_i32)__builtin_shufflevector((type)(a), (type)(b), __VA_ARGS__))
#else
#define SHUFFLE(type, a, b, ...) ((v_i32)__builtin_shuffle((type)(a), (type)(b), (type){ __VA_ARGS__ }))
#endif
#define ZIP_BYTES(a, b, half) SHUFFLE(v_bytes, a, b, ZIP_ALL(ZIP_8, 8 * half, 16, VEC_BYTES))
#define ZIP_SHORTS(a, b, half) SHUFFLE(v_shorts, a, b, ZIP_ALL(ZIP_4, 4 * half, 8, VEC_BYTES / 2))

/* ------------------------------------------------------------------------------------------------- scales and zeros */

/* Pairs of a group as they lie for all keys, to scales and zeros of V_LANES of them. */
#if V_LANES == 16
#define FIRST_OF_TWO 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define SECOND_OF_TWO 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define FIRST_OF_TWO 0, 2, 4, 6, 8, 10, 12, 14
#define SECOND_OF_TWO 1, 3, 5, 7, 9, 11, 13, 15
#endif
VFN void load_scales(const int32_t *pairs, v_f32 *scale, v_f32 *zero)
{
    const v_f32 a = v_load_f16(pairs, 0), b = v_load_f16(pairs, V_LANES);
    *scale = V_PICK(a, b, FIRST_OF_TWO);
    *zero = V_PICK(a, b, SECOND_OF_TWO);
}

/* Pairs of all units, a token's lying together or not, to out[unit][group][key]. */
static void gather_pairs(const ahead *pairs, int units, int groups, int32_t *out)
{
    const int words = pairs->runs == 1 ? units * groups / V_LANES * V_LANES : 0;
    for (int at = 0; at < words; at += V_LANES)
        for (int key = 0; key < KEYS; key += V_LANES) {
            v_i32 x[V_LANES];
            V_UNROLL
            for (int i = 0; i < V_LANES; i++) x[i] = v_loadi((const int32_t *)(const void *)(pairs->rows[key + i] + 4 * (int64_t)at));
            turn(x);
            V_UNROLL
            for (int i = 0; i < V_LANES; i++) v_storei(out + (int64_t)(at + i) * KEYS + key, x[i]);
        }
    for (int at = words; at < units * groups; at++) {
        const int64_t shift = pairs->shift[at / groups] + at % groups * 4;
        for (int i = 0; i < KEYS; i++) memcpy(&out[(int64_t)at * KEYS + i], pairs->rows[i] + shift, 4);
    }
}

/* --------------------------------------------------------------------------------------------------------- whole numbers
 * Row r of the queries: [unit of 8 d][even, odd][high, low][4 bytes], then its unit of measure and each group's sum, in floats. */

VFN v_i32 high_of(v_i32 x) { return (x + v_seti(128)) >> 8; }

/* x = 256 * high + low, low from -128 on. n is whole vectors; bytes of both are n apart. */
VFN void split_whole(v_i32 x, int8_t *high, int8_t *low)
{
    const v_i32 h = high_of(x);
    v_store_u8(high, (v_u32)h & 255);                                  /* gcc 12 takes lanes apart without the mask */
    v_store_u8(low, (v_u32)x & 255);
}

/* The row's floats to whole numbers; `to` may be where they lie. What is not finite makes the unit of measure a NaN. */
static void quantise_query(const float *x, int dim, int group, float *to)
{
    int8_t bytes[FV__MAX_DIM / UNIT_DIMS][2][2][4], high[FV__MAX_DIM + V_LANES], low[FV__MAX_DIM + V_LANES];
    float sums[MAX_GROUPS] = { 0 };
    float most = 0, odd = 0;
    for (int d = 0; d < dim; d++) {
        most = __builtin_fabsf(x[d]) > most ? __builtin_fabsf(x[d]) : most;
        odd += x[d] * 0;
    }
    const float by = most > 1e-33f ? WHOLE / most : 0;
    for (int d = 0; d < dim; d += V_LANES) {
        const v_f32 y = v_load(x + d) * by;
        const v_i32 whole = v_int(y + v_select(v_lt(y, v_set(0.0f)), v_set(-0.5f), v_set(0.5f)));
        split_whole(whole, high + d, low + d);
        float back[V_LANES];
        v_store(back, v_float(whole));
        for (int i = 0; i < V_LANES; i++) sums[(d + i) / group] += back[i];
    }
    for (int d = 0; d < dim; d++) {
        int8_t (*at)[2][4] = bytes[d / UNIT_DIMS];
        at[d & 1][0][d % UNIT_DIMS / 2] = high[d];
        at[d & 1][1][d % UNIT_DIMS / 2] = low[d];
    }
    memcpy(to, bytes, 2 * (size_t)dim);
    to[dim / 2] = odd == 0 ? most / WHOLE : odd;
    memcpy(to + dim / 2 + 1, sums, (size_t)(dim / group) * sizeof *sums);
}

/* ------------------------------------------------------------------------------------------------------------ scores */

typedef struct few4_keys {
    const float *q;                     /* [row][step], see above */
    int step, dim, group;
    const int32_t *pairs;               /* [group][KEYS] */
    float *s;                           /* [row][KEYS] */
    const char *const *rows;            /* [KEYS], each `shift` bytes on */
    int64_t shift;
    int end;                            /* keys behind are seen by no row */
    ahead *next, *next_pairs;
} few4_keys;

VFN v_i32 broadcast_unit(const void *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return v_seti(x);
}

/* V_LANES keys from `key` on and rows [row_first, row_first + rows) of all: `count` units (8 d each) from `first` on, those of whole groups. */
VFN void few4_units(int rows, int all, const few4_keys *x, int row_first, int key, int first, int count, const v_i32 *units, v_f32 *sums)
{
    const float *queries = x->q + (int64_t)row_first * x->step;
    const v_i32 mask = v_seti(0x0F0F0F0F);
    for (int at = 0; at < count; at += x->group / UNIT_DIMS) {
        const int g = (first + at) * UNIT_DIMS / x->group;
        v_i32 acc[2 * FEW];
        v_f32 scale, zero;
        V_UNROLL
        for (int i = 0; i < 2 * rows; i++) acc[i] = v_seti(0);
        for (int i = at; i < at + x->group / UNIT_DIMS; i++) {
            const v_i32 even = units[i] & mask, odd = (v_i32)((v_u32)units[i] >> 4) & mask;
            V_UNROLL
            for (int r = 0; r < rows; r++) {
                const char *q = (const char *)(queries + (int64_t)r * x->step) + 16 * (int64_t)(first + i);
                acc[2 * r] = v_dot_bytes(even, broadcast_unit(q), acc[2 * r]);
                acc[2 * r + 1] = v_dot_bytes(even, broadcast_unit(q + 4), acc[2 * r + 1]);
                acc[2 * r] = v_dot_bytes(odd, broadcast_unit(q + 8), acc[2 * r]);
                acc[2 * r + 1] = v_dot_bytes(odd, broadcast_unit(q + 12), acc[2 * r + 1]);
            }
        }
        load_scales(x->pairs + g * KEYS + key, &scale, &zero);
        ask_ahead(x->next, V_LANES * x->group / 2 * rows / all);
        V_UNROLL
        for (int r = 0; r < rows; r++) {
            const float *sum = queries + (int64_t)r * x->step + x->dim / 2 + 1;
            const v_f32 y = v_float(acc[2 * r] * 256 + acc[2 * r + 1]);
            sums[r] = v_fma(scale, v_fma(-zero, v_set(sum[g]), y), sums[r]);
        }
    }
}

/* Rows of the cache are read in whole vectors: those that do not consist of them come from a copy with room behind. */
VFN void few4_scores(int rows, const few4_keys *x)
{
    enum { PASS = V_LANES == 16 ? 4 : 2 };
    const int units = x->dim / UNIT_DIMS;
    for (int key = 0; key < x->end; key += V_LANES) {
        v_f32 sums[FEW];
        V_UNROLL
        for (int r = 0; r < rows; r++) sums[r] = v_set(0.0f);
        for (int first = 0; first < units; first += V_LANES) {
            v_i32 some[V_LANES];
            const int count = units - first < V_LANES ? units - first : V_LANES;
            V_UNROLL
            for (int i = 0; i < V_LANES; i++) {
                const void *at = x->rows[key + i] + x->shift + UNIT * (int64_t)first;
                some[i] = v_loadi(at);
            }
            turn(some);
            for (int r = 0; r < rows; r += PASS) few4_units(rows < PASS ? rows : PASS, rows, x, r, key, first, count, some, sums + r);
        }
        V_UNROLL
        for (int r = 0; r < rows; r++) v_store(x->s + r * KEYS + key, sums[r] * x->q[(int64_t)r * x->step + x->dim / 2]);
        ask_ahead(x->next_pairs, V_LANES * x->next_pairs->row_bytes);
    }
}

/* ------------------------------------------------------------------------------------------------------------ values */

typedef struct few4_sums {
    const float *p;                     /* [row][KEYS] */
    const char *const *rows;            /* [KEYS], each `shift` bytes on */
    int64_t shift;
    int dim, step, group;               /* step: of o */
    const int32_t *pairs;               /* [group][KEYS] */
    ahead *next, *next_pairs;
    const float *alpha;
    float *o;                           /* [row][step] */
} few4_sums;

/* What the weights of some groups became, for each of eight pairs of a group and a row: whole numbers, their unit of measure (0: there are none),
 * and the sum of what zeros take away. Bytes are in the order of quads. */
typedef struct whole_weights {
    int8_t bytes[8][2][KEYS] __attribute__((aligned(64)));             /* high, low */
    float unit[V_LANES], taken[V_LANES];
} whole_weights;

/* A quad is four keys that lie V_LANES apart: bytes of a vector's lanes are shifted beside those of three others, and nothing is shuffled. */
VFN int key_of_quad(int quad, int i) { return quad / V_LANES * 4 * V_LANES + i * V_LANES + quad % V_LANES; }

/* The low bytes of four vectors, and the high ones: x = 256 * high + low, low from -128 on, in its low 16 bits. */
VFN v_i32 low_bytes(const v_u32 *x) { return (v_i32)((x[0] & 255) | (x[1] & 255) << 8 | (x[2] & 255) << 16 | x[3] << 24); }
VFN v_i32 high_bytes(const v_u32 *x)
{
    return (v_i32)(((x[0] + 128) >> 8 & 255) | ((x[1] + 128) & 0xFF00) | ((x[2] + 128) & 0xFF00) << 8 | ((x[3] + 128) & 0xFF00) << 16);
}

/* Scales and zeros of 4 * V_LANES keys. */
VFN void load_some_scales(const int32_t *pairs, v_f32 *scale, v_f32 *zero)
{
    V_UNROLL
    for (int k = 0; k < 4; k++) load_scales(pairs + k * V_LANES, &scale[k], &zero[k]);
}

/* The largest of weights times scales, by lanes, for each pair. */
VFN void largest_weights(int rows, int groups, const float *p, const int32_t *pairs, v_f32 *lanes)
{
    for (int g = 0; g < groups; g++)
        for (int key = 0; key < KEYS; key += 4 * V_LANES) {
            v_f32 scale[4], zero[4];
            load_some_scales(pairs + g * KEYS + key, scale, zero);
            V_UNROLL
            for (int k = 0; k < 4; k++) scale[k] = v_abs(scale[k]);
            V_UNROLL
            for (int r = 0; r < rows; r++)
                V_UNROLL
                for (int k = 0; k < 4; k++)
                    lanes[g * rows + r] = v_max(lanes[g * rows + r], v_load(p + r * KEYS + key + k * V_LANES) * scale[k]);
        }
}

/* Weights times scales of `groups` groups, groups * rows <= 8. What is one number a pair is one lane of a vector. */
VFN void few4_weights(int rows, int groups, const float *p, const int32_t *pairs, whole_weights *out)
{
    float by[V_LANES];
    v_f32 lanes[8];
    V_UNROLL
    for (int i = 0; i < 8; i++) lanes[i] = v_set(0.0f);
    largest_weights(rows, groups, p, pairs, lanes);
    const v_f32 top = max_eight(lanes), some = v_select(v_lt(v_set(1e-33f), top), top, v_set(infinity));
    v_store(by, v_set((float)WHOLE) / some);
    v_store(out->unit, top * (1.0f / WHOLE));
    V_UNROLL
    for (int i = 0; i < 8; i++) lanes[i] = v_set(0.0f);
    for (int g = 0; g < groups; g++)
        for (int key = 0; key < KEYS; key += 4 * V_LANES) {
            v_f32 scale[4], zero[4];
            load_some_scales(pairs + g * KEYS + key, scale, zero);
            V_UNROLL
            for (int r = 0; r < rows; r++) {
                const int i = g * rows + r;
                const v_f32 magic = v_set(12582912.0f);                 /* 1.5 * 2^23: nearest even in the low bits */
                v_u32 bits[4];
                V_UNROLL
                for (int k = 0; k < 4; k++) {
                    const v_f32 near = v_fma(v_load(p + r * KEYS + key + k * V_LANES) * scale[k], v_set(by[i]), magic);
                    bits[k] = v_bits_of(near);
                    lanes[i] = v_fma(near - magic, zero[k], lanes[i]);
                }
                v_storei((int32_t *)(void *)(out->bytes[i][0] + key), high_bytes(bits));
                v_storei((int32_t *)(void *)(out->bytes[i][1] + key), low_bytes(bits));
            }
        }
    v_store(out->taken, sum_eight(lanes) * v_load(out->unit));
}

/* Bytes of the keys of a quad side by side, V_LANES * 4 of each row from `byte` on: 4 vectors of [byte][4 keys]. */
VFN void mix_quad(const few4_sums *x4, int quad, int64_t byte, v_i32 *out)
{
    v_i32 x[4], u[4], z[TURN_PARTS];
    V_UNROLL
    for (int i = 0; i < 4; i++) x[i] = v_loadi((const int32_t *)(const void *)(x4->rows[key_of_quad(quad, i)] + x4->shift + byte));
    const v_i32 a = ZIP_BYTES(x[0], x[1], 0), b = ZIP_BYTES(x[0], x[1], 1), c = ZIP_BYTES(x[2], x[3], 0), d = ZIP_BYTES(x[2], x[3], 1);
    u[0] = ZIP_SHORTS(a, c, 0);
    u[1] = ZIP_SHORTS(a, c, 1);
    u[2] = ZIP_SHORTS(b, d, 0);
    u[3] = ZIP_SHORTS(b, d, 1);
    V_UNROLL
    for (int h = 0; h < 4 / TURN_PARTS; h++) {
        turn_blocks(u + h * TURN_PARTS, 1, z);
        V_UNROLL
        for (int i = 0; i < TURN_PARTS; i++) out[i * (4 / TURN_PARTS) + h] = z[i];
    }
}

/* Sums over a block of even and odd d, in whole numbers of pair `pair`, to row r of o: 2 * V_LANES from `d` on. */
VFN void keep_values(const few4_sums *x, const whole_weights *w, int r, int pair, int d, v_f32 *y)
{
    float *o = x->o + (int64_t)r * x->step + d;
    const v_f32 alpha = v_set(x->alpha[r]), by = v_set(w->unit[pair]), less = v_set(-w->taken[pair]);
    y[0] = v_fma(y[0], by, less);
    y[1] = v_fma(y[1], by, less);
    join_parts(y);
    v_store(o, v_fma(v_load(o), alpha, y[0]));
    v_store(o + V_LANES, v_fma(v_load(o + V_LANES), alpha, y[1]));
}

/* 2 * V_LANES of d from `d` on, the vectors of quads being 4 apart from `mixed` on; rows [at, at + rows), whose weights are those from `i` on. */
VFN void few4_strip(int rows, int all, const few4_sums *x, int at, int d, const v_i32 *mixed, const whole_weights *w, int i)
{
    const int share = KEYS / 4 * V_LANES * rows / all;
    const v_i32 mask = v_seti(0x0F0F0F0F);
    v_i32 acc[4 * FEW];
    V_UNROLL
    for (int r = 0; r < 4 * rows; r++) acc[r] = v_seti(0);
    for (int quad = 0; quad < QUADS; quad++) {
        const v_i32 both = mixed[4 * quad], even = both & mask, odd = (v_i32)((v_u32)both >> 4) & mask;
        V_UNROLL
        for (int r = 0; r < 2 * rows; r++) {
            const v_i32 p = broadcast_unit(w->bytes[i][0] + r * KEYS + 4 * quad);
            acc[2 * r] = v_dot_bytes(even, p, acc[2 * r]);
            acc[2 * r + 1] = v_dot_bytes(odd, p, acc[2 * r + 1]);
        }
        if (quad % 4 == 3) ask_ahead(x->next, share);
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        v_f32 y[2];
        V_UNROLL
        for (int h = 0; h < 2; h++) y[h] = v_float(acc[4 * r + h] * 256 + acc[4 * r + 2 + h]);
        keep_values(x, w, at + r, i + r, d, y);
    }
}

VFN void few4_values(int rows, const few4_sums *x)
{
    enum { PASS = V_LANES == 16 ? 4 : 2 };
    whole_weights w;
    v_i32 mixed[4 * QUADS];
    const int most = 8 / rows;
    for (int at = 0; at < x->dim; at += most * x->group) {
        const int left = (x->dim - at + x->group - 1) / x->group, groups = left < most ? left : most;
        few4_weights(rows, groups, x->p, x->pairs + at / x->group * KEYS, &w);
        for (int d = at; d < at + groups * x->group && d < x->dim; d += 2 * V_LANES) {
            const int t = d / (2 * V_LANES) % 4, i = (d - at) / x->group * rows;
            for (int quad = 0; t == 0 && quad < QUADS; quad++) mix_quad(x, quad, d / 2, mixed + 4 * quad);
            for (int r = 0; r < rows; r += PASS) few4_strip(rows < PASS ? rows : PASS, rows, x, r, d, mixed + t, &w, i + r);
            ask_ahead(x->next_pairs, KEYS * x->next_pairs->row_bytes * 2 * V_LANES / x->dim);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- by rows, a block */

typedef void scores4_fn(const few4_keys *x);
typedef void values4_fn(const few4_sums *x);
#define FEW4(rows)                                                                                                                     \
    static void scores4_##rows(const few4_keys *x) { few4_scores(rows, x); }                                                           \
    static void values4_##rows(const few4_sums *x) { few4_values(rows, x); }
FEW4(1) FEW4(2) FEW4(4) FEW4(8)
static scores4_fn *const scores4_table[4] = { scores4_1, scores4_2, scores4_4, scores4_8 };
static values4_fn *const values4_table[4] = { values4_1, values4_2, values4_4, values4_8 };

static int group_of(const fv__view *pairs, int dim) { return 2 * dim / pairs->width; }

/* The rows of unit `at` of K (V): `given`, *shift bytes on, or those put into `own`. Rows that are no whole vectors are copied: what lies behind them
 * is not theirs. */
static const char *const *rows_of_unit(const work *w, const block *b, const char *const *given, int64_t by, int dim, float *copies,
                                       const char **own, int64_t *shift)
{
    const int bytes = dim / 2, step = (bytes + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES;
    const bool as_they_lie = b->seen == ~(uint64_t)0 && bytes == step;
    *shift = as_they_lie ? by : 0;
    if (as_they_lie) return given;
    move_rows(w, b, given, by, own);
    for (int i = 0; i < KEYS && bytes != step; i++) {
        char *to = (char *)copies + (int64_t)i * step;
        memcpy(to, own[i], (size_t)bytes);
        memset(to + bytes, 0, (size_t)(step - bytes));
        own[i] = to;
    }
    return own;
}

static void score_few4(work *w, const block *b, int at, ahead *next, ahead *next_pairs)
{
    const int group = group_of(&w->run->k_block_scale, w->dk);
    const char *own[KEYS];
    few4_keys x = { .q = w->q, .step = w->dk_pad, .dim = w->dk, .group = group, .pairs = w->k_pairs + (int64_t)at * (w->dk / group) * KEYS, .s = w->s,
                    .end = above_highest(b->seen), .next = next, .next_pairs = next_pairs };
    x.rows = rows_of_unit(w, b, b->k_row, unit_shift(w, &w->run->k, w->p->k, at), w->dk, w->k, own, &x.shift);
    scores4_table[rows_index(w->packed)](&x);
}

static void value_few4(work *w, const block *b, int at, ahead *next, ahead *next_pairs)
{
    const fv__view *scales = &w->run->v_block_scale;
    const int group = group_of(scales, w->p->v_in_k ? w->dk : w->dv), groups = scales->width / 2;
    const char *own[KEYS];
    few4_sums x = { .p = w->s, .dim = w->dv, .step = w->dv_pad, .group = group,
                    .pairs = w->v_pairs + (int64_t)at * groups * KEYS, .next = next, .next_pairs = next_pairs, .alpha = w->alpha, .o = w->o };
    x.rows = rows_of_unit(w, b, b->v_row, unit_shift(w, &w->run->v, w->p->v, at), w->dv, w->v, own, &x.shift);
    values4_table[rows_index(w->packed)](&x);
}

/* Scales and zeros of a block, for all units. */
static void begin_few4(work *w, const block *b, int units)
{
    const fv__view *k = &w->run->k_block_scale, *v = &w->run->v_block_scale;
    ahead pairs;
    if (w->k4) {
        plan_runs(w, k, FV__DTYPE_f16, units, b->k_pair, &pairs);
        gather_pairs(&pairs, units, k->width / 2, w->k_pairs);
    }
    if (w->v4) {
        plan_runs(w, v, FV__DTYPE_f16, units, b->v_pair, &pairs);
        gather_pairs(&pairs, units, v->width / 2, w->v_pairs);
    }
}
#endif
