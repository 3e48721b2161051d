/* SPDX-License-Identifier: Apache-2.0 */
/* norm_tmpl.c -- norms and gated activations for one CPU level. A row passes through a buffer of CHUNK floats as often as its formula needs (it
 * stays in the cache), so there is no scratch memory and no limit on its width. A lane adds up 64 elements before they join the row's sum, which
 * is in double. */
#include "cpu_companions.h"
#include "row_io.h"

#include <math.h>

enum { CHUNK = 1024, RUN = 64 * V_LANES };        /* elements of a buffer; of a sum that is formed in f32 */

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

/* Of n elements in whole vectors: their sum, or that of (z - mean)^2. */
static double sum_of(const float *z, int n, bool squares, float mean)
{
    double sum = 0;
    for (int from = 0; from < n; from += RUN) {
        const int end = from + RUN < n ? from + RUN : n;
        v_f32 s = v_set(0.0f);
        for (int i = from; i < end; i += V_LANES) {
            const v_f32 d = v_sub(v_load(z + i), v_set(mean));
            s = squares ? v_fma(d, d, s) : v_add(s, d);
        }
        for (int l = 0; l < V_LANES; l++) sum += (double)v_lane(s, l);
    }
    return sum;
}

static double mean_of(const fv__norm_job *job, row at, int width)
{
    float z[CHUNK];
    double sum = 0;
    for (int from = 0; from < width; from += CHUNK) {
        const int n = chunk_of(width, from);
        fetch(job, at, from, n, z);
        sum += sum_of(z, n, false, 0);
    }
    return sum / width;
}

/* Mean of (z - mean)^2. */
static double square_of(const fv__norm_job *job, row at, int width, float mean)
{
    float z[CHUNK];
    double sum = 0;
    for (int from = 0; from < width; from += CHUNK) {
        const int n = chunk_of(width, from);
        fetch(job, at, from, n, z);
        for (int i = n; i % V_LANES; i++) z[i] = mean;
        sum += sum_of(z, n, true, mean);
    }
    return sum / width;
}

static void put(const fv__norm_job *job, row at, int width, float mean, float inverse)
{
    float z[CHUNK], w[CHUNK], b[CHUNK];
    const v_f32 by = v_set(inverse), shift = v_set(mean), one = v_set(job->plus_one ? 1.0f : 0.0f);
    for (int from = 0; from < width; from += CHUNK) {
        const int n = chunk_of(width, from);
        fetch(job, at, from, n, z);
        if (job->residual.data) store_row(&job->residual, at.residual + from, n, z);
        load_row(&job->weight, from, n, w);
        if (job->bias.data) load_row(&job->bias, from, n, b);
        for (int i = 0; i < n; i += V_LANES) {
            v_f32 y = v_mul(v_mul(v_sub(v_load(z + i), shift), by), v_add(v_load(w + i), one));
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
        const float mean = job->centred ? (float)mean_of(job, at, width) : 0.0f;
        const double square = square_of(job, at, width, mean);
        put(job, at, width, mean, (float)(1 / sqrt(square + (double)job->eps)));
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
