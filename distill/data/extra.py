"""Examples that join the scheduled ones in every micro-batch: texts that a draft wrote, or was rejected in."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from distill.data.examples import Example
from distill.data.schedule import MicroBatch, Schedule


class Extra(Protocol):
    """Gives the examples of the rows that a schedule leaves free."""

    @property
    def share(self) -> float:
        """Share of the rows of the micro-batches, in [0, 1)."""
        ...

    def examples(self, step: int, micro_batch: int) -> Sequence[tuple[int, Example]]:
        """Numbered examples for one micro-batch of optimiser step `step`, both from 0; taken in order while they fit.

        All micro-batches of a step are asked for, in order, when its first batch is made: after the step before it.
        Every rank asks, and has to get the same. An example's id in the batch is the number of training examples plus
        its own number.
        """
        ...


def with_extra(
    extra: Extra, schedule: Schedule, step: int, train: Sequence[Example]
) -> tuple[list[MicroBatch], Mapping[int, Example]]:
    """The micro-batches of optimiser step `step` with their extra rows, and their examples by id.

    Raises ValueError for an example that is longer than a row, and where nothing at all is in a micro-batch.
    """
    window = [list(micro_batch) for micro_batch in schedule.window(step)]
    found = {i: train[i] for micro_batch in window for members in micro_batch for i in members}
    for number, micro_batch in enumerate(window):
        candidates = {len(train) + i: example for i, example in extra.examples(step, number)}
        rows = fill(candidates, schedule.num_extra(step, number), schedule.max_length, schedule.packing)
        found |= {i: candidates[i] for members in rows for i in members}
        micro_batch += rows
        if not micro_batch:
            raise ValueError(f"step {step}, micro-batch {number}: there is neither a scheduled nor an extra example")
    return window, found


def fill(candidates: Mapping[int, Example], num_rows: int, max_length: int, packing: bool) -> MicroBatch:
    """Candidates in their order, each in the first row that has room, until one fits nowhere; no row is empty."""
    rows: MicroBatch = [[] for _ in range(num_rows)]
    room = [max_length] * num_rows
    for index, example in candidates.items():
        length = len(example.input_ids)
        if length > max_length:
            raise ValueError(f"an extra example has {length} tokens, a row takes {max_length}")
        place = next((p for p in range(num_rows) if length <= room[p]), None)
        if place is None:
            break
        rows[place].append(index)
        room[place] = room[place] - length if packing else 0
    return [members for members in rows if members]
