/* SPDX-License-Identifier: Apache-2.0 */
/* image_prefix.c -- text with pictures in it: a token sees what stands before it, and all tokens of one picture see each other, forwards too. `images`
 * lists the pictures of every request as ranges of positions. The bound says "up to my own position"; FV_LIFTED says for whom it reaches further,
 * so that planner and kernels still skip everything else. */
FV_META("visible where k_pos <= q_pos, or both lie in one range of images")

FV_PARAMS(
    FV_RANGES(images, batch, none)
)
FV_LAST_KEY(position)
FV_LIFTED(images)
FV_EXACT

#ifdef FV_SPEC
FV_VISIBLE { return at.k_pos <= at.q_pos || v_share_range(a->images, at, at.q_pos, at.k_pos); }
#else
FV_VISIBLE { return v_or(v_ile(at.k_pos, at.q_pos), v_share_range(a->images, at, at.q_pos, at.k_pos)); }
#endif
