/* SPDX-License-Identifier: Apache-2.0 */
/* norm_tmpl.c -- norms and gated activations for one CPU level. A row passes through a buffer of CHUNK floats as often as its formula needs (it
 * stays in the cache), so there is no scratch memory and no limit on its width. A lane adds up 64 elements before they join the row's sum, which
 * is in double.
 *
 * Squares of f32 leave its range long before the elements do: a row whose sum says so is summed again times a power of two that brings its largest
 * element to 1 (scale_of). A mean is rounded to f32, and what it lacks is a sum of the same pass as the squares. */
#include "cpu_companions.h"
#include "row_io.h"

#include <float.h>
#include <math.h>

enum { CHUNK = 1024, RUN = 64 * V_LANES };        /* elements of a buffer; of a sum that is formed in f32 */

/* Between these f32 has room for a square that counts, and for 64 of the largest. */
#define LEAST_SQUARE 1e-30
#define LARGEST_SQUARE 1e30

void V_NAME(fv__norm_rows)(const fv__norm_job *job, int64_t first, int64_t last);
void V_NAME(fv__act_rows)(const fv__act_job *job, int64_t first, int64_t last);

static int chunk_of(int n, int from) { return n - from < CHUNK ? n - from : CHUNK; }

/* ------------------------------------------------------------------------------------------------------------- norms */

typedef struct row {                    /* where an item's elements begin */
    int64_t x, residual, y;
} row;

/* Elements of x + residual, n of them from `from`; zeros up to a whole vector, as load_row leaves them. */
static void fetch(const fv__norm_job *job, row at, int from, int n, float *z)
{
    float other[CHUNK];
    load_row(&job->x, at.x + from, n, z);
    if (job->residual.data) {
        load_row(&job->residual, at.residual + from, n, other);
        for (int i = 0; i < n; i += V_LANES) v_store(z + i, v_add(v_load(z + i), v_load(other + i)));
    }
}

/* Sums over a row of d = z - mean and of d^2; z scaled. */
typedef struct sums {
    double d, squares;
} sums;

enum { SUM = 1, SQUARES = 2 };          /* which of the two are needed */

/* Adds those of n elements in whole vectors. Inline: `which` is a constant. */
VFN void add_sums(const float *z, int n, float mean, int which, sums *out)
{
    for (int from = 0; from < n; from += RUN) {
        const int end = from + RUN < n ? from + RUN : n;
        v_f32 s = v_set(0.0f), q = v_set(0.0f);
        for (int i = from; i < end; i += V_LANES) {
            const v_f32 d = v_sub(v_load(z + i), v_set(mean));
            if (which & SUM) s = v_add(s, d);
            if (which & SQUARES) q = v_fma(d, d, q);
        }
        for (int l = 0; l < V_LANES && which & SUM; l++) out->d += (double)v_lane(s, l);
        for (int l = 0; l < V_LANES && which & SQUARES; l++) out->squares += (double)v_lane(q, l);
    }
}

static sums sums_of(const fv__norm_job *job, row at, int width, float scale, float mean, int which)
{
    float z[CHUNK];
    sums all = { 0, 0 };
    for (int from = 0; from < width; from += CHUNK) {
        const int n = chunk_of(width, from);
        fetch(job, at, from, n, z);
        for (int i = 0; scale != 1 && i < n; i++) z[i] *= scale;
        for (int i = n; i % V_LANES; i++) z[i] = mean;
        if (which == SUM) add_sums(z, n, mean, SUM, &all);
        else if (which == SQUARES) add_sums(z, n, mean, SQUARES, &all);
        else add_sums(z, n, mean, SUM | SQUARES, &all);
    }
    return all;
}

/* y = (z * scale - mean - rest) * inverse * weight. */
typedef struct measure {
    float scale, mean, rest;            /* mean + rest is the mean of z * scale; 0 unless centred */
    double square;                      /* mean of (z * scale - mean - rest)^2, and eps */
} measure;

static measure measure_row(const fv__norm_job *job, row at, int width, float scale)
{
    measure m = { .scale = scale };
    if (job->centred) m.mean = (float)(sums_of(job, at, width, scale, 0, SUM).d / width);
    const sums all = sums_of(job, at, width, scale, m.mean, job->centred ? SUM | SQUARES : SQUARES);
    const double rest = job->centred ? all.d / width : 0, square = all.squares / width - rest * rest;
    m.rest = (float)rest;
    m.square = (square < 0 ? 0 : square) + (double)job->eps * (double)scale * (double)scale;
    return m;
}

/* The power of two that brings a row's largest element next to 1; 1 where none does. */
static float scale_of(const fv__norm_job *job, row at, int width)
{
    float z[CHUNK], most = 0;
    for (int from = 0; from < width; from += CHUNK) {
        const int n = chunk_of(width, from);
        fetch(job, at, from, n, z);
        for (int i = 0; i < n; i++) most = fabsf(z[i]) > most ? fabsf(z[i]) : most;
    }
    if (most == 0 || most > FLT_MAX) return 1;
    const int e = ilogbf(most);
    return ldexpf(1, e > 126 ? -126 : e < -126 ? 126 : -e);
}

static void put(const fv__norm_job *job, row at, int width, const measure *m)
{
    float z[CHUNK], w[CHUNK], b[CHUNK];
    const v_f32 scale = v_set(m->scale), shift = v_set(-m->mean), rest = v_set(m->rest), by = v_set((float)(1 / sqrt(m->square)));
    const v_f32 one = v_set(job->plus_one ? 1.0f : 0.0f);
    const bool centred = job->centred;
    for (int from = 0; from < width; from += CHUNK) {
        const int n = chunk_of(width, from);
        fetch(job, at, from, n, z);
        if (job->residual.data) store_row(&job->residual, at.residual + from, n, z);
        load_row(&job->weight, from, n, w);
        if (job->bias.data) load_row(&job->bias, from, n, b);
        for (int i = 0; i < n; i += V_LANES) {
            const v_f32 x = v_load(z + i), d = centred ? v_sub(v_fma(x, scale, shift), rest) : v_mul(x, scale);
            v_f32 y = v_mul(v_mul(d, by), v_add(v_load(w + i), one));
            if (job->bias.data) y = v_add(y, v_load(b + i));
            v_store(z + i, y);
        }
        store_row(&job->y, at.y + from, n, z);
    }
}

void V_NAME(fv__norm_rows)(const fv__norm_job *job, int64_t first, int64_t last)
{
    const int width = job->x.width;
    for (int64_t item = first; item < last; item++) {
        const int64_t i = item / job->num_heads, h = item % job->num_heads;
        const row at = { i * job->x.stride[0] + h * job->x.stride[1], i * job->residual.stride[0] + h * job->residual.stride[1],
                         i * job->y.stride[0] + h * job->y.stride[1] };
        measure m = measure_row(job, at, width, 1);
        if (!(m.square >= LEAST_SQUARE && m.square <= LARGEST_SQUARE)) {
            const float scale = scale_of(job, at, width);
            if (scale != 1) m = measure_row(job, at, width, scale);
        }
        put(job, at, width, &m);
    }
}

/* ------------------------------------------------------------------------------------------------------- activations */

/* 1 / (1 + e^-x), without overflow and right in both tails. */
VFN v_f32 sigmoid(v_f32 x)
{
    const v_f32 e = v_exp(v_neg(v_abs(x))), one = v_set(1.0f);
    return v_div(v_select(v_ge(x, v_set(0.0f)), one, e), v_add(one, e));
}

/* Phi(x). The tail is exp(-x^2 / 2) times a polynomial in 1 / (1 + 0.3 |x|), a least squares fit in the largest relative error over |x| <= 14:
 * 6e-8. */
VFN v_f32 normal(v_f32 x)
{
    const v_f32 y = v_abs(x), one = v_set(1.0f);
    const v_f32 t = v_div(one, v_add(one, v_mul(v_set(0.3f), y)));
    v_f32 p = v_set(0.0383782895702f);
    p = v_fma(p, t, v_set(-0.169166111617f));
    p = v_fma(p, t, v_set(0.228660081079f));
    p = v_fma(p, t, v_set(-0.0765064775832f));
    p = v_fma(p, t, v_set(0.142535524519f));
    p = v_fma(p, t, v_set(0.0946835229039f));
    p = v_fma(p, t, v_set(0.121920342221f));
    p = v_fma(p, t, v_set(0.119487688947f));
    p = v_fma(p, t, v_set(7.16887607788e-06f));
    const v_f32 tail = v_mul(p, v_exp(v_mul(v_mul(y, y), v_set(-0.5f))));
    return v_select(v_lt(x, v_set(0.0f)), tail, v_sub(one, tail));
}

/* (1 + tanh u) / 2 is the sigmoid of 2 u. */
VFN v_f32 tanh_normal(v_f32 x)
{
    const v_f32 cubic = v_mul(x, v_fma(v_mul(x, x), v_set(0.044715f), v_set(1.0f)));
    return sigmoid(v_mul(cubic, v_set(1.59576912160573f)));
}

/* x times its gate; -inf has the gate 0 and gives 0. */
VFN v_f32 gated(v_f32 x, v_f32 gate)
{
    return v_select(v_eq(gate, v_set(0.0f)), v_set(0.0f), v_mul(x, gate));
}

static void act_chunk(fv__act act, int n, float *z, const float *by)
{
    for (int i = 0; i < n; i += V_LANES) {
        const v_f32 x = v_load(z + i);
        const v_f32 gate = act == FV__ACT_SILU ? sigmoid(x) : act == FV__ACT_GELU ? normal(x) : tanh_normal(x);
        v_store(z + i, v_mul(gated(x, gate), v_load(by + i)));
    }
}

void V_NAME(fv__act_rows)(const fv__act_job *job, int64_t first, int64_t last)
{
    float z[CHUNK], by[CHUNK];
    const int width = job->y.width;
    for (int64_t i = first; i < last; i++)
        for (int from = 0; from < width; from += CHUNK) {
            const int n = chunk_of(width, from);
            const int64_t x = i * job->x.stride[0] + from;
            load_row(&job->x, x, n, z);
            load_row(&job->x, x + width, n, by);
            act_chunk(job->act, n, z, by);
            store_row(&job->y, i * job->y.stride[0] + from, n, z);
        }
}
