/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_props.c -- what must hold beyond the rows of a file.
 *
 * Random rows: shapes, types and rules drawn from a seed and written as a case row, so that a row
 * that fails can be kept, cut down and run again. Properties of the invariant mode: a request has
 * the same bits alone, in another order and company, on other pages, in other splits (batch), and a
 * row of a prefill has those of its decode.
 */
#include "checkattn.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------------------- the invariant mode */

__attribute__((format(printf, 2, 3)))
static bool judge(result *r, const char *format, ...)
{
    va_list args;

    r->verdict = FAIL;
    va_start(args, format);
    vsnprintf(r->text, sizeof r->text, format, args);
    va_end(args);
    return false;
}

typedef struct bits {
    uint64_t o, lse;
} bits;

static bool same(bits a, bits b)
{
    return a.o == b.o && a.lse == b.lse;
}

/* Runs these slices and hashes groups of rows: group i has count[i] rows. */
static bool run_slices(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way,
                       const slice *slices, int n, const int64_t *count, int groups, bits *out,
                       result *r)
{
    setup s;
    bool ok = setup_make(&s, sh, st, way, slices, n);

    if (!ok) {
        r->verdict = NOT_RUN;
        snprintf(r->text, sizeof r->text, "%s", s.why);
    }
    ok = ok && run_setup(ctx, &s, 0, r);
    for (int64_t i = 0, at = 0; ok && i < groups; at += count[i++])
        hash_rows(&s, at, at + count[i], &out[i].o, &out[i].lse);
    setup_free(&s);
    return ok;
}

static int32_t next_in(const case_ints *list, int32_t x)
{
    for (int64_t i = 0; i < list->n; i++)
        if (list->at[i] == x)
            return list->at[(i + 1) % list->n];
    return list->at[0];
}

/* Everything that may change without a change of bits. */
static case_way other_way(const case_row *row, const case_way *way)
{
    case_way o = *way;
    int *a = o.axis;

    a[CASE_AXIS_SPLITS] = next_in(&row->splits, a[CASE_AXIS_SPLITS]);
    a[CASE_AXIS_ROOM] = !a[CASE_AXIS_ROOM];
    if (a[CASE_AXIS_MEM] == CASE_MEM_PAGED) {
        if (!row->block_map.n)
            a[CASE_AXIS_PAGE] = next_in(&row->page, a[CASE_AXIS_PAGE]);
        a[CASE_AXIS_TABLE] = (a[CASE_AXIS_TABLE] + 1) % (CASE_TABLE_2D_ROWS + 1);
    } else {
        a[CASE_AXIS_TABLE] =
            a[CASE_AXIS_TABLE] == CASE_TABLE_TIGHT ? CASE_TABLE_SLACK : CASE_TABLE_TIGHT;
    }
    return o;
}

/* The row's requests backwards, each of them twice; then each of the first ones alone. */
static bool check_batch(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way,
                        slice *slices, int64_t *count, bits *want, bits *got, result *r)
{
    const case_row *row = sh->row;
    const case_way other = other_way(row, way);
    const int n = row->num_requests;

    for (int i = 0; i < n; i++) {
        slices[i] = whole_slice(row, i);
        count[i] = row->q.at[i];
    }
    if (!run_slices(ctx, sh, st, way, slices, n, count, n, want, r))
        return false;
    for (int i = 0; i < 2 * n; i++) {
        slices[i] = whole_slice(row, n - 1 - i / 2);
        count[i] = row->q.at[n - 1 - i / 2];
    }
    if (!run_slices(ctx, sh, st, &other, slices, 2 * n, count, 2 * n, got, r))
        return false;
    for (int i = 0; i < 2 * n; i++)
        if (!same(got[i], want[slices[i].request]))
            return judge(r, "request %d has other bits in another batch (as request %d of %d)",
                         slices[i].request, i, 2 * n);
    for (int i = 0; i < n && i < 3; i++) {
        const slice alone = whole_slice(row, i);
        const int64_t rows = row->q.at[i];
        if (!run_slices(ctx, sh, st, &other, &alone, 1, &rows, 1, got, r))
            return false;
        if (!same(got[0], want[i]))
            return judge(r, "request %d has other bits when it is alone", i);
    }
    return true;
}

/* The slice that decodes row i of a request: one row, and no key that causality hides from it. */
static slice decode_slice(const case_row *row, int request, int64_t i)
{
    const int64_t n = row->kv.at[request], p = n - row->q.at[request] + i;
    int64_t hi = n;

    if (row->causal && !row->bidir.at)
        hi = p < 0 ? 0 : p + 1 < n ? p + 1 : n;
    return (slice){ request, 0, hi, i, i + 1 };
}

enum { DECODED = 4 };                   /* rows of each request that are decoded */

/* First, last and two rows between of every request, as a batch of decodes. */
static bool check_decode(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way,
                         slice *slices, int64_t *count, bits *want, bits *got, result *r)
{
    const case_row *row = sh->row;
    const case_way other = other_way(row, way);
    int n = 0;

    for (int i = 0; i < row->num_requests; i++)
        slices[i] = whole_slice(row, i);
    for (int64_t i = 0; i < row->total_q; i++)
        count[i] = 1;
    if (!run_slices(ctx, sh, st, way, slices, row->num_requests, count, (int)row->total_q, want, r))
        return false;
    for (int q = 0; q < row->num_requests; q++)
        for (int64_t k = 0, rows = row->q.at[q]; k < DECODED && k < rows; k++)
            slices[n++] = decode_slice(
                row, q, k * (rows - 1) / (rows < DECODED ? rows - 1 + (rows == 1) : DECODED - 1));
    if (!run_slices(ctx, sh, st, &other, slices, n, count, n, got, r))
        return false;
    for (int i = 0; i < n; i++)
        if (!same(got[i], want[row->q_base[slices[i].request] + slices[i].row_lo]))
            return judge(r, "row %lld of request %d has other bits when it is decoded alone",
                         (long long)slices[i].row_lo, slices[i].request);
    return true;
}

void run_property(fv_ctx *ctx, const shared *sh, const stored *st, const case_way *way, result *out)
{
    const case_row *row = sh->row;
    const size_t room = 2 * (size_t)row->num_requests + (size_t)row->total_q
                        + DECODED * (size_t)row->num_requests + 2;
    slice *slices = calloc(room, sizeof *slices);
    int64_t *count = calloc(room, sizeof *count);
    bits *want = calloc(room, sizeof *want), *got = calloc(room, sizeof *got);

    *out = (result){ .verdict = PASS };
    if (!slices || !count || !want || !got) {
        judge(out, "no memory");
        out->verdict = NOT_RUN;
    } else if (way->property == CASE_PROPERTY_BATCH) {
        check_batch(ctx, sh, st, way, slices, count, want, got, out);
    } else {
        check_decode(ctx, sh, st, way, slices, count, want, got, out);
    }
    free(slices);
    free(count);
    free(want);
    free(got);
}

/* ---------------------------------------------------------------------------------- random rows */

typedef struct writer {
    uint64_t state;
    char *out;
    size_t size, used;
    int n;                              /* requests */
    int q[32], kv[32];
    int hq, hk, dk, dv, tail;
    bool mla, alike;                    /* all requests have the same q and kv */
    bool tree, shared, blocks;
    bool tiled;                         /* pages in the order "tiles" */
} writer;

static uint32_t draw(writer *w, uint32_t below)
{
    w->state = w->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(w->state >> 33) % below;
}

static bool chance(writer *w, int percent)
{
    return (int)draw(w, 100) < percent;
}

static int one_of(writer *w, const int *list, int n)
{
    return list[draw(w, (uint32_t)n)];
}

#define ONE_OF(w, ...)                                                                             \
    one_of(w, (const int[]){ __VA_ARGS__ }, (int)(sizeof((int[]){ __VA_ARGS__ }) / sizeof(int)))

__attribute__((format(printf, 2, 3)))
static void put(writer *w, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    const int n = vsnprintf(w->out + w->used, w->size - w->used, format, args);
    va_end(args);
    if (n > 0)
        w->used = w->used + (size_t)n < w->size ? w->used + (size_t)n : w->size - 1;
}

static void put_list(writer *w, const char *key, const int *x)
{
    put(w, "%s=", key);
    for (int i = 0; i < w->n; i++)
        put(w, "%s%d", i ? "," : "", x[i]);
    put(w, "\n");
}

/* ---- shapes ---- */

static int draw_length(writer *w)
{
    switch (draw(w, 8)) {
    case 0: return ONE_OF(w, 0, 1, 2, 3);
    case 1: return ONE_OF(w, 15, 16, 17, 31, 33);
    case 2: return ONE_OF(w, 63, 64, 65, 127, 128, 129);
    case 3: return 1 + (int)draw(w, 2500);
    default: return 1 + (int)draw(w, 300);
    }
}

static int draw_rows(writer *w, int mode, int kv)
{
    switch (mode) {
    case 0: return 1;
    case 1: return kv < 130 ? kv : 1 + (int)draw(w, 40);
    case 2: return (int)draw(w, 12);
    default: return chance(w, 10) ? kv + 1 + (int)draw(w, 5) : 1 + (int)draw(w, 40);
    }
}

static void draw_requests(writer *w)
{
    const int mode = (int)draw(w, 4);

    w->n = chance(w, 30) ? 1 : 1 + (int)draw(w, chance(w, 10) ? 30 : 6);
    w->alike = chance(w, 25);
    for (int i = 0; i < w->n; i++) {
        const bool copy = w->alike && i > 0;
        w->kv[i] = copy ? w->kv[0] : draw_length(w);
        w->q[i] = copy ? w->q[0] : draw_rows(w, mode, w->kv[i]);
    }
    put_list(w, "q", w->q);
    put_list(w, "kv", w->kv);
}

static void draw_heads(writer *w)
{
    w->mla = chance(w, 10);
    w->hk = w->mla ? 1 : ONE_OF(w, 1, 1, 2, 3, 4);
    w->hq = w->hk * ONE_OF(w, 1, 1, 2, 3, 4, 5, 7, 8, 12, 16);
    w->dk = ONE_OF(w, 1, 2, 7, 8, 16, 24, 40, 46, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256,
                   320, 512, 576);
    w->dv = chance(w, 70) ? w->dk : ONE_OF(w, 1, 8, 16, 33, 64, 80, 128, 256, 512);
    w->tail = w->dk >= 16 && chance(w, 10) ? ONE_OF(w, 2, 8) : 0;
    if (w->mla && w->dv > w->dk - w->tail)
        w->dv = w->dk - w->tail;
    put(w, "hq=%d\nhk=%d\ndk=%d\ndv=%d\n", w->hq, w->hk, w->dk, w->dv);
    if (w->mla)
        put(w, "mla=1\n");
    if (w->tail)
        put(w, "x_tail=%d\n", w->tail);
}

/* ---- rules ---- */

static void draw_bits(writer *w)
{
    const int density = ONE_OF(w, 5, 50, 90);

    for (int r = 0; r < w->n; r++)
        for (int i = 0; i < w->q[r]; i++) {
            put(w, "bits=");
            const bool empty = chance(w, 10);
            for (int j = 0; j < w->kv[r]; j++)
                put(w, "%d", !empty && chance(w, density));
            put(w, "\n");
        }
}

/* A list of parts that add up to `sum`. */
static int draw_parts(writer *w, const char *key, int sum, int most)
{
    int n = 0;

    put(w, "%s=", key);
    for (; sum > 0 && n < most; n++) {
        const int part = n == most - 1 ? sum : 1 + (int)draw(w, (uint32_t)sum);
        put(w, "%s%d", n ? "," : "", part);
        sum -= part;
    }
    put(w, "\n");
    return n;
}

static void draw_blocks(writer *w)
{
    const int rows = draw_parts(w, "block_rows", w->q[0], 5),
              cols = draw_parts(w, "block_cols", w->kv[0], 7);

    w->blocks = true;
    for (int i = 0; i < rows; i++) {
        put(w, "block_map=");
        for (int j = 0; j < cols; j++)
            put(w, "%d", chance(w, 50));
        put(w, "\n");
    }
}

static void draw_ranges(writer *w, const char *key)
{
    int at = 0;

    put(w, "%s=", key);
    for (int i = 0, n = 1 + (int)draw(w, 4); i < n; i++) {
        const int lo = at + (int)draw(w, 40), hi = lo + 1 + (int)draw(w, 60);
        put(w, "%s%d:%d", i ? "," : "", lo, hi);
        at = hi;
    }
    put(w, "\n");
}

static void draw_tree(writer *w)
{
    put(w, "x_tree=");
    for (int r = 0, k = 0; r < w->n; r++)
        for (int i = 0; i < w->q[r]; i++)
            put(w, "%s%d", k++ ? "," : "", (int)draw(w, (uint32_t)i + 1) - 1);
    put(w, "\n");
    w->tree = true;
}

static int sum_of(const int *x, int n)
{
    int sum = 0;

    for (int i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

/* At most one of the masks that are lists. */
static void draw_mask(writer *w)
{
    const int rows = sum_of(w->q, w->n);
    bool short_ = true, trees = rows > 0;

    for (int r = 0; r < w->n; r++) {
        short_ = short_ && w->kv[r] <= 200;
        trees = trees && w->q[r] <= w->kv[r];
    }
    switch (draw(w, 12)) {
    case 0:
        if (short_ && rows > 0 && rows <= 40 && w->kv[0] > 0 && w->kv[w->n - 1] > 0)
            draw_bits(w);
        break;
    case 1: put(w, "diag=1\n"); break;
    case 2: draw_ranges(w, "key_ranges"); break;
    case 3: if (w->alike && w->kv[0] > 0) draw_parts(w, "items", w->kv[0], 6); break;
    case 4: if (w->alike && w->q[0] > 0 && w->kv[0] > 0) draw_blocks(w); break;
    case 5: if (trees) draw_tree(w); break;
    }
}

static void draw_rules(writer *w)
{
    const bool causal = chance(w, 60);

    if (causal)
        put(w, "causal=1\n");
    if (causal && chance(w, 10))
        draw_ranges(w, "bidir");
    if (chance(w, 20))
        put(w, "window_left=%d\n", (int)draw(w, chance(w, 50) ? 10 : 300));
    if (!causal && chance(w, 15))
        put(w, "window_right=%d\n", (int)draw(w, 50));
    if (chance(w, 15))
        put(w, "softcap=%d\n", ONE_OF(w, 1, 5, 30));
    if (chance(w, 15))
        put(w, "alibi=1\n");
    if (chance(w, 15))
        put(w, "sink=0.25,-1\n");
    draw_mask(w);
    if (chance(w, 15))
        put(w, "sm_scale=%s\n",
            (const char *[]){ "0.125", "0.03", "0.5" }[draw(w, 2 + (w->dk < 16))]);
}

/* ---- storage ---- */

static void draw_types(writer *w)
{
    static const char *const types[] = { "f16", "bf16", "f32" };
    const int kind = (int)draw(w, 14);

    w->tiled = kind >= 12 && w->dk % 32 == 0 && w->dv % 32 == 0 && !w->tail && !w->mla;
    if (w->tiled) {
        put(w, "dtype=%s\nmem=paged\nx_tiled=1\n", types[draw(w, 2)]);
        return;
    }
    if (chance(w, 85))
        put(w, "dtype=%s\n", types[draw(w, 3)]);
    if (kind == 0)
        put(w, "kv_dtype=e4m3\nkv_grid=8\n");
    else if (kind == 1)
        put(w, "kv_dtype=e5m2\nkv_grid=4\n");
    else if (kind == 2 && w->dk % 16 == 0 && w->dv % 16 == 0 && !w->tail)
        put(w, "kv_dtype=fp4g16\nq_amp=2\n");
    else if (kind == 4 && w->dk % 32 == 0 && w->dv % 32 == 0 && !w->tail)
        put(w, "kv_dtype=int4g%d\nq_amp=2\n", w->dk % 64 || w->dv % 64 || chance(w, 50) ? 32 : 64);
    else if (kind == 3)
        put(w, "x_int8=1\nkv_grid=64\nk_scale=0.015625\nv_scale=0.015625\n");
    if ((kind < 3 || kind == 4) && chance(w, 30))
        put(w, "k_scale=0.25\nv_scale=2\n");
    if (kind < 5 && chance(w, 40))
        put(w, "%s\n", chance(w, 50) ? "scales=token_head" : "x_head_scales=1");
}

static void draw_views(writer *w)
{
    put(w, "view=contig");
    if (chance(w, 20))
        put(w, ",qslice");
    if (chance(w, 20))
        put(w, ",opad");
    if (chance(w, 20))
        put(w, ",layers32");
    if (chance(w, 20))
        put(w, ",off8");
    if (!w->mla && chance(w, 20))
        put(w, ",kvpage");
    if (!w->mla && chance(w, 20))
        put(w, ",kvtoken");
    if (!w->mla && chance(w, 20))
        put(w, ",mixed");
    if (w->hk == 1 && chance(w, 30))
        put(w, ",hs0,hs1,hsbig");
    put(w, "\n");
}

static void draw_share(writer *w)
{
    int least = w->kv[0];

    for (int i = 1; i < w->n; i++)
        least = w->kv[i] < least ? w->kv[i] : least;
    if (w->n < 2 || least == 0 || !chance(w, 40))
        return;
    const int common = 1 + (int)draw(w, (uint32_t)least);
    put(w, "share=-");
    for (int i = 1; i < w->n; i++)
        put(w, ",0:%d", common);
    put(w, "\n");
    w->shared = true;
    if (chance(w, 50))
        put(w, "q_same=1\n");
}

static void draw_storage(writer *w)
{
    const int a = w->tiled ? 16 : ONE_OF(w, 1, 2, 3, 5, 7, 16);
    const int b = w->tiled ? ONE_OF(w, 32, 48, 128) : ONE_OF(w, 16, 17, 31, 64, 100, 128, 544);

    put(w, "page=%d,%d\nplacement=identity,reversed,random,scattered\n", a, b);
    put(w, "splits=%s,%s\n", (const char *[]){ "1", "auto" }[draw(w, 2)],
        (const char *[]){ "2", "3", "5", "8", "17" }[draw(w, 5)]);
    put(w, "lse_layout=th,ht\nlse_pad=%d\npad_rows=%d\n", ONE_OF(w, 0, 3), ONE_OF(w, 0, 2));
    draw_views(w);
    draw_share(w);
    if (chance(w, 10) && !w->mla)
        put(w, "x_v_ids=1\n");
}

static void draw_extras(writer *w)
{
    if (w->dk >= 4 && chance(w, 12))
        put(w, "x_rope=%d\n", chance(w, 50) ? w->dk / 2 * 2 : w->dk / 4 * 2);
    if (chance(w, 30))
        put(w, "x_interleaved=1\n");
    if (chance(w, 12) && !w->shared && !w->blocks) {
        put(w, "x_first=");
        for (int i = 0; i < w->n; i++)
            put(w, "%s%d", i ? "," : "", (int)draw(w, 200));
        put(w, "\n");
    }
    if (chance(w, 10))
        put(w, "x_key_sums=1\n");
}

void random_row(unsigned seed, int index, char *out, size_t size)
{
    writer w = { .out = out,
                 .size = size,
                 .state = (uint64_t)seed << 32 ^ (uint64_t)index * 0x9E3779B97F4A7C15u };

    draw(&w, 2);
    put(&w, "id=random-%u-%d\nclass=random\n", seed, index);
    draw_requests(&w);
    draw_heads(&w);
    draw_rules(&w);
    draw_types(&w);
    draw_storage(&w);
    draw_extras(&w);
}
