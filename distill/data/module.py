"""Feeds the trainer: one Lightning epoch is one segment, the optimiser steps between two checkpoints."""

from collections.abc import Callable, Iterator

from lightning import LightningDataModule

from distill.config import FitConfig
from distill.data.batches import Batch, Examples, collate, total_weight
from distill.data.examples import Example
from distill.data.extra import Extra, with_extra
from distill.data.kept import Kept
from distill.data.schedule import MicroBatch, Schedule, pack, split_up

Windows = Iterator[tuple[list[MicroBatch], Examples]]
"""The micro-batches of one optimiser step after another, and the examples that they name."""


class MicroBatches:
    """Micro-batches of one rank, made when they are asked for, in order: no sampler, no worker, no state.

    Its length is known, so the trainer asks for none ahead of time: the first batch of a step is made when the step
    before it has been taken.
    """

    def __init__(self, windows: Callable[[], Windows], length: int, rank: int, world_size: int) -> None:
        self._windows, self._length, self._rank, self._world_size = windows, length, rank, world_size

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for window, examples in self._windows():
            normaliser = total_weight(window, examples)
            for micro_batch in window:
                yield collate(micro_batch, examples, normaliser, self._rank, self._world_size)


class DraftDataModule(LightningDataModule):
    """Training and validation batches of a run.

    The trainer has to run with reload_dataloaders_every_n_epochs=1, max_epochs=num_segments and
    accumulate_grad_batches as configured. What is seen at each step depends on the step's number alone, so a run
    that is resumed at a segment's border sees what an uninterrupted one does.
    """

    def __init__(
        self, train: list[Example], validation: list[Example], config: FitConfig, extra: Extra | None = None
    ) -> None:
        super().__init__()
        self.extra = extra
        self.kept: Kept | None = None
        """Which supervised positions of the training examples count; None: all."""
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
            share=0.0 if extra is None else extra.share,
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
        """Tokens of the rows that the draft has read after `num_steps` steps, over all ranks, extra rows apart."""
        return self.schedule.num_tokens(num_steps)

    @property
    def num_epochs(self) -> float | None:
        """How often the run sees each training example; None where their number is not known."""
        return self.schedule.num_epochs

    @property
    def padding_share(self) -> float:
        """Share of the places of micro-batches that hold no token, extra rows apart."""
        return self.schedule.padding_share

    def segment(self, number: int, rank: int = 0, world_size: int = 1) -> MicroBatches:
        """The micro-batches of one rank in segment `number`, from 0."""
        start, stop = self.steps_done(number), self.steps_done(number + 1)
        length = self.schedule.num_batches(start, stop)
        return MicroBatches(lambda: self.windows(start, stop), length, rank, world_size)

    def windows(self, start: int, stop: int) -> Windows:
        """The windows of the optimiser steps from `start` up to `stop`, each made when it is asked for."""
        for step in range(start, stop):
            window, examples = self._window(step)
            if self.kept is not None:
                members = [i for micro_batch in window for row in micro_batch for i in row]
                own = len(self.train_examples)  # extra examples have ids from there on
                examples = {i: self.kept.example(i, step) if i < own else examples[i] for i in members}
            yield window, examples

    def _window(self, step: int) -> tuple[list[MicroBatch], Examples]:
        if self.extra is None:
            return self.schedule.window(step), self.train_examples
        return with_extra(self.extra, self.schedule, step, self.train_examples)

    def validation(self, rank: int = 0, world_size: int = 1) -> MicroBatches:
        """The validation batches of one rank, always in the same order; each has its own normaliser."""
        lengths = [len(example.input_ids) for example in self.validation_examples]
        packs = pack(lengths, self.max_length) if self.packing else [[i] for i in range(len(lengths))]
        batches = split_up(packs, self.batch_size)
        return MicroBatches(
            lambda: (([batch], self.validation_examples) for batch in batches), len(batches), rank, world_size
        )

    def closing_lines(self) -> list[str]:
        """What there is to tell of the data only when training has ended."""
        return []

    def train_dataloader(self) -> MicroBatches:
        trainer = self.trainer
        assert trainer is not None
        return self.segment(trainer.current_epoch, trainer.global_rank, trainer.world_size)

    def val_dataloader(self) -> MicroBatches:
        trainer = self.trainer
        assert trainer is not None
        return self.validation(trainer.global_rank, trainer.world_size)
