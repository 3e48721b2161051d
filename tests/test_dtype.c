/* SPDX-License-Identifier: Apache-2.0 */
/* test_dtype.c -- the definition of the element types against other arithmetic: values built by
 * doubling and halving, rounding by looking for the two neighbours in the list of all values. Every
 * code of 4, 8 and 16 bits, every midpoint between two neighbours and what lies next to it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "dtype.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What the formats are, said once more. `finite`: magnitudes below it are finite. */
typedef struct format {
    const char *name;
    int bits, fraction_bits, bias;
    uint32_t finite;
    bool ieee; /* the magnitude `finite` is infinity, those above are NaN */
    bool saturates;
    uint32_t nan; /* what a NaN is written as; 0 with ieee: a quiet one with the sign kept */
} format;

static const format formats[] = {
    { "f16", 16, 10, 15, 0x7C00, true, false, 0 },
    { "bf16", 16, 7, 127, 0x7F80, true, false, 0 },
    { "fp8_e4m3", 8, 3, 7, 0x7F, false, true, 0x7F },
    { "fp8_e5m2", 8, 2, 15, 0x7C, true, true, 0x7F },
    { "fp4_e2m1", 4, 1, 1, 0x8, false, true, 0 },
};

static double times_power(double x, int power)
{
    for (; power > 0; power--) x *= 2;
    for (; power < 0; power++) x /= 2;
    return x;
}

static double magnitude_of(const format *f, uint32_t code)
{
    const uint32_t whole = 1u << f->fraction_bits, exponent = code / whole, fraction = code % whole;
    if (exponent == 0) return times_power(fraction, 1 - f->bias - f->fraction_bits);
    return times_power(whole + fraction, (int)exponent - f->bias - f->fraction_bits);
}

static const fv__dtype_info *info_of(const char *name)
{
    const fv__dtype type = fv__dtype_find(name);
    assert_true(type != FV__DTYPE_NONE);
    assert_string_equal(fv__dtypes[type].name, name);
    return &fv__dtypes[type];
}

static void same_bits(double a, double b)
{
    assert_memory_equal(&a, &b, sizeof a);
}

static void every_code_decodes(void **state)
{
    (void)state;
    for (int i = 0; i < FV__COUNT(formats); i++) {
        const format *f = &formats[i];
        const fv__dtype_info *t = info_of(f->name);
        assert_int_equal(t->bits, f->bits);
        same_bits(t->largest, magnitude_of(f, f->finite - 1));
        const uint32_t sign = 1u << (f->bits - 1);
        for (uint32_t code = 0; code < sign; code++) {
            const double up = t->decode(code), down = t->decode(code | sign);
            if (code < f->finite) {
                same_bits(up, magnitude_of(f, code));
                same_bits(down, -magnitude_of(f, code));
            } else if (f->ieee && code == f->finite) {
                same_bits(up, INFINITY);
                same_bits(down, -INFINITY);
            } else {
                assert_true(isnan(up) && isnan(down) && !signbit(up) && signbit(down));
            }
        }
    }
}

/* The code of x >= 0 by the list of values: the largest one that is not above x, or the next. */
static uint32_t nearest(const format *f, const double *values, double x)
{
    uint32_t low = 0, high = f->finite - 1;
    while (low < high) {
        const uint32_t middle = (low + high + 1) / 2;
        if (values[middle] <= x) low = middle;
        else high = middle - 1;
    }
    if (low == f->finite - 1) {
        const double next = 2 * values[low] - values[low - 1]; /* the value that would follow */
        const bool over = x - values[low] >= (next - values[low]) / 2;
        return over && !f->saturates ? f->finite : low;
    }
    const double below = x - values[low], above = values[low + 1] - x;
    if (below != above) return below < above ? low : low + 1;
    return low % 2 ? low + 1 : low;
}

static void check_encode(const format *f, const fv__dtype_info *t, const double *values, double x)
{
    const uint32_t sign = 1u << (f->bits - 1), want = nearest(f, values, x);
    const uint32_t up = t->encode(x), down = t->encode(-x);
    if (up != want || down != (want | sign))
        fail_msg("%s: %a became %#x and %#x, expected %#x", f->name, x, up, down, want);
}

static void check_around(const format *f, const fv__dtype_info *t, const double *values, double x)
{
    check_encode(f, t, values, x);
    check_encode(f, t, values, nextafter(x, INFINITY));
    if (x > 0) check_encode(f, t, values, nextafter(x, 0));
}

static void every_rounding(void **state)
{
    (void)state;
    for (int i = 0; i < FV__COUNT(formats); i++) {
        const format *f = &formats[i];
        const fv__dtype_info *t = info_of(f->name);
        double *values = malloc(f->finite * sizeof *values);
        assert_non_null(values);
        for (uint32_t c = 0; c < f->finite; c++) values[c] = magnitude_of(f, c);
        for (uint32_t c = 0; c < f->finite; c++) {
            check_around(f, t, values, values[c]);
            const double next = c + 1 < f->finite ? values[c + 1] : 2 * values[c] - values[c - 1];
            check_around(f, t, values, values[c] + (next - values[c]) / 2);
        }
        const double far[] = { DBL_MIN, DBL_TRUE_MIN, FLT_MIN, 1e-30, 448,   449,  464,   480,
                               500,     1e4,          65519,   65520, 65536, 1e30, 1e300, DBL_MAX };
        for (int k = 0; k < FV__COUNT(far); k++) check_around(f, t, values, far[k]);
        free(values);
    }
}

static void what_is_no_number(void **state)
{
    (void)state;
    for (int i = 0; i < FV__COUNT(formats); i++) {
        const format *f = &formats[i];
        const fv__dtype_info *t = info_of(f->name);
        const uint32_t sign = 1u << (f->bits - 1),
                       endless = f->saturates ? f->finite - 1 : f->finite;
        assert_int_equal(t->encode(INFINITY), endless);
        assert_int_equal(t->encode(-INFINITY), endless | sign);
        for (int minus = 0; minus < 2; minus++) {
            const uint32_t code = t->encode(copysign(NAN, minus ? -1 : 1));
            if (f->nan || !f->ieee) {
                assert_int_equal(code, f->nan);
            } else {
                assert_true(isnan(t->decode(code)));
                assert_int_equal(code & sign, minus ? sign : 0);
                assert_true(code >> (f->fraction_bits - 1) & 1);        /* quiet */
            }
        }
    }
}

/* S078: the bytes of an e4m3 cache, by name. */
static void e4m3_bytes(void **state)
{
    (void)state;
    const fv__dtype_info *t = info_of("fp8_e4m3");
    static const struct { double x; uint32_t code;
    } list[] = {
        { 0.0, 0x00 },      { -0.0, 0x80 }, { 0x1p-10, 0x00 },   { 1, 0x38 },      { 447, 0x7E },
        { 448, 0x7E },      { 449, 0x7E },  { 500, 0x7E },       { 1e4, 0x7E },    { -1e4, 0xFE },
        { INFINITY, 0x7E }, { NAN, 0x7F },  { 0x1.8p-10, 0x01 }, { 0x1p-9, 0x01 },
    };
    for (int i = 0; i < FV__COUNT(list); i++) assert_int_equal(t->encode(list[i].x), list[i].code);
}

/* binary32 against the machine's own: edges of every exponent, and a walk over all bit patterns. */
static void f32_is_float(void **state)
{
    (void)state;
    const fv__dtype_info *t = info_of("f32");
    for (uint64_t step = 0; step < 1u << 20; step++) {
        const uint32_t code = (uint32_t)(step * 4099 + (step >> 3));
        float value;
        memcpy(&value, &code, sizeof value);
        const double x = t->decode(code);
        if (isnan(value)) {
            assert_true(isnan(x));
            assert_int_equal(t->encode((double)value), code | 0x400000);
            continue;
        }
        same_bits(x, (double)value);
        assert_int_equal(t->encode((double)value), code);
        const double between =
            (double)value + ((double)nextafterf(value, INFINITY) - (double)value) * 0.5;
        const double tries[] = { between, nextafter(between, INFINITY),
                                 nextafter(between, -INFINITY) };
        for (int i = 0; i < 3; i++) {
            const float rounded = (float)tries[i];
            uint32_t want;
            memcpy(&want, &rounded, sizeof want);
            if (!isnan(rounded)) assert_int_equal(t->encode(tries[i]), want);
        }
    }
}

/* bfloat16 is the upper half of a float. */
static void bf16_is_half_a_float(void **state)
{
    (void)state;
    const fv__dtype_info *t = info_of("bf16");
    for (uint32_t code = 0; code < 1u << 16; code++) {
        const uint32_t wide = code << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        if (isnan(value)) assert_true(isnan(t->decode(code)));
        else same_bits(t->decode(code), (double)value);
    }
}

static void int8_is_a_byte(void **state)
{
    (void)state;
    const fv__dtype_info *t = info_of("int8");
    for (uint32_t code = 0; code < 256; code++) same_bits(t->decode(code), (double)(int8_t)code);
    for (int quarters = -4 * 140; quarters <= 4 * 140; quarters++) {
        const double x = quarters / 4.0;
        double want = nearbyint(x); /* nearest even: the default rounding of the machine */
        if (want > 127) want = 127;
        if (want < -128) want = -128;
        assert_int_equal((int8_t)t->encode(x), (int)want);
        assert_int_equal((int8_t)t->encode(nextafter(x, 0)),
                         (int)fmin(fmax(nearbyint(nextafter(x, 0)), -128), 127));
    }
    assert_int_equal(t->encode(INFINITY), 0x7F);
    assert_int_equal(t->encode(-INFINITY), 0x80);
    assert_int_equal(t->encode(1e300), 0x7F);
    assert_int_equal(t->encode(NAN), 0);
    assert_int_equal(t->encode(-0.0), 0);
}

static void int4_is_half_a_byte(void **state)
{
    (void)state;
    const fv__dtype_info *t = info_of("int4");
    for (uint32_t code = 0; code < 16; code++) same_bits(t->decode(code), code);
    for (int quarters = -40; quarters <= 4 * 20; quarters++) {
        const double x = quarters / 4.0;
        assert_int_equal(t->encode(x), (int)fmin(fmax(nearbyint(x), 0), 15));
        assert_int_equal(t->encode(nextafter(x, 0)), (int)fmin(fmax(nearbyint(nextafter(x, 0)), 0), 15));
    }
    assert_int_equal(t->encode(INFINITY), 15);
    assert_int_equal(t->encode(-INFINITY), 0);
    assert_int_equal(t->encode(NAN), 0);
}

/* Packed memory: each element where it belongs, its neighbours untouched. */
static void packed_memory(void **state)
{
    (void)state;
    static const double values[] = { 0, -0.5, 1, 1.5, -2, 3, 4, -6, 6, 0.5, -1 };
    for (int type = 0; type < FV__NUM_DTYPES; type++) {
        const int bits = fv__dtypes[type].bits, n = FV__COUNT(values);
        unsigned char memory[64];
        assert_int_equal(fv__dtype_bytes((fv__dtype)type, n), (n * bits + 7) / 8);
        memset(memory, 0xA5, sizeof memory);
        for (int i = n - 1; i >= 0; i--) fv__dtype_store((fv__dtype)type, memory, i, values[i]);
        for (int i = 0; i < n; i++) {
            const double want = type == (int)fv__dtype_find("int8")   ? nearbyint(values[i])
                                : type == (int)fv__dtype_find("int4") ? fmax(nearbyint(values[i]), 0)
                                                                      : values[i];
            assert_true(fv__dtype_load((fv__dtype)type, memory, i) == want);
        }
        for (int byte = (n * bits + 7) / 8; byte < 64; byte++) assert_int_equal(memory[byte], 0xA5);
        if (bits == 4) {
            assert_int_equal(memory[1], type == (int)fv__dtype_find("int4") ? 0x21 : 0x32); /* 1 in the low half, 1.5 in the high one */
            assert_int_equal(memory[5] >> 4, 0xA); /* the half behind the last element */
        }
    }
}

static void names(void **state)
{
    (void)state;
    assert_int_equal(fv__dtype_find(NULL), FV__DTYPE_NONE);
    assert_int_equal(fv__dtype_find(""), FV__DTYPE_NONE);
    assert_int_equal(fv__dtype_find("F32"), FV__DTYPE_NONE);
    for (int i = 0; i < FV__NUM_DTYPES; i++)
        assert_int_equal(fv__dtype_find(fv__dtypes[i].name), i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(every_code_decodes),
        cmocka_unit_test(every_rounding),
        cmocka_unit_test(what_is_no_number),
        cmocka_unit_test(e4m3_bytes),
        cmocka_unit_test(f32_is_float),
        cmocka_unit_test(bf16_is_half_a_float),
        cmocka_unit_test(int8_is_a_byte),
        cmocka_unit_test(int4_is_half_a_byte),
        cmocka_unit_test(packed_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
