/* SPDX-License-Identifier: Apache-2.0 */
/* attend_work.h -- what a worker holds while it attends: constants of the run, the rows of its piece, its scratch.
 *
 *   packed row   one q head of one row: row i, head h of the unit is packed row i * unit_heads + h
 *   state        (m, l, o) of a packed row: the maximum of its scores in base 2, the sum of 2^(s - m), and the sum of 2^(s - m) v, all f32
 *   chunk        packed rows that one register tile holds: V_QK_VECS vectors (the last may have fewer)
 *
 * Part of attend_tmpl.c: compiled once per level. */
#include "cpu.h"
#include "vocabulary.h"

#include <limits.h>
#include <string.h>

#define FV_DTYPE_CPU
#include "dtype_files.inc"
#undef FV_DTYPE_CPU

#ifndef V_TILES
#define V_TILES 0                       /* 1: the level has matrix tiles */
#endif
#ifdef V_DOT_BYTES
#define V_BYTES 1                       /* there are products of bytes */
#else
#define V_BYTES 0
#endif
#ifdef V_DOT_BF16
#define V_DOTS  1                       /* v_dot_bf16 is an instruction */
#else
#define V_DOTS  0
#endif
#ifdef V_DOT_S16
#define V_WORDS 1                       /* so are products of pairs of 16-bit integers */
#else
#define V_WORDS 0
#endif

enum {
    KEYS = FV__KEY_BLOCK,               /* keys of a block */
    SQUARE = 16,                        /* tiled pages: keys, and pairs of d, that are turned together */
    PLAIN_ROWS = KEYS + 2 * SQUARE,     /* of whole squares that hold some of a block's keys */
    CHUNK = V_QK_VECS * V_LANES,        /* packed rows of a chunk */
    FEW = 8,                            /* most packed rows of a pass of the path for few */
    MOST_FEW = V_LANES == 16 ? 2 * FEW : FEW,           /* most packed rows that take it, where there are no matrix tiles */
    STREAMS = 4,                        /* places of memory that are read at once */
    ALIGN = 64,                         /* bytes */
    SLACK = 32,                         /* floats behind an array that a vector may run over */
    LARGEST_TILE = V_TILES ? 512 : 256, /* most packed rows of a piece */
    SET = 4,                            /* tiles: most blocks whose operands are made at once */
    STRIP = 32,                         /* tiles: packed rows whose scores are made at once */
    BLOCKS = V_TILES ? 2 * SET : 2,     /* that are known at once */
};

static const float infinity = __builtin_inff();

/* ---------------------------------------------------------------------------------------------------- element types */

/* `dtype` is a constant wherever it matters: the switch folds away. */
VFN v_f32 load_as(int dtype, const void *base, int64_t i)
{
    switch (dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: return v_load_##name(base, i);
#include "dtypes.inc"
#undef FV_DTYPE
    }
    return v_set(0.0f);
}

VFN void store_as(int dtype, void *base, int64_t i, v_f32 x)
{
    switch (dtype) {
    case FV__DTYPE_f32: v_store_f32(base, i, x); break;
    case FV__DTYPE_f16: v_store_f16(base, i, x); break;
    case FV__DTYPE_bf16: v_store_bf16(base, i, x); break;
    }
}

VFN int bits_as(int dtype)
{
    return dtype == FV__DTYPE_f32 ? 32 : dtype == FV__DTYPE_f16 || dtype == FV__DTYPE_bf16 ? 16
         : dtype == FV__DTYPE_fp4_e2m1 || dtype == FV__DTYPE_int4 ? 4 : 8;
}

/* Types whose every element bf16 holds exactly; the scale and the zero of int4 are more than it holds. */
VFN bool fits_bf16(int dtype) { return dtype == FV__DTYPE_bf16 || (bits_as(dtype) <= 8 && dtype != FV__DTYPE_int4); }

/* The first n < V_LANES elements; the other lanes are 0 and their memory is not touched. */
VFN v_f32 load_part(int dtype, const void *base, int64_t i, int n)
{
    char bytes[4 * V_LANES + 8] = { 0 };
    const int bits = bits_as(dtype);
    const int64_t odd = bits == 4 ? i & 1 : 0;
    memcpy(bytes, (const char *)base + i * bits / 8, (size_t)((n + odd) * bits + 7) / 8);
    return v_select(v_ilt(v_iota(), v_seti(n)), load_as(dtype, bytes, odd), v_set(0.0f));
}

/* n elements as floats, then zeros up to a multiple of V_LANES. */
VFN void unpack_as(int dtype, const void *base, int64_t i, int n, float *out)
{
    int d = 0;
    for (; d + V_LANES <= n; d += V_LANES) v_store(out + d, load_as(dtype, base, i + d));
    if (d < n) v_store(out + d, load_part(dtype, base, i + d, n - d));
}

static void unpack(int dtype, const void *base, int64_t i, int n, float *out)
{
    switch (dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: unpack_as(FV__DTYPE_##name, base, i, n, out); break;
#include "dtypes.inc"
#undef FV_DTYPE
    }
}

/* Many rows of n elements, row k from element at[k] where bit k of `which` says so, else zeros. */
typedef struct unpacking {
    const void *base;
    const int64_t *at;
    uint64_t which;
    int first, end, n;
    float *out;                         /* of row 0 */
    int step;                           /* floats from row to row */
} unpacking;

VFN void unpack_rows_as(int dtype, const unpacking *x)
{
    for (int i = x->first; i < x->end; i++) {
        float *out = x->out + (int64_t)i * x->step;
        if (x->which >> i & 1) unpack_as(dtype, x->base, x->at[i], x->n, out);
        else memset(out, 0, (size_t)x->step * sizeof *out);
    }
}

#define FV_DTYPE(name) static void unpack_rows_##name(const unpacking *x) { unpack_rows_as(FV__DTYPE_##name, x); }
#include "dtypes.inc"
#undef FV_DTYPE

static void unpack_rows(int dtype, const unpacking *x)
{
    switch (dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: unpack_rows_##name(x); break;
#include "dtypes.inc"
#undef FV_DTYPE
    }
}

VFN void pack_as(int dtype, void *base, int64_t i, int n, const float *x)
{
    int d = 0;
    for (; d + V_LANES <= n; d += V_LANES) store_as(dtype, base, i + d, v_load(x + d));
    if (d < n) {
        char bytes[4 * V_LANES];
        store_as(dtype, bytes, 0, v_load(x + d));
        memcpy((char *)base + (i + d) * bits_as(dtype) / 8, bytes, (size_t)((n - d) * bits_as(dtype) / 8));
    }
}

/* To f32, f16 or bf16, nearest even. x is padded to a multiple of V_LANES. */
static void pack(int dtype, void *base, int64_t i, int n, const float *x)
{
    switch (dtype) {
    case FV__DTYPE_f32: pack_as(FV__DTYPE_f32, base, i, n, x); break;
    case FV__DTYPE_f16: pack_as(FV__DTYPE_f16, base, i, n, x); break;
    default: pack_as(FV__DTYPE_bf16, base, i, n, x);
    }
}

/* ----------------------------------------------------------------------------------------------------------- types */

typedef struct row {
    int32_t batch_row, request, row;    /* row: in its request */
    int32_t q_pos;
    int32_t num_rows, num_keys, origin; /* of its request; origin: position of key 0 */
    int32_t first, last;                /* positions that the variants' bounds let it see, both included */
    bool refine;                        /* visible hooks must be asked within the bounds */
} row;

/* Up to KEYS keys of the segment, ready to be multiplied. */
typedef struct block {
    int64_t first;                      /* within the segment */
    int n;
    bool whole;                         /* every row sees all n keys; then mask[] is not filled */
    bool consecutive;
    uint64_t seen;                      /* keys that some row sees: the only ones whose page ids and memory are read */
    int32_t k_pos[KEYS], key[KEYS];
    int32_t origin;                     /* that key[] was made for */
    int64_t k_at[KEYS], k_tail_at[KEYS], v_at[KEYS];            /* first element of each seen key */
    int64_t k_scale_at[KEYS], v_scale_at[KEYS];                 /* of the token_head scale */
    int64_t k_group_at[KEYS], v_group_at[KEYS];                 /* 4 bits: of the first group's scale */
    const char *k_row[KEYS], *v_row[KEYS];                      /* few rows: where the keys lie; zeros where none is seen */
    const char *k_pair[KEYS], *v_pair[KEYS];                    /* int4: where their scales and zeros lie */
    uint64_t *mask;                     /* [packed rows] bit i: sees key i */
} block;

/* A head unit of the piece; pieces that differ in nothing else are done together, so that memory is read in its order. */
typedef struct unit_work {
    const fv__piece *piece;
    int q_head, kv_head;                /* its first q head */
    float *q, *m, *l, *o, *alpha;
    unsigned q_words;                   /* parts whose q is 16-bit integers, a bit each */
} unit_work;

enum { UNITS = 16 };

typedef struct work {
    const fv__run *run;
    const fv__problem *p;
    const fv__plan_head *plan;
    int dk, dv, dk_pad, dv_pad;         /* padded to V_LANES */
    int unit_heads;
    const fv__cpu_hooks *hooks[FV__MAX_VARIANTS];
    bool has_query, has_score, has_weight, has_key, has_value, has_output, has_sink, has_row_max;
    bool by_head;                       /* what a row sees may differ between its heads */
    bool k_direct, v_direct;            /* few rows: read from the cache as it lies */
    bool tiled;                         /* pages are in the order "tiles", see attend_pages.h */
    bool k4, v4;                        /* few rows: int4 by products of bytes, attend_few4.h */
    bool k_dots;                        /* few rows: Q stays bf16, pairs are multiplied with K's */
    bool k_words, v_words;              /* few rows: integers of 8 bits are multiplied as integers, see attend_few8.h */
    int part;                           /* few rows: the first one at hand; `packed` are at hand */
    bool q_words;                       /* their Q is words */
    bool v_from_k;                      /* V is the first dv floats of the unpacked K */
    bool tiles;                         /* many rows go through matrix tiles */
    bool squares;                       /* few rows do, see attend_few_squares.h */
    float score_scale;                  /* on the dot product: into base 2, or natural where score hooks follow */
    int max_packed;

    /* the piece */
    const fv__piece *piece;
    const fv__segment *segment;
    int num_rows, packed, padded;       /* padded: to V_LANES */
    int q_head, kv_head;                /* first q head of the unit */
    float k_factor, v_factor;           /* tensor and head scales; 1 where they are applied to the elements */
    int32_t first_all, last_all;        /* positions that every row sees by its bounds */
    bool refine_any;
    unit_work units[UNITS];

    /* scratch; q and the states are those of the unit at hand */
    row *rows;                          /* [packed_max] */
    float *q;                           /* many: [chunk][dk][rows of the chunk]; few: [packed][dk_pad] */
    float *m, *l, *o;                   /* states [padded], [padded], [padded][dv_pad] */
    float *m_all, *l_all, *o_all;       /* invariant mode: the chunks of keys merged so far */
    float *alpha;                       /* [padded] factor on o and l of the block at hand */
    float *s;                           /* many: [KEYS][rows of the chunk]; few: [FEW][KEYS] */
    int32_t *mask_lo, *mask_hi;         /* [padded] */
    float *k, *v;                       /* [KEYS][dk_pad], [KEYS][dv_pad]: blocks unpacked */
    uint16_t *tile_q, *tile_k, *tile_v, *tile_p;                /* tiles: operands in bf16, see attend_tiles.h */
    float *tile_s;                      /* tiles: scores of two jobs */
    float *tile_o, *tile_l;             /* tiles: O while it is summed; [packed][2][V_LANES] sums of weights, unrounded and rounded, a lane each */
    float *bias;                        /* tiles: [packed] -m: what turns a score into an exponent */
    uint32_t begun;                     /* tiles: strips whose O has been begun, a bit each */
    float to_base2;                     /* on scores that hooks made: log2(e); 1 where score_scale did it */
    float weight_scale;                 /* tiles: on scores: into base 2 */
    float headroom;                     /* tiles: by how much m stands above what a row met first */
    int32_t *k_pairs, *v_pairs;         /* int4: [unit][group][KEYS] scales and zeros of the block */
    char *k_plain, *v_plain;            /* tiled: the block's elements in rows, [PLAIN_ROWS][dk], [PLAIN_ROWS][dv] */
    int64_t k_plain_at[KEYS], v_plain_at[KEYS];                 /* where its keys are there */
    float *line;                        /* one row of Q, O or scores */
    float *zeros;                       /* a row of the widest type, all zero */
    block blocks[BLOCKS];
} work;

/* ------------------------------------------------------------------------------------------------------- the scratch */

VFN int pad_lanes(int n) { return (n + V_LANES - 1) / V_LANES * V_LANES; }

/* Hands out aligned pieces of a buffer; base NULL: only counts. */
static void *carve(char *base, size_t *used, int64_t bytes)
{
    void *at = base ? base + *used : NULL;
    *used += (size_t)fv__round_up(bytes, ALIGN);
    return at;
}

/* Elements of a side of a product in whole steps, rows in whole pairs of tiles. */
static int tile_steps(int n) { return (n + 31) / 32; }
static int whole_pairs(int rows) { return (rows + 31) / 32 * 32; }

static void lay_out_tiles(work *w, char *base, size_t *used, const fv__problem *p, const fv__kernel_shape *shape)
{
    const int64_t rows = whole_pairs(shape->max_packed), dk = tile_steps(p->dim_qk) * 32, dv = tile_steps(p->dim_v) * 32;
    const int64_t f = (int64_t)sizeof(float), h = (int64_t)sizeof(uint16_t);
    w->tile_q = carve(base, used, rows * dk * h);
    w->tile_k = carve(base, used, 2 * SET * KEYS * dk * h);
    w->tile_v = carve(base, used, 3 * SET * KEYS * dv * h);
    w->tile_p = carve(base, used, 2 * STRIP * SET * KEYS * h);
    w->tile_s = carve(base, used, 2 * STRIP * KEYS * f);
    w->tile_o = carve(base, used, rows * dv * f);
    w->tile_l = carve(base, used, rows * 2 * V_LANES * f);
    w->bias = carve(base, used, rows * f);
}

static size_t lay_out(work *w, char *base, const fv__problem *p, const fv__kernel_shape *shape)
{
    size_t used = 0;
    const int64_t rows = pad_lanes(shape->max_packed), numbers = fv__max64(whole_pairs(shape->max_packed), UNITS * (MOST_FEW + V_LANES));
    const int64_t dk = pad_lanes(p->dim_qk), dv = pad_lanes(p->dim_v);
    const int64_t f = (int64_t)sizeof(float);
    carve(base, &used, (int64_t)sizeof(work));
    w->rows = carve(base, &used, rows * (int64_t)sizeof(row));
    w->q = carve(base, &used, (rows + CHUNK) * dk * f);
    w->o = carve(base, &used, (rows * dv + SLACK) * f);
    w->o_all = carve(base, &used, (rows * dv + SLACK) * f);
    w->m = carve(base, &used, numbers * f);
    w->l = carve(base, &used, numbers * f);
    w->m_all = carve(base, &used, numbers * f);
    w->l_all = carve(base, &used, numbers * f);
    w->alpha = carve(base, &used, numbers * f);
    w->mask_lo = carve(base, &used, rows * f);
    w->mask_hi = carve(base, &used, rows * f);
    for (int i = 0; i < BLOCKS; i++) w->blocks[i].mask = carve(base, &used, rows * (int64_t)sizeof(uint64_t));
    w->s = carve(base, &used, (int64_t)(CHUNK > FEW ? CHUNK : FEW) * KEYS * f);
    w->k = carve(base, &used, (KEYS * dk + SLACK) * f);
    w->v = carve(base, &used, (KEYS * dv + SLACK) * f);
    if (p->tiled) {
        w->k_plain = carve(base, &used, PLAIN_ROWS * dk * 2);
        w->v_plain = carve(base, &used, PLAIN_ROWS * dv * 2);
    }
    if (V_TILES) lay_out_tiles(w, base, &used, p, shape);
    if (p->k == FV__DTYPE_int4) w->k_pairs = carve(base, &used, UNITS * (dk / 32) * KEYS * f);
    if (p->v == FV__DTYPE_int4) w->v_pairs = carve(base, &used, UNITS * (fv__max64(dk, dv) / 32) * KEYS * f);
    w->line = carve(base, &used, (FV__MAX_DIM + KEYS + SLACK) * f);
    w->zeros = carve(base, &used, (FV__MAX_DIM + SLACK) * f);
    return used;
}

/* ------------------------------------------------------------------------------------------------------- the problem */

/* A visible hook whose text never says "head" (as at.head must) cannot depend on it: then one head is asked for all. */
static void find_hooks(work *w)
{
    for (int i = 0; i < w->p->num_uses; i++) {
        const fv__cpu_hooks *h = w->hooks[i] = fv__variant_hooks(w->p->uses[i].variant, V_TEXT(FV_ISA_NAME));
        w->has_query |= h->query != NULL;
        w->has_score |= h->score != NULL;
        w->has_weight |= h->weight != NULL;
        w->has_key |= h->key != NULL;
        w->has_value |= h->value != NULL;
        w->has_output |= h->output != NULL;
        w->has_sink |= h->sink != NULL;
        w->has_row_max |= h->row_max != NULL;
        w->by_head |= h->visible != NULL && strstr(w->p->uses[i].variant->text, "head") != NULL;
    }
}

static void begin(work *w, const fv__run *run)
{
    const fv__problem *p = run->problem;
    w->run = run;
    w->p = p;
    w->plan = run->plan;
    w->dk = p->dim_qk;
    w->dv = p->dim_v;
    w->dk_pad = pad_lanes(p->dim_qk);
    w->dv_pad = pad_lanes(p->dim_v);
    w->unit_heads = run->plan->unit_heads;
    find_hooks(w);
    w->k4 = V_BYTES && p->k == FV__DTYPE_int4 && p->o != FV__DTYPE_f32 && !w->has_key;
    w->v4 = V_BYTES && p->v == FV__DTYPE_int4 && p->o != FV__DTYPE_f32 && !w->has_value;
    w->k_direct = (bits_as(p->k) >= 8 || w->k4) && !w->has_key && !p->qk_tail && w->dk % V_LANES == 0;
    w->v_direct = (bits_as(p->v) >= 8 || w->v4) && !w->has_value && w->dv % V_LANES == 0 && w->dv <= run->v.width;
    if (p->tiled) {
        w->k_direct = w->k_direct && p->k == FV__DTYPE_bf16 && V_LANES > 1;
        w->v_direct = w->v_direct && p->v == FV__DTYPE_bf16 && V_LANES > 1;
    }
    w->k_dots = V_DOTS && w->k_direct && fits_bf16(p->k) && p->q == FV__DTYPE_bf16 && !w->has_query && w->dk % (2 * V_LANES) == 0;
    w->k_words = V_WORDS && w->k_direct && p->k == FV__DTYPE_int8 && bits_as(p->q) == 16 && w->dk % (2 * V_LANES) == 0;
    w->v_words = V_WORDS && w->v_direct && p->v == FV__DTYPE_int8 && bits_as(p->q) == 16 && w->dv % (2 * V_LANES) == 0;
    w->tiled = p->tiled;
    for (int i = 0; i < KEYS && w->tiled; i++) {
        w->k_plain_at[i] = (int64_t)(SQUARE + i) * w->dk;
        w->v_plain_at[i] = (int64_t)(SQUARE + i) * w->dv;
    }
    w->v_from_k = p->v_in_k && !w->has_key && !w->has_value;
    memset(w->zeros, 0, (FV__MAX_DIM + SLACK) * sizeof(float));
}

/* ---------------------------------------------------------------------------------------------------------- the rows */

static int32_t clamp_position(int64_t x) { return (int32_t)fv__max64(INT32_MIN, fv__min64(INT32_MAX, x)); }

static int32_t int_argument(const work *w, int use, int param)
{
    int32_t x;
    memcpy(&x, (const char *)w->run->args[use] + w->p->uses[use].variant->meta.params[param].offset, sizeof x);
    return x;
}

/* Widens the bound by the ranges of the lifting list that hold the row's position; says whether any does. */
static bool lift(const work *w, int use, const row *r, int64_t *first, int64_t *last)
{
    fv_ranges list;
    const fv__variant_meta *meta = &w->p->uses[use].variant->meta;
    bool lifted = false;
    memcpy(&list, (const char *)w->run->args[use] + meta->params[meta->lifted].offset, sizeof list);
    if (!list.ranges) return false;
    const int64_t lo = list.indptr ? list.indptr[r->request] : 0, hi = list.indptr ? list.indptr[r->request + 1] : list.count;
    for (int64_t i = lo; i < hi; i++) {
        const int32_t begins = list.ranges[2 * i], ends = list.ranges[2 * i + 1];
        if (r->q_pos < begins || r->q_pos >= ends) continue;
        *first = fv__min64(*first, begins);
        *last = fv__max64(*last, (int64_t)ends - 1);
        lifted = true;
    }
    return lifted;
}

static void bound_row(const work *w, row *r)
{
    int64_t first = INT32_MIN, last = INT32_MAX;
    r->refine = false;
    for (int u = 0; u < w->p->num_uses; u++) {
        const fv__variant_meta *meta = &w->p->uses[u].variant->meta;
        int64_t from = INT32_MIN, to = INT32_MAX;
        if (!w->hooks[u]->visible) continue;
        if (meta->first.present) from = r->q_pos + meta->first.sign * (meta->first.sign ? (int64_t)int_argument(w, u, meta->first.param) : 0);
        if (meta->last.present) to = r->q_pos + meta->last.sign * (meta->last.sign ? (int64_t)int_argument(w, u, meta->last.param) : 0);
        const bool lifted = meta->lifted >= 0 && lift(w, u, r, &from, &to);
        r->refine |= !meta->exact || lifted;
        first = fv__max64(first, from);
        last = fv__min64(last, to);
    }
    r->first = clamp_position(first);
    r->last = clamp_position(last);
}

static void find_row(const work *w, int i, row *r)
{
    const fv__segment *s = w->segment;
    const int32_t place = s->row_first + w->piece->row_first + i;
    r->batch_row = place;
    r->request = s->request;
    if (s->request < 0) {
        const fv__listed_row *listed = &FV__PLAN_ARRAY(w->plan, const fv__listed_row, listed_rows)[place];
        r->batch_row = listed->row;
        r->request = listed->request;
    }
    const fv__request *q = &FV__PLAN_ARRAY(w->plan, const fv__request, requests)[r->request];
    r->row = r->batch_row - q->row_first;
    r->num_rows = q->num_rows;
    r->num_keys = q->num_keys;
    r->origin = q->first_position;
    r->q_pos = w->run->row_positions ? (int32_t)fv__index_at(w->run->row_positions, r->batch_row)
                                     : q->first_position + q->num_keys - q->num_rows + r->row;
    bound_row(w, r);
}

static fv__at place_at(const work *w, const row *r, int head)
{
    return (fv__at){ .request = r->request, .row = r->row, .batch_row = r->batch_row, .head = w->q_head + head, .q_pos = r->q_pos,
                     .num_rows = r->num_rows, .num_keys = r->num_keys, .num_q_heads = w->p->num_q_heads };
}

static float constant_scale(const work *w, const fv__scale *s)
{
    if (s->kind == FV__SCALE_TENSOR) return s->number;
    return s->kind == FV__SCALE_HEAD ? s->data[w->kv_head * s->stride[0]] : 1.0f;
}

/* One row of one head as floats [dk_pad], turned and whatever else the query hooks do. */
static void load_query(const work *w, const row *r, int head, float *out)
{
    const fv__view *q = &w->run->q, *tail = &w->run->q_tail;
    const int64_t h = w->q_head + head;
    memset(out, 0, (size_t)w->dk_pad * sizeof *out);
    unpack(w->p->q, q->data, r->batch_row * q->stride[0] + h * q->stride[1], w->dk - w->p->qk_tail, out);
    if (w->p->qk_tail) {
        float *own = w->line;           /* the tail may begin anywhere in a vector */
        unpack(w->p->q, tail->data, r->batch_row * tail->stride[0] + h * tail->stride[1], w->p->qk_tail, own);
        memcpy(out + w->dk - w->p->qk_tail, own, (size_t)w->p->qk_tail * sizeof *out);
    }
    const fv__at at = place_at(w, r, head);
    for (int u = 0; u < w->p->num_uses; u++)
        if (w->hooks[u]->query) w->hooks[u]->query(out, w->dk, w->run->args[u], &at);
}

static void begin_states(const work *w, int rows, float *m, float *l, float *o)
{
    for (int i = 0; i < pad_lanes(rows); i++) {
        m[i] = -infinity;
        l[i] = 0;
    }
    memset(o, 0, (size_t)rows * (size_t)w->dv_pad * sizeof *o);
}

static void begin_rows(work *w, const fv__piece *piece)
{
    w->piece = piece;
    w->segment = &FV__PLAN_ARRAY(w->plan, const fv__segment, segments)[piece->segment];
    w->num_rows = piece->num_rows;
    w->packed = piece->num_rows * w->unit_heads;
    w->padded = pad_lanes(w->packed);
    w->first_all = INT32_MIN;
    w->last_all = INT32_MAX;
    w->refine_any = false;
    for (int i = 0; i < w->num_rows; i++) {
        row *r = &w->rows[i];
        find_row(w, i, r);
        w->first_all = fv__max32(w->first_all, r->first);
        w->last_all = fv__min32(w->last_all, r->last);
        w->refine_any |= r->refine;
    }
}

static void begin_unit(work *w, const fv__piece *piece)
{
    w->piece = piece;
    w->kv_head = piece->unit / w->plan->units_per_kv_head;
    w->q_head = piece->unit * w->unit_heads;
    w->k_factor = w->has_key ? 1.0f : constant_scale(w, &w->run->k_scale);
    w->v_factor = w->has_value ? 1.0f : constant_scale(w, &w->run->v_scale);
    w->score_scale = w->p->scale * w->k_factor * (w->has_score || w->has_weight ? 1.0f : V_LOG2E);
    w->to_base2 = w->has_score ? V_LOG2E : 1.0f;
}

static void begin_piece(work *w, const fv__piece *piece)
{
    begin_rows(w, piece);
    begin_unit(w, piece);
}

/* Unit i of the pieces that are done together: Q, states of `rows` packed rows each. */
static void place_unit(work *w, int i, int rows, const fv__piece *piece)
{
    unit_work *u = &w->units[i];
    u->piece = piece;
    u->kv_head = piece->unit / w->plan->units_per_kv_head;
    u->q_head = piece->unit * w->unit_heads;
    u->q = w->q + (int64_t)i * rows * w->dk_pad;
    u->o = w->o + (int64_t)i * rows * w->dv_pad;
    u->m = w->m + i * pad_lanes(rows);
    u->l = w->l + i * pad_lanes(rows);
    u->alpha = w->alpha + i * pad_lanes(rows);
}

static void enter_unit(work *w, int i)
{
    const unit_work *u = &w->units[i];
    begin_unit(w, u->piece);
    w->q = u->q;
    w->m = u->m;
    w->l = u->l;
    w->o = u->o;
    w->alpha = u->alpha;
}
