/* SPDX-License-Identifier: Apache-2.0 */
/* attend_out.h -- what becomes of states: merged, kept in slots for whoever arrives last, or written out.
 *
 * A slot is m[unit_heads], l[unit_heads], padding to 16 floats, o[unit_heads][dv_pad], padding: two workers' slots share no line of 64 bytes.
 * merge_states is the only place where two states become one,
 * whether they meet within a piece or across pieces, so that a row's bits do not depend on where it was cut.
 *
 * Part of attend_tmpl.c. */

/* factor[i] = 2^(from[i] - to[i]) with -inf - -inf counted as 0: an empty state weighs nothing and changes nothing. */
static float weight_of(float from, float to)
{
    return from == -infinity ? 0.0f : v_lane(v_exp2_neg(v_set(from - to)), 0);
}

/* (m, l, o) += (pm, pl, po). Merging an empty state leaves every bit as it was; merging into an empty one copies. */
static __attribute__((noinline)) void merge_state(float *m, float *l, float *o, float pm, float pl, const float *po, int dv_pad)
{
    const float top = *m > pm ? *m : pm;
    const float a = weight_of(*m, top), b = weight_of(pm, top);
    if (top == -infinity) return;
    *l = v_lane(v_fma(v_set(*l), v_set(a), v_set(pl * b)), 0);
    *m = top;
    for (int d = 0; d < dv_pad; d += V_LANES) v_store(o + d, v_fma(v_load(o + d), v_set(a), v_load(po + d) * v_set(b)));
}

static int slot_head(int unit_heads) { return (2 * unit_heads + 15) / 16 * 16; }
static int64_t slot_floats(int unit_heads, int dv_pad) { return slot_head(unit_heads) + fv__round_up((int64_t)unit_heads * dv_pad, 16); }

static float *slot_at(const work *w, int64_t slot) { return w->run->partials + slot * slot_floats(w->unit_heads, w->dv_pad); }

static void keep_row(const work *w, int i, int64_t slot)
{
    const int n = w->unit_heads;
    float *at = slot_at(w, slot);
    memcpy(at, w->m + i * n, (size_t)n * sizeof *at);
    memcpy(at + n, w->l + i * n, (size_t)n * sizeof *at);
    memcpy(at + slot_head(n), w->o + (int64_t)i * n * w->dv_pad, (size_t)n * (size_t)w->dv_pad * sizeof *at);
}

/* ---------------------------------------------------------------------------------------------------------- one row */

/* The sinks join the denominator here, once for each row and head. */
static void join_sinks(const work *w, const fv__at *at, float *m, float *l, float *o)
{
    for (int u = 0; u < w->p->num_uses; u++) {
        if (!w->hooks[u]->sink) continue;
        const float sink = w->hooks[u]->sink(w->run->args[u], at) * V_LOG2E;
        if (sink == -infinity) continue;
        const float top = *m > sink ? *m : sink;
        const float a = weight_of(*m, top);
        *l = *l * a + weight_of(sink, top);
        *m = top;
        for (int d = 0; d < w->dv_pad; d += V_LANES) v_store(o + d, v_load(o + d) * v_set(a));
    }
}

/* Base 2 inside; the logarithm's error is that of f32. -inf where nothing was seen. */
static float lse_of(const work *w, float m, float l)
{
    if (!(l > 0)) return l == 0 ? -infinity : m + l;
    const float log2 = v_lane(v_log2(v_set(l)), 0);
    if (w->p->lse_base2) return m + log2;
    return v_lane(v_fma(v_set(m), v_set(V_LN2), v_log(v_set(l))), 0);
}

/* The largest score that the row and head see, through the hooks that ask for it. */
static void write_max(const work *w, const fv__at *at, float m)
{
    for (int u = 0; u < w->p->num_uses; u++) {
        const fv__variant_meta *meta = &w->p->uses[u].variant->meta;
        for (int k = 0; k < meta->num_params && w->hooks[u]->row_max; k++) {
            if (meta->params[k].kind != FV__MAXES) continue;
            const fv_maxes *out = (const fv_maxes *)((const char *)w->run->args[u] + meta->params[k].offset);
            if (out->data) out->data[at->batch_row * out->stride + at->head] = w->hooks[u]->row_max(m * V_LN2, w->run->args[u], at);
        }
    }
}

static void write_head(work *w, const row *r, int head, float m, float l, float *o)
{
    const fv__view *out = &w->run->o, *lse_out = &w->run->lse;
    fv__at at = place_at(w, r, head);
    if (w->has_row_max) write_max(w, &at, m);
    if (w->has_sink) join_sinks(w, &at, &m, &l, o);
    const float lse = w->has_weight || !(lse_out->data || w->has_output) ? 0.0f : lse_of(w, m, l);
    const float factor = w->has_weight ? w->v_factor : l > 0 ? w->v_factor / l : l == 0 ? 0.0f : l;
    /* + 0: a sum that came out as -0 depends on how many empty blocks it met */
    for (int d = 0; d < w->dv_pad; d += V_LANES) v_store(o + d, v_fma(v_load(o + d), v_set(factor), v_set(0.0f)));
    for (int u = 0; u < w->p->num_uses; u++)
        if (w->hooks[u]->output) w->hooks[u]->output(o, w->dv, w->p->lse_base2 ? lse * V_LN2 : lse, w->run->args[u], &at);
    const int64_t h = w->q_head + head;
    pack(w->p->o, out->data, r->batch_row * out->stride[0] + h * out->stride[1], w->dv, o);
    if (lse_out->data) ((float *)lse_out->data)[r->batch_row * lse_out->stride[0] + h * lse_out->stride[1]] = lse;
}

/* ------------------------------------------------------------------------------------------------------------ records */

static int record_of(const work *w, int i)
{
    if (w->piece->record >= 0) return w->piece->record + i;
    return FV__PLAN_ARRAY(w->plan, const int32_t, row_record)[w->rows[i].batch_row] + w->piece->unit;
}

/* All parts of the row have arrived: merges them in order and writes. The states at hand are in slots already and may be overwritten. */
static void merge_record(work *w, const fv__record *record, const row *r)
{
    const int32_t *parts = FV__PLAN_ARRAY(w->plan, const int32_t, parts) + record->part_first;
    const int n = w->unit_heads, dv_pad = w->dv_pad;
    for (int h = 0; h < n; h++) {
        float m = -infinity, l = 0, *o = w->o;
        memset(o, 0, (size_t)dv_pad * sizeof *o);
        for (int p = 0; p < record->num_parts; p++) {
            const float *slot = slot_at(w, parts[p]);
            merge_state(&m, &l, o, slot[h], slot[n + h], slot + slot_head(n) + (int64_t)h * dv_pad, dv_pad);
        }
        write_head(w, r, h, m, l, o);
    }
}

/* Says that this piece's part of every row is in its slot; merges the rows for which it was the last. */
static void arrive(work *w)
{
    for (int i = 0; i < w->num_rows; i++) {
        const int at = record_of(w, i);
        const fv__record *record = &FV__PLAN_ARRAY(w->plan, const fv__record, records)[at];
        if (__atomic_add_fetch(&w->run->tickets[at], 1, __ATOMIC_ACQ_REL) < record->arrivals) continue;
        __atomic_store_n(&w->run->tickets[at], 0, __ATOMIC_RELAXED);
        merge_record(w, record, &w->rows[i]);
    }
}

/* ------------------------------------------------------------------------------------------------------------ a piece */

/* Invariant mode: a chunk of keys is done. */
static void end_chunk(work *w, int chunk)
{
    if (w->piece->slot >= 0) {
        for (int i = 0; i < w->num_rows; i++) keep_row(w, i, (int64_t)w->piece->slot + (int64_t)chunk * w->num_rows + i);
    } else {
        for (int i = 0; i < w->packed; i++)
            merge_state(&w->m_all[i], &w->l_all[i], w->o_all + (int64_t)i * w->dv_pad, w->m[i], w->l[i], w->o + (int64_t)i * w->dv_pad, w->dv_pad);
    }
}

static void write_rows(work *w, const float *m, const float *l, float *o)
{
    for (int i = 0; i < w->num_rows; i++)
        for (int h = 0; h < w->unit_heads; h++) {
            const int at = i * w->unit_heads + h;
            write_head(w, &w->rows[i], h, m[at], l[at], o + (int64_t)at * w->dv_pad);
        }
}

static void end_piece(work *w)
{
    const bool chunks = w->plan->invariant;
    if (w->piece->slot < 0) {
        write_rows(w, chunks ? w->m_all : w->m, chunks ? w->l_all : w->l, chunks ? w->o_all : w->o);
        return;
    }
    for (int i = 0; !chunks && i < w->num_rows; i++) keep_row(w, i, (int64_t)w->piece->slot + i);
    arrive(w);
}
