#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_played_cli.sh BUILD -- replays on a GPU without one: the kernels' own texts are played on the CPU (tests/fake), every step is compared with the
# definition in double, and the invariant mode gives the same bits however a replay is scheduled. Then scenarios of checkstream that are small enough.
# Not run (77) without a C++ compiler, or where the build has a sanitizer: stacks that are switched confuse it.
set -u
build=$(cd "${1:?the build folder}" && pwd)
cd "$(dirname "$0")/.." || exit 1
foveal=$build/bin/foveal
[ -x "$foveal" ] || { echo "not run: no foveal command in $build"; exit 77; }
command -v c++ >/dev/null || { echo "not run: no C++ compiler"; exit 77; }
nm "$build/lib/libfoveal.a" 2>/dev/null | grep -qE '__(asan|tsan)_init' && { echo "not run: a build with a sanitizer"; exit 77; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cc -std=c11 -D_GNU_SOURCE -O1 -fPIC -w -c -o "$work/cuda.o" tests/fake/cuda.c || exit 1
c++ -std=c++17 -O1 -fno-strict-aliasing -ffp-contract=off -fPIC -w -Isrc/cuda -c -o "$work/simt.o" tests/fake/simt.cpp || exit 1
c++ -shared -o "$work/libcuda.so.1" "$work/cuda.o" "$work/simt.o" -ldl || exit 1
cc -std=c11 -D_GNU_SOURCE -O1 -shared -fPIC -w -o "$work/libnvrtc.so.13" tests/fake/nvrtc.c || exit 1
export FV_CUDA_DRIVER_PATH="$work/libcuda.so.1" FV_NVRTC_PATH="$work/libnvrtc.so.13" FV_CACHE_DIR="$work/cache" FAKE_PLAYER=tests/fake
unset FV_DEVICE FV_KERNEL_PATH FV_DISABLE_JIT

. tests/command.sh
# ARGUMENTS...: a replay in which everything that is compared is right.
right() {
    "$foveal" replay --device cuda:0 --bounds off --layers 2 "$@" >"$work/out" 2>"$work/err" </dev/null
    local got=$?
    if [ $got -eq 0 ] && grep -q "0 wrong" "$work/out"; then ok; else bad "replay $*: exit $got"; fi
}
digest() {
    "$foveal" replay --device cuda:0 --bounds off --layers 2 --heads 4/2 --dim 64 --invariant --digest --check 1 --json "$work/json" "$@" "$work/trace" \
        >"$work/out" 2>"$work/err" || { bad "replay $*"; return; }
    tail -n 1 "$work/json" | grep -o '"digest":"[0-9a-f]*"'
}

printf '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [%d]}\n' 0 40 3 1 1 23 2 2 2 70 2 3 >"$work/trace"
printf '{"timestamp": %d, "input_length": %d, "output_length": 2, "hash_ids": [1, %d]}\n' 0 520 7 1 523 8 2 530 9 >"$work/shared"
right --heads 4/2 --dim 64 --check 3 "$work/trace"
right --heads 4/2 --dim 64 --check 3 --kv-dtype fp8_e4m3 "$work/trace"
right --heads 6/2 --dim 24 --dim-v 40 --page-size 5 --window 10 --check 3 "$work/trace"
right --heads 4/2 --dim 64 --check 1 --sharing find "$work/shared"
whole=$(digest)
if [ -n "$whole" ] && [ "$whole" = "$(digest --token-budget 32)" ] && [ "$whole" = "$(digest --page-size 7)" ]; then ok; else bad "the same digest"; fi

for scenario in S013 S015 S026 S031 S089 S111; do
    "$build/bin/checkstream" --match $scenario >"$work/out" 2>"$work/err" && ok || bad "checkstream $scenario"
done

finish
