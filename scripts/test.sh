#!/usr/bin/env bash
# Style, types and tests; arguments go on to pytest, such as: ./scripts/test.sh -k losses
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
PATH="$(cd "${DRAFTSMITH_VENV:-.venv}" && pwd)/bin:$PATH"

ruff format --check .
ruff check .
mypy
# Two workers with one thread each: tiny models gain nothing from more threads.
OMP_NUM_THREADS=1 pytest -n 2 "$@"
