"""Rows read while training goes on: buffers of them, packed and shuffled each by itself. Knows nothing of steps.

What is seen is a function of the files, the seed and the settings, so a place in the stream is four numbers. Rows are
held a buffer at a time, whatever the length of the files.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from decode.errors import UsageError
from distill.config import DataConfig
from distill.data.examples import Example, ExampleMaker
from distill.data.report import DataReport
from distill.data.rows import BadRow, Row, read_rows, source_sha256
from distill.data.schedule import Pack, pack

HELD_OUT = "the prompt is held out for validation"


@dataclass(frozen=True)
class Place:
    """Where a stream stands: a buffer's first row, and how many of the buffer's packs have been taken."""

    epoch: int = 0
    file: int = 0
    row: int = 0
    pack: int = 0


class Buffer(NamedTuple):
    """What some following rows gave."""

    examples: list[Example]
    held_out: list[Example]
    """Left out of training."""
    after: Place
    """Where the next buffer begins."""


class Stream:
    """The training rows of a run, again from the first after the last: each row once in every epoch."""

    def __init__(
        self,
        config: DataConfig,
        maker: ExampleMaker,
        seed: int,
        is_held_out: Callable[[Example], bool],
    ) -> None:
        self.config, self.maker, self.seed, self.is_held_out = config, maker, seed, is_held_out
        self.report = DataReport()
        """What became of the rows that this process has trained on."""
        self._rows: Iterator[tuple[Row | BadRow, Place]] = iter(())
        self._stands = Place(epoch=-1)  # where `_rows` goes on

    def sha256(self) -> str:
        """Of what all files hold."""
        return hashlib.sha256("".join(map(source_sha256, self.config.train)).encode()).hexdigest()

    def packs(self, place: Place) -> Iterator[tuple[list[Example], Place]]:
        """The examples of each sequence from `place` on, without end, and the place after it.

        Raises UsageError when a whole epoch has nothing to train on.
        """
        last_epoch = place.epoch  # that gave something
        while True:
            start = replace(place, pack=0)
            buffer = self.read(start, self.report)
            self.report.forget()
            packs = self._shuffled_packs(buffer.examples, start)
            for number in range(place.pack, len(packs)):
                taken = replace(start, pack=number + 1)
                yield [buffer.examples[i] for i in packs[number]], taken if number + 1 < len(packs) else buffer.after
                last_epoch = start.epoch
            place = buffer.after
            if place.epoch > last_epoch + 1:
                left = "; ".join(self.report.losses())
                raise UsageError(f"{', '.join(self.config.train)}: no example is left; {left}")

    def _shuffled_packs(self, examples: list[Example], start: Place) -> list[Pack]:
        lengths = [len(example.input_ids) for example in examples]
        packs = pack(lengths, self.config.max_length) if self.config.packing else [[i] for i in range(len(lengths))]
        random.Random(f"draftsmith/{self.seed}/{start.epoch}/{start.file}/{start.row}").shuffle(packs)
        return packs

    def read(self, place: Place, report: DataReport) -> Buffer:
        """Encode the next rows from a buffer's beginning, `shuffle_buffer` of them or up to the end of the epoch."""
        if place != self._stands:
            self._rows = self._rows_from(place)
        examples: list[Example] = []
        held_out: list[Example] = []
        for _ in range(self.config.shuffle_buffer):
            row, place = next(self._rows, (None, Place(place.epoch + 1)))
            if row is None:
                break
            example = self.maker.make(row, report)
            if example is not None and self.is_held_out(example):
                held_out.append(example)
                report.dropped[HELD_OUT] += 1
            elif example is not None:
                examples.append(example)
        self._stands = place
        if place.row == 0:  # of the next epoch
            self._rows = self._rows_from(place)
        return Buffer(examples, held_out, place)

    def _rows_from(self, place: Place) -> Iterator[tuple[Row | BadRow, Place]]:
        """Each row from `place` to the end of the epoch, and the place after it."""
        for number in range(place.file, len(self.config.train)):
            first = place.row if number == place.file else 0
            for row in read_rows(self.config.train[number], first, streaming=True):
                yield row, Place(place.epoch, number, row.index + 1)
