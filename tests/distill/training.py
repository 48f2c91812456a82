"""Training in memory: through the LightningModule, and by a plain loop as its oracle."""

from typing import Any

import torch
from lightning import Callback

from distill.data.examples import Example
from distill.data.module import DraftDataModule
from distill.teacher.online import OnlineTeacher
from tests.fit_runs import CONSTANT, PlainDescent, run
from tests.fixtures import loaded


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


def switch_off_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model
