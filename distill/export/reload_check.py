"""Run as a script, in a process of its own: loads a model folder with plain transformers and says what it got.

    python reload_check.py FOLDER REQUEST.json LOGITS.safetensors

It imports nothing of Draftsmith, so that it sees what any other program would see.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def reload(folder: str, request: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Logits in fp32 of each list in request["input_ids"], and a JSON-safe account of the folder."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    model, info = loaded
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    dtype = str(model.dtype).removeprefix("torch.")
    model = model.float().eval()  # on the saved values, but free of the kernels of 16-bit types
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([ids])).logits[0] for ids in request["input_ids"]]
    account = {
        "class": type(model).__name__,
        "dtype": dtype,
        "lost_keys": sorted(str(k) for kind in ("missing_keys", "unexpected_keys") for k in info[kind]),
        "tensors": tensor_names(Path(folder)),
        "encoded": [tokenizer(text)["input_ids"] for text in request["texts"]],
        "chat": render(tokenizer, request["messages"]),
        "eos_token_id": model.generation_config.eos_token_id,
        "num_assistant_tokens": model.generation_config.num_assistant_tokens,
    }
    return logits, account


def tensor_names(folder: Path) -> list[str]:
    """Names in the safetensors files, read without any model class."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names += opened.keys()
    return sorted(names)


def render(tokenizer: Any, messages: list[dict[str, str]]) -> str | None:
    """The chat template's text; None where there is no template or it refuses the messages."""
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # templates raise what they like
        return None


def main() -> None:
    folder, request_file, logits_file = sys.argv[1:]
    logits, account = reload(folder, json.loads(Path(request_file).read_text(encoding="utf-8")))
    save_file({str(i): t.contiguous() for i, t in enumerate(logits)}, logits_file)
    print(json.dumps(account))


if __name__ == "__main__":
    main()
