#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The foveal command on a GPU, without one: against the driver that keeps the books (tests/fake/cuda.c), whose kernels do nothing and take 1.5 ms a
# graph, and a compiler that makes nothing (tests/fake/no_nvrtc.c). What is seen here is that everything is placed, captured, timed and released. Not run
# (77) without a C compiler. Usage: test_cuda_cli.sh BUILD
set -u
build=$(cd "${1:?the build folder}" && pwd)
cd "$(dirname "$0")/.." || exit 1
foveal=$build/bin/foveal
[ -x "$foveal" ] || { echo "not run: no foveal command in $build"; exit 77; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cc -std=c11 -D_GNU_SOURCE -shared -fPIC -w -o "$work/libcuda.so.1" tests/fake/cuda.c -ldl || { echo "not run: no C compiler"; exit 77; }
cc -std=c11 -shared -fPIC -w -o "$work/libnvrtc.so.13" tests/fake/no_nvrtc.c || { echo "not run: no C compiler"; exit 77; }
export FV_CUDA_DRIVER_PATH="$work/libcuda.so.1" FV_NVRTC_PATH="$work/libnvrtc.so.13" FV_CACHE_DIR="$work/cache"
unset FV_DEVICE

. tests/command.sh
expect 0 "cuda:0 Fake 0, compute capability 9.0, 132 SMs" info --device cuda:0
expect 0 "bare cuLaunchKernelEx" bench --device cuda:0 --seconds 0 --filter launch
# 1.5 ms a graph: of 8 MiB a copy and six caches of 60 MiB between a copy's turns
expect 0 "62.50..62.50" bench --device cuda:0 --seconds 0 --filter "decode b=1 L=4096" --csv "$work/rows.csv" --commit none
[ "$(wc -l <"$work/rows.csv")" -eq 2 ] && [ "$(tail -n 1 "$work/rows.csv" | awk -F, '{ print NF }')" -eq 10 ] && ok || bad "a header and a row of ten columns"
# fv_rope before attention: its kernel is loaded before the capture, in which nothing may be
expect 0 "own rope before" bench --device cuda:0 --seconds 0 --filter "streaming window=1020 b=8"
expect 0 "copy of the same bytes" bench --device cuda:0 --seconds 0 --filter "of keys"
expect 0 "trees 16 x 4" bench --device cuda:0 --seconds 0 --filter "trees 16 x 4"
expect 0 "compile causal softcap window from disk" bench --device cuda:0 --seconds 0 --filter compile
check "1000 shapes ask for two kernels" grep -qE '^compile 1000 shapes of bf16 dims 128 +kernels +2\.00 ' "$work/out"
expect 0 "plan 256 x 4096 page 1 ids on the GPU" bench --device cuda:0 --seconds 0 --filter plan
expect 0 "left out: it needs 4.3 GB" bench --device cuda:0 --seconds 0 --filter "decode b=256 L=4096 32/8"
trace=bench/traces/azure_2023_conversation.csv
expect 0 "cuda:0, Fake 0; kernel attend_sm80" replay --device cuda:0 --check 0 --requests 2 --bounds off "$trace"
expect 0 "cuda:0, Fake 0; kernel attend_sm80" replay --device cuda:0 --check 0 --requests 2 --model deepseek-v3-mla --layers 1 "$trace"
# kernels that do nothing are noticed by the check
expect 1 "comparisons failed" replay --device cuda:0 --check 1 --requests 2 --bounds off "$trace"
expect 1 "FV_E_DEVICE" replay --device cuda:7 "$trace"

finish
