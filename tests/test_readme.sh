#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_readme.sh BUILD -- the README's C example compiles without a warning and runs; the files that it points to exist.
set -u
cd "$(dirname "$0")/.." || exit 2
build=${1:?usage: test_readme.sh BUILD}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=0 passed=0

check() {                               # WHAT COMMAND...
    local what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL  $what"
    fi
}

sed -n '/^```c$/,/^```$/p' README.md | sed '/^```/d' >"$tmp/example.c"
check "has an example" test -s "$tmp/example.c"
check "the example compiles" "${CC:-cc}" -std=c11 -Wall -Wextra -Wpedantic -Werror -Iinclude "$tmp/example.c" "$build/lib/libfoveal.a" -lm -ldl -pthread \
    -o "$tmp/example"
check "the example runs" "$tmp/example"
for file in $(grep -oE '\]\([^)#:]+\)' README.md CONTRIBUTING.md DESIGN.md | sed 's/.*](\(.*\))/\1/' | sort -u); do
    check "$file exists" test -e "$file"
done
echo "$passed passed, $failed failed"
exit $((failed > 0))
