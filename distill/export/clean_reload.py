"""Proves a model folder: what plain transformers loads from it, in a clean process, is the model that was meant."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.errors import DraftsmithError
from decode.models import LoadedModel
from distill.export import reload_check

# The same fp32 arithmetic in another process may sum in another order (threads, alignment); one wrong or rounded
# tensor moves logits by far more.
ABSOLUTE_TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-5
# All excluded tokens together, under the exported draft: so little that they are never proposed.
MAX_EXCLUDED_MASS = 1e-6
PROBE_LENGTH = 48
MESSAGES = [{"role": "user", "content": "Where does the river end?"}]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two leading spaces, a\ttab, and a line break\n\nthen another paragraph",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "1234567890 3.14159 1,000,000 0x1F",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Les élèves français étaient déjà à l'école où ça se passe",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "emoji 🙂🚀 and combining e\u0301 marks",
    '{"key": [1, 2, {"nested": null}], "text": "quoted \\" inside"}',
    "<b>HTML</b> &amp; entities; https://example.org/path?query=1#part",
]


@dataclass(frozen=True)
class Expected:
    """What the reloaded folder must give."""

    request: dict[str, Any]
    logits: list[Tensor]  # each [T, V] fp32
    account: dict[str, Any]  # entries of the clean process's account that must be equal


def expect(model: Any, target: LoadedModel, account: dict[str, Any]) -> Expected:
    """Logits of `model` (fp32, head of full size) on fixed inputs, and the target tokenizer's view of fixed texts."""
    encoded = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    inputs = probes(encoded, target.vocab_size)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([ids])).logits[0] for ids in inputs]
    chat = reload_check.render(target.tokenizer, MESSAGES)
    request = {"input_ids": inputs, "texts": TEXTS, "messages": MESSAGES}
    return Expected(request, logits, {**account, "encoded": encoded, "chat": chat, "lost_keys": []})


def probes(encoded: list[list[int]], vocab_size: int) -> list[list[int]]:
    """Two of the texts, and random ids from the whole table, so that no embedding row is left out by habit."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocab_size, (2, PROBE_LENGTH), generator=generator).tolist()
    return [ids[:PROBE_LENGTH] for ids in encoded[:2] if ids] + drawn


def check_reload(folder: Path, expected: Expected) -> None:
    """Load `folder` in a clean process, offline. Raises DraftsmithError naming what differs from `expected`."""
    logits, account = run_clean(folder, expected.request)
    for name, value in expected.account.items():
        if account[name] != value:
            raise DraftsmithError(f"reloaded by plain transformers, {name} {_differ(account[name], value)}")
    for got, meant in zip(logits, expected.logits, strict=True):
        if not torch.allclose(got, meant, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE):
            gap = (got - meant).abs().max().item()
            raise DraftsmithError(f"reloaded by plain transformers, logits differ from the draft's by {gap:.3g}")


def _differ(got: Any, meant: Any) -> str:
    return f"is {str(got)[:200]}; expected {str(meant)[:200]}"


def run_clean(folder: Path, request: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """What distill/export/reload_check.py says of `folder`. Raises DraftsmithError when the process fails."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as scratch:
        question, answer = Path(scratch) / "request.json", Path(scratch) / "logits.safetensors"
        question.write_text(json.dumps(request), encoding="utf-8")
        # -P: the script's own folder, which is this package, stays off the import path.
        command = [sys.executable, "-P", reload_check.__file__, str(folder), str(question), str(answer)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, env=env, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise DraftsmithError(f"plain transformers cannot load the folder: {reason}")
        tensors = load_file(answer)
        return [tensors[str(i)] for i in range(len(tensors))], json.loads(done.stdout.splitlines()[-1])


def check_excluded(logits: list[Tensor], vocab_ids: Tensor) -> None:
    """Raises DraftsmithError when tokens outside the draft's vocabulary get any mass worth the name."""
    for table in logits:
        kept = table.double().softmax(-1)[:, vocab_ids.cpu()].sum(-1)
        worst = float((1 - kept).max())
        if worst > MAX_EXCLUDED_MASS:
            raise DraftsmithError(
                f"tokens outside the draft's vocabulary get {worst:.2g} of the probability; at most "
                f"{MAX_EXCLUDED_MASS} is safe. The hidden states have grown too large for the guard channel"
            )
