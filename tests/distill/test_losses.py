"""Losses against float64 loops and closed forms, in value and gradient, from whatever was kept of the target's law."""

import math

import pytest
import torch
from torch import Tensor

from distill.laws import Columns, FullLaw
from distill.losses import LOSSES, forward_kl, jensen_shannon, log_acceptance, reverse_kl, total_variation
from tests.distill.law_samples import (
    DIVERGENCES,
    LAWS,
    VOCAB_IDS,
    V,
    gradient,
    head_law,
    loss_of,
    random_ids,
    random_logits,
    top_k,
)
from tests.distill.loss_loops import buckets_of, cross_entropy, divergence, softmax

REDUCED = pytest.mark.parametrize("vocab_ids", [None, VOCAB_IDS], ids=["all ids", "reduced"])
N = 9


def logs(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def test_t03_the_two_kls_and_jensen_shannon_are_not_exchanged() -> None:
    p, q = logs(0.7, 0.2, 0.1), logs(0.4, 0.4, 0.2)
    assert forward_kl(p, q).item() == pytest.approx(0.183787, abs=1e-6)
    assert reverse_kl(p, q).item() == pytest.approx(0.192042, abs=1e-6)
    for beta, value in ((0.25, 0.034422), (0.5, 0.046201), (0.75, 0.035162)):
        assert jensen_shannon(p, q, beta).item() == pytest.approx(value, abs=1e-6)
    for beta, limit in ((0, forward_kl), (1, reverse_kl)):
        assert jensen_shannon(p, q, beta).item() == limit(p, q).item()
        near = abs(beta - 1e-6)
        assert jensen_shannon(p, q, near).item() / min(near, 1 - near) == pytest.approx(limit(p, q).item(), rel=1e-4)
    assert total_variation(p, q).item() == pytest.approx(0.3, abs=1e-12)
    assert log_acceptance(p, q).item() == pytest.approx(-math.log(0.7), abs=1e-12)


@REDUCED
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_t04_t24_divergences_equal_the_loop(name: str, kind: str, temperature: float, vocab_ids: Tensor | None) -> None:
    ids = list(range(V)) if vocab_ids is None else vocab_ids.tolist()
    target, draft = random_logits(N, V), random_logits(N, len(ids), seed=1)
    law = LAWS[kind]((target / temperature).log_softmax(-1), vocab_ids)
    further = (Columns(V, vocab_ids), random_ids(N), temperature)
    values, slopes = loss_of(name, law, draft, *further), gradient(name, law, draft, *further)
    for row in range(N):
        p, q = (softmax((x[row] / temperature).tolist()) for x in (target, draft))
        kept = None if isinstance(law, FullLaw) else law.ids[row].tolist()
        value, slope = divergence(name, p, q, buckets_of(kept, ids), ids)
        assert values[row].item() == pytest.approx(value, abs=1e-12)
        assert (slopes[row] * temperature).tolist() == pytest.approx(slope, abs=1e-12)


@REDUCED
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("name", ["target_argmax", "data"])
def test_t04_cross_entropies_are_exact_from_any_law_and_never_tempered(
    name: str, kind: str, temperature: float, vocab_ids: Tensor | None
) -> None:
    ids = list(range(V)) if vocab_ids is None else vocab_ids.tolist()
    target, draft, following = random_logits(N, V), random_logits(N, len(ids), seed=1), random_ids(N)
    law = LAWS[kind]((target / temperature).log_softmax(-1), vocab_ids)
    further = (Columns(V, vocab_ids), following, temperature)
    values, slopes = loss_of(name, law, draft, *further), gradient(name, law, draft, *further)
    tokens = following if name == "data" else target.argmax(-1)
    for row in range(N):
        value, slope = cross_entropy(int(tokens[row]), softmax(draft[row].tolist()), ids)
        assert values[row].item() == pytest.approx(value, abs=1e-12)
        assert slopes[row].tolist() == pytest.approx(slope, abs=1e-12)
    lacking = [token not in ids for token in tokens.tolist()]
    assert any(lacking) == (vocab_ids is not None)
    assert (slopes[lacking] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_t01_a_position_is_worth_the_same_in_any_shape_and_vocabulary(name: str) -> None:
    target, draft, following = random_logits(2, 7, V), random_logits(2, 7, V, seed=1), random_ids(14).reshape(2, 7)
    losses = loss_of(name, FullLaw(target.log_softmax(-1)), draft, None, following)
    assert losses.shape == (2, 7)
    tiled, wider = FullLaw(target.repeat(1, 10, 1).log_softmax(-1)), (None, following.repeat(1, 10))
    assert abs(loss_of(name, tiled, draft.repeat(1, 10, 1), *wider).mean() - losses.mean()) < 1e-9
    far = torch.full((2, 7, 1000), -60.0, dtype=torch.float64)
    wide = FullLaw(torch.cat([target, far], -1).log_softmax(-1))
    grown = loss_of(name, wide, torch.cat([draft, far], -1), Columns(V + 1000), following)
    assert (grown - losses).abs().max() < 1e-9


@REDUCED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_t02_draft_equal_to_target_is_a_fixed_point(
    name: str, kind: str, dtype: torch.dtype, vocab_ids: Tensor | None
) -> None:
    logits = random_logits(40, V, dtype=dtype) * 3
    draft = logits if vocab_ids is None else logits[:, vocab_ids]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for temperature in (0.5, 1.0, 2.0, 4.0):
        law = LAWS[kind]((logits / temperature).log_softmax(-1), vocab_ids)
        further = (Columns(V, vocab_ids), random_ids(40), temperature)
        assert loss_of(name, law, draft, *further).abs().mean() < tolerance
        assert (gradient(name, law, draft, *further) / len(draft)).norm() < 1e-6  # of the mean over positions


@pytest.mark.parametrize("name", DIVERGENCES)
def test_t02_a_draft_that_is_not_the_target_has_a_loss(name: str) -> None:
    logits = random_logits(40, V)
    law = FullLaw((logits + 0.1 * random_logits(40, V, seed=1)).log_softmax(-1))
    assert loss_of(name, law, logits).min() > 1e-6
    assert gradient(name, law, logits).norm(dim=-1).min() > 1e-4


def test_t24_top_k_keeps_the_rest_in_one_bucket() -> None:
    target, columns = logs(0.6, 0.3, 0.1).unsqueeze(0), Columns(3)
    law, other = top_k(target, 2), logs(0.5, 0.25, 0.25).unsqueeze(0)
    for name in DIVERGENCES:
        assert loss_of(name, law, target, columns).item() == pytest.approx(0, abs=1e-12)
        assert gradient(name, law, target, columns).norm() < 1e-12
        full = loss_of(name, FullLaw(target), other, columns)
        assert torch.allclose(loss_of(name, top_k(target, 3), other, columns), full, atol=1e-12)
    assert loss_of("forward_kl", law, other, columns).item() == pytest.approx(0.072460, abs=1e-6)


@REDUCED
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_t24_buckets_bound_the_full_loss_from_below(name: str, k: int, vocab_ids: Tensor | None) -> None:
    ids = torch.arange(V) if vocab_ids is None else vocab_ids
    target, draft = random_logits(N, V), random_logits(N, len(ids), seed=1)
    columns, log_probs = Columns(V, vocab_ids), target.log_softmax(-1)
    kept, whole = (loss_of(name, law, draft, columns) for law in (top_k(log_probs, k, vocab_ids), FullLaw(log_probs)))
    if name != "adaptive":  # its weight rises as the overlap is bounded from above
        assert (kept <= whole + 1e-12).all()  # data processing
    if name in ("forward_kl", "reverse_kl", "jensen_shannon"):  # smooth, so that a finite difference is a derivative
        law = top_k(log_probs, k, vocab_ids)
        assert torch.autograd.gradcheck(lambda x: loss_of(name, law, x, columns), draft.requires_grad_(), atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_a_law_made_of_hidden_states_when_asked_for_is_the_full_law(name: str) -> None:
    log_probs, draft = random_logits(N, V).log_softmax(-1), random_logits(N, V, seed=1)
    found, expected = (loss_of(name, law, draft) for law in (head_law(log_probs), FullLaw(log_probs)))
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    parts = [
        loss_of(name, head_law(log_probs).part(i, i + 2), draft[i : i + 2], None, random_ids(N)[i : i + 2])
        for i in range(0, N, 2)
    ]
    assert torch.allclose(torch.cat(parts), expected, rtol=0, atol=1e-14)
