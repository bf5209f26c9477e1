#!/usr/bin/env bash
# Build the wheel (from the source distribution), look at what it contains, and use it from an empty environment.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make .venv/.has-dev
.venv/bin/python -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
.venv/bin/python tools/check_wheel.py names "$work"/dist/*.whl

.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt "$work"/dist/*.whl
cd "$work" # outside of the checkout: only what the wheel brought can be imported
"$work/venv/bin/python" -I "$root/tools/check_wheel.py" use
