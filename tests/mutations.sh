#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# mutations.sh [NAME...] -- do the tests notice? Every tests/mutations/NAME.sed is a deliberate fault: a sed script whose comments say
#     # what:   the fault, in words
#     # file:   the source that it changes
#     # run:    the program in build/bin, with arguments, that must fail because of it
# A copy of the tree is built; there each program must pass as it is, and fail with each fault. A fault that changes nothing, or does
# not compile, counts as missed.
set -u
source=$(cd "$(dirname "$0")/.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
jobs=${JOBS:-2}
failed=0 passed=0

[ $# -gt 0 ] || set -- $(cd "$source/tests/mutations" && ls | sed -n 's/\.sed$//p')
[ $# -gt 0 ] || { echo "there are no mutations"; exit 1; }
field() { sed -n "s/^# $2: *//p" "$source/tests/mutations/$1.sed"; }

verdict() {                             # ok | FAIL, TEXT
    if [ "$1" = ok ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    printf '%-5s %s\n' "$1" "$2"
}
build() { cmake --build "$copy/build" -j"$jobs" --target "$1" >"$copy/log" 2>&1; }
# The program of a command line, in the copy; a fault may also hang it.
play() { (cd "$copy" && timeout 600 build/bin/$1 >"$copy/log" 2>&1); }

for dir in CMakeLists.txt LICENSE cmake include src tests cli examples; do cp -r "$source/$dir" "$copy/"; done
find "$copy/src/cpu/isa" -name '*.h' ! -name scalar.h -delete      # one CPU level: a fault is compiled once
if ! cmake -S "$copy" -B "$copy/build" -DCMAKE_C_FLAGS_RELEASE="-O1" -DFV_TOOLS=OFF -DFV_EXAMPLES=OFF >"$copy/log" 2>&1; then
    cat "$copy/log"
    exit 1
fi

declare -A sound                        # programs that pass without a fault
for name in "$@"; do
    run=$(field "$name" run)
    [ -n "$run" ] || { verdict FAIL "$name: there is no tests/mutations/$name.sed with a run line"; continue; }
    [ -z "${sound[$run]:-}" ] || continue
    if build "${run%% *}" && play "$run"; then
        sound[$run]=yes
    else
        sound[$run]=no
        verdict FAIL "$run does not pass without a fault"
        tail -n 12 "$copy/log" | sed 's/^/      /'
    fi
done

for name in "$@"; do
    run=$(field "$name" run) file=$(field "$name" file)
    [ -n "$run" ] && [ "${sound[$run]}" = yes ] || continue
    if ! sed -E -f "$source/tests/mutations/$name.sed" "$source/$file" >"$copy/$file" || cmp -s "$source/$file" "$copy/$file"; then
        verdict FAIL "$name: changes nothing in $file"
    elif ! build "${run%% *}"; then
        verdict FAIL "$name: does not compile"
        grep -m 3 error "$copy/log" | sed 's/^/      /'
    elif play "$run"; then
        verdict FAIL "$name: not noticed by $run"
    else
        verdict ok "$name: $(field "$name" what)"
    fi
    cp "$source/$file" "$copy/$file"
done
echo "$passed passed, $failed failed"
exit $((failed > 0))
