#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs/info.md is what `foveal info --markdown` prints, but for the sections about the machine. Usage: test_info.sh BUILD [--update]
set -u
build=$(cd "${1:?the build folder}" && pwd)
cd "$(dirname "$0")/.." || exit 1
foveal=$build/bin/foveal
[ -x "$foveal" ] || { echo "not run: no foveal command in $build"; exit 77; }
text=$("$foveal" info --markdown --device cpu | awk '/^## / { out = $0 != "## machine" && $0 != "## cpu levels" } out') || exit 1
page="# What this library has

Written by \`tests/test_info.sh BUILD --update\` from \`foveal info --markdown\`, which also tells about the machine it runs on.

$text"
if [ "${2:-}" = --update ]; then
    printf '%s\n' "$page" >docs/info.md
    exit
fi
for name in $(grep -rhoE '(env|getenv)\("FV_[A-Z_]+"' src cli | grep -oE 'FV_[A-Z_]+' | sort -u); do
    grep -q "^| $name |" <<<"$page" || { echo "foveal info does not name the environment variable $name"; exit 1; }
done
if diff -u docs/info.md <(printf '%s\n' "$page"); then
    echo "1 passed, 0 failed"
else
    echo "docs/info.md is not what foveal info --markdown prints; tests/test_info.sh BUILD --update writes it"
    exit 1
fi
