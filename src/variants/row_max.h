/* SPDX-License-Identifier: Apache-2.0 */
/* row_max.h -- the largest score of each row and head: a second output beside lse. */
FV_META("row_max[row][q head] = max of the s that the row sees, -inf where it sees none")

FV_PARAMS(
    FV_MAXES(row_max, run)
)

FV_ROW_MAX { return m; }
