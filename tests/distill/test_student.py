"""The draft with its objective: weights, advantages, mixes, masks and heads, against what each position gives alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.errors import UsageError
from decode.models import narrow_head
from distill import fused
from distill.acceptance import acceptance
from distill.config import SERVINGS, DataConfig, FitConfig, LossConfig
from distill.data.batches import Batch, collate
from distill.data.examples import Example
from distill.laws import Columns, FullLaw
from distill.losses import LOSSES
from distill.student import Student
from distill.teacher.online import OnlineTeacher
from distill.training.module import VALIDATION_METRICS
from tests.distill.law_samples import loss_of, top_k
from tests.fit_runs import examples_of
from tests.fixtures import loaded, tiny_gpt2, tiny_llama

V = 48


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK_BYTES", 4 * V * 3)  # three positions


def batch_of(examples: list[Example], packs: list[list[int]] | None = None) -> Batch:
    return collate(packs or [[i] for i in range(len(examples))], examples, normaliser=1.0)


def weighted(examples: list[Example]) -> list[Example]:
    """The same with unequal weights, and advantages of both signs."""
    made = []
    for number, e in enumerate(examples):
        draw = torch.rand(2, len(e.input_ids), generator=torch.Generator().manual_seed(number))
        weights, advantages = draw[0].add(0.5).tolist(), draw[1].sub(0.5).tolist()
        made.append(Example(e.input_ids, e.mask, e.source, weights, advantages))
    return made


def gradients(student: Student, total: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, list(student.model.parameters()), allow_unused=True, materialize_grads=True))


def by_hand(draft: Any, target: Any, examples: list[Example], name: str, temperature: float = 1.0) -> Tensor:
    """Each position of each example by itself."""
    total = torch.zeros((), dtype=torch.float64)
    for e in examples:
        ids = torch.tensor([e.input_ids])
        with torch.no_grad():
            p = target(input_ids=ids).logits[0]
        q = draft(input_ids=ids).logits[0]
        for t in (t for t in range(len(e.input_ids) - 1) if e.mask[t + 1]):
            law, following = FullLaw((p[t : t + 1] / temperature).log_softmax(-1)), ids[0, t + 1 : t + 2]
            loss = loss_of(name, law, q[t : t + 1], Columns(V), following, temperature).sum()
            log_q = (q[t] / temperature).log_softmax(-1)[e.input_ids[t + 1]]
            total = total + (e.weights or [1.0] * len(e.input_ids))[t + 1] * loss
            total = total - (e.advantages or [0.0] * len(e.input_ids))[t + 1] * log_q
    return total


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_t05_t07_weights_and_advantages_are_of_the_token_that_follows(name: str, temperature: float) -> None:
    draft, target, examples = tiny_llama(1), tiny_llama(0), weighted(examples_of([3, 5, 2, 4]))
    student = Student(loaded(draft), LossConfig(name, temperature))
    expected = by_hand(draft, target, examples, name, temperature)
    slopes = gradients(student, expected)
    for packs in (None, [[0, 1], [2, 3]], [[3, 1, 0, 2]]):  # padded to unequal widths, packed, in another order
        batch = batch_of(examples, packs)
        found = student(batch, OnlineTeacher(target, temperature).law(batch))
        # weights and advantages are fp32 numbers
        assert found.total.item() == pytest.approx(expected.item(), rel=1e-6)
        for a, b in zip(gradients(student, found.total), slopes, strict=True):
            assert (a - b).norm() <= 1e-6 * (1 + b.norm())


def test_t05_what_is_not_supervised_does_not_count() -> None:
    draft, target = tiny_llama(1), tiny_llama(0)
    student, batch = Student(loaded(draft), LossConfig()), batch_of(examples_of([3, 5]))
    law = OnlineTeacher(target).law(batch)
    expected = student(batch, law)
    loud = batch.weights.masked_fill(~batch.supervised, 1e6)
    assert student(batch._replace(weights=loud), law).total == expected.total
    nothing = batch._replace(supervised=torch.zeros_like(batch.supervised))
    found = student(nothing, OnlineTeacher(target).law(nothing))
    assert found.total.item() == 0 and found.losses.shape == (0,)
    assert all((grad == 0).all() for grad in gradients(student, found.total))


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2])
def test_a_mix_is_the_weighted_sum_of_its_losses_with_their_options(family: Any) -> None:
    draft, target = family(1), tiny_llama(0)
    batch = batch_of(examples_of([3, 5, 2]))
    law = OnlineTeacher(target).law(batch)

    def of(**settings: Any) -> tuple[Tensor, list[Tensor]]:
        student = Student(loaded(draft), LossConfig(**settings))
        total = student(batch, law).total
        return total.detach(), gradients(student, total)

    mixed = of(name={"forward_kl": 0.5, "data": 2.0, "jensen_shannon": 3.0}, beta=0.2)
    parts = [(0.5, of(name="forward_kl")), (2.0, of(name="data")), (3.0, of(name="jensen_shannon", beta=0.2))]
    assert torch.allclose(mixed[0], torch.stack([w * part[0] for w, part in parts]).sum(), rtol=0, atol=1e-10)
    for index, found in enumerate(mixed[1]):
        expected = torch.stack([w * part[1][index] for w, part in parts]).sum(0)
        assert (found - expected).norm() <= 1e-6 * expected.norm()  # a Llama's norms round gradients to fp32
    assert of(name="jensen_shannon", beta=0.2)[0] != of(name="jensen_shannon")[0]
    assert of(name="adaptive", eta=1.0)[0] != of(name="adaptive")[0]


@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, V, 3)], ids=["all ids", "reduced"])
def test_a_head_that_stands_apart_and_one_that_does_not_give_the_same(vocab_ids: Tensor | None) -> None:
    draft, target = tiny_llama(1), tiny_llama(0)
    if vocab_ids is not None:
        narrow_head(draft, vocab_ids)
    batch = batch_of(weighted(examples_of([3, 5, 2])))
    teacher = OnlineTeacher(target)
    whole = teacher.law(batch).log_probs
    for law in (teacher.law(batch), FullLaw(whole), top_k(whole, 5, vocab_ids)):
        student = Student(loaded(draft, vocab_ids=vocab_ids), LossConfig("adaptive"))
        found = student(batch, law)
        slopes = gradients(student, found.total)
        losses, measured = student.measure(batch, law)
        student._apart = False
        plain = student(batch, law)
        assert torch.allclose(found.total, plain.total, rtol=0, atol=1e-10)
        assert torch.allclose(found.losses, plain.losses, rtol=0, atol=1e-10)
        assert torch.allclose(found.overlap, plain.overlap, rtol=0, atol=1e-10)
        for a, b in zip(slopes, gradients(student, plain.total), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-10)
        assert torch.allclose(losses, found.losses, rtol=0, atol=1e-10)
        logits = draft(input_ids=batch.input_ids, position_ids=batch.position_ids).logits[batch.supervised]
        expected = acceptance(law, logits, Columns(V, vocab_ids))
        for a, b in zip(vars(measured).values(), vars(expected).values(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-10)
        if vocab_ids is None and not hasattr(law, "ids"):
            assert torch.allclose(found.overlap, expected.expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kept", [None, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_t02_t22_a_draft_equal_to_its_teacher_is_not_moved(name: str, kept: int | None) -> None:
    draft, batch = tiny_llama(0), batch_of(examples_of([3, 5]))
    law = OnlineTeacher(tiny_llama(0)).law(batch)
    student = Student(loaded(draft), LossConfig(name))
    found = student(batch, law if kept is None else top_k(law.log_probs, kept))
    norm = sum(float(grad.square().sum()) for grad in gradients(student, found.total)) ** 0.5
    if name in ("target_argmax", "data"):  # what they aim at is a token, not the law
        assert norm > 1e-3
    else:
        assert found.losses.abs().max() < 1e-12
        assert norm < 1e-6
    assert torch.allclose(found.overlap, torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-12)


def fit_config(**settings: Any) -> FitConfig:
    return FitConfig("t", "d", "o", DataConfig(["x"]), max_steps=1, **settings)


@pytest.mark.parametrize("serve", SERVINGS)
def test_the_way_of_serving_names_the_default_loss_and_a_metric_that_is_measured(serve: Any) -> None:
    student = Student(loaded(tiny_llama()), LossConfig(), serve)
    assert student.mix == {SERVINGS[serve].loss: 1.0}
    assert f"val/{SERVINGS[serve].watched}" in VALIDATION_METRICS
    assert fit_config(serve=serve).loss.mix(serve) == student.mix
    named = LossConfig({"data": 2.0})
    assert Student(loaded(tiny_llama()), named, serve).mix == {"data": 2.0}


MISTAKES = {
    "loss.name: 'forward_lk' is not legal; .* data; did you mean forward_kl?": {"name": "forward_lk"},
    "loss.name: 'dat' is not legal; .*; did you mean data?": {"name": {"forward_kl": 1.0, "dat": 0.1}},
    "loss.name: {} is not legal; expected a loss, or one or more": {"name": {}},
    "loss.name.data: 0 is not legal; expected a finite weight > 0": {"name": {"data": 0}},
    "loss.name.data: nan is not legal; expected a finite weight > 0": {"name": {"data": float("nan")}},
    "loss.beta: 1.5 is not legal; expected a number from 0 to 1": {"name": "jensen_shannon", "beta": 1.5},
    "loss.eta: -1 is not legal; expected a number from 0 to 1000": {"name": "adaptive", "eta": -1},
    "loss.beta: 0.2 is not legal; expected 0.5, the default, where jensen_shannon is not minimised": {"beta": 0.2},
    "loss.eta: 1.0 is not legal; expected 3.0, the default, where adaptive": {"name": "data", "eta": 1.0},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_is_no_loss_or_has_no_effect_is_refused_with_what_is_legal(message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        fit_config(loss=LossConfig(**MISTAKES[message]))
