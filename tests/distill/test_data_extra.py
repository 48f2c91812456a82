"""Extra examples in micro-batches: their share of rows, when they are asked for, and what they count."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Callback, Trainer

from distill.config import DataConfig, FitConfig, JudgeConfig, OptimizerConfig
from distill.data.examples import Example
from distill.data.extra import fill, with_extra
from distill.data.kept import Kept
from distill.data.module import DraftDataModule
from distill.data.schedule import Schedule
from distill.teacher.online import OnlineTeacher
from tests.fit_runs import CONSTANT, QUIET, PlainDescent, examples_of, run
from tests.fixtures import loaded, tiny_llama, with_noise

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

TRAIN = examples_of([5, 3, 6, 2, 4, 3, 5])
TEXTS = [Example([7, 8, 9, number], [False, True, True, True], f"text:{number}") for number in range(6)]


class Pool:
    """Gives all texts, from another one on at every micro-batch, and notes when it was asked."""

    def __init__(self, share: float, texts: Sequence[Example] = TEXTS) -> None:
        self.share, self.texts = share, texts
        self.asked: list[tuple[int, int]] = []
        self.done: list[int] = []
        """Optimiser steps taken when it was asked."""
        self.trainer: Any = None

    def examples(self, step: int, micro_batch: int) -> list[tuple[int, Example]]:
        self.asked.append((step, micro_batch))
        self.done.append(-1 if self.trainer is None else self.trainer.global_step)
        size, first = len(self.texts), 2 * step + micro_batch
        return [(i % size, self.texts[i % size]) for i in range(first, first + size)]


def feed_with(pool: Any, **options: Any) -> DraftDataModule:
    data = {"batch_size": options.pop("batch_size", 4), "packing": options.pop("packing", False), "max_length": 16}
    config = FitConfig(
        target="t",
        draft="d",
        output="o",
        data=DataConfig(["x"], **data),
        optimizer=OptimizerConfig(accumulate=options.pop("accumulate", 2)),
        judge=JudgeConfig(every_n_steps=3),
        **(options or {"max_steps": 6}),
    )
    return DraftDataModule(TRAIN, TRAIN[:1], config, pool)


@given(
    share=st.floats(0, 0.99),
    batch_size=st.integers(1, 6),
    accumulate=st.integers(1, 4),
    count=st.integers(1, 30),
    epochs=st.integers(1, 3),
)
@settings(deadline=None)
def test_rows_left_free_have_the_share_and_epochs_stay_whole(
    share: float, batch_size: int, accumulate: int, count: int, epochs: int
) -> None:
    run = Schedule([4] * count, 4, batch_size, accumulate, max_epochs=epochs, share=share)
    windows = [run.window(number) for number in range(run.num_windows)]
    order = [i for window in windows for batch in window for members in batch for i in members]
    for epoch in range(epochs):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert len(order) == epochs * count and windows[-1][-1]
    batches = [(step, n, rows) for step, window in enumerate(windows) for n, rows in enumerate(window)]
    assert len(batches) == run.num_batches(0, run.num_windows)
    assert all(len(rows) + run.num_extra(step, n) == batch_size for step, n, rows in batches[:-1])
    free = sum(run.num_extra(step, n) for step, n, _ in batches)
    assert abs(free - share * batch_size * len(batches)) < 1 + 1e-9
    plain = Schedule([4] * count, 4, batch_size, accumulate, max_epochs=epochs)
    assert order == [i for n in range(plain.num_windows) for batch in plain.window(n) for row in batch for i in row]


def test_extra_rows_join_the_scheduled_ones_and_are_counted() -> None:
    feed = feed_with(Pool(0.5))
    batches = list(feed.segment(0))
    assert [len(batch.input_ids) for batch in batches] == [4] * 6
    for number, batch in enumerate(batches):
        window = batches[number - number % 2 : number - number % 2 + 2]
        assert batch.normaliser == sum(int(b.supervised.sum()) for b in window)
        extra = batch.example_ids[batch.example_ids >= len(TRAIN)].unique() - len(TRAIN)
        first = 2 * (number // 2) + number % 2
        assert extra.tolist() == sorted(i % len(TEXTS) for i in (first, first + 1))


def test_extra_rows_are_packed_in_order_until_one_does_not_fit() -> None:
    assert fill(dict(enumerate(TEXTS)), 1, 9, packing=True) == [[0, 1]]
    assert fill(dict(enumerate(TEXTS)), 2, 8, packing=True) == [[0, 1], [2, 3]]
    assert fill(dict(enumerate(TEXTS)), 2, 8, packing=False) == [[0], [1]]
    assert fill({0: TEXTS[0]}, 3, 8, packing=True) == [[0]]
    assert fill({0: TEXTS[0], 1: TRAIN[2], 2: TEXTS[1]}, 1, 9, packing=True) == [[0]]  # the order is the caller's
    with pytest.raises(ValueError, match="an extra example has 4 tokens, a row takes 3"):
        fill({0: TEXTS[0]}, 1, 3, packing=True)


def test_a_micro_batch_with_nothing_in_it_is_an_error() -> None:
    schedule = Schedule([4] * 3, 4, 1, max_steps=4, share=0.5)
    with_extra(Pool(0.5, []), schedule, 0, TRAIN)
    with pytest.raises(ValueError, match="step 1, micro-batch 0: there is neither"):
        with_extra(Pool(0.5, []), schedule, 1, TRAIN)


class Watch(Callback):
    """Lets a pool see the trainer."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.pool.trainer = trainer


def test_extra_examples_are_asked_for_once_in_order_after_the_step_before() -> None:
    pool = Pool(0.5)
    feed = feed_with(pool)
    target, draft = tiny_llama(), with_noise(tiny_llama(), 0.5)
    module = PlainDescent(loaded(draft), OnlineTeacher(target), num_steps=feed.num_steps, optimizer=CONSTANT)
    run(module, feed, [Watch(pool)])
    assert pool.asked == [(step, number) for step in range(6) for number in range(2)]
    assert pool.done == [step for step, _ in pool.asked]


def test_advantages_are_shifted_like_weights_and_absent_where_no_example_has_any() -> None:
    told = Example([1, 2, 3], [False, True, True], "", weights=[9.0, 2.0, 3.0], advantages=[9.0, 0.5, -0.5])
    feed = feed_with(Pool(0.5, [told]), packing=True, accumulate=1, max_steps=1)
    (batch,) = feed.segment(0)
    assert batch.advantages is not None and batch.advantages.shape == batch.input_ids.shape
    of_extra = batch.example_ids == len(TRAIN)
    assert batch.advantages[of_extra].tolist() == [0.5, -0.5, 0.0]
    assert batch.weights[of_extra].tolist() == [2.0, 3.0, 0.0]
    assert not batch.advantages[~of_extra].any()
    assert batch.normaliser == float(batch.weights[batch.supervised].sum())
    assert next(iter(feed_with(None).segment(0))).advantages is None


def test_chosen_positions_are_of_training_examples_and_leave_extra_ones_alone() -> None:
    feed = feed_with(Pool(0.5))
    feed.kept = Kept(TRAIN, torch.arange(float(sum(example.num_supervised for example in TRAIN))), 0.25)
    for batch in feed.segment(0):
        owners, supervised = batch.example_ids, batch.supervised
        for index in owners.unique().tolist():
            whole = TEXTS[index - len(TRAIN)] if index >= len(TRAIN) else feed.kept.example(index, 0)
            assert int(supervised[owners == index].sum()) == (0 if index < 0 else whole.num_supervised)
