/* SPDX-License-Identifier: Apache-2.0 */
/* test_ops.c -- append, rope, merge and page copies on every CPU level of the machine, against the
 * definition in double (ref.h) and the definition of the element types (dtype.h). Levels must agree
 * bit for bit; memory that a call has no business with must not change. Numbers like S078 are
 * scenarios of tests/cases/scenarios.md. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "levels.h"

#include "ctx.h"
#include "os.h"
#include "ref.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GUARD = 64 };

static void no_faults(fv_ctx *ctx)
{
    fv_errors e;
    OK(fv_ctx_errors(ctx, &e, 1));
    assert_int_equal(e.what, FV_FAULT_NONE);
    assert_int_equal(e.count, 0);
}

/* ---------------------------------------------------------------------------------------- tensors
 * with gaps and guards A block is memory between guards; every byte that is no element of the view
 * keeps its pattern. */

typedef struct block {
    fv_tensor t;
    fv__dtype dtype;
    unsigned char *memory;
    size_t bytes;
} block;

static block make_block(const char *dtype, int ndim, const int64_t *shape, const int64_t *stride)
{
    block b = { .t = { .dtype = dtype, .ndim = ndim }, .dtype = fv__dtype_find(dtype) };
    int64_t last = 0;
    for (int i = 0; i < ndim; i++) {
        b.t.shape[i] = shape[i];
        b.t.stride[i] = stride[i];
        if (shape[i] > 0) last += (shape[i] - 1) * stride[i];
    }
    b.bytes = (size_t)fv__dtype_bytes(b.dtype, last + 1) + 2 * GUARD;
    b.memory = malloc(b.bytes);
    assert_non_null(b.memory);
    for (size_t i = 0; i < b.bytes; i++) b.memory[i] = (unsigned char)(i * 37 + 11);
    b.t.data = b.memory + GUARD;
    return b;
}

static block copy_of(const block *b)
{
    block c = *b;
    c.memory = malloc(b->bytes);
    assert_non_null(c.memory);
    memcpy(c.memory, b->memory, b->bytes);
    c.t.data = c.memory + GUARD;
    return c;
}

static void same_block(const block *a, const block *b)
{
    assert_memory_equal(a->memory, b->memory, a->bytes);
}

/* [n][heads][width] with the given gap between rows, dense otherwise. */
static block make_rows(const char *dtype, int64_t rows, int64_t heads, int64_t width, int64_t gap)
{
    return make_block(dtype, 3, (int64_t[]){ rows, heads, width },
                      (int64_t[]){ heads * width + gap, width, 1 });
}

static int64_t at3(const block *b, int64_t i, int64_t j)
{
    return i * b->t.stride[0] + j * b->t.stride[1];
}

static double get(const block *b, int64_t element)
{
    return fv__dtype_load(b->dtype, b->t.data, element);
}

static void set(block *b, int64_t element, double x)
{
    fv__dtype_store(b->dtype, b->t.data, element, x);
}

static void fill(block *b)
{
    for (int64_t i = 0; i < b->t.shape[0]; i++)
        for (int64_t j = 0; j < b->t.shape[1]; j++)
            for (int64_t d = 0; d < b->t.shape[2]; d++) set(b, at3(b, i, j) + d, noise());
}

/* What rounding to the type may cost, for a result of size x made from parts of size `parts`. */
static double slack(fv__dtype dtype, double x, double parts)
{
    const double own = parts * 0x1p-22;
    if (fv__dtypes[dtype].bits == 32) return own;
    return own + fabs(x) * (dtype == FV__DTYPE_f16 ? 0x1p-11 : 0x1p-8) * 1.01 + 0x1p-24;
}

static const char *const floats[] = { "f32", "f16", "bf16" };

/* ---------------------------------------------------------------------------------- frequencies */

static void frequencies(void **state)
{
    (void)state;
    float f[64];
    OK(fv_rope_frequencies(&(fv_rope_desc){ .rotary_dim = 128 }, f, &err));
    for (int i = 0; i < 64; i++) assert_true(f[i] == (float)pow(10000, -i / 64.0));
    assert_true(f[0] == 1);
    OK(fv_rope_frequencies(&(fv_rope_desc){ .rotary_dim = 8, .base = 16, .factor = 4 }, f, &err));
    assert_true(f[0] == 0.25f && f[1] == 0.125f && f[2] == 0.0625f && f[3] == 0.03125f);

    /* Llama-3.1: waves shorter than 8192 / 4 stay, longer than 8192 are divided by 8, and in
     * between it is monotone and continuous */
    const fv_rope_desc llama = { .rotary_dim = 128,
                                 .base = 500000,
                                 .factor = 8,
                                 .low_freq_factor = 1,
                                 .high_freq_factor = 4,
                                 .original_context = 8192 };
    OK(fv_rope_frequencies(&llama, f, &err));
    int kept = 0, divided = 0;
    for (int i = 0; i < 64; i++) {
        const double plain = pow(500000, -i / 64.0), wave = 6.283185307179586 / plain;
        kept += wave < 2048;
        divided += wave > 8192;
        if (wave < 2048) assert_true(f[i] == (float)plain);
        else if (wave > 8192) assert_true(f[i] == (float)(plain / 8));
        else assert_true(f[i] < (float)plain && f[i] > (float)(plain / 8));
        if (i) assert_true(f[i] < f[i - 1]);
    }
    assert_true(kept == 29 && divided == 29);
    /* in the middle of the band, by hand: wave 4096 is 2 turns, a third of the way from 1 to 4 */
    const double plain = 6.283185307179586 / 4096;
    fv_rope_desc middle = llama;
    middle.rotary_dim = 4, middle.base = 1 / (plain * plain); /* frequency 1 is base^(-1/2) */
    OK(fv_rope_frequencies(&middle, f, &err));
    assert_true(fabs(f[1] - plain * (1 / 3.0 + 2 / 3.0 / 8)) < plain * 1e-6);

    const float own[2] = { 0.5f, -3 };
    OK(fv_rope_frequencies(&(fv_rope_desc){ .rotary_dim = 4, .frequencies = own }, f, &err));
    assert_memory_equal(f, own, sizeof own);
    OK(fv_rope_frequencies(&(fv_rope_desc){ .rotary_dim = 0 }, NULL, &err));
}

static void frequencies_refused(void **state)
{
    (void)state;
    float f[300];
    static const float bad[2] = { 1, NAN };
#define BAD(...) fv_rope_frequencies(&(fv_rope_desc){ __VA_ARGS__ }, f, &err)
    REFUSED(fv_rope_frequencies(NULL, f, &err), FV_E_INVALID, "desc", "NULL");
    REFUSED(fv_rope_frequencies(&(fv_rope_desc){ .rotary_dim = 2 }, NULL, &err), FV_E_INVALID,
            "frequencies", "NULL");
    REFUSED(BAD(.rotary_dim = 7), FV_E_INVALID, "rotary_dim", "even");
    REFUSED(BAD(.rotary_dim = -2), FV_E_INVALID, "rotary_dim", "-2");
    REFUSED(BAD(.rotary_dim = 578), FV_E_INVALID, "rotary_dim", "578");
    REFUSED(BAD(.rotary_dim = 8, .base = -1), FV_E_INVALID, "base", "positive");
    REFUSED(BAD(.rotary_dim = 8, .base = INFINITY), FV_E_INVALID, "base", "finite");
    REFUSED(BAD(.rotary_dim = 8, .factor = -2), FV_E_INVALID, "factor", "positive");
    REFUSED(BAD(.rotary_dim = 8, .factor = NAN), FV_E_INVALID, "factor", "nan");
    REFUSED(BAD(.rotary_dim = 8, .low_freq_factor = 1), FV_E_INVALID, "high_freq_factor",
            "greater");
    REFUSED(BAD(.rotary_dim = 8, .high_freq_factor = 1), FV_E_INVALID, "low_freq_factor",
            "positive");
    REFUSED(BAD(.rotary_dim = 8, .low_freq_factor = 1, .high_freq_factor = 4), FV_E_INVALID,
            "original_context", "8192");
    REFUSED(BAD(.rotary_dim = 8, .original_context = 8192), FV_E_INVALID, "original_context",
            "8192");
    REFUSED(BAD(.rotary_dim = 4, .frequencies = bad), FV_E_INVALID, "desc", "frequencies[1]");
    REFUSED(BAD(.rotary_dim = 2, .frequencies = bad, .base = 3), FV_E_INVALID, "desc", "must be 0");
    REFUSED(BAD(.rotary_dim = 2, .reserved[1] = 1), FV_E_INVALID, "reserved", "word 1");
#undef BAD
}

/* ----------------------------------------------------------------------------------------- rope */

static void check_turned(const block *x, const block *y, const ref_rope *rope,
                         const int64_t *positions)
{
    for (int64_t i = 0; i < x->t.shape[0]; i++)
        for (int64_t h = 0; h < x->t.shape[1]; h++) {
            double want[FV__MAX_DIM], parts[FV__MAX_DIM];
            const int n = (int)x->t.shape[2], half = rope->rotary_dim / 2;
            for (int d = 0; d < n; d++) parts[d] = fabs(want[d] = get(x, at3(x, i, h) + d));
            ref_turn(rope, positions[i], want);
            for (int p = 0; p < half; p++) {
                double *a = &parts[rope->interleaved ? 2 * p : p],
                       *b = &parts[rope->interleaved ? 2 * p + 1 : p + half];
                *a = *b = *a + *b;
            }
            for (int d = 0; d < n; d++) {
                const double got = get(y, at3(y, i, h) + d);
                const double allowed = d < rope->rotary_dim ? slack(y->dtype, want[d], parts[d])
                                                            : slack(y->dtype, want[d], 0);
                if (!(fabs(got - want[d]) <= allowed))
                    fail_msg("row %d (position %lld) element %d of %d: %.9g, expected %.9g", (int)i,
                             (long long)positions[i], d, rope->rotary_dim, got, want[d]);
            }
        }
}

static void rope_once(const char *from, const char *to, int width, int dim, bool interleaved)
{
    const int64_t rows = 9, heads = 3;
    const int64_t positions[] = { 0, 1, 7, 4095, 131071, 1 << 20, (1 << 30) - 1, -5, 100000007 };
    float f[FV__MAX_DIM / 2];
    const fv_rope_desc desc = { .rotary_dim = dim, .interleaved = interleaved, .base = 500000 };
    OK(fv_rope_frequencies(&desc, f, &err));
    block x = make_rows(from, rows, heads, width, 5), first = { 0 };
    fill(&x);
    const block y_before = make_rows(to, rows, heads, width, 11), x_before = copy_of(&x);
    for (int l = 0; l < num_levels; l++) {
        block y = copy_of(&y_before);
        OK(fv_rope(levels[l], &desc, &x.t, fv_i64(positions, rows), &y.t, NULL, &err));
        same_block(&x, &x_before);
        if (l == 0) {
            first = y;
            check_turned(&x, &y, &(ref_rope){ dim, interleaved, f, NULL }, positions);
        } else {
            same_block(&y, &first);
            free(y.memory);
        }
        if (strcmp(from, to)) continue;
        block same = copy_of(&x); /* in place: the same bits */
        OK(fv_rope(levels[l], &desc, &same.t, fv_i64(positions, rows), &same.t, NULL, &err));
        for (int64_t i = 0; i < rows; i++)
            for (int64_t h = 0; h < heads; h++)
                assert_memory_equal(
                    (char *)same.t.data + fv__dtype_bytes(same.dtype, at3(&same, i, h)),
                    (char *)first.t.data + fv__dtype_bytes(first.dtype, at3(&first, i, h)),
                    (size_t)fv__dtype_bytes(same.dtype, width));
        free(same.memory);
    }
    /* nothing between the rows has changed */
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++)
            memcpy((char *)first.t.data + fv__dtype_bytes(first.dtype, at3(&first, i, h)),
                   (char *)y_before.t.data + fv__dtype_bytes(first.dtype, at3(&first, i, h)),
                   (size_t)fv__dtype_bytes(first.dtype, width));
    same_block(&first, &y_before);
    free(first.memory), free(y_before.memory), free(x.memory), free(x_before.memory);
}

static void rope_turns(void **state)
{
    (void)state;
    static const int shapes[][2] = { { 128, 128 }, { 64, 32 }, { 80, 80 }, { 7, 2 },  { 1, 0 },
                                     { 576, 576 }, { 40, 34 }, { 66, 66 }, { 33, 30 } };
    for (int s = 0; s < FV__COUNT(shapes); s++)
        for (int a = 0; a < 3; a++)
            for (int interleaved = 0; interleaved < 2; interleaved++)
                rope_once(floats[a], floats[s % 2 ? a : (a + s / 2) % 3], shapes[s][0],
                          shapes[s][1], interleaved);
}

/* Every angle matters little in a random row: cos and sin alone, at all kinds of angles, to the
 * last bits. */
static void angles(void **state)
{
    (void)state;
    enum { N = 2000 };
    static int32_t positions[N];
    const float f[] = { 1, 0.5f, 0.7310586f, 1e-4f, 1.9999f, 3.1415927e-3f };
    for (int l = 0; l < num_levels; l++)
        for (int k = 0; k < FV__COUNT(f); k++) {
            block x = make_rows("f32", N, 1, 2, 0);
            for (int i = 0; i < N; i++) {
                positions[i] = i < N / 2 ? i : (int32_t)(draw() % (1u << 30));
                set(&x, 2 * i, 1), set(&x, 2 * i + 1, 0);
            }
            OK(fv_rope(levels[l], &(fv_rope_desc){ .rotary_dim = 2, .frequencies = &f[k] }, &x.t,
                       fv_i32(positions, N), &x.t, NULL, &err));
            for (int i = 0; i < N; i++) {
                const double angle = (double)positions[i] * (double)f[k];
                assert_true(fabs(get(&x, 2 * i) - cos(angle)) < 0x1.1p-25 &&
                            fabs(get(&x, 2 * i + 1) - sin(angle)) < 0x1.1p-25);
            }
            free(x.memory);
        }
}

/* Without rotation rope converts: every 16-bit code, and floats of every exponent with their ties,
 * against the definition of the types. */
static void conversions(void **state)
{
    (void)state;
    enum { N = 1 << 16, W = 512 };
    const int32_t zero[N / W] = { 0 };
    for (int l = 0; l < num_levels; l++)
        for (int type = 1; type < 3; type++) {
            const fv__dtype_info *t = &fv__dtypes[fv__dtype_find(floats[type])];
            block x = make_rows(floats[type], N / W, 1, W, 0), y = make_rows("f32", N / W, 1, W, 0);
            for (uint32_t c = 0; c < N; c++) ((uint16_t *)x.t.data)[c] = (uint16_t)c;
            OK(fv_rope(levels[l], &(fv_rope_desc){ 0 }, &x.t, fv_i32(zero, N / W), &y.t, NULL,
                       &err));
            for (uint32_t c = 0; c < N; c++) {
                const double want = t->decode(c), got = ((float *)y.t.data)[c];
                assert_true(isnan(want) ? isnan(got)
                                        : got == want && signbit(got) == signbit(want));
            }
            for (int round = 0; round < 16; round++) {
                for (uint32_t c = 0; c < N; c++) {
                    /* the code's value, the middle to the next one, what lies next to that, or
                     * anything */
                    uint32_t bits = draw() << 8 ^ draw();
                    float value = (float)t->decode(c);
                    if (round < 12 && !isnan(value)) {
                        const double middle =
                            ((double)value + t->decode(c + 1 < N ? c + 1 : c)) / 2;
                        value = round < 4 ? value : (float)middle;
                        if (round % 4 == 1) value = nextafterf(value, INFINITY);
                        if (round % 4 == 2) value = nextafterf(value, -INFINITY);
                        memcpy(&bits, &value, 4);
                    }
                    ((uint32_t *)y.t.data)[c] = bits;
                }
                OK(fv_rope(levels[l], &(fv_rope_desc){ 0 }, &y.t, fv_i32(zero, N / W), &x.t, NULL,
                           &err));
                for (uint32_t c = 0; c < N; c++) {
                    const float value = ((float *)y.t.data)[c];
                    const uint32_t got = ((uint16_t *)x.t.data)[c], want = t->encode((double)value);
                    if (isnan(value) ? !isnan(t->decode(got)) : got != want)
                        fail_msg("%s on %s: %a became %#x, expected %#x", floats[type],
                                 levels[l]->isa->name, (double)value, got, want);
                }
            }
            free(x.memory), free(y.memory);
        }
}

static void rope_refused(void **state)
{
    (void)state;
    fv_ctx *ctx = levels[0];
    block x = make_rows("f32", 4, 2, 8, 0), y = make_rows("f32", 4, 2, 8, 0);
    const block before = copy_of(&y);
    int32_t p[4] = { 0, 1, 2, 3 };
    const fv_rope_desc desc = { .rotary_dim = 8 };
    const fv_index positions = fv_i32(p, 4);
    fv_tensor t;
    REFUSED(fv_rope(NULL, &desc, &x.t, positions, &y.t, NULL, &err), FV_E_INVALID, "ctx", "NULL");
    REFUSED(fv_rope(ctx, NULL, &x.t, positions, &y.t, NULL, &err), FV_E_INVALID, "desc", "NULL");
    REFUSED(fv_rope(ctx, &desc, NULL, positions, &y.t, NULL, &err), FV_E_INVALID, "x", "NULL");
    REFUSED(fv_rope(ctx, &desc, &x.t, positions, NULL, NULL, &err), FV_E_INVALID, "y", "NULL");
    REFUSED(fv_rope(ctx, &(fv_rope_desc){ .rotary_dim = 10 }, &x.t, positions, &y.t, NULL, &err),
            FV_E_INVALID, "rotary_dim", "8");
    REFUSED(fv_rope(ctx, &desc, &x.t, fv_i32(p, 3), &y.t, NULL, &err), FV_E_INVALID, "positions",
            "3 entries");
    REFUSED(fv_rope(ctx, &desc, &x.t, (fv_index){ 0 }, &y.t, NULL, &err), FV_E_INVALID, "positions",
            "missing");
#define BAD_Y(change, field, word)                                                                 \
    do {                                                                                           \
        t = y.t;                                                                                   \
        change;                                                                                    \
        REFUSED(fv_rope(ctx, &desc, &x.t, positions, &t, NULL, &err), FV_E_INVALID, field, word);  \
    } while (0)
    BAD_Y(t.shape[0] = 3, "y", "3 rows");
    BAD_Y(t.shape[1] = 1, "y", "1");
    BAD_Y(t.shape[2] = 6, "y", "6");
    BAD_Y(t.ndim = 2, "y", "2 axes");
    BAD_Y(t.dtype = "fp8_e4m3", "y", "f32, f16 or bf16");
    BAD_Y(t.dtype = NULL, "y", "NULL");
    BAD_Y(t.dtype = "double", "y", "double");
    BAD_Y(t.data = NULL, "y", "missing");
    BAD_Y(t.stride[2] = 2, "y", "contiguous");
    p[2] = INT32_MAX;
    BAD_Y((void)0, "positions", "positions[2] is 2147483647");
    same_block(&y, &before);
    free(x.memory), free(y.memory), free(before.memory);
}

/* ---------------------------------------------------------------------------- append: the bytes */

/* One row of one head into a cache of one token. */
static fv_append_desc one_row(const block *new_k, const block *k)
{
    static const int32_t one = 1, indptr[2] = { 0, 1 };
    return (fv_append_desc){ .new_k = new_k->t,
                             .k = k->t,
                             .num_requests = 1,
                             .lengths = fv_i32(&one, 1),
                             .kv_indptr = fv_i32(indptr, 2) };
}

static block one_token(const char *dtype, int64_t width)
{
    return make_block(dtype, 3, (int64_t[]){ 1, 1, width }, (int64_t[]){ width, width, 1 });
}

static void s078_bytes_of_e4m3(void **state)
{
    (void)state;
    static const float values[] = { 0,   -0.0f, 0x1p-10f, 1,     447,      448,
                                    449, 500,   1e4f,     -1e4f, INFINITY, NAN };
    static const uint8_t want[] = { 0x00, 0x80, 0x00, 0x38, 0x7E, 0x7E,
                                    0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F };
    for (int l = 0; l < num_levels; l++)
        for (int checked = 0; checked < 2; checked++) {
            block x = make_rows("f32", 1, 1, FV__COUNT(values), 0),
                  k = one_token("fp8_e4m3", FV__COUNT(values));
            memcpy(x.t.data, values, sizeof values);
            fv_append_desc desc = one_row(&x, &k);
            desc.k_scale_kind = "tensor", desc.k_scale.number = 1, desc.checked = checked;
            OK(fv_append(levels[l], &desc, NULL, &err));
            assert_memory_equal(k.t.data, want, sizeof want);
            fv_errors e;
            OK(fv_ctx_errors(levels[l], &e, 1));
            assert_int_equal(e.what, checked ? FV_FAULT_VALUE : FV_FAULT_NONE);
            assert_int_equal(e.count, checked);
            assert_int_equal(e.request, 0);
            free(x.memory), free(k.memory);
        }
}

/* Every narrow type, at every level, from every float type: what the definition says of x / scale,
 * for values of every size and all ties. */
static void quantised_bytes(void **state)
{
    (void)state;
    static const char *const narrow[] = { "fp8_e4m3", "fp8_e5m2", "int8" };
    static const double scales[] = { 1, 0.5, 3, 0.037 };
    enum { WIDTH = 571 };               /* no multiple of any vector */
    for (int l = 0; l < num_levels; l++)
        for (int type = 0; type < 3; type++)
            for (int round = 0; round < 40; round++) {
                const fv__dtype_info *t = &fv__dtypes[fv__dtype_find(narrow[type])];
                block x = make_rows(floats[round % 3], 1, 1, WIDTH, 0),
                      k = one_token(narrow[type], WIDTH);
                const double scale = scales[round % 4];
                for (int i = 0; i < WIDTH; i++) {
                    const uint32_t c = draw() & 0xFF;
                    const double a = t->decode(c), b = t->decode(c ^ 1);
                    double value = round % 5 == 4   ? ldexp(noise(), below(80) - 40)
                                   : round % 5 == 3 ? a
                                                    : (a + b) / 2;
                    if (round % 5 == 1) value = (double)nextafterf((float)value, 1e9f);
                    if (round % 5 == 2) value = (double)nextafterf((float)value, -1e9f);
                    set(&x, i, value * scale);
                }
                fv_append_desc desc = one_row(&x, &k);
                desc.k_scale_kind = round % 4 ? "tensor" : NULL;
                desc.k_scale.number = round % 4 ? scale : 0;
                OK(fv_append(levels[l], &desc, NULL, &err));
                for (int i = 0; i < WIDTH; i++) {
                    const float q = (float)get(&x, i) / (float)scale;
                    const uint32_t want = t->encode((double)q), got = ((uint8_t *)k.t.data)[i];
                    if (got != want)
                        fail_msg("%s on %s: %a became %#x, expected %#x", narrow[type],
                                 levels[l]->isa->name, (double)q, got, want);
                }
                free(x.memory), free(k.memory);
            }
}

/* fp4_e2m1: elements that a block scale can say exactly come back exactly; others are as near as
 * the definition's neighbours. */
static void blocks_of_four_bits(void **state)
{
    (void)state;
    static const double grid[] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
    for (int l = 0; l < num_levels; l++)
        for (int round = 0; round < 60; round++) {
            const int blocks = 1 + below(36), width = 16 * blocks;
            const bool exact = round % 2;
            const double scale = round % 3 ? 1 : 0.25;
            block x = make_rows("f32", 1, 1, width, 0), k = one_token("fp4_e2m1", width),
                  s = one_token("fp8_e4m3", blocks);
            for (int b = 0; b < blocks; b++) {
                const double own = fv__dtypes[s.dtype].decode((uint32_t)(1 + below(0x7E)));
                for (int i = 0; i < 16; i++)
                    set(&x, 16 * b + i,
                        scale * own *
                            (exact ? (i ? grid[below(8)] : 6) * (below(2) ? 1 : -1) : noise()));
                if (!exact && b == 1) for (int i = 0; i < 16; i++) set(&x, 16 * b + i, 0);
            }
            fv_append_desc desc = one_row(&x, &k);
            desc.k_block_scale = s.t;
            if (scale != 1) desc.k_scale_kind = "tensor", desc.k_scale.number = scale;
            OK(fv_append(levels[l], &desc, NULL, &err));
            for (int i = 0; i < width; i++) {
                const double unit = get(&s, i / 16) * scale, got = get(&k, i) * unit,
                             want = get(&x, i);
                if (exact) assert_true(got == want);
                double most = 0;
                for (int n = i / 16 * 16; n < i / 16 * 16 + 16; n++)
                    most = fmax(most, fabs(get(&x, n)));
                /* steps are 2 units at most; the largest may be cut by the rounding of its scale
                 * (1/16, or half of 2^-9) */
                assert_true(fabs(got - want) <= unit * 1.0001 + most / 15 + scale * 0x1.1p-10 * 6);
            }
            free(x.memory), free(k.memory), free(s.memory);
        }
}

/* Group g of one row: what was stored, times `by`, against what was given, which saturates where the scale's f16 ends. */
static void check_group(const block *x, const block *k, const block *p, int size, int g, double by)
{
    const double scale = get(p, 2 * g) * by, zero = get(p, 2 * g + 1), reach = 491280 * by;
    double low = INFINITY, high = -INFINITY;
    for (int i = size * g; i < size * (g + 1); i++) {
        const double finite = fmax(fmin(get(x, i), reach), -reach);
        if (isfinite(get(x, i))) low = fmin(low, finite), high = fmax(high, finite);
    }
    const double most = fmax(fabs(low), fabs(high)), step = fmax((high - low) / 15, most / 1024);
    for (int i = size * g; i < size * (g + 1); i++) {
        const double got = (get(k, i) - zero) * scale, given = get(x, i);
        const double want = isnan(given) ? 0 : fmax(fmin(given, reach), -reach);
        if (isinf(given)) assert_true(get(k, i) == (given > 0 ? 15 : 0));
        if (isinf(given) || (isnan(given) && (low > 0 || high < 0))) continue; /* the code nearest to 0 is none of the row's */
        const double bound = step * (0.5 + 0x1p-9) + most * 0x1.02p-11 + by * 0x1p-22;
        if (!(fabs(got - want) <= bound))
            fail_msg("element %d: %.9g became %.9g (scale %.9g, zero %g), off by more than %.9g", i, given, got, scale, zero, bound);
    }
}

/* int4: elements that a scale and a zero can say exactly come back as near as those are rounded;
 * others within half a step and what the rounding of the zero adds. The bytes are every level's. */
static void groups_of_four_bits(void **state)
{
    (void)state;
    for (int round = 0; round < 80; round++) {
        const int size = round % 2 ? 64 : 32, groups = 1 + below(9), width = size * groups;
        block first_k = { 0 }, first_p = { 0 };
        block x = make_rows("f32", 1, 1, width, 0);
        for (int g = 0; g < groups; g++) {
            const double spread = ldexp(1, below(24) - 12), middle = below(3) ? 0 : spread * (below(2000) - 1000);
            for (int i = 0; i < size; i++) set(&x, size * g + i, below(9) == 0 && round % 3 == 0 ? middle : middle + spread * noise());
        }
        if (round % 5 == 0) for (int i = 0; i < size; i++) set(&x, i, 0);
        if (round % 5 == 1) for (int i = 0; i < size; i++) set(&x, i, -7.3);
        if (round % 5 == 2) set(&x, 3, NAN), set(&x, 5, INFINITY), set(&x, 6, -INFINITY);
        if (round % 5 == 3) set(&x, 3, 2e6), set(&x, 5, round % 2 ? -9.8e5 : -4.4e9);
        if (round % 5 == 4) for (int i = 0; i < size; i++) set(&x, i, 5e9);
        for (int l = 0; l < num_levels; l++) {
            block k = one_token("int4", width), p = one_token("f16", 2 * groups);
            fv_append_desc desc = one_row(&x, &k);
            desc.k_block_scale = p.t;
            if (round % 4 == 3) desc.k_scale_kind = "tensor", desc.k_scale.number = 0.5;
            OK(fv_append(levels[l], &desc, NULL, &err));
            for (int g = 0; g < groups; g++) check_group(&x, &k, &p, size, g, round % 4 == 3 ? 0.5 : 1);
            if (!l) first_k = k, first_p = p;
            else same_block(&k, &first_k), same_block(&p, &first_p), free(k.memory), free(p.memory);
        }
        free(x.memory), free(first_k.memory), free(first_p.memory);
    }
}

/* A scale for each token and head, written by the append: the largest element fills the type. */
static void written_scales(void **state)
{
    (void)state;
    static const char *const narrow[] = { "fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1" };
    enum { ROWS = 6, HEADS = 3, WIDTH = 48, PAGE = 4 };
    const int32_t lengths[2] = { 3, 3 }, rows[3] = { 0, 3, 6 }, indptr[3] = { 0, 1, 2 },
                  ids[2] = { 2, 0 };
    for (int type = 0; type < 4; type++) {
        block first_k = { 0 }, first_s = { 0 };
        block x = make_rows("f32", ROWS, HEADS, WIDTH, 0),
              tail = make_rows("f32", ROWS, HEADS, 16, 0);
        fill(&x), fill(&tail);
        for (int d = 0; d < WIDTH; d++) set(&x, at3(&x, 1, 1) + d, 0); /* a row of nothing */
        set(&x, at3(&x, 2, 0) + 5, 1e30), set(&x, at3(&x, 2, 1) + 7, -INFINITY); /* and wild ones */
        set(&x, at3(&x, 3, 2), 1e-44);
        for (int d = 1; d < WIDTH; d++) set(&x, at3(&x, 3, 2) + d, 0);
        const bool tailed = strcmp(narrow[type], "fp4_e2m1") != 0, blocked = !tailed;
        const bool with_tail = tailed && type != 1;
        for (int d = 0; with_tail && d < 16; d++)
            set(&tail, at3(&tail, 3, 2) + d, 0), set(&tail, at3(&tail, 1, 1) + d, 0);
        for (int l = 0; l < num_levels; l++) {
            block k = make_block(narrow[type], 4, (int64_t[]){ 3, PAGE, HEADS, WIDTH },
                                 (int64_t[]){ PAGE * HEADS * WIDTH, HEADS * WIDTH, WIDTH, 1 });
            block kt = make_block(narrow[type], 4, (int64_t[]){ 3, PAGE, HEADS, 16 },
                                  (int64_t[]){ PAGE * HEADS * 16, HEADS * 16, 16, 1 });
            block s = make_block("f32", 3, (int64_t[]){ 3, PAGE, HEADS },
                                 (int64_t[]){ PAGE * HEADS, 1, PAGE });
            block b = make_block("fp8_e4m3", 4, (int64_t[]){ 3, PAGE, HEADS, 3 },
                                 (int64_t[]){ PAGE * HEADS * 3, HEADS * 3, 3, 1 });
            fv_append_desc desc = { .new_k = x.t,
                                    .k = k.t,
                                    .num_requests = 2,
                                    .rows = fv_i32(rows, 3),
                                    .lengths = fv_i32(lengths, 2),
                                    .pages = { .page_size = PAGE,
                                               .num_pages = 3,
                                               .indptr = fv_i32(indptr, 3),
                                               .ids = fv_i32(ids, 2) },
                                    .k_scale_kind = "token_head",
                                    .k_scale.tensor = &s.t };
            s.t.stride[2] = PAGE, s.t.stride[1] = 1;
            if (with_tail) desc.new_k_tail = tail.t, desc.k_tail = kt.t;
            if (blocked) desc.k_block_scale = b.t;
            OK(fv_append(levels[l], &desc, NULL, &err));
            no_faults(levels[l]);
            for (int row = 0; row < ROWS; row++)
                for (int h = 0; h < HEADS; h++) {
                    const int64_t page = ids[row / 3], token = row % 3;
                    const double scale =
                        ((float *)s.t.data)[page * PAGE * HEADS + h * PAGE + token];
                    assert_true(isfinite(scale) && scale > 0);
                    double most = 0, reach = fv__dtypes[k.dtype].largest * (blocked ? 448 : 1);
                    for (int d = 0; d < WIDTH; d++)
                        if (isfinite(get(&x, at3(&x, row, h) + d)))
                            most = fmax(most, fabs(get(&x, at3(&x, row, h) + d)));
                    for (int d = 0; with_tail && d < 16; d++)
                        most = fmax(most, fabs(get(&tail, at3(&tail, row, h) + d)));
                    if (most == 0) assert_true(scale == 1);
                    else assert_true(scale == fmax((double)((float)most / (float)reach), FLT_MIN));
                    for (int d = 0; d < WIDTH; d++) {
                        const int64_t at = ((page * PAGE + token) * HEADS + h) * WIDTH + d;
                        const double want = get(&x, at3(&x, row, h) + d);
                        double unit = scale;
                        if (blocked)
                            unit *= get(&b, ((page * PAGE + token) * HEADS + h) * 3 + d / 16);
                        const double got = get(&k, at) * unit;
                        if (isinf(want)) {
                            assert_true(blocked ||
                                        got == -(type == 2 ? 128 : fv__dtypes[k.dtype].largest) *
                                                   scale);
                            continue;
                        }
                        /* half a step of the type at this size */
                        const double step = type == 0   ? fmax(fabs(want) * 0x1p-4, scale * 0x1p-10)
                                            : type == 1 ? fmax(fabs(want) * 0x1p-3, scale * 0x1p-17)
                                            : type == 2
                                                ? scale / 2
                                                : unit * 1.0001 + most / 14 + scale * 0x1.1p-10 * 6;
                        if (!(fabs(got - want) <= step * 1.001))
                            fail_msg("%s row %d head %d element %d: %g, expected %g (scale %g)",
                                     narrow[type], row, h, d, got, want, scale);
                    }
                    for (int d = 0; with_tail && d < 16; d++) {
                        const double want = get(&tail, at3(&tail, row, h) + d),
                                     got = scale *
                                           get(&kt, ((page * PAGE + token) * HEADS + h) * 16 + d);
                        assert_true(fabs(got - want) <= most * 0x1p-4 + scale);
                    }
                }
            if (l == 0) first_k = k, first_s = s;
            else same_block(&k, &first_k), same_block(&s, &first_s), free(k.memory), free(s.memory);
            free(kt.memory), free(b.memory);
        }
        free(first_k.memory), free(first_s.memory), free(x.memory), free(tail.memory);
    }
}

/* --------------------------------------------------------------------------------------- append:
 * where the rows go Random steps against a model that stores element by element. */

typedef struct step {
    int n, rows[8], lengths[8], first[8], total;
    int page_size, heads, width, v_width, num_pages, table_width;
    int32_t row_indptr[9], kv_indptr[9], page_indptr[9], len32[8], first32[8], table_rows[8];
    int64_t ids[8 * 40], v_ids[8 * 40];
    int32_t ids32[8 * 40];
    int64_t place[8];                   /* first page entry, or first token */
    int num_ids;
    bool paged, csr, own_v, wide_ids, use_table_rows;
    bool tiled;                         /* pages in the order "tiles" */
} step;

static void random_requests(step *s)
{
    s->n = 1 + below(7);
    s->total = s->num_ids = 0;
    int64_t token = below(5);
    for (int r = 0; r < s->n; r++) {
        s->rows[r] = below(4) ? below(5) : 0;
        s->lengths[r] = s->rows[r] + below(36);
        s->first[r] = below(2) ? 0 : below(1000);
        s->row_indptr[r] = s->total;
        s->total += s->rows[r];
        s->len32[r] = s->lengths[r];
        s->first32[r] = s->first[r];
        s->kv_indptr[r] = (int32_t)token;
        s->place[r] = token;
        token += s->lengths[r] + below(3);
    }
    s->row_indptr[s->n] = s->total;
    s->kv_indptr[s->n] = (int32_t)token;
}

/* A permutation of the pool, handed out in order: no two requests share a page. */
static void random_tables(step *s)
{
    int64_t pool[400], v_pool[400];
    s->page_size = s->tiled ? 16 * (1 + below(3)) : 1 + below(9);
    s->num_pages = 400;
    s->table_width = 48;
    for (int i = 0; i < 400; i++) pool[i] = v_pool[i] = i;
    for (int i = 399; i > 0; i--) {
        const int a = below(i + 1), b = below(i + 1);
        int64_t swap = pool[i];
        pool[i] = pool[a], pool[a] = swap;
        swap = v_pool[i];
        v_pool[i] = v_pool[b], v_pool[b] = swap;
    }
    for (int i = 0; i < 8 * 40; i++) s->ids[i] = 1 << 30, s->v_ids[i] = -1;
    if (!s->csr) s->table_width = 40;
    int next = 0;
    for (int r = 0; r < s->n; r++) {
        const int pages = (s->lengths[r] + s->page_size - 1) / s->page_size;
        const int row = s->use_table_rows ? s->n - 1 - r : r;
        s->table_rows[r] = row;
        s->page_indptr[r] = s->num_ids;
        s->place[r] = s->csr ? s->num_ids : row * s->table_width;
        for (int i = 0; i < pages; i++) {
            s->ids[s->place[r] + i] = pool[next];
            s->v_ids[s->place[r] + i] = s->own_v ? v_pool[next] : pool[next];
            next++;
        }
        s->num_ids += pages;
    }
    s->page_indptr[s->n] = s->num_ids;
    if (!s->csr) s->num_ids = s->n * s->table_width;
    for (int i = 0; i < 8 * 40; i++) s->ids32[i] = (int32_t)s->ids[i];
}

/* NHD or HND, K and V apart or token by token in one buffer: only strides. */
static block make_cache(const step *s, const char *dtype, int width, int layout)
{
    const int64_t h = s->heads, p = s->page_size, w = width;
    if (!s->paged) {
        const int64_t tokens = s->kv_indptr[s->n] + 3;
        if (layout == 0)
            return make_block(dtype, 3, (int64_t[]){ tokens, h, w }, (int64_t[]){ h * w, w, 1 });
        if (layout == 1)
            return make_block(dtype, 3, (int64_t[]){ tokens, h, w },
                              (int64_t[]){ w, tokens * w, 1 });
        return make_block(dtype, 3, (int64_t[]){ tokens, h, w },
                          (int64_t[]){ 2 * h * w + 6, w, 1 });
    }
    const int64_t n = s->num_pages;
    if (layout == 0)
        return make_block(dtype, 4, (int64_t[]){ n, p, h, w },
                          (int64_t[]){ p * h * w, h * w, w, 1 });
    if (layout == 1)
        return make_block(dtype, 4, (int64_t[]){ n, p, h, w },
                          (int64_t[]){ p * h * w, w, p * w, 1 });
    return make_block(dtype, 4, (int64_t[]){ n, p, h, w },
                      (int64_t[]){ 2 * p * h * w + 10, 2 * h * w, w, 1 });
}

static int64_t slot_element(const step *s, const block *cache, const int64_t *ids, int r, int key,
                            int head)
{
    const int64_t *stride = cache->t.stride;
    if (!s->paged) return (s->place[r] + key) * stride[0] + head * stride[1];
    return ids[s->place[r] + key / s->page_size] * stride[0] + key % s->page_size * stride[1] +
           head * stride[2];
}

/* Where element d of key `key` is: in its row, or where the order "tiles" of fv_problem has it. */
static int64_t stored_element(const step *s, const block *cache, const int64_t *ids, int r, int key,
                              int head, int d, bool is_key)
{
    const int width = (int)cache->t.shape[cache->t.ndim - 1];
    if (!s->tiled) return slot_element(s, cache, ids, r, key, head) + d;
    if (is_key)
        return slot_element(s, cache, ids, r, key / 16 * 16 + d % 32 / 2, head) + d / 32 * 32 +
               key % 16 * 2 + d % 2;
    const int at = 2 * d + key % 2;
    return slot_element(s, cache, ids, r, key / 2 * 2 + at / width, head) + at % width;
}

/* The model: one element after the other. */
static void store_model(const step *s, const block *x, block *cache, const int64_t *ids,
                        float scale, bool is_key)
{
    for (int r = 0; r < s->n; r++)
        for (int i = 0; i < s->rows[r]; i++)
            for (int h = 0; h < s->heads; h++) {
                const int key = s->lengths[r] - s->rows[r] + i;
                const int64_t from = at3(x, s->row_indptr[r] + i, h);
                for (int d = 0; d < (int)x->t.shape[2]; d++)
                    set(cache, stored_element(s, cache, ids, r, key, h, d, is_key),
                        (double)((float)get(x, from + d) / scale));
            }
}

static fv_append_desc describe(const step *s)
{
    fv_append_desc d = { .num_requests = s->n,
                         .rows = fv_i32(s->row_indptr, s->n + 1),
                         .lengths = fv_i32(s->len32, s->n),
                         .first_positions = fv_i32(s->first32, s->n),
                         .page_order = s->tiled ? "tiles" : below(2) ? "rows" : NULL };
    if (!s->paged) {
        d.kv_indptr = fv_i32(s->kv_indptr, s->n + 1);
        return d;
    }
    d.pages.page_size = s->page_size, d.pages.num_pages = s->num_pages;
    d.pages.ids =
        s->wide_ids || s->own_v ? fv_i64(s->ids, s->num_ids) : fv_i32(s->ids32, s->num_ids);
    if (s->own_v) d.pages.v_ids = fv_i64(s->v_ids, s->num_ids);
    if (s->csr) d.pages.indptr = fv_i32(s->page_indptr, s->n + 1);
    else d.pages.table_width = d.pages.table_stride = s->table_width;
    if (!s->csr && s->use_table_rows) d.pages.table_rows = fv_i32(s->table_rows, s->n);
    return d;
}

static step random_step(bool tiled)
{
    step s = { .tiled = tiled };
    s.heads = 1 + below(4);
    s.width = tiled ? 32 * (1 + below(5)) : 1 + below(150);
    s.v_width = tiled ? 32 * (1 + below(5)) : 1 + below(150);
    s.paged = tiled || below(3);
    s.csr = below(2);
    s.own_v = below(2);
    s.wide_ids = below(2);
    s.use_table_rows = below(2);
    random_requests(&s);
    if (s.paged) random_tables(&s);
    return s;
}

static void rows_land_where_they_belong(void **state)
{
    (void)state;
    static const char *const types[] = { "f32", "f16", "bf16", "fp8_e4m3", "int8" };
    for (int round = 0; round < 220; round++) {
        const step s = random_step(round >= 150);
        const char *kt = types[s.tiled ? 1 + below(2) : below(5)],
                   *vt = types[s.tiled ? 1 + below(2) : below(5)];
        block x = make_rows(floats[below(3)], s.total + below(3), s.heads, s.width, below(4)),
              y = make_rows(floats[below(3)], s.total + below(3), s.heads, s.v_width, 0);
        fill(&x), fill(&y);
        const block k_before = make_cache(&s, kt, s.width, below(3)),
                    v_before = make_cache(&s, vt, s.v_width, below(3));
        block k_want = copy_of(&k_before), v_want = copy_of(&v_before);
        const bool scaled = below(2);
        store_model(&s, &x, &k_want, s.ids, scaled ? 0.3f : 1, true);
        store_model(&s, &y, &v_want, s.own_v ? s.v_ids : s.ids, scaled ? 1.7f : 1, false);
        for (int l = 0; l < num_levels; l++) {
            block k = copy_of(&k_before), v = copy_of(&v_before);
            fv_append_desc d = describe(&s);
            d.new_k = x.t, d.new_v = y.t, d.k = k.t, d.v = v.t;
            const float two[] = { 0.3f, 0.3f, 0.3f, 0.3f }, one = 1.7f;
            const fv_tensor per_head = {
                .data = (void *)two, .ndim = 1, .shape = { s.heads }, .stride = { 1 }
            };
            const fv_tensor whole = {
                .data = (void *)&one, .ndim = 1, .shape = { 1 }, .stride = { 1 }
            };
            if (scaled)
                d.k_scale_kind = "head", d.k_scale.tensor = &per_head, d.v_scale_kind = "tensor",
                d.v_scale.tensor = &whole;
            OK(fv_append(levels[l], &d, NULL, &err));
            no_faults(levels[l]);
            same_block(&k, &k_want);
            same_block(&v, &v_want);
            free(k.memory), free(v.memory);
        }
        free(x.memory), free(y.memory);
        free(k_before.memory), free(v_before.memory), free(k_want.memory), free(v_want.memory);
    }
}

/* Slots by the caller: -1 is left out, one outside of the cache is reported, the others are
 * written. */
static void slots_of_the_caller(void **state)
{
    (void)state;
    enum { PAGE = 4, PAGES = 5, HEADS = 2, WIDTH = 20 };
    static const int64_t slots[] = { 7, -1, 19, 20, 0, -2, 1000000000000 };
    const int rows = FV__COUNT(slots);
    for (int l = 0; l < num_levels; l++)
        for (int paged = 0; paged < 2; paged++) {
            block x = make_rows("f16", rows, HEADS, WIDTH, 0);
            fill(&x);
            block k = paged
                          ? make_block("f16", 4, (int64_t[]){ PAGES + 1, PAGE, HEADS, WIDTH },
                                       (int64_t[]){ PAGE * HEADS * WIDTH, WIDTH, PAGE * WIDTH, 1 })
                          : make_block("f16", 3, (int64_t[]){ PAGE * PAGES, HEADS, WIDTH },
                                       (int64_t[]){ HEADS * WIDTH, WIDTH, 1 });
            block want = copy_of(&k);
            for (int i = 0; i < rows; i++)
                for (int h = 0; h < HEADS && slots[i] >= 0 && slots[i] < PAGE * PAGES; h++)
                    for (int d = 0; d < WIDTH; d++)
                        set(&want,
                            (paged ? slots[i] / PAGE * k.t.stride[0] +
                                         slots[i] % PAGE * k.t.stride[1] + h * k.t.stride[2]
                                   : slots[i] * k.t.stride[0] + h * k.t.stride[1]) +
                                d,
                            get(&x, at3(&x, i, h) + d));
            fv_append_desc d = { .new_k = x.t, .k = k.t, .slots = fv_i64(slots, rows) };
            if (paged) d.pages.page_size = PAGE, d.pages.num_pages = PAGES;
            OK(fv_append(levels[l], &d, NULL, &err));
            same_block(&k, &want);
            fv_errors e;
            OK(fv_ctx_errors(levels[l], &e, 1));
            assert_int_equal(e.what, FV_FAULT_SLOT);
            assert_int_equal(e.count, 3);
            if (levels[l]->num_threads == 1) assert_true(e.request == 3 && e.value == 20);
            free(x.memory), free(k.memory), free(want.memory);
        }
}

/* A page id that is none of the pool: that row is left out and reported, the others are written. */
static void bad_page_ids(void **state)
{
    (void)state;
    const int32_t lengths[2] = { 5, 9 }, indptr[3] = { 0, 2, 5 }, ids[5] = { 1, 2, 3, 4, 8 };
    for (int l = 0; l < num_levels; l++) {
        block x = make_rows("f32", 2, 1, 3, 0),
              k = make_block("f32", 4, (int64_t[]){ 8, 4, 1, 3 }, (int64_t[]){ 12, 3, 3, 1 });
        fill(&x);
        block want = copy_of(&k);
        for (int d = 0; d < 3; d++) set(&want, 2 * 12 + d, get(&x, d));
        OK(fv_append(levels[l],
                     &(fv_append_desc){ .new_k = x.t,
                                        .k = k.t,
                                        .num_requests = 2,
                                        .lengths = fv_i32(lengths, 2),
                                        .pages = { .page_size = 4,
                                                   .num_pages = 8,
                                                   .indptr = fv_i32(indptr, 3),
                                                   .ids = fv_i32(ids, 5) } },
                     NULL, &err));
        same_block(&k, &want);
        fv_errors e;
        OK(fv_ctx_errors(levels[l], &e, 1));
        assert_true(e.what == FV_FAULT_PAGE_ID && e.request == 1 && e.slot == 2 && e.value == 8 &&
                    e.count == 1);
        free(x.memory), free(k.memory), free(want.memory);
    }
}

/* ------------------------------------------------------------------------ append: with rotation */

static void rotates_on_the_way(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        step s = random_step(false);
        s.own_v = false;
        const int kind = round % 3; /* plain keys; keys with a tail that turns; given positions */
        const bool interleaved = below(2);
        const int turned_width = kind == 1 ? 2 + 2 * below(30) : s.width,
                  dim = turned_width / 2 * 2 - (below(2) && turned_width > 4 ? 2 : 0);
        block x = make_rows(floats[below(3)], s.total, s.heads, s.width, 0),
              xt = make_rows("f32", s.total, s.heads, turned_width, 2);
        block q = make_rows(floats[round % 3], s.total, 3, turned_width + below(5), 1);
        if (x.t.shape[0]) fill(&x), fill(&xt), fill(&q);
        static int64_t positions[64];
        for (int r = 0; r < s.n; r++)
            for (int i = 0; i < s.rows[r]; i++)
                positions[s.row_indptr[r] + i] =
                    kind == 2 ? below(1 << 20) : s.first[r] + s.lengths[r] - s.rows[r] + i;
        fv_rope_desc rope = { .rotary_dim = dim, .interleaved = interleaved, .base = 700 };
        float f[FV__MAX_DIM / 2];
        OK(fv_rope_frequencies(&rope, f, &err));
        const ref_rope ref = { dim, interleaved, f, NULL };
        block first_k = { 0 }, first_t = { 0 }, first_q = { 0 };
        const block k_before = make_cache(&s, "bf16", s.width, 0),
                    t_before = make_cache(&s, "bf16", turned_width, 1);
        for (int l = 0; l < num_levels; l++) {
            block k = copy_of(&k_before), kt = copy_of(&t_before),
                  out = round % 2 ? copy_of(&q) : make_rows("bf16", s.total, 3, q.t.shape[2], 0);
            const block q_in = copy_of(&q);
            fv_append_desc d = describe(&s);
            d.new_k = x.t, d.k = k.t, d.rope = &rope, d.q = round % 2 ? out.t : q.t,
            d.q_out = out.t;
            if (kind == 1) d.new_k_tail = xt.t, d.k_tail = kt.t;
            if (kind == 2) d.row_positions = fv_i64(positions, s.total);
            if (s.total) {
                OK(fv_append(levels[l], &d, NULL, &err));
                check_turned(&q_in, &out, &ref, positions);
            }
            /* the cache's rows as a block of rows, so that the same check serves */
            block seen = make_rows("bf16", s.total, s.heads, kind == 1 ? turned_width : s.width, 0);
            for (int r = 0; r < s.n; r++)
                for (int i = 0; i < s.rows[r]; i++)
                    for (int h = 0; h < s.heads; h++)
                        for (int e = 0; e < seen.t.shape[2]; e++) {
                            const block *from = kind == 1 ? &kt : &k;
                            set(&seen, at3(&seen, s.row_indptr[r] + i, h) + e,
                                get(from, slot_element(&s, from, s.ids, r,
                                                       s.lengths[r] - s.rows[r] + i, h) +
                                              e));
                        }
            check_turned(kind == 1 ? &xt : &x, &seen, &ref, positions);
            if (kind == 1) { /* the part in front of the tail does not turn */
                block want = copy_of(&k_before);
                store_model(&s, &x, &want, s.ids, 1, true);
                same_block(&k, &want);
                free(want.memory);
            }
            if (l == 0) first_k = copy_of(&k), first_t = copy_of(&kt), first_q = copy_of(&out);
            same_block(&k, &first_k), same_block(&kt, &first_t), same_block(&out, &first_q);
            free(k.memory), free(kt.memory), free(out.memory), free(q_in.memory), free(seen.memory);
        }
        free(first_k.memory), free(first_t.memory), free(first_q.memory);
        free(x.memory), free(xt.memory), free(q.memory), free(k_before.memory),
            free(t_before.memory);
    }
}

/* ---------------------------------------------------------------------------- append: scenarios */

static void s015_no_room_for_one_more(void **state)
{
    (void)state;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int32_t length = 65, indptr[2] = { 0, 4 }, ids[4] = { 0, 1, 2, 3 }, tokens[2] = { 0, 64 };
    for (int l = 0; l < num_levels; l++) {
        char *memory =
            mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(memory, MAP_FAILED);
        memset(memory, 0x5C, 2 * page);
        block x = make_rows("f32", 1, 1, 8, 0);
        fill(&x);
        fv_tensor k = { .data = memory + page - 64 * 8 * 4,
                        .dtype = "f32",
                        .ndim = 4,
                        .shape = { 4, 16, 1, 8 },
                        .stride = { 128, 8, 8, 1 } };
        fv_append_desc d = { .new_k = x.t,
                             .k = k,
                             .num_requests = 1,
                             .lengths = fv_i32(&length, 1),
                             .pages = { .page_size = 16,
                                        .num_pages = 4,
                                        .indptr = fv_i32(indptr, 2),
                                        .ids = fv_i32(ids, 4) } };
        assert_int_equal(mprotect(memory + page, page, PROT_NONE), 0);
        REFUSED(fv_append(levels[l], &d, NULL, &err), FV_E_INVALID, "desc.lengths[0]", "65");
        assert_true(err.request == 0 && err.value == 65 && err.limit == 64 &&
                    strstr(err.text, "64"));
        d.pages = (fv_pages){ 0 };
        d.k = (fv_tensor){
            .data = k.data, .dtype = "f32", .ndim = 3, .shape = { 64, 1, 8 }, .stride = { 8, 8, 1 }
        };
        d.kv_indptr = fv_i32(tokens, 2);
        REFUSED(fv_append(levels[l], &d, NULL, &err), FV_E_INVALID, "desc.lengths", "65");
        assert_int_equal(mprotect(memory + page, page, PROT_READ | PROT_WRITE), 0);
        for (size_t i = 0; i < 2 * page; i++) assert_int_equal(memory[i], 0x5C);
        munmap(memory, 2 * page);
        free(x.memory);
    }
}

/* Strides of 2^30 elements: 64-bit offsets. Address space is reserved, only the pages in use are
 * backed. */
static void s021_far_apart(void **state)
{
    (void)state;
    const int64_t far = INT64_C(1) << 30;
    const size_t bytes = (size_t)(5 * far * 2);
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) skip();
    /* page size 64: a sequence is a page, seen with a stride of 2^30 elements */
    const int32_t lengths[5] = { 3, 64, 1, 17, 40 }, indptr[6] = { 0, 1, 2, 3, 4, 5 },
                  ids[5] = { 4, 0, 3, 1, 2 };
    for (int l = 0; l < num_levels; l++) {
        block x = make_rows("f16", 5, 2, 16, 0);
        fill(&x);
        madvise(memory, bytes, MADV_DONTNEED);
        const fv_tensor k = { .data = memory,
                              .dtype = "f16",
                              .ndim = 4,
                              .shape = { 5, 64, 2, 16 },
                              .stride = { far, 32, 16, 1 } };
        OK(fv_append(levels[l],
                     &(fv_append_desc){ .new_k = x.t,
                                        .k = k,
                                        .num_requests = 5,
                                        .lengths = fv_i32(lengths, 5),
                                        .pages = { .page_size = 64,
                                                   .num_pages = 5,
                                                   .indptr = fv_i32(indptr, 6),
                                                   .ids = fv_i32(ids, 5) } },
                     NULL, &err));
        for (int r = 0; r < 5; r++)
            for (int token = 0; token < 64; token++)
                for (int i = 0; i < 32; i++) {
                    const int64_t at = ids[r] * far + token * 32 + i;
                    const double want = token == lengths[r] - 1 ? get(&x, r * 32 + i) : 0;
                    assert_true(fv__dtype_load(FV__DTYPE_f16, memory, at) == want);
                }
        /* and a copy over the same distance */
        OK(fv_copy_pages(levels[l], &k, NULL, &(fv_copy){ 0, 4 }, 1, NULL, &err));
        assert_memory_equal(memory + 4 * far * 2, memory, 64 * 64);
        free(x.memory);
    }
    munmap(memory, bytes);
}

static void s026_nothing_to_do(void **state)
{
    (void)state;
    static const int32_t zeros[4] = { 0 };
    const fv_index none = { .type = FV_INDEX_I32, .stride = 1 };
    for (int l = 0; l < num_levels; l++) {
        fv_ctx *ctx = levels[l];
        float memory[64];
        memset(memory, 0x11, sizeof memory);
        fv_tensor rows = {
            .data = memory, .dtype = "f32", .ndim = 3, .shape = { 4, 1, 4 }, .stride = { 4, 4, 1 }
        };
        fv_tensor k = { .data = memory + 16,
                        .dtype = "f32",
                        .ndim = 4,
                        .shape = { 1, 4, 1, 4 },
                        .stride = { 16, 4, 4, 1 } };
        fv_tensor empty = {
            .dtype = "f32", .ndim = 3, .shape = { 0, 1, 4 }, .stride = { 4, 4, 1 }
        };
        /* a batch of none; three requests with no row; a pool of no pages */
        OK(fv_append(ctx,
                     &(fv_append_desc){ .new_k = rows,
                                        .k = k,
                                        .lengths = fv_i32(zeros, 0),
                                        .pages = { .page_size = 4,
                                                   .num_pages = 1,
                                                   .indptr = fv_i32(zeros, 1),
                                                   .ids = none } },
                     NULL, &err));
        OK(fv_append(ctx,
                     &(fv_append_desc){ .new_k = rows,
                                        .k = k,
                                        .num_requests = 3,
                                        .rows = fv_i32(zeros, 4),
                                        .lengths = fv_i32(zeros, 3),
                                        .pages = { .page_size = 4,
                                                   .num_pages = 1,
                                                   .indptr = fv_i32(zeros, 4),
                                                   .ids = none } },
                     NULL, &err));
        OK(fv_append(ctx,
                     &(fv_append_desc){
                         .new_k = empty,
                         .num_requests = 3,
                         .rows = fv_i32(zeros, 4),
                         .lengths = fv_i32(zeros, 3),
                         .pages = { .page_size = 4, .indptr = fv_i32(zeros, 4), .ids = none } },
                     NULL, &err));
        OK(fv_append(ctx,
                     &(fv_append_desc){ .new_k = rows,
                                        .k = k,
                                        .slots = fv_i32(zeros, 0),
                                        .pages = { .page_size = 4, .num_pages = 1 } },
                     NULL, &err));
        const fv_tensor lse = { .dtype = "f32", .ndim = 2, .shape = { 0, 1 }, .stride = { 1, 1 } };
        OK(fv_merge(ctx, &empty, &lse, 1, false, &empty, &lse, NULL, &err));
        OK(fv_rope(ctx, &(fv_rope_desc){ .rotary_dim = 4 }, &empty, fv_i32(zeros, 0), &empty, NULL,
                   &err));
        OK(fv_copy_pages(ctx, &k, NULL, NULL, 0, NULL, &err));
        OK(fv_copy_pages(ctx, NULL, NULL, NULL, 0, NULL, &err));
        no_faults(ctx);
        for (size_t i = 0; i < sizeof memory; i++)
            assert_int_equal(((unsigned char *)memory)[i], 0x11);
    }
}

static void s079_scales_that_are_none(void **state)
{
    (void)state;
    static const double bad[] = { 0, NAN, 1e300, -1, INFINITY, 1e-60 };
    for (int l = 0; l < num_levels; l++)
        for (int i = 0; i < FV__COUNT(bad); i++) {
            block x = make_rows("f32", 1, 1, 8, 0), k = one_token("fp8_e4m3", 8);
            fill(&x);
            const block before = copy_of(&k);
            fv_append_desc d = one_row(&x, &k);
            d.k_scale_kind = "tensor", d.k_scale.number = bad[i];
            REFUSED(fv_append(levels[l], &d, NULL, &err), FV_E_INVALID, "desc.k_scale",
                    "finite and positive");
            float list[1] = { (float)bad[i] };
            const fv_tensor t = {
                .data = list, .dtype = "f32", .ndim = 1, .shape = { 1 }, .stride = { 1 }
            };
            d.k_scale.number = 0, d.k_scale.tensor = &t;
            REFUSED(fv_append(levels[l], &d, NULL, &err), FV_E_INVALID, "desc.k_scale",
                    "finite and positive");
            d.k_scale_kind = "head";
            REFUSED(fv_append(levels[l], &d, NULL, &err), FV_E_INVALID, "desc.k_scale",
                    "finite and positive");
            same_block(&k, &before);
            free(x.memory), free(k.memory), free(before.memory);
        }
}

/* One refusal for each field; nothing is written. */
static void append_refused(void **state)
{
    (void)state;
    fv_ctx *ctx = levels[num_levels - 1];
    enum { PAGE = 4, PAGES = 6 };
    int32_t rows[3] = { 0, 1, 3 }, lengths[2] = { 5, 8 }, indptr[3] = { 0, 2, 4 },
            ids[4] = { 0, 1, 2, 3 };
    block x = make_rows("f32", 3, 2, 16, 0), y = make_rows("f32", 3, 2, 16, 0),
          q = make_rows("f32", 3, 4, 16, 0);
    fill(&x), fill(&y), fill(&q);
    block k = make_block("fp8_e4m3", 4, (int64_t[]){ PAGES, PAGE, 2, 16 },
                         (int64_t[]){ PAGE * 32, 32, 16, 1 });
    block s = make_block("f32", 3, (int64_t[]){ PAGES, PAGE, 2 }, (int64_t[]){ PAGE * 2, 2, 1 });
    block b = make_block("fp8_e4m3", 4, (int64_t[]){ PAGES, PAGE, 2, 1 },
                         (int64_t[]){ PAGE * 2, 2, 1, 1 });
    block wide = make_rows("f32", 3, 2, 32, 0);
    block tiles = make_block("bf16", 4, (int64_t[]){ PAGES, PAGE, 2, 32 },
                             (int64_t[]){ PAGE * 64, 64, 32, 1 });
    fill(&wide);
    const block k_before = copy_of(&k), s_before = copy_of(&s), q_before = copy_of(&q),
                b_before = copy_of(&b), tiles_before = copy_of(&tiles);
    const fv_rope_desc rope = { .rotary_dim = 16 };
    int32_t positions[3] = { 1, 2, 3 };
    const fv_append_desc good = { .new_k = x.t,
                                  .new_v = y.t,
                                  .k = k.t,
                                  .v = k.t,
                                  .num_requests = 2,
                                  .rows = fv_i32(rows, 3),
                                  .lengths = fv_i32(lengths, 2),
                                  .pages = { .page_size = PAGE,
                                             .num_pages = PAGES,
                                             .indptr = fv_i32(indptr, 3),
                                             .ids = fv_i32(ids, 4) } };
    fv_append_desc d;
#define BAD(change, field, word)                                                                   \
    do {                                                                                           \
        d = good;                                                                                  \
        change;                                                                                    \
        REFUSED(fv_append(ctx, &d, NULL, &err), FV_E_INVALID, field, word);                        \
        assert_int_equal(fv_append(ctx, &d, NULL, NULL), FV_E_INVALID);                            \
    } while (0)
    REFUSED(fv_append(NULL, &good, NULL, &err), FV_E_INVALID, "ctx", "NULL");
    REFUSED(fv_append(ctx, NULL, NULL, &err), FV_E_INVALID, "desc", "NULL");
    BAD(d.reserved[0] = 1, "reserved", "word 0");
    BAD(d.num_requests = -1, "num_requests", "-1");
    BAD(d.num_requests = 3, "desc.rows", "expected 4");
    BAD(d.lengths = fv_i32(lengths, 1), "desc.lengths", "1 entries");
    BAD(d.lengths = (fv_index){ 0 }, "desc.lengths", "desc.lengths is missing");
    BAD(lengths[1] = 1, "desc.lengths[1]", "its 2 new rows");
    lengths[1] = 9;
    BAD((void)0, "desc.lengths[1]", "hold only 8");
    lengths[1] = -1;
    BAD((void)0, "desc.lengths", "-1");
    lengths[1] = 8;
    rows[1] = 4;
    BAD((void)0, "desc.rows", "3");
    rows[1] = 1;
    indptr[2] = 5;
    BAD((void)0, "desc.pages.indptr", "5");
    indptr[2] = 4;
    BAD(d.first_positions = fv_i32(((const int32_t[]){ 0, (1 << 30) - 4 }), 2), "desc.lengths[1]",
        "2^30");
    BAD(d.kv_indptr = fv_i32(indptr, 3), "desc.kv_indptr", "ragged");
    BAD(d.pages.ids.host = NULL, "desc.pages.ids", "host");
    BAD(d.pages.ids.count = -1, "desc.pages.ids", "-1");
    BAD(d.pages.v_ids = fv_i32(NULL, 4), "desc.pages.v_ids", "host");
    BAD(d.pages.v_ids = fv_i32(ids, 3), "desc.pages.v_ids", "3 entries");
    BAD(d.new_k.shape[0] = 2, "desc.new_k", "3 new ones");
    BAD(d.new_k.dtype = NULL, "desc.new_k", "dtype");
    BAD(d.new_k.dtype = "int8", "desc.new_k", "int8");
    BAD(d.new_k.data = NULL, "desc.new_k", "missing");
    BAD(d.new_k.ndim = 2, "desc.new_k", "2 axes");
    BAD(d.k.data = NULL, "desc.k", "missing");
    BAD(d.k.dtype = NULL, "desc.k", "dtype");
    BAD(d.k.dtype = "f64", "desc.k", "f64");
    BAD(d.k.shape[0] = PAGES - 1, "desc.k", "5 pages");
    BAD(d.k.shape[1] = 3, "desc.k", "expected 4");
    BAD(d.k.shape[2] = 1, "desc.k", "expected 2");
    BAD(d.k.shape[3] = 8, "desc.k", "expected 16");
    BAD(d.v.shape[3] = 8, "desc.v", "expected 16");
    BAD(d.new_v.data = NULL, "desc.v", "new_v is absent");
    BAD(d.new_v.shape[1] = 1, "desc.new_v", "expected 2");
    BAD(d.k_tail = k.t, "desc.k_tail", "new_k_tail is absent");
    BAD((d.new_k_tail = x.t, d.k_tail = k.t, d.k_tail.dtype = "int8"), "desc.k_tail", "one type");
    BAD(d.k_scale_kind = "page", "desc.k_scale_kind", "page");
    BAD(d.k_scale.number = 2, "desc.k_scale", "kind is none");
    BAD((d.k_scale_kind = "tensor", d.k_scale.reserved = 1, d.k_scale.number = 1), "desc.k_scale",
        "reserved");
    BAD((d.k_scale_kind = "tensor", d.k_scale.tensor = &s.t, d.k_scale.number = 1), "desc.k_scale",
        "as a tensor and as the number");
    BAD((d.k_scale_kind = "head", d.k_scale.number = 1), "desc.k_scale", "must be a tensor");
    BAD((d.k_scale_kind = "head", d.k_scale.tensor = &s.t), "desc.k_scale", "3 axes");
    BAD((d.k_scale_kind = "token_head",
         d.k_scale.tensor =
             &(fv_tensor){ .data = s.t.data, .dtype = "f32", .ndim = 2, .shape = { 2, 2 } }),
        "desc.k_scale", "2 axes");
    BAD((d.new_v.data = NULL, d.v.data = NULL, d.v_scale_kind = "tensor", d.v_scale.number = 1),
        "desc.v_scale", "nothing");
    BAD(d.k_block_scale = b.t, "desc.k_block_scale", "only fp4_e2m1 and int4");
    BAD((d.k.dtype = "int4", d.k_block_scale = b.t), "desc.k_block_scale", "multiple of 32");
    BAD((d.k.dtype = "fp4_e2m1"), "desc.k_block_scale", "missing");
    BAD((d.k.dtype = "fp4_e2m1", d.k_block_scale = b.t, d.k_block_scale.shape[3] = 2),
        "desc.k_block_scale", "expected 1");
    BAD(d.page_order = "squares", "desc.page_order", "rows or tiles");
    BAD((d.page_order = "tiles", d.new_k = wide.t, d.k = tiles.t, d.new_v.data = d.v.data = NULL),
        "desc.pages.page_size", "a multiple of 16");
    d = good, d.page_order = "tiles";
    REFUSED(fv_append(ctx, &d, NULL, &err), FV_E_UNSUPPORTED, "desc.page_order", "K is fp8_e4m3");
    d.k.dtype = "bf16", d.v.dtype = "bf16";
    REFUSED(fv_append(ctx, &d, NULL, &err), FV_E_UNSUPPORTED, "desc.page_order", "16 wide");
    d = good, d.page_order = "tiles", d.new_k = wide.t, d.k = tiles.t;
    REFUSED(fv_append(ctx, &d, NULL, &err), FV_E_UNSUPPORTED, "desc.page_order", "V is fp8_e4m3");
    BAD(d.q = q.t, "desc.q", "rope is NULL");
    BAD(d.q_out = q.t, "desc.q_out", "q is absent");
    BAD((d.rope = &rope, d.q = q.t), "desc.q_out", "dtype");
    BAD((d.rope = &rope, d.q = q.t, d.q_out = q.t, d.q_out.shape[1] = 2), "desc.q_out",
        "expected 4");
    BAD((d.rope = &rope, d.q = q.t, d.q_out = q.t, d.q_out.shape[2] = 8), "desc.q_out",
        "8 elements");
    BAD((d.rope = &rope, d.q = q.t, d.q_out = q.t, d.q.shape[2] = d.q_out.shape[2] = 8), "desc.q",
        "turns 16");
    BAD((d.rope = &rope, d.q = q.t, d.q_out = q.t, d.q.shape[0] = 2), "desc.q", "3 new ones");
    BAD((d.rope = &(fv_rope_desc){ .rotary_dim = 18 }), "desc.rope.rotary_dim", "16");
    BAD((d.rope = &(fv_rope_desc){ .rotary_dim = 8, .base = -1 }), "desc.rope.base", "positive");
    BAD(d.row_positions = fv_i32(positions, 3), "desc.row_positions", "nothing turns");
    BAD((d.rope = &rope, d.row_positions = fv_i32(positions, 2)), "desc.row_positions",
        "2 entries");
    BAD((d.rope = &rope, d.slots = fv_i32(positions, 3)), "desc.row_positions", "missing");
    BAD(d.slots = fv_i32(positions, 4), "desc.new_k", "4 new ones");
    BAD((d.slots = fv_i32(NULL, 3)), "desc.slots", "host");
    BAD((d.slots = fv_i32(positions, 3), d.pages.num_pages = -1), "desc.pages", "-1");
    d = good;
    d.k.dtype = d.v.dtype = "bf16", d.k_scale_kind = "token_head", d.k_scale.tensor = &s.t;
    REFUSED(fv_append(ctx, &d, NULL, &err), FV_E_UNSUPPORTED, "desc.k_scale", "8 bits");
    fv__os_fail_at = 1;
    REFUSED(fv_append(ctx, &good, NULL, &err), FV_E_NO_MEMORY, "desc.rows", "no memory");
    fv__os_fail_at = 0;
#undef BAD
    same_block(&k, &k_before), same_block(&s, &s_before), same_block(&q, &q_before),
        same_block(&b, &b_before), same_block(&tiles, &tiles_before);
    no_faults(ctx);
    OK(fv_append(ctx, &good, NULL, &err));              /* and it was good */
    free(wide.memory), free(tiles.memory), free(tiles_before.memory);
    free(x.memory), free(y.memory), free(q.memory), free(k.memory), free(s.memory), free(b.memory);
    free(k_before.memory), free(s_before.memory), free(q_before.memory), free(b_before.memory);
}

/* ---------------------------------------------------------------------------------------- merge */

enum { STATES = 5 };

typedef struct partials {
    block o[STATES], lse[STATES];
    fv_tensor o_t[STATES], lse_t[STATES];
    int states;
    int64_t rows, heads, width;
} partials;

/* LSE as [row][head], or [head][row] with a gap. */
static block make_lse(int64_t rows, int64_t heads, bool turned)
{
    if (turned) return make_block("f32", 2, (int64_t[]){ rows, heads }, (int64_t[]){ 1, rows + 3 });
    return make_block("f32", 2, (int64_t[]){ rows, heads }, (int64_t[]){ heads, 1 });
}

static partials make_partials(const char *dtype, int states, int64_t rows, int64_t heads,
                              int64_t width)
{
    partials p = { .states = states, .rows = rows, .heads = heads, .width = width };
    for (int s = 0; s < states; s++) {
        p.o[s] = make_rows(dtype, rows, heads, width, s);
        p.lse[s] = make_lse(rows, heads, s % 2);
        fill(&p.o[s]);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t h = 0; h < heads; h++)
                set(&p.lse[s], at3(&p.lse[s], i, h), below(3) ? noise() * 20 : -INFINITY);
        p.o_t[s] = p.o[s].t, p.lse_t[s] = p.lse[s].t;
    }
    return p;
}

static void free_partials(partials *p)
{
    for (int s = 0; s < p->states; s++) free(p->o[s].memory), free(p->lse[s].memory);
}

static void check_merged(const partials *p, const block *o, const block *lse, bool base2)
{
    const double unit = base2 ? 0.69314718055994531 : 1;
    for (int64_t i = 0; i < p->rows; i++)
        for (int64_t h = 0; h < p->heads; h++) {
            double parts[STATES][FV__MAX_DIM], lses[STATES], want[FV__MAX_DIM], want_lse;
            const double *list[STATES];
            int count = 0, only = 0;
            for (int s = 0; s < p->states; s++) {
                lses[s] = get(&p->lse[s], at3(&p->lse[s], i, h)) * unit;
                for (int64_t d = 0; d < p->width; d++)
                    parts[s][d] = get(&p->o[s], at3(&p->o[s], i, h) + d);
                list[s] = parts[s];
                if (!isinf(lses[s])) count++, only = s;
            }
            ref_merge(p->states, (int)p->width, list, lses, want, &want_lse);
            const double got_lse = get(lse, at3(lse, i, h));
            if (count == 0) assert_true(isinf(got_lse) && got_lse < 0);
            else assert_true(fabs(got_lse - want_lse / unit) <= 1e-6 * fabs(want_lse) + 1e-6);
            for (int64_t d = 0; d < p->width; d++) {
                const double got = get(o, at3(o, i, h) + d);
                if (count == 0) assert_true(got == 0 && !signbit(got));
                else if (count == 1 && o->dtype == p->o[only].dtype)
                    assert_true(got == parts[only][d]);
                else assert_true(fabs(got - want[d]) <= slack(o->dtype, want[d], 12));
            }
            if (count == 1)
                assert_true((float)got_lse == (float)get(&p->lse[only], at3(&p->lse[only], i, h)));
        }
}

static void merges(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        const char *dtype = floats[round % 3], *out = round % 4 == 3 ? "f32" : dtype;
        const bool base2 = below(2);
        partials p =
            make_partials(dtype, 1 + below(STATES), 1 + below(9), 1 + below(4), 1 + below(200));
        const block o_before = make_rows(out, p.rows, p.heads, p.width, 3),
                    l_before = make_lse(p.rows, p.heads, round % 2);
        block first = { 0 }, first_lse = { 0 };
        for (int l = 0; l < num_levels; l++) {
            block o = copy_of(&o_before), lse = copy_of(&l_before), none = copy_of(&o_before);
            OK(fv_merge(levels[l], p.o_t, p.lse_t, p.states, base2, &o.t, &lse.t, NULL, &err));
            OK(fv_merge(levels[l], p.o_t, p.lse_t, p.states, base2, &none.t,
                        round % 2 ? NULL : &(fv_tensor){ 0 }, NULL, &err));
            same_block(&o, &none);
            check_merged(&p, &o, &lse, base2);
            if (l == 0) first = copy_of(&o), first_lse = copy_of(&lse);
            same_block(&o, &first), same_block(&lse, &first_lse);
            /* over state 0: the same bits */
            if (!strcmp(out, dtype)) {
                block over = copy_of(&p.o[0]), over_lse = copy_of(&p.lse[0]);
                fv_tensor os[STATES], ls[STATES];
                memcpy(os, p.o_t, sizeof os), memcpy(ls, p.lse_t, sizeof ls);
                os[0] = over.t, ls[0] = over_lse.t;
                OK(fv_merge(levels[l], os, ls, p.states, base2, &over.t, &over_lse.t, NULL, &err));
                for (int64_t i = 0; i < p.rows; i++)
                    for (int64_t h = 0; h < p.heads; h++) {
                        assert_memory_equal((float *)over_lse.t.data + at3(&over_lse, i, h),
                                            (float *)lse.t.data + at3(&lse, i, h), 4);
                        assert_memory_equal(
                            (char *)over.t.data + fv__dtype_bytes(over.dtype, at3(&over, i, h)),
                            (char *)o.t.data + fv__dtype_bytes(o.dtype, at3(&o, i, h)),
                            (size_t)fv__dtype_bytes(o.dtype, p.width));
                    }
                free(over.memory), free(over_lse.memory);
            }
            free(o.memory), free(lse.memory), free(none.memory);
        }
        free(first.memory), free(first_lse.memory), free(o_before.memory), free(l_before.memory);
        free_partials(&p);
    }
}

/* A state that counts alone is handed on bit for bit, and what lies in those that do not count is
 * not read: NaN there stays there. */
static void merge_bits(void **state)
{
    (void)state;
    for (int l = 0; l < num_levels; l++)
        for (int type = 0; type < 3; type++) {
            partials p = make_partials(floats[type], 3, 2, 1, 19);
            memset(p.o[0].memory, 0xFF, p.o[0].bytes),
                memset(p.o[2].memory, 0xFF, p.o[2].bytes); /* NaN in all three types */
            for (int s = 0; s < 3; s++)
                for (int i = 0; i < 2; i++)
                    set(&p.lse[s], at3(&p.lse[s], i, 0), s == 1 ? -0.0 : -INFINITY);
            block o = make_rows(floats[type], 2, 1, 19, 0), lse = make_lse(2, 1, false);
            OK(fv_merge(levels[l], p.o_t, p.lse_t, 3, false, &o.t, &lse.t, NULL, &err));
            for (int i = 0; i < 2; i++) {
                assert_memory_equal((char *)o.t.data + fv__dtype_bytes(o.dtype, at3(&o, i, 0)),
                                    (char *)p.o[1].t.data +
                                        fv__dtype_bytes(o.dtype, at3(&p.o[1], i, 0)),
                                    (size_t)fv__dtype_bytes(o.dtype, 19));
                assert_true(signbit(get(&lse, i)));
            }
            /* far apart: no overflow on the way */
            for (int i = 0; i < 2; i++)
                set(&p.lse[0], at3(&p.lse[0], i, 0), -1e30),
                    set(&p.lse[1], at3(&p.lse[1], i, 0), 1e30);
            fill(&p.o[0]);
            OK(fv_merge(levels[l], p.o_t, p.lse_t, 3, true, &o.t, &lse.t, NULL, &err));
            for (int d = 0; d < 19; d++) assert_true(get(&o, d) == get(&p.o[1], d));
            free(o.memory), free(lse.memory);
            free_partials(&p);
        }
}

static void merge_refused(void **state)
{
    (void)state;
    fv_ctx *ctx = levels[0];
    partials p = make_partials("f16", 2, 3, 2, 8);
    block o = make_rows("f16", 3, 2, 8, 0), lse = make_lse(3, 2, false);
    const block before = copy_of(&o), lse_before = copy_of(&lse);
    fv_tensor os[2], ls[2], out, out_lse;
#define BAD(change, field, word)                                                                   \
    do {                                                                                           \
        os[0] = p.o_t[0], os[1] = p.o_t[1], ls[0] = p.lse_t[0], ls[1] = p.lse_t[1], out = o.t, out_lse = lse.t; \
        change;                                                                                    \
        REFUSED(fv_merge(ctx, os, ls, 2, false, &out, &out_lse, NULL, &err), FV_E_INVALID, field, word); \
    } while (0)
    BAD(os[1].shape[0] = 2, "o_states[1]", "2 rows");
    BAD(os[1].shape[1] = 1, "o_states[1]", "expected 2");
    BAD(os[0].shape[2] = 4, "o_states[0]", "expected 8");
    BAD(os[1].dtype = "fp8_e5m2", "o_states[1]", "fp8_e5m2");
    BAD(os[1].data = NULL, "o_states[1]", "missing");
    BAD(ls[1].ndim = 3, "lse_states[1]", "3 axes");
    BAD(ls[1].dtype = "f16", "lse_states[1]", "f16");
    BAD(ls[1].shape[0] = 4, "lse_states[1]", "expected 3");
    BAD(ls[0].data = NULL, "lse_states[0]", "missing");
    BAD(out.data = NULL, "o", "missing");
    BAD(out.dtype = NULL, "o", "NULL");
    BAD(out_lse.shape[1] = 3, "lse", "expected 2");
#undef BAD
    REFUSED(fv_merge(NULL, os, ls, 2, false, &o.t, NULL, NULL, &err), FV_E_INVALID, "ctx", "NULL");
    REFUSED(fv_merge(ctx, NULL, ls, 2, false, &o.t, NULL, NULL, &err), FV_E_INVALID, "o_states",
            "NULL");
    REFUSED(fv_merge(ctx, os, NULL, 2, false, &o.t, NULL, NULL, &err), FV_E_INVALID, "lse_states",
            "NULL");
    REFUSED(fv_merge(ctx, os, ls, 2, false, NULL, NULL, NULL, &err), FV_E_INVALID, "o", "NULL");
    REFUSED(fv_merge(ctx, os, ls, 0, false, &o.t, NULL, NULL, &err), FV_E_INVALID, "num_states",
            "at least 1");
    fv__os_fail_at = 1;
    REFUSED(fv_merge(ctx, p.o_t, p.lse_t, 2, false, &o.t, NULL, NULL, &err), FV_E_NO_MEMORY,
            "num_states", "no memory");
    fv__os_fail_at = 0;
    same_block(&o, &before), same_block(&lse, &lse_before);
    free(o.memory), free(lse.memory), free(before.memory), free(lse_before.memory);
    free_partials(&p);
}

/* ---------------------------------------------------------------------------------- page copies */

static void copies_pages(void **state)
{
    (void)state;
    static const char *const types[] = { "f32", "bf16", "int8", "fp4_e2m1" };
    for (int round = 0; round < 40; round++) {
        step s = {
            .paged = true, .page_size = 1 + below(6), .heads = 1 + below(4), .num_pages = 9
        };
        const char *kt = types[below(4)], *vt = types[below(4)];
        const int kw = 2 * (1 + below(40)), vw = 2 * (1 + below(40));
        const block k_before = make_cache(&s, kt, kw, below(3)),
                    v_before = make_cache(&s, vt, vw, below(3));
        block want[2] = { copy_of(&k_before), copy_of(&v_before) };
        fv_copy list[5];
        for (int i = 0; i < 5; i++) list[i] = (fv_copy){ below(9), below(9) };
        list[2] = (fv_copy){ -1, -1 };
        list[4].src = list[3].dst;                      /* in the order given */
        const bool only_v = round % 5 == 4;
        for (int which = only_v; which < 2; which++)
            for (int i = 0; i < 5; i++)
                for (int64_t t = 0; t < s.page_size && list[i].src >= 0; t++)
                    for (int64_t h = 0; h < s.heads; h++)
                        for (int64_t d = 0; d < want[which].t.shape[3]; d++) {
                            const int64_t *stride = want[which].t.stride,
                                          at = t * stride[1] + h * stride[2] + d;
                            unsigned char *memory = want[which].t.data;
                            const int bits = fv__dtypes[want[which].dtype].bits;
                            const int64_t from = list[i].src * stride[0] + at,
                                          to = list[i].dst * stride[0] + at;
                            if (bits == 4) set(&want[which], to, get(&want[which], from));
                            else
                                memmove(memory + to * bits / 8, memory + from * bits / 8,
                                        (size_t)bits / 8);
                        }
        for (int l = 0; l < num_levels; l++) {
            block k = copy_of(&k_before), v = copy_of(&v_before);
            OK(fv_copy_pages(levels[l], only_v ? NULL : &k.t, &v.t, list, 5, NULL, &err));
            same_block(&k, &want[0]), same_block(&v, &want[1]);
            free(k.memory), free(v.memory);
        }
        free(k_before.memory), free(v_before.memory), free(want[0].memory), free(want[1].memory);
    }
}

/* Rows of whatever has a size: packed codes as bytes, words of 16 and 32 bits. */
static void copies_of_integers(void **state)
{
    (void)state;
    const char *names[] = { "u8", "u16", "i32" };
    for (int i = 0; i < 3; i++)
        for (int l = 0; l < num_levels; l++) {
            unsigned char data[4][2][3][5][4];
            for (size_t b = 0; b < sizeof data; b++) ((unsigned char *)data)[b] = (unsigned char)(b * 7 + b / 120);
            const int64_t width = 20 >> i;
            fv_tensor t = { .data = data, .dtype = names[i], .ndim = 4, .shape = { 4, 2, 3, width },
                            .stride = { 6 * width, 3 * width, width, 1 } };
            const size_t page = (size_t)(6 * width) << i;
            unsigned char want[sizeof data];
            memcpy(want, data, sizeof data);
            memcpy(want + 2 * page, want, page);
            OK(fv_copy_pages(levels[l], NULL, &t, &(fv_copy){ 0, 2 }, 1, NULL, &err));
            assert_memory_equal(data, want, sizeof data);
        }
}

static void copies_refused(void **state)
{
    (void)state;
    fv_ctx *ctx = levels[0];
    block k = make_block("f32", 4, (int64_t[]){ 4, 2, 1, 8 }, (int64_t[]){ 16, 8, 8, 1 });
    const block before = copy_of(&k);
    fv_copy list[2] = { { 0, 1 }, { 2, 4 } };
    fv_tensor t = k.t;
    REFUSED(fv_copy_pages(NULL, &k.t, NULL, list, 1, NULL, &err), FV_E_INVALID, "ctx", "NULL");
    REFUSED(fv_copy_pages(ctx, &k.t, NULL, NULL, 1, NULL, &err), FV_E_INVALID, "num_copies",
            "NULL");
    REFUSED(fv_copy_pages(ctx, &k.t, NULL, list, -1, NULL, &err), FV_E_INVALID, "num_copies", "-1");
    REFUSED(fv_copy_pages(ctx, &k.t, NULL, list, 2, NULL, &err), FV_E_INVALID, "copies[1].dst",
            "is 4; there are 4 pages");
    list[1] = (fv_copy){ -1, 0 };
    REFUSED(fv_copy_pages(ctx, &k.t, NULL, list, 2, NULL, &err), FV_E_INVALID, "copies[1].src",
            "-1");
    t.dtype = NULL;
    REFUSED(fv_copy_pages(ctx, &t, NULL, list, 1, NULL, &err), FV_E_INVALID, "k", "dtype");
    t.dtype = "u64";
    REFUSED(fv_copy_pages(ctx, &t, NULL, list, 1, NULL, &err), FV_E_INVALID, "k", "no element type");
    t = k.t, t.ndim = 2;
    REFUSED(fv_copy_pages(ctx, NULL, &t, list, 1, NULL, &err), FV_E_INVALID, "v", "2 axes");
    t = k.t, t.stride[3] = 2;
    REFUSED(fv_copy_pages(ctx, &t, NULL, list, 1, NULL, &err), FV_E_INVALID, "k", "contiguous");
    same_block(&k, &before);
    free(k.memory), free(before.memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies),
        cmocka_unit_test(frequencies_refused),
        cmocka_unit_test(rope_turns),
        cmocka_unit_test(angles),
        cmocka_unit_test(conversions),
        cmocka_unit_test(rope_refused),
        cmocka_unit_test(s078_bytes_of_e4m3),
        cmocka_unit_test(quantised_bytes),
        cmocka_unit_test(blocks_of_four_bits),
        cmocka_unit_test(groups_of_four_bits),
        cmocka_unit_test(written_scales),
        cmocka_unit_test(rows_land_where_they_belong),
        cmocka_unit_test(slots_of_the_caller),
        cmocka_unit_test(bad_page_ids),
        cmocka_unit_test(rotates_on_the_way),
        cmocka_unit_test(s015_no_room_for_one_more),
        cmocka_unit_test(s021_far_apart),
        cmocka_unit_test(s026_nothing_to_do),
        cmocka_unit_test(s079_scales_that_are_none),
        cmocka_unit_test(append_refused),
        cmocka_unit_test(merges),
        cmocka_unit_test(merge_bits),
        cmocka_unit_test(merge_refused),
        cmocka_unit_test(copies_pages),
        cmocka_unit_test(copies_of_integers),
        cmocka_unit_test(copies_refused),
    };
    return cmocka_run_group_tests(tests, open_levels, close_levels);
}
