/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_declare.h -- what a variant's declarations mean in C: the argument struct, whose layout variant_parse.c computes, and the heads of the hooks'
 * functions. Whoever includes this has defined FV_ARGS, the struct's tag, FV_DO(hook), a function's name, and the types in its heads. */
#define FV_META(...)
#define FV_PARAMS(...) struct FV_ARGS { __VA_ARGS__ };
#define FV_NUMBER(name, ...) _Alignas(16) float name;
#define FV_INT(name, ...) _Alignas(16) int32_t name;
#define FV_FLOATS(name, ...) _Alignas(16) fv_floats name;
#define FV_INTS(name, ...) _Alignas(16) fv_ints name;
#define FV_BITS(name, ...) _Alignas(16) fv_bits name;
#define FV_RANGES(name, ...) _Alignas(16) fv_ranges name;
#define FV_SUMS(name, ...) _Alignas(16) fv_sums name;
#define FV_MAXES(name, ...) _Alignas(16) fv_maxes name;
#define FV_REQUIRE(...)
#define FV_FIRST_KEY(...)
#define FV_LAST_KEY(...)
#define FV_LIFTED(...)
#define FV_EXACT
#define FV_TURNS(...)
#define FV_PAIRS(dim, kind) \
    VFN int32_t FV_DO(pairs)(const struct FV_ARGS *a, bool *interleaved) { *interleaved = a->kind != 0; return a->dim; }

#define FV_HOOK_HEAD(type, hook) VFN type FV_DO(hook)(const struct FV_ARGS *a __attribute__((unused)), \
                                                      struct v_at at __attribute__((unused))
#define FV_SCORE FV_HOOK_HEAD(v_f32, SCORE), v_f32 s)
#define FV_VISIBLE FV_HOOK_HEAD(v_mask, VISIBLE))
#define FV_SINK FV_HOOK_HEAD(v_f32, SINK))
#define FV_QUERY FV_HOOK_HEAD(v_pair, QUERY), v_pair x)
#define FV_KEY FV_HOOK_HEAD(v_pair, KEY), v_pair x)
#define FV_VALUE FV_HOOK_HEAD(v_f32, VALUE), v_f32 v)
#define FV_OUTPUT FV_HOOK_HEAD(v_f32, OUTPUT), v_f32 o, v_f32 lse)
#define FV_WEIGHT FV_HOOK_HEAD(v_f32, WEIGHT), v_f32 s)
#define FV_KEY_SUM FV_HOOK_HEAD(v_f32, KEY_SUM), v_f32 p)
#define FV_ROW_MAX FV_HOOK_HEAD(v_f32, ROW_MAX), v_f32 m)
