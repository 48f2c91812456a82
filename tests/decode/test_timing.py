"""Paired ratios, their intervals, and the phases of a call, on figures whose truth is known."""

import numpy as np
import pytest
from torch import nn

from decode.draft import Round
from decode.timing import PassClock, Phases, paired_ratio, spread_of


def test_e06_ratios_are_paired_so_that_what_slows_both_cancels_out() -> None:
    # Each repeat is disturbed, but both methods alike: the ratio is 2 in all of them.
    theirs = [[4.0, 8.0, 40.0], [6.0, 2.0, 60.0]]
    ours = [[2.0, 4.0, 20.0], [3.0, 1.0, 30.0]]
    found = paired_ratio(ours, theirs)
    assert found is not None
    assert (found.median, found.low, found.high, found.count) == (2.0, 2.0, 2.0, 6)
    slower = paired_ratio(theirs, ours)
    assert slower is not None and slower.median == 0.5


def covered(width: float) -> float:
    """How often the interval, drawn to `width` times its size, holds the truth."""
    draw = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        ratios = np.exp(np.log(1.5) + draw.normal(0, 0.2, (12, 1)) + draw.normal(0, 0.1, (12, 3)))
        found = paired_ratio([[1.0] * 3] * 12, ratios.tolist())
        assert found is not None
        low, high = (found.median + width * (end - found.median) for end in (found.low, found.high))
        hits += low <= 1.5 <= high
    return hits / 60


def test_intervals_cover_the_truth_though_repeats_of_a_prompt_are_alike() -> None:
    # 95% of 60 are 57; fewer than 51 has odds below 1 in 100. Of intervals a third as wide about half hold the truth.
    assert covered(1.0) >= 0.85
    assert covered(1 / 3) < 0.7


def test_nothing_to_compare_is_none() -> None:
    assert paired_ratio([], []) is None
    assert paired_ratio([[]], [[]]) is None
    assert spread_of([[], []]) is None
    one = paired_ratio([[2.0]], [[3.0]])
    assert one is not None and (one.low, one.median, one.high, one.count) == (1.5, 1.5, 1.5, 1)


def test_the_spread_is_that_of_the_slowest_over_the_median() -> None:
    assert spread_of([[1.0, 1.0], [1.0, 4.0]]) == pytest.approx(3.0)


def test_the_first_round_reads_the_prompt_and_is_kept_apart() -> None:
    rounds = [Round(5, [1], 1, [1, 2], 0.5, 2.0), Round(7, [1], 0, [3], 0.1, 0.2), Round(8, [], 0, [4], 0.0, 0.3)]
    assert Phases.of(rounds) == Phases(2, 2.5, pytest.approx(0.1), pytest.approx(0.5))  # type: ignore[arg-type]
    assert Phases.of([]) is None


def test_passes_of_other_libraries_are_sorted_into_rounds() -> None:
    clock = PassClock([("draft", 1.0), ("target", 2.0), ("draft", 3.0), ("draft", 4.0), ("target", 5.0)])
    assert clock.phases() == Phases(1, 3.0, 7.0, 5.0)
    assert PassClock().phases() is None
    model, clock = nn.Identity(), PassClock()
    with clock.watching(target=model, draft=None):
        model(1)
    model(1)
    assert [role for role, _ in clock.passes] == ["target"]
