#!/bin/sh
# Installs by apt-get what this project needs of the machine and does not find:
#
#   scripts/system_packages.sh [NEED...]     make, venv, compiler, clang, browser, git; without arguments all of them
#
# A need with a ? behind it is installed where that is possible, and is no error elsewhere. Where nothing is missing,
# nothing is run. Without the right to install, the script prints the line to type. The Makefile passes PYTHON, CXX and
# BROWSERS.
set -eu
PYTHON=${PYTHON:-python3} CXX=${CXX:-g++} BROWSERS=${BROWSERS:-chromium chromium-browser google-chrome}
OS_RELEASE=${OS_RELEASE:-/etc/os-release}

found() {
    for program; do
        if command -v "$program" >/dev/null; then return 0; fi
    done
    return 1
}

fail() {
    echo "error: $1" >&2
    exit 1
}

chromium_package() {
    if grep -qs '^ID=ubuntu' "$OS_RELEASE"; then echo chromium-browser; else echo chromium; fi
}

# Prints the packages that would meet a need, and why they are needed; nothing if it is met.
lacking() {
    case $1 in
    make) found make || echo 'make: every command is a target of the Makefile' ;;
    venv)
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
            echo "${PYTHON##*/}-venv: $PYTHON cannot create virtual environments"
        ;;
    compiler)
        found "${CXX%% *}" || [ "$CXX" = g++ ] || fail "CXX names $CXX, and there is no such program"
        found "${CXX%% *}" || echo 'g++: the CUDA kernels run on the CPU through a C++ compiler'
        ;;
    clang) found clang++ || echo 'clang: the tests build kernels with clang++ too' ;;
    browser) found $BROWSERS || echo "$(chromium_package): the tests open JupyterLab and the site in a browser" ;;
    git) found git || echo 'git: a test looks at what git says of a clone' ;;
    *) fail "unknown need $1 (known: make, venv, compiler, clang, browser, git)" ;;
    esac
}

packages='' refusals=''
for need in ${*:-make venv compiler clang browser git}; do
    lack=$(lacking "${need%\?}")
    [ -n "$lack" ] || continue
    packages="$packages ${lack%%:*}"
    [ "$need" != "${need%\?}" ] || refusals="${refusals}error: missing $lack
"
done
[ -n "$packages" ] || exit 0

install="apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes$packages"
if found apt-get && [ "$(id -u)" = 0 ]; then
    sh -c "$install"
elif found apt-get && found sudo && sudo -n true 2>/dev/null; then
    sudo sh -c "$install"
elif [ -n "$refusals" ]; then
    printf %s "$refusals" >&2
    echo "On Debian and Ubuntu, type: sudo apt-get update && sudo apt-get install --yes$packages" >&2
    exit 1
fi
