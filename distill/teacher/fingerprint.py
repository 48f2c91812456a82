"""Fingerprints of what a run and a cached teacher rest on: weights, examples, ids; and the key of a cache."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.data.examples import Example
from distill.laws import upcast

# Raised whenever the meaning of a stored value changes.
FORMAT = 2


# What a configuration tells of how and from where a model was loaded, not of what it computes.
LOADING = frozenset({"dtype", "torch_dtype", "_name_or_path", "transformers_version"})


def weights_sha256(model: Any) -> str:
    """sha256 over every tensor's name, shape and values, and the config; half a second for half a gigabyte.

    16-bit weights count as fp32, which holds them exactly: a model that a CPU loads in fp32 and a GPU in the files'
    own type is one model.
    """
    digest = hashlib.sha256(json.dumps(_settings(model.config.to_dict()), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if type(tensor) is not Tensor and hasattr(type(tensor), "dequantize"):  # of torchao: what it stands for counts
            tensor = tensor.dequantize()
        values: Tensor = (upcast(tensor) if tensor.is_floating_point() else tensor).detach().cpu()
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _settings(value: Any) -> Any:
    """A configuration, of whatever depth, without LOADING."""
    if not isinstance(value, dict):
        return value
    return {key: _settings(inner) for key, inner in value.items() if key not in LOADING}


def ids_sha256(rows: Iterable[Iterable[int]]) -> str:
    """sha256 over rows of token ids, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", row))
        digest.update(b"end")
    return digest.hexdigest()


def examples_sha256(examples: Sequence[Example]) -> str:
    """sha256 over the ids and masks of all examples, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(array("q", example.input_ids))
        digest.update(bytes(example.mask))
        digest.update(b"end")
    return digest.hexdigest()


def cache_key(
    target_sha256: str,
    dtype: torch.dtype,
    examples: Sequence[Example],
    top_k: int,
    temperature: float,
    vocab_ids: Tensor | None = None,
) -> dict[str, Any]:
    """The parts of a cache's key. The tokenizer is not among them: exact ids are, and nothing else of it has a say.

    The tail is of the draft's ids, so a reduced vocabulary has its own cache; drafts with all ids share one.
    """
    key = {
        "format": FORMAT,
        "target_sha256": target_sha256,
        "dtype": str(dtype),
        "examples_sha256": examples_sha256(examples),
        "top_k": top_k,
        "temperature": temperature,
    }
    return key if vocab_ids is None else {**key, "vocab_ids_sha256": ids_sha256([vocab_ids.tolist()])}


def short_name(key: dict[str, Any]) -> str:
    """The folder of a cache: 16 hex digits of its key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
