"""Ids drawn from the target's law: drawn as they should be, and what is estimated from them has no bias."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from distill.acceptance import acceptance
from distill.data.batches import collate
from distill.heads import supervised_logits
from distill.laws import Columns, FullLaw, SampledLaw, TopKLaw, align, drawn
from distill.losses import LOSSES, Pair, forward_kl
from distill.teacher.draws import draw_columns, uniforms_of
from tests.distill.teacher_samples import batches, cached, make_examples
from tests.fixtures import tiny_llama

P = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
Q_LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, 1.5], dtype=torch.float64)
SOME = torch.tensor([0, 2, 3])  # the ids of a reduced vocabulary
VOCABULARIES = {"all ids": None, "some ids": SOME}


def law_of(ids: list[int], vocab_ids: Tensor | None) -> SampledLaw:
    mass = torch.tensor(1.0, dtype=torch.float64) if vocab_ids is None else P[vocab_ids].sum()
    return SampledLaw(torch.tensor([ids]), P[ids].log()[None], mass.log()[None])


def every_draw(vocab_ids: Tensor | None, count: int) -> Iterator[tuple[float, SampledLaw]]:
    """Each sequence of `count` drawn ids, with its probability."""
    ids = range(5) if vocab_ids is None else vocab_ids.tolist()
    mass = float(P[list(ids)].sum())
    for drawn_ids in itertools.product(ids, repeat=count):
        yield float(P[list(drawn_ids)].prod()) / mass**count, law_of(list(drawn_ids), vocab_ids)


def loss_of(law: FullLaw | SampledLaw | TopKLaw, logits: Tensor, columns: Columns) -> Tensor:
    return LOSSES["forward_kl"](Pair(law, logits, columns, torch.tensor([0]))).sum()


def top_k_renormalised(law: SampledLaw, logits: Tensor, columns: Columns) -> Tensor:
    """The negative control: the ids that were drawn, taken for the whole law."""
    log_p, log_q = drawn(law, logits, columns)
    return forward_kl(log_p.log_softmax(-1), log_q.log_softmax(-1)).sum()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 3])
def test_value_and_gradient_of_forward_kl_are_unbiased_by_enumeration(vocabulary: str, count: int) -> None:
    vocab_ids = VOCABULARIES[vocabulary]
    columns = Columns(5, vocab_ids)
    start = Q_LOGITS[columns.ids][None]

    def mean(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        logits = start.clone().requires_grad_()
        value = sum(chance * function(law, logits, columns) for chance, law in every_draw(vocab_ids, count))
        assert isinstance(value, Tensor)
        return value.detach(), torch.autograd.grad(value, logits)[0]

    exact = start.clone().requires_grad_()
    expected = loss_of(FullLaw(P.log()[None]), exact, columns)
    (gradient,) = torch.autograd.grad(expected, exact)
    assert gradient.abs().max() > 0.1
    value, found = mean(loss_of)
    assert abs(value - expected) < 1e-12 and (found - gradient).abs().max() < 1e-12
    value, found = mean(top_k_renormalised)  # negative control
    assert abs(value - expected) > 0.01 and (found - gradient).abs().max() > 0.01


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_overlap_and_expected_acceptance_are_unbiased_and_nothing_is_told_of_greedy(vocabulary: str) -> None:
    vocab_ids = VOCABULARIES[vocabulary]
    columns = Columns(5, vocab_ids)
    logits, whole = Q_LOGITS[columns.ids][None], FullLaw(P.log()[None])
    truth = acceptance(whole, logits, columns)
    conditioned = Pair(whole, logits, columns, torch.tensor([0])).overlap
    expected = overlap = 0.0
    for chance, law in every_draw(vocab_ids, 2):
        found = acceptance(law, logits, columns)
        assert torch.equal(found.expected, found.expected_upper)
        assert found.greedy.isnan().all() and found.greedy_upper.isnan().all() and found.agreement.isnan().all()
        expected += chance * float(found.expected)
        overlap += chance * float(Pair(law, logits, columns, torch.tensor([0])).overlap)
    assert expected == pytest.approx(float(truth.expected), abs=1e-12)
    assert overlap == pytest.approx(float(conditioned), abs=1e-12)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_t02_t24_a_perfect_draft_has_value_and_gradient_zero_for_every_draw(vocabulary: str) -> None:
    vocab_ids = VOCABULARIES[vocabulary]
    columns = Columns(5, vocab_ids)
    for _, law in every_draw(vocab_ids, 2):
        logits = P[columns.ids].log()[None].clone().requires_grad_()
        loss = loss_of(law, logits, columns)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert abs(loss) < 1e-14 and gradient.abs().max() < 1e-14
        assert float(acceptance(law, logits, columns).expected) == pytest.approx(float(P[columns.ids].sum()), abs=1e-12)


def test_a_position_without_mass_on_the_drafts_ids_counts_for_nothing() -> None:
    law = SampledLaw(torch.tensor([[0, 2]]), torch.full((1, 2), -torch.inf), torch.tensor([-torch.inf]))
    columns, logits = Columns(5, SOME), torch.randn(1, 3, requires_grad=True)
    loss = loss_of(law, logits, columns)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 0 and gradient.abs().max() == 0
    assert float(acceptance(law, logits.detach(), columns).expected) == 0


def test_what_ids_cannot_tell_is_refused() -> None:
    with pytest.raises(ValueError, match="only forward_kl and the overlap"):
        align(law_of([1], None), Q_LOGITS[None], Columns(5))
    with pytest.raises(ValueError, match="only forward_kl and the overlap"):
        LOSSES["reverse_kl"](Pair(law_of([1], None), Q_LOGITS[None], Columns(5), torch.tensor([0])))


def test_ids_are_drawn_at_the_rates_of_the_law() -> None:
    uniforms = torch.rand(1, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = draw_columns(P.log()[None] + 2.5, uniforms)  # of any total
    counts = torch.bincount(found[0], minlength=5).double()
    assert chisquare(counts, P * 20_000).pvalue > 1e-3
    off = P + torch.tensor([0.02, -0.02, 0, 0, 0])  # negative control
    assert chisquare(counts, off * 20_000).pvalue < 1e-6
    extremes = torch.tensor([[0.0, 0.5, 1 - 2.0**-50]], dtype=torch.float64)
    edges = draw_columns(torch.tensor([[-torch.inf, 0.0, -torch.inf]]), extremes)
    assert edges.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, 48, 3)], ids=["all ids", "some ids"])
def test_t26_draws_depend_on_example_and_place_not_on_batches(vocab_ids: Tensor | None, tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples()
    one = cached(model, examples, tmp_path / "one", top_k=32, sampled=4, batch_size=1, vocab_ids=vocab_ids)
    many = cached(model, examples[::-1], tmp_path / "many", top_k=32, sampled=4, batch_size=7, vocab_ids=vocab_ids)
    for batch in batches(examples, "packed"):
        law = one.law(batch)
        other = many.law(batch._replace(example_ids=len(examples) - 1 - batch.example_ids))
        assert isinstance(law, SampledLaw) and torch.equal(law.ids, other.ids)
        logits = supervised_logits(model, batch, apart=True)
        whole = logits.log_softmax(-1)
        assert torch.allclose(law.log_probs.double(), whole.gather(-1, law.ids), atol=1e-6)
        among = torch.arange(48) if vocab_ids is None else vocab_ids
        assert torch.isin(law.ids, among).all()
        assert torch.allclose(law.log_mass.double(), whole[:, among].logsumexp(-1), atol=1e-6)
        perfect = loss_of(law, logits[:, among].float(), Columns(48, vocab_ids))
        assert abs(perfect) < 1e-6  # caches are fp32
    positions = [uniforms_of(example, 4) for example in examples]
    assert len({row for rows in positions for row in map(tuple, rows.tolist())}) == sum(map(len, positions))


@torch.no_grad()
def test_the_estimate_from_a_cache_tends_to_forward_kl(tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples()
    batch = collate([[i] for i in range(20)], examples, normaliser=1)
    logits = 0.5 * supervised_logits(tiny_llama(seed=3), batch, apart=True)
    whole = FullLaw(supervised_logits(model, batch, apart=True).log_softmax(-1))
    law = cached(model, examples, tmp_path, top_k=32, sampled=400).law(batch)
    pair, exact = (Pair(found, logits, Columns(48), batch.next_ids[batch.supervised]) for found in (law, whole))
    estimates, truth = LOSSES["forward_kl"](pair), LOSSES["forward_kl"](exact)
    spread = float((estimates - truth).std()) / len(truth) ** 0.5
    assert abs(float((estimates - truth).mean())) < 4 * spread + 1e-6
    assert spread < 0.05 * float(truth.mean())  # it would notice a bias of a fifth
