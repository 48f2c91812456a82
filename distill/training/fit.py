"""`draftsmith fit`: distils, judges, saves; the same call again continues where the run stopped."""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from decode.config import DecodeConfig
from decode.errors import require
from decode.models import LoadedModel
from distill.config import FitConfig
from distill.data.kept import Kept
from distill.folders import run_folder
from distill.on_policy.make import with_pool
from distill.on_policy.pool import Pool
from distill.runs import is_other_rank, record_run
from distill.selection import choose_positions
from distill.student import Student
from distill.teacher.choose import check_teacher, make_teachers
from distill.training.callbacks import CheckpointJudge, Checkpoints, Clock, StepLog
from distill.training.history import Number, metrics_table, steps_table
from distill.training.module import Distillation
from distill.training.prepare import compile_layers
from distill.training.progress import StepProgress
from distill.training.resume import Standing, find_standing, last_step, refuse_changes, refuse_other_inputs
from distill.training.run_files import best_row, clear_leftovers, cut_tables, finish_writing
from distill.training.run_parts import Parts, load_parts, report_lines
from distill.training.trainer_options import LOG_EVERY_N_STEPS, check_options, make_trainer

# Said of every run, and so by design: batches are made in place, segments may be shorter than the logging interval.
EXPECTED_WARNINGS = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    ".*LeafSpec.*",
)


@dataclass(frozen=True)
class FitReport:
    """Where a run stands when `fit` returns."""

    output: Path
    step: int
    num_steps: int
    resumed_from: int | None
    """Step of the checkpoint that this call continued from; None for a fresh start."""
    rows: list[dict[str, Number]]
    """metrics.csv: the untrained draft, then each checkpoint."""
    best: dict[str, Number] | None
    """The row of the fastest checkpoint."""

    @property
    def complete(self) -> bool:
        return self.step >= self.num_steps


def fit(config: FitConfig) -> FitReport:
    """Distil `config.draft` on the logits of `config.target` into the run folder `config.output`.

    A run that stopped anywhere continues from its last checkpoint, on a CPU to bit-identical weights and metrics; of
    a finished one only best.json, last.ckpt and metrics.csv are made where they are missing or damaged. Raises
    UsageError for what cannot be used or differs from the run's own settings, and KeyboardInterrupt after Ctrl-C, once
    training has been shut down.
    """
    require(not config.dry_run, "dry_run", config.dry_run, "false here; distill.training.dry_run makes the estimate")
    check_options(config.trainer)
    check_teacher(config)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=is_other_rank())
    with run_folder(config.output, "draftsmith fit") as folder, _quiet_lightning(), _same_random_state():
        clear_leftovers(folder / "checkpoints")
        standing = find_standing(folder / "checkpoints", console.print)
        if standing is not None:
            refuse_changes(standing, config, console.print)
            if standing.complete:
                made = [] if is_other_rank() else finish_writing(folder, standing)
                told = f"{' and '.join(made)} made anew" if made else "nothing is changed"
                console.print(f"{folder}: the run is complete at step {standing.step}; {told}")
                return _report(folder, standing.step, standing.num_steps, standing)
        return _run(config, folder, standing, console)


def _run(config: FitConfig, folder: Path, standing: Standing | None, console: Console) -> FitReport:
    parts = load_parts(config)
    if standing is not None:
        refuse_other_inputs(standing, parts.record)
    trainer = _make_trainer(config, parts, folder, standing, console)
    if not is_other_rank():
        record_run(folder, config)
        cut_tables(folder, standing, console.print)
    for line in report_lines(config, parts, standing):
        console.print(line)
    module = make_module(config, parts, folder, console)
    if parts.reference is not None:
        parts.feed.kept = _choose_positions(config, parts, module, parts.reference, folder, console)
        parts = replace(parts, reference=None)  # it is of no further use
    if config.compile:
        compile_layers(parts.draft.model, console.print)
    with _interrupts_reach_the_caller(trainer, folder, console):
        if standing is None:
            trainer.validate(module, datamodule=parts.feed, verbose=False)  # the untrained draft's row
        module.train()
        checkpoint = None if standing is None else standing.path
        trainer.fit(module, datamodule=parts.feed, ckpt_path=checkpoint, weights_only=True)
    for line in parts.feed.closing_lines():
        console.print(line)
    if trainer.global_step < parts.feed.num_steps:
        console.print(f"stopped at step {trainer.global_step} by trainer.max_time; the same command continues")
    return _report(folder, trainer.global_step, parts.feed.num_steps, standing)


def make_module(config: FitConfig, parts: Parts, folder: Path, console: Console) -> Distillation:
    """The LightningModule, with its teachers; a cached teacher scores the data here, where it has not yet."""
    teachers = make_teachers(
        config.teacher,
        parts.target.model,
        parts.key,
        parts.data.train,
        parts.data.validation,
        folder,
        console,
        vocab_ids=parts.draft.vocab_ids,
        given=parts.given,
    )
    pool = parts.feed.extra
    if isinstance(pool, Pool):
        teacher = with_pool(teachers[0], pool, config, parts.target, parts.draft, len(parts.data.train))
        teachers = teacher, teachers[1]
    return Distillation(
        parts.draft,
        *teachers,
        num_steps=parts.feed.num_steps,
        loss=config.loss,
        serve=config.serve,
        optimizer=config.optimizer,
        seed=config.seed,
    )


def _choose_positions(
    config: FitConfig, parts: Parts, module: Distillation, reference: LoadedModel, folder: Path, console: Console
) -> Kept:
    """What is trained on; scored with the draft as the run began, which `module` still holds."""
    module.teacher.to(parts.draft.model.device)
    key = f"{parts.record.target_sha256} {parts.record.selection_sha256}"
    students = module.student, Student(reference, config.loss, config.serve)
    return choose_positions(
        config, parts.data.train, students, module.teacher, key, parts.feed.num_steps, folder, console
    )


def _make_trainer(
    config: FitConfig, parts: Parts, folder: Path, standing: Standing | None, console: Console
) -> Trainer:
    feed, earlier = parts.feed, [] if standing is None else standing.rows
    clock = Clock(earlier=float((earlier or [{}])[-1].get("seconds") or 0.0))
    decode = judged_decoding(config)
    callbacks: list[Callback] = [
        StepLog(steps_table(folder), feed, clock, config.trainer.get("log_every_n_steps", LOG_EVERY_N_STEPS)),
        CheckpointJudge(parts.target, parts.draft, parts.prompts, decode, config.model.backend, console.print),
        Checkpoints(folder, metrics_table(folder), feed, parts.record, clock, earlier, console.print),
    ]
    if isinstance(feed.extra, Pool):
        feed.extra.say = console.print
        callbacks.append(feed.extra)  # its texts are kept in checkpoints
    if config.trainer.get("enable_progress_bar", True):
        callbacks.append(StepProgress(feed.num_steps, console))
    return make_trainer(
        config.trainer,
        config.model,
        folder,
        callbacks,
        max_epochs=feed.num_segments,
        accumulate_grad_batches=config.optimizer.accumulate,
        gradient_clip_val=config.optimizer.gradient_clip,
    )


def judged_decoding(config: FitConfig) -> DecodeConfig:
    """How checkpoints are decoded: a judge that samples without a seed takes the run's, so a run can be repeated."""
    decode = config.judge.decode
    return decode if decode.seed is not None else replace(decode, seed=config.seed)


@contextmanager
def _interrupts_reach_the_caller(trainer: Trainer, folder: Path, console: Console) -> Iterator[None]:
    """Lightning turns Ctrl-C into exit status 1 and SIGTERM into 0; give the first back, and the second its 143."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as stop:
        if not trainer.interrupted:
            raise
        signal.signal(signal.SIGINT, handler)
        resumes = last_step(folder / "checkpoints")
        console.print(f"interrupted after step {trainer.global_step}; the same command continues from step {resumes}")
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise KeyboardInterrupt from None


def _same_random_state() -> AbstractContextManager[None]:
    """Leave the caller's generators as they were found, those of GPUs too."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Hide what the trainer says of things that are so by design; what a user can act on still shows."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _report(folder: Path, step: int, num_steps: int, standing: Standing | None) -> FitReport:
    rows = metrics_table(folder).rows()
    return FitReport(folder, step, num_steps, None if standing is None else standing.step, rows, best_row(rows))
