"""The LightningModule: a batch, the teacher's law, the loss. Knows nothing of files, judges or checkpoints' names."""

import copy
import hashlib
import math
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from decode.models import LoadedModel
from distill.config import LossConfig, OptimizerConfig
from distill.data.batches import Batch
from distill.drafts.adapters import adapter_state, has_adapters, merge_adapters
from distill.drafts.vocab import drop_guard_gradients, pin_guard_channel
from distill.runs import plain
from distill.student import Student
from distill.teacher import Teacher
from distill.training.optimizer import learning_rate, make_optimizer
from distill.training.sharding import ShardedStrategy, is_sharded, shard, whole_weights

# What a validation sums over positions: the loss, then Acceptance's fields in their order.
VALIDATION_METRICS = (
    "val/loss",
    "val/expected_acceptance",
    "val/expected_acceptance_upper",
    "val/greedy_acceptance",
    "val/greedy_acceptance_upper",
    "val/greedy_agreement",
)


class Distillation(LightningModule):
    """Distils `draft` on the law of `teacher`, at the temperature that the teacher was made with.

    Teachers are held outside the module tree, so they are neither trained, nor saved, nor wrapped.
    """

    def __init__(
        self,
        draft: LoadedModel,
        teacher: Teacher,
        validation_teacher: Teacher | None = None,
        *,
        num_steps: int,
        loss: LossConfig | None = None,
        serve: str = "sampled",
        optimizer: OptimizerConfig | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.loss_config, self.optimizer_config = loss or LossConfig(), optimizer or OptimizerConfig()
        self.student = Student(draft, self.loss_config, serve)
        self.has_guard = draft.vocab_ids is not None
        self.strict_loading = not has_adapters(self.draft)
        self.teacher, self.validation_teacher = teacher, validation_teacher or teacher
        self.num_steps, self.seed = num_steps, seed
        self.metrics: dict[str, float | None] = {}  # of the last validation
        self.num_empty_windows = 0
        self._normaliser = 0.0
        self._window_loss: Tensor | float = 0.0  # sum over this rank, fp64
        self._segment_loss, self._segment_weight = 0.0, 0.0  # over all ranks
        self.window_loss: float | None = None
        """Mean over the supervised positions of the last optimiser step, on all ranks."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ShardedStrategy) and not is_sharded(self.student):
            self._whole = (copy.deepcopy(self.draft),)  # a tuple: outside the module tree
            assert self.device_mesh is not None
            shard(self.student, self.device_mesh["data_parallel"])

    def setup(self, stage: str) -> None:
        for teacher in (self.teacher, self.validation_teacher):
            teacher.to(self.device)

    @property
    def draft(self) -> Any:
        """The model under training."""
        return self.student.model

    def draft_copy(self) -> Any:
        """A copy of the draft as it stands, its adapter merged. Processes that share its weights ask together."""
        model = self.draft
        if is_sharded(self.student):
            (model,) = self._whole
            model.load_state_dict(whole_weights(self.draft))
        copied = copy.deepcopy(model)
        if has_adapters(copied):
            merge_adapters(copied)
        return copied

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outcome = self.student(batch, self.teacher.law(batch))
        self._window_loss = self._window_loss + outcome.total.detach().double()
        self._normaliser = batch.normaliser
        # The window's loss is its sum over all supervised positions of all micro-batches and ranks / their weight.
        # Lightning divides each micro-batch by accumulate_grad_batches, and DDP gradients by the ranks: undo both.
        undo = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return outcome.total * (undo / (batch.normaliser or 1.0))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Draw from the micro-batch's number alone, so that a resumed run draws what an uninterrupted one does."""
        accumulate = self.trainer.accumulate_grad_batches
        number = self.global_step * accumulate + batch_idx % accumulate
        torch.manual_seed(noise_seed(self.seed, number, self.global_rank))
        self.draft.train()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Set the rate from the step's number, which resumes by itself. Lightning clips gradients after this."""
        rate = learning_rate(self.global_step, self.num_steps, self.optimizer_config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if self._normaliser == 0:  # momentum and decay would move the weights for nothing
            optimizer.zero_grad(set_to_none=True)
        if self.has_guard:
            drop_guard_gradients(self.draft)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.has_guard:
            pin_guard_channel(self.draft)
        self._close_window()

    def _close_window(self) -> None:
        """Take the window's sum over all ranks; the rates of the logs are its true means."""
        total = self.trainer.strategy.reduce(torch.as_tensor(self._window_loss).clone(), reduce_op="sum")
        self.window_loss = float(total) / self._normaliser if self._normaliser else None
        self._segment_loss += float(total)
        self._segment_weight += self._normaliser
        self._window_loss = 0.0
        self.num_empty_windows += self._normaliser == 0

    def take_segment_loss(self) -> float | None:
        """Mean training loss over the supervised positions since the last call; None where there was none."""
        total, weight = self._segment_loss, self._segment_weight
        self._segment_loss, self._segment_weight = 0.0, 0.0
        return total / weight if weight else None

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.window_loss is not None:
            self.log("train/loss", self.window_loss, prog_bar=True, on_step=True, on_epoch=False, rank_zero_only=True)

    def on_train_end(self) -> None:
        if self.num_empty_windows:
            self.print(
                f"warning: {self.num_empty_windows} optimiser steps had nothing supervised; they changed no weight"
            )

    def on_validation_epoch_start(self) -> None:
        self.metrics = {}
        self._validation_sums = torch.zeros(len(VALIDATION_METRICS) + 1, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        law = self.validation_teacher.law(batch)
        losses, found = self.student.measure(batch, law)
        columns = (losses.double(), *vars(found).values(), torch.ones_like(losses, dtype=torch.float64))
        sums = [values.sum() for values in columns]
        self._validation_sums += torch.stack(sums)

    def on_validation_epoch_end(self) -> None:
        """Means over the supervised positions of all batches and ranks, however they were split."""
        *sums, count = self.trainer.strategy.reduce(self._validation_sums, reduce_op="sum").tolist()
        means = {name: total / count for name, total in zip(VALIDATION_METRICS, sums, strict=True)} if count else {}
        # drawn ids tell nothing of greedy drafts
        means = {name: mean for name, mean in means.items() if "greedy" not in name or not math.isnan(mean)}
        self.metrics.update(means)
        self.log_dict(means, sync_dist=True)  # equal on all ranks already

    def configure_optimizers(self) -> Optimizer:
        # mixed precision unscales gradients itself, so lightning refuses to clip them for a fused optimiser
        fused = "mixed" not in str(self.trainer.precision)
        return make_optimizer(self.draft, self.optimizer_config, fused)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What a reader needs to build the draft again: primitives and one tensor, so safe loading suffices."""
        if has_adapters(self.draft):
            checkpoint["state_dict"] = adapter_state(checkpoint["state_dict"])
        checkpoint["draft_config"] = plain(self.draft.config.to_dict())
        if self.has_guard:
            checkpoint["draft_vocab_ids"] = self.student.columns.ids.cpu()


def noise_seed(seed: int, micro_batch: int, rank: int) -> int:
    """The seed of one micro-batch's dropout on one rank."""
    digest = hashlib.sha256(f"{seed}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits
