/* SPDX-License-Identifier: Apache-2.0 */
/* definition.c -- see definition.h. Nothing here is clever: it is what the engine is compared
 * with. */
#include "definition.h"
#include "cli.h"

#include <math.h>
#include <stdlib.h>

/* Elements [0, dim) of a key in a tensor that is `dim` wide. */
static void read_part(const definition_cache *c, const char *base, int64_t dim, int64_t count,
                      double scale, const int32_t *pages, int64_t key, int64_t kv_head, double *out)
{
    const int64_t token = (int64_t)pages[key / c->page_size] * c->page_size + key % c->page_size;
    const char *at = base + (token * c->kv_heads + kv_head) * dim * c->type->bytes;
    for (int64_t i = 0; i < count; i++)
        out[i] = scale * c->type->load(at + i * c->type->bytes);
}

void definition_key(const definition_cache *c, const int32_t *pages, int64_t key, int64_t kv_head,
                    double *out)
{
    read_part(c, c->k, c->dim_k, c->dim_k, c->k_scale, pages, key, kv_head, out);
    if (c->k_tail)
        read_part(c, c->k_tail, c->tail, c->tail, c->k_scale, pages, key, kv_head, out + c->dim_k);
}

void definition_value(const definition_cache *c, const int32_t *pages, int64_t key, int64_t kv_head,
                      double *out)
{
    if (c->v)
        read_part(c, c->v, c->dim_v, c->dim_v, c->v_scale, pages, key, kv_head, out);
    else
        read_part(c, c->k, c->dim_k, c->dim_v, c->k_scale, pages, key, kv_head, out);
}

void definition_attend(const definition_cache *c, const definition_row *r, double *o,
                       double *magnitude, double *lse)
{
    const int64_t dim = c->dim_k + c->tail;
    const int64_t first = r->window < 0 ? 0 : max_i64(0, r->position - r->window),
                  last = r->position;
    double *s = need((size_t)(last - first + 1), sizeof *s),
           *x = need((size_t)(dim + c->dim_v), sizeof *x);
    double top = -INFINITY, sum = 0;

    for (int64_t j = first; j <= last; j++) {
        double dot = 0;
        definition_key(c, r->pages, j, r->kv_head, x);
        for (int64_t i = 0; i < dim; i++)
            dot += r->q[i] * x[i];
        s[j - first] = r->scale * dot;
        top = fmax(top, s[j - first]);
    }
    for (int64_t j = first; j <= last; j++)
        sum += exp(s[j - first] - top);
    *lse = top + log(sum);

    for (int64_t i = 0; i < c->dim_v; i++)
        o[i] = magnitude[i] = 0;
    for (int64_t j = first; j <= last; j++) {
        const double weight = exp(s[j - first] - *lse);
        definition_value(c, r->pages, j, r->kv_head, x);
        for (int64_t i = 0; i < c->dim_v; i++) {
            o[i] += weight * x[i];
            magnitude[i] += weight * fabs(x[i]);
        }
    }
    free(x);
    free(s);
}

void definition_turn(double *x, int pairs, bool interleaved, const float *frequencies,
                     int64_t position)
{
    for (int i = 0; i < pairs; i++) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + pairs;
        const double angle = (double)position * (double)frequencies[i], c = cos(angle),
                     s = sin(angle);
        const double xa = x[a], xb = x[b];
        x[a] = xa * c - xb * s;
        x[b] = xb * c + xa * s;
    }
}
