/* SPDX-License-Identifier: Apache-2.0 */
/* ops_tmpl.c -- append, rope and merge for one CPU level: rows [first, last) of a checked job.
 *
 * A row of a head is brought to floats in a buffer, changed there, and stored. What is stored has
 * the same bytes at every level: the words used here round once per operation (no fused
 * multiply-add), angles are reduced in double by the same steps everywhere, and a scale divides.
 * Buffers are FV__MAX_DIM floats plus one vector, so loops may run over the end of a row; memory
 * that is not a buffer is never touched outside of the row. */
#include "cpu_ops.h"
#include "row_io.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define ROW (FV__MAX_DIM + 16)          /* floats of a buffer */
#define BLOCK 16                        /* elements that share a scale in fp4_e2m1 */

void V_NAME(fv__append_rows)(const fv__append_job *job, int64_t first, int64_t last);
void V_NAME(fv__rope_rows)(const fv__rope_job *job, int64_t first, int64_t last);
void V_NAME(fv__merge_rows)(const fv__merge_job *job, int64_t first, int64_t last);

/* ---------------------------------------------------------------------------- rows of elements */

static bool narrow(fv__dtype dtype)
{
    return fv__dtypes[dtype].bits <= 8;
}

static char *address(const fv__view *view, int64_t at)
{
    return view->data + at * fv__dtypes[view->dtype].bits / 8;
}

/* Same type, nothing to compute: the bytes as they are. */
static void copy_row(const fv__view *from, int64_t at, const fv__view *to, int64_t to_at, int n)
{
    if (address(from, at) == address(to, to_at)) return;
    memcpy(address(to, to_at), address(from, at), (size_t)fv__dtype_bytes(from->dtype, n));
}

/* ------------------------------------------------------------------------------------- rotation */

typedef struct turns {                  /* cosine and sine of each pair at one position */
    float c[FV__MAX_DIM / 2 + 16], s[FV__MAX_DIM / 2 + 16];
} turns;

/* cos and sin of position * frequency. The product is rounded to double, as the definition has it.
 * Quarter turns come off in three parts of pi/2; the first two have 22 bits, so that their products
 * with up to 2^31 quarters are exact. Taylor sums in double leave 1e-11. */
VFN void turn(v_i32 position, v_f32 frequency, v_f32 *c, v_f32 *s)
{
    const double magic = 0x1.8p52;      /* adding and subtracting it rounds to a whole number */
    const v_f64 angle = V_CONVERT(position, v_f64) * V_CONVERT(frequency, v_f64);
    const v_f64 quarters = (angle * 0x1.45f306dc9c883p-1 + magic) - magic;
    const v_f64 r = ((angle - quarters * 0x1.921fbp+0) - quarters * 0x1.5110bp-22) -
                    quarters * 0x1.18469898cc517p-44;
    const v_f64 z = r * r;
    v_f64 ps = z * (-1.0 / 39916800) + 1.0 / 362880;
    ps = ps * z + -1.0 / 5040;
    ps = ps * z + 1.0 / 120;
    ps = ps * z + -1.0 / 6;
    ps = ps * z * r + r;
    v_f64 pc = z * (1.0 / 479001600) + -1.0 / 3628800;
    pc = pc * z + 1.0 / 40320;
    pc = pc * z + -1.0 / 720;
    pc = pc * z + 1.0 / 24;
    pc = pc * z + -0.5;
    pc = pc * z + 1.0;
    const v_f64 fours = (quarters * 0.25 + magic) - magic;
    const v_u32 q = (v_u32)V_CONVERT(quarters - fours * 4.0,
                                     v_i32); /* -2 .. 2: the quadrant in its two low bits */
    const v_f32 fs = V_CONVERT(ps, v_f32), fc = V_CONVERT(pc, v_f32);
    const v_mask odd = V_TRUTH((q & 1) != 0);
    *s = v_of_bits(v_bits_of(v_select(odd, fc, fs)) ^ (q & 2) << 30);
    *c = v_of_bits(v_bits_of(v_select(odd, fs, fc)) ^ ((q + 1) & 2) << 30);
}

static void make_turns(const fv__rotary *rotary, int32_t position, turns *t)
{
    for (int i = 0; i < rotary->dim / 2; i += V_LANES) {
        v_f32 c, s;
        turn(v_seti(position), v_load(rotary->frequencies + i), &c, &s);
        v_store(t->c + i, c);
        v_store(t->s + i, s);
    }
}

/* y = x turned, the first `half` pairs (i, i + half). Vectors of the first half may run into the
 * second, which is written after it. */
static void turn_halves(const turns *t, int half, const float *x, float *y)
{
    for (int i = 0; i < half; i += V_LANES) {
        const v_f32 c = v_load(t->c + i), s = v_load(t->s + i);
        v_store(y + i, v_sub(v_mul(v_load(x + i), c), v_mul(v_load(x + half + i), s)));
    }
    for (int i = 0; i < half; i += V_LANES) {
        const v_f32 c = v_load(t->c + i), s = v_load(t->s + i);
        v_store(y + half + i, v_add(v_mul(v_load(x + half + i), c), v_mul(v_load(x + i), s)));
    }
}

static void turn_neighbours(const turns *t, int half, const float *x, float *y)
{
    for (int i = 0; i < half; i++) {
        const float lo = x[2 * i], hi = x[2 * i + 1], c = t->c[i], s = t->s[i];
        y[2 * i] = lo * c - hi * s;
        y[2 * i + 1] = hi * c + lo * s;
    }
}

/* Turns the first rotary->dim of n elements; y is another buffer. */
static void rotate(const fv__rotary *rotary, const turns *t, int n, const float *x, float *y)
{
    if (rotary->interleaved)
        turn_neighbours(t, rotary->dim / 2, x, y);
    else
        turn_halves(t, rotary->dim / 2, x, y);
    memcpy(y + rotary->dim, x + rotary->dim, (size_t)(n - rotary->dim) * sizeof *y);
}

static void rotate_row(const fv__rotary *rotary, const turns *t, const fv__view *x,
                       const fv__view *y, int64_t row, int heads)
{
    float in[ROW], out[ROW];
    const int n = x->width;
    for (int h = 0; h < heads; h++) {
        load_row(x, row * x->stride[0] + h * x->stride[1], n, in);
        rotate(rotary, t, n, in, out);
        store_row(y, row * y->stride[0] + h * y->stride[1], n, out);
    }
}

static void copy_heads(const fv__view *x, const fv__view *y, int64_t row, int heads)
{
    float in[ROW];
    for (int h = 0; h < heads; h++) {
        const int64_t from = row * x->stride[0] + h * x->stride[1],
                      to = row * y->stride[0] + h * y->stride[1];
        if (x->dtype == y->dtype) {
            copy_row(x, from, y, to, x->width);
            continue;
        }
        load_row(x, from, x->width, in);
        store_row(y, to, x->width, in);
    }
}

void V_NAME(fv__rope_rows)(const fv__rope_job *job, int64_t first, int64_t last)
{
    turns t;
    for (int64_t row = first; row < last; row++) {
        if (!job->rotary.dim) {
            copy_heads(&job->x, &job->y, row, job->num_heads);
            continue;
        }
        make_turns(&job->rotary, (int32_t)fv__index_at(job->positions, row), &t);
        rotate_row(&job->rotary, &t, &job->x, &job->y, row, job->num_heads);
    }
}

/* --------------------------------------------------------------------------------------- append */

typedef struct place { /* a token's slot: page and token in it, or (ragged) token and 0 */
    int64_t page, token;
    bool paged;
} place;

static place place_of(int64_t slot, int32_t page_size)
{
    if (!page_size) return (place){ slot, 0, false };
    return (place){ slot / page_size, slot % page_size, true };
}

static int64_t element(const int64_t *stride, place p, int head)
{
    return p.page * stride[0] +
           (p.paged ? p.token * stride[1] + head * stride[2] : head * stride[1]);
}

/* The largest of a vector's lanes, none of them NaN. */
static float largest_lane(v_f32 x)
{
    float lanes[V_LANES];
    v_store(lanes, x);
    for (int half = V_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lanes[l] = lanes[l + half] > lanes[l] ? lanes[l + half] : lanes[l];
    return lanes[0];
}

/* Largest finite magnitude of x and so_far. */
static float largest_of(const float *x, int n, float so_far)
{
    v_f32 most = v_set(so_far);
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        const v_f32 y = v_abs(v_load(x + i));
        most = v_max(most, v_select(v_le(y, v_set(FLT_MAX)), y, v_set(0.0f)));
    }
    so_far = largest_lane(most);
    for (; i < n; i++) {
        const float y = fabsf(x[i]);
        if (y <= FLT_MAX && y > so_far) so_far = y;
    }
    return so_far;
}

static int64_t count_nans(const float *x, int n)
{
    int64_t count = 0;
    for (int i = 0; i < n; i++) count += x[i] != x[i];
    return count;
}

static void divide(float *x, int n, float by)
{
    for (int i = 0; i < n; i += V_LANES) v_store(x + i, v_div(v_load(x + i), v_set(by)));
}

/* fp4_e2m1: each block of 16 has its own scale in e4m3, chosen so that its largest becomes 6; a
 * block whose scale rounds to 0 is 0. */
static void store_blocks(const fv__view *view, int64_t at, const fv__view *scales, int64_t scale_at,
                         int n, float *x)
{
    const fv__dtype_info *e4m3 = &fv__dtypes[FV__DTYPE_fp8_e4m3];
    for (int i = 0; i < n; i += BLOCK) {
        const float wanted = largest_of(x + i, BLOCK, 0) / 6;
        const uint32_t code = e4m3->encode(wanted);
        const float scale = (float)e4m3->decode(code);
        scales->data[scale_at + i / BLOCK] = (char)code;
        for (int k = i; k < i + BLOCK; k++) x[k] = scale > 0 ? x[k] / scale : 0;
    }
    store_row(view, at, n, x);
}

/* int4: what lies further out is taken for it, as f16 holds a scale of no more than 65504. */
#define INT4_REACH (15 * 65504.0f / 2)

static float within_reach(float x)
{
    if (!(fabsf(x) <= FLT_MAX)) return x;           /* infinities are told apart from the rest, NaN from all */
    return x < -INT4_REACH ? -INT4_REACH : x > INT4_REACH ? INT4_REACH : x;
}

/* Least and largest finite one of x[0..n), within reach; 0 and 0 if there is none. */
static void range_of(const float *x, int n, float *low, float *high)
{
    *low = FLT_MAX, *high = -FLT_MAX;
    for (int i = 0; i < n; i++) {
        if (!(fabsf(x[i]) <= FLT_MAX)) continue;
        if (x[i] < *low) *low = x[i];
        if (x[i] > *high) *high = x[i];
    }
    if (*low > *high) *low = *high = 0;
    *low = within_reach(*low), *high = within_reach(*high);
}

/* The least of f16 that is x or more; 65504 for what is larger. x >= 0 */
static uint32_t f16_above(double x)
{
    const fv__dtype_info *f16 = &fv__dtypes[FV__DTYPE_f16];
    const uint32_t code = f16->encode(x < f16->largest ? x : f16->largest);
    return f16->decode(code) < x && code < 0x7BFF ? code + 1 : code;
}

/* int4: each group has a scale and a zero in f16, chosen so that its least becomes 0 and its
 * largest 15. The scale is no less than 1/1024 of the largest magnitude, so that the zero, too, is
 * known to half a step. A group whose scale is 0 is 0; NaN becomes the 0 of its group. */
static void store_groups(const fv__view *view, int64_t at, const fv__view *pairs, int64_t pair_at,
                         int n, float *x)
{
    const fv__dtype_info *f16 = &fv__dtypes[FV__DTYPE_f16];
    const int group = 2 * n / pairs->width;
    uint16_t *pair = (uint16_t *)pairs->data + pair_at;
    for (int i = 0; i < n; i += group, pair += 2) {
        float low, high;
        range_of(x + i, group, &low, &high);
        const double most = -(double)low > high ? -(double)low : high;
        const double step = ((double)high - low) / 15, least = most / 1024;
        pair[0] = (uint16_t)f16_above(step > least ? step : least);
        const float scale = (float)f16->decode(pair[0]);
        pair[1] = (uint16_t)f16->encode(scale > 0 ? -(double)low / (double)scale : 0);
        const float zero = (float)f16->decode(pair[1]);
        for (int k = i; k < i + group; k++)
            x[k] = !(scale > 0) ? 0 : (x[k] == x[k] ? within_reach(x[k]) / scale : 0) + zero;
    }
    store_row(view, at, n, x);
}

/* What a (token, head) is divided by so that its largest element becomes the largest of the type;
 * never 0, so that reading is safe. */
static float token_scale(fv__dtype dtype, float most)
{
    float reach = (float)fv__dtypes[dtype].largest;
    if (dtype == FV__DTYPE_fp4_e2m1) reach *= (float)fv__dtypes[FV__DTYPE_fp8_e4m3].largest;
    const float scale = most / reach;
    return most == 0 ? 1 : scale < FLT_MIN ? FLT_MIN : scale;
}

static float scale_of(const fv__scale *scale, int head)
{
    switch (scale->kind) {
    case FV__SCALE_TENSOR: return scale->number;
    case FV__SCALE_HEAD: return scale->data[head * scale->stride[0]];
    default: return 1;
    }
}

typedef struct part { /* one of k, k_tail, v of a row and head on its way into the cache */
    const fv__view *from, *to, *block_scale;
    bool is_key;
    float x[ROW];
} part;

static void bring(const fv__append_job *job, part *p, int64_t row, int head, const turns *t)
{
    float in[ROW];
    const fv__view *from = p->from;
    const int64_t at = row * from->stride[0] + head * from->stride[1];
    load_row(from, at, from->width, t ? in : p->x);
    if (t) rotate(&job->rotary, t, from->width, in, p->x);
    if (!job->checked || !narrow(p->to->dtype)) return;
    const int64_t nans = count_nans(p->x, from->width);
    if (nans) fv__fault_add(job->faults, FV_FAULT_VALUE, row, 0, 0, nans);
}

/* A row of 16-bit elements to where the order "tiles" has them. K: the pairs of d of 16 tokens, turned. */
static void scatter_key(const fv__view *to, place where, int head, const char *x)
{
    const place first = { where.page, where.token / 16 * 16, true };
    for (int pair = 0; pair < 16; pair++) {
        char *at = address(to, element(to->stride, first, head) + pair * to->stride[1] + 2 * (where.token % 16));
        for (int d = 0; d < to->width; d += 32) memcpy(at + 2 * d, x + 2 * d + 4 * pair, 4);
    }
}

/* V: beside the elements of the other token of the pair. */
static void scatter_value(const fv__view *to, place where, int head, const char *x)
{
    const place first = { where.page, where.token / 2 * 2, true };
    for (int half = 0; half < 2; half++, x += to->width) {
        char *at = address(to, element(to->stride, first, head) + half * to->stride[1] + where.token % 2);
        for (int d = 0; d < to->width; d += 2) memcpy(at + 2 * d, x + d, 2);
    }
}

static void put_tiled(const part *p, place where, int head, const char *x)
{
    if (p->is_key) scatter_key(p->to, where, head, x);
    else scatter_value(p->to, where, head, x);
}

static void put(const fv__append_job *job, part *p, place where, int head, float scale)
{
    const int n = p->from->width;
    if (scale != 1) divide(p->x, n, scale);
    if (job->tiled) {
        char row[2 * ROW];
        store_row(&(fv__view){ .data = row, .dtype = p->to->dtype }, 0, n, p->x);
        put_tiled(p, where, head, row);
        return;
    }
    const int64_t at = element(p->to->stride, where, head);
    if (p->to->dtype == FV__DTYPE_fp4_e2m1)
        store_blocks(p->to, at, p->block_scale, element(p->block_scale->stride, where, head), n,
                     p->x);
    else if (p->to->dtype == FV__DTYPE_int4)
        store_groups(p->to, at, p->block_scale, element(p->block_scale->stride, where, head), n,
                     p->x);
    else
        store_row(p->to, at, n, p->x);
}

/* One head of K (with its tail, which shares the scale) or of V. t[i]: turns of part i, or NULL. */
static void append_head(const fv__append_job *job, part *parts, int num_parts,
                        const turns *const *t, const fv__scale *scale, int64_t row, place where,
                        int head)
{
    const bool plain = scale->kind == FV__SCALE_NONE;
    if (plain && num_parts == 1 && !t[0] && parts->from->dtype == parts->to->dtype) {
        const fv__view *from = parts->from;
        const int64_t at = row * from->stride[0] + head * from->stride[1];
        if (job->tiled) put_tiled(parts, where, head, address(from, at));
        else copy_row(from, at, parts->to, element(parts->to->stride, where, head), from->width);
        return;
    }
    float by = scale_of(scale, head), most = 0;
    for (int i = 0; i < num_parts; i++) bring(job, &parts[i], row, head, t[i]);
    if (scale->kind == FV__SCALE_TOKEN_HEAD) {
        for (int i = 0; i < num_parts; i++)
            most = largest_of(parts[i].x, parts[i].from->width, most);
        by = token_scale(parts->to->dtype, most);
        ((float *)(uintptr_t)scale->data)[element(scale->stride, where, head)] = by;
    }
    for (int i = 0; i < num_parts; i++) put(job, &parts[i], where, head, by);
}

static bool slot_is_good(const fv__append_job *job, int64_t row, int64_t slot)
{
    if (slot >= 0 && slot < job->num_slots) return true;
    if (slot != -1) fv__fault_add(job->faults, FV_FAULT_SLOT, row, 0, slot, 1);
    return false;
}

static void append_k(const fv__append_job *job, int64_t row, const turns *t)
{
    if (!slot_is_good(job, row, job->slots[row])) return;
    const place where = place_of(job->slots[row], job->page_size);
    const bool tail = job->new_k_tail.data != NULL;
    const turns *const of_part[2] = { tail ? NULL : t, t }; /* the tail turns where there is one */
    part parts[2];
    parts[0].from = &job->new_k, parts[0].to = &job->k, parts[0].block_scale = &job->k_block_scale;
    parts[1].from = &job->new_k_tail, parts[1].to = &job->k_tail, parts[1].block_scale = NULL;
    parts[0].is_key = parts[1].is_key = true;
    for (int h = 0; h < job->num_kv_heads; h++)
        append_head(job, parts, tail ? 2 : 1, of_part, &job->k_scale, row, where, h);
}

static void append_v(const fv__append_job *job, int64_t row)
{
    const int64_t *slots = job->v_slots ? job->v_slots : job->slots;
    if (!slot_is_good(job, row, slots[row])) return;
    const turns *const none = NULL;
    part p;
    p.from = &job->new_v, p.to = &job->v, p.block_scale = &job->v_block_scale, p.is_key = false;
    for (int h = 0; h < job->num_kv_heads; h++)
        append_head(job, &p, 1, &none, &job->v_scale, row, place_of(slots[row], job->page_size), h);
}

void V_NAME(fv__append_rows)(const fv__append_job *job, int64_t first, int64_t last)
{
    turns t;
    const bool turned = job->rotary.dim > 0;
    for (int64_t row = first; row < last; row++) {
        if (turned) make_turns(&job->rotary, job->positions[row], &t);
        append_k(job, row, turned ? &t : NULL);
        if (job->new_v.data) append_v(job, row);
        if (job->q.data && turned)
            rotate_row(&job->rotary, &t, &job->q, &job->q_out, row, job->num_q_heads);
        if (job->q.data && !turned) copy_heads(&job->q, &job->q_out, row, job->num_q_heads);
    }
}

/* ---------------------------------------------------------------------------------------- merge */

static const float *lse_at(const fv__view *lse, int64_t row, int head)
{
    return (const float *)lse->data + row * lse->stride[0] + head * lse->stride[1];
}

/* How many states count, the last of them, and the largest lse. */
static int survey(const fv__merge_job *job, int64_t row, int head, int *last, float *most)
{
    int count = 0;
    *most = -INFINITY;
    *last = 0;
    for (int s = 0; s < job->num_states; s++) {
        const float lse = *lse_at(&job->lse_states[s], row, head);
        if (lse == -INFINITY) continue;
        count++;
        *last = s;
        if (lse > *most) *most = lse;
    }
    return count;
}

/* A row as floats: where it lies when whole vectors can be read there, else a copy. */
static const float *row_of(const fv__view *view, int64_t at, int n, float *copy)
{
    if (view->dtype == FV__DTYPE_f32 && n % V_LANES == 0) return (const float *)view->data + at;
    load_row(view, at, n, copy);
    return copy;
}

/* out = sum of weights * o / sum of weights; returns the sum. */
static float weigh(const fv__merge_job *job, int64_t row, int head, float most, float *out)
{
    float copy[ROW], sum = 0;
    const int n = job->o.width;
    memset(out, 0, (size_t)fv__round_up(n, V_LANES) * sizeof *out);
    for (int s = 0; s < job->num_states; s++) {
        const float lse = *lse_at(&job->lse_states[s], row, head);
        if (lse == -INFINITY) continue;
        const float w = job->base2 ? exp2f(lse - most) : expf(lse - most);
        const fv__view *o = &job->o_states[s];
        const float *x = row_of(o, row * o->stride[0] + head * o->stride[1], n, copy);
        sum += w;
        for (int i = 0; i < n; i += V_LANES)
            v_store(out + i, v_add(v_load(out + i), v_mul(v_load(x + i), v_set(w))));
    }
    const v_f32 inverse = v_set(1 / sum);
    for (int i = 0; i < n; i += V_LANES) v_store(out + i, v_mul(v_load(out + i), inverse));
    return sum;
}

static void merge_head(const fv__merge_job *job, int64_t row, int head)
{
    float out[ROW], most, lse;
    int last;
    const int count = survey(job, row, head, &last, &most), n = job->o.width;
    const fv__view *only = &job->o_states[last];
    const int64_t at = row * job->o.stride[0] + head * job->o.stride[1];
    if (count == 1) {
        const int64_t from = row * only->stride[0] + head * only->stride[1];
        lse = *lse_at(&job->lse_states[last], row, head);
        if (only->dtype != job->o.dtype) {
            load_row(only, from, n, out);
            store_row(&job->o, at, n, out);
        } else {
            copy_row(only, from, &job->o, at, n);
        }
    } else if (count) {
        const float sum = weigh(job, row, head, most, out);
        lse = most + (job->base2 ? log2f(sum) : logf(sum));
        store_row(&job->o, at, n, out);
    } else {
        memset(out, 0, sizeof out);
        lse = -INFINITY;
        store_row(&job->o, at, n, out);
    }
    if (job->lse.data)
        ((float *)job->lse.data)[row * job->lse.stride[0] + head * job->lse.stride[1]] = lse;
}

void V_NAME(fv__merge_rows)(const fv__merge_job *job, int64_t first, int64_t last)
{
    for (int64_t row = first; row < last; row++)
        for (int h = 0; h < job->num_heads; h++) merge_head(job, row, h);
}
