/* SPDX-License-Identifier: Apache-2.0 */
/* hooks.cuh -- turns a variant's text into device code: its declarations become an argument struct, its hooks functions fv_do_NAME_HOOK.
 *
 * The text that cuda.c composes for a problem, "uses.cuh", is
 *
 *     #include "hooks.cuh"
 *     #define FV_VARIANT_NAME u0
 *     ... the text of the first variant ...
 *     #undef FV_VARIANT_NAME
 *     struct fv_uses { fv_args_u0_s u0; ... };         argument structs, each on a multiple of 16 bytes
 *     #define FV_HAS_SCORE                             and so on, for each hook that some variant has
 *     fv_score(s, u, at) ...                           the variants' hooks composed, in the order given
 */
#ifndef FV_HOOKS_CUH
#define FV_HOOKS_CUH

#include "simt.cuh"

#define FV_CAT_(a, b, c) a##_##b##_##c
#define FV_CAT(a, b, c) FV_CAT_(a, b, c)
#define FV_DO(hook) FV_CAT(fv_do, FV_VARIANT_NAME, hook)
#define FV_ARGS FV_CAT(fv_args, FV_VARIANT_NAME, s)

#define FV_META(...)
#define FV_PARAMS(...) struct FV_ARGS { __VA_ARGS__ };
#define FV_NUMBER(name, ...) alignas(16) float name;
#define FV_INT(name, ...) alignas(16) int32_t name;
#define FV_FLOATS(name, ...) alignas(16) fv_floats name;
#define FV_INTS(name, ...) alignas(16) fv_ints name;
#define FV_BITS(name, ...) alignas(16) fv_bits name;
#define FV_RANGES(name, ...) alignas(16) fv_ranges name;
#define FV_SUMS(name, ...) alignas(16) fv_sums name;
#define FV_MAXES(name, ...) alignas(16) fv_maxes name;
#define FV_REQUIRE(...)
#define FV_FIRST_KEY(...)
#define FV_LAST_KEY(...)
#define FV_LIFTED(...)
#define FV_EXACT
#define FV_TURNS(...)
#define FV_PAIRS(dim, kind) \
    VFN int32_t FV_DO(pairs)(const FV_ARGS *a, bool *interleaved) { *interleaved = a->kind != 0; return a->dim; }

/* Words that have a near way (simt.cuh) find which one they go in fv_way: this one, or the parameter of the same name of a hook on scores. */
static constexpr v_any_way fv_way = { };
#define v_tanh(...) v_tanh_by(__VA_ARGS__, fv_way)

#define FV_HOOK_HEAD(type, hook) VFN type FV_DO(hook)(const FV_ARGS *a, const v_at &at
#define FV_SCORE FV_HOOK_HEAD(v_f32, SCORE), v_f32 s, v_way &fv_way)
#define FV_VISIBLE FV_HOOK_HEAD(v_mask, VISIBLE))
#define FV_SINK FV_HOOK_HEAD(v_f32, SINK))
#define FV_QUERY FV_HOOK_HEAD(v_pair, QUERY), v_pair x)
#define FV_KEY FV_HOOK_HEAD(v_pair, KEY), v_pair x)
#define FV_VALUE FV_HOOK_HEAD(v_f32, VALUE), v_f32 v)
#define FV_OUTPUT FV_HOOK_HEAD(v_f32, OUTPUT), v_f32 o, v_f32 lse)
#define FV_WEIGHT FV_HOOK_HEAD(v_f32, WEIGHT), v_f32 s)
#define FV_KEY_SUM FV_HOOK_HEAD(v_f32, KEY_SUM), v_f32 p)
#define FV_ROW_MAX FV_HOOK_HEAD(v_f32, ROW_MAX), v_f32 m)

/* Element d of a head after a pair hook; get(d) is element d before it. Elements past the last pair stay. */
template <class HOOK, class GET>
VFN float fv_turn(const HOOK &hook, const GET &get, v_at at, int turned, bool interleaved, int d, int dim)
{
    const int half = fv_max(fv_min(turned, dim), 0) / 2;
    if (d >= 2 * half) return get(d);
    const bool is_hi = interleaved ? d & 1 : d >= half;
    at.index = interleaved ? d >> 1 : is_hi ? d - half : d;
    const v_pair x = { get(interleaved ? 2 * at.index : at.index), get(interleaved ? 2 * at.index + 1 : at.index + half) };
    const v_pair y = hook(at, x);
    return is_hi ? y.hi : y.lo;
}

#endif
