"""Losses where numbers are extreme, probabilities are 0, buckets are empty, or a draft lacks what the target says."""

import pytest
import torch

from distill.acceptance import acceptance
from distill.laws import Columns, FullLaw, likeliest
from distill.losses import LOSSES, log_overlap
from tests.distill.law_samples import DIVERGENCES, VOCAB_IDS, V, gradient, loss_of, random_logits, top_k


@pytest.mark.parametrize("name", LOSSES)
def test_t12_extreme_logits_stay_finite_and_equal_fp64(name: str) -> None:
    cases = [([0.0, 10.0, 0.0], [0.0, 5.0, 4.0], 0.05), ([0.0, -200.0], [0.0, -200.0], 1.0)]
    cases += [([0.0, 400.0], [300.0, 0.0], 1.0)]  # nothing in common: the overlap is e^-300, 0 in fp32
    for draft, target, temperature in cases:
        law = FullLaw((torch.tensor([target]) / temperature).log_softmax(-1))
        wide = FullLaw((torch.tensor([target]).double() / temperature).log_softmax(-1))
        further = (Columns(len(draft)), torch.tensor([1]), temperature)
        expected = loss_of(name, wide, torch.tensor([draft]).double(), *further)
        found = loss_of(name, law, torch.tensor([draft]), *further)
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
        slope = gradient(name, law, torch.tensor([draft]), *further)
        assert slope.isfinite().all()
        assert torch.allclose(slope.double(), gradient(name, wide, torch.tensor([draft]).double(), *further), atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_t12_ids_that_both_sides_ban_add_nothing(name: str) -> None:
    allowed, banned = random_logits(4, V), torch.full((4, 3), -torch.inf, dtype=torch.float64)
    draft, columns, following = random_logits(4, V, seed=1), Columns(V + 3), torch.tensor([0, 1, 2, 3])
    law = FullLaw(torch.cat([allowed, banned], -1).log_softmax(-1))
    wide = torch.cat([draft, banned], -1)
    expected = loss_of(name, FullLaw(allowed.log_softmax(-1)), draft, Columns(V), following)
    assert torch.allclose(loss_of(name, law, wide, columns, following), expected, rtol=0, atol=1e-12)
    slope = gradient(name, law, wide, columns, following)
    plain = gradient(name, FullLaw(allowed.log_softmax(-1)), draft, Columns(V), following)
    assert torch.allclose(slope[:, :V], plain, rtol=0, atol=1e-12)
    assert (slope[:, V:] == 0).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_t12_ids_that_one_side_bans_leave_a_gradient_that_can_be_used(name: str) -> None:
    draft = torch.tensor([[1.0, 0.5, 0.2]])
    target_bans = FullLaw(torch.tensor([[1.0, 0.5, -torch.inf]]).log_softmax(-1))
    assert loss_of(name, target_bans, draft).isfinite().all()
    slope = gradient(name, target_bans, draft)
    assert slope.isfinite().all()
    assert slope[0, 2] > 0  # descent takes mass from the banned id
    draft_bans = torch.tensor([[1.0, 0.5, -torch.inf]])
    law = FullLaw(torch.tensor([[1.0, 0.5, 0.2]]).log_softmax(-1))
    value = loss_of(name, law, draft_bans)
    assert value.isfinite().all() or (value == torch.inf).all()
    assert gradient(name, law, draft_bans).isfinite().all()


def test_laws_without_anything_in_common_overlap_by_nothing() -> None:
    p, q = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]], requires_grad=True)
    found = log_overlap(p, q)
    assert found.item() == -torch.inf
    found.sum().backward()
    assert q.grad is not None and (q.grad == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_t13_bf16_logits_are_upcast_before_the_softmax(name: str) -> None:
    target = random_logits(16, 8000, dtype=torch.bfloat16)
    draft = (target.float() + 0.05 * random_logits(16, 8000, seed=1).float()).bfloat16()
    exact, law = FullLaw(target.double().log_softmax(-1)), FullLaw(target.float().log_softmax(-1))
    expected, found = loss_of(name, exact, draft.double()).mean(), loss_of(name, law, draft)
    assert found.dtype == torch.float32
    assert found.double().mean() == pytest.approx(expected.item(), rel=0.01)
    assert found.min() >= -1e-6
    slope = gradient(name, exact, draft.double())
    assert (gradient(name, law, draft.float()) - slope).norm() / slope.norm() < 0.01


@pytest.mark.parametrize("name", DIVERGENCES)
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


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_tail_without_any_id_of_the_draft_is_no_bucket(name: str) -> None:
    target, draft = random_logits(9, V), random_logits(9, len(VOCAB_IDS), seed=1)
    target[:, VOCAB_IDS] += 30  # the draft's ids are the likeliest, and all of them are kept
    columns, log_probs = Columns(V, VOCAB_IDS), (target / 8).log_softmax(-1)
    law = top_k(log_probs, len(VOCAB_IDS) + 1, VOCAB_IDS)
    assert (law.log_tail == -torch.inf).all() and (law.log_probs.exp().sum(-1) < 1 - 1e-3).all()
    full = loss_of(name, FullLaw(log_probs), draft, columns)
    assert torch.allclose(loss_of(name, law, draft, columns), full, atol=1e-12)
    slopes = [gradient(name, each, draft, columns) for each in (law, FullLaw(log_probs))]
    assert torch.allclose(*slopes, atol=1e-12)
    found = acceptance(law, draft, columns)
    assert torch.equal(found.expected, found.expected_upper)


@pytest.mark.parametrize("name", [*DIVERGENCES, "target_argmax"])
def test_positions_whose_mass_lies_outside_the_draft_teach_nothing(name: str) -> None:
    target = torch.full((1, V), -torch.inf).double()
    target[0, 1] = 0.0  # certain of an id that the draft lacks
    columns, draft = Columns(V, VOCAB_IDS), random_logits(1, len(VOCAB_IDS))
    for law in (FullLaw(target), top_k(target, 1, VOCAB_IDS), top_k(target, V, VOCAB_IDS)):
        assert loss_of(name, law, draft, columns).item() == 0
        assert gradient(name, law, draft, columns).abs().sum() == 0


def test_a_sharp_draft_keeps_the_precision_of_its_tail_in_fp32() -> None:
    logits = torch.zeros(1, V)
    logits[0, 0] = 25.0  # the tail has 1.4e-10: 1 - kept mass would be 0 in fp32
    law = top_k(logits.log_softmax(-1), 1)
    assert loss_of("forward_kl", law, logits).abs().item() < 1e-9
    moved = logits.clone()
    moved[0, 1:] += 1.0
    wide = loss_of("forward_kl", top_k(logits.double().log_softmax(-1), 1), moved.double())
    assert loss_of("forward_kl", law, moved).item() == pytest.approx(wide.item(), abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_no_position_gives_no_values_and_no_error(name: str) -> None:
    for law in (FullLaw(torch.zeros(0, V)), top_k(torch.zeros(0, V), 2)):
        logits = torch.zeros(0, V, requires_grad=True)
        losses = loss_of(name, law, logits)
        assert losses.shape == (0,)
        losses.sum().backward()
        assert acceptance(law, logits.detach(), Columns(V)).expected.shape == (0,)


def test_the_likeliest_id_is_the_lowest_of_those_that_tie() -> None:
    log_probs = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.4, 0.1, 0.1, 0.4]]).log()
    law = top_k(log_probs, 3)
    law.ids[0], law.ids[1, :2] = torch.tensor([3, 1, 2]), torch.tensor([3, 0])  # in whatever order they were kept
    assert likeliest(law).tolist() == likeliest(FullLaw(log_probs)).tolist() == [1, 0]
