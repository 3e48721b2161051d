#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_played_attention.sh BUILD -- the attention kernel for GPUs without one: shapes of checkgpu on the driver and the compiler of tests/fake, which play
# the kernel's own text on the CPU. More of them, by hand: tests/test_played_attention.sh BUILD checkgpu --match WORD,..., or checkattn --device cuda:0 ...
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
command -v c++ >/dev/null || { echo "not run: there is no c++ here, which the kernel is compiled with"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cc -std=c11 -D_GNU_SOURCE -O1 -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so.1" tests/fake/cuda.c -ldl
cc -std=c11 -D_GNU_SOURCE -O1 -shared -fPIC -o "$folder/libnvrtc.so.13" tests/fake/nvrtc.c
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} FV_NVRTC_PATH=$folder/libnvrtc.so.13 FAKE_PLAYER=tests/fake
export FV_CACHE_DIR=${FV_CACHE_DIR:-$folder/cache}
unset FV_CUDA_DRIVER_PATH FV_KERNEL_PATH FV_DISABLE_JIT
if [ $# -gt 0 ]; then
    program=$1
    shift
    "$build/bin/$program" "$@"
else
    "$build/bin/checkgpu" --match decode_split8,prefill_mixed,e4m3_decode,invariant_split
    "$build/bin/checkattn" --device cuda:0 --extended --cases tests/cases/extended.txt --id x21
    "$build/bin/checkattn" --device cuda:0 --extended --cases tests/cases/extended.txt --id x44
    "$build/bin/checkattn" --device cuda:0 --extended --cases tests/cases/extended.txt --id x45
fi
