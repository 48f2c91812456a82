#!/usr/bin/env bash
# Checks the decoder on a GPU in under 8 minutes: the GPU tests, then one table of what every backend takes. Arguments
# go on to gpu_check.py, such as: ./scripts/gpu_check.sh --target DIR --draft DIR
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -d "${DRAFTSMITH_VENV:-.venv}" ]; then PATH="$(cd "${DRAFTSMITH_VENV:-.venv}" && pwd)/bin:$PATH"; fi
python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "gpu_check: torch sees no CUDA device")'
timeout 240 python -m pytest -q -m gpu tests
timeout 230 python scripts/gpu_check.py "$@"
