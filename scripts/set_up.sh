#!/bin/sh
# Sets up a fresh Debian or Ubuntu: the system packages, then the pinned Python packages in .venv.
#
#   scripts/set_up.sh [VARIABLE=VALUE...]    variables of the Makefile
set -eu
cd "$(dirname "$0")/.."
scripts/system_packages.sh
make setup "$@"
