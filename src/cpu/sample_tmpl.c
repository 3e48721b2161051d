/* SPDX-License-Identifier: Apache-2.0 */
/* sample_tmpl.c -- softmax, filters, samples and verification for one CPU level. The bits are the same at every level and on a GPU (cuda/sample.cuh):
 * comparisons are exact, weights are integers, and what is rounded is rounded by the same steps. foveal/ops.h has the definitions.
 *
 * Nouns
 *   source   a row and how its elements become values: probabilities cleaned, logits as exp(x - max), a difference of two rows, or raw
 *   value    what filters compare and weights are made of: 0, or a normal f32 above it
 *   weight   the integer of a value; up to 2^41, so that the sum of a chunk is exact in double before it joins an integer of 64 bits
 *   tally    one pass: how many values are at least t, their weight, the least of them, the largest of the others
 *
 * Nothing is sorted. A threshold is found by halving the range of floats, in the order of their bits, where both ends move to values that exist; once
 * few values are between them, only those are looked at. A sample with top k or top p is drawn first and looked at afterwards, which is most
 * often one pass more. */
#include "cpu_companions.h"
#include "row_io.h"

#include "foveal/ops.h"

#include <float.h>
#include <math.h>

enum { CHUNK = 1024, FEW = 4096 };      /* floats of a buffer; values that a threshold's search keeps aside */

void V_NAME(fv__filter_rows)(const fv__filter_job *job, int64_t first, int64_t last);
void V_NAME(fv__sample_rows)(const fv__sample_job *job, int64_t first, int64_t last);
void V_NAME(fv__verify_rows)(const fv__verify_job *job, int64_t first, int64_t last);

typedef enum source_kind { RAW, PROBABILITIES, LOGITS, DIFFERENCE } source_kind;

typedef struct source {
    const fv__view *view, *minus;
    int64_t at, minus_at;               /* elements at which the rows begin */
    int n;
    source_kind kind;
    float most;                         /* LOGITS: the largest element */
    float inverse;                      /* LOGITS: 1 / temperature; 0: only the largest count */
    float top;                          /* the largest value */
    float scale;                        /* value to weight, before rounding */
} source;

/* ------------------------------------------------------------------------------------------------------------ values */

/* e^x for x <= 0; 0 below -87, so that no result is subnormal. Each step rounds, none is fused: the same bits from every compiler and machine. */
VFN v_f32 exp_steps(v_f32 x)
{
    const v_f32 magic = v_set(12583039.0f);             /* 1.5 * 2^23 + 127: leaves the biased exponent in the low bits */
    const v_mask in = v_ge(x, v_set(-87.0f));
    x = v_select(in, x, v_set(0.0f));
    const v_f32 t = v_add(v_mul(x, v_set(V_LOG2E)), magic);
    const v_f32 whole = v_sub(t, magic);
    v_f32 r = v_sub(x, v_mul(whole, v_set(0.693145751953125f)));
    r = v_sub(r, v_mul(whole, v_set(1.42860682030941723e-6f)));
    v_f32 p = v_set(1.98412698e-4f);
    p = v_add(v_mul(p, r), v_set(1.38888889e-3f));
    p = v_add(v_mul(p, r), v_set(8.33333333e-3f));
    p = v_add(v_mul(p, r), v_set(4.16666667e-2f));
    p = v_add(v_mul(p, r), v_set(1.66666667e-1f));
    p = v_add(v_mul(p, r), v_set(0.5f));
    p = v_add(v_mul(p, r), v_set(1.0f));
    p = v_add(v_mul(p, r), v_set(1.0f));
    return v_select(in, v_mul(p, v_of_bits(v_bits_of(t) << 23)), v_set(0.0f));
}

VFN v_f32 clean(v_f32 x)
{
    const v_f32 y = v_select(v_le(x, v_set(FLT_MAX)), x, v_set(FLT_MAX));
    return v_select(v_ge(x, v_set(FLT_MIN)), y, v_set(0.0f));
}

VFN v_f32 value_of(const source *s, v_f32 x)
{
    switch (s->kind) {
    case LOGITS: {
        const v_f32 e = s->inverse > 0 ? exp_steps(v_mul(v_sub(x, v_set(s->most)), v_set(s->inverse))) : v_set(0.0f);
        return v_select(v_eq(x, v_set(s->most)), v_set(1.0f), e);
    }
    case RAW: return x;
    default: return clean(x);
    }
}

/* Values [from, from + CHUNK) or to the end into `out`, up to a whole vector (behind the end: 0, raw NaN); their number. */
static int fetch(const source *s, int from, float *out)
{
    const int n = s->n - from < CHUNK ? s->n - from : CHUNK;
    load_row(s->view, s->at + from, n, out);
    if (s->kind == DIFFERENCE) {
        float other[CHUNK];
        load_row(s->minus, s->minus_at + from, n, other);
        for (int i = 0; i < n; i += V_LANES) v_store(out + i, v_sub(v_load(out + i), v_load(other + i)));
    }
    if (s->kind != RAW)
        for (int i = 0; i < n; i += V_LANES) v_store(out + i, value_of(s, v_load(out + i)));
    for (int i = n; i % V_LANES; i++) out[i] = s->kind == RAW ? NAN : 0;
    return n;
}

/* The largest element that is not NaN, -inf without one. */
static float largest(const source *s)
{
    float x[CHUNK], lanes[V_LANES];
    v_f32 most = v_set(-INFINITY);
    for (int from = 0; from < s->n; from += CHUNK) {
        const int n = fetch(s, from, x);
        for (int i = 0; i < n; i += V_LANES) most = v_select(v_gt(v_load(x + i), most), v_load(x + i), most);
    }
    v_store(lanes, most);
    for (int l = 1; l < V_LANES; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

static int exponent_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (int)(bits >> 23 & 255) - 127;
}

static float power_of_two(int e)
{
    const uint32_t bits = (uint32_t)(e + 127) << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static int shift_of(float top) { return (int)fv__min32(40 - exponent_of(top), 126); }

/* A row of probabilities or logits. The largest value is found; top 0: there is no positive one. */
static source open_row(const fv__view *view, int64_t row, source_kind kind, float temperature)
{
    source s = { .view = view, .at = row * view->stride[0], .n = view->width, .kind = kind, .inverse = temperature > 0 ? 1 / temperature : 0 };
    if (kind == LOGITS) {
        s.kind = RAW;
        s.most = largest(&s);
        s.kind = LOGITS;
        s.top = s.most > -INFINITY ? 1 : 0;
    } else {
        s.top = largest(&s);
    }
    s.scale = kind != RAW && s.top > 0 ? power_of_two(shift_of(s.top)) : 0;
    return s;
}

/* ----------------------------------------------------------------------------------------------------------- tallies */

typedef struct tally {
    int64_t count;
    uint64_t sum;
    float least, below;                 /* least value >= t (+inf: none), largest value < t (-inf: none) */
} tally;

/* A double for every second float of a vector: two of them are registers where one of all lanes would not be. */
#if V_LANES == 1
typedef double v_f64h;
#define HALF 1
#define WIDEN(p) ((double)*(p))
#else
typedef double v_f64h __attribute__((vector_size(4 * V_LANES)));
typedef float v_f32h __attribute__((vector_size(2 * V_LANES), aligned(4), may_alias));
#define HALF (V_LANES / 2)
#define WIDEN(p) __builtin_convertvector(*(const v_f32h *)(p), v_f64h)
#endif

/* The sum of n scaled values in whole vectors, each rounded: adding and subtracting 2^52 does that. */
static uint64_t sum_rounded(const float *x, int n)
{
    const double magic = 0x1p52;
    v_f64h even = { 0 }, odd = { 0 };
    double lanes[HALF];
    uint64_t total = 0;
    for (int i = 0; i < n; i += 2 * HALF) {
        even += (WIDEN(x + i) + magic) - magic;
        if (i + HALF < n) odd += (WIDEN(x + i + HALF) + magic) - magic;
    }
    even += odd;
    memcpy(lanes, &even, sizeof lanes);
    for (int l = 0; l < HALF; l++) total += (uint64_t)lanes[l];
    return total;
}

/* `sums`, `near`: what is wanted beside the count; constants where this is called. */
VFN tally survey(const source *s, float t, bool sums, bool near)
{
    float x[CHUNK], w[CHUNK], low[V_LANES], high[V_LANES];
    tally r = { 0, 0, INFINITY, -INFINITY };
    v_f32 least = v_set(INFINITY), below = v_set(-INFINITY);
    v_i32 count = v_seti(0);
    const v_f32 at_least = v_set(t), scale = v_set(s->scale);
    for (int from = 0; from < s->n; from += CHUNK) {
        const int n = fetch(s, from, x);
        for (int i = 0; i < n; i += V_LANES) {
            const v_f32 y = v_load(x + i);
            const v_mask in = v_ge(y, at_least);
            count = v_isub(count, in);
            if (sums) v_store(w + i, v_mul(v_select(in, y, v_set(0.0f)), scale));
            if (near) least = v_select(v_and(in, v_lt(y, least)), y, least);
            if (near) below = v_select(v_and(v_lt(y, at_least), v_gt(y, below)), y, below);
        }
        if (sums) r.sum += sum_rounded(w, (int)fv__round_up(n, V_LANES));
    }
    for (int l = 0; l < V_LANES; l++) r.count += v_lanei(count, l);
    v_store(low, least);
    v_store(high, below);
    for (int l = 0; l < V_LANES; l++) {
        r.least = low[l] < r.least ? low[l] : r.least;
        r.below = high[l] > r.below ? high[l] : r.below;
    }
    return r;
}

static tally count_near(const source *s, float t) { return survey(s, t, false, true); }
static tally sum_near(const source *s, float t) { return survey(s, t, true, true); }
static tally sum_of(const source *s, float t) { return survey(s, t, true, false); }

/* -------------------------------------------------------------------------------------------------------- thresholds */

/* Floats in the order of unsigned integers; both zeros are +0. */
static uint32_t key_of(float x)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static float float_of(uint32_t key)
{
    const uint32_t bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

typedef struct goal {                   /* a set of the largest values is large enough when it ... */
    bool by_sum;
    int64_t count;                      /* has so many, */
    double sum;                         /* or weighs so much */
} goal;

/* Where the search is: values >= lo are enough, those > hi are not. */
typedef struct search {
    uint32_t lo, hi;
    int64_t from_lo, above;             /* how many there are of each */
    uint64_t above_sum;                 /* by_sum: what those > hi weigh */
    int64_t base;                       /* values that the source lacks, all of them > hi, */
    uint64_t base_sum;                  /* and what they weigh */
} search;

/* One pass; false: a set of exactly the size that is asked for has been met. */
static bool step(const source *s, const goal *g, search *at)
{
    const float t = float_of(at->lo + (at->hi - at->lo + 1) / 2);
    const tally r = g->by_sum ? sum_near(s, t) : count_near(s, t);
    const int64_t count = at->base + r.count;
    const uint64_t sum = at->base_sum + r.sum;
    if (g->by_sum ? (double)sum >= g->sum : count >= g->count) {
        at->lo = key_of(r.least);
        at->from_lo = count;
        return g->by_sum || count != g->count;
    }
    const uint32_t next = key_of(r.below);
    at->hi = next > at->lo ? next : at->lo;
    at->above = count;
    at->above_sum = sum;
    return true;
}

/* Values between the ends, to `out`; their number. */
static int gather(const source *s, const search *at, float *out)
{
    float x[CHUNK];
    int count = 0;
    const v_f32 lo = v_set(float_of(at->lo)), hi = v_set(float_of(at->hi));
    for (int from = 0; from < s->n; from += CHUNK) {
        const int n = fetch(s, from, x);
        for (int i = 0; i < n; i += V_LANES) {
            uint32_t lanes = v_movemask(v_and(v_ge(v_load(x + i), lo), v_le(v_load(x + i), hi)));
            for (; lanes; lanes &= lanes - 1) out[count++] = x[i + __builtin_ctz(lanes)];
        }
    }
    return count;
}

/* The largest t that is a value, or lies above no other value than those >= t, with a large enough set of values >= t; `lowest` if none has. */
static float threshold(const source *s, goal g, float lowest)
{
    float few[FEW];
    search at = { .lo = key_of(lowest), .hi = key_of(s->top), .from_lo = s->n };
    while (at.lo < at.hi && at.from_lo - at.above > FEW)
        if (!step(s, &g, &at)) return float_of(at.lo);
    if (at.lo >= at.hi) return float_of(at.lo);
    const fv__view view = { .data = (char *)few, .dtype = FV__DTYPE_f32 };
    const source rest = { .view = &view, .n = gather(s, &at, few), .kind = RAW, .scale = s->scale };
    at.base = at.above;
    at.base_sum = at.above_sum;
    while (at.lo < at.hi && step(&rest, &g, &at)) { }
    return float_of(at.lo);
}

static int64_t top_k_at(const fv__setting *k, int64_t row)
{
    const double x = fv__setting_at(k, row);
    return x < 1 ? 1 : x > INT32_MAX ? INT32_MAX : (int64_t)x;
}

static float top_p_at(const fv__setting *p, int64_t row)
{
    const float x = (float)fv__setting_at(p, row);
    return x > 0 ? (x < 1 ? x : 1) : 0;
}

static float top_k_threshold(const source *s, int64_t k, float lowest)
{
    return k < s->n ? threshold(s, (goal){ .count = k }, lowest) : lowest;
}

/* ----------------------------------------------------------------------------------------------------------- filters */

/* What values and their sum are divided with, so that the sum of the largest is an f32: a power of two, and what becomes subnormal is 0 as a quotient. */
static float room_for_sum(const source *s) { return s->top >= 0x1p100f ? 0x1p-32f : 1.0f; }

static void put_quotients(const source *s, float t, uint64_t weights, const fv__view *y, int64_t to)
{
    const float room = room_for_sum(s), sum = (float)((double)weights * ((double)room / (double)s->scale));
    float x[CHUNK];
    for (int from = 0; from < s->n; from += CHUNK) {
        const int n = fetch(s, from, x);
        for (int i = 0; i < n; i += V_LANES) {
            const v_f32 v = v_load(x + i);
            v_store(x + i, v_select(v_ge(v, v_set(t)), v_div(v_mul(v, v_set(room)), v_set(sum)), v_set(0.0f)));
        }
        store_row(y, to + from, n, x);
    }
}

static void put_masked(const source *s, float t, const fv__view *y, int64_t to)
{
    float x[CHUNK];
    for (int from = 0; from < s->n; from += CHUNK) {
        const int n = fetch(s, from, x);
        for (int i = 0; i < n; i += V_LANES)
            v_store(x + i, v_select(v_ge(v_load(x + i), v_set(t)), v_load(x + i), v_set(-INFINITY)));
        store_row(y, to + from, n, x);
    }
}

static void put_zeros(int width, const fv__view *y, int64_t to)
{
    static const float zeros[CHUNK];
    for (int from = 0; from < width; from += CHUNK) store_row(y, to + from, width - from < CHUNK ? width - from : CHUNK, zeros);
}

static float renorm_threshold(const fv__filter_job *job, const source *s, int64_t row)
{
    if (job->what == FV__TOP_K_RENORM) return top_k_threshold(s, top_k_at(&job->param, row), FLT_MIN);
    const float p = job->what == FV__TOP_P_RENORM ? top_p_at(&job->param, row) : 1;
    if (p >= 1) return FLT_MIN;
    return threshold(s, (goal){ .by_sum = true, .sum = (double)p * (double)sum_of(s, FLT_MIN).sum }, FLT_MIN);
}

void V_NAME(fv__filter_rows)(const fv__filter_job *job, int64_t first, int64_t last)
{
    static const source_kind kinds[] = { [FV__SOFTMAX] = LOGITS, [FV__TOP_K_RENORM] = PROBABILITIES, [FV__TOP_P_RENORM] = PROBABILITIES,
                                         [FV__TOP_K_MASK] = RAW };
    for (int64_t row = first; row < last; row++) {
        const int64_t to = row * job->y.stride[0];
        const float temperature = job->what == FV__SOFTMAX ? (float)fv__setting_at(&job->param, row) : 1;
        const source s = open_row(&job->x, row, kinds[job->what], temperature);
        if (job->what == FV__TOP_K_MASK) {
            put_masked(&s, top_k_threshold(&s, top_k_at(&job->param, row), -INFINITY), &job->y, to);
        } else if (s.top > 0) {
            const float t = renorm_threshold(job, &s, row);
            put_quotients(&s, t, sum_of(&s, t).sum, &job->y, to);
        } else {
            put_zeros(s.n, &job->y, to);
        }
    }
}

/* ----------------------------------------------------------------------------------------------------------- samples */

static uint64_t multiply_high(uint64_t a, uint64_t b)
{
    const uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), left = (a >> 32) * (b & 0xFFFFFFFFu), right = (a & 0xFFFFFFFFu) * (b >> 32);
    const uint64_t middle = (low >> 32) + (left & 0xFFFFFFFFu) + (right & 0xFFFFFFFFu);
    return (a >> 32) * (b >> 32) + (left >> 32) + (right >> 32) + (middle >> 32);
}

static uint64_t draw(const fv__random *random, int64_t index, uint32_t number)
{
    const uint64_t seed = random->seeds.data ? (uint64_t)fv__ints_get(&random->seeds, index, 0) : random->seed;
    const uint64_t offset = random->offsets.data ? (uint64_t)fv__ints_get(&random->offsets, index, 0) : random->offset;
    return fv__draw(seed, offset, (uint32_t)index, number);
}

/* The first id at which the running sum of values >= t exceeds r; there is one when r is below their sum. */
static int find(const source *s, float t, uint64_t r, float *value)
{
    float x[CHUNK], w[CHUNK];
    int found = 0;
    for (int from = 0; from < s->n; from += CHUNK) {
        const int n = fetch(s, from, x);
        for (int i = 0; i < n; i += V_LANES)
            v_store(w + i, v_mul(v_select(v_ge(v_load(x + i), v_set(t)), v_load(x + i), v_set(0.0f)), v_set(s->scale)));
        const uint64_t all = sum_rounded(w, (int)fv__round_up(n, V_LANES));
        if (r >= all) {
            r -= all;
            continue;
        }
        for (int i = 0; i < n; i++) {
            const uint64_t weight = (uint64_t)(((double)w[i] + 0x1p52) - 0x1p52);
            found = i;
            if (r < weight) break;
            r -= weight;
        }
        *value = x[found];
        return from + found;
    }
    return 0;
}

typedef struct limits {                 /* of values: what top k and top p ask */
    float least;                        /* no smaller value is drawn */
    int64_t count;                      /* fewer are larger than one that stays */
    double sum;                         /* and weigh less */
    uint64_t total;                     /* of values >= least */
} limits;

static limits limits_of(const fv__sample_job *job, const source *s, int64_t i)
{
    limits l = { FLT_MIN, INT64_MAX, INFINITY, sum_of(s, FLT_MIN).sum };
    const float p = job->filters & FV_TOP_P ? top_p_at(&job->top_p, i) : 1;
    uint64_t mass = l.total;
    if (job->filters & FV_TOP_K) l.count = top_k_at(&job->top_k, i);
    if (job->filters & FV_TOP_K && job->filters & FV_TOP_K_FIRST && l.count < s->n) {
        l.least = top_k_threshold(s, l.count, FLT_MIN);
        l.total = mass = sum_of(s, l.least).sum;
    }
    if (p < 1) l.sum = (double)p * (double)mass;
    if (job->filters & FV_MIN_P) {
        const float least = top_p_at(&job->min_p, i) * s->top;
        if (least > l.least) l.total = sum_of(s, l.least = least).sum;
    }
    return l;
}

static int sample(const fv__sample_job *job, const source *s, int64_t i)
{
    const limits l = limits_of(job, s, i);
    float t = l.least, value = 0;
    uint64_t total = l.total;
    for (uint32_t number = 0;; number++) {
        const int id = find(s, t, multiply_high(draw(&job->random, i, number), total), &value);
        if (l.count >= s->n && l.sum == INFINITY) return id;
        t = float_of(key_of(value) + 1);
        const tally larger = sum_of(s, t);
        if (larger.sum == 0 || (larger.count < l.count && (double)larger.sum < l.sum)) return id;
        total = larger.sum;
    }
}

void V_NAME(fv__sample_rows)(const fv__sample_job *job, int64_t first, int64_t last)
{
    for (int64_t i = first; i < last; i++) {
        const int64_t row = job->rows.data ? fv__ints_get(&job->rows, i, 0) : i;
        source s = { 0 };
        if (row >= 0 && row < job->x.extent) s = open_row(&job->x, row, job->logits ? LOGITS : PROBABILITIES, 1);
        fv__ints_set(&job->ids, i, 0, s.top > 0 ? sample(job, &s, i) : 0);
        if (job->valid) job->valid[i * job->valid_stride] = s.top > 0;
    }
}

/* ------------------------------------------------------------------------------------------------------ verification */

static float element(const fv__view *view, int64_t request, int64_t step, int64_t id)
{
    float x[V_LANES];
    load_row(view, request * view->stride[0] + step * view->stride[1] + id, 1, x);
    return x[0];
}

static bool accepts(const fv__verify_job *job, int64_t request, int step)
{
    const int64_t id = fv__ints_get(&job->draft_ids, request, step);
    const float u = (float)(draw(&job->random, request, (uint32_t)step) >> 40) * 0x1p-24f;
    if (id < 0 || id >= job->draft.width) return false;
    return u * element(&job->draft, request, step, id) < element(&job->target, request, step, id);
}

/* One token after `step` accepted ones. */
static int continuation(const fv__verify_job *job, int64_t request, int step)
{
    source s = { .view = &job->target, .minus = &job->draft, .n = job->target.width, .kind = DIFFERENCE };
    float ignored;
    s.at = request * job->target.stride[0] + step * job->target.stride[1];
    s.minus_at = request * job->draft.stride[0] + step * job->draft.stride[1];
    s.top = step < job->num_drafts ? largest(&s) : 0;
    if (!(s.top > 0)) {
        s.kind = PROBABILITIES;
        s.top = largest(&s);
    }
    if (!(s.top > 0)) return 0;
    s.scale = power_of_two(shift_of(s.top));
    return find(&s, FLT_MIN, multiply_high(draw(&job->random, request, (uint32_t)job->num_drafts), sum_of(&s, FLT_MIN).sum), &ignored);
}

static void add_to(const fv__ints *x, int64_t i, int64_t by)
{
    if (x->data) fv__ints_set(x, i, 0, fv__ints_get(x, i, 0) + by);
}

void V_NAME(fv__verify_rows)(const fv__verify_job *job, int64_t first, int64_t last)
{
    for (int64_t r = first; r < last; r++) {
        int accepted = 0, emitted = 0;
        for (int step = 0; step < job->num_drafts; step++) {
            const bool good = accepts(job, r, step);
            emitted += good && emitted == step;
            accepted += good;
        }
        const int next = continuation(job, r, emitted);
        for (int step = 0; step <= job->num_drafts; step++)
            fv__ints_set(&job->ids, r, step, step < emitted ? fv__ints_get(&job->draft_ids, r, step) : step == emitted ? next : -1);
        add_to(&job->num_accepted, r, accepted);
        add_to(&job->num_emitted, r, emitted);
    }
}
