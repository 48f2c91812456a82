"""Measures what a round of speculative decoding costs on the host, outside the two models' forwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


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


@dataclass(frozen=True)
class Overhead:
    """Milliseconds per round; a round is one forward of the target."""

    rounds: int
    target_ms: float
    draft_ms: float
    host_ms: float


@contextmanager
def clocked(model: Any) -> Iterator[ForwardClock]:
    """Clock every forward of `model` inside the block."""
    clock = ForwardClock()
    handles = [
        model.register_forward_pre_hook(clock.enter),
        model.register_forward_hook(clock.leave),
    ]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def measure_overhead(
    run: Callable[[list[int]], Any], target: Any, draft: Any, prompts: Sequence[list[int]]
) -> Overhead:
    """The cost of `run` over `prompts`, split per round. For models on the CPU, whose forwards do not run ahead."""
    if any(p.device.type != "cpu" for model in (target, draft) for p in model.parameters()):
        raise ValueError("host time can be told from forward time on the CPU only")
    run(prompts[0])
    with clocked(target) as of_target, clocked(draft) as of_draft, torch.inference_mode():
        start = time.perf_counter()
        for prompt in prompts:
            run(prompt)
        total = time.perf_counter() - start
    per_round = 1000 / of_target.calls
    host = total - of_target.seconds - of_draft.seconds
    return Overhead(of_target.calls, of_target.seconds * per_round, of_draft.seconds * per_round, host * per_round)
