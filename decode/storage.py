"""How a model's weights are kept: quantised or not, on one device or spread over several."""

from importlib.util import find_spec
from typing import Any

import torch

from decode.config import ModelConfig
from decode.errors import UsageError

# What each kind of quantisation needs, and how to get it.
PACKAGES = {
    "int8": ("torchao", "pip install 'draftsmith[quantized]'"),
    "bnb-8bit": ("bitsandbytes", "pip install bitsandbytes"),
    "bnb-4bit": ("bitsandbytes", "pip install bitsandbytes"),
}


def storage_options(config: ModelConfig, role: str, device: torch.device) -> dict[str, Any]:
    """What transformers' from_pretrained is told of the weights of `role` ("target" or "draft"), to lie on `device`.

    Where it is told of a device map, the model must not be moved afterwards.
    Raises UsageError for a package that is missing and a device that is not there.
    """
    is_draft = role == "draft"
    options: dict[str, Any] = {}
    kind = config.draft_quantization if is_draft else config.quantization
    if kind != "none":
        options["quantization_config"] = _quantization(kind, "model.draft_quantization" if is_draft else
                                                       "model.quantization")  # fmt: skip
        options["device_map"] = {"": device}
    if config.device_map is not None and not is_draft:
        if config.device != "auto":
            raise UsageError(f"model.device: {config.device!r} is not legal beside device_map; expected auto")
        options["device_map"] = config.device_map
        options["max_memory"] = _memory(config.max_memory) or None
    return options


def _quantization(kind: str, key: str) -> Any:
    package, install = PACKAGES[kind]
    if find_spec(package) is None:
        raise UsageError(f"{key}: {kind} needs the package {package}, which is missing; run: {install}")
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(load_in_8bit=kind == "bnb-8bit", load_in_4bit=kind == "bnb-4bit")


def _memory(most: dict[str, str]) -> dict[int | str, str]:
    """Accelerate's form of max_memory: GPUs by number."""
    legal = ["cpu", *map(str, range(torch.accelerator.device_count()))]
    for key in most:
        if key not in legal:
            raise UsageError(f"model.max_memory: {key!r} is no device here; expected {', '.join(legal)}")
    return {int(key) if key.isdecimal() else key: size for key, size in most.items()}
