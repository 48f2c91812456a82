"""One progress bar over all optimiser steps of a run."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from distill.training.module import Distillation


class StepProgress(Callback):
    """Shows steps, the last step's loss and the time left; rank 0 only, and only on a terminal."""

    def __init__(self, num_steps: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = not console.is_terminal or console.quiet
        self.progress = Progress(*columns, console=console, disable=hidden, transient=True)
        self.task = self.progress.add_task("training", total=num_steps)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.progress.start()
        # a resumed run's first steps took no time of this start
        self.progress.reset(self.task, completed=trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        assert isinstance(module, Distillation)
        loss = "" if module.window_loss is None else f" loss {module.window_loss:.3f}"
        self.progress.update(self.task, completed=trainer.global_step, description=f"training{loss}")

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.progress.update(self.task, description="judging")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.progress.stop()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self.progress.stop()
