"""The LightningModule against a plain loop: the same weights however a window is split; no mode or graph left over."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import LossConfig, OptimizerConfig
from distill.data.examples import Example
from distill.teacher.cached import fill_cache
from distill.teacher.online import OnlineTeacher
from distill.training.module import Distillation
from distill.training.optimizer import learning_rate
from tests.distill.training import Probe, descend, distil, mean_loss, switch_off_dropout
from tests.fit_runs import CONSTANT, QUIET, PlainDescent, distance, examples_of, feed_of, run, weights_of
from tests.fixtures import P, Q, constant_law, loaded, markov_law, tiny_gpt2, tiny_llama

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]


SPLITS = {
    "one batch": {"batch_size": 4},
    "micro-batches": {"batch_size": 1, "accumulate": 4},
    "two by two": {"batch_size": 2, "accumulate": 2},
    "one pack": {"batch_size": 1, "packing": True, "max_length": 64},
    "two packs": {"batch_size": 2, "packing": True, "max_length": 34},
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_t14_a_windows_step_is_the_same_however_it_is_split(split: str, make: Any) -> None:
    examples = examples_of([1, 3, 9, 27])
    draft, expected = make(seed=1), make(seed=1)
    if make is tiny_gpt2:  # no dropout here: what is drawn differs between splits
        draft, expected = (switch_off_dropout(model) for model in (draft, expected))
    feed = feed_of(examples, **SPLITS[split])
    assert feed.num_steps == 1
    probe = Probe()
    distil(draft, tiny_llama(), feed, probe)
    (loss,) = descend(expected, tiny_llama(), feed)
    assert distance(weights_of(draft), weights_of(expected)) < 1e-9
    assert probe.losses == [pytest.approx(loss, abs=1e-9)]


def test_t15_t17_short_last_window_and_logged_losses_are_true_means() -> None:
    examples = examples_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    feed = feed_of(examples, batch_size=1, accumulate=4, every=2)  # windows of 4, 4 and 2; a segment ends at 2
    draft, expected, probe = tiny_llama(seed=1), tiny_llama(seed=1), Probe()
    distil(draft, tiny_llama(), feed, probe)
    assert probe.losses == pytest.approx(descend(expected, tiny_llama(), feed), abs=1e-8)
    assert len(probe.losses) == 3
    assert distance(weights_of(draft), weights_of(expected)) < 1e-8


def test_t16_windows_cross_epochs_where_an_epoch_is_shorter_than_one() -> None:
    feed = feed_of(examples_of([1, 2, 3, 4, 5]), batch_size=1, accumulate=8, max_epochs=3)  # 15 rows: 8 and 7
    draft, expected, probe = tiny_llama(seed=1), tiny_llama(seed=1), Probe()
    distil(draft, tiny_llama(), feed, probe)
    assert probe.losses == pytest.approx(descend(expected, tiny_llama(), feed), abs=1e-8)
    assert len(probe.losses) == 2
    assert distance(weights_of(draft), weights_of(expected)) < 1e-8


def test_t18_schedule_counts_optimiser_steps_and_ends_with_the_run() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.25)
    rates = [learning_rate(step, 30, config) for step in range(30)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert max(rates[3:]) < 1.0
    assert rates[29] == pytest.approx(0.25)
    assert min(rates[3:29]) > 0.25
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))
    halfway = rates[2 + 13] + rates[2 + 14]  # the cosine's two middle steps lie about the mean of its ends
    assert halfway == pytest.approx(1.25)
    assert learning_rate(0, 1, OptimizerConfig(learning_rate=1.0, warmup_fraction=0.0)) == 1.0
    feed = feed_of(examples_of([3] * 12), batch_size=1, accumulate=4, every=2, max_epochs=2)
    probe = Probe()
    distil(tiny_llama(seed=1), tiny_llama(), feed, probe, optimizer=config)
    assert probe.rates == [learning_rate(step, 6, config) for step in range(6)]


@pytest.mark.parametrize("teacher", ["online", "cached", "cached whole"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_t02_draft_equal_to_target_does_not_move(teacher: str, temperature: float, tmp_path: Path) -> None:
    target, draft, examples = tiny_llama(), tiny_llama(), examples_of([1, 3, 9, 12])
    feed = feed_of(examples, batch_size=2, accumulate=2)
    if teacher == "online":
        source: Any = OnlineTeacher(target, temperature)
    else:
        k = 48 if teacher == "cached whole" else 5
        source = fill_cache(target, examples, tmp_path, top_k=k, temperature=temperature)
    before, probe = weights_of(draft), Probe()
    loss = LossConfig(temperature=temperature)
    module = PlainDescent(loaded(draft), source, num_steps=1, loss=loss, optimizer=CONSTANT)
    run(module, feed, [probe])
    tolerance = 1e-12 if teacher == "online" else 1e-6  # caches are fp32
    assert abs(probe.losses[0]) < tolerance
    assert distance(before, weights_of(draft)) < 0.1 * 1e-6


def test_t10_nothing_supervised_changes_no_weight_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    empty = Example([1, 2, 3], [False] * 3, "made:empty")
    draft = tiny_llama(seed=1)
    before = weights_of(draft)
    decay = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    module = distil(draft, tiny_llama(), feed_of([empty, empty], batch_size=2), kind=Distillation, optimizer=decay)
    assert distance(before, weights_of(draft)) == 0
    assert module.num_empty_windows == 1
    assert "1 optimiser steps had nothing supervised" in capsys.readouterr().out
    (normal,) = examples_of([5])
    mixed, alone, probe = tiny_llama(seed=1), tiny_llama(seed=1), Probe()
    distil(mixed, tiny_llama(), feed_of([empty, normal, empty], batch_size=1, accumulate=3), probe)
    distil(alone, tiny_llama(), feed_of([normal], batch_size=1))
    assert distance(weights_of(mixed), weights_of(alone)) < 1e-12
    assert all(math.isfinite(loss) for loss in probe.losses)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("packing", [False, True])
def test_e01_e02_validation_is_a_mean_over_positions_at_any_batch_size(batch_size: int, packing: bool) -> None:
    validation = examples_of([1, 2, 40, 4, 11, 3, 7])
    draft, target = tiny_llama(seed=1), tiny_llama()
    feed = feed_of(examples_of([2]), validation, batch_size=batch_size, packing=packing, max_steps=1)
    module = distil(draft, target, feed, optimizer=OptimizerConfig(learning_rate=1e-30))
    expected = mean_loss(draft, target, list(range(7)), validation).item()
    assert module.metrics["val/loss"] == pytest.approx(expected, abs=1e-9)
    assert sum(e.num_supervised for e in validation) == 68


def test_e07_validation_of_constant_laws_gives_their_overlap() -> None:
    examples = examples_of([5, 6], vocab_size=6)
    feed = feed_of(examples, examples, max_steps=1)
    module = distil(constant_law(Q), constant_law(P), feed, optimizer=OptimizerConfig(learning_rate=1e-30))
    assert module.metrics["val/expected_acceptance"] == pytest.approx(0.5, abs=1e-7)  # the fixture is built in fp32
    assert module.metrics["val/greedy_acceptance"] == pytest.approx(0.10, abs=1e-7)


def test_t07_draft_learns_the_transitions_themselves_not_shifted_ones() -> None:
    size = 6
    rows = (torch.rand(size, size, generator=torch.Generator().manual_seed(3)) ** 3).add(0.02)
    rows = (rows / rows.sum(-1, keepdim=True)).tolist()
    target, draft = markov_law(rows), markov_law([[1 / size] * size] * size)
    feed = feed_of(examples_of([12] * 8, vocab_size=size), batch_size=8, max_steps=120)
    fast = OptimizerConfig(learning_rate=0.1)
    module = Distillation(loaded(draft), OnlineTeacher(target), num_steps=feed.num_steps, optimizer=fast)
    draft.model.requires_grad_(False)  # the head alone can hold the law; a body would learn the few texts by heart
    run(module, feed)
    with torch.no_grad():
        learnt = draft(input_ids=torch.arange(size).unsqueeze(1)).logits[:, 0].softmax(-1)
    assert (learnt - torch.tensor(rows).double()).abs().max() < 0.02
