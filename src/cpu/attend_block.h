/* SPDX-License-Identifier: Apache-2.0 */
/* attend_block.h -- a block of keys: who sees which, where they lie, their elements as floats.
 *
 * Order matters: first the masks (from indices alone), then page ids and addresses of the keys that some row sees. Nothing is known or read of
 * the others: their table entries may be stale and their memory may hold NaN.
 *
 * Part of attend_tmpl.c. */

/* Bits [lo, hi) of 64. */
static uint64_t bit_range(int64_t lo, int64_t hi)
{
    lo = fv__max64(lo, 0);
    hi = fv__min64(hi, 64);
    if (lo >= hi) return 0;
    return (hi - lo == 64 ? ~(uint64_t)0 : ((uint64_t)1 << (hi - lo)) - 1) << lo;
}

static int lowest(uint64_t bits) { return __builtin_ctzll(bits); }
static int above_highest(uint64_t bits) { return 64 - __builtin_clzll(bits); }

/* ------------------------------------------------------------------------------------------------------------ faults */

static void fault(const work *w, fv_fault what, int64_t slot, int64_t value)
{
    fv__faults *f = w->run->faults;
    if (!f || __atomic_fetch_add(&f->count, 1, __ATOMIC_RELAXED) != 0) return;
    f->request = w->rows[0].request;
    f->slot = slot;
    f->value = value;
    __atomic_store_n(&f->what, what, __ATOMIC_RELEASE);
}

/* -------------------------------------------------------------------------------------------------------- positions */

static void place_keys(const work *w, block *b, int64_t first)
{
    const fv__segment *s = w->segment;
    const int32_t size = w->plan->page_size;
    b->consecutive = s->page_positions < 0 || size == 0;
    b->origin = INT32_MIN;
    if (b->consecutive) {
        for (int i = 0; i < KEYS; i++) b->k_pos[i] = (int32_t)(s->first_position + first + i);
        return;
    }
    const int32_t *positions = FV__PLAN_ARRAY(w->plan, const int32_t, page_positions) + s->page_positions;
    int64_t page = first / size, offset = first % size;
    for (int i = 0; i < KEYS; i++) {
        b->k_pos[i] = i < b->n ? positions[page] + (int32_t)offset : 0;
        if (++offset == size) {
            offset = 0;
            page++;
        }
    }
}

/* key[] counts in the row's own request. */
static void count_keys(block *b, int32_t origin)
{
    if (b->origin == origin) return;
    for (int i = 0; i < KEYS; i++) b->key[i] = b->k_pos[i] - origin;
    b->origin = origin;
}

static fv__at place_block(const work *w, block *b, const row *r, int head)
{
    fv__at at = place_at(w, r, head);
    count_keys(b, r->origin);
    at.key = b->key;
    at.k_pos = b->k_pos;
    at.consecutive = b->consecutive;
    return at;
}

/* ------------------------------------------------------------------------------------------------------------- masks */

static uint64_t bounded_keys(const block *b, const row *r)
{
    if (b->consecutive) return bit_range((int64_t)r->first - b->k_pos[0], fv__min64((int64_t)r->last - b->k_pos[0] + 1, b->n));
    uint64_t bits = 0;
    for (int i = 0; i < KEYS; i++) bits |= (uint64_t)(b->k_pos[i] >= r->first && b->k_pos[i] <= r->last) << i;
    return bits & bit_range(0, b->n);
}

static uint64_t refine(const work *w, block *b, const row *r, int head, uint64_t bits)
{
    const fv__at at = place_block(w, b, r, head);
    for (int u = 0; u < w->p->num_uses && bits; u++)
        if (w->hooks[u]->visible) bits &= w->hooks[u]->visible(b->n, w->run->args[u], &at);
    return bits;
}

/* Positions of consecutive keys that every row sees by its bounds, where bounds are all there is. */
static bool all_seen(const work *w, const block *b)
{
    if (w->refine_any) return false;
    if (w->first_all == INT32_MIN && w->last_all == INT32_MAX) return true;
    return b->consecutive && b->k_pos[0] >= w->first_all && b->k_pos[b->n - 1] <= w->last_all;
}

static void mask_rows(const work *w, block *b)
{
    b->seen = bit_range(0, b->n);
    b->whole = all_seen(w, b);
    if (b->whole) return;
    b->seen = 0;
    for (int i = 0; i < w->num_rows; i++) {
        const row *r = &w->rows[i];
        const uint64_t bits = bounded_keys(b, r);
        uint64_t own = bits;
        for (int h = 0; h < w->unit_heads; h++) {
            if (bits && r->refine && (h == 0 || w->by_head)) own = refine(w, b, r, h, bits);
            b->mask[i * w->unit_heads + h] = own;
            b->seen |= own;
        }
    }
    for (int i = w->packed; i < w->padded; i++) b->mask[i] = 0;
}

/* Takes keys away that turned out to be nowhere. */
static void drop_keys(const work *w, block *b, uint64_t bad)
{
    if (b->whole)
        for (int i = 0; i < w->padded; i++) b->mask[i] = i < w->packed ? b->seen : 0;
    b->whole = false;
    b->seen &= ~bad;
    for (int i = 0; i < w->packed; i++) b->mask[i] &= ~bad;
}

/* --------------------------------------------------------------------------------------------------------- addresses */

/* Where one token lies: of a page, or ragged (offset 0). */
typedef struct token {
    int64_t page, offset;
} token;

static int64_t element_of(const fv__view *v, token t, int64_t head, bool paged)
{
    return paged ? t.page * v->stride[0] + t.offset * v->stride[1] + head * v->stride[2] : t.page * v->stride[0] + head * v->stride[1];
}

static int64_t scale_of(const fv__scale *s, token t, int64_t head, bool paged)
{
    if (s->kind != FV__SCALE_TOKEN_HEAD) return 0;
    return paged ? t.page * s->stride[0] + t.offset * s->stride[1] + head * s->stride[2] : t.page * s->stride[0] + head * s->stride[1];
}

static void set_k(const work *w, block *b, int i, token t, bool paged)
{
    const fv__run *r = w->run;
    b->k_at[i] = element_of(&r->k, t, w->kv_head, paged);
    if (r->k_tail.data) b->k_tail_at[i] = element_of(&r->k_tail, t, w->kv_head, paged);
    if (r->k_block_scale.data) b->k_group_at[i] = element_of(&r->k_block_scale, t, w->kv_head, paged);
    b->k_scale_at[i] = scale_of(&r->k_scale, t, w->kv_head, paged);
}

static void set_v(const work *w, block *b, int i, token t, bool paged)
{
    const fv__run *r = w->run;
    b->v_at[i] = element_of(&r->v, t, w->kv_head, paged);
    if (r->v_block_scale.data) b->v_group_at[i] = element_of(&r->v_block_scale, t, w->kv_head, paged);
    b->v_scale_at[i] = scale_of(&r->v_scale, t, w->kv_head, paged);
}

static int64_t id_at(const fv__ids *ids, int64_t entry)
{
    const int64_t i = entry * ids->stride;
    return ids->is64 ? ((const int64_t *)ids->data)[i] : ((const int32_t *)ids->data)[i];
}

/* The id of the segment's page `page`, or -1 and a record of what is wrong with it. */
static int64_t page_id(const work *w, const fv__ids *ids, int64_t page)
{
    const int64_t entry = w->segment->table + page;
    if (entry < 0 || entry >= w->plan->table_entries) {
        fault(w, FV_FAULT_LENGTH, page, entry);
        return -1;
    }
    const int64_t id = id_at(ids, entry);
    if (id >= 0 && id < w->plan->num_pages) return id;
    fault(w, FV_FAULT_PAGE_ID, page, id);
    return -1;
}

static uint64_t find_paged(const work *w, block *b, int64_t first)
{
    const fv__run *r = w->run;
    const int32_t size = w->plan->page_size;
    const bool same = r->v_ids.data == r->ids.data;
    uint64_t bad = 0;
    int64_t page = first / size, offset = first % size;
    for (int i = 0; i < b->n; page++, offset = 0) {
        const int n = (int)fv__min64(size - offset, b->n - i);
        const uint64_t here = b->seen & bit_range(i, i + n);
        const int64_t k_id = here ? page_id(w, &r->ids, page) : -1;
        const int64_t v_id = same || k_id < 0 ? k_id : page_id(w, &r->v_ids, page);
        if (k_id < 0 || v_id < 0) bad |= here;
        for (int k = 0; k < n && v_id >= 0; k++) {
            if (!(here >> (i + k) & 1)) continue;
            set_k(w, b, i + k, (token){ k_id, offset + k }, true);
            set_v(w, b, i + k, (token){ v_id, offset + k }, true);
        }
        i += n;
    }
    return bad;
}

/* Elements of a key are all that is to be found: no tail, no scales beside them. */
static bool only_elements(const fv__run *r)
{
    return !r->k_tail.data && !r->k_block_scale.data && !r->v_block_scale.data && r->k_scale.kind != FV__SCALE_TOKEN_HEAD
           && r->v_scale.kind != FV__SCALE_TOKEN_HEAD;
}

static uint64_t find_ragged(const work *w, block *b, int64_t first)
{
    const fv__run *r = w->run;
    const int64_t extent = fv__min64(r->k.extent, r->v.extent), begin = w->segment->table + first;
    uint64_t bad = 0;
    if (begin >= 0 && begin + b->n <= extent && only_elements(r)) {
        const int64_t k = element_of(&r->k, (token){ begin, 0 }, w->kv_head, false), v = element_of(&r->v, (token){ begin, 0 }, w->kv_head, false);
        for (int i = 0; i < KEYS; i++) {
            b->k_at[i] = k + i * r->k.stride[0];
            b->v_at[i] = v + i * r->v.stride[0];
        }
        return 0;
    }
    for (int i = 0; i < b->n; i++) {
        const int64_t t = w->segment->table + first + i;
        if (!(b->seen >> i & 1)) continue;
        if (t < 0 || t >= extent) {
            fault(w, FV_FAULT_LENGTH, 0, t);
            bad |= (uint64_t)1 << i;
            continue;
        }
        set_k(w, b, i, (token){ t, 0 }, false);
        set_v(w, b, i, (token){ t, 0 }, false);
    }
    return bad;
}

/* Keys [first, first + n) of the segment. False: no row sees any of them, and the block is a no-op. */
static bool find_block(const work *w, block *b, int64_t first, int n)
{
    b->first = first;
    b->n = n;
    place_keys(w, b, first);
    mask_rows(w, b);
    if (!b->seen) return false;
    const uint64_t bad = w->plan->page_size ? find_paged(w, b, first) : find_ragged(w, b, first);
    if (bad) drop_keys(w, b, bad);
    return b->seen != 0;
}

/* The blocks of a piece, from first to last. */
typedef struct walk {
    int64_t key, end;                   /* within the segment */
    int64_t origin;                     /* blocks end where origin + key is a multiple of KEYS */
} walk;

/* Blocks count from the first key of the piece; in the invariant mode from position 0, whatever the segments and pieces. */
static walk walk_blocks(const work *w, const fv__piece *piece)
{
    const int64_t origin = w->plan->invariant ? fv__plan_origin(w->plan, w->segment) : -(int64_t)piece->key_first % KEYS + KEYS;
    return (walk){ piece->key_first, (int64_t)piece->key_first + piece->num_keys, origin };
}

/* The next block that some row sees; NULL: there is none. */
static block *next_block(const work *w, block *b, walk *x)
{
    while (x->key < x->end) {
        const int64_t at = x->key;
        x->key = fv__min64(x->end, (x->origin + at) / KEYS * KEYS + KEYS - x->origin);
        if (find_block(w, b, at, (int)(x->key - at))) return b;
    }
    return NULL;
}

static void shift(int64_t *at, int64_t by)
{
    for (int i = 0; i < KEYS; i++) at[i] += by;
}

/* The same keys of another kv head. */
static void shift_block(const work *w, block *b, int heads)
{
    const fv__run *r = w->run;
    const int axis = w->plan->page_size ? 2 : 1;
    if (!heads) return;
    if (!w->k_direct || !w->v_direct) {
        shift(b->k_at, heads * r->k.stride[axis]);
        shift(b->v_at, heads * r->v.stride[axis]);
    }
    if (r->k_tail.data) shift(b->k_tail_at, heads * r->k_tail.stride[axis]);
    if (r->k_scale.kind == FV__SCALE_TOKEN_HEAD) shift(b->k_scale_at, heads * r->k_scale.stride[axis]);
    if (r->v_scale.kind == FV__SCALE_TOKEN_HEAD) shift(b->v_scale_at, heads * r->v_scale.stride[axis]);
    if (r->k_block_scale.data) shift(b->k_group_at, heads * r->k_block_scale.stride[axis]);
    if (r->v_block_scale.data) shift(b->v_group_at, heads * r->v_block_scale.stride[axis]);
}

#include "attend_pages.h"

/* ----------------------------------------------------------------------------------------------------------- elements */

static float e4m3(const void *base, int64_t i)
{
    return v_lane(load_part(FV__DTYPE_fp8_e4m3, base, i, 1), 0);
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
    const v_f32 low = V_PICK(y[0], y[1], JOIN_LOW), high = V_PICK(y[0], y[1], JOIN_HIGH);
    y[0] = low;
    y[1] = high;
}
#endif

/* fp4: each 16 elements have a scale of their own. */
static void scale_groups(const fv__view *scales, int64_t at, int n, float *x)
{
    for (int g = 0; g * 16 < n; g++) {
        const float factor = e4m3(scales->data, at + g);
        for (int d = g * 16; d < n && d < g * 16 + 16; d++) x[d] *= factor;
    }
}

/* int4: each group of a row of `dim` has its scale and its zero. The first n elements; n and groups are whole pairs of vectors. */
static void unpack_groups(const fv__view *pairs, int64_t pair_at, const char *base, int dim, int n, float *out)
{
    const int group = 2 * dim / pairs->width;
    float pair[2 * (FV__MAX_DIM / 32) + V_LANES];          /* scale, zero of each group */
    unpack_as(FV__DTYPE_f16, pairs->data, pair_at, pairs->width, pair);
    for (int d = 0; d < n; d += group) {
        const v_f32 scale = v_set(pair[d / group * 2]), zero = v_set(pair[d / group * 2 + 1]);
        for (int i = d; i < d + group && i < n; i += 2 * V_LANES) {
            v_f32 y[2];
            v_split_int4(base + i / 2, &y[0], &y[1]);
            join_parts(y);
            v_store(out + i, (y[0] - zero) * scale);
            v_store(out + i + V_LANES, (y[1] - zero) * scale);
        }
    }
}

static void scale_line(float *x, int n, float factor)
{
    for (int d = 0; d < n; d += V_LANES) v_store(x + d, v_load(x + d) * factor);
}

/* The factor of key i by its token, where elements are not scaled one by one. */
static float token_scale(const fv__scale *s, const int64_t *at, int i)
{
    return s->kind == FV__SCALE_TOKEN_HEAD ? s->data[at[i]] : 1.0f;
}

/* A key hook must not know of rows: which ones a key is read for depends on how the work was cut. */
static fv__at place_key(const work *w, block *b, int i)
{
    fv__at at = place_block(w, b, &w->rows[0], 0);
    at.head = w->kv_head * w->p->group;
    at.row = at.batch_row = at.q_pos = at.num_rows = at.num_keys = 0;
    at.key += i;
    at.k_pos += i;
    return at;
}

static void fetch_key(work *w, block *b, int i, float *out)
{
    const fv__run *r = w->run;
    const int tail = w->p->qk_tail, head = w->dk - tail;
    memset(out + w->dk_pad - V_LANES, 0, V_LANES * sizeof *out);
    if (w->p->k == FV__DTYPE_int4) unpack_groups(&r->k_block_scale, b->k_group_at[i], r->k.data + b->k_at[i] / 2, w->dk, w->dk, out);
    else unpack(w->p->k, k_base(w), k_places(w, b)[i], head, out);
    if (tail) {
        unpack(w->p->k, r->k_tail.data, b->k_tail_at[i], tail, w->line);
        memcpy(out + head, w->line, (size_t)tail * sizeof *out);
    }
    if (w->p->k == FV__DTYPE_fp4_e2m1) scale_groups(&r->k_block_scale, b->k_group_at[i], w->dk, out);
    if (!w->has_key) return;
    scale_line(out, w->dk_pad, constant_scale(w, &r->k_scale) * token_scale(&r->k_scale, b->k_scale_at, i));
    const fv__at at = place_key(w, b, i);
    for (int u = 0; u < w->p->num_uses; u++)
        if (w->hooks[u]->key) w->hooks[u]->key(out, w->dk, r->args[u], &at);
}

static void fetch_value(work *w, block *b, int i, float *out)
{
    const fv__run *r = w->run;
    memset(out + w->dv_pad - V_LANES, 0, V_LANES * sizeof *out);
    if (w->p->v == FV__DTYPE_int4)
        unpack_groups(&r->v_block_scale, b->v_group_at[i], r->v.data + b->v_at[i] / 2, w->p->v_in_k ? w->dk : w->dv, w->dv, out);
    else if (w->p->v_in_k) {            /* may reach into the tail of K: unpacked as one row */
        const int head = w->dk - w->p->qk_tail, tail = w->dv - head;
        unpack(w->p->k, r->k.data, b->k_at[i], tail > 0 ? head : w->dv, out);
        if (tail > 0) {
            unpack(w->p->k, r->k_tail.data, b->k_tail_at[i], tail, w->line);
            memcpy(out + head, w->line, (size_t)tail * sizeof *out);
        }
    } else
        unpack(w->p->v, v_base(w), v_places(w, b)[i], w->dv, out);
    if (w->p->v == FV__DTYPE_fp4_e2m1) scale_groups(&r->v_block_scale, b->v_group_at[i], w->dv, out);
    if (!w->has_value) return;
    scale_line(out, w->dv_pad, constant_scale(w, &r->v_scale) * token_scale(&r->v_scale, b->v_scale_at, i));
    const fv__at at = place_key(w, b, i);
    for (int u = 0; u < w->p->num_uses; u++)
        if (w->hooks[u]->value) w->hooks[u]->value(out, w->dv, r->args[u], &at);
}

/* Is a row of K (V) its elements and nothing else, in one place? */
static bool is_plain(const work *w, bool keys)
{
    const fv__run *r = w->run;
    if (keys) return !w->p->qk_tail && !w->has_key && !r->k_block_scale.data;
    return !w->p->v_in_k && !w->has_value && !r->v_block_scale.data;
}

/* Keys [first, end) of the block as rows of dk_pad floats. Rows of zeros stand for keys that nobody sees: their weight is 0, and 0 times what lies
 * there might be NaN. */
static void fetch_keys(work *w, block *b, int first, int end)
{
    const uint64_t which = b->seen & bit_range(0, b->n);
    if (w->tiled) untile_keys(w, b);
    if (is_plain(w, true)) {
        const unpacking x = { k_base(w), k_places(w, b), which, first, end, w->dk, w->k, w->dk_pad };
        unpack_rows(w->p->k, &x);
        return;
    }
    for (int i = first; i < end; i++) {
        float *out = w->k + (int64_t)i * w->dk_pad;
        if (which >> i & 1) fetch_key(w, b, i, out);
        else memset(out, 0, (size_t)w->dk_pad * sizeof *out);
    }
}

static void fetch_values(work *w, block *b, int first, int end)
{
    const uint64_t which = b->seen & bit_range(0, b->n);
    if (w->tiled) untile_values(w, b);
    if (is_plain(w, false)) {
        const unpacking x = { v_base(w), v_places(w, b), which, first, end, w->dv, w->v, w->dv_pad };
        unpack_rows(w->p->v, &x);
        return;
    }
    for (int i = first; i < end; i++) {
        float *out = w->v + (int64_t)i * w->dv_pad;
        if (which >> i & 1) fetch_value(w, b, i, out);
        else memset(out, 0, (size_t)w->dv_pad * sizeof *out);
    }
}

#if V_LANES == 16
/* Words 0..3, 8..11, 16..19, 24..27 of a, each beside that of b (at: 0), or the others (4). */
typedef uint16_t half_words __attribute__((vector_size(64)));
#define PAIRS_FROM(at, i) (at) + (i), 32 + (at) + (i)
#define PAIRS_OF_4(at) PAIRS_FROM(at, 0), PAIRS_FROM(at, 1), PAIRS_FROM(at, 2), PAIRS_FROM(at, 3)
#define PAIR_WORDS(a, b, at) __builtin_shufflevector(a, b, PAIRS_OF_4(at), PAIRS_OF_4(8 + (at)), PAIRS_OF_4(16 + (at)), PAIRS_OF_4(24 + (at)))
#endif

/* ---------------------------------------------------------------------------------------------------------- asking ahead
 * Rows whose memory will be wanted soon, to be asked for a few at a time between multiplications: memory answers while the machine multiplies. */
typedef struct asking {
    const char *rows[KEYS];
    int at, end, bytes;
} asking;

/* Asks for the lines of `bytes` at p. It may be anywhere: this never faults. */
VFN void ask(const char *p, int bytes)
{
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

VFN void ask_rows(asking *a, int n)
{
    for (; n > 0 && a->at < a->end; n--) ask(a->rows[a->at++], a->bytes);
}

/* The seen rows of K (V) in a block; none of a NULL block. */
static void plan_asking(const work *w, const block *b, bool keys, asking *out)
{
    const fv__view *v = keys ? &w->run->k : &w->run->v;
    const int bits = bits_as(keys ? w->p->k : w->p->v);
    out->at = out->end = 0;
    out->bytes = (int)((int64_t)v->width * bits / 8);
    for (int place = 0; b && place < KEYS; place++) {
        const int key = place % STREAMS * (KEYS / STREAMS) + place / STREAMS;
        if (b->seen >> key & 1) out->rows[out->end++] = v->data + (keys ? b->k_at : b->v_at)[key] * bits / 8;
    }
}
