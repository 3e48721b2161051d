/* SPDX-License-Identifier: Apache-2.0 */
/* ref.c -- the definition (ref.h), one row and one head at a time.
 *
 * Two passes over the keys: scores and their maximum first, then weights and the weighted sum.
 * Nothing is blocked, rescaled or skipped by bounds, so that no bug of a fast kernel can have a
 * twin here.
 */
#include "ref.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

int64_t ref_row_position(const ref_request *r, int64_t row)
{
    return r->row_position ? r->row_position[row] : r->first_position + r->keys - r->rows + row;
}

void ref_turn(const ref_rope *rope, int64_t position, double *x)
{
    const int half = rope->rotary_dim / 2;

    for (int i = 0; i < half; i++) {
        double *a = rope->interleaved ? &x[2 * i] : &x[i];
        double *b = rope->interleaved ? &x[2 * i + 1] : &x[i + half];
        const double angle = (double)position * (double)rope->freq[i];
        const double c = cos(angle), s = sin(angle), x0 = *a, x1 = *b;
        *a = x0 * c - x1 * s;
        *b = x1 * c + x0 * s;
    }
}

/* One row of Q or K as the scores want it. */
static void prepare_row(const ref_rope *rope, int64_t position, double *x, int n)
{
    ref_turn(rope, position, x);
    for (int i = 0; rope->kept && i < n; i++)
        x[i] = rope->kept(x[i]);
}

/* ----------------------------------------------------------------------------------- visibility */

static bool share_range(const ref_range *list, int n, int64_t x, int64_t y)
{
    for (int i = 0; i < n; i++)
        if (x >= list[i].lo && x < list[i].hi && y >= list[i].lo && y < list[i].hi)
            return true;
    return false;
}

static bool items_allow(const ref_request *r, int64_t p, int64_t c)
{
    int64_t lo = r->items[0];                       /* end of the prefix */

    if (c < lo)
        return true;
    for (int i = 1; i < r->num_items; lo += r->items[i++]) {
        const int64_t hi = lo + r->items[i];
        if (p >= lo && p < hi)
            return c >= lo && c < hi;
    }
    return false;
}

static int block_of(const int64_t *sizes, int n, int64_t at)
{
    int b = 0;

    while (b < n && at >= sizes[b])
        at -= sizes[b++];
    return b;
}

static bool blocks_allow(const ref_request *r, const ref_at *at)
{
    const int br = block_of(r->block_rows, r->num_block_rows, at->row);
    const int bc = block_of(r->block_cols, r->num_block_cols, at->key_position);

    return br < r->num_block_rows && bc < r->num_block_cols
        && r->block_map[(int64_t)br * r->num_block_cols + bc];
}

static bool tree_allows(const ref_request *r, int64_t row, int64_t key)
{
    const int64_t node = key - (r->keys - r->rows); /* the row whose own key this is; negative:
                                                       context */

    if (node < 0)
        return true;
    for (int64_t at = row; at >= 0; at = r->parent[at])
        if (at == node)
            return true;
    return false;
}

/* The masks that are lists; the plain bounds are in ref_visible. */
static bool lists_allow(const ref_request *r, const ref_at *at)
{
    if (r->bits && !r->bits[at->row * r->keys + at->key])
        return false;
    if (r->ranges && !share_range(r->ranges, r->num_ranges, at->key_position, at->key_position))
        return false;
    if (r->items && !items_allow(r, at->row_position, at->key_position))
        return false;
    if (r->block_map && !blocks_allow(r, at))
        return false;
    return !r->parent || tree_allows(r, at->row, at->key);
}

static bool causal_allows(const ref_problem *p, const ref_request *r, const ref_at *at)
{
    if (p->causal == 2)
        return at->key <= at->row;
    return !p->causal || at->key_position <= at->row_position
        || share_range(r->bidir, r->num_bidir, at->row_position, at->key_position);
}

static bool visible_at(const ref_problem *p, const ref_request *r, const ref_at *at)
{
    if (!causal_allows(p, r, at) || (r->absent && r->absent[at->key]))
        return false;
    if (p->window_left >= 0 && at->key_position < at->row_position - p->window_left)
        return false;
    if (p->window_right >= 0 && at->key_position > at->row_position + p->window_right)
        return false;
    if (r->diag && at->key_position != at->row_position)
        return false;
    return lists_allow(r, at) && (!p->visible || p->visible(p->user, at));
}

static ref_at place(const ref_request *r, int64_t row, int64_t key, int head)
{
    return (ref_at){ .row = row, .key = key, .head = head, .row_position = ref_row_position(r, row),
                     .key_position = r->first_position + key };
}

bool ref_visible(const ref_problem *p, const ref_request *r, int64_t row, int64_t key, int head)
{
    const ref_at at = place(r, row, key, head);

    return visible_at(p, r, &at);
}

/* ---------------------------------------------------------------------------- one row, one head */

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static double score_at(const ref_problem *p, const ref_at *at, const double *q, const double *k)
{
    double s = p->scale * dot(q, k, p->dk);

    if (p->softcap > 0)
        s = p->softcap * tanh(s / p->softcap);
    if (p->slope)
        s -= p->slope[at->head] * (double)(at->row_position - at->key_position);
    return p->score ? p->score(p->user, s, at) : s;
}

/* Fills seen[] (key indices) and s[] (their scores). `k` are the keys, turned. Returns how many. */
static int64_t scores(const ref_problem *p, const ref_request *r, int64_t row, int head,
                      const double *q, const double *k, int64_t *seen, double *s)
{
    const int g = head / (p->hq / p->hk);
    int64_t n = 0;
    ref_at at = place(r, row, 0, head);

    for (at.key = 0; at.key < r->keys; at.key++) {
        at.key_position = r->first_position + at.key;
        if (!visible_at(p, r, &at))
            continue;
        seen[n] = at.key;
        s[n++] = score_at(p, &at, q, k + (at.key * p->hk + g) * p->dk);
    }
    return n;
}

static void softmax_row(const ref_problem *p, const double *v, int head, int64_t n,
                        const int64_t *seen, const double *s, double *o, double *lse)
{
    const int g = head / (p->hq / p->hk);
    double m = p->sink ? p->sink[head] : -INFINITY;

    for (int64_t i = 0; i < n; i++)
        m = s[i] > m ? s[i] : m;
    memset(o, 0, (size_t)p->dv * sizeof *o);
    *lse = -INFINITY;
    if (n == 0 && !(p->sink && p->sink[head] > -INFINITY))
        return;

    double l = p->sink ? exp(p->sink[head] - m) : 0;
    for (int64_t i = 0; i < n; i++) {
        const double w = exp(s[i] - m);
        const double *vj = v + (seen[i] * p->hk + g) * p->dv;
        l += w;
        for (int d = 0; d < p->dv; d++)
            o[d] += w * vj[d];
    }
    for (int d = 0; d < p->dv; d++)
        o[d] /= l;
    *lse = m + log(l);
}

static void load_query(const ref_problem *p, const ref_request *r, int64_t row, int head, double *q)
{
    if (r->q)
        memcpy(q, r->q + (row * p->hq + head) * p->dk, (size_t)p->dk * sizeof *q);
    else
        r->query(r->query_user, row, head, q);
    if (p->rope)
        prepare_row(p->rope, ref_row_position(r, row), q, p->dk);
}

/* The keys, turned: `r->k` itself where nothing turns, else a copy (in *own, to be freed). NULL:
 * no memory. */
static const double *turned_keys(const ref_problem *p, const ref_request *r, double **own)
{
    const int64_t n = r->keys * p->hk;

    *own = NULL;
    if (!p->rope || n == 0)
        return r->k;
    double *k = *own = malloc((size_t)(n * p->dk) * sizeof *k);
    if (!k)
        return NULL;
    memcpy(k, r->k, (size_t)(n * p->dk) * sizeof *k);
    for (int64_t i = 0; i < n; i++)
        prepare_row(p->rope, r->first_position + i / p->hk, k + i * p->dk, p->dk);
    return k;
}

/* --------------------------------------------------------------------------------- all the rows */

typedef struct job {
    const ref_problem *p;
    const ref_request *r;
    const double *k;
    const int64_t *rows;
    int64_t n;
    double *o, *lse;
    _Atomic int64_t next;               /* next row to take */
    _Atomic bool failed;
} job;

static void do_row(job *w, int64_t i, double *q, int64_t *seen, double *s)
{
    const ref_problem *p = w->p;
    const int64_t row = w->rows ? w->rows[i] : i;

    for (int h = 0; h < p->hq; h++) {
        load_query(p, w->r, row, h, q);
        const int64_t n = scores(p, w->r, row, h, q, w->k, seen, s);
        softmax_row(p, w->r->v, h, n, seen, s, w->o + (i * p->hq + h) * p->dv,
                    &w->lse[i * p->hq + h]);
    }
}

static void *take_rows(void *arg)
{
    job *w = arg;
    const size_t keys = (size_t)w->r->keys + 1;
    double *q = malloc((size_t)w->p->dk * sizeof *q), *s = malloc(keys * sizeof *s);
    int64_t *seen = malloc(keys * sizeof *seen);

    if (!q || !s || !seen)
        w->failed = true;
    else
        for (int64_t i; (i = atomic_fetch_add(&w->next, 1)) < w->n; )
            do_row(w, i, q, seen, s);
    free(q);
    free(s);
    free(seen);
    return NULL;
}

enum { MAX_THREADS = 64 };

/* A thread costs some 20 us; below 10^5 products it is not worth one. */
static int useful_threads(const job *w, int threads)
{
    const double work = (double)w->n * w->p->hq * (double)w->r->keys * (w->p->dk + w->p->dv);

    if (work < 1e5 || threads < 1)
        return 1;
    return threads > MAX_THREADS ? MAX_THREADS : threads;
}

bool ref_attend(const ref_problem *p, const ref_request *r, const int64_t *rows, int64_t n,
                int threads, double *o, double *lse)
{
    double *own;
    job w = {
        .p = p, .r = r, .rows = rows, .n = n, .o = o, .lse = lse, .k = turned_keys(p, r, &own)
    };
    pthread_t id[MAX_THREADS];
    int started = 0;

    if (p->rope && r->keys && !w.k)
        return false;
    for (threads = useful_threads(&w, threads); started < threads - 1; started++)
        if (pthread_create(&id[started], NULL, take_rows, &w))
            break;
    take_rows(&w);
    while (started > 0)
        pthread_join(id[--started], NULL);
    free(own);
    return !w.failed;
}

bool ref_key_sums(const ref_problem *p, const ref_request *r, double *sums)
{
    double *own, lse;
    const double *k = turned_keys(p, r, &own);
    const size_t keys = (size_t)r->keys + 1;
    double *q = malloc((size_t)p->dk * sizeof *q), *s = malloc(keys * sizeof *s);
    double *o = malloc((size_t)p->dv * sizeof *o);
    int64_t *seen = malloc(keys * sizeof *seen);
    const bool ok = q && s && o && seen && (!p->rope || r->keys == 0 || k);

    memset(sums, 0, (size_t)(r->keys * p->hk) * sizeof *sums);
    for (int64_t row = 0; ok && row < r->rows; row++)
        for (int h = 0; h < p->hq; h++) {
            load_query(p, r, row, h, q);
            const int64_t n = scores(p, r, row, h, q, k, seen, s);
            softmax_row(p, r->v, h, n, seen, s, o, &lse);
            for (int64_t i = 0; i < n; i++)
                sums[seen[i] * p->hk + h / (p->hq / p->hk)] += exp(s[i] - lse);
        }
    free(own);
    free(q);
    free(s);
    free(o);
    free(seen);
    return ok;
}

void ref_merge(int states, int dv, const double *const *o, const double *lse, double *out,
               double *out_lse)
{
    double m = -INFINITY, sum = 0;

    for (int s = 0; s < states; s++)
        m = lse[s] > m ? lse[s] : m;
    for (int d = 0; d < dv; d++)
        out[d] = 0;
    *out_lse = -INFINITY;
    if (m == -INFINITY)
        return;
    for (int s = 0; s < states; s++)
        sum += exp(lse[s] - m);
    *out_lse = m + log(sum);
    for (int s = 0; s < states; s++)
        for (int d = 0; d < dv && lse[s] > -INFINITY; d++)
            out[d] += exp(lse[s] - *out_lse) * o[s][d];
}
