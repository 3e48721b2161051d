#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_cli.sh BUILD -- the foveal command as its user sees it: exit codes, messages with file and line, what the files it writes hold, and that
# a replay gives the same bits however it is scheduled.
set -u
cd "$(dirname "$0")/.." || exit 2
foveal=$(cd "${1:?the build folder}" && pwd)/bin/foveal
if [ ! -x "$foveal" ]; then
    echo "no foveal command in $1: built with FV_TOOLS=OFF?"
    exit 77
fi
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
export FV_NUM_THREADS=2
unset FV_DEVICE FV_CPU
passed=0 failed=0
azure=bench/traces/azure_2023_conversation.csv
mooncake=bench/traces/mooncake_conversation.jsonl
small=(--heads 4/2 --dim 64 --layers 2 --requests 6 --bounds off)

ok() { passed=$((passed + 1)); }
bad() {
    failed=$((failed + 1))
    echo "FAIL  $1"
    sed 's/^/      /' "$work/out" "$work/err" | head -n 20
}

# CODE TEXT ARGUMENTS...: exit code, and a fixed text that the output holds.
expect() {
    local code=$1 text=$2
    shift 2
    "$foveal" "$@" >"$work/out" 2>"$work/err" </dev/null
    local got=$?
    if [ $got -eq "$code" ] && cat "$work/out" "$work/err" | grep -qF -- "$text"; then ok; else bad "foveal $*: exit $got, wanted $code and \"$text\""; fi
}
# NAME COMMAND...: true or not.
check() {
    local name=$1
    shift
    if "$@"; then ok; else bad "$name"; fi
}
# LINES...: a trace in a file; the message must name it, the line, and what was expected.
malformed() {
    local line=$1 text=$2
    printf '%b' "$3" >"$work/trace"
    expect 2 "$work/trace:$line: expected $text" replay "$work/trace"
}
batch() {
    local line=$1 text=$2
    printf '%b' "$3" >"$work/batch"
    expect 2 "$work/batch:$line: expected $text" plan "$work/batch"
}
field() { tail -n 1 "$1" | grep -o "\"$2\":[^,}]*" | head -n 1 | cut -d : -f 2-; }

# ---- the command itself ----
expect 0 "foveal $(sed -n 's/.*project(foveal VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)" version
expect 0 "replay" help
expect 0 "--token-budget" help replay
expect 0 "--svg" plan --help
expect 2 'no command "nosuch"' nosuch
expect 2 "--nosuch: no such option" replay --nosuch
expect 2 "--layers: needs a value" replay --layers
expect 2 "usage: foveal COMMAND"

# ---- options ----
expect 2 "one trace file" replay
expect 2 "No such file" replay "$work/none.csv"
expect 2 "whole number from 1 to 1024" replay --layers 0 "$azure"
expect 2 "whole number from 1 to" replay --token-budget 12x "$azure"
expect 2 "llama-3.1-8b llama-3.1-70b" replay --model gpt "$azure"
expect 2 "llama-3.1-8b has 32" replay --layers 33 "$azure"
expect 2 "a multiple of the KV heads" replay --heads 32/5 "$azure"
expect 2 "to be like 32/8" replay --heads 32 "$azure"
expect 2 "expected one of: f32 f16 bf16" replay --dtype f64 "$azure"
expect 2 "FV_E_INVALID" info --cpu nosuch
FV_CUDA_DRIVER_PATH=/nowhere/libcuda.so.1 expect 1 "no NVIDIA driver: FV_CUDA_DRIVER_PATH=/nowhere/libcuda.so.1" replay --device cuda:0 "$azure"
FV_CUDA_DRIVER_PATH=/nowhere/libcuda.so.1 expect 1 "no NVIDIA driver" bench --device cuda:0

# ---- malformed traces ----
header='TIMESTAMP,ContextTokens,GeneratedTokens\n'
malformed 1 "the header" 'TIMESTAMP,ContextTokens\n'
malformed 1 "at least one request" ''
malformed 2 "at least one request" "$header"
malformed 2 "a time like" "${header}2023-11-16T18:15:46,1,1\n"
malformed 2 "a time like" "${header}2023-13-16 18:15:46,1,1\n"
malformed 3 "a whole number from 1 to 16777216 in column 2" "${header}2023-11-16 18:15:46.68,374,44\r\n2023-11-16 18:15:47,0,1\n"
malformed 2 "a whole number from 1 to 16777216 in column 2" "${header}2023-11-16 18:15:46,-5,1\n"
malformed 2 "a whole number from 0 to 16777216 in column 3" "${header}2023-11-16 18:15:46,5,99999999999999999999\n"
malformed 2 "the end of the line" "${header}2023-11-16 18:15:46,5,1,7\n"
malformed 3 "a timestamp that is not before" "${header}2023-11-16 18:15:46,5,1\n2023-11-16 18:15:45,5,1\n"
malformed 3 "a request, not an empty line" "${header}2023-11-16 18:15:46,5,1\n\n"
malformed 1 "one JSON object on the line" '{"timestamp": 0, "input_len\n'
malformed 1 '"input_length" to be' '{"timestamp": 0, "input_length": 5.5, "output_length": 1, "hash_ids": [0]}\n'
malformed 1 '"timestamp" to be' '{"input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
malformed 2 '"hash_ids" to be a list of 2 numbers' '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}\n'
malformed 1 '"hash_ids" to hold whole numbers' '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n'
malformed 1 'only timestamp, input_length' '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0], "x": 1}\n'

# ---- replays ----
# Prefixes in short: nine requests in three families of a system prompt and a document, one alone.
shared=$work/shared.jsonl
for i in 1 2 3 4 5 6 7 8 9; do
    printf '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [1, %d, %d]}\n' $((i * 50)) $((1030 + 17 * i)) $((3 + i)) $((10 + i % 3)) $((100 + i))
done >"$shared"
printf '{"timestamp": 500, "input_length": 700, "output_length": 20, "hash_ids": [900, 901]}\n' >>"$shared"
head -n 2 "$mooncake" >"$work/mooncake.jsonl"
expect 0 "4 served" replay "${small[@]}" --max-length 1100 --check 1 "$shared"
expect 2 "left out as too long" replay "${small[@]}" --max-length 10 "$shared"
expect 0 "2 served" replay "${small[@]}" --check 1 "$work/mooncake.jsonl"
expect 0 "of a streaming read" replay "${small[@]}" --requests 1 --bounds on "$azure"
for trace in "$azure" "$shared"; do
    expect 0 "6 served" replay "${small[@]}" "$trace"
done
expect 0 "0 wrong" replay "${small[@]}" --check 8 --dtype f32 "$azure"
for cache in bf16 fp8_e4m3 fp8_e5m2 int8; do
    expect 0 "0 wrong" replay "${small[@]}" --requests 3 --check 4 --kv-dtype $cache "$azure"
done
for model in gemma-3-270m smollm2-135m deepseek-v3-mla; do
    expect 0 "0 wrong" replay --model $model --layers $([ $model = gemma-3-270m ] && echo 6 || echo 1) --requests 2 --check 2 --bounds off "$azure"
done
expect 0 "0 wrong" replay --heads 6/2 --dim 24 --dim-v 40 --page-size 5 --window 100 --layers 2 --requests 4 --check 4 --bounds off "$azure"
large=$(sed -n 2,7p "$azure" | tr -d '\r' | awk -F, '$2 + $3 - 1 > 50 * 16 { n++ } END { print n + 0 }')
expect 0 "$((6 - large)) served, $large rejected" replay "${small[@]}" --pages 50 --check 4 "$azure"
expect 0 "6 served" replay "${small[@]}" --speed 100 --check 4 "$azure"

# A pool that is too small for all: requests wait, some give way, none is wrong, and the bits do not change.
digest() {
    local out=$1
    shift
    "$foveal" replay --invariant --digest --check 1 --bounds off --json "$out" "$@" >"$work/out" 2>"$work/err" || { bad "replay $*"; return; }
    field "$out" digest
}
few=(--heads 4/2 --dim 64 --layers 2 --requests 10)
whole=$(digest "$work/1" "${few[@]}" "$azure")
check "a digest of 16 digits, not $whole" grep -qE '^"[0-9a-f]{16}"$' <<<"$whole"
check "the same digest with a small pool" test "$whole" = "$(digest "$work/2" "${few[@]}" --pages 92 "$azure")"
growing=$work/growing.csv               # short inputs, long outputs: all get in, then the pool is full
{
    echo TIMESTAMP,ContextTokens,GeneratedTokens
    for i in 1 2 3 4 5 6; do echo "2023-11-16 18:15:4$i,$((30 + i)),$((290 + 7 * i))"; done
} >"$growing"
roomy=$(digest "$work/10" "${few[@]}" "$growing")
check "the same digest when requests give way" test "$roomy" = "$(digest "$work/11" "${few[@]}" --pages 64 "$growing")"
check "requests gave way: $(field "$work/11" preempted)" test "$(field "$work/11" preempted)" -gt 0
check "the same digest with small steps" test "$whole" = "$(digest "$work/3" "${few[@]}" --token-budget 64 "$azure")"
check "the same digest with another page size" test "$whole" = "$(digest "$work/4" "${few[@]}" --page-size 48 "$azure")"
check "the same digest with one thread" test "$whole" = "$(digest "$work/5" "${few[@]}" --threads 1 "$azure")"
check "another digest with another seed" test "$whole" != "$(digest "$work/6" "${few[@]}" --seed 2 "$azure")"
hits=$(digest "$work/7" "${few[@]}" "$shared")
check "prefixes are found" test "$(field "$work/7" hit_tokens)" -gt 0
check "the same digest without the prefix cache" test "$hits" = "$(digest "$work/8" "${few[@]}" --prefix off "$shared")"
check "the same digest when prefixes are evicted" test "$hits" = "$(digest "$work/12" "${few[@]}" --pages 100 "$shared")"
check "prefixes were evicted" test "$(field "$work/12" evicted_pages)" -gt 0
check "no prefixes with --prefix off" test "$(field "$work/8" hit_tokens)" -eq 0
check "the same digest with sharing" test "$hits" = "$(digest "$work/9" "${few[@]}" --sharing find "$shared")"

# ---- what it writes ----
"$foveal" replay "${small[@]}" --json - --report "$work/page.html" "$azure" >"$work/out" 2>"$work/err"
steps=$(grep -c '^{"type":"step",' "$work/out")
check "one JSON line a step and a summary, nothing else" test "$(wc -l <"$work/out")" -eq $((steps + 1))
check "steps" test "$(field "$work/out" steps)" -eq "$steps"
check "rows: every token but the last of each request" test "$(field "$work/out" rows)" -eq \
    "$(sed -n 2,7p "$azure" | tr -d '\r' | awk -F, '{ n += $2 + ($3 ? $3 : 1) - 1 } END { print n }')"
check "the page is whole" grep -q '</html>' "$work/page.html"
check "the page follows light and dark" grep -q 'prefers-color-scheme:dark' "$work/page.html"
check "the page needs no network" test "$(grep -cE '(src|href)="?(https?:)?//' "$work/page.html")" -eq 0
check "charts" test "$(grep -c '<figure' "$work/page.html")" -ge 5
check "hover texts" test "$(grep -c '<title>' "$work/page.html")" -ge 100
expect 1 "no/such/folder" replay "${small[@]}" --requests 1 --report "$work/no/such/folder.html" "$azure"

# ---- plan ----
batch 1 "at least one request" ''
batch 1 "heads, dim, dtype" 'rows 1\n'
batch 2 "heads only once" 'heads 4/2\nheads 4/2\n'
batch 1 "heads Q/KV" 'heads 4/3\n'
batch 1 "dim N" 'dim 577\n'
batch 2 "rows=N, keys=N" 'dim 64\nrequest rows=1 key=3\n'
batch 1 "request rows=N keys=N" 'request rows=1\n'
batch 2 "at least 32 keys" 'run a keys=32\nrequest rows=1 keys=31 begins=a\n'
batch 1 "keys to be a multiple of the page size" 'run a keys=33\nrequest rows=1 keys=64 begins=a\n'
batch 1 "PARAMETER=NUMBER" 'variant window left=x\nrequest rows=1 keys=1\n'
printf 'variant window nosuch=1\nrequest rows=1 keys=1\n' >"$work/batch"
expect 2 "nosuch" plan "$work/batch"
printf 'variant nosuch\nrequest rows=1 keys=1\n' >"$work/batch"
expect 2 "nosuch" plan "$work/batch"
for sharing in off find; do
    expect 0 "worker" plan --sharing $sharing --workers 4 tests/cli/mixed.txt
done
expect 0 "worker" plan --invariant tests/cli/mixed.txt
expect 0 "<svg" plan --svg - tests/cli/mixed.txt
check "the picture is whole" grep -q '</svg>' "$work/out"

# ---- info and bench ----
expect 0 "bf16" info
expect 0 "causal" info --markdown
expect 0 "{" info --json
expect 2 "only one of them" info --json --markdown
expect 0 "decode b=8" bench --list
expect 0 "decode b=256 L=4096 32/8" bench --list --device cuda:0
expect 2 "no case's name holds" bench --filter nosuch
expect 0 "plan 256 decodes" bench --filter "plan 256" --seconds 0.05 --csv "$work/rows.csv" --commit none
check "a CSV header and a row" test "$(wc -l <"$work/rows.csv")" -eq 2
check "ten columns" test "$(tail -n 1 "$work/rows.csv" | awk -F, '{ print NF }')" -eq 10

# ---- variant ----
expect 0 "--with NAMES" variant --help
expect 2 "takes one file" variant
expect 1 "nosuch.c" variant nosuch.c
expect 2 'no variant "nosuch"' variant --with nosuch examples/variants/alibi.c
printf 'FV_META("x")\nFV_SCORE { return t; }\n' >"$work/bad.c"
printf 'FV_META("x")\n\nFV_SCOR { return s; }\n' >"$work/worse.c"
printf 'FV_META("x")\n#ifdef FV_SPEC\nFV_SCORE { return s + t; }\n#else\nFV_SCORE { return s; }\n#endif\n' >"$work/spec.c"
printf 'FV_META("x")\n#ifdef FV_SPEC\nFV_SCORE { return s; }\n#else\nFV_SCORE { return s * 2.0f; }\n#endif\n' >"$work/wrong.c"
export FV_CACHE_DIR=$work/kernels
expect 1 "$work/worse.c:3:" variant "$work/worse.c"
if FV_CC=${FV_CC:-} "$foveal" variant --seconds 0 --cpu scalar examples/variants/alibi.c >"$work/out" 2>&1 || ! grep -q "C compiler" "$work/out"; then
    expect 0 "8 passed, 0 failed" variant --seconds 0 --cpu scalar examples/variants/alibi.c
    expect 0 "my_softcap: cap * tanh" variant --seconds 0.01 --cpu scalar --with none examples/variants/softcap.c
    expect 0 "x " variant --seconds 0.01 --threads 2 --with window,sink --name streams examples/variants/streaming.c
    expect 1 "$work/bad.c:2:" variant "$work/bad.c"
    expect 1 "$work/spec.c:3:" variant "$work/spec.c"
    expect 1 "definition says" variant --seconds 0 "$work/wrong.c"
fi
FV_CACHE_DIR=$work/none FV_CC=/nonexistent expect 1 "FV_CC=/nonexistent is no program" variant examples/variants/alibi.c

echo "$passed passed, $failed failed"
exit $((failed > 0))
