/* SPDX-License-Identifier: Apache-2.0 */
/* maxes.c -- the largest score of a row beside sinks, which do not count, and scores that a hook moves. */
FV_META("largest score, by head")
FV_PARAMS(
    FV_FLOATS(sinks, run, heads, required)
    FV_MAXES(largest, run)
)
FV_SCORE { return s * 0.75f - v_float(at.head); }
FV_SINK { return v_read(a->sinks, at.head) + 20; }
FV_ROW_MAX { return m + v_float(at.head) * 0.5f; }
