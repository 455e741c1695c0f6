#!/bin/sh
# Tries the SIMT executor as it is on other machines, on Debian for x86-64. docs/other_machines.md has what it said.
#
#   scripts/simt_elsewhere.sh FOLDER [WAY...]
#
# ways: clang (clang++ with libc++), arm (aarch64 under qemu-user), macos (Mach-O for aarch64: compiled and linked,
# run nowhere); without any, all three. FOLDER gets caches and downloads, some 750 MB. PYTHON names the Python
# that has the project's packages. It needs these of Debian's packages:
#
#   clang libc++-dev libc++abi-dev      g++-aarch64-linux-gnu qemu-user mmdebstrap
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
# Without those that start Python or a compiler by another name.
TESTS='tests/runtime/test_simt.py tests/runtime/test_narrow_floats.py -p no:cacheprovider'
CHOSEN='not compiler and not clang and not several_words'
SPLIT_BY_CLANG='not float4 and not misaligned_and_library and not large_structs'
[ $# -gt 0 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."

clang() {
    export CXX='clang++ -stdlib=libc++' MOEBLAZE_CACHE="$folder/clang"
    "$PYTHON" scripts/simt_stages.py
    "$PYTHON" -m pytest $TESTS -k "$CHOSEN and $SPLIT_BY_CLANG"
}

# Debian's Python for arm64, extracted and not installed, with the wheels of the packages that the executor needs.
arm_root() {
    [ -d "$folder/root" ] && return
    mmdebstrap --variant=extract --architectures=arm64 --include=python3,libstdc++6 bookworm "$folder/root.part"
    "$PYTHON" -m pip install --quiet --target "$folder/root.part/packages" --python-version 3.11 --only-binary=:all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
        --constraint requirements.lock numpy ml_dtypes pytest pytest-timeout
    mv "$folder/root.part" "$folder/root"
}

# The compiler is x86-64's own, for aarch64: qemu starts it as any program of this machine.
arm() {
    arm_root
    export CXX='aarch64-linux-gnu-g++' MOEBLAZE_CACHE="$folder/arm" PYTHONPATH="$folder/root/packages:$PWD"
    python="qemu-aarch64 -L $folder/root $folder/root/usr/bin/python3"
    $python scripts/simt_stages.py
    $python -m pytest $TESTS -k "$CHOSEN"
}

macos() {
    "$PYTHON" -m venv "$folder/zig"
    "$folder/zig/bin/pip" install --quiet ziglang==0.17.1
    export CXX="$folder/zig/bin/python -m ziglang c++ -target aarch64-macos" MOEBLAZE_CACHE="$folder/macos"
    "$PYTHON" scripts/simt_builds.py
    rm -f a.o # Zig leaves it, empty, when it is asked for its version
}

[ $# -gt 0 ] || set -- clang arm macos
for way; do
    case $way in
    clang | arm | macos) echo "== $way" ;;
    *) echo "unknown way $way (known: clang, arm, macos)" >&2 && exit 2 ;;
    esac
    ("$way")
done
