"""A machine with a clock of its own: sessions whose passes take what is said, for rounds that are timed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import loop, round_times
from decode.models import LoadedModel
from decode.verifiers import VERIFIERS

FIRST = 1.25  # what a round's first draft step costs beside the others, in milliseconds
HOST = 0.5  # and verifying


class Machine:
    """Sessions on a clock that only they move: a pass over w tokens takes `target(w)` or `draft` milliseconds."""

    def __init__(self, target: Callable[[int], float], draft: float, disturbed: bool = True) -> None:
        self.now, self.passes = 0.0, []  # type: float, list[tuple[str, int]]
        self._target, self._draft, self._disturbed = target, draft, disturbed
        self._seen: set[tuple[str, int]] = set()

    def perf_counter(self) -> float:
        return self.now / 1000

    def new_session(self, model: LoadedModel, rows: int, length: int) -> "MachineSession":
        return MachineSession(self, model.name, rows, length)

    def run(self, name: str, width: int) -> None:
        after_target = not self.passes or self.passes[-1][0] == "target"
        self.passes.append((name, width))
        first = (name, width) not in self._seen
        self._seen.add((name, width))
        taken = self._target(width) if name == "target" else self._draft + FIRST * after_target
        self.now += 5000.0 if first else taken  # the first pass compiles
        if self._disturbed and len(self.passes) % 31 == 0:
            self.now += 30.0  # another process had the core


class MachineSession:
    """Proposes token 0 and wants another, so that a round keeps nothing and adds one token."""

    capacity = 8192

    def __init__(self, machine: Machine, name: str, rows: int, length: int) -> None:
        self._machine, self._name, self._length = machine, name, length
        self._fed = [0] * rows

    def extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        new = [len(context) - fed for context, fed in zip(contexts, self._fed, strict=True)]
        assert min(new) >= min(keep) and max(map(len, contexts)) <= self._length
        self._machine.run(self._name, max(keep))
        self._fed = [len(context) for context in contexts]
        token = int(self._name == "target")
        return [torch.eye(48)[token].expand(count, 48) for count in keep]

    def rewind(self, lengths: Sequence[int]) -> None:
        self._fed = [min(fed, length) for fed, length in zip(self._fed, lengths, strict=True)]


def install(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Machine:
    def verify(*arguments: Any) -> Any:
        machine.now += HOST
        return VERIFIERS["token"](*arguments)

    monkeypatch.setattr(round_times, "new_session", machine.new_session)
    monkeypatch.setattr(round_times, "verifier_of", lambda _: verify)
    monkeypatch.setattr(round_times, "context_limit", lambda _: MachineSession.capacity)
    for module in (round_times, loop):
        monkeypatch.setattr(module, "time", machine)
    return machine
