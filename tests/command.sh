# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# command.sh -- sourced by the tests of the foveal command: what they count and how they ask. They have set $foveal, and $work, a folder of their own.
passed=0 failed=0

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
# The last line, and the exit code.
finish() {
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
}
