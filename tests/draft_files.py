"""Targets, drafts, rows and run folders on disk, as the commands read and write them; all tiny."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from decode.models import LoadedModel, narrow_head
from distill.config import InitConfig
from distill.drafts.make import init_draft
from tests.fixtures import byte_tokenizer, tiny_llama

EOS = 258


def save_target(folder: Path, model: Any = None, tokenizer: Any = None, **generation: Any) -> Path:
    """A target folder: tiny Llama with strong weights, byte-level tokenizer with a ChatML template."""
    tokenizer = tokenizer or byte_tokenizer()
    model = model or tiny_llama(
        0, vocab_size=len(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 5e4}
    )
    model.float().save_pretrained(folder)
    # By hand: models in the wild carry settings that the library itself refuses to save.
    settings = {"eos_token_id": EOS, "pad_token_id": EOS, **generation}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(file: Path, tokenizer: Any, texts: list[str]) -> Path:
    """Rows as generate writes them: a prompt, an answer in exact ids, the mask of generated tokens."""
    rows = []
    for number, text in enumerate(texts):
        prompt, answer = tokenizer("Say it.")["input_ids"], [*tokenizer(text)["input_ids"], EOS]
        mask = [0] * len(prompt) + [1] * len(answer)
        rows.append(
            {"row": number, "prompt": "Say it.", "completion": text, "input_ids": prompt + answer, "mask": mask}
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make_draft(target: Path, output: Path, **options: Any) -> Path:
    return init_draft(
        InitConfig(target=str(target), output=str(output), **{"hidden_size": 32, "num_layers": 2, **options})
    )


def strong(draft: LoadedModel, seed: int = 5) -> LoadedModel:
    """`draft` with its layers and head redrawn, so that each tensor shows in the logits; the guard channel kept."""
    from distill.drafts.vocab import pin_guard_channel

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    if draft.vocab_ids is not None:
        pin_guard_channel(draft.model)
    return draft


def write_checkpoint(run: Path, step: int, draft: LoadedModel, origin: Path, **metrics: float) -> Path:
    """A checkpoint in the form of fit, with the keys that Lightning adds, and the run's other files."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    settings = {"draft": str(origin), "judge": {"decode": {"num_speculative_tokens": 4}}}
    content = {
        "state_dict": {f"student.model.{name}": value for name, value in draft.model.state_dict().items()},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "pytorch-lightning_version": "2.6.6",
        "draft_config": draft.model.config.to_dict(),
        "config": settings,
        "step": step,
        "metrics": {f"val/{name}": value for name, value in metrics.items()},
    }
    if draft.vocab_ids is not None:
        content["draft_vocab_ids"] = draft.vocab_ids
    file = run / "checkpoints" / f"step-{step:06d}.ckpt"
    torch.save(content, file)
    (run / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (run / "best.json").write_text(
        json.dumps({"checkpoint": file.name, "step": step, "speedup": 1.2}), encoding="utf-8"
    )
    return file


def narrowed(draft: LoadedModel, vocab_ids: torch.Tensor) -> LoadedModel:
    narrow_head(draft.model, vocab_ids)
    return LoadedModel(draft.model, draft.tokenizer, draft.name, vocab_ids)
