"""Feeds the trainer: one Lightning epoch is one segment, the optimiser steps between two checkpoints."""

from collections.abc import Iterator, Sequence

from lightning import LightningDataModule

from distill.config import FitConfig
from distill.data.batches import Batch, collate, total_weight
from distill.data.examples import Example
from distill.data.schedule import MicroBatch, Schedule, pack, split_up


class MicroBatches:
    """Micro-batches of one rank, made when they are asked for. A plain sequence: no sampler, no worker, no state."""

    def __init__(
        self,
        specs: Sequence[tuple[MicroBatch, float]],
        examples: Sequence[Example],
        rank: int,
        world_size: int,
    ) -> None:
        self._specs, self._examples, self._rank, self._world_size = specs, examples, rank, world_size

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, index: int) -> Batch:
        micro_batch, normaliser = self._specs[index]
        return collate(micro_batch, self._examples, normaliser, self._rank, self._world_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


class DraftDataModule(LightningDataModule):
    """Training and validation batches of a run.

    The trainer has to run with reload_dataloaders_every_n_epochs=1, max_epochs=num_segments and
    accumulate_grad_batches as configured. What is seen at each step depends on the step's number alone, so a run
    that is resumed at a segment's border sees what an uninterrupted one does.
    """

    def __init__(self, train: list[Example], validation: list[Example], config: FitConfig) -> None:
        super().__init__()
        self.train_examples, self.validation_examples = train, validation
        self.segment_size = config.judge.every_n_steps
        self.batch_size = config.data.batch_size
        self.packing, self.max_length = config.data.packing, config.data.max_length
        self.schedule = Schedule(
            lengths=[len(example.input_ids) for example in train],
            max_length=config.data.max_length,
            batch_size=config.data.batch_size,
            accumulate=config.optimizer.accumulate,
            seed=config.seed,
            max_steps=config.max_steps,
            max_epochs=config.max_epochs,
            packing=config.data.packing,
        )

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.schedule.num_windows

    @property
    def num_segments(self) -> int:
        """Lightning epochs of the whole run; the last may have fewer steps."""
        return -(-self.num_steps // self.segment_size)

    def steps_done(self, num_segments: int) -> int:
        """Optimiser steps taken after `num_segments` segments."""
        return min(num_segments * self.segment_size, self.num_steps)

    def tokens_seen(self, num_steps: int) -> int:
        """Tokens that the draft has read after `num_steps` steps, padding apart, over all ranks."""
        return self.schedule.num_tokens(num_steps)

    def segment(self, number: int, rank: int = 0, world_size: int = 1) -> MicroBatches:
        """The micro-batches of one rank in segment `number`, from 0."""
        specs: list[tuple[MicroBatch, float]] = []
        for step in range(self.steps_done(number), self.steps_done(number + 1)):
            window = self.schedule.window(step)
            normaliser = total_weight(window, self.train_examples)
            specs += [(micro_batch, normaliser) for micro_batch in window]
        return MicroBatches(specs, self.train_examples, rank, world_size)

    def validation(self, rank: int = 0, world_size: int = 1) -> MicroBatches:
        """The validation batches of one rank, always in the same order; each has its own normaliser."""
        lengths = [len(example.input_ids) for example in self.validation_examples]
        packs = pack(lengths, self.max_length) if self.packing else [[i] for i in range(len(lengths))]
        specs = [(b, total_weight([b], self.validation_examples)) for b in split_up(packs, self.batch_size)]
        return MicroBatches(specs, self.validation_examples, rank, world_size)

    def train_dataloader(self) -> MicroBatches:
        trainer = self.trainer
        assert trainer is not None
        return self.segment(trainer.current_epoch, trainer.global_rank, trainer.world_size)

    def val_dataloader(self) -> MicroBatches:
        trainer = self.trainer
        assert trainer is not None
        return self.validation(trainer.global_rank, trainer.world_size)
