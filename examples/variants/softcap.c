/* SPDX-License-Identifier: Apache-2.0 */
/* softcap.c -- squashes every score into (-cap, cap), so that no single key can take over. */
FV_META("cap * tanh(s / cap)")

FV_PARAMS(
    FV_NUMBER(cap, run, required, 5)
)
FV_REQUIRE(cap > 0)

#ifdef FV_SPEC
FV_SCORE { return a->cap * tanh(s / a->cap); }
#else
FV_SCORE { return a->cap * v_tanh(s * (1.0f / a->cap)); }
#endif
