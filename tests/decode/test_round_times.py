"""Rounds take what a machine with a clock of its own says, whatever disturbs it; real models are left as they were."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import round_times
from decode.backends.cuda_graph import DraftLoop, GraphForward
from decode.backends.eager import TransformersForward
from decode.config import DecodeConfig, SamplingConfig
from decode.models import LoadedModel
from decode.round_times import measure_costs
from decode.theory import Costs
from tests.decode.machine_clock import FIRST, HOST, Machine, install
from tests.fixtures import loaded, tiny_gpt2, tiny_llama

VERIFY = (35.0, 60.0, 61.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0)  # two and three tokens cost more than four
GREEDY = DecodeConfig(sampling=SamplingConfig())


@pytest.fixture
def pair() -> tuple[LoadedModel, LoadedModel]:
    return loaded(tiny_llama(), "target"), loaded(tiny_llama(seed=1, layers=1), "draft")


Pair = tuple[LoadedModel, LoadedModel]


def measured(pair: Pair, most: int = 8, config: DecodeConfig = GREEDY) -> Costs:
    found, steady = measure_costs(*pair, config, most)
    assert found is not None and steady
    return found


def test_costs_are_the_machines_own_whatever_disturbs_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Machine(lambda width: VERIFY[width - 1], 1.6))
    found = measured(pair)
    assert found.verify_ms == pytest.approx(VERIFY)
    assert found.draft_ms == pytest.approx(1.6) and found.start_ms == pytest.approx(FIRST)
    assert found.round_ms == pytest.approx(HOST)


def test_a_draft_whose_first_step_is_the_cheapest_has_no_start_below_nothing() -> None:
    least = {0: (0.0, 30.0, 0.5), 1: (1.0, 31.0, 0.5), 2: (3.0, 32.0, 0.5), 3: (5.0, 33.0, 0.5)}
    found = round_times._costs(least, 3)
    assert found.start_ms == 0 and found.draft_ms == pytest.approx(1.5)


def test_what_the_host_does_for_each_drafted_token_is_part_of_that_token() -> None:
    least = {k: (bool(k) * 1.0 + 2.0 * k, 30.0, 0.5 + 0.25 * k) for k in range(4)}
    found = round_times._costs(least, 3)
    assert (found.start_ms, found.draft_ms, found.round_ms) == pytest.approx((1.0, 2.25, 0.5))
    assert [found.ms(k) for k in range(4)] == pytest.approx([sum(least[k]) for k in range(4)])


def test_lengths_are_interleaved_and_a_slow_machine_repeats_less(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for slow, repeats in ((0.5, round_times.REPEATS), (40.0, round_times.LEAST_REPEATS)):
        machine = install(monkeypatch, Machine(lambda width, slow=slow: slow * VERIFY[width - 1] / 10, slow))  # type: ignore[misc]
        measured(pair)
        widths = [width for name, width in machine.passes if name == "target"]
        assert widths[1:] == list(range(1, 10)) * (repeats + 1)  # the first one read the prompt


def test_of_long_drafts_and_in_batches_only_some_are_timed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, rows, count in ((64, 1, 18), (8, 8, 8)):
        machine = install(monkeypatch, Machine(lambda width: 30.0 + width, 1.0))
        found = measured(pair, most, replace(GREEDY, batch_size=rows))
        assert found.most == most and len({width for name, width in machine.passes if name == "target"}) < count
        assert found.verify_ms == pytest.approx([30.0 + width for width in range(1, most + 2)])


@pytest.mark.parametrize("capacity", [3, 5, 9, 30])
def test_no_round_goes_beyond_a_short_context(pair: Pair, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Machine(lambda width: 30.0 + width, 1.0))
    monkeypatch.setattr(round_times, "context_limit", lambda _: capacity)
    found = measured(pair)
    assert len(found.verify_ms) == 9
    assert found.verify_ms[-1] == pytest.approx(30.0 + min(9, capacity - 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_real_models_are_measured_and_left_as_they_were(pair: Pair, temperature: float, rows: int) -> None:
    target, draft = pair[0], loaded(tiny_gpt2(positions=16), "short")
    state = torch.get_rng_state()
    config = DecodeConfig(sampling=SamplingConfig(temperature=temperature), batch_size=rows)
    found, _ = measure_costs(target, draft, config, 10)
    assert found is not None
    assert len(found.verify_ms) == 11 and all(0 < ms < math.inf for ms in found.verify_ms) and found.draft_ms >= 0
    assert torch.equal(state, torch.get_rng_state())
    assert not draft.model.training and not target.model.training


def test_a_draft_that_is_made_in_one_run_is_timed_as_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    target, draft = (replace(each, forward=GraphForward(TransformersForward(each.model), each.device)) for each in pair)
    monkeypatch.setattr(DraftLoop, "__call__", counting(DraftLoop.__call__, runs))
    found, _ = measure_costs(target, draft, GREEDY, 4)
    assert found is not None
    assert set(runs) == {1, 2, 3, 4}, "a length is a run"


def counting(call: Callable[..., Any], runs: list[int]) -> Callable[..., Any]:
    def counted(loop: Any, token: Tensor, position: Tensor, uniforms: Tensor) -> Any:
        runs.append(len(uniforms))
        return call(loop, token, position, uniforms)

    return counted
