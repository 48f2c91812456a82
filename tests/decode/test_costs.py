"""Costs are what a machine with a clock of its own takes, and are measured again only where something changed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import costs as room
from decode.costs import Costs, measure_costs, pair_costs
from decode.draft_length import LONGEST_DRAFT
from decode.models import LoadedModel
from tests.fixtures import loaded, tiny_gpt2, tiny_llama

VERIFY = (35.0, 60.0, 61.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0)  # two and three tokens cost more than four


class Machine:
    """Sessions on a clock that only they move: a pass over w tokens takes `target(w)` or `draft` milliseconds."""

    def __init__(self, target: Callable[[int], float], draft: float, capacity: int = 8192) -> None:
        self.now, self.passes = 0.0, []  # type: float, list[tuple[str, int]]
        self._ms = {"target": target, "draft": lambda _: draft}
        self._capacity, self._seen = capacity, set()  # type: int, set[tuple[str, int]]

    def perf_counter(self) -> float:
        return self.now / 1000

    def new_session(self, model: LoadedModel, rows: int, length: int) -> "MachineSession":
        assert rows == 1
        return MachineSession(self, model.name, min(length, self._capacity), self._capacity)

    def run(self, name: str, width: int) -> None:
        self.passes.append((name, width))
        first = (name, width) not in self._seen
        self._seen.add((name, width))
        self.now += 5000.0 if first else self._ms[name](width)  # the first pass compiles
        if len(self.passes) % 7 == 0:
            self.now += 30.0  # another process had the core


class MachineSession:
    def __init__(self, machine: Machine, name: str, length: int, capacity: int) -> None:
        self._machine, self._name, self._length, self.capacity = machine, name, length, capacity
        self._fed = 0

    def extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        assert self._fed + keep[0] <= len(contexts[0]) <= self._length
        self._machine.run(self._name, len(contexts[0]) - self._fed)
        self._fed = len(contexts[0])
        return [torch.zeros(keep[0], 48)]

    def rewind(self, lengths: Sequence[int]) -> None:
        self._fed = min(self._fed, lengths[0])


@pytest.fixture
def pair() -> tuple[LoadedModel, LoadedModel]:
    return loaded(tiny_llama(), "target"), loaded(tiny_llama(seed=1, layers=1), "draft")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds nothing yet, and no memory of costs."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "_measured", {})
    return tmp_path / "cache" / "costs"


def install(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Machine:
    monkeypatch.setattr(room, "new_session", machine.new_session)
    monkeypatch.setattr(room, "time", machine)
    return machine


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The `most` of each measurement; what is measured is made up."""
    asked: list[int] = []

    def measure(target: Any, draft: Any, most: int) -> tuple[Costs, bool]:
        asked.append(most)
        return Costs(1.5, tuple(30.0 + width for width in range(most + 1)), 0.5), True

    monkeypatch.setattr(room, "measure_costs", measure)
    return asked


Pair = tuple[LoadedModel, LoadedModel]


def test_costs_are_the_machines_own_whatever_disturbs_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Machine(lambda width: VERIFY[width - 1], 1.6))
    found, steady = measure_costs(*pair, most=8)
    assert found.verify_ms == pytest.approx(VERIFY) and steady
    assert found.draft_ms == pytest.approx(1.6) and found.round_ms == room.ROUND_MS


def test_widths_are_interleaved_and_a_slow_machine_repeats_less(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for slow, repeats in ((1.0, room.REPEATS), (40.0, room.LEAST_REPEATS)):
        machine = install(monkeypatch, Machine(lambda width, slow=slow: slow * VERIFY[width - 1] / 10, slow))
        measure_costs(*pair, most=8)
        widths = [width for name, width in machine.passes if name == "target"][1:]
        assert widths == list(range(1, 10)) * (repeats + 1)


def test_of_wide_passes_only_some_are_timed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(monkeypatch, Machine(lambda width: 30.0 + width, 1.0))
    found, _ = measure_costs(*pair, most=64)
    assert found.most == 64 and len({width for name, width in machine.passes if name == "target"}) < 18
    assert found.verify_ms == pytest.approx([30.0 + width for width in range(1, 66)])


@pytest.mark.parametrize("capacity", [2, 5, 9, 30])
def test_no_pass_goes_beyond_a_short_context(pair: Pair, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Machine(lambda width: 30.0 + width, 1.0, capacity))
    found, _ = measure_costs(*pair, most=8)
    assert len(found.verify_ms) == 9
    assert found.verify_ms[-1] == pytest.approx(30.0 + min(9, max(capacity - 1, 1)))


def test_real_models_are_measured_and_left_as_they_were(pair: Pair) -> None:
    target, draft = pair[0], loaded(tiny_gpt2(positions=8), "short")
    state = torch.get_rng_state()
    found, _ = measure_costs(target, draft, most=10)
    assert len(found.verify_ms) == 11 and all(0 < ms < 10_000 for ms in (found.draft_ms, *found.verify_ms))
    assert torch.equal(state, torch.get_rng_state())
    assert not draft.model.training and not target.model.training


def test_the_time_of_a_round_is_the_sum_of_its_parts() -> None:
    costs = Costs(2.0, (20.0, 21.0, 23.0), 0.5)
    assert costs.most == 2
    assert [costs.ms(k) for k in range(3)] == [20.5, 23.5, 27.5]


def test_costs_are_kept_between_runs(
    pair: Pair, own: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pair_costs(*pair, 8)
    assert pair_costs(*pair, 8) is not None and counted == [8]
    monkeypatch.setattr(room, "_measured", {})  # another process
    assert pair_costs(*pair, 8) == first and counted == [8]
    (file,) = own.iterdir()  # no half-written file beside it
    record = json.loads(file.read_text())
    assert record["target"] == "target" and record["draft"] == "draft" and record["draft_ms"] == 1.5


def test_what_a_busy_machine_shows_is_used_but_not_kept(pair: Pair, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 30.0 + len(machine.passes) % 10 * 5.0, 1.0)
    install(monkeypatch, machine)
    first = pair_costs(*pair, 8)
    passes = len(machine.passes)
    assert pair_costs(*pair, 8) == first and len(machine.passes) == passes
    assert not own.exists()


def test_a_shorter_draft_takes_its_part_and_a_longer_one_is_measured(pair: Pair, own: Path, counted: list[int]) -> None:
    short = pair_costs(*pair, 4)
    assert short.verify_ms == (30.0, 31.0, 32.0, 33.0, 34.0)
    assert pair_costs(*pair, 2).verify_ms == (30.0, 31.0, 32.0)
    assert pair_costs(*pair, 12).most == 12
    assert pair_costs(*pair, 4) == short, "what was measured once stays, and with it what a seed gives"
    assert counted == [LONGEST_DRAFT, 12]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\udcff",
        '{"draft_ms": 1.0}',
        '{"draft_ms": 1.0, "verify_ms": [], "round_ms": 0.5}',
        '{"draft_ms": NaN, "verify_ms": [1, 1, 1, 1], "round_ms": 0.5}',
        '{"draft_ms": 1.0, "verify_ms": [1, -1, 1, 1], "round_ms": 0.5}',
        '{"draft_ms": 1.0, "verify_ms": 7, "round_ms": 0.5}',
        '{"draft_ms": "slow", "verify_ms": [1, 1, 1, 1], "round_ms": 0.5}',
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(
    pair: Pair, own: Path, counted: list[int], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pair_costs(*pair, 3)
    (file,) = own.iterdir()
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(room, "_measured", {})
    assert pair_costs(*pair, 3) == first and counted == [LONGEST_DRAFT] * 2
    assert json.loads(file.read_text())["draft_ms"] == 1.5


def test_a_folder_that_cannot_be_written_only_costs_time(
    pair: Pair, own: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own.parent.parent.joinpath("a-file").write_text("")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(own.parent.parent / "a-file"))
    assert pair_costs(*pair, 3).most == 3 and pair_costs(*pair, 3).most == 3
    assert counted == [LONGEST_DRAFT]


def test_whatever_costs_depend_on_is_told_apart(
    pair: Pair, own: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    others = [
        (replace(target, backend="prepacked"), draft),
        (target, replace(draft, vocab_ids=torch.arange(9))),
        (target, loaded(tiny_llama(seed=1, layers=1).float(), "draft")),
        (target, loaded(tiny_llama(seed=1, layers=2), "draft")),
        (draft, target),
    ]
    pair_costs(target, draft, 3)
    for count, other in enumerate(others, start=2):
        pair_costs(*other, 3)
        assert len(counted) == count
    pair_costs(target, loaded(tiny_llama(seed=7, layers=1), "other"), 3)  # other weights, say a later checkpoint
    assert len(counted) == len(others) + 1
    for attribute, value in (("get_num_threads", lambda: 99), ("__version__", "0")):
        monkeypatch.setattr(torch, attribute, value)
    pair_costs(target, draft, 3)
    assert len(counted) == len(others) + 2
