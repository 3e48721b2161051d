/* SPDX-License-Identifier: Apache-2.0 */
/* mask.h -- a dense mask: one bit per row and key of each request. */
FV_META("visible where bit [row][key] of the request is 1")

FV_PARAMS(
    FV_BITS(bits, batch)
)

FV_VISIBLE { return v_bit(a->bits, at); }
