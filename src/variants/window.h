/* SPDX-License-Identifier: Apache-2.0 */
/* window.h -- so many keys to the left and to the right of a row's own position. */
FV_META("visible where q_pos - left <= k_pos <= q_pos + right")

FV_PARAMS(
    FV_INT(left, run, inf, 7)
    FV_INT(right, run, inf, 3)
)
FV_REQUIRE(left >= 0)
FV_REQUIRE(right >= 0)
FV_FIRST_KEY(position - left)
FV_LAST_KEY(position + right)
FV_EXACT

#ifdef FV_SPEC
FV_VISIBLE { return at.k_pos >= at.q_pos - a->left && at.k_pos <= at.q_pos + a->right; }
#else
FV_VISIBLE { return v_and(v_ige(at.k_pos, at.q_pos - a->left), v_ile(at.k_pos, at.q_pos + a->right)); }
#endif
