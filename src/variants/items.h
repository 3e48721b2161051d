/* SPDX-License-Identifier: Apache-2.0 */
/* items.h -- several items behind one prefix (candidates to be ranked): a row sees the prefix and its own item. Items are position ranges,
 * ascending; all positions before the first one are the prefix. A request without items is all prefix. */
FV_META("visible where k_pos is before the first range of items, or in one range with q_pos")

FV_PARAMS(
    FV_RANGES(items, batch, required)
)

#ifdef FV_SPEC
FV_VISIBLE { return v_before_ranges(a->items, at, at.k_pos) || v_share_range(a->items, at, at.q_pos, at.k_pos); }
#else
FV_VISIBLE { return v_or(v_before_ranges(a->items, at, at.k_pos), v_share_range(a->items, at, at.q_pos, at.k_pos)); }
#endif
