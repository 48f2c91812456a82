"""What a cached teacher's values depend on, as one key: weights, examples, top_k, temperature, format."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from distill.data.examples import Example

# Raised whenever the meaning of a stored value changes.
FORMAT = 1


def weights_sha256(model: Any) -> str:
    """sha256 over every tensor's name, type, shape and bytes, and the config; half a second for half a gigabyte."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def examples_sha256(examples: Sequence[Example]) -> str:
    """sha256 over the ids and masks of all examples, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(array("q", example.input_ids))
        digest.update(bytes(example.mask))
        digest.update(b"end")
    return digest.hexdigest()


def cache_key(model: Any, examples: Sequence[Example], top_k: int, temperature: float) -> dict[str, Any]:
    """The parts of a cache's key. The tokenizer is not among them: exact ids are, and nothing else of it has a say."""
    return {
        "format": FORMAT,
        "target_sha256": weights_sha256(model),
        "examples_sha256": examples_sha256(examples),
        "top_k": top_k,
        "temperature": temperature,
    }


def short_name(key: dict[str, Any]) -> str:
    """The folder of a cache: 16 hex digits of its key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
