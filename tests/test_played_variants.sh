#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_played_variants.sh BUILD -- every hook in the attention kernel for GPUs, without one: texts against their own definitions, played on the CPU
# (test_played_attention.sh). All shapes of more texts, by hand:
#     tests/test_played_attention.sh BUILD checkvariant --device cuda:0 examples/variants/streaming.c
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
set -e
tests/test_played_attention.sh "$1" checkvariant --device cuda:0 --jobs 2 --alone 1 --shapes ragged,shared,invariant \
    tests/variants/every_hook.c tests/variants/weights.c
tests/test_played_attention.sh "$1" checkvariant --device cuda:0 --jobs 2 --alone 1 tests/variants/sums.c
