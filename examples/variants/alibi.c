/* SPDX-License-Identifier: Apache-2.0 */
/* alibi.c -- instead of positions in q and k, a penalty on the score that grows with the distance of the key, steeper or flatter by head. */
FV_META("s - slopes[head] * (q_pos - k_pos)")

FV_PARAMS(
    FV_FLOATS(slopes, run, heads, required)
)

#ifdef FV_SPEC
FV_SCORE { return s - a->slopes.data[at.head] * (double)(at.q_pos - at.k_pos); }
#else
FV_SCORE { return v_fma(v_neg(v_read(a->slopes, at.head)), v_float(at.q_pos - at.k_pos), s); }
#endif
