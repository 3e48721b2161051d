#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_python.sh BUILD -- the Python package as a user gets it: a wheel into a fresh environment (BUILD/python-env), its tests there, and an import by every
# other Python >= 3.11 that the machine has. 77: no Python, or its test tools cannot be had.
set -u -o pipefail
build=$(cd "${1:?build folder}" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env=$build/python-env

skip() {
    echo "not run: $1"
    exit 77
}

# The first Python that can load the module.
python=""
for name in python3 python3.11 python3.12 python3.13; do
    if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$name
        break
    fi
done
[[ $python ]] || skip "no Python >= 3.11 with venv"

if [[ ! -x $env/bin/python ]]; then
    "$python" -m venv "$env" || skip "no virtual environment can be made (Debian, Ubuntu: python3-venv)"
fi
if ! "$env/bin/python" -c 'import numpy, pytest, ml_dtypes, scikit_build_core, build' 2>/dev/null; then
    "$env/bin/python" -m pip install -q numpy pytest ml_dtypes scikit-build-core build >"$build/python-env.log" 2>&1 ||
        skip "numpy, pytest, ml_dtypes, scikit-build-core and build cannot be installed: $build/python-env.log"
fi

set -e
wheels=$build/python-wheels
rm -rf "$wheels"
# Of the tree as it is; the build folder is kept, so a second run compiles what changed.
"$env/bin/python" -m build --no-isolation --wheel -Cbuild-dir="$build/python-build" -o "$wheels" "$root" >"$build/python-wheel.log" 2>&1 || {
    tail -n 30 "$build/python-wheel.log"
    exit 1
}
ls "$wheels"
"$env/bin/python" -m pip install -q --no-deps --force-reinstall "$wheels"/foveal-*.whl
cd "$build"
"$env/bin/python" -m pytest -q -p no:cacheprovider "$root/python/tests"
"$env/bin/python" -m foveal info >/dev/null

# One module for every later version.
for name in python3.11 python3.12 python3.13 python3.14; do
    "$name" -c 'import sys' 2>/dev/null || continue
    PYTHONPATH=$(echo "$env"/lib/python3*/site-packages) "$name" -S -c '
import sys, foveal
p = foveal.Plan(foveal.Context("cpu"), foveal.Problem("f32", num_q_heads=1, dim_qk=8), max_requests=1, max_rows=1, max_kv_tokens=1)
p.update(foveal.Batch(lengths=[], kv_indptr=[0], num_requests=0))
print("imports in", sys.version.split()[0])'
done
