"""Draws follow their weights, exactly and at the edges."""

import pytest
import torch
from scipy.stats import chisquare

from decode.config import SamplingConfig
from decode.draws import (
    BLOCK,
    Ahead,
    RunningMass,
    draw,
    draw_from,
    draw_numbers,
    draw_one,
    draw_or,
    draw_uniform,
)
from decode.laws import Law
from decode.sampling import law_of


def test_draws_follow_the_weights_whatever_their_sum() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0]).expand(40_000, 6)
    counts = draw(weights, draw_uniform(40_000, torch.Generator().manual_seed(0))).bincount(minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert chisquare(counts[[1, 3, 4]].numpy(), [15_000, 5_000, 20_000]).pvalue > 1e-4
    assert chisquare(counts[[1, 3, 4]].numpy(), [14_600, 5_400, 20_000]).pvalue < 1e-4  # would a wrong law be seen


def test_draws_of_a_large_vocabulary_are_exact() -> None:
    """Close to the borders between tokens too a draw inverts the distribution function of exact arithmetic, to 1e-9."""
    law = law_of(
        torch.randn(1, 49_152, generator=torch.Generator().manual_seed(0)) * 2, SamplingConfig(temperature=1.0)
    )
    mass = law.probs[0].double().numpy().astype("longdouble").cumsum()
    borders = torch.tensor((mass / mass[-1])[::500].astype("float64"))
    for uniform in torch.cat([borders - 1e-9, borders + 1e-9]).clamp(0, 1 - 1e-9).tolist():
        token = draw_one(law, uniform)
        assert token == int(draw(law.probs, torch.tensor([uniform], dtype=torch.float64)))
        below = mass[token - 1] if token else 0.0
        assert below / mass[-1] - 1e-10 <= uniform <= mass[token] / mass[-1] + 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5])
def test_blocks_draw_what_one_long_sum_draws(size: int, dtype: torch.dtype) -> None:
    """Weights of whole numbers, which are added exactly: on borders too both say the same."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.randint(0, 3, (size,), generator=generator).to(dtype)
    weights[: size // 3] = 0
    weights[-1] += size < 3
    mass = RunningMass(weights.numpy())
    assert mass.total == weights.sum()
    borders = weights.double().cumsum(0) / mass.total
    for uniform in torch.cat([borders, draw_uniform(50, generator)]).clamp(max=1 - 2**-53).tolist():
        column = mass.column(uniform)
        assert column == int(draw(weights, torch.tensor(uniform, dtype=torch.float64)))
        assert weights[column] > 0


def test_a_block_whose_columns_add_up_to_less_than_its_sum_loses_no_draw() -> None:
    """Two orders of adding round otherwise; at the end of a block none of the columns without weight may be drawn."""
    below = 0
    for seed in range(40):
        weights = torch.zeros(2 * BLOCK, dtype=torch.float64)
        weights[:200] = torch.rand(200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        mass = RunningMass(weights.numpy())
        below += bool(mass.total > weights.numpy().cumsum()[-1])
        assert mass.column(1 - 2**-53) == 199
    assert below > 5


def test_blocks_of_no_law_at_all_still_give_a_column() -> None:
    for value in (0.0, float("nan")):
        for size in (5, 2 * BLOCK):
            assert 0 <= RunningMass(torch.full((size,), value).numpy()).column(0.5) < size


def test_d21_a_column_without_weight_is_never_drawn() -> None:
    last = 1 - 2**-53
    for weights in ([0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 1e-30, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.2, 0.0]):
        row = torch.tensor([weights])
        for uniform in (0.0, 0.5, last):
            column = draw(row, torch.tensor([uniform], dtype=torch.float64))
            assert row[0, column] > 0
            assert column == RunningMass(row[0].numpy()).column(uniform)


def test_d20_rows_without_any_weight_are_drawn_from_the_fallback() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    fallback = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    uniform = torch.tensor([0.3, 0.3], dtype=torch.float64)
    assert draw_or(weights, fallback, uniform).tolist() == [1, 1]
    assert draw_or(weights[1:], fallback[1:], uniform[1:]).tolist() == draw(weights[1:], uniform[1:]).tolist() == [1]


def test_numbers_drawn_ahead_are_those_drawn_one_by_one() -> None:
    for seed in (3, 4):
        ahead, single = Ahead(), torch.Generator().manual_seed(seed)
        ahead.manual_seed(seed)
        for count in (1, 4, 0, Ahead.COUNT - 2, 1, 3 * Ahead.COUNT, 2):
            expected = [draw_uniform(1, single).item() for _ in range(count)]
            assert draw_numbers(count, ahead) == expected
            assert draw_uniform(count, ahead).tolist() == [draw_uniform(1, single).item() for _ in range(count)]


def test_laws_of_one_column_need_no_random_number() -> None:
    assert draw_from(Law.point(torch.tensor([7, 2]))).tolist() == [7, 2]
