"""Reads what fit wrote: a checkpoint as a draft, the checkpoints of a run, the best of them."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from decode.config import DTypeName, ModelConfig
from decode.errors import DraftsmithError, UsageError, first_line
from decode.models import LoadedModel, choose_device, load_model, load_tokenizer, narrow_head, some_of
from decode.vocabulary import check_pair
from distill.config import LoraConfig
from distill.drafts.adapters import add_adapters, is_adapter, load_adapters, merge_adapters
from distill.drafts.checkpoint import read_checkpoint
from distill.weights import weights_sha256

WRAPPERS = ("student.model.", "module.", "_orig_mod.")  # the module's attributes, DDP, torch.compile
BEST_FILE = "best.json"
STEP_NAME = re.compile(r"step-(\d+)\.ckpt")


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


def _load_checkpoint(path: Path, target: LoadedModel, config: ModelConfig) -> LoadedModel:
    content = read_checkpoint(path)
    vocab_ids = content.get("draft_vocab_ids")
    if is_adapter(content["state_dict"]):
        model = _merged(content, path, config)
    else:
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


def _merged(content: Mapping[str, Any], path: Path, config: ModelConfig) -> Any:
    """The draft that a run began with, and its checkpoint's adapter merged into it, in fp32 or wider.

    Raises UsageError where that draft is not where the run's settings say, or is no longer what it was.
    """
    origin = _origin(content.get("config"), path.parent.parent)
    settings = _lora_of(content, path)
    if origin is None:
        raise UsageError(f"draft: checkpoint {path} is an adapter, and the draft that its run began with is not there")
    wide: DTypeName = "float64" if config.dtype == "float64" else "float32"
    model = load_model(str(origin), replace(config, dtype=wide, device="cpu"), role="draft").model
    if weights_sha256(model) != content.get("draft_sha256"):
        raise UsageError(f"draft: {origin} is not the draft that the adapter of {path} belongs to; its weights differ")
    add_adapters(model, settings)
    load_adapters(model, {_bare(name): value for name, value in content["state_dict"].items()})
    merge_adapters(model)
    return model


def _lora_of(content: Mapping[str, Any], path: Path) -> LoraConfig:
    try:
        return LoraConfig(**content["config"]["lora"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"draft: checkpoint {path} is an adapter without its settings") from error


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
