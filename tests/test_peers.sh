#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# foveal bench beside other libraries: absent ones are said to be absent; one that is there (tests/fake/torch.c) is timed and its numbers are compared with
# the definition, in each way and with heads repeated; one that computes something else, lacks functions or is no library is told. What the machine really
# has is run too. Not run (77) without a C compiler. Usage: test_peers.sh BUILD
set -u
build=$(cd "${1:?the build folder}" && pwd)
cd "$(dirname "$0")/.." || exit 1
foveal=$build/bin/foveal
[ -x "$foveal" ] || { echo "not run: no foveal command in $build"; exit 77; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cc -std=c11 -O2 -shared -fPIC -w -o "$work/libtorch_cpu.so" tests/fake/torch.c -lm || { echo "not run: no C compiler"; exit 77; }
mkdir "$work/empty" "$work/bad" "$work/other"
echo text >"$work/bad/libtorch_cpu.so"
for folder in cut half; do
    mkdir "$work/$folder"
    head -c 5000 "$work/libtorch_cpu.so" >"$work/$folder/libtorch_cpu.so"
done
cp "$work/libtorch_cpu.so" "$work/half/libggml.so"
head -c 5000 "$work/libtorch_cpu.so" >"$work/half/libggml-cpu.so"
echo 'int x;' | cc -shared -fPIC -o "$work/other/libtorch_cpu.so" -xc - || exit 1
export FV_NUM_THREADS=2
unset FV_DEVICE FV_CPU LD_LIBRARY_PATH

. tests/command.sh
tiny=(bench --seconds 0 --commit none --filter)

# What is really there: present or absent, neither is a failure.
expect 0 "torch" "${tiny[@]}" "torch decode b=1"
expect 0 "ggml" "${tiny[@]}" "ggml decode b=1 L=4096 32/8"

printf '#!/bin/sh\nexit 1\n' >"$work/empty/python3"       # which could name other folders
chmod +x "$work/empty/python3"
export PATH=$work/empty:$PATH
expect 0 "torch bf16 is absent: no libtorch_cpu.so" "${tiny[@]}" "torch decode b=1" --peers "$work/empty"
expect 0 "ggml q8_0 is absent: no libggml.so" "${tiny[@]}" "ggml decode b=1 L=4096 32/8 int8" --peers "$work/empty"
expect 0 "is absent: $work/bad/libtorch_cpu.so" "${tiny[@]}" "torch decode b=1" --peers "$work/bad"
expect 0 "is absent: $work/cut/libtorch_cpu.so is cut off" "${tiny[@]}" "torch decode b=1" --peers "$work/cut"
expect 0 "is absent: $work/half/libggml-cpu.so is cut off" "${tiny[@]}" "ggml decode b=1 L=4096 32/8 int8" --peers "$work/half"
LD_LIBRARY_PATH=$work/cut expect 0 "is absent: $work/cut/libtorch_cpu.so is cut off" "${tiny[@]}" "torch decode b=1"
LD_LIBRARY_PATH=$work/bad expect 0 "is absent: $work/bad/libtorch_cpu.so" "${tiny[@]}" "torch decode b=1"
LD_LIBRARY_PATH=$work expect 0 "torch 9.8.0 bf16" "${tiny[@]}" "torch decode b=1" --peers "$work/cut"
expect 0 "libtorch_cpu.so has no aoti_torch_create_tensor_from_blob" "${tiny[@]}" "torch decode b=1" --peers "$work/other"

expect 0 "torch 9.8.0 bf16 folded" "${tiny[@]}" "torch decode b=1" --peers "$work/empty:$work" --csv "$work/rows.csv"
check "four rows: times and errors, two ways" test "$(grep -c ',18a,torch decode b=1 L=4096 32/8' "$work/rows.csv")" -eq 4
# In double and rounded once: what rounding to bf16 does to numbers that are no powers of two, 2^-8 / sqrt 3 / 1.4.
check "the peer's numbers are right" awk -F, '/error/ && ($9 < 1000 || $9 > 2000) { bad = 1 } END { exit bad }' "$work/rows.csv"
FAKE_TORCH=refuse expect 0 "torch 9.8.0 bf16" "${tiny[@]}" "torch decode b=1" --peers "$work"
FAKE_TORCH=wrong expect 1 "have not computed the same" "${tiny[@]}" "torch decode b=1" --peers "$work"

printf '#!/bin/sh\nsleep 300 & echo $! >"%s/pid"; wait\n' "$work" >"$work/empty/python3"
expect 0 "is absent: no libtorch_cpu.so, and python3 gave no answer within 10 s" "${tiny[@]}" "torch decode b=1"
hangs() { grep -q ') [^ZX]' "/proc/$(cat "$work/pid")/stat" 2>"$work/err"; }     # a zombie waits for whoever became its parent
check "what hung is ended" eval '! hangs'
finish
