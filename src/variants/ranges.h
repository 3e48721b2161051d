/* SPDX-License-Identifier: Apache-2.0 */
/* ranges.h -- only keys at certain positions: the ones that lie in a range of the request's list. */
FV_META("visible where k_pos lies in a range of ranges")

FV_PARAMS(
    FV_RANGES(ranges, batch, required)
)

FV_VISIBLE { return v_in_range(a->ranges, at, at.k_pos); }
