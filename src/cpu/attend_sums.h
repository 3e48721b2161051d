/* SPDX-License-Identifier: Apache-2.0 */
/* attend_sums.h -- the second pass of FV_KEY_SUM: how much weight each key got, from scores made once more and the lse that the first pass wrote.
 *
 * Columns of the output are the keys of all requests, one request after another. A part owns a range of columns for every kv head, and walks all
 * segments in order for it, so that each sum is made by one thread in one order: rows of a tile from zero, then tile by tile.
 *
 * Part of attend_tmpl.c. */

typedef struct summing {
    work *w;
    const fv__cpu_hooks *hooks;
    const void *args;                   /* of the variant that sums */
    fv_sums out;
    int64_t first, end;                 /* columns that this part owns */
    int32_t request;                    /* whose first column is known */
    int64_t base;
} summing;

static int64_t base_of(summing *x, int32_t request)
{
    const fv__request *requests = FV__PLAN_ARRAY(x->w->plan, const fv__request, requests);
    for (; x->request < request; x->request++) x->base += requests[x->request].num_keys;
    for (; x->request > request; x->request--) x->base -= requests[x->request - 1].num_keys;
    return x->base;
}

/* The base-2 lse of a packed row, +inf where the row saw nothing: then every weight is 0. */
static float lse_at(const work *w, int packed)
{
    const fv__view *v = &w->run->lse;
    const row *r = &w->rows[packed / w->unit_heads];
    const int64_t head = w->q_head + packed % w->unit_heads;
    const float lse = ((const float *)v->data)[r->batch_row * v->stride[0] + head * v->stride[1]];
    if (lse == -infinity) return infinity;
    return w->p->lse_base2 ? lse : lse * V_LOG2E;
}

/* Adds sums[] of the block's keys, as the request counts them, to the columns that are ours. */
static void add_sums(summing *x, const row *r, const block *b, const float *sums)
{
    const int64_t base = base_of(x, r->request);
    float *out = x->out.data + x->w->kv_head * x->out.stride;
    for (int i = 0; i < b->n; i++) {
        const int64_t key = (int64_t)b->k_pos[i] - r->origin, column = base + key;
        if (b->seen >> i & 1 && key >= 0 && key < r->num_keys && column >= x->first && column < x->end) out[column] += sums[i];
    }
}

/* One packed row's weights through the hook, added to sums. */
static void sum_row(summing *x, block *b, const chunk *c, int packed, float *sums)
{
    work *w = x->w;
    const float *s = w->s + (packed - c->first);
    float line[KEYS + SLACK] = { 0 };
    const uint64_t seen = b->whole ? b->seen : b->mask[packed];
    const v_f32 lse = v_set(lse_at(w, packed));
    for (int key = c->key_first; key < c->key_end; key++) line[key] = s[(int64_t)key * c->rows];
    for (int key = 0; key < KEYS; key += V_LANES)
        v_store(line + key, v_select(mask_bits(seen, key), v_exp2_neg(v_load(line + key) * v_set(w->to_base2) - lse), v_set(0.0f)));
    const fv__at at = place_block(w, b, &w->rows[packed / w->unit_heads], packed % w->unit_heads);
    x->hooks->key_sum(line, b->n, x->args, &at);
    for (int key = 0; key < KEYS; key += V_LANES)
        v_store(sums + key, v_load(sums + key) + v_select(mask_bits(seen, key), v_load(line + key), v_set(0.0f)));
}

static void sum_chunk(summing *x, block *b, chunk *c, float *sums)
{
    work *w = x->w;
    asking none = { .end = 0 };
    if (!enter_chunk(b, c, &none)) return;
    scores(w, c);
    if (w->run->k_scale.kind == FV__SCALE_TOKEN_HEAD && !w->has_key) scale_tokens(w, b, c);
    if (w->has_score) hook_chunk(w, b, c);
    for (int i = 0; i < c->rows && c->first + i < w->packed; i++) {
        const int packed = c->first + i;
        sum_row(x, b, c, packed, sums);
        const bool last = i + 1 == c->rows || packed + 1 == w->packed || w->rows[(packed + 1) / w->unit_heads].request != w->rows[packed / w->unit_heads].request;
        if (!last) continue;
        add_sums(x, &w->rows[packed / w->unit_heads], b, sums);
        memset(sums, 0, KEYS * sizeof *sums);
    }
}

/* Does any row's column for these keys lie in our range? */
static bool touches(summing *x, int64_t key, int n)
{
    const work *w = x->w;
    if (w->segment->page_positions >= 0) return true;
    for (int i = 0; i < w->num_rows; i++) {
        const row *r = &w->rows[i];
        if (i > 0 && r->request == w->rows[i - 1].request) continue;
        const int64_t column = base_of(x, r->request) + w->segment->first_position + key - r->origin;
        if (column < x->end && column + n > x->first) return true;
    }
    return false;
}

static void sum_tile(summing *x, const fv__piece *piece)
{
    work *w = x->w;
    begin_piece(w, piece);
    load_many(w);
    for (int64_t key = 0; key < piece->num_keys; key += KEYS) {
        float sums[KEYS + SLACK] = { 0 };
        block *b = &w->blocks[0];
        const int n = (int)fv__min64(KEYS, piece->num_keys - key);
        if (!touches(x, key, n) || !find_block(w, b, key, n)) continue;
        fetch_keys(w, b, down(lowest(b->seen)), up(above_highest(b->seen)));
        for (int at = 0; at < w->padded; at += CHUNK) {
            chunk c = chunk_at(w, at);
            sum_chunk(x, b, &c, sums);
        }
    }
}

static void sum_segment(summing *x, int32_t segment, int tile_rows)
{
    const fv__segment *s = &FV__PLAN_ARRAY(x->w->plan, const fv__segment, segments)[segment];
    for (int unit = s->unit_first; unit < s->unit_first + s->num_units; unit++)
        for (int first = 0; first < s->num_rows; first += tile_rows) {
            const fv__piece piece = { .segment = segment, .row_first = first, .num_rows = fv__min32(tile_rows, s->num_rows - first), .unit = unit,
                                      .num_keys = s->num_keys, .slot = -1, .record = -1 };
            sum_tile(x, &piece);
        }
}

/* The variant that sums and where to; false: there is none. */
static bool find_sums(summing *x)
{
    const fv__problem *p = x->w->p;
    for (int u = 0; u < p->num_uses; u++) {
        const fv__variant_meta *meta = &p->uses[u].variant->meta;
        x->hooks = x->w->hooks[u];
        x->args = x->w->run->args[u];
        for (int k = 0; k < meta->num_params && x->hooks->key_sum; k++) {
            if (meta->params[k].kind != FV__SUMS) continue;
            memcpy(&x->out, (const char *)x->args + meta->params[k].offset, sizeof x->out);
            return x->out.data != NULL;
        }
    }
    return false;
}

static void sum_keys(work *w, const fv__kernel_shape *shape, int part, int num_parts)
{
    summing x = { .w = w };
    if (!find_sums(&x)) return;
    const int64_t columns = base_of(&x, w->plan->num_requests);
    x.first = columns * part / num_parts;
    x.end = columns * (part + 1) / num_parts;
    for (int64_t g = 0; g < w->p->num_kv_heads; g++) memset(x.out.data + g * x.out.stride + x.first, 0, (size_t)(x.end - x.first) * sizeof(float));
    for (int32_t s = 0; s < w->plan->num_segments && x.first < x.end; s++) sum_segment(&x, s, shape->max_packed / shape->unit_heads);
}
