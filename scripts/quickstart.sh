#!/usr/bin/env bash
# The whole path on the embedded target: data, draft, distillation, report, export, decoding. At most 15 minutes on two
# CPU threads, after the environment is installed. Run again, it reuses what is finished and resumes what is not.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
PATH="$(cd "${DRAFTSMITH_VENV:-.venv}" && pwd)/bin:$PATH"
configs=configs/quickstart
runs=runs/quickstart

step() { printf '\n== %s\n' "$*"; }
step "1/6 The target answers a few dozen prompts"
draftsmith generate --config $configs/generate.yaml
step "2/6 An untrained draft for it"
draftsmith init --config $configs/init.yaml
step "3/6 Distillation on the target's logits; each checkpoint is judged by real decoding"
draftsmith fit --config $configs/fit.yaml
step "4/6 Acceptance and speed of every checkpoint, in one interleaved run"
draftsmith eval --config $configs/eval.yaml
step "5/6 The fastest checkpoint as a plain model directory"
draftsmith export --config $configs/export.yaml
step "6/6 A text decoded with it"
draftsmith run --config $configs/run.yaml

step "Done"
echo "report files and pictures: $runs/eval"
ls $runs/eval | sed 's/^/  /'
echo "exported draft:            $runs/draft"
