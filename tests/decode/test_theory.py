"""The closed forms, against figures worked out by hand and against a simulation of the assumption they state."""

import random
import subprocess
import sys

import pytest

from decode.errors import UsageError
from decode.theory import (
    Costs,
    best_length,
    conditional_rates,
    expected_tokens,
    expected_tokens_of,
    operations_factor,
    predict,
    predict_best,
    predict_run,
    speedup,
    textbook_estimate,
    textbook_table,
    walltime_improvement,
)

# A step of 2 ms against one of 20; a width of 3 is dearer than one of 4.
COSTS = Costs(draft_ms=2.0, verify_ms=(19.0, 21.0, 30.0, 23.0), round_ms=1.0)


@pytest.mark.parametrize(
    ("acceptance", "length", "tokens"),
    [
        (0.5, 4, 1.9375),  # 1 + 1/2 + 1/4 + 1/8 + 1/16
        (0.8, 2, 2.44),  # 1 + .8 + .64
        (2 / 3, 2, 1 + 10 / 9),  # the block rule's paper: 10/9 accepted tokens by the token rule
        (0.0, 5, 1.0),
        (1.0, 5, 6.0),
        (0.7, 0, 1.0),
    ],
)
def test_expected_tokens_are_those_worked_out_by_hand(acceptance: float, length: int, tokens: float) -> None:
    assert expected_tokens(acceptance, length) == pytest.approx(tokens)
    assert expected_tokens_of([acceptance] * length)[-1] == pytest.approx(tokens)


def test_expected_tokens_near_one_go_over_into_its_own_case() -> None:
    assert expected_tokens(1 - 1e-9, 8) == pytest.approx(expected_tokens(1.0, 8), rel=1e-6)


def test_expected_tokens_are_what_rounds_of_independent_coins_give() -> None:
    rng, rounds, total = random.Random(0), 20_000, 0
    for _ in range(rounds):
        accepted = 0
        while accepted < 5 and rng.random() < 0.7:
            accepted += 1
        total += accepted + 1
    # The deviation of a round is about 1.9 tokens, so four of the mean are 0.05.
    assert abs(total / rounds - expected_tokens(0.7, 5)) < 0.05
    assert abs(total / rounds - expected_tokens(0.65, 5)) > 0.05  # another rate is told apart


def test_rates_of_positions_may_differ() -> None:
    assert expected_tokens_of([0.8, 0.5, 0.25]) == pytest.approx([1.0, 1.8, 2.2, 2.3])
    assert conditional_rates([0.8, 0.4, 0.1]) == pytest.approx([0.8, 0.5, 0.25])
    assert conditional_rates([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]
    assert conditional_rates([]) == [] and expected_tokens_of([]) == [1.0]


@pytest.mark.parametrize(
    ("draft_speed", "acceptance", "estimate"),
    [(2, 0.5, 1.33), (2, 0.8, 1.67), (5, 0.5, 1.67), (5, 0.8, 2.78), (10, 0.5, 1.82), (10, 0.8, 3.57)],
)
def test_the_textbook_estimate_has_its_known_figures(draft_speed: float, acceptance: float, estimate: float) -> None:
    assert round(textbook_estimate(acceptance, draft_speed), 2) == estimate


def test_the_textbook_table_has_a_row_for_each_speed() -> None:
    table = textbook_table((2, 5), (0.5, 0.8))
    assert [[round(cell, 2) for cell in row] for row in table] == [[1.33, 1.67], [1.67, 2.78]]
    assert len(textbook_table()) == 3 and textbook_estimate(0, 7) == 1 and textbook_estimate(1, 7) == pytest.approx(7)


def test_speedups_count_every_cost() -> None:
    assert speedup(0.8, 2, 0.1, 1.1, 0.02) == pytest.approx(2.44 / 1.32)
    assert walltime_improvement(0.8, 2, 0.1) == pytest.approx(2.44 / 1.2)
    assert speedup(0.8, 0, 0.1) == 1.0
    # (1 - .8)(2 * .1 + 3) / (1 - .512)
    assert operations_factor(0.8, 2, 0.1) == pytest.approx(0.2 * 3.2 / 0.488)
    assert operations_factor(1.0, 4, 0.0) == 1.0


def test_the_best_length_is_the_best_of_all() -> None:
    assert best_length(0.05, 0.1) == 0  # below the cost ratio nothing is gained
    assert best_length(1.0, 0.1, most=7) == 7
    for acceptance in (0.2, 0.5, 0.8, 0.9):
        k = best_length(acceptance, 0.1)
        assert all(
            walltime_improvement(acceptance, k, 0.1) >= walltime_improvement(acceptance, j, 0.1) for j in range(65)
        )
    assert best_length(0.6, 0.1) > best_length(0.6, 0.3)


def test_the_best_length_may_jump_over_a_dear_width() -> None:
    assert best_length(0.7, 0.05, [1.0, 1.02, 1.6, 1.1]) == 3
    assert best_length(0.7, 0.05, [1.0, 2.6, 2.6, 2.6], overhead_ratio=0.1) == 0


def test_predictions_come_from_measured_costs() -> None:
    found = predict(COSTS, [0.8, 0.5], 1)
    assert (found.tokens_per_round, found.round_ms, found.plain_ms) == pytest.approx((1.8, 24.0, 20.0))
    assert found.tokens_per_second == pytest.approx(75.0) and found.speedup == pytest.approx(1.5)
    assert predict(COSTS, [], 0).speedup == 1.0
    best, promise = predict_best(COSTS, [0.8, 0.8, 0.8])
    assert best == 3 and promise == predict(COSTS, [0.8] * 3, 3)
    assert predict_best(COSTS, [0.05] * 3)[0] == 0


def test_a_run_of_mixed_lengths_is_predicted_from_its_rounds() -> None:
    found = predict_run(COSTS, [0, 1, 3, 1], 9)  # 20 + 24 + 30 + 24 ms
    assert found.round_ms == pytest.approx(24.5) and found.tokens_per_second == pytest.approx(9000 / 98)
    assert found.speedup == pytest.approx(9 * 20 / 98)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: expected_tokens(1.2, 3), "acceptance: 1.2"),
        (lambda: expected_tokens(float("nan"), 3), "acceptance: nan"),
        (lambda: expected_tokens(0.5, -1), "length: -1"),
        (lambda: speedup(0.5, 3, -0.1), "cost_ratio: -0.1"),
        (lambda: speedup(0.5, 3, 0.1, 0.0), "verify_ratio: 0.0"),
        (lambda: speedup(0.5, 3, 0.1, 1.0, -1.0), "overhead_ratio: -1.0"),
        (lambda: operations_factor(0.5, 3, float("inf")), "cost_ratio: inf"),
        (lambda: textbook_estimate(0.5, 0), "draft_speed: 0"),
        (lambda: predict(COSTS, [0.5], 2), "length: 2 is not legal; expected an integer from 0 to 1"),
        (lambda: predict(COSTS, [0.5] * 9, 4), "an integer from 0 to 3"),
        (lambda: predict_run(COSTS, [], 0), "num_drafted"),
    ],
)
def test_what_is_no_probability_or_cost_is_refused(call, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="^" + told.replace(".", r"\.") if not told.startswith("an") else told):
        call()


def test_the_room_needs_no_torch() -> None:
    code = "import sys, decode.theory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
