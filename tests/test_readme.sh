#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_readme.sh BUILD -- the README's C example compiles without a warning and computes what it says; the files that it points to exist, every page of docs/
# is among them, and the texts of variants in docs/variants.md are those of examples/variants.
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
check "the example runs" eval '"$tmp/example" >"$tmp/out"'
check "the example prints the two means: $(cat "$tmp/out")" test "$(cat "$tmp/out")" = "2 6"
for page in docs/*.md docs/kernels/*.md; do
    check "README.md leads to $page" grep -qF "]($page)" README.md
done
page=$(cat docs/variants.md)
for name in alibi sigmoid image_prefix; do
    text=$(sed -n '/^FV_META/,$p' "examples/variants/$name.c")
    check "docs/variants.md has the whole text of $name" test "${#text}" -gt 0 -a "${page/"$text"/}" != "$page"
done
for file in $(grep -oE '\]\([^)#:]+\)' README.md CONTRIBUTING.md DESIGN.md | sed 's/.*](\(.*\))/\1/' | sort -u); do
    check "$file exists" test -e "$file"
done
echo "$passed passed, $failed failed"
exit $((failed > 0))
