"""Feeds the trainer from a stream: windows are made one after another, and a checkpoint keeps where they stand."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

from distill.config import FitConfig
from distill.data.examples import Example
from distill.data.module import DraftDataModule, Windows
from distill.data.report import DataReport
from distill.data.schedule import split_up
from distill.data.stream import Place, Stream


class Mark(NamedTuple):
    """Where a step's window begins."""

    place: Place
    num_tokens: int
    """Tokens of all windows before it."""


class StreamedDataModule(DraftDataModule):
    """Training batches from a stream; all else is as with rows in memory.

    Examples have ids within their window only. A run that is resumed without its mark reads the stream again from the
    beginning: slow, and the same.
    """

    def __init__(self, stream: Stream, sample: DataReport, validation: list[Example], config: FitConfig) -> None:
        super().__init__([], validation, config)
        self.stream, self.sample = stream, sample
        self._marks = {0: Mark(Place(), 0)}  # of the first step, and of those since the segment's beginning

    @property
    def num_epochs(self) -> None:
        return None

    @property
    def padding_share(self) -> float:
        """Of the first buffer."""
        return replace(self.schedule, lengths=self.sample.lengths, _orders={}).padding_share

    def tokens_seen(self, num_steps: int) -> int:
        if num_steps not in self._marks:
            for _ in self.windows(num_steps, num_steps):
                pass
        return self._marks[num_steps].num_tokens

    def closing_lines(self) -> list[str]:
        """What was left out of the rows that this process has read."""
        report = self.stream.report
        return [f"data: of {report.num_rows} rows read since the start, {line}" for line in report.losses()]

    def windows(self, start: int, stop: int) -> Windows:
        self._marks = {step: mark for step, mark in self._marks.items() if step in (0, start)}
        first = max(self._marks)
        place, num_tokens = self._marks[first]
        packs = self.stream.packs(place)
        for step in range(first, stop):
            taken = [next(packs) for _ in range(self.batch_size * self.schedule.accumulate)]
            rows: list[list[int]] = []
            examples: dict[int, Example] = {}
            for members, _ in taken:
                rows.append(list(range(len(examples), len(examples) + len(members))))
                examples |= zip(rows[-1], members, strict=True)
            num_tokens += sum(len(example.input_ids) for example in examples.values())
            self._marks[step + 1] = Mark(taken[-1][1], num_tokens)
            if step >= start:
                yield split_up(rows, self.batch_size), examples

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in primitives."""
        step = max(self._marks)
        return {"step": step, "num_tokens": self._marks[step].num_tokens, **asdict(self._marks[step].place)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        step, num_tokens = rest.pop("step"), rest.pop("num_tokens")
        self._marks[step] = Mark(Place(**rest), num_tokens)
