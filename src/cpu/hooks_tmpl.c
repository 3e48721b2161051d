/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_tmpl.c -- the built-in variants' hooks for one level: their texts compiled, and one table in the order of the registry. */
#include "cpu.h"
#include "vocabulary.h"

#define FV_VARIANT_OPEN "cpu/hooks_open.h"
#define FV_VARIANT_CLOSE "cpu/hooks_close.h"
#include "variant_files.inc"

enum {
#define FV_VARIANT(name) INDEX_##name,
#include "variants.inc"
#undef FV_VARIANT
    NUM_VARIANTS
};

#define FIELD_SCORE     score
#define FIELD_VISIBLE   visible
#define FIELD_SINK      sink
#define FIELD_QUERY     query
#define FIELD_KEY       key
#define FIELD_VALUE     value
#define FIELD_OUTPUT    output
#define FIELD_WEIGHT    weight
#define FIELD_KEY_SUM   key_sum
#define FIELD_ROW_MAX   row_max

extern const fv__cpu_hooks V_NAME(fv__cpu_hooks)[NUM_VARIANTS + 1];
const fv__cpu_hooks V_NAME(fv__cpu_hooks)[NUM_VARIANTS + 1] = {
#define FV_VARIANT_HOOK(name, hook) [INDEX_##name].FIELD_##hook = fv_call_##name##_##hook,
#include "variant_hooks.inc"
#undef FV_VARIANT_HOOK
};
