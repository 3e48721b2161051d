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
unset FV_DEVICE FV_CPU FV_LOG
azure=bench/traces/azure_2023_conversation.csv
mooncake=bench/traces/mooncake_conversation.jsonl
small=(--heads 4/2 --dim 64 --layers 2 --requests 6 --bounds off)

. tests/command.sh
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
expect 2 "/dev/zero: more than 1 MiB" variant /dev/zero
small() { (ulimit -v 400000 && "$foveal" plan /dev/zero) 2>&1 | grep -qF "/dev/zero: more than 256 MiB"; }      # not twice what is read
grep -qa __asan_init "$foveal" || check "no more memory is asked for than is read" small
expect 2 'no command "nosuch"' nosuch
expect 2 "--nosuch: no such option" replay --nosuch
expect 2 "--layers: needs a value" replay --layers
expect 2 "usage: foveal COMMAND"
expect 2 "--p: ambiguous: --page-size, --pages, --prefix" replay --p 3 "$azure"
expect 2 "--digest takes no value" replay --digest=1 "$azure"
expect 2 "-x: no such option" replay -x "$azure"

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
for alone in --dim --dim-v --window; do expect 2 "$alone goes with --heads" replay $alone 64 "$azure"; done
expect 2 "--heads and --model: only one of them" replay --heads 8/2 --model smollm2-135m "$azure"
expect 2 "--threads 1025: expected a whole number from 1 to 1024" info --threads 1025
for threads in abc -3 0 99999; do FV_NUM_THREADS=$threads expect 2 "FV_NUM_THREADS=$threads: expected a whole number from 1 to 1024" info; done
FV_NUM_THREADS=abc expect 0 "bf16" info --threads 1
FV_LOG=banana expect 2 "FV_LOG=banana: expected one of: off error warn info debug" info
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
for day in 2023-02-30 2023-02-29 1900-02-29 2023-04-31 2023-11-00; do
    malformed 2 "a time like" "${header}$day 18:15:46,5,1\n"
done
malformed 1 "numbers below 2^63 (one is too large)" '{"timestamp": 11111111111111111111111, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
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
expect 1 "left out as too long" replay "${small[@]}" --max-length 10 "$shared"
expect 0 "2 served" replay "${small[@]}" --check 1 "$work/mooncake.jsonl"
tiny=(--heads 4/2 --dim 64 --layers 1 --requests 2 --bounds off --max-length 1100 --check 0)
for name in azure shared; do                            # on standard input, behind a mark of UTF-8, the last day of February
    trace=${!name}
    { printf '\xef\xbb\xbf' && sed 's/2023-11-16/2024-02-29/' "$trace"; } >"$work/marked"
    expect 0 "2 served" replay "${tiny[@]}" "$work/marked"
    "$foveal" replay "${tiny[@]}" - <"$trace" >"$work/out" 2>"$work/err"
    check "a replay of standard input: $name" grep -q "^standard input (" "$work/out"
done
"$foveal" replay "${tiny[@]}" - <<<nonsense >"$work/out" 2>"$work/err"
check "a fault of standard input is named" grep -q "standard input:1: expected the header" "$work/err"
expect 0 "bf16, 1 layer; cpu, 1 thread; kernel" replay "${tiny[@]}" --threads 1 "$shared"
expect 0 "bf16, 1 of 32 layers; cpu, 2 threads; kernel" replay --layers 1 --requests 1 --check 0 --bounds off --max-length 1100 "$shared"
expect 1 "no request was served" replay "${tiny[@]}" --pages 1 "$shared"
check "no kernel is named where none ran" test "$(grep -c kernel "$work/out")" -eq 0
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
# What is written is none of what is read, and no two things share a file.
cp "$shared" "$work/own.jsonl"
ln "$work/own.jsonl" "$work/link.jsonl"
ln -s own.jsonl "$work/soft.jsonl"
for name in own link soft; do
    expect 2 "is the same file as the trace" replay "${tiny[@]}" --json "$work/$name.jsonl" "$work/own.jsonl"
    expect 2 "is the same file as the trace" replay "${tiny[@]}" --report "$work/$name.jsonl" "$work/own.jsonl"
done
"$foveal" replay "${tiny[@]}" --json "$work/own.jsonl" - <"$work/own.jsonl" >"$work/out" 2>"$work/err"
check "nor on standard input" grep -q "is the same file as the trace" "$work/err"
check "the trace is as it was" cmp -s "$shared" "$work/own.jsonl"
expect 2 "is the same file as --json" replay "${tiny[@]}" --json "$work/new" --report "$work/./new" "$shared"
expect 2 "is the same file as --json" replay "${tiny[@]}" --json - --report - "$shared"
expect 2 "is the same file as --csv" bench --list --csv "$work/new" --json "$work/new"
expect 2 "is the same file as the batch" plan --svg tests/cli/mixed.txt tests/cli/mixed.txt
expect 2 "is the same file as the batch" jit --bundle tests/cli/mixed.txt tests/cli/mixed.txt
check "nothing new was left behind" test ! -e "$work/new"
expect 1 "no/such/folder" replay "${small[@]}" --requests 1 --report "$work/no/such/folder.html" "$azure"
check "before the replay, not behind it" test ! -s "$work/out"
expect 1 "no/such/folder" jit --bundle "$work/no/such/folder"
"$foveal" replay "${tiny[@]}" --json - "$shared" >&- 2>"$work/err"
check "exit code 1 with a closed standard output" test $? -eq 1
check "it is named" grep -q "standard output could not be written" "$work/err"
"$foveal" replay "${tiny[@]}" --json "$work/lines" "$shared" >&- 2>"$work/err"
check "no table in a file that took the number of standard output" test "$(grep -cv '^{' "$work/lines")" -eq 0

# ---- plan ----
batch 1 "at least one request" ''
batch 1 "heads, dim, dtype" 'rows 1\n'
batch 2 "heads only once" 'heads 4/2\nheads 4/2\n'
batch 1 "heads Q/KV" 'heads 4/3\n'
batch 1 "dim N" 'dim 577\n'
batch 2 "rows=N, keys=N" 'dim 64\nrequest rows=1 key=3\n'
for keys in -1 99999999999999999999 67108864 2x; do batch 1 "keys to be a whole number from 0 to 16777216, not \"$keys\"" "request rows=1 keys=$keys\n"; done
for count in 0 65537; do batch 1 "count to be a whole number from 1 to 65536, not \"$count\"" "request rows=1 keys=1 count=$count\n"; done
batch 1 "rows to be a whole number from 0 to 4194304" 'request rows=4194305 keys=1\n'
batch 1 "keys=N only once" 'request rows=1 keys=1 keys=1\n'
batch 1 'begins= one of the runs named above; there is no run "nope"' 'request rows=1 keys=1 begins=nope\n'
batch 1 "request rows=N keys=N" 'request rows=1\n'
batch 2 "at least 32 keys" 'run a keys=32\nrequest rows=1 keys=31 begins=a\n'
batch 1 "keys to be a multiple of the page size" 'run a keys=33\nrequest rows=1 keys=64 begins=a\n'
batch 1 "PARAMETER=NUMBER" 'variant window left=x\nrequest rows=1 keys=1\n'
# What the library refuses is told with the line that says it.
refused() {                             # LINE TEXT STATEMENTS COMMAND...
    local line=$1 text=$2
    printf '%b' "$3\nrequest rows=1 keys=1\n" >"$work/batch"
    shift 3
    expect 2 "foveal: $work/batch:$line: $text" "$@" "$work/batch"
}
for command in plan "jit --arch sm_90a"; do
    refused 1 'problem.variants[0]: there is no variant "nosuch"' 'variant nosuch' $command
    refused 2 "problem.variants[1].args.foo: no variant" 'variant causal\nvariant softcap cap=3 foo=1' $command
    refused 2 "problem.variants[0].args.left: 'left' is -1" 'dim 64\nvariant window left=-1' $command
    refused 1 "problem.variants[0].args.left: 'left' is 2.5" 'variant window left=2.5' $command
    refused 1 'problem.q is "int8"' 'dtype int8' $command
    refused 3 'problem.k is "foo"' 'dim 64\n\nkv-dtype foo' $command
    refused 1 'problem.dim_qk is 24' 'dim 24\nkv-dtype fp4_e2m1' $command
done
refused 2 "tree needs 'parents'" 'variant causal\nvariant tree' plan
refused 3 "mask needs 'bits'" 'variant causal\n# a comment\nvariant mask\nvariant softcap cap=3' plan
printf '\xef\xbb\xbfheads 4/4\nrequest rows=5 keys=3\n' >"$work/batch"
expect 0 "1 request, 5 rows" plan "$work/batch"        # behind a mark of UTF-8; more rows than keys
"$foveal" plan - <"$work/batch" >"$work/out" 2>"$work/err"
check "a batch on standard input" grep -q "1 request, 5 rows" "$work/out"
expect 2 "--splits 4097: expected a whole number from 1 to 4096" plan --splits 4097 "$work/batch"
expect 2 "--chunk 100: expected a multiple of 64" plan --invariant --chunk 100 "$work/batch"
expect 2 "--chunk goes with --invariant" plan --chunk 128 "$work/batch"
expect 2 'not ""' jit --arch ,
expect 2 "at most 16 names" jit --arch "sm_80$(printf ',sm_80%.0s' {1..16})"
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
expect 0 "plan 256 decodes" bench --filter "plan 256" --list
check "--list names what --filter chooses" [ "$(wc -l <"$work/out")" -eq 1 ]
for wrong in "--filter nosuch" "--cpu nosuch" "--seconds x" "--list extra"; do           # a file that is there is as it was, a new one is not made
    echo old >"$work/old.json"
    echo old >"$work/old.csv"
    read -ra arguments <<<"$wrong"
    expect 2 "foveal: " bench "${arguments[@]}" --json "$work/old.json" --csv "$work/old.csv"
    check "bench $wrong leaves --json" test "$(cat "$work/old.json")" = old
    check "bench $wrong leaves --csv" test "$(cat "$work/old.csv")" = old
    expect 2 "foveal: " bench "${arguments[@]}" --json "$work/no.json" --csv "$work/no.csv"
    check "bench $wrong makes no file" test ! -e "$work/no.json" -a ! -e "$work/no.csv"
done
echo old >"$work/old.json"
expect 2 "foveal: " replay "${tiny[@]}" --cpu nosuch --json "$work/old.json" "$shared"
check "replay leaves --json" test "$(cat "$work/old.json")" = old

# ---- bytes that a terminal acts upon ----
esc=$'\033[31mred\a' c1=$'\302\233' latin=$'caf\351' umlaut=$'gr\303\274n'
expect 2 'no command "\x1b[31mred\x07"' "$esc"
expect 2 '\xc2\x9b: expected one of' replay --dtype "$c1" "$azure"
expect 2 "caf\\xe9: No such file" replay "$latin"
expect 2 "$umlaut: No such file" replay "$umlaut"
echo "heads 4" >"$work/$esc"
expect 2 "\\x1b[31mred\\x07:1: expected heads" plan "$work/$esc"
printf '// %s\nfloat %s;\n' "$esc" "$esc" >"$work/$esc.h"
expect 2 "\\x1b[31mred\\x07.h:" variant "$work/$esc.h"
check "no byte of it comes through" test "$(cat "$work/out" "$work/err" | tr -d -c '\033\007' | wc -c)" -eq 0
cp "$shared" "$work/$esc.jsonl"
expect 0 "\\x1b[31mred\\x07.jsonl (" replay "${tiny[@]}" "$work/$esc.jsonl"
expect 0 "plan 256 decodes" bench --filter "plan 256" --seconds 0.05 --csv "$work/rows.csv" --commit none
check "a CSV header and a row" test "$(wc -l <"$work/rows.csv")" -eq 2
check "ten columns" test "$(tail -n 1 "$work/rows.csv" | awk -F, '{ print NF }')" -eq 10

# ---- variant ----
expect 0 "--with NAMES" variant --help
expect 2 "takes one file" variant
expect 2 "nosuch.c" variant nosuch.c
printf 'FV_SCORE { return s; }\n' >"$work/bare.c"
expect 2 'FV_META("formula") is missing' variant "$work/bare.c"
"$foveal" variant - <"$work/bare.c" >"$work/out" 2>"$work/err"
check "a fault of a text on standard input: $(cat "$work/err")" grep -q "^standard input:[0-9]*: FV_META" "$work/err"
printf '\xef\xbb\xbfFV_SCORE { return s; }\n' >"$work/bare.c"
expect 2 'bare.c:2: FV_META("formula") is missing' variant "$work/bare.c"
expect 2 "--with names causal twice" variant --with causal,window,causal examples/variants/alibi.c
expect 2 'no variant "nosuch"' variant --with nosuch examples/variants/alibi.c
printf 'FV_META("x")\nFV_SCORE { return t; }\n' >"$work/bad.c"
printf 'FV_META("x")\n\nFV_SCOR { return s; }\n' >"$work/worse.c"
printf 'FV_META("x")\n#ifdef FV_SPEC\nFV_SCORE { return s + t; }\n#else\nFV_SCORE { return s; }\n#endif\n' >"$work/spec.c"
printf 'FV_META("x")\n#ifdef FV_SPEC\nFV_SCORE { return s; }\n#else\nFV_SCORE { return s * 2.0f; }\n#endif\n' >"$work/wrong.c"
printf 'FV_META("x")\nFV_SCORE { return v_log(-v_abs(s) - 1.0f); }\n' >"$work/nan.c"
printf 'FV_META("x")\nFV_VISIBLE { return v_ilt(at.k_pos, v_seti(1000)); }\n' >"$work/early.c"
printf 'FV_META("x")\nFV_VISIBLE { return v_ilt(at.k_pos, v_seti(0)); }\n' >"$work/blind.c"
export FV_CACHE_DIR=$work/kernels
expect 2 "$work/worse.c:3:" variant "$work/worse.c"
if FV_CC=${FV_CC:-} "$foveal" variant --seconds 0 --cpu scalar examples/variants/alibi.c >"$work/out" 2>&1 || ! grep -q "C compiler" "$work/out"; then
    expect 0 "8 passed, 0 failed" variant --seconds 0 --cpu scalar examples/variants/alibi.c
    expect 0 "my_softcap: cap * tanh" variant --seconds 0.01 --cpu scalar --with none examples/variants/softcap.c
    expect 0 "x " variant --seconds 0.01 --threads 2 --with window,sink --name streams examples/variants/streaming.c
    expect 2 "$work/bad.c:2:" variant "$work/bad.c"
    expect 2 "$work/spec.c:3:" variant "$work/spec.c"
    expect 0 "7 passed, 0 failed, 1 in which no row sees a key" variant --seconds 0 --cpu scalar "$work/early.c"
    expect 1 "0 passed, 0 failed, 8 in which no row sees a key" variant --seconds 0 --cpu scalar --with none "$work/blind.c"
    FV_CACHE_DIR=$work/of_the_cpu expect 0 "8 passed, 0 failed" variant --seconds 0 --cpu scalar examples/variants/alibi.c
    expect 1 "holds no kernel of a GPU; variants of the CPU are in no bundle" jit --from "$work/of_the_cpu" --bundle "$work/bundle"
    expect 1 "definition says" variant --seconds 0 "$work/wrong.c"
    expect 1 "the definition gives no number" variant --seconds 0 --cpu scalar "$work/nan.c"
fi
FV_CACHE_DIR=$work/none FV_CC=/nonexistent expect 1 "FV_CC=/nonexistent is no program" variant examples/variants/alibi.c

finish
