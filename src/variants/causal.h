/* SPDX-License-Identifier: Apache-2.0 */
/* causal.h -- a row sees the keys up to its own position. The ranges of `lift` (an image, a prefix) also see each other forwards. */
FV_META("visible where k_pos <= q_pos, or q_pos and k_pos lie in one range of lift")

FV_PARAMS(
    FV_RANGES(lift, batch, none)
)
FV_LAST_KEY(position)
FV_LIFTED(lift)
FV_EXACT

#ifdef FV_SPEC
FV_VISIBLE { return at.k_pos <= at.q_pos || v_share_range(a->lift, at, at.q_pos, at.k_pos); }
#else
FV_VISIBLE { return v_or(v_ile(at.k_pos, at.q_pos), v_share_range(a->lift, at, at.q_pos, at.k_pos)); }
#endif
