/* SPDX-License-Identifier: Apache-2.0 */
/* weights.c -- the hooks that stand in place of the softmax, and behind it. */
FV_META("weights add")
FV_PARAMS(FV_NUMBER(limit, run, 1, 0.75))
FV_WEIGHT { return v_min(v_max(s, v_set(0.0f)), v_set(a->limit)); }
FV_OUTPUT { return o * 2.0f + lse; }
