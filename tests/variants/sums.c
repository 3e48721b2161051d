/* SPDX-License-Identifier: Apache-2.0 */
/* sums.c -- what a second pass makes: how far back, on average, each key is looked at from. */
FV_META("weight times distance, summed by key")
FV_PARAMS(
    FV_SUMS(distance, run)
)
FV_KEY_SUM { return p * v_max(v_float(at.q_pos - at.k_pos), v_set(0.5f)); }
