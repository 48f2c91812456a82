"""Positions chosen by a reference draft: scored once, the same in any batch; the mean is over them alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.errors import UsageError
from distill import selection
from distill.config import DataConfig, FitConfig, LossConfig, SelectionConfig
from distill.data.examples import Example
from distill.data.kept import Kept
from distill.selection import score
from distill.student import Student
from distill.teacher.cached import fill_cache
from distill.teacher.online import OnlineTeacher
from tests.distill.training import distil, mean_loss
from tests.fit_runs import QUIET, distance, examples_of, feed_of, weights_of
from tests.fixtures import loaded, tiny_llama, with_noise

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

EXAMPLES = examples_of([5, 3, 6, 2, 4, 3])


def models() -> tuple[Any, Any, Any]:
    """Target, the draft that starts, and a reference that is nearer to the target."""
    target = tiny_llama()
    return target, with_noise(tiny_llama(), 1.0, seed=3), with_noise(tiny_llama(), 0.3, seed=4)


def slow_gaps(target: Any, start: Any, reference: Any, examples: Sequence[Example]) -> list[float]:
    """The oracle: each supervised position of each example by itself, with a loop."""
    gaps = []
    for example in examples:
        laws = [model(input_ids=torch.tensor([example.input_ids])).logits[0].log_softmax(-1) for model in models()]
        for t in range(1, len(example.input_ids)):
            if example.mask[t]:
                log_p, log_start, log_reference = (law[t - 1].detach() for law in laws)
                gaps.append(
                    sum(float(p.exp() * (r - s)) for p, s, r in zip(log_p, log_start, log_reference, strict=True))
                )
    return gaps


def gaps_of(teacher: Any, examples: Sequence[Example] = EXAMPLES) -> Tensor:
    _, start, reference = models()
    return score((Student(loaded(start), LossConfig()), Student(loaded(reference), LossConfig())), teacher, examples)


def test_gaps_are_the_difference_of_the_two_drafts_losses() -> None:
    target, *drafts = models()
    # scored in float64, kept in float32
    torch.testing.assert_close(
        gaps_of(OnlineTeacher(target)), torch.tensor(slow_gaps(target, *drafts, EXAMPLES)), rtol=1e-6, atol=1e-6
    )


def test_scoring_leaves_the_drafts_as_they_were_and_rows_apart() -> None:
    target, start, reference = models()
    students = Student(loaded(start), LossConfig()), Student(loaded(reference), LossConfig())
    students[0].model.train()
    before, drawn = weights_of(start), torch.get_rng_state()
    gaps = score(students, OnlineTeacher(target), EXAMPLES)
    assert [s.model.training for s in students] == [True, False] and all(s.training for s in students)
    assert distance(before, weights_of(start)) == 0 and torch.equal(drawn, torch.get_rng_state())
    alone = torch.cat([score(students, OnlineTeacher(target), [example]) for example in EXAMPLES])
    torch.testing.assert_close(gaps, alone, rtol=1e-6, atol=1e-6)


def test_cached_teacher_chooses_what_an_online_one_does(tmp_path: Any) -> None:
    target, *_ = models()
    kept = [
        Kept(EXAMPLES, gaps_of(teacher), 0.5)
        for teacher in (OnlineTeacher(target), fill_cache(target, EXAMPLES, tmp_path, top_k=40))
    ]
    masks = [[one.example(i, 0).mask for i in range(len(EXAMPLES))] for one in kept]
    assert masks[0] == masks[1]


@given(data=st.data(), keep=st.floats(0.01, 1), step=st.integers(0, 9))
@settings(deadline=None)
def test_the_largest_gaps_of_all_examples_are_kept_and_ties_go_by_position(
    data: st.DataObject, keep: float, step: int
) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    examples = examples_of(counts)
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=sum(counts), max_size=sum(counts)))
    kept = Kept(examples, torch.tensor(gaps), keep, rises=data.draw(st.booleans()), num_steps=10)
    best = sorted(range(len(gaps)), key=lambda n: (-gaps[n], n))[: kept.num_positions(step)]
    made = [kept.example(i, step) for i in range(len(examples))]
    flat = [
        bit
        for one, whole in zip(made, examples, strict=True)
        for bit, was in zip(one.mask, whole.mask, strict=True)
        if was
    ]
    assert [n for n, bit in enumerate(flat) if bit] == sorted(best)
    assert [replace(one, mask=whole.mask) for one, whole in zip(made, examples, strict=True)] == examples
    assert sum(one.num_supervised for one in made) == kept.num_positions(step) >= 1


def test_curriculum_grows_from_keep_to_all_with_the_steps_number() -> None:
    gaps = torch.arange(23.0)
    kept = Kept(EXAMPLES, gaps, 0.25, rises=True, num_steps=5)
    assert [kept.num_positions(step) for step in range(5)] == [6, 10, 14, 19, 23]
    assert {Kept(EXAMPLES, gaps, 0.25).num_positions(step) for step in range(5)} == {6}
    assert Kept(EXAMPLES, gaps, 1e-9).num_positions(0) == 1
    assert kept.example(2, 3) == kept.example(2, 3)  # of the step's number alone


def test_each_step_is_fed_what_is_kept_at_it() -> None:
    feed = feed_of(EXAMPLES, batch_size=6, max_steps=5)
    feed.kept = Kept(EXAMPLES, torch.arange(23.0), 0.25, rises=True, num_steps=5)
    assert [batch.normaliser for batch in feed.segment(0)] == [6, 10, 14, 19, 23]


def test_scores_are_used_for_what_they_were_made_of_only(tmp_path: Path) -> None:
    file, gaps = tmp_path / "gaps.safetensors", torch.arange(3.0)
    assert selection._read(file, "key") is None
    selection._write(file, gaps, "key")
    found = selection._read(file, "key")
    assert found is not None and torch.equal(found, gaps)
    assert selection._read(file, "another") is None


LAYOUTS: dict[str, dict[str, Any]] = {
    "one batch": {"batch_size": 6},
    "one by one": {"batch_size": 1, "accumulate": 6},
    "two by two": {"batch_size": 2, "accumulate": 3},
    "packed": {"batch_size": 6, "packing": True},
}


def trained(kept: Any, **options: Any) -> dict[str, Tensor]:
    target, draft, _ = models()
    feed = feed_of(EXAMPLES, **options)
    feed.kept = kept
    distil(draft, target, feed)
    return weights_of(draft)


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept(EXAMPLES, gaps_of(OnlineTeacher(models()[0])), 0.4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_t05_the_gradient_is_of_the_mean_over_kept_positions_whatever_the_split(layout: str, kept: Kept) -> None:
    target, draft, _ = models()
    chosen = [kept.example(i, 0) for i in range(len(EXAMPLES))]
    assert 0 < sum(e.num_supervised for e in chosen) == round(0.4 * 23)
    loss = mean_loss(draft.requires_grad_(True), target, list(range(len(EXAMPLES))), chosen)
    grads = torch.autograd.grad(loss, list(draft.parameters()))
    before = weights_of(draft)
    names = [name for name, _ in draft.named_parameters()]
    wanted = before | {name: before[name] - 0.1 * grad for name, grad in zip(names, grads, strict=True)}
    # packed documents are apart up to fp32 norms' rounding
    assert distance(trained(kept, **LAYOUTS[layout]), wanted) < 1e-5


class PerBatch:
    """A wrong choice, which common code makes: the largest gaps of each micro-batch by itself."""

    def __init__(self, kept: Kept, size: int) -> None:
        self.kept, self.size = kept, size

    def example(self, index: int, step: int) -> Example:
        group = range(index // self.size * self.size, min(len(EXAMPLES), (index // self.size + 1) * self.size))
        ranks = torch.cat([self.kept._ranks[i] for i in group])
        own = Kept([EXAMPLES[i] for i in group], -ranks.double(), self.kept.keep)
        return own.example(index - group[0], step)


def test_t05_a_choice_within_each_batch_would_be_seen(kept: Kept) -> None:
    whole = trained(kept, batch_size=6)
    assert distance(trained(PerBatch(kept, 6), batch_size=6), whole) < 1e-9
    assert distance(trained(PerBatch(kept, 2), batch_size=6), whole) > 1e-3


def test_all_positions_kept_is_training_without_a_choice(kept: Kept) -> None:
    everything = Kept(EXAMPLES, torch.zeros(23), 1.0)
    assert distance(trained(everything, batch_size=2), trained(None, batch_size=2)) == 0
    assert distance(trained(kept, batch_size=2), trained(None, batch_size=2)) > 1e-3


def test_ranks_share_the_kept_positions(kept: Kept) -> None:
    feed = feed_of(EXAMPLES, batch_size=2, accumulate=3)
    feed.kept = kept
    batches = [batch for rank in range(2) for batch in feed.segment(0, rank, 2)]
    assert {batch.normaliser for batch in batches} == {sum(int(batch.supervised.sum()) for batch in batches)} == {9}
    assert sum(int(batch.supervised.sum()) for batch in feed.validation()) == 5  # untouched


def test_settings_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(UsageError, match=r"selection.keep: 0.5 is not legal; expected 0.4, the default, without"):
        SelectionConfig(keep=0.5)
    with pytest.raises(UsageError, match=r"selection.curriculum: True is not legal; expected False, the default"):
        SelectionConfig(curriculum=True)
    for keep in (0.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match=r"selection.keep: .*a number in \(0, 1\]"):
            SelectionConfig("r", keep)
    with pytest.raises(UsageError, match=r"selection.reference: 'r' is not legal; expected null with data.streaming"):
        FitConfig("t", "d", "o", DataConfig(["x"], streaming=True), selection=SelectionConfig("r"), max_steps=2)
