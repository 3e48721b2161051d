/* SPDX-License-Identifier: Apache-2.0 */
/* simt.cuh -- the v_* words in a CUDA thread: a v_f32 is one float. The list of words and what they mean stands in src/cpu/vocabulary.h; a variant's
 * text sees the same names here. Transcendentals use the special function unit: errors of a few 1e-7, which is far below what 16-bit
 * weights keep. */
#ifndef FV_SIMT_CUH
#define FV_SIMT_CUH

#include "ptx.cuh"

#define VFN FV_DEVICE

typedef float v_f32;
typedef int32_t v_i32;
typedef uint32_t v_u32;
typedef bool v_mask;

struct v_pair { v_f32 lo, hi; };
VFN v_pair v_pair_of(v_f32 lo, v_f32 hi) { const v_pair x = { lo, hi }; return x; }

struct v_at {
    v_i32 request, row, batch_row, head, key, k_pos, q_pos, num_rows, num_keys, num_q_heads, index;
};

struct fv_floats { const float *data; int64_t count; };
struct fv_ints { const int32_t *data; int64_t count; };
struct fv_bits { const uint8_t *bits; const int64_t *offsets; };
struct fv_ranges { const int32_t *ranges; const int32_t *indptr; int64_t count; int64_t reserved; };
struct fv_sums { float *data; int64_t stride; };
struct fv_maxes { float *data; int64_t stride; };

VFN v_f32 v_set(float x) { return x; }
VFN v_i32 v_seti(int32_t x) { return x; }
VFN v_f32 v_float(v_i32 x) { return (float)x; }
VFN v_i32 v_int(v_f32 x) { return (int32_t)x; }
VFN v_f32 v_add(v_f32 a, v_f32 b) { return a + b; }
VFN v_f32 v_sub(v_f32 a, v_f32 b) { return a - b; }
VFN v_f32 v_mul(v_f32 a, v_f32 b) { return a * b; }
VFN v_f32 v_div(v_f32 a, v_f32 b) { return a / b; }
VFN v_f32 v_neg(v_f32 a) { return -a; }
VFN v_f32 v_abs(v_f32 a) { return fabsf(a); }
VFN v_f32 v_sqrt(v_f32 a) { return sqrtf(a); }
VFN v_f32 v_min(v_f32 a, v_f32 b) { return a < b ? a : b; }
VFN v_f32 v_max(v_f32 a, v_f32 b) { return a > b ? a : b; }
VFN v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) { return fmaf(a, b, c); }
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
VFN v_mask v_true() { return true; }
VFN v_mask v_false() { return false; }
VFN v_f32 v_select(v_mask m, v_f32 a, v_f32 b) { return m ? a : b; }
VFN v_i32 v_iselect(v_mask m, v_i32 a, v_i32 b) { return m ? a : b; }

VFN v_f32 v_exp2(v_f32 x) { return ex2_approx(x); }
VFN v_f32 v_exp(v_f32 x) { return ex2_approx(x * 1.44269504088896341f); }
VFN v_f32 v_log2(v_f32 x) { return lg2_approx(x); }
VFN v_f32 v_log(v_f32 x) { return lg2_approx(x) * 0.693147180559945309f; }

/* How words go that are cheap for usual numbers and dear for the others. A hook on scores goes near first, for many numbers at once, and asks then
 * whether that was enough in all lanes of the warp: `beyond` has a bit of V_BEYOND where it was not. Then all is done once more, as each number needs
 * it, so that what a number gives depends on it alone. Where a word stands in a function of the text's own, or in another hook, it goes that way at
 * once. */
struct v_way { bool near, asked; uint32_t beyond; };
struct v_any_way { };
#define V_BEYOND 0x41000000u

/* |x| < 1/2: x times a polynomial in z = x x + 1/4, whose exponent is that of 1/4 then: its upper and its second bit are set in all larger ones.
 * Relative error 6e-7. */
VFN v_f32 v_tanh_by(v_f32 x, v_way &way)
{
    const float z = fmaf(x, x, 0.25f);
    const float near = x * fmaf(fmaf(fmaf(-0.044402225844f, z, 0.165204635321f), z, -0.407540079669f), z, 1.09225297076f);
    way.asked = true;
    way.beyond |= __float_as_uint(z);
    if (way.near) return near;
    const float far = fmaf(-2.0f, rcp_approx(ex2_approx(x * 2.88539008177792681f) + 1.0f), 1.0f);
    return __float_as_uint(z) & V_BEYOND ? far : near;
}

VFN v_f32 v_tanh_by(v_f32 x, v_any_way)
{
    v_way way = { false, false, 0 };
    return v_tanh_by(x, way);
}

VFN v_f32 v_tanh(v_f32 x) { return v_tanh_by(x, v_any_way()); }

/* Sine and cosine of r, |r| <= pi / 4. */
VFN void v_sincos_near(float r, v_f32 *s, v_f32 *c)
{
    const float z = r * r;
    float ps = fmaf(-0.000195040220144f, z, 0.0083320368753f);
    ps = fmaf(ps, z, -0.166666506992f);
    *s = fmaf(ps * z, r, r);
    float pc = fmaf(2.43799293709e-5f, z, -0.00138866192102f);
    pc = fmaf(pc, z, 0.0416666167392f);
    *c = fmaf(pc * z, z, fmaf(z, -0.5f, 1.0f));
}

/* A quarter turn, q times. */
VFN void v_quarters(int q, v_f32 *s, v_f32 *c)
{
    const float a = q & 1 ? *c : *s, b = q & 1 ? *s : *c;
    *s = q & 2 ? -a : a;
    *c = (q + 1) & 2 ? -b : b;
}

/* Sine and cosine of x, |x| < 2^31: quarter turns are taken off in double, the rest needs 24 bits. */
VFN void v_sincos(v_f32 x, v_f32 *s, v_f32 *c)
{
    const double quarters = rint(x * 0.63661977236758134308);
    v_sincos_near((float)(x - quarters * 1.5707963267341256142 - quarters * 6.0771005065061922e-11), s, c);
    v_quarters((int)quarters, s, c);
}

VFN v_f32 v_sin(v_f32 x) { v_f32 s, c; v_sincos(x, &s, &c); return s; }
VFN v_f32 v_cos(v_f32 x) { v_f32 s, c; v_sincos(x, &s, &c); return c; }

/* What a frequency turns in one position: hi + lo / 2^32 of 2^32 units a turn, whole turns left out. The angle of a position is then a product of integers,
 * exact to 2^-32 turns below 2^30. All that is costly follows from the frequency alone, so a loop over positions does it once. */
struct v_step { int32_t hi, lo; };

VFN v_step v_step_of(v_f32 frequency)
{
    const double x = frequency, magic = 6755399441055744.0;            /* 1.5 * 2^52: a sum with it is rounded, and its low bits are the integer */
    double units = x * 683565275.57643158978;
    const double rest = fma(x, 683565275.57643158978, -units) - x * 4.2259636374233396e-08;
    units -= (fma(units, 0x1p-32, magic) - magic) * 0x1p32;
    const double hi = units + magic, lo = fma(units - (hi - magic) + rest, 0x1p32, magic);
    const int64_t sum = (__double_as_longlong(hi) << 32) + (__double_as_longlong(lo) - __double_as_longlong(magic));
    const v_step step = { (int32_t)(sum + 0x80000000ll >> 32), (int32_t)sum };
    return step;
}

/* position * step, in units, between minus and plus half a turn. */
VFN int32_t v_angle(v_i32 position, v_step step) { return (int32_t)((uint32_t)position * (uint32_t)step.hi + (uint32_t)__mulhi(position, step.lo)); }

/* Sine and cosine of an angle: on the special function unit, within 2^-20, or to the last place. */
VFN void v_sincos_rough(int32_t angle, v_f32 *s, v_f32 *c)
{
    const float r = (float)angle * 1.4629180792671596e-9f;
    *s = sin_approx(r);
    *c = cos_approx(r);
}

VFN void v_sincos_fine(int32_t angle, v_f32 *s, v_f32 *c)
{
    const int32_t quarters = (angle >> 29) + 1 >> 1;
    v_sincos_near((float)(angle - (int32_t)((uint32_t)quarters << 30)) * 1.4629180792671596e-9f, s, c);
    v_quarters(quarters, s, c);
}

/* Where what is turned will be rounded to 16 bits (FV_ROUGH_TURNS), the special function unit is exact enough. */
VFN v_pair v_rotate(v_pair x, v_i32 position, v_f32 frequency)
{
    const int32_t angle = v_angle(position, v_step_of(frequency));
    v_f32 s, c;
#if FV_ROUGH_TURNS
    v_sincos_rough(angle, &s, &c);
#else
    v_sincos_fine(angle, &s, &c);
#endif
    const v_pair y = { x.lo * c - x.hi * s, fmaf(x.hi, c, x.lo * s) };
    return y;
}

/* The element of an array of `count` that is nearest to index; of an absent one 0. Nothing in a launch writes what is read, and there is no branch, so reads
 * of the same element are one, and one whose index stays the same leaves a loop. */
static __device__ const int32_t v_zero = 0;

template <class T> VFN T v_nearest(const T *data, int64_t count, v_i32 index)
{
    const bool any = data && count > 0;
    const int32_t last = !any ? 0 : count > 0x7fffffff ? 0x7fffffff : (int32_t)count - 1;
    return __ldg((any ? data : (const T *)&v_zero) + v_imax(v_imin(index, last), 0));
}

VFN v_f32 v_read(fv_floats x, v_i32 index) { return v_nearest(x.data, x.count, index); }
VFN v_i32 v_readi(fv_ints x, v_i32 index) { return v_nearest(x.data, x.count, index); }

VFN v_mask v_bit(fv_bits m, v_at at)
{
    if (at.key < 0 || at.key >= at.num_keys) return false;
    const int64_t bit = m.offsets[at.request] + (int64_t)at.row * at.num_keys + at.key;
    return m.bits[bit >> 3] >> (bit & 7) & 1;
}

VFN const int32_t *v_range_list(fv_ranges x, v_i32 request, int64_t *n)
{
    const int64_t lo = x.indptr ? x.indptr[request] : 0, hi = x.indptr ? x.indptr[request + 1] : x.count;
    *n = x.ranges ? hi - lo : 0;
    return x.ranges + 2 * lo;
}

VFN v_mask v_within(v_i32 x, int32_t lo, int32_t hi) { return x >= lo && x < hi; }

VFN v_mask v_in_range(fv_ranges list, v_at at, v_i32 x)
{
    int64_t n;
    const int32_t *r = v_range_list(list, at.request, &n);
    bool in = false;
    for (int64_t i = 0; i < n; i++) in |= v_within(x, r[2 * i], r[2 * i + 1]);
    return in;
}

VFN v_mask v_share_range(fv_ranges list, v_at at, v_i32 x, v_i32 y)
{
    int64_t n;
    const int32_t *r = v_range_list(list, at.request, &n);
    bool in = false;
    for (int64_t i = 0; i < n; i++) in |= v_within(x, r[2 * i], r[2 * i + 1]) && v_within(y, r[2 * i], r[2 * i + 1]);
    return in;
}

VFN v_mask v_before_ranges(fv_ranges list, v_at at, v_i32 x)
{
    int64_t n;
    const int32_t *r = v_range_list(list, at.request, &n);
    return n > 0 ? x < r[0] : true;
}

VFN v_mask v_is_ancestor(fv_ints parents, v_at at)
{
    const int64_t first = (int64_t)at.batch_row - at.row;
    const int32_t node = at.key - (at.num_keys - at.num_rows);
    bool seen = node < 0;
    int32_t r = at.row;
    for (int32_t steps = 0; steps < at.num_rows && r >= 0 && r < at.num_rows && !seen; steps++) {
        seen = node == r;
        if (first + r >= parents.count) break;
        r = parents.data[first + r];
    }
    return seen;
}

#endif
