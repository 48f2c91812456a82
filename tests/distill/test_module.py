"""The LightningModule against a plain loop: the same weights however a window is split; no mode or graph left over."""

import gc
import itertools
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback

from decode.models import narrow_head
from distill.config import LossConfig, OptimizerConfig
from distill.data.batches import Batch
from distill.data.examples import Example
from distill.data.module import DraftDataModule
from distill.draft_vocab import pin_guard_channel
from distill.laws import Columns, FullLaw, align
from distill.losses import forward_kl
from distill.module import Distillation, noise_seed
from distill.optimizer import learning_rate, make_optimizer
from distill.teacher.cached import fill_cache
from distill.teacher.fingerprint import weights_sha256
from distill.teacher.online import OnlineTeacher
from tests.fit_runs import CONSTANT, QUIET, PlainDescent, distance, examples_of, feed_of, run, weights_of
from tests.fixtures import P, Q, constant_law, loaded, tiny_gpt2, tiny_llama

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]


def mean_loss(draft: Any, target: Any, members: list[int], examples: list[Example]) -> torch.Tensor:
    """The oracle: every supervised position of every example by itself, their sum divided once by their number."""
    losses = []
    for example in (examples[i] for i in members):
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            log_p = target(input_ids=ids).logits[0].log_softmax(-1)
        log_q = draft(input_ids=ids).logits[0].log_softmax(-1)
        for t in range(len(example.input_ids) - 1):
            if example.mask[t + 1]:
                losses.append((log_p[t].exp() * (log_p[t] - log_q[t])).sum())
    return torch.stack(losses).mean()


def descend(draft: Any, target: Any, feed: DraftDataModule, rate: float = 0.1) -> list[float]:
    """Plain gradient descent over the run's windows; `draft` is trained, the loss of each window returned."""
    told = []
    for step in range(feed.num_steps):
        members = [i for batch in feed.schedule.window(step) for row in batch for i in row]
        loss = mean_loss(draft.requires_grad_(True), target, members, feed.train_examples)
        grads = torch.autograd.grad(loss, list(draft.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(draft.parameters(), grads, strict=True):
                parameter -= rate * grad
        told.append(loss.item())
    return told


class Probe(Callback):
    """Notes what happens at every optimiser step and validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.modes: list[tuple[str, bool]] = []
        self.seeds: list[int] = []
        self._step = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.modes.append(("train", module.draft.training))
        self.seeds.append(torch.initial_seed())
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.losses.append(module.window_loss)
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.modes.append(("validate", module.draft.training))


def distil(draft: Any, target: Any, feed: DraftDataModule, probe: Probe | None = None, **options: Any) -> Any:
    kind = options.pop("kind", PlainDescent)
    options = {"optimizer": CONSTANT, "num_steps": feed.num_steps, **options}
    module = kind(loaded(draft), OnlineTeacher(target), **options)
    run(module, feed, [probe or Probe()])
    return module


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


def switch_off_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


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


def test_t19_only_the_draft_is_trained_saved_and_counted() -> None:
    target, draft = tiny_gpt2(seed=2), tiny_llama(seed=1)
    for module in target.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    before = weights_sha256(target)
    seen: list[torch.Tensor] = []

    class Watch(Probe):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, *_: Any) -> None:
            seen.append(module.teacher.law(fixed).log_probs)

    feed = feed_of(examples_of([3, 4, 5, 6]), batch_size=1, every=2)
    fixed = feed.segment(0)[0]
    decay = OptimizerConfig(learning_rate=0.1, weight_decay=0.1)
    module = distil(draft, target, feed, Watch(), kind=Distillation, optimizer=decay)
    assert weights_sha256(target) == before
    assert all(torch.equal(seen[0], later) for later in seen)
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in draft.parameters())
    assert set(module.state_dict()) == {f"draft.{name}" for name in draft.state_dict()}


def test_t27_dropout_is_on_in_training_and_off_in_validation() -> None:
    draft, probe = tiny_gpt2(seed=1), Probe()
    feed = feed_of(examples_of([3] * 6), batch_size=1, every=2)
    distil(draft, tiny_llama(), feed, probe)
    assert [kind for kind, _ in probe.modes] == ["train", "train", "validate"] * 3
    assert all(training == (kind == "train") for kind, training in probe.modes)


def test_r04_dropout_is_drawn_from_the_micro_batchs_number_alone() -> None:
    assert len({noise_seed(s, b, r) for s in range(3) for b in range(3) for r in range(3)}) == 27
    runs = []
    for noise in (1, 2):
        draft, probe = tiny_gpt2(seed=1), Probe()
        torch.manual_seed(noise)  # whatever was drawn before
        feed = feed_of(examples_of([3] * 8), batch_size=1, accumulate=2, every=2)
        distil(draft, tiny_llama(), feed, probe, seed=5)
        runs.append(weights_of(draft))
        assert len(set(probe.seeds)) == 8  # none twice
    assert distance(*runs) == 0
    other = tiny_gpt2(seed=1)
    distil(other, tiny_llama(), feed, seed=6)
    assert distance(runs[0], weights_of(other)) > 0


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


def test_reduced_vocabulary_trains_its_rows_and_keeps_the_guard_channel() -> None:
    draft, target, ids = tiny_llama(seed=1), tiny_llama(), torch.arange(0, 48, 3)
    pin_guard_channel(draft)
    narrow_head(draft, ids)
    feed = feed_of(examples_of([3, 4, 5, 6]), batch_size=2)
    module = Distillation(loaded(draft, vocab_ids=ids), OnlineTeacher(target), num_steps=2)
    before = weights_of(draft)
    batch = feed.segment(0)[0]
    logits = draft(input_ids=batch.input_ids).logits[batch.supervised]
    log_p = target(input_ids=batch.input_ids).logits[batch.supervised].log_softmax(-1)
    expected = forward_kl(*align(FullLaw(log_p), logits, Columns(48, len(ids), ids))).mean()
    probe = Probe()
    run(module, feed, [probe])
    assert probe.losses[0] == pytest.approx(expected.item(), abs=1e-9)
    after = weights_of(draft)
    assert distance(before, after) > 1e-4
    assert (after["model.embed_tokens.weight"][:, 0] == 1).all()
    assert (after["model.layers.0.mlp.down_proj.weight"][0] == 0).all()
    assert after["lm_head.weight"].shape == (16, 32)


def test_weight_decay_spares_embeddings_and_norms() -> None:
    model = tiny_llama().requires_grad_(True)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1), fused=True)
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert {id(p) for p in others} == {id(p) for n, p in model.named_parameters() if "norm" in n or "embed" in n}
    assert len(decayed) + len(others) == len(list(model.parameters()))


@pytest.mark.slow
def test_t29_memory_does_not_grow_with_steps() -> None:
    marks: list[tuple[int, int]] = []

    class Weigh(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in (100, 600):
                gc.collect()
                alive = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
                marks.append((alive, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))

    feed = feed_of(examples_of([3] * 8), batch_size=2, max_steps=600, every=50)
    draft = tiny_llama(seed=1)
    run(Distillation(loaded(draft), OnlineTeacher(tiny_llama()), num_steps=600), feed, [Weigh()])
    (first, memory), (last, later) = marks
    assert last <= first
    assert later - memory < 5 * 1024  # kB
