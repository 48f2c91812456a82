"""Measures what a round of speculative decoding costs on the host, outside the two models' forwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from decode.backends import with_backend
from decode.backends.base import Forward
from decode.backends.eager import TransformersForward, why_not_slots
from decode.benchmark import decoder_method, transformers_method
from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.models import LoadedModel
from decode.slots import Slots


@dataclass
class ForwardClock:
    """Seconds spent inside the forwards of one model, and their number."""

    seconds: float = 0.0
    calls: int = 0
    _started: float = field(default=0.0, repr=False)

    def enter(self, *_: Any) -> None:
        """A forward begins."""
        self._started = time.perf_counter()

    def leave(self, *_: Any) -> None:
        """A forward ended."""
        self.seconds += time.perf_counter() - self._started
        self.calls += 1


class ClockedForward:
    """A Forward that is clocked: what a module's hooks would miss, as our own forwards do not call the module."""

    def __init__(self, inner: Forward, clock: ForwardClock) -> None:
        self._inner, self._clock = inner, clock

    def new_slots(self, rows: int, length: int) -> Slots:
        """See Forward."""
        return self._inner.new_slots(rows, length)

    def pad_width(self, width: int) -> int:
        """See Forward."""
        return self._inner.pad_width(width)

    def __call__(self, ids: Tensor, slots: Slots, keep: int) -> Tensor:
        """See Forward."""
        self._clock.enter()
        logits = self._inner(ids, slots, keep)
        self._clock.leave()
        return logits


def clocked(loaded: LoadedModel) -> tuple[LoadedModel, ForwardClock]:
    """`loaded` with its forward clocked, for our own decoding.

    Raises ValueError for a model that is not run over slots, or not on the CPU, where forwards run ahead.
    """
    _check_on_cpu(loaded.model)
    if loaded.forward is None and (reason := why_not_slots(loaded.model)):
        raise ValueError(f"model {loaded.name!r} cannot be clocked: {reason}")
    clock = ForwardClock()
    forward = ClockedForward(loaded.forward or TransformersForward(loaded.model), clock)
    return replace(loaded, forward=forward), clock


@contextmanager
def hooked(model: Any) -> Iterator[ForwardClock]:
    """Clock every forward of a transformers model inside the block, whoever calls it. Raises ValueError off the CPU."""
    _check_on_cpu(model)
    clock = ForwardClock()
    handles = [model.register_forward_pre_hook(clock.enter), model.register_forward_hook(clock.leave)]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def _check_on_cpu(model: Any) -> None:
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("host time can be told from forward time on the CPU only")


@dataclass(frozen=True)
class Overhead:
    """Milliseconds per round; a round is one forward of the target."""

    rounds: int
    target_ms: float
    draft_ms: float
    host_ms: float


@torch.inference_mode()
def measure_overhead(
    run: Callable[[list[int]], Any], target: ForwardClock, draft: ForwardClock, prompts: Sequence[list[int]]
) -> Overhead:
    """The cost of `run` over `prompts`, split per round by the clocks of its two models. The first prompt is run once
    before."""
    run(prompts[0])
    before = [(clock.seconds, clock.calls) for clock in (target, draft)]
    start = time.perf_counter()
    for prompt in prompts:
        run(prompt)
    total = time.perf_counter() - start
    of_target, of_draft = (clock.seconds - was[0] for clock, was in zip((target, draft), before, strict=True))
    rounds = target.calls - before[0][1]
    host = total - of_target - of_draft
    return Overhead(rounds, *(1000 * seconds / rounds for seconds in (of_target, of_draft, host)))


def compare_overheads(
    pair: tuple[LoadedModel, LoadedModel],
    backend: str,
    prompts: Sequence[list[int]],
    config: DecodeConfig,
    assistant: Any = None,
) -> dict[str, Overhead]:
    """The cost of our own decoding, with `backend`, beside transformers' assisted generation, of the same pair and with
    as many drafted tokens a round. `assistant`: the draft as transformers loads it; None: the draft's own model."""
    target, draft = pair
    assistant = draft.model if assistant is None else assistant
    (ours, of_target), (drafter, of_draft) = (clocked(with_backend(loaded, backend)) for loaded in pair)
    most = config.max_new_tokens or 1
    own = decoder_method("draftsmith", SpeculativeDecoder(ours, drafter), config)
    costs = {own.name: measure_overhead(lambda p: own.run(p, most), of_target, of_draft, prompts)}
    theirs = transformers_method(
        "transformers assisted", target, config, assistant, num_assistant_tokens=config.most_drafted
    )
    with hooked(target.model) as of_target, hooked(assistant) as of_draft:
        costs[theirs.name] = measure_overhead(lambda p: theirs.run(p, most), of_target, of_draft, prompts)
    return costs
