#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_package.sh BUILD -- installs BUILD into a temporary prefix, moves it, and looks at it from outside: what the libraries export and need, and
# whether a CMake project and a pkg-config project build against it and run, shared and static.
set -u
source=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "${1:?usage: test_package.sh BUILD}" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=0 passed=0

check() {                               # WHAT COMMAND...
    local what=$1
    shift
    if "$@" >"$tmp/out" 2>&1; then
        passed=$((passed + 1))
        echo "ok    $what"
    else
        failed=$((failed + 1))
        echo "FAIL  $what"
        sed 's/^/      /' "$tmp/out"
    fi
}
finish() { echo "$passed passed, $failed failed"; exit $((failed > 0)); }
need() { check "$@"; [ "$failed" = 0 ] || finish; }     # nothing behind it makes sense without it
is() { [ "$1" = "$2" ] || { printf 'found: %s\nexpected: %s\n' "$1" "$2"; return 1; }; }
none() { [ -z "$1" ] || { printf 'found: %s\n' "$1"; return 1; }; }

need "installs" cmake --install "$build" --prefix "$tmp/first"
mv "$tmp/first" "$tmp/prefix"           # an installed tree may be moved
so=$(find "$tmp/prefix" -name libfoveal.so)
archive=$(find "$tmp/prefix" -name libfoveal.a)
need "holds the shared library" test -n "$so"
need "holds the static library" test -n "$archive"
lib=$(dirname "$so")

# what the libraries show and need
dynamic=$(readelf -dW "$so")
soname=$(sed -n 's/.*SONAME.*\[\(.*\)\].*/\1/p' <<<"$dynamic")
needed=$(sed -n 's/.*NEEDED.*\[\(.*\)\].*/\1/p' <<<"$dynamic" | grep -vE '^(libc|libm|libdl|libpthread|ld-linux.*)\.so\.[0-9]+$')
shown=$(nm -D --defined-only "$so" | awk '{ print $3 }' | sed 's/@.*//' | grep -v '^FOVEAL_0$')
declared=$(sed -n 's/^FV_API.*[ *]\(fv_[a-z0-9_]*\)(.*/\1/p' "$source"/include/foveal/*.h | sort -u)
check "SONAME is libfoveal.so.0" is "$soname" libfoveal.so.0
check "libfoveal.so.0 leads to it" test "$(readlink -f "$lib/libfoveal.so.0")" = "$(readlink -f "$so")"
check "needs nothing but libc and libm" none "$needed"
check "exports only fv_*" none "$(grep -vE '^(fv_[a-z]|__tvm_ffi_fv_)' <<<"$shown")"
check "exports what the headers declare" none "$(comm -13 <(sort <<<"$shown") <(echo "$declared"))"
check "exports nothing that they do not declare" none "$(grep -v '^__tvm_ffi_fv_' <<<"$shown" | sort | comm -23 - <(echo "$declared"))"
check "is bound when it is loaded" grep -qE 'BIND_NOW|FLAGS.*NOW' <<<"$dynamic"
check "needs no relocation of its text" none "$(grep TEXTREL <<<"$dynamic")"
check "has no executable stack" none "$(readelf -lW "$so" | grep GNU_STACK | grep -E 'RWE|R E')"
check "the archive's globals begin with fv_" none "$(nm -g --defined-only "$archive" 2>/dev/null | awk 'NF == 3 { print $3 }' | grep -vE '^(fv_|__tvm_ffi_fv_)')"

# levels that are left out while one works on others
left_out() {
    cmake -S "$source" -B "$tmp/few" -DFV_EXCLUDE='amx|avx512' -DFV_TOOLS=OFF -DFV_TESTS=OFF -DFV_EXAMPLES=OFF &&
        grep -q 'FV_ISA(scalar)' "$tmp/few/gen/isas.inc" && ! grep -qE 'amx|avx512' "$tmp/few/gen/isas.inc" "$tmp/few/gen/isa_flags.inc"
}
check "FV_EXCLUDE leaves out whole CPU levels" left_out

# a CMake project
check "CMake: configures" cmake -S "$source/tests/consumer_cmake" -B "$tmp/cmake" -DCMAKE_PREFIX_PATH="$tmp/prefix"
check "CMake: builds" cmake --build "$tmp/cmake"
for kind in shared static cxx; do
    check "CMake: consumer_$kind runs" "$tmp/cmake/consumer_$kind"
done
check "CMake: refuses another minor version" bash -c "mkdir '$tmp/other' && cd '$tmp/other' &&
    printf 'cmake_minimum_required(VERSION 3.22)\nproject(other C)\nfind_package(foveal 0.2 REQUIRED)\n' >CMakeLists.txt &&
    ! cmake -DCMAKE_PREFIX_PATH='$tmp/prefix' -B b ."

# a pkg-config project
export PKG_CONFIG_PATH="$lib/pkgconfig"
mkdir "$tmp/pkgconfig"
check "pkg-config: builds" make -C "$source/tests/consumer_pkgconfig" OUT="$tmp/pkgconfig"
check "pkg-config: consumer_shared runs" env LD_LIBRARY_PATH="$lib" "$tmp/pkgconfig/consumer_shared"
check "pkg-config: consumer_static runs" "$tmp/pkgconfig/consumer_static"
check "pkg-config: the version" is "$(pkg-config --modversion foveal)" "$(sed -n 's/^project(foveal VERSION \([0-9.]*\).*/\1/p' "$source/CMakeLists.txt")"

# the tool
if [ -e "$build/bin/foveal" ]; then
    tool=$tmp/prefix/bin/foveal
    check "the tool is installed and runs" "$tool" version
    check "the tool needs nothing but libc and libm" none \
        "$(readelf -dW "$tool" | sed -n 's/.*NEEDED.*\[\(.*\)\].*/\1/p' | grep -vE '^(libc|libm|libdl|libpthread|ld-linux.*)\.so\.[0-9]+$')"
fi

# the Python package, which wheels ask for by its component; all else leaves it out
if cmake -S "$source" -B "$tmp/python" -DFV_PYTHON=ON -DFV_TOOLS=OFF -DFV_TESTS=OFF -DFV_EXAMPLES=OFF >"$tmp/out" 2>&1; then
    check "an install with FV_PYTHON puts nothing of Python into the prefix" \
        bash -c "cmake -DCMAKE_INSTALL_PREFIX='$tmp/all' -P '$tmp/python/python/cmake_install.cmake' && ! find '$tmp/all' -type f | grep ."
    check "the component is what wheels take" bash -c "cd '$tmp/python' && mkdir -p python/foveal && touch python/foveal/_foveal.abi3.so &&
        cmake -DCMAKE_INSTALL_COMPONENT=python -DCMAKE_INSTALL_DO_STRIP=0 -DCMAKE_INSTALL_PREFIX='$tmp/wheel' -P python/cmake_install.cmake &&
        test -e '$tmp/wheel/foveal/_foveal.abi3.so' -a -e '$tmp/wheel/foveal/include/foveal/foveal.h'"
else
    echo "not checked: what an install with FV_PYTHON does, for there is no Python to build for"
fi
finish
