"""Reads what fit wrote: a checkpoint as a draft, the checkpoints of a run, the best of them."""

import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from decode.config import ModelConfig
from decode.errors import DraftsmithError, UsageError, first_line
from decode.models import LoadedModel, choose_device, load_model, load_tokenizer, narrow_head, some_of
from decode.vocabulary import check_pair

WRAPPERS = ("student.model.", "module.", "_orig_mod.")  # the module's attributes, DDP, torch.compile
BEST_FILE = "best.json"
STEP_NAME = re.compile(r"step-(\d+)\.ckpt")

CONTENT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "state_dict": (
        lambda v: isinstance(v, Mapping) and bool(v) and all(isinstance(t, Tensor) for t in v.values()),
        "tensors by name",
    ),
    "draft_config": (lambda v: isinstance(v, Mapping) and isinstance(v.get("model_type"), str), "a model's settings"),
    "config": (lambda v: v is None or isinstance(v, Mapping), "the run's settings"),
    "metrics": (lambda v: v is None or isinstance(v, Mapping), "figures by name"),
    "draft_vocab_ids": (
        lambda v: v is None or (isinstance(v, Tensor) and v.ndim == 1 and v.dtype == torch.int64),
        "a row of ids",
    ),
}
"""What a draft is made from: a test for each part, and what it should be."""


def load_draft(path: str | Path, target: LoadedModel, config: ModelConfig) -> LoadedModel:
    """A draft for `target` from a model folder, a hub id or a checkpoint of fit; its head as narrow as it was trained.

    Raises UsageError when it cannot be read, its weights are not complete, or it does not fit the target.
    """
    is_checkpoint = str(path).endswith(".ckpt")
    draft = (
        _load_checkpoint(Path(path), target, config) if is_checkpoint else load_model(str(path), config, role="draft")
    )
    check_pair(target, draft, equal_tables=True)
    return draft


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of fit, weights mapped from the file. Nothing in it is ever executed.

    Raises UsageError when it is missing, damaged or of another kind.
    """
    if not path.is_file():
        raise UsageError(f"draft: there is no checkpoint {path}")
    try:
        damaged = _damaged_part(path)
        content: Any = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and file errors of many kinds
        raise UsageError(f"draft: checkpoint {path} cannot be read: {first_line(error)}") from error
    if damaged:
        raise UsageError(f"draft: checkpoint {path} is damaged: the checksum of its {damaged} is wrong")
    missing = [key for key in ("state_dict", "draft_config") if not isinstance(content, Mapping) or key not in content]
    if missing:
        raise UsageError(
            f"draft: {path} has no {' and no '.join(missing)}; expected a checkpoint written by draftsmith fit"
        )
    check_parts(content, CONTENT, path)
    return dict(content)


def check_parts(content: Mapping[str, Any], parts: Mapping[str, tuple[Callable[[Any], bool], str]], path: Path) -> None:
    """Raise UsageError naming the first of `parts` that is not what it should be."""
    for name, (is_right, expected) in parts.items():
        if not is_right(content.get(name)):
            raise UsageError(
                f"draft: {path}: its {name} is not {expected}; expected a checkpoint written by draftsmith fit"
            )


def _damaged_part(path: Path) -> str | None:
    """The first part of a checkpoint whose bytes are not those that were written; torch itself compares none."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def loss_temperature(content: Mapping[str, Any]) -> float | None:
    """What both sides' logits were divided by where acceptance was recorded; None where that is not told."""
    if "loss_temperature" in content:  # a folder's record
        return content["loss_temperature"]
    settings: Any = content.get("config")
    for key in ("loss", "temperature"):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def recorded_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """The finite figures under "metrics" of a checkpoint or of a folder's record, by name."""
    figures = content.get("metrics") or {}
    return {name: value for name, value in figures.items() if isinstance(value, int | float) and math.isfinite(value)}


def _load_checkpoint(path: Path, target: LoadedModel, config: ModelConfig) -> LoadedModel:
    content = read_checkpoint(path)
    vocab_ids = content.get("draft_vocab_ids")
    model = _empty_draft(content, path, config)
    _load_strictly(model, content["state_dict"], path)
    dtype = target.model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    device = choose_device(config, "draft")
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    model.generation_config.eos_token_id = sorted(target.eos_token_ids) or None
    vocab_ids = None if vocab_ids is None else vocab_ids.to(device)
    return LoadedModel(model, _tokenizer(content, path.parent.parent, target, config), str(path), vocab_ids)


def _empty_draft(content: Mapping[str, Any], path: Path, config: ModelConfig) -> Any:
    """The draft of a checkpoint, its weights yet to be loaded."""
    try:
        settings = AutoConfig.for_model(**content["draft_config"])
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=config.trust_remote_code)
        if content.get("draft_vocab_ids") is not None:
            narrow_head(model, content["draft_vocab_ids"])
    except Exception as error:  # each model class checks its settings in its own way
        raise UsageError(f"draft: checkpoint {path}: its draft_config makes no model: {first_line(error)}") from error
    return model


def _load_strictly(model: Any, state: Mapping[str, Tensor], path: Path) -> None:
    """Load every weight of the draft, refusing names that are missing or unknown; a tied head need not be there."""
    weights = {_bare(name): value for name, value in state.items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # shapes that differ: torch lists them after the first line
        raise UsageError(f"draft: checkpoint {path}: {' '.join(str(error).split())[:300]}") from error
    for kind, names in (("missing", set(found.missing_keys) - tied), ("unexpected", set(found.unexpected_keys))):
        if names:
            raise UsageError(f"draft: checkpoint {path} has {kind} weights: {some_of(names)}")


def _bare(name: str) -> str:
    """A tensor's name in the model itself, without the wrappers that it was trained in."""
    while wrapper := next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), None):
        name = name.removeprefix(wrapper)
    return name


def _tokenizer(content: Mapping[str, Any], run: Path, target: LoadedModel, config: ModelConfig) -> Any:
    """The tokenizer of the draft that the run began with, so that another target is refused; else the target's."""
    origin = _origin(content.get("config"), run)
    if origin is None or not (origin / "tokenizer_config.json").is_file():
        return target.tokenizer
    return _tokenizer_of(str(origin), config.trust_remote_code)


@lru_cache(maxsize=4)
def _tokenizer_of(folder: str, trust_remote_code: bool) -> Any:
    return load_tokenizer(folder, ModelConfig(trust_remote_code=trust_remote_code), role="draft")


def is_run_folder(path: str | Path) -> bool:
    """Whether `path` is a folder that fit wrote."""
    return (Path(path) / "checkpoints").is_dir()


def step_of(path: Path) -> int | None:
    """The optimiser step in a checkpoint's name."""
    found = STEP_NAME.fullmatch(path.name)
    return None if found is None else int(found[1])


def checkpoints_of(run_folder: str | Path) -> list[tuple[int, Path]]:
    """Steps and paths of a run's checkpoints in order, the untrained draft first as step 0.

    Raises UsageError when the folder holds no checkpoint.
    """
    files = (Path(run_folder) / "checkpoints").glob("step-*.ckpt")
    found = [(step, file) for file in files if (step := step_of(file)) is not None]
    if not found:
        raise UsageError(f"draft: the run folder {run_folder} holds no checkpoint yet")
    origin = None if any(step == 0 for step, _ in found) else untrained_draft(run_folder)
    return ([] if origin is None else [(0, origin)]) + sorted(found)


def untrained_draft(run_folder: str | Path) -> Path | None:
    """The folder of the draft that a run began with, None where it is no longer there."""
    try:
        settings = yaml.safe_load((Path(run_folder) / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return _origin(settings, Path(run_folder))


def _origin(settings: Any, run: Path) -> Path | None:
    """The draft of a run's `settings`; a relative path counts from where fit was called, or else from here."""
    try:
        draft, output = Path(settings["draft"]).expanduser(), settings.get("output")
    except (AttributeError, KeyError, TypeError):
        return None
    places = [draft] if output is None else [_called_from(run, Path(output)) / draft, draft]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _called_from(run: Path, output: Path) -> Path:
    """The folder that fit was called in: what its own `output` lacks of the run's place; here where that can't be."""
    parts = run.resolve().parts
    is_there = not output.is_absolute() and parts[-len(output.parts) :] == output.parts
    return Path(*parts[: -len(output.parts)]) if is_there and output.parts else Path()


def best_checkpoint(run_folder: str | Path) -> Path:
    """The run's fastest checkpoint. Raises UsageError when the run has not judged any."""
    file = Path(run_folder) / BEST_FILE
    try:
        path = Path(run_folder) / "checkpoints" / json.loads(file.read_text(encoding="utf-8"))["checkpoint"]
    except FileNotFoundError:
        raise UsageError(
            f"draft: the run folder {run_folder} has no {BEST_FILE} yet; name a checkpoint of it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftsmithError(f"{file}: it is damaged; name a checkpoint of the run instead") from error
    if not path.is_file():
        raise UsageError(f"draft: {file} names {path.name}, which is not there; name another checkpoint of the run")
    return path
