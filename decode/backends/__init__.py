"""Chooses how a model's forward is run: by name, or the fastest by measuring. The model itself stays as it was."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decode.backends.base import CannotServe, Forward
from decode.backends.compiled import CompiledForward
from decode.backends.cuda_graph import GraphForward
from decode.backends.eager import TransformersForward, why_not_slots
from decode.backends.lean import LeanForward
from decode.backends.prepacked import can_prepack, prepack
from decode.errors import first_line
from decode.model_facts import context_limit, input_device
from decode.models import LoadedModel

# What auto measures on a kind of device. Compiling takes longer than most texts, so it is only done when asked for.
CANDIDATES = {"cpu": ("eager", "prepacked", "lean"), "cuda": ("eager", "lean", "cuda_graph")}
# Widths that decoding uses: plain steps, and the verification of a few drafted tokens; after a context like a prompt.
PROBE_WIDTHS = (1, 4)
PROBE_CONTEXT = 64
PROBE_REPEATS = 4

log = logging.getLogger(__name__)


def with_backend(loaded: LoadedModel, name: str = "auto") -> LoadedModel:
    """`loaded` run by the backend `name`, or by the fastest by measuring; `loaded` itself stays as it is.

    A backend that cannot serve the model is replaced by eager, with a warning. The result's `backend` is what runs.
    """
    if name == "auto":
        return _fastest(loaded)
    try:
        return BACKENDS[name](loaded)
    except CannotServe as reason:
        log.warning("backend %s cannot serve model %r, which runs eager instead: %s", name, loaded.name, reason)
        return _eager(loaded)


def _eager(loaded: LoadedModel) -> LoadedModel:
    return loaded if loaded.backend == "eager" else replace(loaded, forward=None, backend="eager")


def _prepacked(loaded: LoadedModel) -> LoadedModel:
    if not can_prepack(loaded.model):
        raise CannotServe("it needs float32 weights on the CPU and a torch built with oneDNN")
    packed = replace(loaded, model=prepack(loaded.model), forward=None, backend="prepacked")
    try:
        with torch.inference_mode():
            packed.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    except Exception as error:  # some models reach into their layers, and any code may run
        raise CannotServe(f"it does not run with packed layers: {type(error).__name__}: {first_line(error)}") from error
    return packed


def _lean(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, forward=_lean_forward(loaded.model), backend="lean")


def _compiled(loaded: LoadedModel) -> LoadedModel:
    device = input_device(loaded.model)
    # On a CPU inductor packs the weights of a module; those of the lean forward, packed by hand, it cannot lower.
    base = _own_forward(loaded.model, "") if device.type == "cpu" else _base_forward(loaded.model)
    return replace(loaded, forward=CompiledForward(base, device), backend="compiled")


def _cuda_graph(loaded: LoadedModel) -> LoadedModel:
    device = input_device(loaded.model)
    if device.type != "cuda":
        raise CannotServe(f"it lies on {device}; expected a CUDA device")
    return replace(loaded, forward=GraphForward(_base_forward(loaded.model), device), backend="cuda_graph")


BACKENDS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "eager": _eager,
    "prepacked": _prepacked,
    "lean": _lean,
    "compiled": _compiled,
    "cuda_graph": _cuda_graph,
}


def _lean_forward(model: Any) -> LeanForward:
    try:
        return LeanForward(model)
    except torch.OutOfMemoryError as error:
        raise CannotServe("the device has no room for its fused weights") from error


def _base_forward(model: Any) -> Forward:
    """What is compiled or captured: the lean forward, else the model's own over slots."""
    try:
        return _lean_forward(model)
    except CannotServe as reason:
        return _own_forward(model, f"{reason}; nor can its own forward: ")


def _own_forward(model: Any, so_far: str) -> Forward:
    why = why_not_slots(model)
    if why is not None:
        raise CannotServe(so_far + why)
    return TransformersForward(model)


def _fastest(loaded: LoadedModel) -> LoadedModel:
    """The candidate with the least time over the probe widths."""
    ready: dict[str, LoadedModel] = {}
    words = []
    for name in CANDIDATES.get(loaded.device.type, ("eager",)):
        try:
            ready[name] = BACKENDS[name](loaded)
        except CannotServe as reason:
            words.append(f"{name} out: {reason}")
    if len(ready) == 1:
        log.info("backend of model %r: eager, the only one (%s)", loaded.name, "; ".join(words) or "no other is known")
        return ready["eager"]
    seconds = {name: probe_seconds(candidate) for name, candidate in ready.items()}
    best = min(seconds, key=lambda name: sum(seconds[name]))
    figures = [f"{name} {a * 1e3:.2f} + {b * 1e3:.2f} ms" for name, (a, b) in seconds.items()]
    log.info(
        "backend of model %r: %s, the fastest for 1 and 4 tokens (%s)", loaded.name, best, "; ".join(figures + words)
    )
    return ready[best]


@torch.inference_mode()
def probe_seconds(loaded: LoadedModel) -> tuple[float, float]:
    """The least seconds of a forward of each probe width after a short context."""
    step = _stepper(loaded)
    device = input_device(loaded.model)
    context = min(PROBE_CONTEXT, context_limit(loaded.model) - sum(PROBE_WIDTHS) * (1 + PROBE_REPEATS))
    if context < 1:
        return 0.0, 0.0  # a text so short that the first candidate, the model as it is, will do
    step(torch.ones(1, context, dtype=torch.int64, device=device))
    least = []
    for width in PROBE_WIDTHS:
        ids = torch.ones(1, width, dtype=torch.int64, device=device)
        times = []
        for _ in range(1 + PROBE_REPEATS):  # the first, which may set things up, counts only if it is the fastest
            _synchronise(device)
            start = time.perf_counter()
            step(ids)
            _synchronise(device)
            times.append(time.perf_counter() - start)
        least.append(min(times))
    return least[0], least[1]


def _stepper(loaded: LoadedModel) -> Callable[[Tensor], None]:
    """Feeds more and more tokens of one text, as decoding would."""
    if loaded.forward is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=loaded.model.config)
        return lambda ids: loaded.model(input_ids=ids, cache=cache, use_cache=True)
    forward, start = loaded.forward, 0
    slots = forward.new_slots(1, PROBE_CONTEXT + sum(PROBE_WIDTHS) * (1 + PROBE_REPEATS))

    def step(ids: Tensor) -> None:
        nonlocal start
        slots.aim([start], [ids.shape[1]], ids.device)
        forward(ids, slots, ids.shape[1])
        start += ids.shape[1]

    return step


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
