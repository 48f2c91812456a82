"""Ratios of sums with their intervals, and the order in which methods are timed."""

import numpy as np
import pytest

from decode.timing import estimate, interleaved


def ratio(above: float, below: float) -> float:
    return above / below


def test_an_estimate_is_a_ratio_of_sums_and_its_interval_holds_it() -> None:
    found = estimate(ratio, [10, 20, 30], [5, 20, 5])
    assert found is not None
    assert found.value == 2.0  # not the mean of 2, 1 and 6
    assert 1.0 <= found.low < 2.0 < found.high <= 6.0
    same = estimate(ratio, [10, 20, 30], [5, 10, 15])
    assert same is not None and (same.low, same.value, same.high) == (2.0, 2.0, 2.0)


def test_prompts_without_a_token_are_left_out_and_none_is_none() -> None:
    found = estimate(ratio, [10, 0, 30], [5, 3, 15])
    assert found is not None and found.value == 2.0
    assert estimate(ratio, [0], [5]) is None
    assert estimate(ratio, [], []) is None


def covered(width: float) -> float:
    """How often the interval, drawn to `width` times its size, holds the truth: a ratio of 1.25."""
    draw = np.random.default_rng(5)
    hits = 0
    for _ in range(100):
        below = draw.integers(20, 40, 20)
        above = below * 1.25 * np.exp(draw.normal(0, 0.2, 20) - 0.02)
        found = estimate(ratio, above.tolist(), below.tolist())
        assert found is not None
        low, high = (found.value + width * (end - found.value) for end in (found.low, found.high))
        hits += low <= 1.25 <= high
    return hits / 100


def test_intervals_cover_the_truth() -> None:
    # Percentile intervals over 20 prompts hold it in about 92 of 100; those a third as wide in about half.
    assert covered(1.0) >= 0.84
    assert covered(1 / 3) < 0.7


@pytest.mark.parametrize("repeats", [1, 2])
def test_e06_methods_take_turns_on_every_item_and_each_comes_first(repeats: int) -> None:
    order = list(interleaved(3, 3, repeats))
    assert [item for item, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2] * repeats
    blocks = [[method for _, method in order[i : i + 3]] for i in range(0, len(order), 3)]
    assert all(sorted(block) == [0, 1, 2] for block in blocks)
    assert {block[0] for block in blocks} == {0, 1, 2}
