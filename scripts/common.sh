# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
# common.sh -- sourced by the scripts beside it: goes to the root of the tree; installs packages; configures and builds.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
JOBS=${JOBS:-$(nproc)}

# What a release build needs. Header-only uses count too.
build_packages=(gcc libc6-dev make cmake pkg-config libjansson-dev libxxhash-dev)

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Installs those of the named Debian packages that are missing, as root or with sudo. Elsewhere it says what is needed and goes on.
install_packages() {
    local missing=() name
    if ! command -v apt-get >/dev/null; then
        echo "There is no apt-get here. Needed, by their names on Debian: $*"
        return 0
    fi
    for name in "$@"; do is_installed "$name" || missing+=("$name"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    local root=()
    if [ "$(id -u)" != 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "Missing packages, and neither root nor sudo to install them: ${missing[*]}" >&2
            return 1
        fi
        root=(sudo)
    fi
    echo "Installing: ${missing[*]}"
    "${root[@]}" apt-get update -q &&
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

# PRESET [OPTION...]. Ubuntu 22.04's CMake knows presets but not --fresh: a folder that holds another tree's cache is refused by CMake itself.
configure() { cmake --preset "$@"; }

# FOLDER [TARGET...]: goes on after an error, so that one broken program does not hide the others.
build() {
    local folder=$1 keep=-k
    shift
    grep -q 'CMAKE_GENERATOR:INTERNAL=Ninja' "$folder/CMakeCache.txt" && keep='-k 0'
    # shellcheck disable=SC2086
    cmake --build "$folder" -j "$JOBS" ${1:+--target "$@"} -- $keep
}
