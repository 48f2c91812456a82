"""Times rounds of a pair on this machine: the loop's own, on texts of no meaning, each of the length that is asked for.

Whole rounds are timed, not passes one by one: a pass that streams all weights through the processor's caches makes what
comes after it slower, and how tokens are drawn and verified is part of the cost.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import linear_regression, median
from typing import Any

import torch

from decode.config import DecodeConfig
from decode.draft_length.base import Fixed, LengthSetup
from decode.errors import DraftsmithError
from decode.loop import decode_rounds
from decode.model_facts import context_limit
from decode.models import LoadedModel
from decode.prepare import prepare_row
from decode.proposers import PROPOSERS, Setup
from decode.row import Row
from decode.session import new_session
from decode.theory import Costs
from decode.verifiers import verifier_of
from decode.vocabulary import pair_vocabulary

CONTEXT = 64  # tokens of a text when its timed rounds begin
ROOM = 256  # tokens that it may grow by
DENSE = 8  # every length up to here is timed: costs are not monotonic in width. Beyond, and in batches, only some are
MOST_ROWS = 8  # a larger batch is taken to be like one of so many: to time it would take too long
# Timed rounds of each length at most. The least counts, since what disturbs only ever adds. An error of 2 % in single
# lengths' costs is worth up to 4 % of a text's speed.
REPEATS = 8
LEAST_REPEATS = 2
BUDGET_SECONDS = 2.0  # no further repeat once so much was spent
STEADY = 1.2  # the second best of a length's repeats to the best, over which the machine was busy

Parts = tuple[float, float, float]  # milliseconds of a round: drafting, the target's pass, all else


def rows_timed(config: DecodeConfig) -> int:
    """How many texts are decoded together while rounds are timed."""
    return min(config.batch_size, MOST_ROWS)


def measure_costs(
    target: LoadedModel, draft: LoadedModel, config: DecodeConfig, most: int
) -> tuple[Costs | None, bool]:
    """Time rounds of 0..most drafted tokens now, drawn and verified as `config` (whose sampling is stated) says: some 3
    seconds where a pass of the target takes 40 ms. Also whether repeats agreed.

    The models are in eval mode; nothing of them is changed. A length for which their contexts have no room is taken to
    be verified as fast as the longest that has. None where no round could be timed: contexts of two tokens, or models
    that fail, of which decoding itself will tell.
    """
    texts = _Texts(target, draft, config, most)
    found: dict[int, list[Parts]] = {}
    for _ in _repeats():
        for length in _lengths(most, rows_timed(config)):
            if (parts := texts.time(length)) is not None:
                found.setdefault(length, []).append(parts)
    timed = {length: times[1:] for length, times in found.items() if len(times) > LEAST_REPEATS}
    if 0 not in timed:
        return None, False
    least = {length: tuple(map(min, zip(*times, strict=True))) for length, times in timed.items()}
    return _costs(least, most), median(map(_spread, timed.values())) < STEADY


def _repeats() -> Iterator[int]:
    """One repeat to warm up, which compiles what is to be compiled; then as many as the budget allows."""
    yield 0
    began = time.perf_counter()
    for repeat in range(1, REPEATS + 1):
        yield repeat
        if repeat >= LEAST_REPEATS and time.perf_counter() - began > BUDGET_SECONDS:
            return


def _lengths(most: int, rows: int) -> list[int]:
    """0, 1, 2 .. DENSE for a single text, then half as much again each time, and `most`."""
    lengths = [0]
    while lengths[-1] < most:
        last = lengths[-1]
        lengths.append(min(last + 1 if last < (DENSE if rows == 1 else 2) else last * 3 // 2, most))
    return lengths


def _spread(times: list[Parts]) -> float:
    first, second = sorted(map(sum, times))[:2]
    return second / first


def _costs(least: dict[int, Any], most: int) -> Costs:
    """What drafting takes as a line, a draft's first step being dearer than the next; what the host does for each
    drafted token is part of that."""
    verify = tuple(_between({length: parts[1] for length, parts in least.items()}, k) for k in range(most + 1))
    host = least[0][2]
    drafting = {length: max(parts[0] + parts[2] - host, 0.0) for length, parts in least.items() if length}
    start, step = _line(drafting) if drafting else (0.0, 0.0)
    return Costs(step, verify, host, start)


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Start and slope of the line through `points`, neither of them below 0."""
    x, y = list(points), list(points.values())
    if len(x) > 1:
        line = linear_regression(x, y)
        if line.slope > 0 and line.intercept > 0:
            return line.intercept, line.slope
    return 0.0, sum(y) / sum(x)


def _between(known: dict[int, float], length: int) -> float:
    """On the line between the nearest measured lengths; beyond the longest its own time."""
    below = max(k for k in known if k <= length)
    above = min((k for k in known if k >= length), default=below)
    if above == below:
        return known[below]
    share = (length - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


class _Asked(Fixed):
    """The length that is asked for now."""

    length = 0

    def limit(self) -> int:
        return self.length


class _Texts:
    """A batch of like texts, decoded round by round. When they are full, others begin."""

    def __init__(self, target: LoadedModel, draft: LoadedModel, config: DecodeConfig, most: int) -> None:
        self._target, self._draft, self._num_rows = target, draft, rows_timed(config)
        self._vocabulary = pair_vocabulary(target, draft).on(target.device)
        self._limit = min(context_limit(draft.model), context_limit(target.model))
        self._prompt = [0] * max(1, min(CONTEXT, self._limit - most - 2))  # any tokens do: time doesn't depend on them
        self._config = replace(
            config,
            max_new_tokens=max(ROOM, 2 * most),
            num_speculative_tokens=most,
            draft_length="fixed",
            draft_threshold=None,
            stop_strings=[],
            eos_token_ids=[],
            seed=0,
        )
        self._asked = _Asked(LengthSetup())
        self._rows: list[Row] = []

    def time(self, length: int) -> Parts | None:
        """A round that drafts so many tokens; None where the models' contexts have no room for it, or it fails."""
        try:
            if not self._fits(length):
                self._begin()
            return self._next(length) if self._fits(length) else None
        except DraftsmithError:
            self._rows = []
            return None

    def _fits(self, length: int) -> bool:
        room = (row.stopping.room > length and row.length + length <= self._limit for row in self._rows)
        return bool(self._rows) and all(room)

    def _begin(self) -> None:
        """New texts, whose prompts are read."""
        target, draft, count = self._target, self._draft, self._num_rows
        self._rows = []
        if len(self._prompt) + 2 > self._limit:
            return
        rows = [prepare_row(target, draft, self._vocabulary, self._prompt, self._config, None) for _ in range(count)]
        for row in rows:
            row.draft_length = self._asked
        longest = len(self._prompt) + rows[0].stopping.room
        session = new_session(target, count, longest)
        proposer = PROPOSERS["draft_model"](Setup(new_session(draft, count, longest), self._vocabulary.size))
        for owner, name in ((session, "extend"), (proposer, "propose")):
            _wait_for(owner, name, {target.device, draft.device})
        self._rounds = decode_rounds(rows, session, proposer, verifier_of(self._config))
        self._next(0)
        self._rows = rows

    def _next(self, length: int) -> Parts:
        self._asked.length = length
        began = time.perf_counter()
        done = next(self._rounds)[0][1]
        taken = time.perf_counter() - began
        rest = taken - done.draft_seconds - done.target_seconds
        return 1000 * done.draft_seconds, 1000 * done.target_seconds, 1000 * rest


def _wait_for(owner: Any, name: str, devices: set[torch.device]) -> None:
    """Let a method return when its work is done, so that the loop's clock tells what it takes."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return result

    setattr(owner, name, call)
