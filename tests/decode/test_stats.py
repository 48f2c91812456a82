"""Counts and the rates derived from them."""

import json

from decode.draft import Round
from decode.stats import Stats

ROUNDS = [
    Round(5, [1, 2, 3], 3, [1, 2, 3, 9]),
    Round(9, [4, 5, 6], 1, [4, 8]),
    Round(11, [], 0, [7]),
    Round(12, [1, 1], 0, [2]),
]


def test_rates_follow_from_counts() -> None:
    stats = Stats.of(ROUNDS)
    assert stats.acceptance_histogram == (1, 1, 0, 1)
    assert (stats.num_target_steps, stats.num_spec_steps, stats.num_output_tokens) == (4, 3, 8)
    assert stats.mean_acceptance_length == 2.0
    assert stats.draft_acceptance_rate == 4 / 8
    assert stats.per_position_acceptance_rate == [2 / 3, 1 / 3, 1 / 3]
    assert sum(k * n for k, n in enumerate(stats.acceptance_histogram)) == stats.num_accepted_draft_tokens


def test_sums_equal_the_whole() -> None:
    assert Stats.sum(Stats.of([r]) for r in ROUNDS) == Stats.of(ROUNDS)
    assert Stats.sum([]) == Stats.of([]) == Stats()


def test_e04_rounds_without_a_draft_are_no_zero_rate() -> None:
    stats = Stats.of([Round(3, [], 0, [1]), Round(4, [], 0, [2])])
    assert stats.draft_acceptance_rate is None
    assert stats.per_position_acceptance_rate == []
    assert stats.mean_acceptance_length == 1.0
    assert json.loads(json.dumps(Stats().as_dict(), allow_nan=False))["mean_acceptance_length"] is None
