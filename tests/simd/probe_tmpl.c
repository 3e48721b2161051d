/* SPDX-License-Identifier: Apache-2.0 */
/* probe_tmpl.c -- compiled once per CPU level: the words of vocabulary.h and the element types, callable from outside. */
#include "simd/probe.h"

#include "cpu/vocabulary.h"
#include "dtype.h"

#define FV_DTYPE_CPU
#include "dtype_files.inc"
#undef FV_DTYPE_CPU

#define UNARY(word)                                                                                                \
    static void do_##word(const float *x, float *y)                                                                \
    {                                                                                                              \
        for (int i = 0; i < PROBE_BLOCK; i += V_LANES) v_store(y + i, v_##word(v_load(x + i)));                    \
    }
UNARY(exp2)
UNARY(exp2_neg)
UNARY(exp)
UNARY(log)
UNARY(log2)
UNARY(tanh)
UNARY(sin)
UNARY(cos)
UNARY(sqrt)
UNARY(abs)
UNARY(neg)

static const probe_unary unary[] = {
    { "exp2", do_exp2 }, { "exp2_neg", do_exp2_neg }, { "exp", do_exp }, { "log", do_log }, { "log2", do_log2 }, { "tanh", do_tanh },
    { "sin", do_sin }, { "cos", do_cos }, { "sqrt", do_sqrt }, { "abs", do_abs }, { "neg", do_neg }, { NULL, NULL },
};

static void do_rotate(const int32_t *position, float frequency, float *s, float *c)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) {
        const v_pair p = v_rotate((v_pair){ v_set(1.0f), v_set(0.0f) }, v_loadi(position + i), v_set(frequency));
        v_store(c + i, p.lo);
        v_store(s + i, p.hi);
    }
}

static void do_fma(const float *a, const float *b, const float *c, float *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) v_store(y + i, v_fma(v_load(a + i), v_load(b + i), v_load(c + i)));
}

static void do_dot_bytes(const int32_t *a, const int32_t *b, const int32_t *c, int32_t *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) v_storei(y + i, v_dot_bytes(v_loadi(a + i), v_loadi(b + i), v_loadi(c + i)));
}

static void do_dot(const uint16_t *a, const uint16_t *b, const float *c, float *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES)
        v_store(y + i, v_dot_bf16(v_pairs_bf16(a + 2 * i), v_pairs_bf16(b + 2 * i), v_load(c + i)));
}

static void do_join(const float *x, uint16_t *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += 2 * V_LANES) v_storei((int32_t *)(void *)(y + i), v_join_bf16(v_load(x + i), v_load(x + i + V_LANES)));
}

static void do_max(const float *a, const float *b, float *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) v_store(y + i, v_max(v_load(a + i), v_load(b + i)));
}

static void do_min(const float *a, const float *b, float *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) v_store(y + i, v_min(v_load(a + i), v_load(b + i)));
}

static uint32_t do_compare(const float *x, const float *y, int op)
{
    const v_f32 a = v_load(x), b = v_load(y);
    const v_mask m[] = { v_lt(a, b), v_le(a, b), v_gt(a, b), v_ge(a, b), v_eq(a, b), v_ne(a, b) };
    return v_movemask(m[op]);
}

static void do_load(int dtype, const void *base, int64_t first, float *y)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) switch (dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: v_store(y + i, v_load_##name(base, first + i)); break;
#include "dtypes.inc"
#undef FV_DTYPE
    }
}

static void do_store(int dtype, void *base, int64_t first, const float *x)
{
    for (int i = 0; i < PROBE_BLOCK; i += V_LANES) switch (dtype) {
#define FV_DTYPE(name) case FV__DTYPE_##name: v_store_##name(base, first + i, v_load(x + i)); break;
#include "dtypes.inc"
#undef FV_DTYPE
    }
}

extern const probe V_NAME(probe);
const probe V_NAME(probe) = {
    V_TEXT(FV_ISA_NAME), V_LANES, unary, do_rotate, do_fma, do_dot_bytes, do_dot, do_join, do_max, do_min, do_compare, do_load, do_store,
};
