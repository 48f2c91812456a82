"""The fingerprint of a model's weights."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from distill.laws import upcast

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
