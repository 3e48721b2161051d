#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The simple CUDA kernels without a GPU: checkops against a driver of our own that plays their texts on the CPU (tests/fake). Needs a C++ compiler and
# NVRTC; not run (77) without them. Usage: test_cuda_ops.sh BUILD
set -u
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
command -v c++ > "$folder/where" || { echo "not run: no C++ compiler"; exit 77; }
case $(nm "$build/lib/libfoveal.a" 2>/dev/null | grep -m1 __asan_init) in
*__asan_init*) echo "not run: stacks that are switched confuse the sanitizer"; exit 77 ;;
esac

cc -std=c11 -D_GNU_SOURCE -fPIC -w -c -o "$folder/cuda.o" tests/fake/cuda.c || exit 1
c++ -std=c++17 -O1 -fno-strict-aliasing -ffp-contract=off -fPIC -w -Isrc/cuda -c -o "$folder/simt.o" tests/fake/simt.cpp || exit 1
c++ -shared -o "$folder/libcuda.so.1" "$folder/cuda.o" "$folder/simt.o" -ldl || exit 1

export FV_CUDA_DRIVER_PATH="$folder/libcuda.so.1" FV_CACHE_DIR="$folder/cache"
"$build/bin/checkops" --count 120 > "$folder/out" 2>&1
status=$?
tail -20 "$folder/out"
"$build/bin/checkstream" --match "S094 direct" > "$folder/stale" 2>&1 || status=1
tail -20 "$folder/stale"
cat "$folder/stale" >> "$folder/out"
if [ $status -ne 0 ] && grep -qi "nvrtc" "$folder/out"; then exit 77; fi
exit $status
