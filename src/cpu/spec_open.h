/* SPDX-License-Identifier: Apache-2.0 */
/* spec_open.h -- goes before a variant's text with FV_SPEC defined: the declarations as in hooks_open.h, every v_* word in double, and <math.h>'s
 * names. spec_close.h goes behind. The meaning of the words stands in vocabulary.h; here they are as plain as can be, for this is what kernels are
 * compared with. */
#ifndef FV__SPEC_OPEN_H
#define FV__SPEC_OPEN_H

#include "spec_abi.h"

#define VFN static inline __attribute__((always_inline, unused))

extern const fv__spec_math *fv__math;
__attribute__((visibility("default"))) const fv__spec_math *fv__math;   /* set by whoever loads this */

#define exp(x) (fv__math->exp_(x))
#define exp2(x) (fv__math->exp2_(x))
#define expm1(x) (fv__math->expm1_(x))
#define log(x) (fv__math->log_(x))
#define log2(x) (fv__math->log2_(x))
#define log10(x) (fv__math->log10_(x))
#define log1p(x) (fv__math->log1p_(x))
#define sqrt(x) (fv__math->sqrt_(x))
#define cbrt(x) (fv__math->cbrt_(x))
#define sin(x) (fv__math->sin_(x))
#define cos(x) (fv__math->cos_(x))
#define tan(x) (fv__math->tan_(x))
#define asin(x) (fv__math->asin_(x))
#define acos(x) (fv__math->acos_(x))
#define atan(x) (fv__math->atan_(x))
#define sinh(x) (fv__math->sinh_(x))
#define cosh(x) (fv__math->cosh_(x))
#define tanh(x) (fv__math->tanh_(x))
#define erf(x) (fv__math->erf_(x))
#define fabs(x) (fv__math->fabs_(x))
#define floor(x) (fv__math->floor_(x))
#define ceil(x) (fv__math->ceil_(x))
#define round(x) (fv__math->round_(x))
#define trunc(x) (fv__math->trunc_(x))
#define pow(x, y) (fv__math->pow_(x, y))
#define atan2(y, x) (fv__math->atan2_(y, x))
#define hypot(x, y) (fv__math->hypot_(x, y))
#define fmod(x, y) (fv__math->fmod_(x, y))
#define fmin(x, y) (fv__math->fmin_(x, y))
#define fmax(x, y) (fv__math->fmax_(x, y))
#define INFINITY (__builtin_inf())

/* ------------------------------------------------------------------------------------------------------------- types */

typedef double v_f32;
typedef int32_t v_i32;
typedef bool v_mask;
typedef struct v_pair { v_f32 lo, hi; } v_pair;
VFN v_pair v_pair_of(v_f32 lo, v_f32 hi) { return (v_pair){ lo, hi }; }
struct v_at { v_i32 request, row, batch_row, head, key, k_pos, q_pos, num_rows, num_keys, num_q_heads, index; };

typedef struct fv_floats { const float *data; int64_t count; } fv_floats;
typedef struct fv_ints { const int32_t *data; int64_t count; } fv_ints;
typedef struct fv_bits { const uint8_t *bits; const int64_t *offsets; } fv_bits;
typedef struct fv_ranges { const int32_t *ranges; const int32_t *indptr; int64_t count; int64_t reserved; } fv_ranges;
typedef struct fv_sums { float *data; int64_t stride; } fv_sums;
typedef struct fv_maxes { float *data; int64_t stride; } fv_maxes;

/* ------------------------------------------------------------------------------------------------------------- words */

VFN v_f32 v_set(double x) { return x; }
VFN v_i32 v_seti(int32_t x) { return x; }
VFN v_f32 v_float(v_i32 x) { return x; }
VFN v_i32 v_int(v_f32 x) { return (v_i32)x; }
VFN v_f32 v_add(v_f32 a, v_f32 b) { return a + b; }
VFN v_f32 v_sub(v_f32 a, v_f32 b) { return a - b; }
VFN v_f32 v_mul(v_f32 a, v_f32 b) { return a * b; }
VFN v_f32 v_div(v_f32 a, v_f32 b) { return a / b; }
VFN v_f32 v_neg(v_f32 a) { return -a; }
VFN v_f32 v_abs(v_f32 a) { return a < 0 ? -a : a; }
VFN v_f32 v_sqrt(v_f32 a) { return sqrt(a); }
VFN v_f32 v_min(v_f32 a, v_f32 b) { return a < b ? a : b; }
VFN v_f32 v_max(v_f32 a, v_f32 b) { return a > b ? a : b; }
VFN v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) { return a * b + c; }
VFN v_f32 v_exp(v_f32 x) { return exp(x); }
VFN v_f32 v_exp2(v_f32 x) { return exp2(x); }
VFN v_f32 v_log(v_f32 x) { return log(x); }
VFN v_f32 v_log2(v_f32 x) { return log2(x); }
VFN v_f32 v_tanh(v_f32 x) { return tanh(x); }
VFN v_f32 v_sin(v_f32 x) { return sin(x); }
VFN v_f32 v_cos(v_f32 x) { return cos(x); }
VFN v_i32 v_iadd(v_i32 a, v_i32 b) { return a + b; }
VFN v_i32 v_isub(v_i32 a, v_i32 b) { return a - b; }
VFN v_i32 v_imul(v_i32 a, v_i32 b) { return a * b; }
VFN v_i32 v_imin(v_i32 a, v_i32 b) { return a < b ? a : b; }
VFN v_i32 v_imax(v_i32 a, v_i32 b) { return a < b ? b : a; }
VFN v_i32 v_iand(v_i32 a, v_i32 b) { return a & b; }
VFN v_i32 v_ior(v_i32 a, v_i32 b) { return a | b; }
VFN v_i32 v_ixor(v_i32 a, v_i32 b) { return a ^ b; }
VFN v_mask v_lt(v_f32 a, v_f32 b) { return a < b; }
VFN v_mask v_le(v_f32 a, v_f32 b) { return a <= b; }
VFN v_mask v_gt(v_f32 a, v_f32 b) { return a > b; }
VFN v_mask v_ge(v_f32 a, v_f32 b) { return a >= b; }
VFN v_mask v_eq(v_f32 a, v_f32 b) { return a == b; }
VFN v_mask v_ne(v_f32 a, v_f32 b) { return a != b; }
VFN v_mask v_ilt(v_i32 a, v_i32 b) { return a < b; }
VFN v_mask v_ile(v_i32 a, v_i32 b) { return a <= b; }
VFN v_mask v_igt(v_i32 a, v_i32 b) { return a > b; }
VFN v_mask v_ige(v_i32 a, v_i32 b) { return a >= b; }
VFN v_mask v_ieq(v_i32 a, v_i32 b) { return a == b; }
VFN v_mask v_ine(v_i32 a, v_i32 b) { return a != b; }
VFN v_mask v_and(v_mask a, v_mask b) { return a && b; }
VFN v_mask v_or(v_mask a, v_mask b) { return a || b; }
VFN v_mask v_not(v_mask a) { return !a; }
VFN v_mask v_true(void) { return true; }
VFN v_mask v_false(void) { return false; }
VFN v_f32 v_select(v_mask m, v_f32 a, v_f32 b) { return m ? a : b; }
VFN v_i32 v_iselect(v_mask m, v_i32 a, v_i32 b) { return m ? a : b; }

VFN v_pair v_rotate(v_pair x, v_i32 position, v_f32 frequency)
{
    const double angle = (double)position * frequency, c = cos(angle), s = sin(angle);
    return (v_pair){ x.lo * c - x.hi * s, x.hi * c + x.lo * s };
}

VFN int64_t v_nearest(int64_t i, int64_t count) { return i < 0 ? 0 : i < count ? i : count - 1; }
VFN v_f32 v_read(fv_floats x, v_i32 i) { return x.data && x.count > 0 ? x.data[v_nearest(i, x.count)] : 0; }
VFN v_i32 v_readi(fv_ints x, v_i32 i) { return x.data && x.count > 0 ? x.data[v_nearest(i, x.count)] : 0; }

VFN v_mask v_bit(fv_bits m, struct v_at at)
{
    if (at.key < 0 || at.key >= at.num_keys) return false;
    const int64_t bit = m.offsets[at.request] + (int64_t)at.row * at.num_keys + at.key;
    return m.bits[bit / 8] >> (bit % 8) & 1;
}

VFN int64_t v_first_range(fv_ranges x, struct v_at at) { return x.indptr ? x.indptr[at.request] : 0; }
VFN int64_t v_end_of_ranges(fv_ranges x, struct v_at at) { return !x.ranges ? v_first_range(x, at) : x.indptr ? x.indptr[at.request + 1] : x.count; }

VFN v_mask v_share_range(fv_ranges list, struct v_at at, v_i32 x, v_i32 y)
{
    for (int64_t i = v_first_range(list, at); i < v_end_of_ranges(list, at); i++) {
        const int32_t lo = list.ranges[2 * i], hi = list.ranges[2 * i + 1];
        if (x >= lo && x < hi && y >= lo && y < hi) return true;
    }
    return false;
}

VFN v_mask v_in_range(fv_ranges list, struct v_at at, v_i32 x) { return v_share_range(list, at, x, x); }

VFN v_mask v_before_ranges(fv_ranges list, struct v_at at, v_i32 x)
{
    const int64_t first = v_first_range(list, at);
    return first == v_end_of_ranges(list, at) || x < list.ranges[2 * first];
}

VFN v_mask v_is_ancestor(fv_ints parents, struct v_at at)
{
    const int32_t node = at.key - (at.num_keys - at.num_rows), first = at.batch_row - at.row;
    int32_t r = at.row;
    if (node < 0) return true;
    for (int32_t steps = 0; steps < at.num_rows && r >= 0 && r < at.num_rows; steps++) {
        if (r == node) return true;
        if (first + r >= parents.count) break;
        r = parents.data[first + r];
    }
    return false;
}

/* ------------------------------------------------------------------------------------------------------ declarations */

#define FV_DO(hook) fv_spec_##hook
#define FV_ARGS fv_args
struct fv_args;
#include "hooks_declare.h"

#endif
