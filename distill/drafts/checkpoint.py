"""Reads a checkpoint file of fit: its bytes and its parts are checked, nothing in it is executed."""

import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.errors import UsageError, first_line

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
