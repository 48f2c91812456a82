"""What timings tell: where the seconds of a call went, and ratios with their intervals. Knows no method."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from decode.draft import Round

RESAMPLES = 1000
LEVEL = 0.95  # of intervals
T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call` returns and the seconds until the device was done with it."""
    _synchronise()
    start = time.perf_counter()
    found = call()
    _synchronise()
    return found, time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(methods: int, items: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(item, method) in the order to time them: all methods on an item, in an order that rotates from item to item."""
    order = list(range(methods))
    for _ in range(repeats):
        for item in range(items):
            yield from ((item, method) for method in order)
            order = order[1:] + order[:1]


@dataclass(frozen=True)
class Phases:
    """Seconds inside the two models during one call. The first round, which reads the prompt, is kept apart.

    For models on the CPU: elsewhere passes run ahead of the host, and their seconds would be those of the queueing.
    """

    rounds: int  # after the first; a round is one pass of the target
    first_seconds: float  # of both models in the first round
    draft_seconds: float  # in the other rounds
    target_seconds: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Phases | None":
        """The phases of a traced call; None where nothing was decoded."""
        if not rounds:
            return None
        first, *others = rounds
        return cls(
            len(others),
            first.draft_seconds + first.target_seconds,
            sum(r.draft_seconds for r in others),
            sum(r.target_seconds for r in others),
        )


@dataclass
class PassClock:
    """Clocks the passes of models that another library runs; `phases` sorts them into rounds."""

    passes: list[tuple[str, float]] = field(default_factory=list)  # role and seconds, as the passes ended

    @contextmanager
    def watching(self, **models: Any) -> Iterator[None]:
        """Clock every pass of these models, given by role ("target", "draft"; None is passed over)."""
        handles = []
        for role, model in models.items():
            if model is not None:
                handles += self._hooks(role, model)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, role: str, model: Any) -> list[Any]:
        started: list[float] = []

        def enter(*_: Any) -> None:
            started.append(time.perf_counter())

        def leave(*_: Any) -> None:
            self.passes.append((role, time.perf_counter() - started.pop()))

        return [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]

    def phases(self) -> Phases | None:
        """None where the target never ran."""
        roles = [role for role, _ in self.passes]
        if "target" not in roles:
            return None
        end = roles.index("target") + 1
        later = self.passes[end:]
        return Phases(
            roles.count("target") - 1,
            sum(seconds for _, seconds in self.passes[:end]),
            sum(seconds for role, seconds in later if role == "draft"),
            sum(seconds for role, seconds in later if role == "target"),
        )


@dataclass(frozen=True)
class PairedRatio:
    """How many times as fast one method is as another, from measurements taken side by side."""

    median: float
    low: float
    high: float
    count: int  # of pairs


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> PairedRatio | None:
    """Ratios theirs / ours of seconds per token, [prompt][repeat], both of the same prompt and repeat.

    The median over all pairs, with a percentile bootstrap interval: prompts are drawn with replacement, then repeats
    within each, since repeats of one prompt are not independent (Efron 1979; Davison and Hinkley 1997, section 3.8).
    The draws are the same in every run. With one prompt and one repeat the interval is that one ratio. None for none.
    """
    ratios = [
        [b / a for a, b in zip(own, other, strict=True) if a > 0] for own, other in zip(ours, theirs, strict=True)
    ]
    ratios = [of_prompt for of_prompt in ratios if of_prompt]
    if not ratios:
        return None
    every = [ratio for of_prompt in ratios for ratio in of_prompt]
    low, high = np.quantile(_resampled_medians(ratios), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return PairedRatio(median(every), float(low), float(high), len(every))


def _resampled_medians(ratios: Sequence[Sequence[float]]) -> "np.ndarray[Any, Any]":  # [RESAMPLES]
    draw = np.random.default_rng(0)
    counts = np.array([len(of_prompt) for of_prompt in ratios])
    table = np.array([[*of_prompt, *[0.0] * (counts.max() - len(of_prompt))] for of_prompt in ratios])
    prompts = draw.integers(len(ratios), size=(RESAMPLES, len(ratios), 1))
    repeats = (draw.random((RESAMPLES, len(ratios), counts.max())) * counts[prompts]).astype(int)
    return np.median(table[prompts, repeats], axis=(1, 2))


@dataclass(frozen=True)
class Estimate:
    """A figure made of sums over prompts, with its interval."""

    value: float
    low: float
    high: float


def estimate(figure: Callable[..., Any], *columns: Sequence[float]) -> Estimate | None:
    """`figure(sum of each column)`, columns being [prompt], with a percentile bootstrap interval over prompts.

    `figure` works on arrays too. A prompt with a zero in any column is left out; None where none is left.
    """
    table = np.array(columns, dtype=float)  # [C, P]
    table = table[:, (table > 0).all(0)]
    if not table.size:
        return None
    drawn = np.random.default_rng(0).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    low, high = np.quantile(figure(*table[:, drawn].sum(-1)), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(figure(*table.sum(-1))), float(low), float(high))


def spread_of(seconds: Sequence[Sequence[float]]) -> float | None:
    """How far the slowest timing lies above the median one; `seconds` per token, of all prompts and repeats."""
    every = [pace for of_prompt in seconds for pace in of_prompt]
    return max(every) / median(every) - 1 if every and median(every) > 0 else None
