"""The acceptance rules alone: laws by draws, edge cases of the uniform and of p = q, laws in sparse and dense form."""

import math

import pytest
import torch
from torch import Tensor

from decode import draws
from decode.config import SamplingConfig
from decode.draft import Draft, Verdict
from decode.draws import draw_from, draw_uniform
from decode.laws import Law
from decode.sampling import law_of
from decode.verifiers import VERIFIERS, Verifier, residual
from decode.verifiers import block as block_rule
from decode.verifiers import token as token_rule
from tests.fixtures import P, Q, constant_law
from tests.tables import chi_square_p

TARGET = torch.tensor(P, dtype=torch.float64)
DRAFT = torch.tensor(Q, dtype=torch.float64)
RESIDUAL = torch.tensor([0.6, 0.3, 0.1, 0.0, 0.0, 0.0], dtype=torch.float64)
every_rule = pytest.mark.parametrize("verify", VERIFIERS.values(), ids=VERIFIERS)


def dense(row: Tensor, rows: int) -> Law:
    return Law(row.repeat(rows, 1))


def sparse(row: Tensor, rows: int) -> Law:
    """The same laws, with ids for each row."""
    return Law(row.repeat(rows, 1), torch.arange(6).repeat(rows, 1))


def listed(row: Tensor, rows: int) -> Law:
    """The same laws over a list of ids that all rows share."""
    return Law(row.repeat(rows, 1), torch.arange(6))


def apart(row: Tensor, rows: int) -> Law:
    """The same laws as a host keeps those of a draft, one by one."""
    return Law.cat([dense(row, 1) for _ in range(rows)], 6)


FORMS = {"dense": dense, "sparse": sparse, "listed": listed, "apart": apart}


def sampled_draft(law: Law, generator: torch.Generator) -> Draft:
    return Draft(draw_from(law, draw_uniform(len(law), generator)), law)


def verdicts(
    draws: int, width: int, draft: Draft | None = None, verify: Verifier = VERIFIERS["token"], form: str = "dense"
) -> list[tuple[Draft, Verdict]]:
    generator = torch.Generator().manual_seed(0)
    target, law = FORMS[form](TARGET, width + 1), FORMS[form](DRAFT, width)
    out = []
    for _ in range(draws):
        offered = draft or sampled_draft(law, generator)
        out.append((offered, verify(offered, target, generator)))
    return out


@pytest.mark.parametrize("form", FORMS)
def test_d16_acceptance_and_the_law_of_the_next_token_at_every_depth(form: str) -> None:
    """d19: given a rejection at any depth the next token follows norm(max(p - q, 0)); given none it follows p."""
    done = verdicts(8_000, 3, form=form)
    accepted = torch.tensor([verdict.num_accepted for _, verdict in done])
    following = torch.tensor([verdict.next_token for _, verdict in done])
    assert abs(float((accepted >= 1).double().mean()) - 0.5) < 0.02
    for depth in range(4):
        counts = torch.bincount(following[accepted == depth], minlength=6)
        assert chi_square_p(counts, RESIDUAL if depth < 3 else TARGET) > 1e-4, depth


@every_rule
@pytest.mark.parametrize("target_form", FORMS)
@pytest.mark.parametrize("draft_form", FORMS)
@pytest.mark.parametrize("on_host", [True, False])
def test_the_form_of_a_law_changes_no_verdict(
    verify: Verifier, target_form: str, draft_form: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Law, "on_host", on_host)
    for seed in range(60):
        offered = sampled_draft(dense(DRAFT, 3), torch.Generator().manual_seed(seed))
        other = Draft(offered.tokens, FORMS[draft_form](DRAFT, 3))
        expected = verify(offered, dense(TARGET, 4), torch.Generator().manual_seed(seed))
        found = verify(other, FORMS[target_form](TARGET, 4), torch.Generator().manual_seed(seed))
        assert (found.num_accepted, found.next_token) == (expected.num_accepted, expected.next_token)


@every_rule
@pytest.mark.parametrize("form", FORMS)
def test_d19_the_laws_are_left_untouched(verify: Verifier, form: str) -> None:
    target, law = FORMS[form](TARGET, 5), FORMS[form](DRAFT, 4)
    before = target.probs.clone(), law.probs.clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        verify(sampled_draft(law, generator), target, generator)
    assert torch.equal(target.probs, before[0]) and torch.equal(law.probs, before[1])


@every_rule
def test_d17_d38_a_point_mass_is_accepted_with_the_targets_probability(verify: Verifier) -> None:
    done = verdicts(8_000, 1, Draft(torch.tensor([3])), verify)
    kept = torch.tensor([v.num_accepted for _, v in done]) == 1
    assert abs(float(kept.double().mean()) - P[3]) < 0.015
    first = torch.tensor([d.tokens[0] if v.num_accepted == 1 else v.next_token for d, v in done])
    assert chi_square_p(torch.bincount(first, minlength=6), TARGET) > 1e-4


@every_rule
@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_d21_a_token_of_no_probability_is_never_kept(
    verify: Verifier, uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rule in (draws, token_rule, block_rule):
        monkeypatch.setattr(rule, "draw_uniform", lambda count, g: torch.full((count,), uniform, dtype=torch.float64))
    law = TARGET.clone()
    law[3] = 0
    law /= law.sum()
    for drafting in (DRAFT, law):  # the second has no probability for it either, so that no draft holds it
        for first in ([3], [3, 0], [0, 3]):
            verdict = verify(Draft(torch.tensor(first), dense(drafting, len(first))), dense(law, 3), torch.Generator())
            assert verdict.num_accepted <= first.index(3)
            assert verdict.next_token != 3


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [0.0, 1e-9])
def test_d20_equal_laws_always_accept(verify: Verifier, dtype: torch.dtype, gap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    law = TARGET.to(dtype)
    target = law.clone()
    target[0] += gap
    for _ in range(1000):
        verdict = verify(sampled_draft(dense(law, 4), generator), dense(target, 5), generator)
        assert 0 <= verdict.next_token < 6
        assert gap or verdict.num_accepted == 4


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.7, math.nextafter(1.0, 0.0)])
def test_d20_a_rejection_that_leaves_nothing_is_followed_by_the_targets_own_token(uniform: float) -> None:
    law = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.3, 0.0], dtype=torch.float64)
    draft, target = Draft(torch.tensor([1]), dense(law, 1)), dense(law, 2)
    numbers = torch.tensor([1.0, uniform], dtype=torch.float64)
    expected = residual.next_token(draft, target, torch.tensor(0), *numbers)
    assert residual.next_number(draft, target, 0, 1.0, uniform) == int(expected)
    assert law[expected] > 0


@every_rule
def test_d05_a_draft_that_the_target_would_not_say_is_rejected(verify: Verifier) -> None:
    greedy = Law.point(torch.tensor([0, 0]))
    verdict = verify(Draft(torch.tensor([5])), greedy, torch.Generator().manual_seed(0))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 0)


@every_rule
@pytest.mark.parametrize("drafted", [[], [2], [2, 4, 1], [2, 4, 0], [5, 4, 1]])
def test_point_masses_in_python_numbers_decide_as_those_in_tensors(verify: Verifier, drafted: list[int]) -> None:
    wanted = [2, 4, 1, 3][: len(drafted) + 1]
    draft = Draft(torch.tensor(drafted, dtype=torch.int64))
    laws = law_of(torch.nn.functional.one_hot(torch.tensor(wanted), 6).double(), SamplingConfig())
    assert laws.known == wanted and torch.equal(laws.probs, torch.ones(len(wanted), 1, dtype=torch.float64))
    found = verify(draft, laws, torch.Generator().manual_seed(0))
    expected = verify(draft, Law.point(torch.tensor(wanted)), torch.Generator().manual_seed(0))
    assert (found.num_accepted, found.next_token) == (int(expected.num_accepted), int(expected.next_token))
    assert found.num_accepted == next((i for i, token in enumerate(drafted) if token != wanted[i]), len(drafted))


@every_rule
def test_an_empty_draft_is_a_plain_step(verify: Verifier) -> None:
    generator = torch.Generator().manual_seed(0)
    empty = Draft(torch.empty(0, dtype=torch.int64))
    drawn = [verify(empty, dense(TARGET, 1), generator) for _ in range(3000)]
    assert all(v.num_accepted == 0 for v in drawn)
    counts: Tensor = torch.bincount(torch.tensor([v.next_token for v in drawn]), minlength=6)
    assert chi_square_p(counts, TARGET) > 1e-4


def test_blocks_keep_at_least_as_many_tokens_at_every_position() -> None:
    by_tokens, by_block = (
        torch.tensor([v.num_accepted for _, v in verdicts(8_000, 4, verify=VERIFIERS[rule])]) for rule in VERIFIERS
    )
    for position in range(1, 5):
        tokens, blocks = ((kept >= position).double().mean() for kept in (by_tokens, by_block))
        assert blocks > tokens - 0.015, position
    assert by_block.double().mean() > by_tokens.double().mean() + 0.02


def random_law(rows: int, generator: torch.Generator) -> Law:
    """Rows of 700 tokens, more than a draw adds up at once; the last third has no mass."""
    probs = (torch.randn(rows, 700, generator=generator, dtype=torch.float64) * 3).softmax(-1)
    probs[:, 466:] = 0
    return Law((probs / probs.sum(-1, keepdim=True)).float())


@every_rule
@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("one_hot", [False, True])
def test_python_numbers_decide_as_the_formulas_in_tensors(
    verify: Verifier, width: int, one_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are what a GPU works out unread; here they are fp32 laws over a vocabulary of several blocks."""
    kept = set()
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        target, law = random_law(width + 1, generator), random_law(width, generator)
        law = Law(0.3 * law.probs + 0.7 * target.probs[:width])
        offered = sampled_draft(law, generator)
        apart = Law.cat([law[row : row + 1] for row in range(width)], 700)  # as a host keeps those of a draft
        offered = Draft(offered.tokens, None if one_hot or not width else apart)
        found = verify(offered, target, torch.Generator().manual_seed(seed))
        with monkeypatch.context() as patch:
            patch.setattr(Law, "on_host", False)
            expected = verify(offered, target, torch.Generator().manual_seed(seed))
        assert isinstance(found.num_accepted, int) and isinstance(expected.num_accepted, Tensor)
        assert (found.num_accepted, found.next_token) == (int(expected.num_accepted), int(expected.next_token))
        kept.add(found.num_accepted)
    assert len(kept) > min(width, 2) and (one_hot or width in kept)


def test_the_constant_law_fixture_is_what_it_says() -> None:
    logits = constant_law(P)(input_ids=torch.tensor([[0, 5, 3]])).logits
    assert torch.allclose(logits.softmax(-1), torch.tensor(P).double().expand(1, 3, 6), atol=1e-7)
