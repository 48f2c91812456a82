"""Costs are kept, and measured again only where something changed that they depend on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import costs as room
from decode import round_times
from decode.config import DecodeConfig, SamplingConfig
from decode.costs import Costs, pair_costs
from decode.draft_length import LONGEST_DRAFT
from decode.models import LoadedModel
from decode.round_times import measure_costs
from tests.decode.machine_clock import Machine, install
from tests.fixtures import loaded, tiny_llama

GREEDY = DecodeConfig(sampling=SamplingConfig())


@pytest.fixture
def pair() -> tuple[LoadedModel, LoadedModel]:
    return loaded(tiny_llama(), "target"), loaded(tiny_llama(seed=1, layers=1), "draft")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds nothing yet, and no memory of costs."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "_measured", {})
    return tmp_path / "cache" / "costs"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The `most` of each measurement; what is measured is made up."""
    asked: list[int] = []

    def measure(target: Any, draft: Any, config: Any, most: int) -> tuple[Costs, bool]:
        asked.append(most)
        return Costs(1.5, tuple(30.0 + width for width in range(most + 1)), 0.5, 0.25), True

    monkeypatch.setattr(room, "measure_costs", measure)
    return asked


Pair = tuple[LoadedModel, LoadedModel]


def up_to(most: int, **settings: Any) -> DecodeConfig:
    return replace(GREEDY, num_speculative_tokens=most, **settings)


def test_the_time_of_a_round_is_the_sum_of_its_parts() -> None:
    costs = Costs(2.0, (20.0, 21.0, 23.0), 0.5)
    assert costs.most == 2
    assert [costs.ms(k) for k in range(3)] == [20.5, 23.5, 27.5]
    assert [replace(costs, start_ms=1.0).ms(k) for k in range(3)] == [20.5, 24.5, 28.5]


def test_costs_are_kept_between_runs(
    pair: Pair, own: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pair_costs(*pair, up_to(8))
    assert pair_costs(*pair, up_to(8)) is not None and counted == [8]
    monkeypatch.setattr(room, "_measured", {})  # another process
    assert pair_costs(*pair, up_to(8)) == first and counted == [8]
    (file,) = own.iterdir()  # no half-written file beside it
    record = json.loads(file.read_text())
    assert record["target"] == "target" and record["draft"] == "draft" and record["draft_ms"] == 1.5


def test_a_shorter_draft_takes_its_part_and_a_longer_one_is_measured(pair: Pair, own: Path, counted: list[int]) -> None:
    short = pair_costs(*pair, up_to(4))
    assert short.verify_ms == (30.0, 31.0, 32.0, 33.0, 34.0)
    assert pair_costs(*pair, up_to(2)).verify_ms == (30.0, 31.0, 32.0)
    assert pair_costs(*pair, up_to(12)).most == 12
    assert pair_costs(*pair, up_to(4)) == short, "what was measured once stays, and with it what a seed gives"
    assert counted == [LONGEST_DRAFT, 12]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\udcff",
        '{"draft_ms": 1.0}',
        '{"draft_ms": 1.0, "verify_ms": [], "round_ms": 0.5, "start_ms": 0.0}',
        '{"draft_ms": NaN, "verify_ms": [1, 1, 1, 1], "round_ms": 0.5, "start_ms": 0.0}',
        '{"draft_ms": 1.0, "verify_ms": [1, -1, 1, 1], "round_ms": 0.5, "start_ms": 0.0}',
        '{"draft_ms": 1.0, "verify_ms": 7, "round_ms": 0.5, "start_ms": 0.0}',
        '{"draft_ms": "slow", "verify_ms": [1, 1, 1, 1], "round_ms": 0.5, "start_ms": 0.0}',
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(
    pair: Pair, own: Path, counted: list[int], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pair_costs(*pair, up_to(3))
    (file,) = own.iterdir()
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(room, "_measured", {})
    assert pair_costs(*pair, up_to(3)) == first and counted == [LONGEST_DRAFT] * 2
    assert json.loads(file.read_text())["draft_ms"] == 1.5


def test_a_folder_that_cannot_be_written_only_costs_time(
    pair: Pair, own: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own.parent.parent.joinpath("a-file").write_text("")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(own.parent.parent / "a-file"))
    assert pair_costs(*pair, up_to(3)).most == 3 and pair_costs(*pair, up_to(3)).most == 3
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
    pair_costs(target, draft, up_to(3))
    for count, other in enumerate(others, start=2):
        pair_costs(*other, up_to(3))
        assert len(counted) == count
    pair_costs(target, loaded(tiny_llama(seed=7, layers=1), "other"), up_to(3))  # other weights, say a later checkpoint
    assert len(counted) == len(others) + 1
    sampled = SamplingConfig(temperature=0.7, top_k=5)
    ways: list[dict[str, Any]] = [
        {"batch_size": 2},
        {"verifier": "block"},
        {"sampling": sampled},
        {"draft_sampling": sampled},
    ]
    for count, way in enumerate(ways, start=len(counted) + 1):
        pair_costs(target, draft, up_to(3, **way))
        assert len(counted) == count
    before = len(counted)
    pair_costs(target, draft, up_to(3, sampling=SamplingConfig(temperature=1.3, top_k=9), seed=5))  # other values only
    assert len(counted) == before
    for attribute, value in (("get_num_threads", lambda: 99), ("__version__", "0")):
        monkeypatch.setattr(torch, attribute, value)
    pair_costs(target, draft, up_to(3))
    assert len(counted) == before + 1


def test_what_a_busy_machine_shows_is_used_but_not_kept(pair: Pair, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 30.0 + 0.3 * len(machine.passes), 1.0)
    install(monkeypatch, machine)
    first = pair_costs(*pair, up_to(8))
    passes = len(machine.passes)
    assert pair_costs(*pair, up_to(8)) == first and len(machine.passes) == passes
    assert not own.exists()


def test_where_no_round_can_be_timed_decoding_goes_on(pair: Pair, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(monkeypatch, Machine(lambda width: 30.0 + width, 1.0))
    monkeypatch.setattr(round_times, "context_limit", lambda _: 2)
    assert measure_costs(*pair, GREEDY, 8) == (None, False)
    assert pair_costs(*pair, up_to(3)).most == 3 and not own.exists() and not machine.passes


def test_models_that_fail_fail_in_decoding_and_leave_no_costs(pair: Pair, own: Path) -> None:
    target = loaded(tiny_llama(), "broken")
    with torch.no_grad():
        target.model.lm_head.weight.fill_(float("nan"))
    assert pair_costs(target, pair[1], up_to(3)).most == 3
    assert not own.exists() and not room._measured
    pair_costs(*pair, up_to(3))  # the same shape, and sound
    assert room._measured
