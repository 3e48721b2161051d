#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The foveal command on a real GPU: what it says of it; replays whose every step is compared with the definition; the same bits however a replay is
# scheduled; a bundle in place of a compiler. Not run (77) without a GPU. Usage: test_gpu_cli.sh BUILD
set -u
build=$(cd "${1:?the build folder}" && pwd)
cd "$(dirname "$0")/.." || exit 1
foveal=$build/bin/foveal
device=${FV_DEVICE:-cuda:0}
unset FV_DEVICE
[ -x "$foveal" ] || { echo "not run: no foveal command in $build"; exit 77; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
export FV_CACHE_DIR=${FV_CACHE_DIR:-$work/cache}
"$foveal" info --device "$device" >"$work/info" 2>&1 || { echo "not run: $(tail -n 1 "$work/info" | cut -c 1-120)"; exit 77; }
azure=bench/traces/azure_2023_conversation.csv

. tests/command.sh
# TEXT ARGUMENTS...: exit code 0, and a fixed text that the output holds.
shows() {
    local text=$1
    shift
    "$foveal" "$@" >"$work/out" 2>"$work/err" </dev/null
    local got=$?
    if [ $got -eq 0 ] && grep -qF -- "$text" "$work/out"; then ok; else bad "foveal $*: exit $got, wanted \"$text\""; fi
}
field() { tail -n 1 "$1" | grep -o "\"$2\":[^,}]*" | head -n 1 | cut -d : -f 2-; }

grep -E 'cuda|nvrtc|kernel cache' "$work/info"
check "the GPU's name and compute capability" grep -qE "$device .*, compute capability [0-9]+\.[0-9]+, [0-9]+ SMs" "$work/info"
check "the compiler, and where it was found" grep -qE 'nvrtc +(nvrtc )?1[2-9]\.[0-9]+' "$work/info"

# ---- replays against the definition ----
on=(replay --device "$device" --bounds off)
shows "0 wrong" "${on[@]}" --requests 24 --check 3 "$azure"
shows "0 wrong" "${on[@]}" --requests 6 --check 3 --kv-dtype fp8_e4m3 "$azure"
shows "0 wrong" "${on[@]}" --requests 4 --check 2 --model gemma-3-270m "$azure"
shows "0 wrong" "${on[@]}" --requests 3 --check 2 --model deepseek-v3-mla --layers 1 "$azure"
shows "0 wrong" "${on[@]}" --requests 4 --check 3 --heads 6/2 --dim 24 --dim-v 40 --page-size 5 --window 100 --layers 2 "$azure"
shows "of a streaming read" replay --device "$device" --requests 8 --check 0 "$azure"
printf '{"timestamp": %d, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, %d]}\n' 0 10 5 11 9 12 >"$work/shared.jsonl"
shows "0 wrong" "${on[@]}" --check 4 --sharing find "$work/shared.jsonl"

# ---- the same bits ----
digest() {
    local out=$1
    shift
    "$foveal" replay --device "$device" --invariant --digest --check 1 --bounds off --layers 2 --heads 4/2 --dim 128 --requests 8 --json "$out" "$@" "$azure" \
        >"$work/out" 2>"$work/err" || { bad "replay $*"; return; }
    field "$out" digest
}
whole=$(digest "$work/1")
check "a digest of 16 digits, not $whole" grep -qE '^"[0-9a-f]{16}"$' <<<"$whole"
check "the same digest with small steps" test "$whole" = "$(digest "$work/2" --token-budget 64)"
check "the same digest with another page size" test "$whole" = "$(digest "$work/3" --page-size 48)"
check "the same digest again" test "$whole" = "$(digest "$work/4")"

# ---- a bundle of what was compiled, and nothing compiled any more ----
shows "kernels" jit --bundle "$work/kernels.bundle" --from "$FV_CACHE_DIR"
export FV_KERNEL_PATH="$work/kernels.bundle" FV_DISABLE_JIT=1 FV_CACHE_DIR="$work/other"
shows "0 wrong" "${on[@]}" --requests 3 --check 2 "$azure"
check "the same digest from the bundle" test "$whole" = "$(digest "$work/5")"

finish
