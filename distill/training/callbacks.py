"""What happens around training: the log of steps, the judge of each checkpoint, and the checkpoints themselves."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from decode.backends import with_backend
from decode.config import DecodeConfig
from decode.errors import DraftsmithError
from decode.evaluate import judge
from decode.models import LoadedModel
from distill.data.module import DraftDataModule
from distill.drafts.frozen import as_served
from distill.training.history import Number, Table
from distill.training.module import Distillation
from distill.training.resume import Record, checkpoint_name
from distill.training.run_files import link_last, write_best


class Clock:
    """Seconds of a run, those of earlier starts included."""

    def __init__(self, earlier: float = 0.0) -> None:
        self._zero = time.monotonic() - earlier

    def seconds(self) -> float:
        return round(time.monotonic() - self._zero, 3)


class StepLog(Callback):
    """A row of train.csv every few optimiser steps: the mean loss of that one step, over all ranks."""

    def __init__(self, table: Table, data: DraftDataModule, clock: Clock, every: int) -> None:
        self.table, self.data, self.clock, self.every = table, data, clock, every
        self._seen = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._seen = trainer.global_step  # of the checkpoint, whose row is there

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        step, seen = trainer.global_step, self._seen
        self._seen = step
        if step == seen or step % self.every or not trainer.is_global_zero:
            return
        assert isinstance(module, Distillation)
        self.table.append(
            {
                "step": step,
                "tokens_seen": self.data.tokens_seen(step),
                "train/loss": module.window_loss,
                "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
                "seconds": self.clock.seconds(),
            }
        )


class CheckpointJudge(Callback):
    """At the end of every validation, decodes held-out prompts with the draft as it stands, and without it.

    Rank 0 decodes, with a frozen copy, so training's modes and gradients stay as they are; the others wait. What runs
    each model's forwards is chosen at the first checkpoint, and kept: all are judged alike.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        prompts: Sequence[list[int]],
        config: DecodeConfig,
        backend: str = "auto",
        say: Callable[[str], None] = print,
    ) -> None:
        self.target, self.draft, self.prompts, self.config = target, draft, prompts, config
        self.backend, self.say = backend, say
        self._ready_target: LoadedModel | None = None
        self._draft_backend = backend

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Distillation)
        draft = module.draft_copy()
        scores: dict[str, float | None] = self._scores(draft) if trainer.is_global_zero else {}
        scores = trainer.strategy.broadcast(scores)
        module.metrics.update(scores)
        module.log_dict({k: v for k, v in scores.items() if v is not None}, sync_dist=True)

    def _scores(self, model: Any) -> dict[str, float | None]:
        if self._ready_target is None:
            self._ready_target = with_backend(self.target, self.backend)
        draft = with_backend(as_served(self.draft, model, self.target.model), self._draft_backend)
        self._draft_backend = draft.backend
        found = judge(self._ready_target, draft, self.prompts, self.config)
        if found.mismatches:
            self.say(describe_mismatches(found.mismatches, len(self.prompts), self.target.model.dtype))
        return {
            "val/mean_acceptance_length": found.stats.mean_acceptance_length,
            "val/draft_acceptance_rate": found.stats.draft_acceptance_rate,
            "val/speedup": found.speedup,
            "val/tokens_per_second": found.tokens_per_second,
            "val/plain_tokens_per_second": found.plain_tokens_per_second,
        }


class Checkpoints(Callback):
    """At the end of every segment: a row of metrics.csv, then the checkpoint, then the best so far; in that order.

    A resumed run cuts the tables back to its checkpoint's step, so a kill in between repeats the row and loses nothing.
    The validation of the same step has run by then: a row and its checkpoint always belong together.
    """

    def __init__(
        self,
        folder: Path,
        table: Table,
        data: DraftDataModule,
        record: Record,
        clock: Clock,
        rows: Sequence[dict[str, Number]] = (),  # of earlier starts
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.table, self.data, self.record = folder, table, data, record
        self.clock, self.say = clock, say
        self._rows = list(rows)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # before training: the untrained draft
            self._add_row(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_step != self.data.steps_done(trainer.current_epoch + 1):
            return  # stopped inside a segment, where no run can resume
        self._add_row(trainer, module)
        self._save(trainer)
        if trainer.is_global_zero:
            write_best(self.folder, self.table)

    def _add_row(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Distillation)
        step = trainer.global_step
        row: dict[str, Number] = {
            "step": step,
            "tokens_seen": self.data.tokens_seen(step),
            "train/loss": module.take_segment_loss(),
            **module.metrics,
            "seconds": self.clock.seconds(),
        }
        self._rows.append(row)
        if trainer.is_global_zero:
            self.table.append(row)
            self.say(describe(row))

    def _save(self, trainer: Trainer) -> None:
        """Write beside the final name, then rename: a checkpoint is there whole or not at all."""
        checkpoints = self.folder / "checkpoints"
        name = checkpoint_name(trainer.global_step)
        temporary = checkpoints / f".{name}.tmp"
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(temporary, weights_only=False)
        except OSError as error:  # lightning writes into the folder of temporary files first
            temporary.unlink(missing_ok=True)
            told = f"{error.strerror or error} (it is written by way of {tempfile.gettempdir()})"
            raise DraftsmithError(f"{checkpoints / name} can't be written: {told}") from error
        if trainer.is_global_zero:
            temporary.replace(checkpoints / name)
            link_last(checkpoints, name)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(vars(self.record))
        checkpoint["step"] = trainer.global_step
        checkpoint["metrics"] = dict(self._rows[-1])
        checkpoint["rows"] = [dict(row) for row in self._rows]


def describe_mismatches(count: int, total: int, dtype: torch.dtype) -> str:
    """What is known of greedy texts that differ from plain decoding's, which speculative decoding never should."""
    told = f"{count} of {total} greedy texts differ from plain decoding's"
    name = str(dtype).removeprefix("torch.")
    if dtype in (torch.float32, torch.float64):
        return f"warning: {told}; decoding is not exact here, in {name}: please report it"
    return f"{told}; on {name} near ties may round differently"


def describe(row: dict[str, Number]) -> str:
    """A row in a line for the terminal."""
    shown = {
        "loss": row.get("val/loss"),
        "expected acceptance": row.get("val/expected_acceptance"),
        "greedy acceptance": row.get("val/greedy_acceptance"),
        "greedy agreement": row.get("val/greedy_agreement"),
        "mean acceptance length": row.get("val/mean_acceptance_length"),
        "speedup": row.get("val/speedup"),
    }
    told = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)
    return f"step {row['step']}: {told}"
