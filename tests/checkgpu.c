/* SPDX-License-Identifier: Apache-2.0 */
/* checkgpu.c -- attention on a GPU through the public API: shapes against the definition in double, then times inside graphs.
 *
 *     checkgpu [--device cuda:0] [--match WORD,...] [--time] [--no-check] [--variant NAME:KEY=N,...]...
 *              [--compile] [--stamps] [--part I/N]
 *
 * Needs libc, the driver and NVRTC. Inputs are fresh random numbers; memory that may not be read holds NaN. Prints a table and, last,
 * "N passed, N failed". Exit status 77: no GPU.
 *
 * --variant times shapes again with another configuration, for measurements: stages, blocks, tile, warps, look, paired, kinds=A.B.C.D+... (m-tiles,
 * warps along rows, values, keys); decode=1: for shapes of one row a request, else for the others. The first one given is checked too.
 * "default:" is the library's own. --compile only makes the plans, so that their code is in the cache folder: run it for several variants
 * at once before their times are taken. --part: every Nth of the checks from the Ith on, for several processes at once. --stamps prints where the
 * time of a launch goes, from clocks in the kernel. */
#include "cuda/state.h"
#include "ctx.h"
#include "engine.h"
#include "os.h"
#include "ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_REQUESTS = 300 };

typedef struct shape {
    const char *name, *q, *k, *v;       /* k, v NULL: as q */
    int hq, hk, dk, dv, page;           /* page 0: ragged */
    int n;                              /* requests */
    int rows[8], keys[8];               /* of each; one number of rows: of all */
    bool causal, hnd, v_in_k, odd, invariant, ids_64, rope, sink, alibi, mask;
    int left, tail, splits;             /* left 0: no window */
    double softcap;
    const char *scale;                  /* of k and v */
} shape;

static const shape shapes[] = {
    { "decode", "bf16", NULL, NULL, 32, 8, 128, 128, 16, 5, { 1 }, { 1, 63, 64, 65, 1000 }, .causal = true },
    { "decode_f16_ragged", "f16", NULL, NULL, 8, 8, 128, 128, 0, 3, { 1 }, { 100, 1, 777 }, .causal = true },
    { "decode_page1", "bf16", NULL, NULL, 8, 2, 128, 128, 1, 3, { 1 }, { 300, 5, 64 }, .causal = true, .ids_64 = true },
    { "decode_page3_hnd", "bf16", NULL, NULL, 8, 2, 64, 64, 3, 3, { 1 }, { 300, 5, 64 }, .causal = true, .hnd = true },
    { "decode_split8", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 3, { 1 }, { 3000, 5, 640 }, .causal = true, .splits = 8 },
    { "decode_long", "f16", NULL, NULL, 8, 1, 128, 128, 16, 1, { 1 }, { 40000 }, .causal = true },
    { "decode_odd", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 2, { 1 }, { 300, 50 }, .causal = true, .odd = true },
    { "decode_mqa40", "f16", NULL, NULL, 40, 1, 128, 128, 16, 2, { 1 }, { 300, 50 }, .causal = true },
    { "prefill", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 3, { 300, 17, 128 }, { 300, 200, 128 }, .causal = true },
    { "prefill_full", "f16", NULL, NULL, 4, 4, 128, 128, 0, 2, { 100, 33 }, { 100, 257 }, .causal = false },
    { "prefill_mixed", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 4, { 1, 200, 5, 40 }, { 500, 260, 300, 40 }, .causal = true },
    { "q_longer", "f16", NULL, NULL, 4, 2, 64, 64, 16, 3, { 10, 5, 3 }, { 4, 0, 1 }, .causal = true },
    { "window", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 2, { 200, 3 }, { 400, 500 }, .causal = true, .left = 70 },
    { "softcap_alibi", "f16", NULL, NULL, 8, 2, 128, 128, 16, 2, { 70, 3 }, { 100, 500 }, .causal = true, .softcap = 5, .alibi = true },
    { "softcap_near", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 3, { 300, 70, 1 }, { 300, 500, 130 }, .causal = true, .softcap = 50 },
    { "softcap_far", "bf16", NULL, NULL, 4, 2, 64, 64, 16, 2, { 150, 3 }, { 200, 500 }, .causal = true, .softcap = 0.5 },
    { "softcap_dim256", "bf16", NULL, NULL, 4, 2, 256, 256, 16, 2, { 150, 1 }, { 260, 200 }, .causal = true, .softcap = 2 },
    { "alibi_steep", "bf16", NULL, NULL, 32, 8, 128, 128, 16, 2, { 300, 1 }, { 400, 500 }, .causal = true, .alibi = true },
    { "alibi_invariant", "bf16", NULL, NULL, 32, 8, 128, 128, 16, 2, { 300, 1 }, { 400, 500 }, .causal = true, .invariant = true, .alibi = true },
    { "sink", "bf16", NULL, NULL, 8, 2, 64, 64, 16, 3, { 70, 1, 2 }, { 100, 500, 0 }, .causal = true, .sink = true },
    { "rope", "f16", NULL, NULL, 8, 2, 128, 128, 16, 2, { 20, 1 }, { 60, 130 }, .causal = true, .rope = true },
    { "mask", "f16", NULL, NULL, 4, 2, 64, 64, 16, 2, { 20, 40 }, { 60, 130 }, .mask = true },
    { "dim80", "f16", NULL, NULL, 4, 2, 80, 80, 16, 2, { 50, 1 }, { 60, 200 }, .causal = true },
    { "dim72_33", "f16", NULL, NULL, 4, 2, 72, 33, 16, 2, { 50, 1 }, { 60, 200 }, .causal = true },
    { "dim192_128", "bf16", NULL, NULL, 4, 4, 192, 128, 16, 2, { 150, 1 }, { 160, 200 }, .causal = true },
    { "dim256", "bf16", NULL, NULL, 4, 2, 256, 256, 16, 2, { 150, 1 }, { 160, 200 }, .causal = true },
    { "dim256_decode", "bf16", NULL, NULL, 4, 2, 256, 256, 16, 2, { 1 }, { 160, 2000 }, .causal = true },
    { "mla", "bf16", NULL, NULL, 16, 1, 576, 512, 16, 3, { 1, 9, 4 }, { 160, 200, 64 }, .causal = true, .v_in_k = true },
    { "mla_tail", "f16", NULL, NULL, 128, 1, 576, 512, 64, 2, { 1, 2 }, { 160, 200 }, .causal = true, .v_in_k = true, .tail = 64 },
    { "e4m3", "bf16", "fp8_e4m3", "fp8_e4m3", 8, 2, 128, 128, 16, 3, { 1, 40, 100 }, { 300, 40, 333 }, .causal = true, .scale = "tensor" },
    { "e4m3_decode", "f16", "fp8_e4m3", "fp8_e4m3", 8, 2, 128, 128, 16, 2, { 1 }, { 300, 40 }, .causal = true, .scale = "head" },
    { "e5m2", "bf16", "fp8_e5m2", "fp8_e5m2", 8, 2, 64, 64, 16, 2, { 1, 40 }, { 300, 40 }, .causal = true, .scale = "token_head" },
    { "e5m2_f16", "f16", "fp8_e5m2", "fp8_e5m2", 8, 2, 64, 64, 1, 2, { 1, 40 }, { 300, 40 }, .causal = true, .scale = "tensor" },
    { "int8", "f16", "int8", "int8", 8, 2, 128, 128, 16, 2, { 1, 40 }, { 300, 40 }, .causal = true, .scale = "token_head" },
    { "int8_bf16", "bf16", "int8", "int8", 8, 2, 128, 128, 16, 2, { 1, 40 }, { 300, 40 }, .causal = true, .scale = "tensor" },
    { "fp4", "bf16", "fp4_e2m1", "fp4_e2m1", 8, 2, 128, 128, 16, 2, { 1, 40 }, { 300, 40 }, .causal = true },
    { "fp4_f16", "f16", "fp4_e2m1", "fp4_e2m1", 8, 2, 64, 64, 16, 2, { 1, 40 }, { 300, 40 }, .causal = true },
    { "e4m3_rope", "f16", "fp8_e4m3", "fp8_e4m3", 8, 2, 64, 64, 16, 2, { 1, 40 }, { 300, 40 }, .causal = true, .scale = "tensor", .rope = true },
    { "f32", "f32", NULL, NULL, 4, 2, 128, 128, 16, 2, { 1, 70 }, { 300, 70 }, .causal = true },
    { "f32_dim256", "f32", NULL, NULL, 4, 2, 256, 256, 16, 2, { 1, 70 }, { 300, 70 }, .causal = true },
    { "f32_kv16", "f32", "bf16", "bf16", 4, 2, 64, 64, 16, 2, { 1, 70 }, { 300, 70 }, .causal = true },
    { "invariant", "bf16", NULL, NULL, 8, 2, 128, 128, 16, 3, { 1, 300, 5 }, { 3000, 300, 1500 }, .causal = true, .invariant = true },
    { "invariant_split", "f16", NULL, NULL, 8, 2, 64, 64, 16, 2, { 1, 3 }, { 5000, 2500 }, .causal = true, .invariant = true, .splits = 4 },
};

/* ------------------------------------------------------------------------------------------------------------ inputs */

static uint64_t random_state = 88172645463325252u;

static double uniform(void)             /* [-1, 1] */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(int64_t)(random_state >> 11) / (double)(1ull << 52) - 1.0;
}

static fv_ctx *ctx;
static fv__cuda_device *device;
static CUstream stream;
static int passed, failed;

#define MUST(call) do { if ((call) != FV_OK) { printf("%s: %s\n", #call, err.text); exit(1); } } while (0)

typedef struct buffer {                 /* host and device */
    char *host;
    CUdeviceptr device;
    size_t bytes;
} buffer;

static buffer make(size_t bytes, int fill)
{
    fv_error err;
    buffer b = { malloc(bytes + 64), 0, bytes };
    memset(b.host, fill, bytes + 64);
    MUST(fv__cuda_alloc(device, bytes + 64, &b.device, &err));
    return b;
}

static void upload(const buffer *b)
{
    fv_error err;
    MUST(fv__cuda_to_device(device, b->device, b->host, b->bytes + 64, stream, &err));
    MUST(fv__cuda_stream_sync(device, stream, &err));
}

static void download(buffer *b)
{
    fv_error err;
    MUST(fv__cuda_to_host(device, b->host, b->device, b->bytes + 64, stream, &err));
    MUST(fv__cuda_stream_sync(device, stream, &err));
}

static void drop(buffer *b)
{
    free(b->host);
    if (b->device) fv__cuda_free(device, b->device);
    *b = (buffer){ 0 };
}

/* ------------------------------------------------------------------------------------------------------ one shape */

typedef struct trial {
    const shape *s;
    fv__dtype q_type, k_type, v_type;
    int total_rows, total_keys, num_pages, rows[MAX_REQUESTS], keys[MAX_REQUESTS];
    int32_t row_indptr[MAX_REQUESTS + 1], lengths[MAX_REQUESTS], page_indptr[MAX_REQUESTS + 1], kv_indptr[MAX_REQUESTS + 1];
    buffer q, q_tail, k, k_tail, v, o, lse, ids, k_scale, v_scale, k_blocks, v_blocks, sinks, slopes, bits;
    double *dq, *dk, *dv;               /* the true values: [row][hq][dk], [key][hk][dk], [key][hk][dv] */
    int64_t *slot;                      /* token slot of each key */
    int offset;                         /* bytes that bases are off */
} trial;

static int64_t kv_place(const trial *t, int64_t slot, int head)     /* rows of K (V): which row of the pool is this head's */
{
    const shape *s = t->s;
    if (!s->page || !s->hnd) return slot * s->hk + head;
    return (slot / s->page * s->hk + head) * s->page + slot % s->page;
}

static void lay_out_batch(trial *t)
{
    const shape *s = t->s;
    for (int r = 0; r < s->n; r++) {
        t->rows[r] = s->rows[1] ? s->rows[r] : s->rows[0];
        t->keys[r] = s->keys[r];
        t->row_indptr[r] = t->total_rows;
        t->kv_indptr[r] = t->total_keys;
        t->page_indptr[r] = t->num_pages;
        t->lengths[r] = t->keys[r];
        t->total_rows += t->rows[r];
        t->total_keys += t->keys[r];
        if (s->page) t->num_pages += (t->keys[r] + s->page - 1) / s->page;
    }
    t->row_indptr[s->n] = t->total_rows;
    t->kv_indptr[s->n] = t->total_keys;
    t->page_indptr[s->n] = t->num_pages;
}

static size_t type_bytes(fv__dtype type, int64_t n) { return (size_t)fv__dtype_bytes(type, n); }

/* Value that the type holds, random; 8-bit types use their range sparingly. */
static double put(fv__dtype type, char *base, int64_t index, double x)
{
    fv__dtype_store(type, base, index, x);
    return fv__dtype_load(type, base, index);
}

static double token_scale(int64_t t, int h, int by) { return ldexp(1, (int)((by * t + h) % 5) - 2); }

static void fill_rows(trial *t)
{
    const shape *s = t->s;
    const int main = s->dk - s->tail;
    t->q = make(type_bytes(t->q_type, (int64_t)t->total_rows * s->hq * main), 0xff);
    if (s->tail) t->q_tail = make(type_bytes(t->q_type, (int64_t)t->total_rows * s->hq * s->tail), 0xff);
    t->dq = malloc(sizeof(double) * (size_t)t->total_rows * (size_t)(s->hq * s->dk));
    for (int64_t i = 0; i < (int64_t)t->total_rows * s->hq; i++)
        for (int d = 0; d < s->dk; d++)
            t->dq[i * s->dk + d] = d < main ? put(t->q_type, t->q.host + t->offset, i * main + d, 3 * uniform())
                                            : put(t->q_type, t->q_tail.host, i * s->tail + d - main, 3 * uniform());
    upload(&t->q);
    if (s->tail) upload(&t->q_tail);
}

static double scale_of(const trial *t, int64_t key, int h, int by)
{
    const char *k = t->s->scale;
    if (!k) return 1;
    return !strcmp(k, "tensor") ? 0.5 : !strcmp(k, "head") ? 0.25 * (h + 1) : token_scale(key, h, by);
}

/* One of K (V): pool, true values, scales. */
static void fill_pool(trial *t, bool is_v, int64_t pool)
{
    const shape *s = t->s;
    const fv__dtype type = is_v ? t->v_type : t->k_type;
    const int dim = is_v ? s->dv : s->dk, main = is_v ? dim : dim - s->tail;
    const double amp = type == FV__DTYPE_int8 ? 100 : type == FV__DTYPE_fp4_e2m1 ? 6 : 1;
    buffer *b = is_v ? &t->v : &t->k, *scale = is_v ? &t->v_scale : &t->k_scale, *blocks = is_v ? &t->v_blocks : &t->k_blocks;
    *b = make(type_bytes(type, pool * s->hk * main), 0xff);
    if (!is_v && s->tail) t->k_tail = make(type_bytes(type, pool * s->hk * s->tail), 0xff);
    if (type == FV__DTYPE_fp4_e2m1) *blocks = make((size_t)(pool * s->hk * (dim / 16)), 0xff);
    if (s->scale) *scale = make(4 * (size_t)(pool * s->hk), 0xff);
    double *out = malloc(sizeof(double) * (size_t)(t->total_keys * s->hk * dim + 1));
    for (int64_t key = 0; key < t->total_keys; key++)
        for (int h = 0; h < s->hk; h++) {
            const int64_t row = kv_place(t, t->slot[key], h);
            const double sc = scale_of(t, key, h, is_v ? 2 : 1);
            for (int d = 0; d < dim; d++) {
                double x = d < main ? put(type, b->host + t->offset, row * main + d, amp * uniform()) : put(type, t->k_tail.host, row * s->tail + d - main, amp * uniform());
                if (type == FV__DTYPE_fp4_e2m1) {
                    if (d % 16 == 0) put(FV__DTYPE_fp8_e4m3, blocks->host, row * (dim / 16) + d / 16, 0.25 + 0.03125 * (double)((key + d / 16) % 8));
                    x *= fv__dtype_load(FV__DTYPE_fp8_e4m3, blocks->host, row * (dim / 16) + d / 16);
                }
                out[(key * s->hk + h) * dim + d] = x * sc;
            }
            if (s->scale && !strcmp(s->scale, "token_head")) ((float *)scale->host)[row] = (float)sc;
            if (s->scale && !strcmp(s->scale, "head")) ((float *)scale->host)[h] = (float)sc;
        }
    if (is_v) t->dv = out;
    else t->dk = out;
    upload(b);
    if (t->k_tail.host && !is_v) upload(&t->k_tail);
    if (blocks->host) upload(blocks);
    if (scale->host) upload(scale);
}

static void fill_keys(trial *t)
{
    const shape *s = t->s;
    const int extra = 3;                /* pages that nobody owns */
    const int64_t pool = s->page ? (int64_t)(t->num_pages + extra) * s->page : t->total_keys;
    int *perm = malloc(sizeof(int) * (size_t)(t->num_pages + 1));
    for (int i = 0; i < t->num_pages; i++) perm[i] = i + extra;
    for (int i = t->num_pages - 1; i > 0; i--) {
        const int j = (int)((uniform() + 1) / 2 * i), x = perm[i];
        perm[i] = perm[j];
        perm[j] = x;
    }
    t->slot = malloc(sizeof(int64_t) * (size_t)(t->total_keys + 1));
    for (int r = 0; r < s->n; r++)
        for (int k = 0; k < t->keys[r]; k++)
            t->slot[t->kv_indptr[r] + k] = s->page ? (int64_t)perm[t->page_indptr[r] + k / s->page] * s->page + k % s->page : t->kv_indptr[r] + k;
    if (s->page) {
        t->ids = make((size_t)(t->num_pages + 1) * 8, 0xff);
        for (int i = 0; i < t->num_pages; i++) {
            if (s->ids_64) ((int64_t *)t->ids.host)[i] = perm[i];
            else ((int32_t *)t->ids.host)[i] = perm[i];
        }
        upload(&t->ids);
    }
    free(perm);
    fill_pool(t, false, pool);
    if (!s->v_in_k) fill_pool(t, true, pool);
    else {
        t->dv = malloc(sizeof(double) * (size_t)(t->total_keys * s->hk * s->dv + 1));
        for (int64_t i = 0; i < (int64_t)t->total_keys * s->hk; i++) memcpy(t->dv + i * s->dv, t->dk + i * s->dk, sizeof(double) * (size_t)s->dv);
    }
}

static fv_tensor tensor3(CUdeviceptr p, const char *type, int64_t a, int64_t b, int64_t c)
{
    return (fv_tensor){ .data = (void *)(uintptr_t)p, .dtype = type, .ndim = 3, .shape = { a, b, c }, .stride = { b * c, c, 1 } };
}

static fv_tensor pool_tensor(const trial *t, CUdeviceptr p, const char *type, int64_t width)
{
    const shape *s = t->s;
    if (!s->page) return tensor3(p, type, t->total_keys, s->hk, width);
    fv_tensor x = { .data = (void *)(uintptr_t)p, .dtype = type, .ndim = 4, .shape = { t->num_pages + 3, s->page, s->hk, width } };
    x.stride[0] = (int64_t)s->page * s->hk * width;
    x.stride[1] = s->hnd ? width : s->hk * width;
    x.stride[2] = s->hnd ? s->page * width : width;
    x.stride[3] = 1;
    return x;
}

/* The largest value that V holds, at least 1. */
static double largest_value(const trial *t)
{
    const shape *s = t->s;
    double top = 1;
    for (int64_t i = 0; i < (int64_t)t->total_keys * s->hk * s->dv; i++) top = fmax(top, fabs(t->dv[i]));
    return top;
}

/* Tolerances of tests/cases/README.md, which are for values up to 1: rounded weights err by a part of the values, not of their sum. */
static double worst(const trial *t, const double *want, const double *want_lse, double *lse_worst)
{
    const shape *s = t->s;
    const double rel = t->q_type == FV__DTYPE_f32 ? 1e-5 : t->q_type == FV__DTYPE_f16 ? 2e-3 : 1.6e-2;
    const double abs_ = (t->q_type == FV__DTYPE_f32 ? 4e-6 : t->q_type == FV__DTYPE_f16 ? 1e-3 : 8e-3) * largest_value(t);
    double top = 0;
    *lse_worst = 0;
    for (int64_t i = 0; i < (int64_t)t->total_rows * s->hq; i++) {
        for (int d = 0; d < s->dv; d++) {
            const double x = fv__dtype_load(t->q_type, t->o.host, i * s->dv + d), y = want[i * s->dv + d];
            const double e = fabs(x - y) / (rel * fabs(y) + abs_);
            if (!(e <= top)) top = isnan(e) ? INFINITY : e;
        }
        const double x = ((float *)t->lse.host)[i], y = want_lse[i];
        double e = isinf(y) ? (x == y ? 0 : INFINITY) : fabs(x - y) / (2e-3 + fabs(y) * 2.4e-7);
        if (!(e <= *lse_worst)) *lse_worst = isnan(e) ? INFINITY : e;
    }
    return top;
}

static void reference(const trial *t, double *o, double *lse)
{
    const shape *s = t->s;
    float freq[288];
    double slope[256], sink[256];
    for (int i = 0; i < s->dk / 2; i++) freq[i] = (float)pow(10000, -2.0 * i / s->dk);
    for (int h = 0; h < s->hq; h++) {
        slope[h] = (float)(0.02 * (h + 1));
        sink[h] = (float)(0.5 * h - 1);
    }
    const ref_rope rope = { s->dk, false, freq, NULL };
    const ref_problem p = { .hq = s->hq, .hk = s->hk, .dk = s->dk, .dv = s->dv, .scale = 1 / sqrt(s->dk), .causal = s->causal,
                            .window_left = s->left ? s->left : -1, .window_right = -1, .softcap = s->softcap, .slope = s->alibi ? slope : NULL,
                            .sink = s->sink ? sink : NULL, .rope = s->rope ? &rope : NULL };
    int64_t bit = 0;
    for (int r = 0; r < s->n; r++) {
        uint8_t *bits = NULL;
        if (s->mask) {
            bits = malloc((size_t)(t->rows[r] * t->keys[r]));
            for (int i = 0; i < t->rows[r] * t->keys[r]; i++) bits[i] = (uint8_t)t->bits.host[(bit + i) / 8] >> ((bit + i) % 8) & 1;
            bit += fv__round_up((int64_t)t->rows[r] * t->keys[r], 8);
        }
        const ref_request q = { .rows = t->rows[r], .keys = t->keys[r], .q = t->dq + (int64_t)t->row_indptr[r] * s->hq * s->dk,
                                .k = t->dk + (int64_t)t->kv_indptr[r] * s->hk * s->dk, .v = t->dv + (int64_t)t->kv_indptr[r] * s->hk * s->dv, .bits = bits };
        ref_attend(&p, &q, NULL, t->rows[r], 8, o + (int64_t)t->row_indptr[r] * s->hq * s->dv, lse + (int64_t)t->row_indptr[r] * s->hq);
        free(bits);
    }
}

typedef struct list { fv_arg args[8]; fv_tensor tensors[8]; int n; } list;

static void add_number(list *l, const char *name, double x) { l->args[l->n++] = (fv_arg){ .name = name, .number = x }; }
static void add_tensor(list *l, const char *name, fv_tensor x)
{
    l->tensors[l->n] = x;
    l->args[l->n] = (fv_arg){ .name = name, .tensor = &l->tensors[l->n] };
    l->n++;
}

static fv_tensor vector(CUdeviceptr p, const char *type, int64_t n)
{
    return (fv_tensor){ .data = (void *)(uintptr_t)p, .dtype = type, .ndim = 1, .shape = { n }, .stride = { 1 } };
}

static void add_scale(const trial *t, list *l, const char *name, const buffer *b)
{
    const shape *s = t->s;
    if (!s->scale) return;
    if (!strcmp(s->scale, "tensor")) {
        add_number(l, name, 0.5);
    } else if (!strcmp(s->scale, "head")) {
        add_tensor(l, name, vector(b->device, "f32", s->hk));
    } else {
        fv_tensor x = pool_tensor(t, b->device, "f32", 1);
        x.ndim--;
        add_tensor(l, name, x);
    }
}

static void run_args(const trial *t, list *l)
{
    const shape *s = t->s;
    add_scale(t, l, "k_scale", &t->k_scale);
    if (!s->v_in_k) add_scale(t, l, "v_scale", &t->v_scale);
    if (t->k_blocks.host) add_tensor(l, "k_block_scale", pool_tensor(t, t->k_blocks.device, "fp8_e4m3", s->dk / 16));
    if (t->v_blocks.host) add_tensor(l, "v_block_scale", pool_tensor(t, t->v_blocks.device, "fp8_e4m3", s->dv / 16));
    if (s->sink) add_tensor(l, "sinks", vector(t->sinks.device, "f32", s->hq));
    if (s->alibi) add_tensor(l, "slopes", vector(t->slopes.device, "f32", s->hq));
    if (s->softcap > 0) add_number(l, "cap", s->softcap);
}

static void fill_extras(trial *t)
{
    const shape *s = t->s;
    t->sinks = make(4 * 256, 0);
    t->slopes = make(4 * 256, 0);
    for (int h = 0; h < s->hq; h++) {
        ((float *)t->sinks.host)[h] = (float)(0.5 * h - 1);
        ((float *)t->slopes.host)[h] = (float)(0.02 * (h + 1));
    }
    upload(&t->sinks);
    upload(&t->slopes);
    if (!s->mask) return;
    int64_t bits = 0;
    for (int r = 0; r < s->n; r++) bits += fv__round_up((int64_t)t->rows[r] * t->keys[r], 8);
    t->bits = make((size_t)bits / 8, 0);
    for (int64_t i = 0; i < bits / 8; i++) t->bits.host[i] = (char)(uniform() * 128);
    upload(&t->bits);
}

static bool run_trial(trial *t, fv_error *err, double *ms, bool *refused)
{
    const shape *s = t->s;
    fv_plan *plan = NULL;
    list run = { .n = 0 }, batch_args = { .n = 0 };
    fv_variant_use uses[6];
    const fv_arg left = { .name = "left", .number = s->left }, dim = { .name = "rotary_dim", .number = s->dk };
    int n = 0;
    if (s->rope) uses[n++] = (fv_variant_use){ .name = "rope", .args = &dim, .num_args = 1 };
    if (s->softcap > 0) uses[n++] = (fv_variant_use){ .name = "softcap" };
    if (s->alibi) uses[n++] = (fv_variant_use){ .name = "alibi" };
    if (s->causal) uses[n++] = (fv_variant_use){ .name = "causal" };
    if (s->left) uses[n++] = (fv_variant_use){ .name = "window", .args = &left, .num_args = 1 };
    if (s->sink) uses[n++] = (fv_variant_use){ .name = "sink" };
    if (s->mask) uses[n++] = (fv_variant_use){ .name = "mask" };
    const fv_problem problem = { .q = s->q, .k = s->k ? s->k : s->q, .v = s->v_in_k ? NULL : s->v ? s->v : s->q, .o = s->q, .num_q_heads = s->hq,
                                 .num_kv_heads = s->hk, .dim_qk = s->dk, .dim_v = s->dv, .variants = uses, .num_variants = n, .qk_tail = s->tail,
                                 .v_in_k = s->v_in_k, .k_scale = s->scale, .v_scale = s->v_in_k ? NULL : s->scale };
    bool decode = true;
    for (int r = 0; r < s->n; r++) decode = decode && t->rows[r] == 1;
    const fv_plan_desc limits = { .max_requests = s->n, .max_rows = decode ? s->n : t->total_rows + 7, .max_kv_tokens = t->total_keys,
                                  .max_pages = s->page ? t->num_pages : 0, .splits = s->splits, .invariant = s->invariant };
    const int64_t before = fv__os_now_ns();
    fv_status status = fv_plan_create(ctx, &problem, &limits, &plan, err);
    *ms = (double)(fv__os_now_ns() - before) * 1e-6;
    *refused = status == FV_E_UNSUPPORTED;
    if (status != FV_OK) return false;
    fv_batch batch = { .num_requests = s->n, .rows = fv_i32(t->row_indptr, s->n + 1), .lengths = fv_i32(t->lengths, s->n) };
    if (s->page) {
        batch.pages = (fv_pages){ .page_size = s->page, .num_pages = t->num_pages + 3, .indptr = fv_i32(t->page_indptr, s->n + 1) };
        batch.pages.ids = s->ids_64 ? fv_i64((int64_t *)t->ids.host, t->num_pages) : fv_i32((int32_t *)t->ids.host, t->num_pages);
        if (!s->odd) batch.pages.ids.device = (void *)(uintptr_t)t->ids.device;
    } else {
        batch.kv_indptr = fv_i32(t->kv_indptr, s->n + 1);
    }
    if (s->mask) {
        add_tensor(&batch_args, "bits", vector(t->bits.device, "b1", (int64_t)t->bits.bytes * 8));
        batch.args = batch_args.args;
        batch.num_args = 1;
    }
    status = fv_plan_update(plan, NULL, &batch, stream, err);
    run_args(t, &run);
    const CUdeviceptr off = (CUdeviceptr)t->offset;
    fv_tensors tensors = { .q = tensor3(t->q.device + off, s->q, t->total_rows, s->hq, s->dk - s->tail), .k = pool_tensor(t, t->k.device + off, problem.k, s->dk - s->tail),
                           .o = tensor3(t->o.device, s->q, t->total_rows, s->hq, s->dv), .args = run.args, .num_args = run.n };
    if (!s->v_in_k) tensors.v = pool_tensor(t, t->v.device + off, problem.v, s->dv);
    if (s->tail) {
        tensors.q_tail = tensor3(t->q_tail.device, s->q, t->total_rows, s->hq, s->tail);
        tensors.k_tail = pool_tensor(t, t->k_tail.device, problem.k, s->tail);
    }
    tensors.lse = (fv_tensor){ .data = (void *)(uintptr_t)t->lse.device, .dtype = "f32", .ndim = 2, .shape = { t->total_rows, s->hq }, .stride = { s->hq, 1 } };
    for (int i = 0; i < 2 && status == FV_OK; i++) status = fv_run(plan, &tensors, stream, err);      /* twice: tickets are back at 0 */
    if (status == FV_OK) status = fv__cuda_stream_sync(device, stream, err);
    if (plan) fv_plan_destroy(&plan);
    return status == FV_OK;
}

static void check_shape(const shape *s)
{
    fv_error err = { 0 };
    trial *t = calloc(1, sizeof *t);
    double ms = 0, e = -1, el = -1;
    bool refused = false;
    t->s = s;
    t->q_type = fv__dtype_find(s->q);
    t->k_type = s->k ? fv__dtype_find(s->k) : t->q_type;
    t->v_type = s->v ? fv__dtype_find(s->v) : t->q_type;
    t->offset = s->odd ? 2 : 0;
    lay_out_batch(t);
    fill_rows(t);
    fill_keys(t);
    fill_extras(t);
    t->o = make(type_bytes(t->q_type, (int64_t)t->total_rows * s->hq * s->dv), 0xff);
    t->lse = make(4 * (size_t)(t->total_rows * s->hq), 0xff);
    upload(&t->o);
    upload(&t->lse);
    bool ok = run_trial(t, &err, &ms, &refused);
    if (ok) {
        double *o = malloc(sizeof(double) * (size_t)(t->total_rows * s->hq * s->dv + 1)), *lse = malloc(sizeof(double) * (size_t)(t->total_rows * s->hq + 1));
        download(&t->o);
        download(&t->lse);
        reference(t, o, lse);
        e = worst(t, o, lse, &el);
        ok = e <= 1 && el <= 1;
        free(o);
        free(lse);
    }
    fv_errors faults;
    fv_ctx_errors(ctx, &faults, 1);
    ok = ok && !faults.count;
    ok ? passed++ : failed++;
    printf("%-20s %s  o %.3f  lse %.3f of tolerance, created in %.0f ms%s%s\n", s->name, ok ? "pass" : refused ? "REFUSED" : "FAIL", e, el, ms,
           err.text[0] ? "  " : "", err.text);
    fflush(stdout);
    buffer *all[] = { &t->q, &t->q_tail, &t->k, &t->k_tail, &t->v, &t->o, &t->lse, &t->ids, &t->k_scale, &t->v_scale, &t->k_blocks, &t->v_blocks, &t->sinks, &t->slopes, &t->bits };
    for (int i = 0; i < FV__COUNT(all); i++) drop(all[i]);
    free(t->dq);
    free(t->dk);
    free(t->dv);
    free(t->slot);
    free(t);
}

/* ------------------------------------------------------------------------------------------------------------- times */

typedef struct timing { const char *name, *q, *k; int hq, hk, dk, dv, page, n, rows, keys; bool causal, v_in_k, softcap, alibi, rope; } timing;

static const timing timings[] = {
    { "decode b256 L4096 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 256, 1, 4096, .causal = true },
    { "decode b256 L4096 page 1", "bf16", "bf16", 32, 8, 128, 128, 1, 256, 1, 4096, .causal = true },
    { "decode b256 L4096 ragged", "bf16", "bf16", 32, 8, 128, 128, 0, 256, 1, 4096, .causal = true },
    { "decode b64 L2048 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 64, 1, 2048, .causal = true },
    { "decode b16 L4096 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 16, 1, 4096, .causal = true },
    { "decode b1 L65536 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 1, 1, 65536, .causal = true },
    { "decode b1 L4096 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 1, 1, 4096, .causal = true },
    { "decode b256 L4096 e4m3", "bf16", "fp8_e4m3", 32, 8, 128, 128, 16, 256, 1, 4096, .causal = true },
    { "decode b128 L1024 32/32", "bf16", "bf16", 32, 32, 128, 128, 16, 128, 1, 1024, .causal = true },
    { "decode b8 L4096 40/40", "bf16", "bf16", 40, 40, 128, 128, 16, 8, 1, 4096, .causal = true },
    { "decode b32 L252 40/40", "bf16", "bf16", 40, 40, 128, 128, 16, 32, 1, 252, .causal = true },
    { "decode b8 L4096 40/40 rope", "bf16", "bf16", 40, 40, 128, 128, 16, 8, 1, 4096, .causal = true, .rope = true },
    { "decode b32 L252 40/40 rope", "bf16", "bf16", 40, 40, 128, 128, 16, 32, 1, 252, .causal = true, .rope = true },
    { "mla decode b64 L4096", "bf16", "bf16", 128, 1, 576, 512, 64, 64, 1, 4096, .causal = true, .v_in_k = true },
    { "prefill 2 x 8192 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 2, 8192, 8192, .causal = true },
    { "prefill 2 x 8192 ragged", "bf16", "bf16", 32, 8, 128, 128, 0, 2, 8192, 8192, .causal = true },
    { "prefill 2 x 8192 page 1", "bf16", "bf16", 32, 8, 128, 128, 1, 2, 8192, 8192, .causal = true },
    { "prefill 2 x 8192 full", "bf16", "bf16", 32, 8, 128, 128, 16, 2, 8192, 8192, .causal = false },
    { "prefill 2 x 8192 of 4096 full", "bf16", "bf16", 32, 8, 128, 128, 16, 2, 8192, 4096, .causal = false },
    { "prefill 8 x 2048 page 16", "bf16", "bf16", 32, 8, 128, 128, 16, 8, 2048, 2048, .causal = true },
    { "prefill 2 x 8192 softcap", "bf16", "bf16", 32, 8, 128, 128, 16, 2, 8192, 8192, .causal = true, .softcap = true },
    { "prefill 2 x 8192 alibi", "bf16", "bf16", 32, 8, 128, 128, 16, 2, 8192, 8192, .causal = true, .alibi = true },
    { "prefill 2 x 8192 d64", "bf16", "bf16", 32, 32, 64, 64, 16, 2, 8192, 8192, .causal = true },
    { "prefill 2 x 8192 d256", "bf16", "bf16", 16, 8, 256, 256, 16, 2, 8192, 8192, .causal = true },
    { "prefill 2 x 8192 d64 softcap", "bf16", "bf16", 32, 32, 64, 64, 16, 2, 8192, 8192, .causal = true, .softcap = true },
    { "prefill 2 x 8192 d64 alibi", "bf16", "bf16", 32, 32, 64, 64, 16, 2, 8192, 8192, .causal = true, .alibi = true },
    { "prefill 2 x 8192 d256 softcap", "bf16", "bf16", 16, 8, 256, 256, 16, 2, 8192, 8192, .causal = true, .softcap = true },
    { "prefill 2 x 8192 d256 alibi", "bf16", "bf16", 16, 8, 256, 256, 16, 2, 8192, 8192, .causal = true, .alibi = true },
};

static const char noise_text[] =
    "extern \"C\" __global__ void noise(unsigned *p, size_t n, unsigned mask, unsigned one)\n"
    "{\n"
    "    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {\n"
    "        unsigned x = (unsigned)i * 2654435761u ^ (unsigned)(i >> 20);\n"
    "        x ^= x >> 16; x *= 0x85EBCA6Bu; x ^= x >> 13;\n"
    "        p[i] = (x & mask) | one;\n"
    "    }\n"
    "}\n"
    "extern \"C\" __global__ void stream_read(const uint4 *p, size_t n, unsigned *out)\n"
    "{\n"
    "    unsigned s = 0;\n"
    "    const size_t step = (size_t)gridDim.x * blockDim.x;\n"
    "    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;\n"
    "    for (; i + 7 * step < n; i += 8 * step) {\n"
    "        uint4 v[8];\n"
    "#pragma unroll\n"
    "        for (int k = 0; k < 8; k++) v[k] = __ldcs(p + i + k * step);\n"
    "#pragma unroll\n"
    "        for (int k = 0; k < 8; k++) s ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;\n"
    "    }\n"
    "    if (s == 0x12345678u) *out = s;\n"
    "}\n"
    "extern \"C\" __global__ void __launch_bounds__(128, 2) multiply(const unsigned *p, unsigned *out, int turns)\n"
    "{\n"
    "    float c[16][4] = {};\n"
    "    unsigned a[2][4], b[8][2];\n"
    "    for (int i = 0; i < 8; i++) a[i / 4][i % 4] = p[threadIdx.x + 128 * i];\n"
    "    for (int i = 0; i < 16; i++) b[i / 2][i % 2] = p[threadIdx.x + 128 * (8 + i)];\n"
    "    for (int t = 0; t < turns; t++)\n"
    "#pragma unroll\n"
    "        for (int i = 0; i < 16; i++)\n"
    "            asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\"\n"
    "                : \"+f\"(c[i][0]), \"+f\"(c[i][1]), \"+f\"(c[i][2]), \"+f\"(c[i][3])\n"
    "                : \"r\"(a[i & 1][0]), \"r\"(a[i & 1][1]), \"r\"(a[i & 1][2]), \"r\"(a[i & 1][3]), \"r\"(b[i / 2][0]), \"r\"(b[i / 2][1]));\n"
    "    float s = 0;\n"
    "    for (int i = 0; i < 64; i++) s += c[i / 4][i % 4];\n"
    "    if (s == 1.5f) *out = 1;\n"
    "}\n";

static CUfunction helper(const char *name)
{
    static const fv__jit_text extra = { "noise.cu", noise_text };
    const fv__cuda_program program = { .name = "noise", .source = "noise.cu", .extra = &extra, .num_extra = 1 };
    CUfunction f = NULL;
    fv_error err;
    MUST(fv__cuda_jit_function(ctx->cuda->jit, &program, name, stream, &f, &err));
    return f;
}

static void make_noise(CUdeviceptr p, size_t bytes, unsigned mask, unsigned one)
{
    fv_error err;
    size_t n = bytes / 4;
    void *parameters[] = { &p, &n, &mask, &one };
    const fv__cuda_launch l = { .function = helper("noise"), .stream = stream, .grid = { 1024, 1, 1 }, .block = { 256, 1, 1 } };
    MUST(fv__cuda_launch_kernel(device, &l, parameters, &err));
}

/* Microseconds a launch: `body` queues one launch per call, over `count` of them in a graph. */
static double time_graph(void (*body)(void *arg, int i), void *arg, int count)
{
    fv_error err;
    CUgraph graph;
    CUgraphExec exec;
    CUevent a, b;
    MUST(fv__cuda_event_create(device, true, &a, &err));
    MUST(fv__cuda_event_create(device, true, &b, &err));
    fv__cuda_enter(device, &err);
    const fv__cuda_api *api = &device->api;
    api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (int i = 0; i < count; i++) body(arg, i);
    if (api->cuStreamEndCapture(stream, &graph) != CUDA_SUCCESS || api->cuGraphInstantiateWithFlags(&exec, graph, 0) != CUDA_SUCCESS) {
        printf("capture failed\n");
        exit(1);
    }
    double best[5];
    for (int i = -1; i < 5; i++) {
        float ms = 0;
        fv__cuda_event_record(device, a, stream, &err);
        api->cuGraphLaunch(exec, stream);
        fv__cuda_event_record(device, b, stream, &err);
        MUST(fv__cuda_event_sync(device, b, &err));
        fv__cuda_event_ms(device, a, b, &ms, &err);
        if (i >= 0) best[i] = ms * 1e3 / count;
    }
    for (int i = 0; i < 5; i++)
        for (int j = i + 1; j < 5; j++)
            if (best[j] < best[i]) {
                const double x = best[i];
                best[i] = best[j];
                best[j] = x;
            }
    api->cuGraphExecDestroy(exec);
    api->cuGraphDestroy(graph);
    fv__cuda_leave(device);
    fv__cuda_event_destroy(device, a);
    fv__cuda_event_destroy(device, b);
    return best[2];
}

typedef struct load { fv_plan *plan; fv_tensors t; CUdeviceptr k, v; size_t step; int copies; } load;

static bool compile_only, stamps;

static void one_run(void *arg, int i)
{
    load *l = arg;
    fv_error err;
    fv_tensors t = l->t;
    t.k.data = (void *)(uintptr_t)(l->k + (CUdeviceptr)(i % l->copies) * l->step);
    if (l->v) t.v.data = (void *)(uintptr_t)(l->v + (CUdeviceptr)(i % l->copies) * l->step);
    MUST(fv_run(l->plan, &t, stream, &err));
}

typedef struct reading { CUfunction f; CUdeviceptr p, out; size_t bytes; } reading;

static void one_read(void *arg, int i)
{
    reading *r = arg;
    fv_error err;
    size_t n = r->bytes / 16;
    (void)i;
    void *parameters[] = { &r->p, &n, &r->out };
    const fv__cuda_launch l = { .function = r->f, .stream = stream, .grid = { (unsigned)device->facts.num_sms * 4, 1, 1 }, .block = { 256, 1, 1 } };
    MUST(fv__cuda_launch_kernel(device, &l, parameters, &err));
}

static void one_multiply(void *arg, int i)
{
    reading *r = arg;
    fv_error err;
    int turns = 4000;
    (void)i;
    void *parameters[] = { &r->p, &r->out, &turns };
    const fv__cuda_launch l = { .function = r->f, .stream = stream, .grid = { (unsigned)device->facts.num_sms * 2, 1, 1 }, .block = { 128, 1, 1 } };
    MUST(fv__cuda_launch_kernel(device, &l, parameters, &err));
}

static void time_ceiling(void)
{
    fv_error err;
    reading r = { .f = helper("stream_read"), .bytes = (size_t)4 << 30 };
    MUST(fv__cuda_alloc(device, r.bytes, &r.p, &err));
    MUST(fv__cuda_alloc(device, 64, &r.out, &err));
    make_noise(r.p, r.bytes, ~0u, 0);
    const double us = time_graph(one_read, &r, 4);
    printf("%-28s %10.1f us  %7.3f TB/s\n", "streaming read 4 GB", us, (double)r.bytes / us * 1e-6);
    r.f = helper("multiply");
    make_noise(r.p, 1 << 20, 0x80ff80ffu, 0x3f003f00u);
    const double mma_us = time_graph(one_multiply, &r, 4);
    printf("%-28s %10.1f us  %7s       %7.1f TFLOP/s\n", "mma.sync 16x8x16, 8 warps/SM", mma_us, "",
           4000.0 * 16 * 4096 * 4 * 2 * device->facts.num_sms / mma_us * 1e-6);
    fv__cuda_free(device, r.p);
    fv__cuda_free(device, r.out);
}

/* Where the time of a launch goes, by the kernel's own clocks (STAMP in attend_sm80.cu): medians over blocks, in cycles since the block began. */
static int by_value(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* What a worker's time is made of: least squares over the workers of ns = a pieces + b key blocks + c merged parts (rows x slots). */
typedef struct ledger { double a[3][4]; double busy, longest; int n; } ledger;

static void add_worker(ledger *x, const fv__plan_head *plan, int w, double ns)
{
    const int32_t *first = FV__PLAN_ARRAY(plan, int32_t, worker_first);
    double f[4] = { 0, 0, 0, ns };
    for (int32_t i = first[w]; i < first[w + 1]; i++) {
        const fv__piece *c = FV__PLAN_ARRAY(plan, fv__piece, pieces) + i;
        f[0] += c->num_keys > 0;
        f[1] += (c->num_keys + 63) / 64;
        f[2] += c->slot >= 0 ? c->num_rows * plan->unit_heads : 0;
    }
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 4; k++) x->a[i][k] += f[i] * f[k];
    x->busy += ns;
    x->longest = x->longest > ns ? x->longest : ns;
    x->n++;
}

static void print_ledger(ledger *x)
{
    double c[3] = { 0 };
    for (int i = 0; i < 3; i++) x->a[i][i] += 1e-9;     /* nobody has parts: no cost */
    for (int i = 0; i < 3; i++)
        for (int r = 0; r < 3; r++) {
            const double by = r == i ? 0 : x->a[r][i] / x->a[i][i];
            for (int k = 0; k < 4; k++) x->a[r][k] -= by * x->a[i][k];
        }
    for (int i = 0; i < 3; i++) c[i] = x->a[i][3] / x->a[i][i];
    printf("    workers are busy %.1f %% of the longest one's %.1f us; fitted: piece %.0f ns, key block %.0f ns, merged row %.1f ns\n",
           100 * x->busy / (x->n * x->longest), x->longest * 1e-3, c[0], c[1], c[2]);
}

static void print_stamps(const load *l, int workers)
{
    static const char *const names[] = { "", "begin", "piece read", "asked", "K there", "keys done", "written", "merged", "2nd read", "asked", "K there",
                                         "keys done", "written", "merged", "end", "" };
    fv_error err;
    enum { N = 16 };
    int64_t *all = malloc(sizeof(int64_t) * N * (size_t)workers), *column = malloc(sizeof(int64_t) * (size_t)workers);
    MUST(fv__cuda_fill_bytes(device, (CUdeviceptr)(uintptr_t)l->t.lse.data, 0, sizeof(int64_t) * N * (size_t)workers, stream, &err));
    one_run((void *)(uintptr_t)l, 1);
    MUST(fv__cuda_to_host(device, all, (CUdeviceptr)(uintptr_t)l->t.lse.data, sizeof(int64_t) * N * (size_t)workers, stream, &err));
    MUST(fv__cuda_stream_sync(device, stream, &err));
    int64_t first = INT64_MAX, last_start = 0, end = 0, first_end = INT64_MAX;
    for (int w = 0; w < workers; w++) {
        first = fv__min64(first, all[w * N]);
        last_start = fv__max64(last_start, all[w * N]);
        end = fv__max64(end, all[w * N + 15]);
        first_end = fv__min64(first_end, all[w * N + 15]);
    }
    printf("    blocks begin within %lld ns, the first ends after %lld ns, the last after %lld ns\n", (long long)(last_start - first),
           (long long)(first_end - first), (long long)(end - first));
    ledger times = { .n = 0 };
    for (int w = 0; w < workers; w++) add_worker(&times, l->plan->blob, w, (double)(all[w * N + 15] - all[w * N]));
    print_ledger(&times);
    printf("    cycles, median (longest):");
    for (int i = 2; i < 15; i++) {
        int n = 0;
        for (int w = 0; w < workers; w++)
            if (all[w * N + i]) column[n++] = all[w * N + i] - all[w * N + 1];
        if (!n) continue;
        qsort(column, (size_t)n, sizeof *column, by_value);
        printf(" %s %lld (%lld)", names[i], (long long)column[n / 2], (long long)column[n - 1]);
    }
    printf("\n");
    free(all);
    free(column);
}

/* Returns what counts of the shape: TFLOP/s, or TB/s of decoding; -1: it could not be run. */
static double time_shape(const timing *s)
{
    fv_error err = { 0 };
    const int bits = fv__dtypes[fv__dtype_find(s->k)].bits;
    const int pages = s->page ? (s->keys + s->page - 1) / s->page * s->n : 0;
    const int64_t tokens = (int64_t)s->keys * s->n;
    const size_t pool = (size_t)(tokens * s->hk * (s->dk > s->dv ? s->dk : s->dv)) * (size_t)bits / 8;
    const int copies = pool * 2 < ((size_t)300 << 20) ? (int)(((size_t)600 << 20) / (pool * 2)) : 2;
    static float slopes[256];
    for (int h = 0; h < s->hq; h++) slopes[h] = (float)exp2(-8.0 * (h + 1) / s->hq);
    const fv_tensor of_heads = { .data = slopes, .dtype = "f32", .ndim = 1, .shape = { s->hq }, .stride = { 1 } };
    const fv_arg cap = { .name = "cap", .number = 30 }, slope = { .name = "slopes", .tensor = &of_heads }, rotary = { .name = "rotary_dim", .number = s->dk };
    const fv_variant_use uses[] = { { .name = "causal" },
                                    s->softcap ? (fv_variant_use){ .name = "softcap", .args = &cap, .num_args = 1 }
                                    : s->rope  ? (fv_variant_use){ .name = "rope", .args = &rotary, .num_args = 1 }
                                               : (fv_variant_use){ .name = "alibi", .args = &slope, .num_args = 1 } };
    const fv_problem problem = { .q = s->q, .k = s->k, .v = s->v_in_k ? NULL : s->k, .o = s->q, .num_q_heads = s->hq, .num_kv_heads = s->hk,
                                 .dim_qk = s->dk, .dim_v = s->dv, .variants = uses, .num_variants = s->causal + (s->softcap || s->alibi || s->rope), .v_in_k = s->v_in_k };
    const int64_t rows = (int64_t)s->rows * s->n;
    const fv_plan_desc limits = { .max_requests = s->n, .max_rows = rows, .max_kv_tokens = tokens, .max_pages = pages };
    load l = { .copies = copies, .step = pool };
    const int64_t before = fv__os_now_ns();
    if (fv_plan_create(ctx, &problem, &limits, &l.plan, &err) != FV_OK) {
        printf("%-28s %s\n", s->name, err.text);
        return -1;
    }
    const double create_ms = (double)(fv__os_now_ns() - before) * 1e-6;
    if (compile_only) {
        printf("%-28s created in %.0f ms\n", s->name, create_ms);
        fv_plan_destroy(&l.plan);
        return 0;
    }
    CUdeviceptr q, o, lse = 0;
    const size_t q_bytes = (size_t)(rows * s->hq * s->dk) * 2;
    MUST(fv__cuda_alloc(device, q_bytes, &q, &err));
    MUST(fv__cuda_alloc(device, q_bytes, &o, &err));
    MUST(fv__cuda_alloc(device, pool * (size_t)copies, &l.k, &err));
    if (!s->v_in_k) MUST(fv__cuda_alloc(device, pool * (size_t)copies, &l.v, &err));
    const unsigned mask = bits == 16 ? 0x80ff80ffu : 0xb7b7b7b7u, one = bits == 16 ? 0x3f003f00u : 0;
    make_noise(q, q_bytes, 0x80ff80ffu, 0x3f003f00u);
    make_noise(l.k, pool * (size_t)copies, mask, one);
    if (l.v) make_noise(l.v, pool * (size_t)copies, mask, one);

    int32_t *indptr = malloc(sizeof(int32_t) * (size_t)(s->n + 1) * 4), *lengths = indptr + s->n + 1, *first = lengths + s->n + 1, *kv = first + s->n + 1;
    int32_t *ids = malloc(sizeof(int32_t) * (size_t)(pages + 1));
    for (int r = 0; r <= s->n; r++) {
        indptr[r] = r * s->rows;
        lengths[r] = s->keys;
        first[r] = s->n ? pages / s->n * r : 0;
        kv[r] = s->keys * r;
    }
    for (int i = 0; i < pages; i++) ids[i] = i;
    for (int i = pages - 1; i > 0; i--) {
        const int j = (int)((uniform() + 1) / 2 * i), x = ids[i];
        ids[i] = ids[j];
        ids[j] = x;
    }
    fv_batch batch = { .num_requests = s->n, .rows = fv_i32(indptr, s->n + 1), .lengths = fv_i32(lengths, s->n) };
    fv_tensor k;
    if (s->page) {
        batch.pages = (fv_pages){ .page_size = s->page, .num_pages = pages, .indptr = fv_i32(first, s->n + 1), .ids = fv_i32(ids, pages) };
        k = (fv_tensor){ .dtype = s->k, .ndim = 4, .shape = { pages, s->page, s->hk, s->dk },
                         .stride = { (int64_t)s->page * s->hk * s->dk, s->hk * s->dk, s->dk, 1 } };
    } else {
        batch.kv_indptr = fv_i32(kv, s->n + 1);
        k = tensor3(0, s->k, tokens, s->hk, s->dk);
    }
    fv_tensor v = k;
    v.shape[v.ndim - 1] = s->dv;
    l.t = (fv_tensors){ .q = tensor3(q, s->q, rows, s->hq, s->dk), .k = k, .o = tensor3(o, s->q, rows, s->hq, s->dv) };
    if (!s->v_in_k) l.t.v = v;
    if (stamps) {
        MUST(fv__cuda_alloc(device, fv__max64(rows * s->hq * 4, 1 << 20), &lse, &err));
        l.t.lse = (fv_tensor){ .data = (void *)(uintptr_t)lse, .dtype = "f32", .ndim = 2, .shape = { rows, s->hq }, .stride = { s->hq, 1 } };
    }
    const int64_t plan_before = fv__os_now_ns();
    MUST(fv_plan_update(l.plan, NULL, &batch, stream, &err));
    const double plan_us = (double)(fv__os_now_ns() - plan_before) * 1e-3;
    MUST(fv__cuda_stream_sync(device, stream, &err));
    for (int i = 0; i < 3; i++) one_run(&l, i);
    MUST(fv__cuda_stream_sync(device, stream, &err));
    const int64_t host_before = fv__os_now_ns();
    for (int i = 0; i < 20; i++) one_run(&l, i);
    const double host_us = (double)(fv__os_now_ns() - host_before) * 1e-3 / 20;
    MUST(fv__cuda_stream_sync(device, stream, &err));
    const double us = time_graph(one_run, &l, copies * (rows > 1000 ? 1 : 2) < 4 ? 4 : copies * (rows > 1000 ? 1 : 2));
    const double bytes = (double)tokens * s->hk * (s->dk + (s->v_in_k ? 0 : s->dv)) * bits / 8;
    const double pairs = s->causal ? (double)s->rows * s->keys - (double)s->rows * (s->rows - 1) / 2 : (double)s->rows * s->keys;
    const double flops = 2.0 * (s->dk + s->dv) * pairs * s->hq * s->n;
    fv_plan_stats stats;
    fv_plan_query(l.plan, &stats, &err);
    printf("%-28s %10.1f us  %7.3f TB/s  %7.1f TFLOP/s  host %.1f us  plan %.0f us  create %.0f ms  workers %d\n", s->name, us, bytes / us * 1e-6,
           flops / us * 1e-6, host_us, plan_us, create_ms, stats.workers);
    if (stamps) {
        print_stamps(&l, stats.workers);
        fv__cuda_free(device, lse);
    }
    fflush(stdout);
    fv_plan_destroy(&l.plan);
    fv__cuda_free(device, q);
    fv__cuda_free(device, o);
    fv__cuda_free(device, l.k);
    fv__cuda_free(device, l.v);
    free(indptr);
    free(ids);
    return s->rows == 1 ? bytes / us * 1e-6 : flops / us * 1e-6;
}

/* --------------------------------------------------------------------------------------------------------------- main */

enum { MAX_VARIANTS = 24 };

typedef struct variant { char name[32]; fv__attend_config tuned; bool decode; } variant;

static variant variants[MAX_VARIANTS];
static int num_variants;
static const variant *now;              /* 0 in a field: as it is */

static void tune(fv__attend_config *c)
{
    const fv__attend_config *t = &now->tuned;
    c->stamps = stamps;
    if (c->decode != now->decode) return;
    if (t->stages) c->stages = t->stages;
    if (t->blocks_per_sm) c->blocks_per_sm = t->blocks_per_sm;
    if (t->tile) c->tile = t->tile;
    if (t->warps) c->warps = t->warps;
    if (t->look) c->look = t->look;
    if (t->paired) c->paired = !c->v_in_k && c->stages % 2 == 0;
    if (!t->num_kinds) return;
    c->num_kinds = t->num_kinds;
    memcpy(c->kinds, t->kinds, sizeof c->kinds);
}

static int tune_number(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    return at ? atoi(at + strlen(key)) : 0;
}

/* NAME:KEY=N,... */
static bool read_variant(const char *text)
{
    const char *colon = strchr(text, ':');
    if (!colon || num_variants == MAX_VARIANTS) return false;
    variant *v = &variants[num_variants++];
    fv__attend_config *t = &v->tuned;
    snprintf(v->name, sizeof v->name, "%.*s", (int)(colon - text), text);
    text = colon + 1;
    v->decode = tune_number(text, "decode=");
    t->stages = tune_number(text, "stages=");
    t->blocks_per_sm = tune_number(text, "blocks=");
    t->tile = tune_number(text, "tile=");
    t->warps = tune_number(text, "warps=");
    t->look = tune_number(text, "look=");
    t->paired = tune_number(text, "paired=");
    const char *at = strstr(text, "kinds=");
    int n = 0;
    for (at = at ? at + 6 : ""; t->num_kinds < FV__ATTEND_KINDS; at += n + (at[n] == '+')) {
        fv__attend_kind *k = &t->kinds[t->num_kinds];
        if (sscanf(at, "%d.%d.%d.%d%n", &k->m_tiles, &k->warps_rows, &k->warps_values, &k->warps_keys, &n) != 4) break;
        t->num_kinds++;
    }
    return true;
}

/* Is one of the words, with commas between them, in the name? */
static bool matches(const char *name, const char *words)
{
    char word[64];
    for (const char *at = words; at && *at; at += strcspn(at, ","), at += *at == ',') {
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        if (strstr(name, word)) return true;
    }
    return !words;
}

static int part, num_parts = 1;

static bool is_default(const variant *v) { return !strcmp(v->name, "default"); }

static void check_all(const char *match)
{
    for (int i = part; i < FV__COUNT(shapes); i += num_parts)
        if (matches(shapes[i].name, match)) check_shape(&shapes[i]);
}

/* One after another, each on the shapes that it is for; a table last. */
static void time_all(const char *match)
{
    static double got[MAX_VARIANTS][FV__COUNT(timings)];
    if (!compile_only) time_ceiling();
    for (int v = 0; v < num_variants; v++) {
        now = &variants[v];
        printf("-- %s\n", now->name);
        for (int i = 0; i < FV__COUNT(timings); i++)
            if (matches(timings[i].name, match) && (is_default(now) || now->decode == (timings[i].rows == 1))) got[v][i] = time_shape(&timings[i]);
    }
    if (compile_only) return;
    printf("\n%-26s", "TB/s; TFLOP/s of prefill");
    for (int v = 0; v < num_variants; v++) printf(" %11.11s", variants[v].name);
    printf("\n");
    for (int i = 0; i < FV__COUNT(timings); i++) {
        if (!matches(timings[i].name, match)) continue;
        printf("%-26s", timings[i].name);
        for (int v = 0; v < num_variants; v++) {
            if (got[v][i] == 0) printf(" %11s", "");
            else if (got[v][i] < 0) printf(" %11s", "-");
            else printf(timings[i].rows == 1 ? " %11.3f" : " %11.1f", got[v][i]);
        }
        printf("\n");
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    const char *name = "cuda:0", *match = NULL;
    bool times = false, checks = true;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--device") && i + 1 < argc) name = argv[++i];
        else if (!strcmp(argv[i], "--match") && i + 1 < argc) match = argv[++i];
        else if (!strcmp(argv[i], "--variant") && i + 1 < argc && read_variant(argv[i + 1])) i++;
        else if (!strcmp(argv[i], "--time")) times = true;
        else if (!strcmp(argv[i], "--compile")) compile_only = times = true, checks = false;
        else if (!strcmp(argv[i], "--stamps")) stamps = times = true;
        else if (!strcmp(argv[i], "--no-check")) checks = false;
        else if (!strcmp(argv[i], "--part") && i + 1 < argc && sscanf(argv[i + 1], "%d/%d", &part, &num_parts) == 2 && part >= 0 && num_parts > 0) i++;
        else {
            printf("checkgpu [--device cuda:0] [--match WORD,...] [--time] [--no-check] [--variant NAME:KEY=N,...]... [--compile] [--stamps]"
                   " [--part I/N]\n");
            return 2;
        }
    }
    if (!num_variants) read_variant("default:");
    now = &variants[0];
    fv_error err;
    const fv_open_desc desc = { .device = name };
    if (fv_open(&desc, &ctx, &err) != FV_OK) {
        printf("not run: %s\n", err.text);
        return 77;
    }
    device = ctx->cuda->device;
    MUST(fv__cuda_stream_create(device, &stream, &err));
    if (num_variants > 1 || !is_default(now) || stamps) fv__attend_tune = tune;
    if (checks) check_all(match);
    if (times) time_all(match);
    fv__cuda_stream_destroy(device, stream);
    fv_close(&ctx);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
