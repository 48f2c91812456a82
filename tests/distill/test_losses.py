"""Losses against float64 loops and closed forms, in value and gradient."""

import math

import pytest
import torch
from torch import Tensor

from distill.acceptance import acceptance
from distill.laws import Columns, FullLaw, TopKLaw, align
from distill.losses import LOSSES, forward_kl
from tests.distill.law_samples import VOCAB_IDS, V, random_logits, top_k


def loop_forward_kl(p: list[float], q: list[float]) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


REFERENCE = {"forward_kl": loop_forward_kl}


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def loss_of(name: str, law: FullLaw | TopKLaw, logits: Tensor, columns: Columns | None = None) -> Tensor:
    return LOSSES[name](*align(law, logits, columns or Columns(logits.shape[-1])))


def gradient(name: str, law: FullLaw | TopKLaw, logits: Tensor, columns: Columns | None = None) -> Tensor:
    logits = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(name, law, logits, columns).sum(), logits)
    return grad


def test_t03_forward_kl_is_kl_of_target_from_draft() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double().log(), torch.tensor([0.4, 0.4, 0.2]).double().log()
    assert forward_kl(p, q).item() == pytest.approx(0.183787, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
def test_t04_full_law_equals_the_loop_in_value_and_gradient(name: str, temperature: float) -> None:
    target, draft = random_logits(7, V) / temperature, random_logits(7, V, seed=1) / temperature
    expected = [REFERENCE[name](softmax(a), softmax(b)) for a, b in zip(target.tolist(), draft.tolist(), strict=True)]
    law = FullLaw(target.log_softmax(-1))
    assert torch.allclose(loss_of(name, law, draft), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    step = 1e-6
    moved = draft.clone()
    moved[3, 4] += step
    slope = (loss_of(name, law, moved) - loss_of(name, law, draft))[3] / step
    assert gradient(name, law, draft)[3, 4].item() == pytest.approx(slope.item(), abs=1e-5)  # of a first difference


@pytest.mark.parametrize("name", LOSSES)
def test_t01_a_position_is_worth_the_same_in_any_shape_and_vocabulary(name: str) -> None:
    target, draft = random_logits(2, 7, V), random_logits(2, 7, V, seed=1)
    losses = loss_of(name, FullLaw(target.log_softmax(-1)), draft)
    assert losses.shape == (2, 7)
    tiled = loss_of(name, FullLaw(target.repeat(1, 10, 1).log_softmax(-1)), draft.repeat(1, 10, 1))
    assert abs(tiled.mean() - losses.mean()) < 1e-9
    far = torch.full((2, 7, 1000), -60.0, dtype=torch.float64)
    wide = FullLaw(torch.cat([target, far], -1).log_softmax(-1))
    grown = loss_of(name, wide, torch.cat([draft, far], -1), Columns(V + 1000))
    assert (grown - losses).abs().max() < 1e-9


LAWS = {
    "full": lambda log_probs: FullLaw(log_probs),
    "top 3": lambda log_probs: top_k(log_probs, 3),
    "top V": lambda log_probs: top_k(log_probs, log_probs.shape[-1]),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vocab_ids", [None, VOCAB_IDS], ids=["all ids", "reduced"])
def test_t02_draft_equal_to_target_is_a_fixed_point(
    name: str, kind: str, dtype: torch.dtype, vocab_ids: Tensor | None
) -> None:
    logits = random_logits(40, V, dtype=dtype) * 3
    if kind == "top 3" and vocab_ids is not None:
        # A tail that holds ids which the draft lacks isn't the draft's tail; without such ids it is a fixed point.
        logits[:, [i for i in range(V) if i not in VOCAB_IDS.tolist()]] = -torch.inf
    law = LAWS[kind](logits.log_softmax(-1))
    draft = logits if vocab_ids is None else logits[:, vocab_ids]
    columns = Columns(V, vocab_ids)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert loss_of(name, law, draft, columns).abs().max() < tolerance
    assert (gradient(name, law, draft, columns) / len(draft)).norm() < 1e-6  # of the mean over positions


@pytest.mark.parametrize("name", LOSSES)
def test_t12_extreme_logits_and_absent_tokens_stay_finite(name: str) -> None:
    cases = [([0.0, 10.0, 0.0], [0.0, 5.0, 4.0], 0.05), ([0.0, -200.0], [0.0, -200.0], 1.0)]
    for draft, target, temperature in cases:
        scaled = torch.tensor([draft]) / temperature
        law = FullLaw((torch.tensor([target]) / temperature).log_softmax(-1))
        columns = Columns(len(draft))
        wide = FullLaw((torch.tensor([target]).double() / temperature).log_softmax(-1))
        expected = loss_of(name, wide, torch.tensor([draft]).double() / temperature, columns)
        assert torch.allclose(loss_of(name, law, scaled, columns).double(), expected, rtol=1e-5, atol=1e-5)
        assert gradient(name, law, scaled, columns).isfinite().all()
    banned = torch.tensor([[1.0, 0.5, -torch.inf]])  # both sides ban an id
    law, columns = FullLaw(banned.log_softmax(-1)), Columns(3)
    assert loss_of(name, law, banned, columns).item() == 0
    assert gradient(name, law, banned, columns).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_t13_bf16_logits_are_upcast_before_the_softmax(name: str) -> None:
    target = random_logits(16, 8000, dtype=torch.bfloat16)
    draft = (target.float() + 0.05 * random_logits(16, 8000, seed=1).float()).bfloat16()
    columns = Columns(8000)
    exact = FullLaw(target.double().log_softmax(-1))
    expected = loss_of(name, exact, draft.double(), columns).mean()
    law = FullLaw(target.float().log_softmax(-1))
    found = loss_of(name, law, draft, columns)
    assert found.dtype == torch.float32
    assert found.double().mean() == pytest.approx(expected.item(), rel=0.01)
    assert found.min() >= -1e-6
    slope = gradient(name, exact, draft.double(), columns)
    error = (gradient(name, law, draft.float(), columns) - slope).norm() / slope.norm()
    assert error < 0.01


def test_t24_top_k_keeps_the_rest_in_one_bucket() -> None:
    target = torch.tensor([[0.6, 0.3, 0.1]]).double().log()
    columns, law = Columns(3), top_k(target, 2)
    assert loss_of("forward_kl", law, target, columns).item() == pytest.approx(0, abs=1e-12)
    assert gradient("forward_kl", law, target, columns).norm() < 1e-12
    other = torch.tensor([[0.5, 0.25, 0.25]]).double().log()
    assert loss_of("forward_kl", law, other, columns).item() == pytest.approx(0.072460, abs=1e-6)
    full = loss_of("forward_kl", FullLaw(target), other, columns)
    assert torch.allclose(loss_of("forward_kl", top_k(target, 3), other, columns), full, atol=1e-12)


def buckets_by_loop(p: list[float], q: list[float], kept: list[int], draft_ids: list[int]) -> float:
    """The stated rule: kept ids that the draft has, and its other ids in one bucket, conditioned on the draft's ids."""
    inside = sum(p[i] for i in draft_ids)
    both = [i for i in kept if i in draft_ids]
    column = {token: index for index, token in enumerate(draft_ids)}
    law_p, law_q = [p[i] / inside for i in both], [q[column[i]] for i in both]
    return loop_forward_kl([*law_p, 1 - sum(law_p)], [*law_q, 1 - sum(law_q)])


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("vocab_ids", [None, VOCAB_IDS], ids=["all ids", "reduced"])
def test_t24_top_k_buckets_equal_the_loop_and_bound_the_full_loss(k: int, vocab_ids: Tensor | None) -> None:
    ids = list(range(V)) if vocab_ids is None else vocab_ids.tolist()
    target, draft = random_logits(9, V), random_logits(9, len(ids), seed=1)
    law, columns = top_k(target.log_softmax(-1), k, vocab_ids), Columns(V, vocab_ids)
    found = loss_of("forward_kl", law, draft, columns)
    for row in range(9):
        p, q = softmax(target[row].tolist()), softmax(draft[row].tolist())
        assert found[row].item() == pytest.approx(buckets_by_loop(p, q, law.ids[row].tolist(), ids), abs=1e-9)
    full = loss_of("forward_kl", FullLaw(target.log_softmax(-1)), draft, columns)
    assert (found <= full + 1e-12).all()  # data processing
    assert torch.autograd.gradcheck(lambda x: loss_of("forward_kl", law, x, columns), draft.requires_grad_(), atol=1e-7)


def test_reduced_vocabulary_is_taken_against_the_conditioned_law_and_agrees_with_all_kept() -> None:
    target, draft = random_logits(9, V), random_logits(9, len(VOCAB_IDS), seed=1)
    columns = Columns(V, VOCAB_IDS)
    log_probs = target.log_softmax(-1)
    found = loss_of("forward_kl", FullLaw(log_probs), draft, columns)
    for row in range(9):
        p = softmax(target[row].tolist())
        inside = [p[i] for i in VOCAB_IDS.tolist()]
        expected = loop_forward_kl([x / sum(inside) for x in inside], softmax(draft[row].tolist()))
        assert found[row].item() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(loss_of("forward_kl", top_k(log_probs, V, VOCAB_IDS), draft, columns), found, atol=1e-12)
    slopes = [
        gradient("forward_kl", law, draft, columns) for law in (FullLaw(log_probs), top_k(log_probs, V, VOCAB_IDS))
    ]
    assert torch.allclose(*slopes, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_cache_trains_a_reduced_draft_towards_the_law_that_the_online_teacher_does(name: str) -> None:
    p, ids = torch.tensor([[0.6, 0.2, 0.2]], dtype=torch.float64).log(), torch.tensor([0, 1])
    perfect, columns = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log(), Columns(3, ids)
    for law in (FullLaw(p), top_k(p, 1, ids)):
        assert loss_of(name, law, perfect, columns).item() == pytest.approx(0, abs=1e-12)
        assert gradient(name, law, perfect, columns).norm() < 1e-12
    log_probs, columns = random_logits(50, V).log_softmax(-1), Columns(V, VOCAB_IDS)
    perfect = log_probs[:, VOCAB_IDS]
    for k in range(1, V + 1):
        law = top_k(log_probs, k, VOCAB_IDS)
        assert loss_of(name, law, perfect, columns).abs().max() < 1e-12
        assert gradient(name, law, perfect, columns).norm() < 1e-12


def test_a_tail_without_any_id_of_the_draft_is_no_bucket() -> None:
    target, draft = random_logits(9, V), random_logits(9, len(VOCAB_IDS), seed=1)
    target[:, VOCAB_IDS] += 30  # the draft's ids are the likeliest, and all of them are kept
    columns, log_probs = Columns(V, VOCAB_IDS), (target / 8).log_softmax(-1)
    law = top_k(log_probs, len(VOCAB_IDS) + 1, VOCAB_IDS)
    assert (law.log_tail == -torch.inf).all() and (law.log_probs.exp().sum(-1) < 1 - 1e-3).all()
    full = loss_of("forward_kl", FullLaw(log_probs), draft, columns)
    assert torch.allclose(loss_of("forward_kl", law, draft, columns), full, atol=1e-12)
    found = acceptance(law, draft, columns)
    assert torch.equal(found.expected, found.expected_upper)


def test_positions_whose_mass_lies_outside_the_draft_teach_nothing() -> None:
    target = torch.full((1, V), -torch.inf).double()
    target[0, 1] = 0.0  # certain of an id that the draft lacks
    columns, draft = Columns(V, VOCAB_IDS), random_logits(1, len(VOCAB_IDS))
    for law in (FullLaw(target), top_k(target, 1, VOCAB_IDS), top_k(target, V, VOCAB_IDS)):
        assert loss_of("forward_kl", law, draft, columns).item() == 0
        assert gradient("forward_kl", law, draft, columns).abs().sum() == 0


def test_a_sharp_draft_keeps_the_precision_of_its_tail_in_fp32() -> None:
    logits = torch.zeros(1, V)
    logits[0, 0] = 25.0  # the tail has 1.4e-10: 1 - kept mass would be 0 in fp32
    law = top_k(logits.log_softmax(-1), 1)
    assert loss_of("forward_kl", law, logits).abs().item() < 1e-9
    moved = logits.clone()
    moved[0, 1:] += 1.0
    wide = loss_of("forward_kl", top_k(logits.double().log_softmax(-1), 1), moved.double())
    assert loss_of("forward_kl", law, moved).item() == pytest.approx(wide.item(), abs=1e-9)


def test_no_position_gives_no_values_and_no_error() -> None:
    law, logits = FullLaw(torch.zeros(0, V)), torch.zeros(0, V, requires_grad=True)
    losses = loss_of("forward_kl", law, logits)
    assert losses.shape == (0,)
    losses.sum().backward()
    assert acceptance(law, logits, Columns(V)).expected.shape == (0,)
