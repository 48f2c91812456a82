"""The data module under a real trainer: segments, resuming, ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer

from distill.config import DataConfig, FitConfig, JudgeConfig, OptimizerConfig
from distill.data.batches import Batch
from distill.data.examples import Example
from distill.data.module import DraftDataModule
from tests.fit_runs import QUIET
from tests.fixtures import random_prompt

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

EXAMPLES = [Example(random_prompt(5 + n % 4, seed=n), [False, *[True] * (4 + n % 4)], str(n)) for n in range(23)]


def settings(**extra: Any) -> FitConfig:
    return FitConfig(
        target="t",
        draft="d",
        output="o",
        data=DataConfig(["x"], max_length=16, batch_size=extra.pop("batch_size", 2)),
        optimizer=OptimizerConfig(accumulate=extra.pop("accumulate", 2)),
        judge=JudgeConfig(every_n_steps=extra.pop("every_n_steps", 3)),
        **extra,
    )


def module(**extra: Any) -> DraftDataModule:
    return DraftDataModule(EXAMPLES, EXAMPLES[:5], settings(**extra))


class Recorder(LightningModule):
    """Keeps what it was given at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[list[int]], int]] = []
        self.validated: list[list[list[int]]] = []

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        self.seen.append((self.global_step, batch.input_ids.tolist(), batch.normaliser))
        return self.weight * batch.supervised.sum()

    def validation_step(self, batch: Batch, index: int) -> None:
        self.validated.append(batch.input_ids.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(data: DraftDataModule, folder: Path, segments: int | None = None, resume: Path | None = None) -> Recorder:
    recorder = Recorder()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=segments or data.num_segments,
        accumulate_grad_batches=data.schedule.accumulate,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, datamodule=data, ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(folder / f"{trainer.current_epoch}.ckpt")
    return recorder


def test_a_run_gets_the_windows_of_the_schedule_in_order(tmp_path: Path) -> None:
    data = module(max_epochs=3)
    assert data.num_steps == data.schedule.num_windows and data.num_segments == -(-data.num_steps // 3)
    recorder = train(data, tmp_path)
    steps = [step for step, _, _ in recorder.seen]
    wanted = [step for step in range(data.num_steps) for _ in data.schedule.window(step)]
    assert steps == wanted  # the optimiser steps once a window, at the last, short one too
    batches = [batch for number in range(data.num_segments) for batch in data.segment(number)]
    assert [ids for _, ids, _ in recorder.seen] == [batch.input_ids.tolist() for batch in batches]
    assert recorder.validated == [b.input_ids.tolist() for b in data.validation()] * data.num_segments


def test_a_run_resumed_at_a_segment_border_sees_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = train(module(max_steps=9), tmp_path)
    first = train(module(max_steps=9), tmp_path, segments=1)
    second = train(module(max_steps=9), tmp_path, resume=tmp_path / "1.ckpt")
    assert first.seen + second.seen == whole.seen
    assert [len(first.seen), len(second.seen)] == [6, 12]


def test_normaliser_counts_the_supervised_positions_of_the_whole_window_over_all_ranks() -> None:
    data = module(max_epochs=2, batch_size=3)
    for number in range(data.num_segments):
        ranks = [list(data.segment(number, rank, 4)) for rank in range(4)]  # rank 3 never has a row of its own
        assert len({len(batches) for batches in ranks}) == 1
        steps = range(data.steps_done(number), data.steps_done(number + 1))
        widths = [len(data.schedule.window(step)) for step in steps]
        start = 0
        for width in widths:
            window = [batch for batches in ranks for batch in batches[start : start + width]]
            counted = sum(int(batch.supervised.sum()) for batch in window)
            assert {batch.normaliser for batch in window} == {counted} and counted > 0
            start += width


def test_tokens_seen_and_steps_done() -> None:
    data = module(max_epochs=2, every_n_steps=1000)
    assert (data.num_segments, data.steps_done(0), data.steps_done(1)) == (1, 0, data.num_steps)
    assert data.tokens_seen(0) == 0
    assert data.tokens_seen(data.num_steps) == 2 * sum(len(e.input_ids) for e in EXAMPLES)
    tokens = sum(int((batch.example_ids >= 0).sum()) for batch in data.segment(0))
    assert tokens == data.tokens_seen(data.num_steps)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a16_e02_validation_gives_every_pair_once_at_any_batch_size(batch_size: int) -> None:
    batches = list(module(max_steps=1, batch_size=batch_size).validation())
    owners = torch.cat([batch.example_ids[batch.supervised] for batch in batches])
    assert owners.bincount().tolist() == [example.num_supervised for example in EXAMPLES[:5]]
    assert [batch.normaliser for batch in batches] == [int(batch.supervised.sum()) for batch in batches]
