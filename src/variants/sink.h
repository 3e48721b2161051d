/* SPDX-License-Identifier: Apache-2.0 */
/* sink.h -- a learned score per head that takes its part of the softmax and gives no value. */
FV_META("exp(sinks[head]) joins the denominator, once")

FV_PARAMS(
    FV_FLOATS(sinks, run, heads, required)
)

#ifdef FV_SPEC
FV_SINK { return a->sinks.data[at.head]; }
#else
FV_SINK { return v_read(a->sinks, at.head); }
#endif
