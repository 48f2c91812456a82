"""Chooses how a model's forward is run: as it is, or with oneDNN-prepacked linear layers, by measuring."""

import time
from dataclasses import replace
from typing import Any

import torch

from decode.errors import UsageError
from decode.models import LoadedModel
from decode.prepacked import can_prepack, prepack

# Widths that decoding uses: plain steps, and the verification of a few drafted tokens.
PROBE_WIDTHS = (1, 4)
PROBE_REPEATS = 3


def with_backend(loaded: LoadedModel, name: str = "auto") -> LoadedModel:
    """`loaded` with the backend `name` ("auto", "eager" or "prepacked"); `loaded` itself stays as it is.

    Raises UsageError when "prepacked" is asked for and the model is not fp32 on a CPU.
    """
    if name == "eager" or (name == "auto" and not can_prepack(loaded.model)):
        return loaded
    if not can_prepack(loaded.model):
        raise UsageError("backend: 'prepacked' needs float32 weights on the CPU and a torch built with oneDNN")
    packed = replace(loaded, model=prepack(loaded.model), backend="prepacked")
    if name == "prepacked" or _seconds(packed.model) < _seconds(loaded.model):
        return packed
    return loaded


@torch.inference_mode()
def _seconds(model: Any) -> float:
    """The least time of a forward, summed over the probe widths."""
    total = 0.0
    for width in PROBE_WIDTHS:
        ids = torch.ones(1, width, dtype=torch.int64)
        times = []
        for _ in range(PROBE_REPEATS):
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            times.append(time.perf_counter() - start)
        total += min(times)
    return total
