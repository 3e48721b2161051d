/* SPDX-License-Identifier: Apache-2.0 */
/* spec_close.h -- goes behind a variant's text that spec_open.h stands before: the table of its hooks, FV_HAS_* says which there are. */

VFN struct v_at v_at_of(const fv__spec_at *at)
{
    return (struct v_at){ at->request, at->row, at->batch_row, at->head, at->key, at->k_pos, at->q_pos, at->num_rows, at->num_keys, at->num_q_heads,
                          at->index };
}

#define FV_SPEC_VALUE(hook, name) \
    static double name(const void *args, const fv__spec_at *at, double x) { return fv_spec_##hook(args, v_at_of(at), x); }
#define FV_SPEC_PAIR(hook, name)                                                    \
    static void name(const void *args, const fv__spec_at *at, double *lo, double *hi) \
    {                                                                               \
        const v_pair x = fv_spec_##hook(args, v_at_of(at), (v_pair){ *lo, *hi });   \
        *lo = x.lo;                                                                 \
        *hi = x.hi;                                                                 \
    }

#ifdef FV_HAS_SCORE
FV_SPEC_VALUE(SCORE, fv_call_score)
#endif
#ifdef FV_HAS_VISIBLE
static bool fv_call_visible(const void *args, const fv__spec_at *at) { return fv_spec_VISIBLE(args, v_at_of(at)); }
#endif
#ifdef FV_HAS_SINK
static double fv_call_sink(const void *args, const fv__spec_at *at) { return fv_spec_SINK(args, v_at_of(at)); }
#endif
#if defined FV_HAS_QUERY || defined FV_HAS_KEY
static int32_t fv_call_pairs(const void *args, bool *interleaved) { return fv_spec_pairs(args, interleaved); }
#endif
#ifdef FV_HAS_QUERY
FV_SPEC_PAIR(QUERY, fv_call_query)
#endif
#ifdef FV_HAS_KEY
FV_SPEC_PAIR(KEY, fv_call_key)
#endif
#ifdef FV_HAS_VALUE
FV_SPEC_VALUE(VALUE, fv_call_value)
#endif
#ifdef FV_HAS_OUTPUT
static double fv_call_output(const void *args, const fv__spec_at *at, double o, double lse) { return fv_spec_OUTPUT(args, v_at_of(at), o, lse); }
#endif
#ifdef FV_HAS_WEIGHT
FV_SPEC_VALUE(WEIGHT, fv_call_weight)
#endif
#ifdef FV_HAS_KEY_SUM
FV_SPEC_VALUE(KEY_SUM, fv_call_key_sum)
#endif
#ifdef FV_HAS_ROW_MAX
FV_SPEC_VALUE(ROW_MAX, fv_call_row_max)
#endif

extern const fv__spec_hooks FV_VARIANT_EXPORT;
__attribute__((visibility("default"))) const fv__spec_hooks FV_VARIANT_EXPORT = {
#ifdef FV_HAS_SCORE
    .score = fv_call_score,
#endif
#ifdef FV_HAS_VISIBLE
    .visible = fv_call_visible,
#endif
#ifdef FV_HAS_SINK
    .sink = fv_call_sink,
#endif
#if defined FV_HAS_QUERY || defined FV_HAS_KEY
    .pairs = fv_call_pairs,
#endif
#ifdef FV_HAS_QUERY
    .query = fv_call_query,
#endif
#ifdef FV_HAS_KEY
    .key = fv_call_key,
#endif
#ifdef FV_HAS_VALUE
    .value = fv_call_value,
#endif
#ifdef FV_HAS_OUTPUT
    .output = fv_call_output,
#endif
#ifdef FV_HAS_WEIGHT
    .weight = fv_call_weight,
#endif
#ifdef FV_HAS_KEY_SUM
    .key_sum = fv_call_key_sum,
#endif
#ifdef FV_HAS_ROW_MAX
    .row_max = fv_call_row_max,
#endif
};
