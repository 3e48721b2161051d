/* SPDX-License-Identifier: Apache-2.0 */
/* tree.h -- a tree of drafted tokens (speculation): the rows of a request are its last keys; a row sees every key before these, itself, and the
 * rows that its parents lead to. parents[row of the batch] is the parent's row in the request, one before it, -1: none. Other values are refused on a
 * CPU; a GPU, where they may lie on the device, follows them as far as they lead to rows of the request, and no further than it has rows. */
FV_META("visible where key is before the rows, or is the row or one of its ancestors")

FV_PARAMS(
    FV_INTS(parents, batch, rows, required)
)

FV_VISIBLE { return v_is_ancestor(a->parents, at); }
