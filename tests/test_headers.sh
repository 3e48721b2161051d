#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_headers.sh -- every public header alone, twice in a row, as C11 and as C++17, with every compiler that is there, warnings as errors.
set -u
cd "$(dirname "$0")/.." || exit 2
failed=0 passed=0

try() {                                 # COMPILER LANGUAGE STANDARD HEADER
    command -v "$1" >/dev/null || return
    local extra=
    [ "$2" = c ] && extra="-Wstrict-prototypes -Wmissing-prototypes"
    if printf '#include <%s>\n#include <%s>\n' "$4" "$4" |
        "$1" -x "$2" -std="$3" -Wall -Wextra -Wpedantic -Wshadow $extra -Werror -Iinclude -fsyntax-only -; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL  $4 with $1 -std=$3"
    fi
}

for path in include/foveal/*.h; do
    header=${path#include/}
    for cc in gcc clang; do try $cc c c11 "$header"; done
    for cxx in g++ clang++; do try $cxx c++ c++17 "$header"; done
done
[ "$passed" -gt 0 ] || failed=$((failed + 1))
echo "$passed passed, $failed failed"
exit $((failed > 0))
