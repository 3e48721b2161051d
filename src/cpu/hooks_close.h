/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_close.h -- goes behind a variant's text: a function over a block of keys, or over a row's elements, for each hook that FV_HAS_* says the
 * text has. What a hook reads is no part of the line that it changes (restrict): what is the same for all keys is read once. With FV_VARIANT_EXPORT
 * it also defines that symbol, the table of them; then clears its macros for the next text. */

#ifdef FV_HAS_SCORE
static void FV_CALL(SCORE)(float *restrict s, int n, const void *args, const fv__at *at)
{
    for (int i = 0; i < n; i += V_LANES) v_store(s + i, FV_DO(SCORE)(args, v_at_keys(at, i), v_load(s + i)));
}
#endif

#ifdef FV_HAS_VISIBLE
static uint64_t FV_CALL(VISIBLE)(int n, const void *args, const fv__at *at)
{
    uint64_t bits = 0;
    for (int i = 0; i < n; i += V_LANES) bits |= (uint64_t)v_movemask(FV_DO(VISIBLE)(args, v_at_keys(at, i))) << i;
    return bits;
}
#endif

#ifdef FV_HAS_SINK
static float FV_CALL(SINK)(const void *args, const fv__at *at)
{
    return v_lane(FV_DO(SINK)(args, v_at_elements(at, 0)), 0);
}
#endif

/* Query and key hooks: the pairs that the FV_PAIRS parameters say, within the head. */
#if defined FV_HAS_QUERY || defined FV_HAS_KEY
VFN void FV_CALL(turn)(float *x, int dim, const void *args, const fv__at *at, bool is_key)
{
    bool interleaved;
    int32_t turned = FV_DO(pairs)(args, &interleaved);
    turned = turned < dim ? turned : dim;
    const int half = turned > 0 ? turned / 2 : 0;
    (void)is_key;
    for (int i = 0; i < half; i += V_LANES) {
        const int n = half - i < V_LANES ? half - i : V_LANES;
        v_pair pair = v_load_pairs(x, i, n, half, interleaved);
#if defined FV_HAS_QUERY && defined FV_HAS_KEY
        pair = is_key ? FV_DO(KEY)(args, v_at_elements(at, i), pair) : FV_DO(QUERY)(args, v_at_elements(at, i), pair);
#elif defined FV_HAS_QUERY
        pair = FV_DO(QUERY)(args, v_at_elements(at, i), pair);
#else
        pair = FV_DO(KEY)(args, v_at_elements(at, i), pair);
#endif
        v_store_pairs(x, i, n, half, interleaved, pair);
    }
}
#endif

#ifdef FV_HAS_QUERY
static void FV_CALL(QUERY)(float *q, int dim, const void *args, const fv__at *at)
{
    FV_CALL(turn)(q, dim, args, at, false);
}
#endif

#ifdef FV_HAS_KEY
static void FV_CALL(KEY)(float *k, int dim, const void *args, const fv__at *at)
{
    FV_CALL(turn)(k, dim, args, at, true);
}
#endif

#ifdef FV_HAS_VALUE
static void FV_CALL(VALUE)(float *v, int dim, const void *args, const fv__at *at)
{
    for (int i = 0; i < dim; i += V_LANES) v_store(v + i, FV_DO(VALUE)(args, v_at_elements(at, i), v_load(v + i)));
}
#endif

#ifdef FV_HAS_OUTPUT
static void FV_CALL(OUTPUT)(float *o, int dim, float lse, const void *args, const fv__at *at)
{
    for (int i = 0; i < dim; i += V_LANES)
        v_store(o + i, FV_DO(OUTPUT)(args, v_at_elements(at, i), v_load(o + i), v_set(lse)));
}
#endif

#ifdef FV_HAS_WEIGHT
static void FV_CALL(WEIGHT)(float *restrict s, int n, const void *args, const fv__at *at)
{
    for (int i = 0; i < n; i += V_LANES) v_store(s + i, FV_DO(WEIGHT)(args, v_at_keys(at, i), v_load(s + i)));
}
#endif

#ifdef FV_HAS_KEY_SUM
static void FV_CALL(KEY_SUM)(float *p, int n, const void *args, const fv__at *at)
{
    for (int i = 0; i < n; i += V_LANES) v_store(p + i, FV_DO(KEY_SUM)(args, v_at_keys(at, i), v_load(p + i)));
}
#endif

#ifdef FV_HAS_ROW_MAX
static float FV_CALL(ROW_MAX)(float m, const void *args, const fv__at *at)
{
    return v_lane(FV_DO(ROW_MAX)(args, v_at_elements(at, 0), v_set(m)), 0);
}
#endif

#ifdef FV_VARIANT_EXPORT
extern const fv__cpu_hooks FV_VARIANT_EXPORT;
__attribute__((visibility("default"))) const fv__cpu_hooks FV_VARIANT_EXPORT = {
#ifdef FV_HAS_SCORE
    .score = FV_CALL(SCORE),
#endif
#ifdef FV_HAS_VISIBLE
    .visible = FV_CALL(VISIBLE),
#endif
#ifdef FV_HAS_SINK
    .sink = FV_CALL(SINK),
#endif
#ifdef FV_HAS_QUERY
    .query = FV_CALL(QUERY),
#endif
#ifdef FV_HAS_KEY
    .key = FV_CALL(KEY),
#endif
#ifdef FV_HAS_VALUE
    .value = FV_CALL(VALUE),
#endif
#ifdef FV_HAS_OUTPUT
    .output = FV_CALL(OUTPUT),
#endif
#ifdef FV_HAS_WEIGHT
    .weight = FV_CALL(WEIGHT),
#endif
#ifdef FV_HAS_KEY_SUM
    .key_sum = FV_CALL(KEY_SUM),
#endif
#ifdef FV_HAS_ROW_MAX
    .row_max = FV_CALL(ROW_MAX),
#endif
};
#endif

#undef FV_VARIANT_NAME
#undef FV_HAS_SCORE
#undef FV_HAS_VISIBLE
#undef FV_HAS_SINK
#undef FV_HAS_QUERY
#undef FV_HAS_KEY
#undef FV_HAS_VALUE
#undef FV_HAS_OUTPUT
#undef FV_HAS_WEIGHT
#undef FV_HAS_KEY_SUM
#undef FV_HAS_ROW_MAX
