/* SPDX-License-Identifier: Apache-2.0 */
/* checkattn_store.c -- a row's numbers as bytes of the chosen types, dense, once per row and type.
 *
 * Rows promise that every value is exact in every type that they name; a value that is not makes
 * the row not runnable with that type, because the reference would then compute something else.
 */
#include "checkattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct maker {
    const case_row *row;
    char *why;
    size_t size;
} maker;

static bool store_exact(maker *m, int type, void *base, int64_t i, double x)
{
    num_store(type, base, i, x);
    if (num_load(type, base, i) == x)
        return true;
    snprintf(m->why, m->size, "%.17g is not exact in %s", x, num_types[type].name);
    return false;
}

/* ---- 4-bit groups: 16 elements = codes of e2m1 x one e4m3 scale ---- */

/* Writes the codes of x[16] under this scale. False: some element is no multiple that the type
 * has. */
static bool codes_fit(const double *x, double scale, uint8_t *out, int64_t at)
{
    for (int i = 0; i < 16; i++) {
        const uint32_t code = num_encode(NUM_FP4, x[i] / scale);
        if (num_decode(NUM_FP4, code) * scale != x[i])
            return false;
        num_put(NUM_FP4, out, at + i, code);
    }
    return true;
}

/* The generated scale is tried first, then every scale there is: a group of which one element
 * was set, or a constant. */
static bool store_group(maker *m, const double *x, double likely, uint8_t *out, int64_t at,
                        uint8_t *block)
{
    if (codes_fit(x, likely, out, at)) {
        *block = (uint8_t)num_encode(NUM_E4M3, likely);
        return true;
    }
    for (uint32_t scale = 0x7E; scale > 0; scale--)
        if (codes_fit(x, num_decode(NUM_E4M3, scale), out, at)) {
            *block = (uint8_t)scale;
            return true;
        }
    snprintf(m->why, m->size, "16 elements from %.9g on have no common 4-bit scale", x[0]);
    return false;
}

typedef double element(const case_row *row, int64_t token, int head, int dim);

static bool store_fp4_row(maker *m, element *get, uint32_t seed, int64_t token, int head, int width,
                          uint8_t *out, uint8_t *blocks)
{
    double x[16];

    for (int d = 0; d < width; d += 16) {
        const uint64_t flat =
            ((uint64_t)token * (uint64_t)m->row->hk + (uint64_t)head) * (uint64_t)width
            + (uint64_t)d;
        for (int i = 0; i < 16; i++)
            x[i] = get(m->row, token, head, d + i);
        if (!store_group(m, x, case_fp4_scale(seed, (uint32_t)flat / 16), out, d, &blocks[d / 16]))
            return false;
    }
    return true;
}

/* ---- groups of 32 or 64: codes, a scale and a zero ---- */

static bool int4_fits(const double *x, int n, double scale, double zero, uint8_t *out, int64_t at)
{
    for (int i = 0; i < n; i++) {
        const double code = x[i] / scale + zero;
        if (!(code >= 0 && code <= 15) || code != nearbyint(code) || (code - zero) * scale != x[i])
            return false;
        num_put(NUM_INT4, out, at + i, (uint32_t)code);
    }
    return true;
}

static bool put_pair(uint8_t *pair, double scale, double zero)
{
    num_store(NUM_F16, pair, 0, scale);
    num_store(NUM_F16, pair, 1, zero);
    return num_load(NUM_F16, pair, 0) == scale && num_load(NUM_F16, pair, 1) == zero;
}

/* The generated pair first; then, for a constant or a group of which one element was set, every
 * zero in halves with every scale that makes x[0] some code. */
static bool store_int4_group(maker *m, const double *x, int n, double scale, double zero,
                             uint8_t *out, int64_t at, uint8_t *pair)
{
    if (int4_fits(x, n, scale, zero, out, at) && put_pair(pair, scale, zero))
        return true;
    if (int4_fits(x, n, 1, 0, out, at) && put_pair(pair, 1, 0))
        return true;
    for (zero = -15; zero <= 30; zero += 0.5)
        for (int code = 0; code < 16; code++) {
            scale = x[0] / (code - zero);
            if (code != zero && scale > 0 && int4_fits(x, n, scale, zero, out, at) && put_pair(pair, scale, zero))
                return true;
        }
    snprintf(m->why, m->size, "%d elements from %.9g on have no common scale and zero", n, x[0]);
    return false;
}

static bool store_int4_row(maker *m, element *get, uint32_t seed, int64_t token, int head, int width,
                           uint8_t *out, uint8_t *pairs)
{
    const int n = case_int4_group(m->row);
    double x[64];

    for (int d = 0; d < width; d += n) {
        const uint64_t flat = ((uint64_t)token * (uint64_t)m->row->hk + (uint64_t)head) * (uint64_t)width + (uint64_t)d;
        const uint32_t group = (uint32_t)flat / (uint32_t)n;
        for (int i = 0; i < n; i++)
            x[i] = get(m->row, token, head, d + i);
        if (!store_int4_group(m, x, n, case_int4_scale(seed, group), case_int4_zero(seed, group), out, d, pairs + d / n * 4))
            return false;
    }
    return true;
}

static bool store_row(maker *m, element *get, int type, int64_t token, int head, int width,
                      void *out)
{
    for (int d = 0; d < width; d++)
        if (!store_exact(m, type, out, d, get(m->row, token, head, d)))
            return false;
    return true;
}

int stored_blocks(const stored *s, int width)
{
    return s->block_type < 0 ? 0 : width / s->group * (s->block_type == NUM_F16 ? 2 : 1);
}

static bool store_any_row(maker *m, const stored *s, element *get, uint32_t seed, int64_t token, int head,
                          int width, uint8_t *out, uint8_t *blocks)
{
    if (s->kv_type == NUM_FP4)
        return store_fp4_row(m, get, seed, token, head, width, out, blocks);
    if (s->kv_type == NUM_INT4)
        return store_int4_row(m, get, seed, token, head, width, out, blocks);
    return store_row(m, get, s->kv_type, token, head, width, out);
}

/* All tokens and heads of K (seed 2) or V (seed 3). */
static bool store_cache(maker *m, const stored *s, element *get, uint32_t seed, int width,
                        int64_t row_bytes, uint8_t *out, uint8_t *blocks)
{
    const int64_t block_bytes = s->block_type < 0 ? 0 : num_bytes(s->block_type, stored_blocks(s, width));

    for (int64_t t = 0; t < m->row->total_kv; t++)
        for (int h = 0; h < m->row->hk; h++) {
            const int64_t at = t * m->row->hk + h;
            if (!store_any_row(m, s, get, seed, t, h, width, out + at * row_bytes,
                               blocks ? blocks + at * block_bytes : NULL))
                return false;
        }
    return true;
}

static bool store_queries(maker *m, const stored *s)
{
    const case_row *row = m->row;

    for (int r = 0; r < row->num_requests; r++)
        for (int64_t i = 0; i < row->q.at[r]; i++)
            for (int h = 0; h < row->hq; h++)
                if (!store_row(m, case_q, s->q_type, case_q_token(row, r, i), h, row->dk,
                               s->q + ((row->q_base[r] + i) * row->hq + h) * s->q_row))
                    return false;
    return true;
}

static bool allocate(const case_row *row, stored *s)
{
    const size_t items = (size_t)(row->total_kv * row->hk) + 1;

    s->k = malloc(items * (size_t)s->k_row);
    s->q = malloc(((size_t)(row->total_q * row->hq) + 1) * (size_t)s->q_row);
    if (!row->mla)
        s->v = malloc(items * (size_t)s->v_row);
    if (s->block_type >= 0) {
        s->k_block = malloc(items * (size_t)num_bytes(s->block_type, stored_blocks(s, row->dk)));
        s->v_block = malloc(items * (size_t)num_bytes(s->block_type, stored_blocks(s, row->dv)));
    }
    return s->k && s->q && (row->mla || s->v)
           && (s->block_type < 0 || (s->k_block && s->v_block));
}

bool stored_make(const case_row *row, int dtype, stored *out, char *why, size_t size)
{
    static const int kv_types[CASE_KVS] = { -1, NUM_E4M3, NUM_E5M2, NUM_FP4, NUM_INT4, NUM_INT4 };
    const int kv_type = row->x.int8                     ? NUM_INT8
                        : row->kv_dtype == CASE_KV_SAME ? dtype
                                                        : kv_types[row->kv_dtype];
    maker m = { row, why, size };

    *out = (stored){ .q_type = dtype, .kv_type = kv_type, .k_row = num_bytes(kv_type, row->dk),
                     .v_row = num_bytes(kv_type, row->dv), .q_row = num_bytes(dtype, row->dk) };
    out->block_type = kv_type == NUM_FP4 ? NUM_E4M3 : kv_type == NUM_INT4 ? NUM_F16 : -1;
    out->group = kv_type == NUM_FP4 ? 16 : case_int4_group(row);
    if (out->block_type >= 0 && (row->dk % out->group || row->dv % (row->mla ? 32 : out->group))) {
        snprintf(why, size, "4-bit groups of %d do not fill rows of %d and %d", out->group, row->dk, row->dv);
        return false;
    }
    snprintf(why, size, "no memory");
    if (allocate(row, out) && store_queries(&m, out)
        && store_cache(&m, out, case_k, 2, row->dk, out->k_row, out->k, out->k_block)
        && (row->mla || store_cache(&m, out, case_v, 3, row->dv, out->v_row, out->v, out->v_block)))
        return true;
    stored_free(out);
    return false;
}

void stored_free(stored *s)
{
    free(s->k);
    free(s->v);
    free(s->k_block);
    free(s->v_block);
    free(s->q);
    *s = (stored){ 0 };
}
