"""Acceptance from two laws, against closed forms, and its bounds from a top-k law."""

import pytest
import torch
from torch import Tensor

from distill.acceptance import acceptance
from distill.laws import Columns, FullLaw
from tests.distill.law_samples import VOCAB_IDS, V, head_law, random_logits, top_k
from tests.fixtures import P, Q


def test_acceptance_of_the_reference_pair_is_one_half() -> None:
    p, q = (torch.tensor([x], dtype=torch.float64).log() for x in (P, Q))
    found = acceptance(FullLaw(p), q, Columns(6))
    assert found.expected.item() == pytest.approx(0.5, abs=1e-12)
    assert found.greedy.item() == pytest.approx(0.10, abs=1e-12)  # argmax q is the fourth id
    assert torch.equal(found.expected, found.expected_upper)
    assert found.agreement.tolist() == [0]  # the first and the fourth id
    assert found.expected.dtype == torch.float64


@pytest.mark.parametrize("k", [1, 2, 4, V])
@pytest.mark.parametrize("vocab_ids", [None, VOCAB_IDS], ids=["all ids", "reduced"])
def test_cached_top_k_brackets_acceptance(k: int, vocab_ids: Tensor | None) -> None:
    ids = torch.arange(V) if vocab_ids is None else vocab_ids
    target, draft = random_logits(600, V), random_logits(600, len(ids), seed=1)  # more rows than one block
    columns = Columns(V, vocab_ids)
    full = acceptance(FullLaw(target.log_softmax(-1)), draft, columns)
    found = acceptance(top_k(target.log_softmax(-1), k, vocab_ids), draft, columns)
    p, q = target.softmax(-1)[:, ids], draft.softmax(-1)
    assert torch.allclose(full.expected, torch.minimum(p, q).sum(-1), atol=1e-12)  # p isn't conditioned
    assert torch.allclose(full.greedy, p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1), atol=1e-12)
    for low, value, high in (
        (found.expected, full.expected, found.expected_upper),
        (found.greedy, full.greedy, found.greedy_upper),
    ):
        assert (low <= value + 1e-12).all()
        assert (value <= high + 1e-12).all()
        if k == V:
            assert torch.allclose(low, high, atol=1e-12)
    choices = zip(target.argmax(-1).tolist(), ids[draft.argmax(-1)].tolist(), strict=True)
    assert found.agreement.tolist() == full.agreement.tolist() == [float(a == b) for a, b in choices]
    assert 0 < full.agreement.mean() < 1


def test_the_upper_bound_counts_only_what_the_draft_can_propose() -> None:
    p, ids = torch.tensor([[0.3, 0.01, 0.29, 0.2, 0.2]], dtype=torch.float64).log(), torch.tensor([0, 1])
    draft = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    found = acceptance(top_k(p, 1, ids), draft, Columns(5, ids))
    assert found.expected.item() == pytest.approx(0.3, abs=1e-12)
    assert found.expected_upper.item() == pytest.approx(0.31, abs=1e-12)  # with the whole tail it would be 0.8
    assert acceptance(FullLaw(p), draft, Columns(5, ids)).expected.item() == pytest.approx(0.31, abs=1e-12)


def test_equal_likeliest_ids_agree_on_the_lowest() -> None:
    p, q = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.1, 0.45, 0.45], [0.1, 0.3, 0.6]))
    columns = Columns(3)
    for law in (FullLaw(p), top_k(p, 2), head_law(p)):
        assert acceptance(law, q, columns).agreement.item() == 0  # the target takes the second id
        assert acceptance(law, p, columns).agreement.item() == 1
        tied = torch.tensor([[0.2, 0.4, 0.4]], dtype=torch.float64).log()
        assert acceptance(law, tied, columns).agreement.item() == 1


def test_a_law_made_of_hidden_states_has_the_full_laws_acceptance() -> None:
    log_probs, draft = random_logits(600, V).log_softmax(-1), random_logits(600, V, seed=1)
    found, expected = (acceptance(law, draft, Columns(V)) for law in (head_law(log_probs), FullLaw(log_probs)))
    for values, others in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert torch.allclose(values, others, rtol=0, atol=1e-14)
