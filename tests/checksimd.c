/* SPDX-License-Identifier: Apache-2.0 */
/* checksimd.c -- the v_* words and the element types of every CPU level against double and integer arithmetic.
 *
 *   words     over all binades and signs, thousands of values in each, the ends (0, infinities, NaN, subnormals) by name
 *   types     every code of 4, 8 and 16 bits is read; every boundary between two codes is written, and its neighbours, and random floats
 *
 *     checksimd [--isa NAME] [--verbose]       last line: N passed, N failed
 */
#include "simd/probe.h"

#include "cpu/cpu.h"
#include "dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FV_ISA(level) extern const probe probe_##level;
#include "isas.inc"
#undef FV_ISA

static const probe *const probes[] = {
#define FV_ISA(level) &probe_##level,
#include "isas.inc"
#undef FV_ISA
};

static int passed, failed;
static bool verbose;

static void report(const probe *p, const char *what, bool ok, const char *format, double a, double b)
{
    char text[160];
    snprintf(text, sizeof text, format, a, b);
    if (ok) passed++;
    else failed++;
    if (!ok || verbose) printf("%-5s %-8s %-24s %s\n", ok ? "ok" : "FAIL", p->name, what, text);
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* ------------------------------------------------------------------------------------------------------------- words */

/* What a word should be, where it is asked, and how far it may be off: in units of the result's last place, or absolute below `floor`. */
typedef struct word {
    const char *name;
    double (*exact)(double x);
    float lo, hi;                       /* magnitudes asked; of both signs where both */
    bool negative, positive;
    double ulps, floor;
} word;

static double exact_neg(double x) { return -x; }

static const word words[] = {
    { "exp2", exp2, 1e-9f, 126.0f, true, true, 2.0, 0 },
    { "exp2_neg", exp2, 1e-9f, 126.0f, true, false, 2.0, 0 },
    { "exp", exp, 1e-9f, 87.0f, true, true, 2.5, 0 },
    { "log", log, 1e-37f, 3e38f, false, true, 3.0, 4e-8 },
    { "log2", log2, 1e-37f, 3e38f, false, true, 3.0, 6e-8 },
    { "tanh", tanh, 1e-9f, 60.0f, true, true, 3.0, 0 },
    { "sin", sin, 1e-9f, 1e6f, true, true, 0, 1.2e-7 },
    { "cos", cos, 1e-9f, 1e6f, true, true, 0, 1.2e-7 },
    { "sqrt", sqrt, 1e-37f, 3e38f, false, true, 0.51, 0 },
    { "abs", fabs, 1e-37f, 3e38f, true, true, 0, 0 },
    { "neg", exact_neg, 1e-37f, 3e38f, true, true, 0, 0 },
};

static double ulp_of(double y)
{
    const float f = fabsf((float)y);
    return f < 1.17549435e-38f ? 0x1p-149 : (double)(of_bits(bits_of(f) + 1) - f);
}

/* Error over the limit: at most 1 is fine. */
static double excess(const word *w, double got, double want)
{
    const double error = fabs(got - want), limit = fmax(w->ulps * ulp_of(want), w->floor);
    if (isnan(got)) return INFINITY;
    return error == 0 ? 0 : limit > 0 ? error / limit : INFINITY;
}

/* Steps of a prime through the bit patterns between lo and hi visit every binade thousands of times. */
static void check_word(const probe *p, const word *w, probe_fn *fn)
{
    float x[PROBE_BLOCK], y[PROBE_BLOCK];
    double worst = 0, at = 0;
    const uint32_t first = bits_of(w->lo), last = bits_of(w->hi), step = 1 + (last - first) / 2000003;
    uint32_t u = first;
    while (u <= last) {
        for (int i = 0; i < PROBE_BLOCK; i++, u += step) {
            x[i] = of_bits(u <= last ? u : last);
            if (w->negative && (!w->positive || i & 1)) x[i] = -x[i];
        }
        fn(x, y);
        for (int i = 0; i < PROBE_BLOCK; i++) {
            const double e = excess(w, y[i], w->exact(x[i]));
            if (e <= worst) continue;
            worst = e;
            at = x[i];
        }
    }
    report(p, w->name, worst <= 1, "%.3f of its limit at x = %.9g", worst, at);
}

/* What a lane gives does not depend on its neighbours, though a word may take a shorter way where all lanes can: numbers of all sizes beside one
 * another. */
static void check_lanes(const probe *p, const word *w, probe_fn *fn)
{
    enum { LANES = 16 };
    float x[PROBE_BLOCK], y[PROBE_BLOCK], same[PROBE_BLOCK], alone[PROBE_BLOCK];
    const uint32_t first = bits_of(w->lo), range = bits_of(w->hi) - first + 1;
    uint64_t state = 7;
    double bad = 0, at = 0;
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < PROBE_BLOCK; i++) {
            x[i] = of_bits(first + next_random(&state) % range);
            if (w->negative && (!w->positive || i & 1)) x[i] = -x[i];
        }
        fn(x, y);
        for (int from = 0; from < PROBE_BLOCK; from += PROBE_BLOCK / LANES) {   /* each number as often as a vector can be long */
            for (int k = 0; k < PROBE_BLOCK; k++) same[k] = x[from + k / LANES];
            fn(same, alone);
            for (int k = 0; k < PROBE_BLOCK; k += LANES) {
                if (bits_of(alone[k]) == bits_of(y[from + k / LANES])) continue;
                bad++;
                at = same[k];
            }
        }
    }
    char what[40];
    snprintf(what, sizeof what, "%s, lane by lane", w->name);
    report(p, what, bad == 0, "%g differ, one at x = %.9g", bad, at);
}

static void expect(const probe *p, const char *what, probe_fn *fn, float x, float want)
{
    float in[PROBE_BLOCK], out[PROBE_BLOCK];
    for (int i = 0; i < PROBE_BLOCK; i++) in[i] = x;
    fn(in, out);
    bool ok = true;
    for (int i = 0; i < PROBE_BLOCK; i++) ok &= isnan(want) ? isnan(out[i]) : out[i] == want;
    report(p, what, ok, "is %g, not %g", out[0], want);
}

static probe_fn *find(const probe *p, const char *name)
{
    for (const probe_unary *u = p->unary; u->name; u++)
        if (!strcmp(u->name, name)) return u->fn;
    fprintf(stderr, "checksimd: no word %s\n", name);
    exit(2);
}

/* The values on which the kernels' exactness rests, and the ends. */
static void check_ends(const probe *p)
{
    expect(p, "exp2_neg(0)", find(p, "exp2_neg"), 0.0f, 1.0f);
    expect(p, "exp2_neg(-1)", find(p, "exp2_neg"), -1.0f, 0.5f);
    expect(p, "exp2_neg(-126)", find(p, "exp2_neg"), -126.0f, 0x1p-126f);
    expect(p, "exp2_neg(-200)", find(p, "exp2_neg"), -200.0f, 0.0f);
    expect(p, "exp2_neg(-1e30)", find(p, "exp2_neg"), -1e30f, 0.0f);
    expect(p, "exp2_neg(-inf)", find(p, "exp2_neg"), -INFINITY, 0.0f);
    expect(p, "exp2(0)", find(p, "exp2"), 0.0f, 1.0f);
    expect(p, "exp2(128)", find(p, "exp2"), 128.0f, INFINITY);
    expect(p, "exp2(127)", find(p, "exp2"), 127.0f, 0x1p127f);
    expect(p, "exp2(-149)", find(p, "exp2"), -149.0f, 0x1p-149f);
    expect(p, "exp2(-inf)", find(p, "exp2"), -INFINITY, 0.0f);
    expect(p, "exp2(inf)", find(p, "exp2"), INFINITY, INFINITY);
    expect(p, "exp(0)", find(p, "exp"), 0.0f, 1.0f);
    expect(p, "exp(inf)", find(p, "exp"), INFINITY, INFINITY);
    expect(p, "exp(-inf)", find(p, "exp"), -INFINITY, 0.0f);
    expect(p, "log(1)", find(p, "log"), 1.0f, 0.0f);
    expect(p, "log(0)", find(p, "log"), 0.0f, -INFINITY);
    expect(p, "log(inf)", find(p, "log"), INFINITY, INFINITY);
    expect(p, "log(-1)", find(p, "log"), -1.0f, NAN);
    expect(p, "log2(1)", find(p, "log2"), 1.0f, 0.0f);
    expect(p, "log2(2^100)", find(p, "log2"), 0x1p100f, 100.0f);
    expect(p, "log2(2^-140)", find(p, "log2"), 0x1p-140f, -140.0f);
    expect(p, "tanh(0)", find(p, "tanh"), 0.0f, 0.0f);
    expect(p, "tanh(inf)", find(p, "tanh"), INFINITY, 1.0f);
    expect(p, "tanh(-inf)", find(p, "tanh"), -INFINITY, -1.0f);
    expect(p, "exp2_neg(nan)", find(p, "exp2_neg"), NAN, NAN);
    expect(p, "tanh(nan)", find(p, "tanh"), NAN, NAN);
    expect(p, "log(nan)", find(p, "log"), NAN, NAN);
}

static void check_rotate(const probe *p)
{
    static const float frequencies[] = { 1.0f, 0.8659643f, 0.1f, 0.00031622776f, 1.2345e-6f };
    int32_t position[PROBE_BLOCK];
    float s[PROBE_BLOCK], c[PROBE_BLOCK];
    double worst = 0, at = 0;
    uint64_t state = 7;
    for (int f = 0; f < FV__COUNT(frequencies); f++)
        for (int turn = 0; turn < 64; turn++) {
            for (int i = 0; i < PROBE_BLOCK; i++) position[i] = (int32_t)(next_random(&state) >> 2) >> turn % 30;
            p->rotate(position, frequencies[f], s, c);
            for (int i = 0; i < PROBE_BLOCK; i++) {
                const double angle = (double)position[i] * (double)frequencies[f];
                const double e = fmax(fabs(s[i] - sin(angle)), fabs(c[i] - cos(angle)));
                if (e > worst) worst = e, at = position[i];
            }
        }
    report(p, "rotate, positions to 2^30", worst <= 2.4e-7, "error %.3g at position %.0f", worst, at);
}

static void check_arithmetic(const probe *p)
{
    float a[PROBE_BLOCK], b[PROBE_BLOCK], c[PROBE_BLOCK], y[PROBE_BLOCK];
    uint64_t state = 11;
    for (int i = 0; i < PROBE_BLOCK; i++) {
        a[i] = (float)((int32_t)next_random(&state) >> 8) / 4096;
        b[i] = (float)((int32_t)next_random(&state) >> 8) / 4096;
        c[i] = (float)((int32_t)next_random(&state) >> 8);
    }
    b[3] = a[3];
    a[5] = -INFINITY;
    b[6] = -INFINITY;
    bool ok = true;
    p->fma(a, b, c, y);
    for (int i = 8; i < PROBE_BLOCK; i++) {
        const float fused = fmaf(a[i], b[i], c[i]), apart = a[i] * b[i] + c[i];
        ok &= y[i] == fused || y[i] == apart;
    }
    report(p, "fma", ok, "is neither fused nor apart (%.0f, %.0f)", 0, 0);
    ok = true;
    p->max(a, b, y);
    for (int i = 0; i < PROBE_BLOCK; i++) ok &= y[i] == fmaxf(a[i], b[i]);
    p->min(a, b, y);
    for (int i = 0; i < PROBE_BLOCK; i++) ok &= y[i] == fminf(a[i], b[i]);
    report(p, "max, min", ok, "differ (%.0f, %.0f)", 0, 0);
    ok = true;
    for (int op = 0; op < 6; op++) {
        uint32_t want = 0;
        for (int i = 0; i < p->lanes; i++) {
            const bool is[] = { a[i] < b[i], a[i] <= b[i], a[i] > b[i], a[i] >= b[i], a[i] == b[i], a[i] != b[i] };
            want |= (uint32_t)is[op] << i;
        }
        ok &= p->compare(a, b, op) == want;
    }
    report(p, "comparisons", ok, "differ (%.0f, %.0f)", 0, 0);
}

/* Products are exact, each of the two sums may round: no more than the larger operand's last place. */
static void check_pairs(const probe *p)
{
    uint16_t a[2 * PROBE_BLOCK], b[2 * PROBE_BLOCK], joined[PROBE_BLOCK];
    float c[PROBE_BLOCK], y[PROBE_BLOCK];
    uint64_t state = 13;
    double worst = 0;
    for (int i = 0; i < 2 * PROBE_BLOCK; i++) {
        a[i] = (uint16_t)(bits_of((float)((int32_t)next_random(&state) >> 8) / 65536) >> 16);
        b[i] = (uint16_t)(bits_of((float)((int32_t)next_random(&state) >> 8) / 65536) >> 16);
        c[i / 2] = (float)((int32_t)next_random(&state) >> 8) / 1024;
    }
    p->dot(a, b, c, y);
    for (int i = 0; i < PROBE_BLOCK; i++) {
        const double first = (double)of_bits((uint32_t)a[2 * i] << 16) * of_bits((uint32_t)b[2 * i] << 16);
        const double second = (double)of_bits((uint32_t)a[2 * i + 1] << 16) * of_bits((uint32_t)b[2 * i + 1] << 16);
        const double e = fabs(y[i] - (first + second + c[i])) / (fabs(first) + fabs(second) + fabs(c[i]));
        if (e > worst) worst = e;
    }
    report(p, "dot_bf16", worst <= 0x1p-23, "error %.3g of its terms (%.0f)", worst, 0);
    for (int i = 0; i < PROBE_BLOCK; i++) c[i] = of_bits((uint32_t)a[i] << 16);
    p->join(c, joined);
    report(p, "join_bf16", !memcmp(joined, a, sizeof joined), "differs (%.0f, %.0f)", 0, 0);
}

/* Exact, the largest bytes among them. */
static void check_bytes(const probe *p)
{
    int32_t a[PROBE_BLOCK], b[PROBE_BLOCK], c[PROBE_BLOCK], y[PROBE_BLOCK];
    uint64_t state = 17;
    int wrong = 0;
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < PROBE_BLOCK; i++) {
            a[i] = round ? (int32_t)(next_random(&state) & 0x7F7F7F7F) : 0x7F7F7F7F;
            b[i] = round ? (int32_t)next_random(&state) : i & 1 ? (int32_t)0x80808080u : 0x7F7F7F7F;
            c[i] = (int32_t)next_random(&state) >> 8;
        }
        p->dot_bytes(a, b, c, y);
        for (int i = 0; i < PROBE_BLOCK; i++) {
            int32_t want = c[i];
            for (int k = 0; k < 4; k++) want += (a[i] >> 8 * k & 127) * (int8_t)((uint32_t)b[i] >> 8 * k);
            wrong += y[i] != want;
        }
    }
    report(p, "dot_bytes", !wrong, "%.0f sums differ (%.0f)", wrong, 0);
}

/* ------------------------------------------------------------------------------------------------------------- types */

static bool same(float a, float b) { return isnan(a) ? isnan(b) : bits_of(a) == bits_of(b); }

/* Reads every code (f32: random ones), from places that are not aligned too. */
static void check_load(const probe *p, fv__dtype type)
{
    const fv__dtype_info *t = &fv__dtypes[type];
    const int64_t codes = t->bits == 32 ? 1 << 20 : (int64_t)1 << t->bits;
    const int64_t count = codes < PROBE_BLOCK ? PROBE_BLOCK : codes;
    unsigned char *memory = calloc(1, (size_t)count * 4 + 64);
    float y[PROBE_BLOCK];
    uint64_t state = 3;
    int64_t wrong = 0, at = 0;
    for (int shift = 0; shift < 3; shift++) {
        unsigned char *base = memory + shift * (t->bits >= 16 ? t->bits / 8 : 1);
        const int64_t first = t->bits == 4 ? shift & 1 : 0;             /* fp4: an odd element begins in the middle of a byte */
        for (int64_t i = 0; i < count; i++) {
            const uint32_t code = t->bits == 32 ? next_random(&state) : (uint32_t)(i % codes);
            if (t->bits == 4) base[(first + i) / 2] = (unsigned char)((first + i) & 1 ? (base[(first + i) / 2] & 15) | code << 4
                                                                                      : (base[(first + i) / 2] & 0xF0) | code);
            else memcpy(base + i * t->bits / 8, &code, (size_t)t->bits / 8);
        }
        for (int64_t i = 0; i < count; i += PROBE_BLOCK) {
            p->load(type, base, first + i, y);
            for (int k = 0; k < PROBE_BLOCK; k++)
                if (!same(y[k], (float)fv__dtype_load(type, base, first + i + k))) wrong++, at = i + k;
        }
    }
    free(memory);
    char what[40];
    snprintf(what, sizeof what, "load %s", t->name);
    report(p, what, !wrong, "%.0f codes wrong, the last %.0f", (double)wrong, (double)at);
}

/* Writes floats; the code must be the definition's, NaN for NaN where there is one. */
static int64_t store_block(const probe *p, fv__dtype type, const float *x, float *bad)
{
    unsigned char got[PROBE_BLOCK * 4], want[PROBE_BLOCK * 4];
    int64_t wrong = 0;
    memset(got, 0, sizeof got);
    memset(want, 0, sizeof want);
    p->store(type, got, 0, x);
    for (int i = 0; i < PROBE_BLOCK; i++) fv__dtype_store(type, want, i, x[i]);
    for (int i = 0; i < PROBE_BLOCK; i++) {
        const double a = fv__dtype_load(type, got, i), b = fv__dtype_load(type, want, i);
        const bool equal = isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
        if (!equal) wrong++, *bad = x[i];
    }
    return wrong;
}

static void check_store(const probe *p, fv__dtype type)
{
    const fv__dtype_info *t = &fv__dtypes[type];
    float x[PROBE_BLOCK], bad = 0;
    int64_t wrong = 0;
    uint64_t state = 5;
    for (int round = 0; round < 2000; round++) {                        /* random floats, half of them in the type's range */
        for (int i = 0; i < PROBE_BLOCK; i++) {
            const uint32_t u = next_random(&state);
            x[i] = i & 1 ? of_bits(u) : (float)((double)((int32_t)u) * 0x1p-31 * t->largest * exp2(-(double)(i % 40)));
        }
        wrong += store_block(p, type, x, &bad);
    }
    const int64_t codes = t->bits > 16 ? 0 : (int64_t)1 << t->bits;
    for (int64_t code = 0; code < codes; code += PROBE_BLOCK / 8)       /* the middle between neighbours, and a step to each side */
        for (int i = 0; i < PROBE_BLOCK; i++) {
            const uint32_t c = (uint32_t)((code + i / 8) % codes);
            const double here = t->decode(c), there = t->decode(c + 1 < codes ? c + 1 : c);
            const float middle = (float)(here / 2 + there / 2);
            const float all[] = { middle, nextafterf(middle, INFINITY), nextafterf(middle, -INFINITY), (float)here,
                                  nextafterf((float)here, 0), (float)(t->largest * 1.03), (float)(-t->largest * 4), NAN };
            x[i] = all[i % 8];
            if (i == PROBE_BLOCK - 1) wrong += store_block(p, type, x, &bad);
        }
    x[0] = INFINITY;
    x[1] = -INFINITY;
    x[2] = -0.0f;
    wrong += store_block(p, type, x, &bad);
    char what[40];
    snprintf(what, sizeof what, "store %s", t->name);
    report(p, what, !wrong, "%.0f floats wrong, the last %.9g", (double)wrong, bad);
}

/* -------------------------------------------------------------------------------------------------------------- main */

static bool machine_has(const char *name)
{
    for (int i = 0; i < fv__cpu_isa_count(); i++)
        if (!strcmp(fv__cpu_isa_at(i)->name, name)) return fv__cpu_isa_at(i)->available();
    return false;
}

static void check_level(const probe *p)
{
    for (int i = 0; i < FV__COUNT(words); i++) check_word(p, &words[i], find(p, words[i].name));
    for (int i = 0; i < FV__COUNT(words); i++) check_lanes(p, &words[i], find(p, words[i].name));
    check_ends(p);
    check_rotate(p);
    check_arithmetic(p);
    check_pairs(p);
    check_bytes(p);
    for (int type = 0; type < FV__NUM_DTYPES; type++) {
        check_load(p, (fv__dtype)type);
        check_store(p, (fv__dtype)type);
    }
}

int main(int argc, char **argv)
{
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--verbose")) verbose = true;
        else if (!strcmp(argv[i], "--isa") && i + 1 < argc) only = argv[++i];
        else {
            fprintf(stderr, "usage: checksimd [--isa NAME] [--verbose]\n");
            return 2;
        }
    }
    int levels = 0;
    for (int i = 0; i < FV__COUNT(probes); i++) {
        if (only && strcmp(only, probes[i]->name)) continue;
        if (!machine_has(probes[i]->name)) {
            printf("not run: %s (the machine lacks it)\n", probes[i]->name);
            continue;
        }
        levels++;
        check_level(probes[i]);
    }
    printf("%d levels; %d passed, %d failed\n", levels, passed, failed);
    return failed || !levels;
}
