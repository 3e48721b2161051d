/* SPDX-License-Identifier: Apache-2.0 */
/* every_hook.c -- all hooks beside the softmax but sums of keys, arrays of every count, macros and helpers with names that kernels have too. */
FV_META("all that softmax leaves room for")
FV_PARAMS(
    FV_INT(turned, problem, 32, 32)
    FV_INT(interleaved, problem, 1, 1)
    FV_NUMBER(gain, batch, 1, 1.25)
    FV_FLOATS(of_head, run, heads, required)
    FV_FLOATS(of_request, batch, requests, required)
    FV_INTS(of_row, batch, rows, required)
    FV_INTS(of_key, run, any, none)
)
FV_PAIRS(turned, interleaved)
#define HALF 0.5f
#define n 3
static v_f32 help(v_f32 x) { return v_abs(x) * HALF + n; }
#if 0                                   /* an older one; a comment that begins on a directive
#endif                                  is that */
FV_QUERY { return it isn't read }}
#if 1
FV_KEY { return x; }
#endif
#else
FV_QUERY { const v_pair y = { v_add(x.lo, x.hi), v_sub(x.hi, x.lo) }; return y; }
#endif
#if 1
FV_KEY { return v_pair_of(v_neg(x.hi), v_mul(x.lo, v_cos(v_float(at.index)))); }
#else
FV_KEY { return x; }
#endif
FV_SCORE { return v_fma(s, v_set(a->gain), v_read(a->of_request, at.request) + help(v_read(a->of_head, at.head))); }
FV_VISIBLE { return v_ine(v_iand(at.key, v_seti(3)), v_iand(v_readi(a->of_row, at.batch_row), v_seti(3))); }
FV_SINK { return v_read(a->of_head, at.head) - v_float(at.row) * 0.125f; }
FV_VALUE { return v * (v_set(1.0f) + v_float(v_readi(a->of_key, at.key)) * 0.0625f) + v_float(at.index) * 0.001f; }
FV_OUTPUT { return v_select(v_lt(lse, v_set(2.0f)), o, o * v_sqrt(v_abs(lse))); }
