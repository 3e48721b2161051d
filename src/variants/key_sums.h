/* SPDX-License-Identifier: Apache-2.0 */
/* key_sums.h -- how much attention each key got: a second output, the weights summed over rows and the heads of a group. */
FV_META("key_sums[kv head][key] = sum over rows and group heads of exp(s - lse)")

FV_PARAMS(
    FV_SUMS(key_sums, run)
)

FV_KEY_SUM { return p; }
