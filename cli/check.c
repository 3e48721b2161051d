/* SPDX-License-Identifier: Apache-2.0 */
/* check.c -- see check.h. */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HEADS_PER_ROW 2
#define KEYS_PER_ROW 24

static int64_t draw(checker *c, int64_t count)
{
    c->random = mix64(c->random, 1);
    return (int64_t)(c->random % (uint64_t)count);
}

void check_begin(checker *c, const serve *s)
{
    c->layer = (int)draw(c, s->config.layers);
    c->step_error = -1;
}

static void load_row(const element_type *type, const char *at, int64_t count, double *out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = type->load(at + i * type->bytes);
}

/* ---- what a failure says ---- */

typedef struct place {
    checker *c;
    const serve *s;
    int64_t row, request, position;     /* of the step, of the step, of the request */
    int layer;
    const int32_t *pages;
} place;

static void fail_at(const place *at, const char *what, int64_t head, int64_t key, double got,
                    double want)
{
    if (at->c->failures++)
        return;
    snprintf(at->c->failure, sizeof at->c->failure,
             "%s of request %lld (trace line %lld), position %lld, layer %d, head %lld, key %lld: "
             "%.7g, the definition says %.7g",
             what, (long long)at->s->step.requests[at->request]->index,
             (long long)at->c->trace->requests[at->s->step.requests[at->request]->index].line,
             (long long)at->position, at->layer, (long long)head, (long long)key, got, want);
}

/* The first element that is further off than `relative` x |want| + `absolute`, or is no number; -1:
 * none. */
static int64_t first_off(const double *got, const double *want, int64_t count, double relative,
                         double absolute)
{
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(got[i] - want[i]) <= relative * fabs(want[i]) + absolute))
            return i;
    return -1;
}

static const layer_kind *kind_of(const place *at)
{
    return &at->s->config.geometry.kinds[geometry_kind(&at->s->config.geometry, at->layer)];
}

/* ---- inputs: what cache and turned queries hold, against what they were made from ---- */

/* The row of a plane that a token is given, `head` of it, in double; turned when `position` >=
 * 0. */
static void source(const place *at, int plane, uint64_t token, int64_t head, int64_t position,
                   double *out)
{
    const serve_plane *p = &at->s->planes[plane];
    const element_type *type = at->s->config.type;
    const int64_t row = (int64_t)(token % (uint64_t)at->s->source_rows);
    const layer_kind *kind = kind_of(at);
    load_row(type,
             p->source.data +
                 (row * p->stride + (int64_t)at->layer * LAYER_SHIFT + head * p->dim) * type->bytes,
             p->dim, out);
    if (position >= 0 && kind->rope.rotary_dim)
        definition_turn(out, kind->rope.rotary_dim / 2, kind->rope.interleaved,
                        at->s->frequencies[kind - at->s->config.geometry.kinds], position);
}

/* Rounding to `type` of values that were turned in f32. */
static double rounding_floor(const element_type *type, double scale)
{
    return 0.51 * type->step * scale + 4e-5;
}

static void check_key(const place *at, const definition_cache *cache, int64_t key, int64_t kv_head)
{
    const serve *s = at->s;
    const geometry *g = &s->config.geometry;
    const uint64_t token = trace_token(at->c->trace, s->step.requests[at->request]->index, key);
    const double relative = 1.01 * cache->type->rounding,
                 absolute = rounding_floor(cache->type, s->cache_scale);
    double want[1024], got[1024];
    source(at, PLANE_K, token, kv_head, g->tail ? -1 : key, want);
    if (g->tail)
        source(at, PLANE_K_TAIL, token, kv_head, key, want + cache->dim_k);
    definition_key(cache, at->pages, key, kv_head, got);
    int64_t i = first_off(got, want, g->dim_qk, relative, absolute);
    if (i >= 0)
        fail_at(at, "a cached key", kv_head, key, got[i], want[i]);
    at->c->keys++;
    if (g->v_in_k)
        return;
    source(at, PLANE_V, token, kv_head, -1, want);
    definition_value(cache, at->pages, key, kv_head, got);
    i = first_off(got, want, g->dim_v, relative, absolute);
    if (i >= 0)
        fail_at(at, "a cached value", kv_head, key, got[i], want[i]);
}

static void check_keys(const place *at, const definition_cache *cache)
{
    const int64_t window = kind_of(at)->window;
    const int64_t first = window < 0 ? 0 : max_i64(0, at->position - window);
    check_key(at, cache, at->position, draw(at->c, cache->kv_heads));
    for (int i = 0; i < KEYS_PER_ROW; i++)
        check_key(at, cache, first + draw(at->c, at->position - first + 1),
                  draw(at->c, cache->kv_heads));
}

/* q of a row and head as the engine read it, checked against what it was turned from. */
static void load_query(const place *at, int64_t head, double *q)
{
    const serve *s = at->s;
    const geometry *g = &s->config.geometry;
    const element_type *type = s->config.type;
    const int64_t dim = g->dim_qk - g->tail, width = g->tail ? g->tail : dim,
                  first = g->tail ? dim : 0;
    double want[1024];
    load_row(type, serve_plane_row(s, PLANE_Q, at->layer, at->row) + head * dim * type->bytes, dim,
             q);
    if (!kind_of(at)->rope.rotary_dim)
        return;
    load_row(type, s->q_turned.data + ((at->row * g->q_heads + head) * width) * type->bytes, width,
             q + first);
    source(at, g->tail ? PLANE_Q_TAIL : PLANE_Q, s->step.tokens[at->row], head, at->position, want);
    const int64_t i =
        first_off(q + first, want, width, 1.01 * type->rounding, rounding_floor(type, 1));
    if (i >= 0)
        fail_at(at, "a turned query", head, at->position, q[first + i], want[i]);
}

/* ---- outputs ---- */

/* What the types on the way may round: weights and outputs of 16 bits, sums of f32. */
static double allowed(const serve *s)
{
    const double weights =
        s->config.cache_type->bytes == 1 ? 0x1p-8 : s->config.cache_type->rounding;
    return 2 * fmax(s->config.type->rounding, weights) + 5e-5;
}

static void check_head(const place *at, const definition_cache *cache, int64_t head)
{
    checker *c = at->c;
    const serve *s = at->s;
    const geometry *g = &s->config.geometry;
    const element_type *type = s->config.type;
    double q[1024], o[1024], magnitude[1024], lse, got[1024], got_lse;
    load_query(at, head, q);
    const definition_row row = { .q = q, .scale = s->scale,
                                 .kv_head = head / (g->q_heads / g->kv_heads), .pages = at->pages,
                                 .position = at->position, .window = kind_of(at)->window };
    definition_attend(cache, &row, o, magnitude, &lse);

    const int64_t place_of_row = at->row * g->q_heads + head;
    load_row(type, s->o.data + place_of_row * g->dim_v * type->bytes, g->dim_v, got);
    got_lse = element_find("f32")->load(s->lse.data + place_of_row * 4);
    for (int64_t i = 0; i < g->dim_v; i++) {
        const double error = fabs(got[i] - o[i]), limit = allowed(s) * magnitude[i] + 1e-6;
        if (!(error <= limit))
            fail_at(at, "the output", head, at->position, got[i], o[i]);
        c->step_error = fmax(c->step_error, error);
        c->max_share = fmax(c->max_share, error / limit);
    }
    if (!(fabs(got_lse - lse) <= 4 * type->rounding + 2e-4))
        fail_at(at, "the LSE", head, at->position, got_lse, lse);
    c->max_error = fmax(c->max_error, c->step_error);
    c->heads++;
}

static definition_cache cache_of(const serve *s, int layer)
{
    const geometry *g = &s->config.geometry;
    return (definition_cache){ .type = s->config.cache_type, .k = s->k[layer].data,
                               .k_tail = s->k_tail[layer].data, .v = s->v[layer].data,
                               .page_size = s->config.page_size, .kv_heads = g->kv_heads,
                               .dim_k = g->dim_qk - g->tail, .tail = g->tail, .dim_v = g->dim_v,
                               .k_scale = s->cache_scale, .v_scale = s->cache_scale };
}

static void check_row(checker *c, const serve *s, int layer, int64_t row)
{
    const int64_t request = s->step.row_request[row];
    const definition_cache cache = cache_of(s, layer);
    const place at = { .c = c, .s = s, .row = row, .request = request,
                       .position = s->step.positions[row], .layer = layer,
                       .pages = serve_page_list(s, request) };
    const int64_t window = kind_of(&at)->window;
    serve_look_at_rows(s, row, 1);
    serve_look_at_keys(s, layer, request, window < 0 ? 0 : max_i64(0, at.position - window),
                       at.position);
    check_keys(&at, &cache);
    for (int h = 0; h < HEADS_PER_ROW; h++)
        check_head(&at, &cache, draw(c, s->config.geometry.q_heads));
    c->rows++;
}

/* ---- the digest ---- */

static uint64_t hash_bytes(const char *at, int64_t count)
{
    uint64_t h = (uint64_t)count, word;
    for (int64_t i = 0; i < count; i += 8) {
        word = 0;
        memcpy(&word, at + i, (size_t)min_i64(8, count - i));
        h = (h ^ word) * 0x9fb21c651e98df25u;
        h ^= h >> 29;
    }
    return h;
}

/* Adds the last row of each request that hands out a token after this step. */
static void digest_layer(checker *c, const serve *s, int layer)
{
    const geometry *g = &s->config.geometry;
    const int64_t o_bytes = (int64_t)g->q_heads * g->dim_v * s->config.type->bytes,
                  lse_bytes = (int64_t)g->q_heads * 4;
    serve_look_at_rows(s, 0, s->step.num_rows);
    for (int64_t i = 0; i < s->step.num_requests; i++) {
        const live_request *r = s->step.requests[i];
        const int64_t row = s->step.rows[i + 1] - 1;
        if (r->done + r->rows != r->known)
            continue;
        uint64_t h = mix64(mix64(mix64((uint64_t)r->index, (uint64_t)r->known), (uint64_t)layer),
                           hash_bytes(s->o.data + row * o_bytes, o_bytes));
        c->digest += mix64(h, hash_bytes(s->lse.data + row * lse_bytes, lse_bytes));
    }
}

void check_layer(void *user, serve *s, int layer)
{
    checker *c = user;
    if (c->digesting)
        digest_layer(c, s, layer);
    if (layer == c->layer && s->step.num_rows > 0)
        for (int64_t i = 0; i < c->rows_per_step; i++)
            check_row(c, s, layer, draw(c, s->step.num_rows));
    serve_look_away(s, layer);
}
