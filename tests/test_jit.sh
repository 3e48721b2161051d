#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# foveal jit without a GPU: compiles for GPUs that are not there, lists, bundles; and a bundle alone serves a machine that may not compile (played by
# tests/fake/cuda.c, whose device 0 is an sm_90a). What the compiler says of a kernel is seen with NVRTC where there is one; the rest with a compiler that
# makes nothing (tests/fake/no_nvrtc.c). Not run (77) without a C compiler. Usage: test_jit.sh BUILD
set -u
build=$(cd "${1:?the build folder}" && pwd)
cd "$(dirname "$0")/.." || exit 1
foveal=$build/bin/foveal
[ -x "$foveal" ] || { echo "not run: no foveal command in $build"; exit 77; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
export FV_CACHE_DIR="$work/cache"
unset FV_DEVICE FV_KERNEL_PATH FV_DISABLE_JIT FV_NVRTC_FLAGS

. tests/command.sh
# ---- what is asked ----
expect 0 "--bundle" jit --help
expect 2 "expected names like sm_80" jit --arch sm_70
expect 2 "holds \"nosuch\"" jit --match nosuch
expect 2 "only one of them" jit --list --bundle "$work/x"
expect 2 "goes with --bundle" jit --from "$work"
expect 2 "No such file" jit --list "$work/none"
echo 'heads 32/8 and more' >"$work/batch"
expect 2 "$work/batch:1: expected" jit "$work/batch"
expect 0 "0 entries" jit --list

# ---- what NVRTC says ----
"$foveal" jit --fresh --arch sm_90a --match copy_pages >"$work/out" 2>"$work/err"
if ! grep -q "no NVRTC" "$work/err"; then
    check "one kernel, with its registers and without spills" \
        grep -qE '^sm_90a +[0-9.]+ +[0-9]+ +0 +0 +[0-9]+ +nvrtc [0-9.]+ +copy_pages.cu: copy_pages$' "$work/out"
fi
expect 0 "0 entries" jit --list

# ---- compiling, the cache, the list ----
cc -std=c11 -shared -fPIC -w -o "$work/libnvrtc.so.13" tests/fake/no_nvrtc.c || { echo "not run: no C compiler"; exit 77; }
export FV_NVRTC_PATH="$work/libnvrtc.so.13"
expect 0 "copy_pages.cu" jit --arch sm_90a --match copy_pages
check "how much it is, before it begins" grep -q "compiling 1 program for sm_90a, 1 at once" "$work/err"
expect 0 "sm_90a          -" jit --arch sm_90a --match copy_pages
check "from the cache it takes no time" grep -qE '^sm_90a +- ' "$work/out"
expect 0 "1 entries" jit --list
expect 0 "nvrtc" jit --fresh --arch sm_86 --match copy_pages
expect 0 "1 entries" jit --list "$work/cache"
expect 1 "cannot be written" jit --arch sm_90a --match copy_pages --bundle "$work/no/such/folder/b"
check "nothing is left of it" test ! -e "$work/no"

# ---- a bundle of one problem's kernels, with those that every problem needs ----
printf 'heads 4/2\ndim 64\nvariant causal\nrequest rows=1 keys=64\n' >"$work/batch"
expect 0 "$work/kernels.bundle: " jit --arch sm_90a --bundle "$work/kernels.bundle" "$work/batch"
expect 0 "attend_sm80_bf16_bf16_d64_decode_causal" jit --list "$work/kernels.bundle"
check "both builds, with the invariant mode and without" test "$(grep -c ' attend_sm80_bf16_bf16_d64.*causal$' "$work/out")" -eq 4
entries=$(tail -n 1 "$work/out" | cut -d ' ' -f 1)
expect 0 "$work/again.bundle: $((entries)) kernels" jit --bundle "$work/again.bundle" --from "$work/cache"
check "the same bytes, however they were gathered" cmp "$work/kernels.bundle" "$work/again.bundle"
cp "$work/kernels.bundle" "$work/damaged.bundle"
size=$(stat -c %s "$work/damaged.bundle")
printf 'X' | dd of="$work/damaged.bundle" bs=1 seek=$((size - 100)) conv=notrunc 2>"$work/err"
expect 1 "1 entries are damaged" jit --list "$work/damaged.bundle"
head -c 100 "$work/kernels.bundle" >"$work/short.bundle"
expect 2 "cut short" jit --list "$work/short.bundle"

# ---- a machine that may not compile ----
cc -std=c11 -D_GNU_SOURCE -shared -fPIC -w -o "$work/libcuda.so.1" tests/fake/cuda.c -ldl || { echo "not run: no C compiler"; exit 77; }
export FV_CUDA_DRIVER_PATH="$work/libcuda.so.1" FV_DISABLE_JIT=1 FV_CACHE_DIR="$work/other"
serve=(replay --device cuda:0 --check 0 --bounds off --requests 1 --layers 1 --heads 4/2 --dim 64 bench/traces/azure_2023_conversation.csv)
expect 1 "FV_E_NOT_READY" "${serve[@]}"
FV_KERNEL_PATH="$work/kernels.bundle" expect 0 "1 served" "${serve[@]}"
FV_KERNEL_PATH="$work/none:$work/kernels.bundle" expect 0 "1 served" "${serve[@]}"
FV_KERNEL_PATH="$work/cache" expect 0 "1 served" "${serve[@]}"

finish
