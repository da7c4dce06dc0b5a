#!/usr/bin/env bash
# Runs the tests that need an accelerator, with the Python of the current environment (or $PYTHON).
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m pytest -m gpu "$@"
