#!/usr/bin/env bash
# One table of losses and options of fit on the embedded target: same data, tokens, draft shape; two held-out domains.
# Run again, it goes on where it stopped. About two hours on two CPU threads; names of variants as arguments: only those.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
PATH="$(cd "${DRAFTSMITH_VENV:-.venv}" && pwd)/bin:$PATH"
runs=runs/study
mapfile -t lines < <(grep -v '^ *#' configs/study/variants.txt)

draftsmith init --config configs/study/init.yaml
drafts=()
for line in "${lines[@]}"; do
  read -r name seeds options <<<"$line"
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  for seed in ${seeds//,/ }; do
    # shellcheck disable=SC2086  # options are words
    draftsmith fit --config configs/study/fit.yaml --output "$runs/$name-$seed" --seed "$seed" $options
    drafts+=("$runs/$name-$seed/checkpoints/last.ckpt")
  done
done

list="[$(IFS=,; echo "${drafts[*]}")]"
draftsmith eval --config configs/study/eval.yaml --drafts "$list" --output $runs/stories \
  --prompts configs/quickstart/held_out_prompts.jsonl --held_out configs/quickstart/held_out.jsonl
draftsmith eval --config configs/study/eval.yaml --drafts "$list" --output $runs/code \
  --prompts configs/study/code_held_out_prompts.jsonl --held_out configs/study/code_held_out.jsonl
python scripts/loss_table.py --reports "[$runs/stories,$runs/code]"
