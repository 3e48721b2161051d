/* SPDX-License-Identifier: Apache-2.0 */
/* test_companions.c -- foveal/ops.h on every CPU level of the machine. Norms and activations against double; softmax, filters, samples and
 * verification against the definitions of the header written out here with sorted lists and one draw at a time, byte for byte and id for id, and
 * the samples' frequencies against the probabilities. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cpu/cpu_companions.h"
#include "foveal/ops.h"
#include "levels.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64 };

/* The call fails with FV_E_INVALID, the field and the message hold these words. */
#define INVALID(call, field_word, text_word) REFUSED(call, FV_E_INVALID, field_word, text_word)

/* ------------------------------------------------------------------------------------------------------------ tensors
 * between guards; every byte that is no element of the view keeps its pattern. */

typedef struct block {
    fv_tensor t;
    fv__dtype dtype;
    unsigned char *memory;
    size_t bytes;
} block;

/* [rows][width], rows `gap` elements apart; `shift` elements off alignment. */
static block make(const char *dtype, int64_t rows, int64_t width, int64_t gap, int shift)
{
    block b = { .dtype = fv__dtype_find(dtype) };
    const int64_t stride = width + gap;
    b.bytes = (size_t)fv__dtype_bytes(b.dtype, (rows > 0 ? (rows - 1) * stride + width : 0) + shift) + 2 * GUARD;
    b.memory = malloc(b.bytes);
    assert_non_null(b.memory);
    for (size_t i = 0; i < b.bytes; i++) b.memory[i] = (unsigned char)(i * 37 + 11);
    b.t = (fv_tensor){ .data = b.memory + GUARD + fv__dtype_bytes(b.dtype, shift), .dtype = dtype, .ndim = 2, .shape = { rows, width },
                       .stride = { stride, 1 } };
    return b;
}

static block copy_of(const block *b)
{
    block c = *b;
    c.memory = malloc(b->bytes);
    assert_non_null(c.memory);
    memcpy(c.memory, b->memory, b->bytes);
    c.t.data = c.memory + ((unsigned char *)b->t.data - b->memory);
    return c;
}

static double get(const block *b, int64_t i, int64_t j) { return fv__dtype_load(b->dtype, b->t.data, i * b->t.stride[0] + j); }
static void set(block *b, int64_t i, int64_t j, double x) { fv__dtype_store(b->dtype, b->t.data, i * b->t.stride[0] + j, x); }

static void fill(block *b, double amplitude)
{
    for (int64_t i = 0; i < b->t.shape[0]; i++)
        for (int64_t j = 0; j < b->t.shape[1]; j++) set(b, i, j, amplitude * noise());
}

/* All bytes but those of the view are as in `before`. */
static void only_the_view(const block *after, const block *before)
{
    block c = copy_of(after);
    for (int64_t i = 0; i < c.t.shape[0]; i++) {
        const size_t at = (size_t)fv__dtype_bytes(c.dtype, i * c.t.stride[0]);
        memcpy((char *)c.t.data + at, (char *)before->t.data + at, (size_t)fv__dtype_bytes(c.dtype, c.t.shape[1]));
    }
    assert_memory_equal(c.memory, before->memory, c.bytes);
    free(c.memory);
}

static const char *const floats[] = { "f32", "f16", "bf16" };

static double rounding(fv__dtype dtype) { return fv__dtypes[dtype].bits == 32 ? 0x1p-24 : dtype == FV__DTYPE_f16 ? 0x1p-11 : 0x1p-8; }

static void near(const block *b, int64_t i, int64_t j, double want, double slack)
{
    const double got = get(b, i, j);
    const double allowed = slack + fabs(want) * rounding(b->dtype) * 1.01 + (b->dtype == FV__DTYPE_f16 ? 0x1p-24 : 1e-37);
    if (!(fabs(got - want) <= allowed)) fail_msg("row %d element %d: %.9g, expected %.9g", (int)i, (int)j, got, want);
}

/* -------------------------------------------------------------------------------------------------------------- norms */

typedef struct norm_case {
    const char *x, *weight, *y;
    int rows, heads, width, gap, shift;
    bool plus_one, centred, residual, in_place, bias;
} norm_case;

static fv_tensor heads_of(fv_tensor t, int heads)
{
    if (heads < 2) return t;
    t.ndim = 3;
    t.shape[0] /= heads;
    t.shape[2] = t.shape[1];
    t.shape[1] = heads;
    t.stride[2] = 1;
    t.stride[1] = t.stride[0];
    t.stride[0] *= heads;
    return t;
}

static void check_norm(const norm_case *c, const block *x, const block *r, const block *w, const block *b, const block *y, const block *sum,
                       double eps)
{
    const int n = c->width;
    double *z = malloc(sizeof *z * (size_t)n);
    for (int64_t i = 0; i < x->t.shape[0]; i++) {
        double mean = 0, square = 0, most = 0;
        for (int j = 0; j < n; j++) {
            z[j] = get(x, i, j) + (c->residual ? get(r, i, j) : 0);
            mean += z[j] / n;
        }
        if (!c->centred) mean = 0;
        for (int j = 0; j < n; j++) {
            square += (z[j] - mean) * (z[j] - mean) / n;
            most = fmax(most, fabs(z[j]));
        }
        const double by = 1 / sqrt(square + eps);
        for (int j = 0; j < n; j++) {
            const double weight = get(w, 0, j) + (c->plus_one ? 1 : 0), scaled = (z[j] - mean) * by;
            const double slack = (fabs(scaled) + most * by * (c->centred ? 4 : 0) + 1) * fabs(weight) * 0x1p-21;
            near(y, i, j, scaled * weight + (c->bias ? get(b, 0, j) : 0), slack + (c->bias ? 1e-6 : 0));
            if (c->residual) near(sum, i, j, z[j], fabs(z[j]) * 0x1p-24);
        }
    }
    free(z);
}

static void norm_once(const norm_case *c)
{
    const int64_t rows = (int64_t)c->rows * (c->heads > 1 ? c->heads : 1);
    const double eps = 1e-5;
    block x = make(c->x, rows, c->width, c->gap, c->shift), r = make(c->x, rows, c->width, 2 * c->gap, 0);
    block w = make(c->weight, 1, c->width, 0, 0), b = make(c->weight, 1, c->width, 0, 1);
    const block y_before = make(c->y, rows, c->width, c->gap + 3, 0);
    fill(&x, 3), fill(&r, 2), fill(&w, 1), fill(&b, 1);
    for (int l = 0; l < num_levels; l++) {
        block mine = copy_of(&x), sum = copy_of(&r), y = c->in_place ? mine : copy_of(&y_before);
        const fv_norm_desc d = { .x = heads_of(mine.t, c->heads), .weight = { .data = w.t.data, .dtype = c->weight, .ndim = 1, .shape = { c->width },
                                 .stride = { 1 } }, .bias = { .data = c->bias ? b.t.data : NULL, .dtype = c->weight, .ndim = 1, .shape = { c->width },
                                 .stride = { 1 } }, .residual = c->residual ? heads_of(sum.t, c->heads) : (fv_tensor){ 0 },
                                 .y = heads_of(y.t, c->heads), .eps = eps, .plus_one = c->plus_one };
        if (c->centred) OK(fv_layernorm(levels[l], &d, NULL, &err));
        else OK(fv_rmsnorm(levels[l], &d, NULL, &err));
        check_norm(c, &x, &r, &w, &b, &y, &sum, eps);
        only_the_view(&y, c->in_place ? &x : &y_before);
        only_the_view(&sum, &r);
        if (!c->in_place) assert_memory_equal(mine.memory, x.memory, x.bytes);
        if (!c->in_place) free(y.memory);
        free(mine.memory), free(sum.memory);
    }
    free(x.memory), free(r.memory), free(w.memory), free(b.memory), free(y_before.memory);
}

static void norms(void **state)
{
    (void)state;
    static const int widths[] = { 1, 2, 7, 64, 129, 1024, 1025, 3000 };
    for (int k = 0; k < FV__COUNT(widths); k++)
        for (int a = 0; a < 3; a++)
            for (int kind = 0; kind < 6; kind++) {
                const norm_case c = { .x = floats[a], .weight = floats[(a + k) % 3 ? 0 : a], .y = floats[kind == 3 ? (a + 1) % 3 : a],
                                      .rows = 1 + below(4), .heads = kind == 1 ? 3 : 1, .width = widths[k], .gap = below(2) * 5,
                                      .shift = below(3) == 0, .plus_one = below(2), .residual = kind >= 4, .in_place = kind == 2 || kind == 4 };
                norm_once(&c);
                norm_case centred = c;
                centred.centred = centred.bias = true, centred.plus_one = centred.residual = false;
                centred.bias = below(3) > 0;
                norm_once(&centred);
            }
}

/* x is 0: the eps alone is under the root; with eps 0 a constant row of layernorm divides 0 by 0, as the formula says. */
static void norms_of_nothing(void **state)
{
    (void)state;
    float x[4] = { 0 }, w[4] = { 1, 2, 3, 4 }, y[4];
    fv_norm_desc d = { .x = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 1, 4 }, .stride = { 4, 1 } },
                       .weight = { .data = w, .dtype = "f32", .ndim = 1, .shape = { 4 }, .stride = { 1 } }, .eps = 1e-6 };
    d.y = d.x;
    d.y.data = y;
    for (int l = 0; l < num_levels; l++) {
        OK(fv_rmsnorm(levels[l], &d, NULL, &err));
        for (int i = 0; i < 4; i++) assert_true(y[i] == 0);
    }
    d.x.shape[0] = d.y.shape[0] = 0;
    d.x.data = d.y.data = d.weight.data = NULL;
    OK(fv_rmsnorm(levels[0], &d, NULL, &err));
    OK(fv_layernorm(levels[0], &d, NULL, &err));
}

/* A row about `centre`, deviations about `by`, against double. f32 holds the elements, not all of their squares or sums. */
static void norm_far(bool centred, double centre, double by, double eps, int width)
{
    block x = make("f32", 1, width, 0, 0), w = make("f32", 1, width, 0, 0);
    fill(&w, 1);
    double mean = 0, square = 0;
    for (int j = 0; j < width; j++) set(&x, 0, j, centre + by * noise());
    for (int j = 0; j < width && centred; j++) mean += get(&x, 0, j) / width;
    for (int j = 0; j < width; j++) square += (get(&x, 0, j) - mean) * (get(&x, 0, j) - mean) / width;
    for (int l = 0; l < num_levels; l++) {
        block y = copy_of(&x);
        const fv_norm_desc d = { .x = x.t, .y = y.t, .eps = eps,
                                 .weight = { .data = w.t.data, .dtype = "f32", .ndim = 1, .shape = { width }, .stride = { 1 } } };
        OK(centred ? fv_layernorm(levels[l], &d, NULL, &err) : fv_rmsnorm(levels[l], &d, NULL, &err));
        for (int j = 0; j < width; j++) {
            const double want = (get(&x, 0, j) - mean) / sqrt(square + (double)(float)eps) * get(&w, 0, j);
            near(&y, 0, j, want, 0x1p-21 * (fabs(want) + 0.25 * fabs(get(&w, 0, j))));
        }
        free(y.memory);
    }
    free(x.memory), free(w.memory);
}

static void norms_far_from_1(void **state)
{
    (void)state;
    static const struct { double centre, by, eps; } rows[] = {
        { 0, 1e19, 1e-6 }, { 0, 3e37, 1e-6 }, { 2e38, 1e37, 0 }, { 0, 1e-15, 0 }, { 0, 1e-25, 0 }, { 0, 1e-30, 1e-38 }, { 0, 1e-36, 1e-38 },
        { 1e5, 1, 1e-6 }, { 1e6, 10, 1e-6 }, { 3e18, 1e16, 1e-6 }, { 1e20, 1e16, 1e-6 }, { 1e-20, 1e-22, 0 },
    };
    static const int widths[] = { 5, 64, 1000, 4097 };
    for (int i = 0; i < FV__COUNT(rows); i++)
        for (int k = 0; k < FV__COUNT(widths); k++)
            for (int centred = 0; centred < 2; centred++) norm_far(centred, rows[i].centre, rows[i].by, rows[i].eps, widths[k]);
}

static void norms_refused(void **state)
{
    (void)state;
    float x[8] = { 0 }, w[4] = { 0 };
    const fv_tensor t = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 2, 4 }, .stride = { 4, 1 } };
    const fv_norm_desc good = { .x = t, .y = t, .weight = { .data = w, .dtype = "f32", .ndim = 1, .shape = { 4 }, .stride = { 1 } } };
#define BAD(change, field, text)                                                                   \
    do {                                                                                           \
        fv_norm_desc d = good;                                                                     \
        change;                                                                                    \
        INVALID(fv_rmsnorm(levels[0], &d, NULL, &err), field, text);                               \
    } while (0)
    INVALID(fv_rmsnorm(NULL, &good, NULL, &err), "ctx", "NULL");
    INVALID(fv_rmsnorm(levels[0], NULL, NULL, &err), "desc", "NULL");
    BAD(d.x.data = NULL, "desc.x", "missing");
    BAD(d.x.data = (char *)x + 2, "desc.x", "aligned");
    BAD(d.weight.data = (char *)w + 1, "desc.weight", "aligned");
    BAD(d.x.dtype = "int8", "desc.x", "f32, f16 or bf16");
    BAD(d.x.dtype = "f64", "desc.x", "f64");
    BAD(d.x.ndim = 1, "desc.x", "1 axes");
    BAD(d.x.stride[1] = 2, "desc.x", "contiguous");
    BAD(d.x.shape[1] = 0, "desc.x", "0 elements");
    BAD(d.x.shape[1] = (1 << 24) + 1, "desc.x", "16777217");
    BAD(d.y.shape[0] = 3, "desc.y", "3");
    BAD(d.y.ndim = 3, "desc.y", "3 axes");
    BAD(d.weight.shape[0] = 5, "desc.weight", "5");
    BAD(d.weight.data = NULL, "desc.weight", "missing");
    BAD(d.bias = d.weight, "desc.bias", "layernorm");
    BAD((d.residual = t, d.residual.shape[0] = 1), "desc.residual", "1");
    BAD((d.residual = t, d.residual.dtype = "f16"), "desc.residual", "agree");
    BAD(d.eps = -1, "desc.eps", "-1");
    BAD(d.eps = NAN, "desc.eps", "nan");
    BAD(d.reserved[1] = 7, "desc.reserved", "word 1");
#undef BAD
    fv_norm_desc d = good;
    d.residual = t;
    INVALID(fv_layernorm(levels[0], &d, NULL, &err), "desc.residual", "fv_rmsnorm");
}

/* -------------------------------------------------------------------------------------------------------- activations */

static double act_of(const char *f, double x)
{
    if (!strcmp(f, "silu")) return x / (1 + exp(-x));
    if (!strcmp(f, "gelu")) return 0.5 * x * erfc(-x / sqrt(2));
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

static const char *const acts[] = { "silu", "gelu", "gelu_tanh" };

static void activations(void **state)
{
    (void)state;
    static const int widths[] = { 1, 3, 64, 1000, 1025 };
    for (int k = 0; k < FV__COUNT(widths); k++)
        for (int a = 0; a < 9; a++) {
            const int rows = 1 + below(3), n = widths[k];
            block x = make(floats[a % 3], rows, 2 * n, below(2) * 3, below(2));
            const block before = make(floats[a % 2 ? 0 : a % 3], rows, n, 7, 0);
            fill(&x, 8);
            for (int l = 0; l < num_levels; l++) {
                block y = copy_of(&before);
                OK(fv_act_and_mul(levels[l], acts[a / 3], &x.t, &y.t, NULL, &err));
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < n; j++) {
                        const double z = get(&x, i, j), by = get(&x, i, n + j), want = act_of(acts[a / 3], z) * by;
                        near(&y, i, j, want, fabs(want) * 4e-7 + fabs(z * by) * 1.5e-7);
                    }
                only_the_view(&y, &before);
                free(y.memory);
            }
            block same = copy_of(&x), first = same;     /* into the first half */
            first.t.shape[1] = n;
            OK(fv_act_and_mul(levels[num_levels - 1], acts[a / 3], &same.t, &first.t, NULL, &err));
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < n; j++) {
                    const double want = act_of(acts[a / 3], get(&x, i, j)) * get(&x, i, n + j);
                    near(&first, i, j, want, fabs(want) * 4e-7 + fabs(get(&x, i, j) * get(&x, i, n + j)) * 1.5e-7);
                    assert_true(get(&same, i, n + j) == get(&x, i, n + j));
                }
            free(x.memory), free(before.memory), free(same.memory);
        }
}

/* Far out, where exponentials overflow and tails vanish. */
static void activations_far_out(void **state)
{
    (void)state;
    const float at[] = { -INFINITY, -FLT_MAX, -1e4f, -120, -88, -20, -5, -1e-20f, -0.0f, 0.0f, 1e-20f, 5, 20, 88, 120, 1e4f, FLT_MAX, INFINITY, NAN };
    enum { N = FV__COUNT(at) };
    float x[2 * N], y[N];
    for (int i = 0; i < N; i++) x[i] = at[i], x[N + i] = 1;
    const fv_tensor tx = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 1, 2 * N }, .stride = { 2 * N, 1 } };
    const fv_tensor ty = { .data = y, .dtype = "f32", .ndim = 2, .shape = { 1, N }, .stride = { N, 1 } };
    for (int l = 0; l < num_levels; l++)
        for (int a = 0; a < 3; a++) {
            OK(fv_act_and_mul(levels[l], acts[a], &tx, &ty, NULL, &err));
            assert_true(isnan(y[N - 1]) && y[0] == 0 && y[1] == 0 && y[N - 2] == INFINITY && y[N - 3] == FLT_MAX);
            for (int i = 2; i < N - 3; i++) {
                const double want = act_of(acts[a], (double)at[i]);
                if (!(fabs((double)y[i] - want) <= fabs(want) * 4e-6 + 1e-36))
                    fail_msg("%s(%g) is %g, expected %g", acts[a], (double)at[i], (double)y[i], want);
            }
        }
}

static void activations_refused(void **state)
{
    (void)state;
    float x[8] = { 0 };
    const fv_tensor t = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 2, 4 }, .stride = { 4, 1 } };
    fv_tensor y = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 2, 2 }, .stride = { 4, 1 } }, odd = t;
    OK(fv_act_and_mul(levels[0], "silu", &t, &y, NULL, &err));
    INVALID(fv_act_and_mul(levels[0], "relu", &t, &y, NULL, &err), "f", "relu");
    INVALID(fv_act_and_mul(levels[0], NULL, &t, &y, NULL, &err), "f", "NULL");
    odd.shape[1] = 3;
    INVALID(fv_act_and_mul(levels[0], "silu", &odd, &y, NULL, &err), "x", "3");
    y.shape[1] = 3;
    INVALID(fv_act_and_mul(levels[0], "silu", &t, &y, NULL, &err), "y", "3");
}

/* ------------------------------------------------------------------------------------------------ the definitions again */

static double cleaned(double x) { return x >= (double)FLT_MIN ? fmin(x, (double)FLT_MAX) : 0; }

/* The integer weight of a value in a row whose largest is `top`. */
static uint64_t weight_of(double value, double top)
{
    int e;
    frexp(top, &e);
    const int shift = 40 - (e - 1);
    return (uint64_t)nearbyint(ldexp(value, shift < 126 ? shift : 126));
}

typedef struct listing {                /* a row's values, sorted, with their weights */
    int n;
    double *value, *sorted;             /* sorted: descending */
    uint64_t *weight;
    double top;
} listing;

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

static listing list_of(const double *values, int n)
{
    listing s = { .n = n, .value = malloc(sizeof(double) * (size_t)n), .sorted = malloc(sizeof(double) * (size_t)n),
                  .weight = malloc(sizeof(uint64_t) * (size_t)n) };
    for (int i = 0; i < n; i++) s.value[i] = s.sorted[i] = values[i];
    qsort(s.sorted, (size_t)n, sizeof(double), descending);
    s.top = s.sorted[0];
    for (int i = 0; i < n; i++) s.weight[i] = s.top > 0 ? weight_of(values[i], s.top) : 0;
    return s;
}

static void drop(listing *s) { free(s->value), free(s->sorted), free(s->weight); }

static uint64_t sum_above(const listing *s, double x, bool itself)
{
    uint64_t sum = 0;
    for (int i = 0; i < s->n; i++) sum += s->value[i] > x || (itself && s->value[i] == x) ? s->weight[i] : 0;
    return sum;
}

static int count_above(const listing *s, double x)
{
    int count = 0;
    while (count < s->n && s->sorted[count] > x) count++;
    return count;
}

static bool stays_k(const listing *s, double x, int64_t k) { return x > 0 && count_above(s, x) < (k < 1 ? 1 : k); }

static bool stays_p(const listing *s, double x, double p, uint64_t mass)
{
    const uint64_t larger = sum_above(s, x, false);
    if (!(x > 0)) return false;
    return x == s->top || p >= 1 || (double)larger < (double)(float)p * (double)mass;
}

/* Rows that are hard: ties, zeros, NaN, infinities, tiny and huge values. */
static float hard_probability(int kind)
{
    switch (kind) {
    case 0: return (float)(draw() % 1000) / 1000;
    case 1: return (float)(1 + draw() % 4) / 16;                        /* ties */
    case 2: return below(20) ? 0 : (float)(draw() % 100);               /* few */
    case 3: return ldexpf(1 + (float)(draw() % 64) / 64, -below(60));   /* of all sizes */
    case 4: return below(9) == 0 ? NAN : below(9) == 0 ? INFINITY : (float)noise();
    case 5: return 0;
    case 6: return ldexpf(1, -149 + below(40));                         /* subnormal and next to it */
    default: return 0.25f;                                              /* all the same */
    }
}
enum { KINDS = 8 };

static void fill_hard(block *b, int64_t row, int kind)
{
    for (int64_t j = 0; j < b->t.shape[1]; j++) set(b, row, j, (double)hard_probability(kind));
}

static listing row_of(const block *b, int64_t row)
{
    const int n = (int)b->t.shape[1];
    double *values = malloc(sizeof(double) * (size_t)n);
    for (int j = 0; j < n; j++) values[j] = cleaned(get(b, row, j));
    const listing s = list_of(values, n);
    free(values);
    return s;
}

static fv_arg number(double x) { return (fv_arg){ .number = x }; }

/* ------------------------------------------------------------------------------------------------------------- softmax */

static void softmaxes(void **state)
{
    (void)state;
    static const int widths[] = { 1, 2, 17, 1000, 1024, 5000 };
    for (int k = 0; k < FV__COUNT(widths); k++)
        for (int a = 0; a < 6; a++) {
            const int rows = 3, n = widths[k];
            const double t = a < 3 ? 1 : 0.3;
            block x = make(floats[a % 3], rows, n, 5, below(2)), first = { 0 };
            const block before = make(floats[a % 2 ? a % 3 : 0], rows, n, 2, 0);
            fill(&x, 6);
            for (int l = 0; l < num_levels; l++) {
                block y = copy_of(&before);
                const fv_arg temperature = number(t);
                OK(fv_softmax(levels[l], &x.t, a < 3 ? NULL : &temperature, &y.t, NULL, &err));
                if (l) assert_memory_equal(y.memory, first.memory, y.bytes);
                if (l) free(y.memory);
                else first = y;
            }
            for (int i = 0; i < rows; i++) {
                double most = -INFINITY, sum = 0;
                for (int j = 0; j < n; j++) most = fmax(most, get(&x, i, j));
                for (int j = 0; j < n; j++) sum += exp((get(&x, i, j) - most) / t);
                for (int j = 0; j < n; j++) {
                    const double z = (get(&x, i, j) - most) / t;
                    near(&first, i, j, exp(z) / sum, exp(z) / sum * (4e-7 + fabs(z) * 1.5e-7));
                }
            }
            only_the_view(&first, &before);
            if (first.dtype == x.dtype) {
                block same = copy_of(&x);
                const fv_arg temperature = number(t);
                OK(fv_softmax(levels[0], &same.t, &temperature, &same.t, NULL, &err));
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < n; j++) assert_true(get(&same, i, j) == get(&first, i, j));
                free(same.memory);
            }
            free(x.memory), free(first.memory), free(before.memory);
        }
}

static void softmax_at_the_ends(void **state)
{
    (void)state;
    const float rows[5][4] = { { -INFINITY, -INFINITY, NAN, -INFINITY }, { 1, 3, 3, -INFINITY }, { INFINITY, 5, INFINITY, NAN },
                               { 0, -200, -87.5f, -1e30f }, { 2, NAN, 2, 1 } };
    const float wanted[5][4] = { { 0, 0, 0, 0 }, { 0, 0.5f, 0.5f, 0 }, { 0.5f, 0, 0.5f, 0 }, { 1, 0, 0, 0 }, { 0.5f, 0, 0.5f, 0 } };
    const float temperatures[5] = { 1, 0, 1, 1, NAN };
    float y[5][4];
    const fv_tensor tx = { .data = (void *)(uintptr_t)rows, .dtype = "f32", .ndim = 2, .shape = { 5, 4 }, .stride = { 4, 1 } };
    fv_tensor ty = tx, tt = { .data = (void *)(uintptr_t)temperatures, .dtype = "f32", .ndim = 1, .shape = { 5 }, .stride = { 1 } };
    const fv_arg each = { .tensor = &tt };
    ty.data = y;
    for (int l = 0; l < num_levels; l++) {
        memset(y, 0xff, sizeof y);
        OK(fv_softmax(levels[l], &tx, &each, &ty, NULL, &err));
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 4; j++)
                if (y[i][j] != wanted[i][j]) fail_msg("row %d element %d: %g, expected %g", i, j, (double)y[i][j], (double)wanted[i][j]);
    }
    /* 1 in 2^22 of equal logits: exact */
    const int n = FV_MAX_VOCAB;
    float *large = calloc((size_t)n, sizeof *large);
    const fv_tensor tl = { .data = large, .dtype = "f32", .ndim = 2, .shape = { 1, n }, .stride = { n, 1 } };
    OK(fv_softmax(levels[num_levels - 1], &tl, NULL, &tl, NULL, &err));
    for (int j = 0; j < n; j++) assert_true(large[j] == 0x1p-22f);
    free(large);
}

/* ------------------------------------------------------------------------------------------------------------- filters */

static void check_renorm(const block *x, const block *y, int64_t i, const listing *s, const bool *stays)
{
    uint64_t mass = 0;
    int e;
    for (int j = 0; j < s->n; j++) mass += stays[j] ? s->weight[j] : 0;
    frexp(s->top, &e);
    const int shift = 40 - (e - 1) < 126 ? 40 - (e - 1) : 126;
    const int room = s->top >= 0x1p100 ? 32 : 0;        /* the sum may be larger than any f32 */
    const float sum = (float)ldexp((double)mass, -shift - room);
    for (int j = 0; j < s->n; j++) {
        const float want = stays[j] ? (float)ldexp(s->value[j], -room) / sum : 0;
        const double rounded = fv__dtypes[y->dtype].decode(fv__dtypes[y->dtype].encode((double)want));
        if (get(y, i, j) != rounded)
            fail_msg("row %d element %d of %d (%g): %.9g, expected %.9g", (int)i, j, s->n, get(x, i, j), get(y, i, j), rounded);
    }
}

static void renorms(void **state)
{
    (void)state;
    static const int widths[] = { 1, 2, 33, 700, 2100 };
    for (int round = 0; round < 120; round++) {
        const int n = widths[round % 5], rows = 1 + below(4);
        const bool by_p = round % 2, each = below(2), in_place = below(4) == 0;
        const char *type = floats[below(5) < 3 ? 0 : 1 + below(2)];
        block x = make(type, rows, n, below(2) * 3, below(2)), first = { 0 };
        const block before = in_place ? copy_of(&x) : make(type, rows, n, below(3), 0);
        int32_t ks[4];
        float ps[4];
        for (int i = 0; i < rows; i++) {
            fill_hard(&x, i, below(KINDS));
            ks[i] = each || i == 0 ? (below(6) ? 1 + below(n + 2) : each ? -below(2) : 1) : ks[0];
            ps[i] = each || i == 0 ? (below(6) ? (float)below(1001) / 1000 : (float)below(2)) : ps[0];
        }
        const fv_tensor tk = { .data = ks, .dtype = "i32", .ndim = 1, .shape = { rows }, .stride = { 1 } };
        const fv_tensor tp = { .data = ps, .dtype = "f32", .ndim = 1, .shape = { rows }, .stride = { 1 } };
        const fv_arg k = { .number = ks[0] < 1 ? 1 : ks[0], .tensor = each ? &tk : NULL };
        const fv_arg p = { .number = (double)ps[0], .tensor = each ? &tp : NULL };
        if (!each && ks[0] < 1) ks[0] = 1;
        for (int l = 0; l < num_levels; l++) {
            block y = in_place ? copy_of(&x) : copy_of(&before);
            const fv_tensor *from = in_place ? &y.t : &x.t;
            if (by_p) OK(fv_top_p_renorm(levels[l], from, &p, &y.t, NULL, &err));
            else OK(fv_top_k_renorm(levels[l], from, &k, &y.t, NULL, &err));
            if (l) assert_memory_equal(y.memory, first.memory, y.bytes);
            if (l) free(y.memory);
            else first = y;
        }
        for (int i = 0; i < rows; i++) {
            listing s = row_of(&x, i);
            bool *stays = calloc((size_t)n, sizeof *stays);
            const uint64_t mass = s.top > 0 ? sum_above(&s, 0, false) : 0;
            const int of = each ? i : 0;
            for (int j = 0; j < n; j++) stays[j] = by_p ? stays_p(&s, s.value[j], (double)ps[of], mass) : stays_k(&s, s.value[j], ks[of]);
            if (s.top > 0) check_renorm(&x, &first, i, &s, stays);
            for (int j = 0; j < n && !(s.top > 0); j++) assert_true(get(&first, i, j) == 0);
            free(stays);
            drop(&s);
        }
        if (!in_place) only_the_view(&first, &before);
        free(x.memory), free(first.memory), free(before.memory);
    }
}

/* Sums beyond the largest f32. */
static void renorms_of_the_largest(void **state)
{
    (void)state;
    const float rows[4][4] = { { 3e38f, 2e38f, 1e38f, 0 }, { INFINITY, INFINITY, 1e38f, 0 }, { 1e38f, 1e38f, 1e38f, 1e38f }, { 3e38f, 0, 0, 1e-37f } };
    const int32_t ks[4] = { 2, 2, 9, 4 };
    const double wanted[4][4] = { { 0.6, 0.4, 0, 0 }, { 0.5, 0.5, 0, 0 }, { 0.25, 0.25, 0.25, 0.25 }, { 1, 0, 0, 0 } };
    float y[4][4];
    const fv_tensor tx = { .data = (void *)(uintptr_t)rows, .dtype = "f32", .ndim = 2, .shape = { 4, 4 }, .stride = { 4, 1 } };
    const fv_tensor tk = { .data = (void *)(uintptr_t)ks, .dtype = "i32", .ndim = 1, .shape = { 4 }, .stride = { 1 } };
    fv_tensor ty = tx;
    const fv_arg k = { .tensor = &tk };
    ty.data = y;
    for (int l = 0; l < num_levels; l++) {
        OK(fv_top_k_renorm(levels[l], &tx, &k, &ty, NULL, &err));
        for (int i = 0; i < 16; i++)
            if (fabs((double)y[i / 4][i % 4] - wanted[i / 4][i % 4]) > 1e-7) fail_msg("row %d: %g", i / 4, (double)y[i / 4][i % 4]);
    }
}

static void masks(void **state)
{
    (void)state;
    static const int widths[] = { 1, 3, 40, 1500 };
    for (int round = 0; round < 80; round++) {
        const int n = widths[round % 4], rows = 1 + below(3), k = 1 + below(n + 1);
        block x = make(floats[round / 4 % 3], rows, n, below(2) * 5, below(2));
        const block before = make(floats[round / 4 % 3], rows, n, 1, 0);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < n; j++) {
                const double z = below(4) ? noise() * 10 : (double)below(5) - 2;
                set(&x, i, j, below(12) ? z : below(3) == 0 ? NAN : below(3) ? -INFINITY : below(2) ? INFINITY : -0.0);
            }
        const fv_arg arg = number(k);
        block want = copy_of(&before);
        for (int i = 0; i < rows; i++) {
            double row[1500];
            for (int j = 0; j < n; j++) row[j] = get(&x, i, j);
            for (int j = 0; j < n; j++) {
                int larger = 0;
                for (int m = 0; m < n; m++) larger += row[m] > row[j];
                set(&want, i, j, isnan(row[j]) || larger >= k ? -INFINITY : row[j]);
            }
        }
        for (int l = 0; l < num_levels; l++) {
            block y = copy_of(&before);
            OK(fv_top_k_mask(levels[l], &x.t, &arg, &y.t, NULL, &err));
            if (memcmp(y.memory, want.memory, y.bytes) != 0) fail_msg("k %d of %d, round %d, level %d", k, n, round, l);
            free(y.memory);
        }
        free(want.memory);
        free(x.memory), free(before.memory);
    }
}

static void filters_refused(void **state)
{
    (void)state;
    float x[8] = { 0 };
    const fv_tensor t = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 2, 4 }, .stride = { 4, 1 } };
    fv_tensor u = t, param = { .data = x, .dtype = "f32", .ndim = 1, .shape = { 2 }, .stride = { 1 } };
    fv_arg one = number(1);
    fv_ctx *c = levels[0];
    INVALID(fv_top_k_renorm(c, &t, NULL, &t, NULL, &err), "k", "NULL");
    INVALID(fv_softmax(NULL, &t, NULL, &t, NULL, &err), "ctx", "NULL");
    INVALID(fv_softmax(c, NULL, NULL, &t, NULL, &err), "logits", "NULL");
    INVALID(fv_softmax(c, &t, NULL, NULL, NULL, &err), "probs", "NULL");
    static const struct { double number; const char *text; bool share; } bad[] = {
        { 0, "0", false }, { -1, "-1", true }, { 1.5, "1.5", true }, { NAN, "nan", true }, { INFINITY, "inf", true }, { 0x1p31, "2.14748e+09", true },
    };
    for (int i = 0; i < FV__COUNT(bad); i++) {
        const fv_arg arg = number(bad[i].number);
        INVALID(fv_top_k_renorm(c, &t, &arg, &t, NULL, &err), "k", bad[i].text);
        if (bad[i].share) INVALID(fv_top_p_renorm(c, &t, &arg, &t, NULL, &err), "p", bad[i].text);
    }
    const fv_arg cold = number(-1), hot = number(INFINITY);
    INVALID(fv_softmax(c, &t, &cold, &t, NULL, &err), "temperature", "-1");
    INVALID(fv_softmax(c, &t, &hot, &t, NULL, &err), "temperature", "inf");
    u.shape[1] = 3;
    INVALID(fv_top_k_mask(c, &t, &one, &u, NULL, &err), "y", "3");
    u.shape[1] = FV_MAX_VOCAB + 1;
    INVALID(fv_top_k_mask(c, &u, &one, &u, NULL, &err), "x", "4194305");
    u.shape[1] = 0;
    INVALID(fv_top_k_mask(c, &u, &one, &u, NULL, &err), "x", "0 elements");
    const fv_arg array = { .tensor = &param };
    INVALID(fv_top_k_mask(c, &t, &array, &t, NULL, &err), "k", "i32 or i64");
    param.dtype = "i32";
    INVALID(fv_top_p_renorm(c, &t, &array, &t, NULL, &err), "p", "f32");
    param.dtype = "f32";
    param.data = (char *)x + 3;
    INVALID(fv_top_p_renorm(c, &t, &array, &t, NULL, &err), "p", "aligned");
    param.dtype = "i32";
    param.data = x;
    param.shape[0] = 3;
    INVALID(fv_top_k_mask(c, &t, &array, &t, NULL, &err), "k", "3");
    one.reserved = 1;
    INVALID(fv_top_k_mask(c, &t, &one, &t, NULL, &err), "k", "reserved");
}

/* ------------------------------------------------------------------------------------------------------------- samples */

/* Known answers of Philox 4x32-10: the vectors that its authors publish. */
static void random_numbers(void **state)
{
    (void)state;
    assert_true(fv__draw(0, 0, 0, 0) == 0xe169c58d6627e8d5u);
    assert_true(fv__draw(UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX) == 0x41c83b0e408f276du);
    assert_true(fv__draw(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x13198a2eu, 0x03707344u) == 0x94fdccebd16cfe09u);
}

static int first_above(const listing *s, double least, uint64_t r)
{
    uint64_t sum = 0;
    for (int i = 0; i < s->n; i++) {
        sum += s->value[i] >= least ? s->weight[i] : 0;
        if (sum > r) return i;
    }
    fail_msg("the running sum ends at %llu", (unsigned long long)sum);
    return -1;
}

static uint64_t scaled(uint64_t random, uint64_t total) { return (uint64_t)((unsigned __int128)random * total >> 64); }

typedef struct wish {
    uint32_t filters;
    int64_t k;
    float p, m;
} wish;

/* The sample that the header describes, from sorted lists. */
static int expected_sample(const listing *s, const wish *w, uint64_t key, uint64_t offset, uint32_t index)
{
    const bool k_first = w->filters & FV_TOP_K_FIRST;
    uint64_t mass = sum_above(s, 0, false);
    double least = DBL_MIN;
    if (k_first) {
        mass = 0;
        for (int i = s->n - 1; i >= 0; i--)
            if (stays_k(s, s->sorted[i], w->k)) {
                least = s->sorted[i];
                mass = sum_above(s, least, true);
                break;
            }
    }
    if (w->filters & FV_MIN_P) least = fmax(least, (double)((w->m > 0 ? w->m < 1 ? w->m : 1 : 0) * (float)s->top));
    for (uint32_t number = 0;; number++) {
        uint64_t total = 0;
        for (int i = 0; i < s->n; i++) total += s->value[i] >= least ? s->weight[i] : 0;
        const int id = first_above(s, least, scaled(fv__draw(key, offset, index, number), total));
        const double x = s->value[id];
        const bool k = !(w->filters & FV_TOP_K) || stays_k(s, x, w->k);
        if (sum_above(s, x, false) == 0 || (k && (!(w->filters & FV_TOP_P) || stays_p(s, x, (double)w->p, mass)))) return id;
        for (int i = 0; i < s->n; i++)
            if (s->sorted[i] > x) least = s->sorted[i];
    }
}

static void samples(void **state)
{
    (void)state;
    static const uint32_t all[] = { 0, FV_TOP_K, FV_TOP_P, FV_MIN_P, FV_TOP_K | FV_TOP_P, FV_TOP_K | FV_TOP_P | FV_TOP_K_FIRST,
                                    FV_TOP_K | FV_TOP_P | FV_MIN_P | FV_TOP_K_FIRST };
    static const int widths[] = { 1, 2, 31, 1000, 3000 };
    enum { N = 12, ROWS = 5 };
    for (int round = 0; round < 140; round++) {
        const int n = widths[round / 7 % 5];
        const bool redirected = below(2), arrays = below(2), wide = below(2);
        block x = make(floats[below(4) ? 0 : 1 + below(2)], ROWS, n, below(2) * 9, below(2));
        for (int i = 0; i < ROWS; i++) fill_hard(&x, i, below(KINDS));
        const int count = redirected ? N : ROWS;
        wish w[N];
        int64_t rows[N], ks[N], seeds[N], offsets[N];
        float ps[N], ms[N];
        for (int i = 0; i < count; i++) {
            w[i] = (wish){ all[round % 7], below(5) ? 1 + below(n + 1) : arrays ? -1 : 1, (float)below(1001) / 1000, (float)below(500) / 1000 };
            if (!arrays && i) w[i] = w[0];
            rows[i] = redirected ? below(ROWS + (below(9) == 0)) : i;
            ks[i] = w[i].k, ps[i] = w[i].p, ms[i] = w[i].m;
            seeds[i] = (int64_t)draw() << 31 | draw(), offsets[i] = draw();
        }
        const fv_tensor tk = { .data = ks, .dtype = "i64", .ndim = 1, .shape = { count }, .stride = { 1 } };
        fv_tensor tp = { .data = ps, .dtype = "f32", .ndim = 1, .shape = { count }, .stride = { 1 } }, tm = tp, ts = tk, to = tk, tr = tk, ids = tk;
        tm.data = ms, ts.data = seeds, to.data = offsets, tr.data = rows;
        if (below(2)) ts.shape[0] = 1;
        int64_t got[N], first[N];
        uint8_t valid[N];
        ids.data = got;
        if (!wide) ids.dtype = "i32";
        fv_sample_desc d = { .x = x.t, .filters = all[round % 7], .top_k = { .number = (double)ks[0], .tensor = arrays ? &tk : NULL },
                             .top_p = { .number = (double)ps[0], .tensor = arrays ? &tp : NULL },
                             .min_p = { .number = (double)ms[0], .tensor = arrays ? &tm : NULL }, .rows = redirected ? tr : (fv_tensor){ 0 },
                             .seed = 77, .offset = (uint64_t)round << 40, .ids = ids,
                             .valid = { .data = valid, .dtype = "u8", .ndim = 1, .shape = { count }, .stride = { 1 } } };
        if (arrays) d.seeds = ts, d.offsets = to;
        for (int l = 0; l < num_levels; l++) {
            memset(got, 0xff, sizeof got);
            memset(valid, 7, sizeof valid);
            OK(fv_sample(levels[l], &d, NULL, &err));
            if (l) assert_memory_equal(got, first, sizeof got);
            memcpy(first, got, sizeof got);
        }
        for (int i = 0; i < count; i++) {
            listing s = { 0 };
            if (rows[i] < ROWS) s = row_of(&x, rows[i]);
            const int64_t id = wide ? got[i] : ((int32_t *)got)[i];
            const uint64_t key = arrays ? (uint64_t)seeds[ts.shape[0] == 1 ? 0 : i] : 77;
            const int want = s.top > 0 ? expected_sample(&s, &w[i], key, arrays ? (uint64_t)offsets[i] : (uint64_t)round << 40, (uint32_t)i) : 0;
            if (id != want || valid[i] != (s.top > 0))
                fail_msg("round %d sample %d of %d, filters %u k %lld p %g m %g: %lld, expected %d", round, i, n, w[i].filters, (long long)w[i].k,
                         (double)w[i].p, (double)w[i].m, (long long)id, want);
            drop(&s);
        }
        free(x.memory);
    }
}

/* Samples from logits are samples from their exponentials, which softmax shows up to a factor of the row: the same ids from exp(x - max). */
static void samples_of_logits(void **state)
{
    (void)state;
    enum { ROWS = 6, VOCAB = 4000 };
    block x = make("f32", ROWS, VOCAB, 3, 0), e = make("f32", ROWS, VOCAB, 0, 0);
    fill(&x, 7);
    set(&x, 1, 17, NAN), set(&x, 2, 5, INFINITY);
    for (int j = 0; j < VOCAB; j++) set(&x, 3, j, -INFINITY);
    int32_t got[ROWS], want[ROWS];
    uint8_t valid[ROWS];
    fv_sample_desc d = { .x = x.t, .logits = true, .filters = FV_TOP_P | FV_TOP_K, .top_k = number(300), .top_p = number(0.8), .seed = 5,
                         .ids = { .data = got, .dtype = "i32", .ndim = 1, .shape = { ROWS }, .stride = { 1 } },
                         .valid = { .data = valid, .dtype = "u8", .ndim = 1, .shape = { ROWS }, .stride = { 1 } } };
    for (int l = 0; l < num_levels; l++) {
        OK(fv_sample(levels[l], &d, NULL, &err));
        if (l) assert_memory_equal(got, want, sizeof got);
        memcpy(want, got, sizeof want);
    }
    assert_true(got[2] == 5 && got[3] == 0 && valid[3] == 0 && valid[0] == 1);
    for (int i = 0; i < ROWS; i++) {
        if (i == 2 || i == 3) continue;
        double values[VOCAB], most = -INFINITY;
        for (int j = 0; j < VOCAB; j++) most = fmax(most, get(&x, i, j));
        for (int j = 0; j < VOCAB; j++) values[j] = isnan(get(&x, i, j)) ? 0 : exp(get(&x, i, j) - most);
        listing s = list_of(values, VOCAB);
        const uint64_t mass = sum_above(&s, 0, false);
        assert_true(stays_k(&s, values[got[i]], 300) && stays_p(&s, values[got[i]], 0.8 + 1e-5, mass));
        drop(&s);
    }
    free(x.memory), free(e.memory);
}

/* Pearson's statistic of counts against expectations; cells that expect less than 5 are one. */
static void is_distributed(const char *what, const int64_t *counts, const double *probability, int n, int64_t total)
{
    double statistic = 0, rest = 0, rest_seen = 0;
    int freedom = -1;
    for (int i = 0; i < n; i++) {
        const double expected = probability[i] * (double)total;
        if (probability[i] == 0) assert_int_equal(counts[i], 0);
        if (expected < 5) {
            rest += expected, rest_seen += (double)counts[i];
            continue;
        }
        statistic += ((double)counts[i] - expected) * ((double)counts[i] - expected) / expected;
        freedom++;
    }
    if (rest > 0) {
        statistic += (rest_seen - rest) * (rest_seen - rest) / fmax(rest, 1);
        freedom++;
    }
    /* five deviations of the normal that Wilson and Hilferty's cube root makes of it */
    const double f = fmax(freedom, 1), z = (cbrt(statistic / f) - (1 - 2 / (9 * f))) / sqrt(2 / (9 * f));
    if (z > 5) fail_msg("%s: chi-square %g with %d degrees of freedom", what, statistic, freedom);
}

static void frequencies(void **state)
{
    (void)state;
    static const uint32_t all[] = { 0, FV_TOP_K, FV_TOP_P, FV_MIN_P, FV_TOP_K | FV_TOP_P, FV_TOP_K | FV_TOP_P | FV_TOP_K_FIRST };
    static const int widths[] = { 2, 50, 3000 };
    enum { MOST = 40000 };
    int32_t *ids = malloc(sizeof *ids * MOST), *rows = calloc(MOST, sizeof *rows);
    for (int a = 0; a < 18; a++) {
        const int n = widths[a / 6], N = n > 100 ? MOST / 5 : MOST;
        block x = make("f32", 1, n, 0, 0);
        double probability[3000], sum = 0;
        int64_t counts[3000] = { 0 };
        for (int j = 0; j < n; j++) set(&x, 0, j, exp(2 * noise()) / n);
        const wish w = { all[a % 6], n / 3 + 1, 0.7f, 0.1f };
        const fv_sample_desc d = { .x = x.t, .filters = w.filters, .top_k = number((double)w.k), .top_p = number((double)w.p),
                                   .min_p = number((double)w.m), .seed = 1234, .offset = (uint64_t)a,
                                   .rows = { .data = rows, .dtype = "i32", .ndim = 1, .shape = { N }, .stride = { 1 } },
                                   .ids = { .data = ids, .dtype = "i32", .ndim = 1, .shape = { N }, .stride = { 1 } } };
        OK(fv_sample(levels[num_levels - 1], &d, NULL, &err));
        listing s = row_of(&x, 0);
        uint64_t mass = sum_above(&s, 0, false), of_k = 0;
        for (int j = 0; j < n; j++) of_k += stays_k(&s, s.value[j], w.k) ? s.weight[j] : 0;
        if (w.filters & FV_TOP_K_FIRST) mass = of_k;
        for (int j = 0; j < n; j++) {
            bool stays = true;
            if (w.filters & FV_TOP_K) stays = stays_k(&s, s.value[j], w.k);
            if (w.filters & FV_TOP_P) stays = stays && stays_p(&s, s.value[j], (double)w.p, mass);
            if (w.filters & FV_MIN_P) stays = stays && s.value[j] >= (double)(w.m * (float)s.top);
            probability[j] = stays ? s.value[j] : 0;
            sum += probability[j];
        }
        for (int j = 0; j < n; j++) probability[j] /= sum;
        for (int i = 0; i < N; i++) {
            assert_true(ids[i] >= 0 && ids[i] < n);
            counts[ids[i]]++;
        }
        is_distributed("samples", counts, probability, n, N);
        drop(&s);
        free(x.memory);
    }
    free(ids), free(rows);
}

static void samples_refused(void **state)
{
    (void)state;
    float x[8] = { 1 };
    int32_t ids[2], other[2] = { 0 };
    const fv_tensor t = { .data = x, .dtype = "f32", .ndim = 2, .shape = { 2, 4 }, .stride = { 4, 1 } };
    const fv_tensor i32 = { .data = other, .dtype = "i32", .ndim = 1, .shape = { 2 }, .stride = { 1 } };
    fv_sample_desc good = { .x = t, .ids = i32 };
    good.ids.data = ids;
    OK(fv_sample(levels[0], &good, NULL, &err));
#define BAD(change, field, text)                                                                   \
    do {                                                                                           \
        fv_sample_desc d = good;                                                                   \
        change;                                                                                    \
        INVALID(fv_sample(levels[0], &d, NULL, &err), field, text);                                \
    } while (0)
    BAD(d.ids.data = NULL, "desc.ids", "missing");
    BAD(d.ids.shape[0] = 3, "desc.ids", "3");
    BAD(d.ids.dtype = "f32", "desc.ids", "i32 or i64");
    BAD(d.ids.ndim = 2, "desc.ids", "2 axes");
    BAD(d.ids.data = (char *)ids + 1, "desc.ids", "aligned");
    BAD(d.x.dtype = NULL, "desc.x", "NULL");
    BAD(d.filters = 16, "desc.filters", "16");
    BAD(d.filters = FV_TOP_K_FIRST | FV_TOP_K, "desc.filters", "FV_TOP_K_FIRST");
    BAD(d.filters = FV_TOP_K, "desc.top_k", "0");
    BAD((d.filters = FV_TOP_P, d.top_p.number = 2), "desc.top_p", "2");
    BAD((d.filters = FV_MIN_P, d.min_p.number = -1), "desc.min_p", "-1");
    BAD(d.seeds = i32, "desc.seeds", "i64");
    BAD((d.rows = i32, d.rows.shape[0] = 3), "desc.ids", "expected 3");
    BAD(d.valid = i32, "desc.valid", "u8");
    BAD(d.reserved[3] = 1, "desc.reserved", "word 3");
#undef BAD
    good.x.shape[0] = good.ids.shape[0] = 0;
    good.x.data = good.ids.data = NULL;
    OK(fv_sample(levels[0], &good, NULL, &err));
}

/* -------------------------------------------------------------------------------------------------------- verification */

enum { DRAFTS = 3, VOCAB = 5 };

static fv_tensor cube(void *data, int64_t a, int64_t b, int64_t c)
{
    return (fv_tensor){ .data = data, .dtype = "f32", .ndim = 3, .shape = { a, b, c }, .stride = { b * c, c, 1 } };
}

static fv_tensor table(void *data, int64_t a, int64_t b)
{
    return (fv_tensor){ .data = data, .dtype = "i32", .ndim = 2, .shape = { a, b }, .stride = { b, 1 } };
}

static fv_tensor line(void *data, int64_t n)
{
    return (fv_tensor){ .data = data, .dtype = "i32", .ndim = 1, .shape = { n }, .stride = { 1 } };
}

/* A token that the draft model drew and the chain accepts or replaces has the target's distribution, and so has each one behind an accepted one. */
static void verified_frequencies(void **state)
{
    (void)state;
    enum { N = 60000 };
    static const double q[DRAFTS][VOCAB] = { { 0.5, 0.2, 0.1, 0.2, 0 }, { 0.2, 0.2, 0.2, 0.2, 0.2 }, { 0.1, 0.1, 0.7, 0.1, 0 } };
    static const double p[DRAFTS + 1][VOCAB] = { { 0.1, 0.3, 0.3, 0.2, 0.1 }, { 0.4, 0.3, 0.1, 0.1, 0.1 }, { 0.2, 0.2, 0.2, 0.2, 0.2 },
                                                 { 0.7, 0, 0, 0, 0.3 } };
    float *draft = malloc(sizeof *draft * N * DRAFTS * VOCAB), *target = malloc(sizeof *target * N * (DRAFTS + 1) * VOCAB);
    int32_t *tokens = malloc(sizeof *tokens * N * DRAFTS), *ids = malloc(sizeof *ids * N * (DRAFTS + 1));
    int32_t *accepted = calloc(N, sizeof *accepted), *emitted = calloc(N, sizeof *emitted);
    for (int i = 0; i < N; i++) {
        for (int s = 0; s <= DRAFTS; s++)
            for (int v = 0; v < VOCAB; v++) {
                target[(i * (DRAFTS + 1) + s) * VOCAB + v] = (float)p[s][v];
                if (s < DRAFTS) draft[(i * DRAFTS + s) * VOCAB + v] = (float)q[s][v];
            }
        for (int s = 0; s < DRAFTS; s++) {
            double u = (double)(fv__draw(99, 1, (uint32_t)i, (uint32_t)s) >> 11) * 0x1p-53;
            int v = 0;
            for (; v < VOCAB - 1 && u >= q[s][v]; v++) u -= q[s][v];
            tokens[i * DRAFTS + s] = v;
        }
        emitted[i] = 100;
    }
    const fv_verify_desc d = { .draft_probs = cube(draft, N, DRAFTS, VOCAB), .draft_ids = table(tokens, N, DRAFTS),
                               .target_probs = cube(target, N, DRAFTS + 1, VOCAB), .seed = 3, .ids = table(ids, N, DRAFTS + 1),
                               .num_accepted = line(accepted, N), .num_emitted = line(emitted, N) };
    OK(fv_verify(levels[num_levels - 1], &d, NULL, &err));
    int64_t counts[DRAFTS + 1][VOCAB] = { { 0 } }, totals[DRAFTS + 1] = { 0 };
    for (int i = 0; i < N; i++) {
        const int32_t *row = ids + i * (DRAFTS + 1), chain = emitted[i] - 100;
        assert_true(chain >= 0 && chain <= DRAFTS && accepted[i] >= chain && accepted[i] <= DRAFTS);
        for (int s = 0; s <= DRAFTS; s++) {
            if (s > chain) {
                assert_int_equal(row[s], -1);
                continue;
            }
            if (s < chain) assert_int_equal(row[s], tokens[i * DRAFTS + s]);
            assert_true(row[s] >= 0 && row[s] < VOCAB);
            counts[s][row[s]]++;
            totals[s]++;
        }
    }
    for (int s = 0; s <= DRAFTS; s++) is_distributed("verified tokens", counts[s], p[s], VOCAB, totals[s]);
    assert_true(totals[DRAFTS] > 1000);
    int32_t *again = malloc(sizeof *again * N * (DRAFTS + 1));
    for (int l = 0; l < num_levels - 1; l++) {
        fv_verify_desc e = d;
        e.ids = table(again, N, DRAFTS + 1);
        e.num_accepted = e.num_emitted = (fv_tensor){ 0 };
        OK(fv_verify(levels[l], &e, NULL, &err));
        assert_memory_equal(again, ids, sizeof *again * N * (DRAFTS + 1));
    }
    free(draft), free(target), free(tokens), free(ids), free(accepted), free(emitted), free(again);
}

static void verified_cases(void **state)
{
    (void)state;
    float draft[2][2][4] = { { { 0.1f, 0.2f, 0.3f, 0.4f }, { 0.2f, 0.3f, 0.4f, 0.1f } }, { { 0, 0, 0, 1 }, { 1, 0, 0, 0 } } };
    float target[2][3][4] = { { { 0, 0.1f, 0.6f, 0.3f }, { 1, 0, 0, 0 }, { 0.7f, 0.1f, 0.1f, 0.1f } },
                              { { 0, 0, 0, 1 }, { 1, 0, 0, 0 }, { 0, 1, 0, 0 } } };
    int32_t tokens[2][2] = { { 2, 1 }, { 3, 0 } }, ids[2][3], accepted[2] = { 10, 20 }, emitted[2] = { 30, 40 };
    fv_verify_desc d = { .draft_probs = cube(draft, 2, 2, 4), .draft_ids = table(tokens, 2, 2), .target_probs = cube(target, 2, 3, 4), .seed = 8,
                         .ids = table(ids, 2, 3), .num_accepted = line(accepted, 2), .num_emitted = line(emitted, 2) };
    OK(fv_verify(levels[0], &d, NULL, &err));
    /* a token that the target likes better is accepted; one that it never draws is not, and only 0 can take its place; equal rows accept all */
    assert_true(ids[0][0] == 2 && ids[0][1] == 0 && ids[0][2] == -1 && accepted[0] == 11 && emitted[0] == 31);
    assert_true(ids[1][0] == 3 && ids[1][1] == 0 && ids[1][2] == 1 && accepted[1] == 22 && emitted[1] == 42);

    /* an id outside is not accepted; target = draft leaves no difference: the target itself decides; a target of zeros gives 0 */
    tokens[1][0] = 4, tokens[0][0] = -1;
    memset(target[0], 0, sizeof target[0]);
    OK(fv_verify(levels[0], &d, NULL, &err));
    assert_true(ids[0][0] == 0 && ids[0][1] == -1 && ids[1][0] == 3 && ids[1][1] == -1 && emitted[0] == 31 && emitted[1] == 42);

    /* no drafts at all: a sample of the target */
    fv_verify_desc none = { .target_probs = cube(target[1][2], 1, 1, 4), .ids = table(ids, 1, 1) };
    OK(fv_verify(levels[0], &none, NULL, &err));
    assert_int_equal(ids[0][0], 1);
#define BAD(change, field, text)                                                                   \
    do {                                                                                           \
        fv_verify_desc e = d;                                                                      \
        change;                                                                                    \
        INVALID(fv_verify(levels[0], &e, NULL, &err), field, text);                                \
    } while (0)
    BAD(e.draft_probs.shape[1] = 3, "desc.draft_probs", "3");
    BAD(e.draft_probs.shape[2] = 3, "desc.draft_probs", "3");
    BAD(e.draft_ids.data = NULL, "desc.draft_ids", "missing");
    BAD(e.ids.shape[1] = 2, "desc.ids", "2");
    BAD(e.target_probs.shape[1] = 0, "desc.target_probs", "0 steps");
    BAD(e.num_emitted.dtype = "f32", "desc.num_emitted", "i32 or i64");
    BAD(e.offsets = line(ids, 2), "desc.offsets", "i64");
    BAD(e.reserved[0] = 1, "desc.reserved", "word 0");
#undef BAD
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms), cmocka_unit_test(norms_of_nothing), cmocka_unit_test(norms_far_from_1), cmocka_unit_test(norms_refused),
        cmocka_unit_test(activations), cmocka_unit_test(activations_far_out), cmocka_unit_test(activations_refused),
        cmocka_unit_test(softmaxes), cmocka_unit_test(softmax_at_the_ends), cmocka_unit_test(renorms), cmocka_unit_test(renorms_of_the_largest),
        cmocka_unit_test(masks),
        cmocka_unit_test(filters_refused), cmocka_unit_test(random_numbers), cmocka_unit_test(samples), cmocka_unit_test(samples_of_logits),
        cmocka_unit_test(frequencies), cmocka_unit_test(samples_refused), cmocka_unit_test(verified_frequencies), cmocka_unit_test(verified_cases),
    };
    return cmocka_run_group_tests(tests, open_levels, close_levels);
}
