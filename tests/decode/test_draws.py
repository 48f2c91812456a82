"""Draws follow their weights, exactly and at the edges."""

import torch
from scipy.stats import chisquare

from decode.config import SamplingConfig
from decode.laws import Law
from decode.sampling import draw, draw_from, draw_or, draw_uniform, law_of


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
        token = int(draw(law.probs, torch.tensor([uniform], dtype=torch.float64)))
        below = mass[token - 1] if token else 0.0
        assert below / mass[-1] - 1e-10 <= uniform <= mass[token] / mass[-1] + 1e-10


def test_d21_a_column_without_weight_is_never_drawn() -> None:
    last = 1 - 2**-53
    for weights in ([0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 1e-30, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.2, 0.0]):
        row = torch.tensor([weights])
        for uniform in (0.0, 0.5, last):
            column = draw(row, torch.tensor([uniform], dtype=torch.float64))
            assert row[0, column] > 0


def test_d20_rows_without_any_weight_are_drawn_from_the_fallback() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    fallback = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    uniform = torch.tensor([0.3, 0.3], dtype=torch.float64)
    assert draw_or(weights, fallback, uniform).tolist() == [1, 1]
    assert draw_or(weights[1:], fallback[1:], uniform[1:]).tolist() == draw(weights[1:], uniform[1:]).tolist() == [1]


def test_laws_of_one_column_need_no_random_number() -> None:
    assert draw_from(Law.point(torch.tensor([7, 2]))).tolist() == [7, 2]
