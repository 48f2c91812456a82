"""The acceptance rules alone: laws by draws, edge cases of the uniform and of p = q."""

import math

import pytest
import torch
from torch import Tensor

from decode.draft import Draft, Verdict
from decode.sampling import draw, draw_uniform
from decode.verifiers import VERIFIERS, verify_tokens
from decode.verifiers import token as token_rule
from tests.fixtures import P, Q, chi_square_p

TARGET = torch.tensor(P, dtype=torch.float64)
DRAFT = torch.tensor(Q, dtype=torch.float64)
RESIDUAL = torch.tensor([0.6, 0.3, 0.1, 0.0, 0.0, 0.0], dtype=torch.float64)


def sampled_draft(width: int, generator: torch.Generator) -> Draft:
    law = DRAFT.expand(width, 6)
    return Draft(draw(law, draw_uniform(width, generator)), law)


def verdicts(draws: int, width: int, draft: Draft | None = None) -> list[tuple[Draft, Verdict]]:
    generator = torch.Generator().manual_seed(0)
    laws = TARGET.expand(width + 1, 6)
    out = []
    for _ in range(draws):
        offered = draft or sampled_draft(width, generator)
        out.append((offered, verify_tokens(offered, laws, generator)))
    return out


def test_d16_acceptance_and_the_law_of_the_next_token_at_every_depth() -> None:
    """d19: given a rejection at any depth the next token follows norm(max(p - q, 0)); given none it follows p."""
    done = verdicts(20_000, 3)
    accepted = torch.stack([verdict.num_accepted for _, verdict in done])
    following = torch.stack([verdict.next_token for _, verdict in done])
    assert abs(float((accepted >= 1).double().mean()) - 0.5) < 0.012
    for depth in range(4):
        counts = torch.bincount(following[accepted == depth], minlength=6)
        assert chi_square_p(counts, RESIDUAL if depth < 3 else TARGET) > 1e-4, depth


def test_d19_the_target_law_is_left_untouched() -> None:
    laws = TARGET.repeat(5, 1)
    before = laws.clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        verify_tokens(sampled_draft(4, generator), laws, generator)
    assert torch.equal(laws, before)


def test_d17_d38_a_point_mass_is_accepted_with_the_targets_probability() -> None:
    done = verdicts(20_000, 1, Draft(torch.tensor([3])))
    kept = torch.stack([v.num_accepted for _, v in done]) == 1
    assert abs(float(kept.double().mean()) - P[3]) < 0.01
    first = torch.stack([torch.where(v.num_accepted == 1, d.tokens[0], v.next_token) for d, v in done])
    assert chi_square_p(torch.bincount(first, minlength=6), TARGET) > 1e-4


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_d21_a_token_of_no_probability_is_never_kept(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rule, "draw_uniform", lambda count, g: torch.full((count,), uniform, dtype=torch.float64))
    law = TARGET.clone()
    law[3] = 0
    law /= law.sum()
    verdict = verify_tokens(Draft(torch.tensor([3]), DRAFT.unsqueeze(0)), law.expand(2, 6), torch.Generator())
    assert verdict.num_accepted == 0
    assert verdict.next_token != 3


def test_d21_a_million_draws_never_meet_a_weight_of_zero() -> None:
    law = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    drawn = draw(law.expand(1_000_000, 5), draw_uniform(1_000_000, torch.Generator().manual_seed(0)))
    assert set(drawn.unique().tolist()) == {1, 3}
    edge = draw(law.expand(2, 5), torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64))
    assert edge.tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [0.0, 1e-9])
def test_d20_equal_laws_always_accept(dtype: torch.dtype, gap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    law = TARGET.to(dtype)
    target = law.clone()
    target[0] += gap
    for _ in range(2000):
        tokens = draw(law.expand(4, 6), draw_uniform(4, generator))
        verdict = verify_tokens(Draft(tokens, law.expand(4, 6)), target.expand(5, 6), generator)
        assert 0 <= verdict.next_token < 6
        assert gap or verdict.num_accepted == 4


def test_d05_a_draft_that_the_target_would_not_say_is_rejected() -> None:
    greedy = torch.eye(6)[[0, 0]]
    verdict = verify_tokens(Draft(torch.tensor([5])), greedy, torch.Generator().manual_seed(0))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 0)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_an_empty_draft_is_a_plain_step(verifier: str) -> None:
    generator = torch.Generator().manual_seed(0)
    empty = Draft(torch.empty(0, dtype=torch.int64))
    drawn = [VERIFIERS[verifier](empty, TARGET.unsqueeze(0), generator) for _ in range(5000)]
    assert all(v.num_accepted == 0 for v in drawn)
    counts: Tensor = torch.bincount(torch.stack([v.next_token for v in drawn]), minlength=6)
    assert chi_square_p(counts, TARGET) > 1e-4
