/* SPDX-License-Identifier: Apache-2.0 */
/* sigmoid.c -- every key gets a weight of its own between 0 and 1: no key takes attention from another, and nothing is divided by a sum. With
 * bias = -ln(n), n keys start out with a total weight of about 1. */
FV_META("o = sum of v_j / (1 + exp(-(s_j + bias)))")

FV_PARAMS(
    FV_NUMBER(bias, run, 0, -4)
)

#ifdef FV_SPEC
FV_WEIGHT { return 1 / (1 + exp(-(s + a->bias))); }
#else
FV_WEIGHT { return v_set(1.0f) / (v_set(1.0f) + v_exp(v_neg(s + a->bias))); }
#endif
