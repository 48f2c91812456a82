"""Which example is seen when: a pure function of sizes and seed. Knows nothing of tokens, tensors or trainers."""

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

Pack = list[int]
"""Indices of the examples that share one sequence."""
MicroBatch = list[Pack]
Window = list[MicroBatch]
"""The micro-batches of one optimiser step, over all ranks."""


@dataclass(frozen=True)
class Schedule:
    """The order of a whole run.

    Packs are made once; each epoch shuffles them anew and the epochs flow on into one another, so every micro-batch
    has `batch_size` packs and every window `accumulate` micro-batches; only the last window of a run that is bounded
    by epochs may be short. An epoch sees every example exactly once.

    Where `share` of the rows come from elsewhere, each micro-batch leaves room for them; over time the share is exact
    whatever the batch size is, and the order of the packs stays as it is.
    """

    lengths: Sequence[int]
    """Tokens of each example, at most `max_length` each."""
    max_length: int
    batch_size: int
    accumulate: int = 1
    seed: int = 0
    max_steps: int | None = None
    """Number of windows; exclusive with max_epochs."""
    max_epochs: int | None = None
    packing: bool = True
    share: float = 0.0
    """In [0, 1)."""
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def packs(self) -> list[Pack]:
        if self.packing:
            return pack(self.lengths, self.max_length)
        return [[index] for index in range(len(self.lengths))]

    @cached_property
    def padding_share(self) -> float:
        """Share of the places of the first epoch's micro-batches that hold no token: their rows are of one width."""
        order = self._order(0)
        widths = [sum(self.lengths[i] for i in self.packs[p]) for p in order]
        rows = [widths[start : start + self.batch_size] for start in range(0, len(widths), self.batch_size)]
        return 1 - sum(widths) / sum(max(batch) * len(batch) for batch in rows)

    @property
    def num_windows(self) -> int:
        return -(-self._num_batches // self.accumulate)

    @cached_property
    def _num_batches(self) -> int:
        """Micro-batches of the whole run; the last one of a run that is bounded by epochs has its last pack."""
        if self.max_steps is not None:
            return self.max_steps * self.accumulate
        wanted = (self.max_epochs or 0) * len(self.packs)
        return bisect.bisect_left(range(int(wanted / (1 - self.share)) + 2), wanted, key=self._num_places)

    def _num_places(self, num_batches: int) -> int:
        """Packs in the first `num_batches` micro-batches of a run without end."""
        return num_batches * self.batch_size - self._num_extra(num_batches)

    def _num_extra(self, num_batches: int) -> int:
        return math.floor(num_batches * self.batch_size * self.share)

    def num_batches(self, start: int, stop: int) -> int:
        """Micro-batches of the windows from `start` up to `stop`."""
        return min(stop * self.accumulate, self._num_batches) - start * self.accumulate

    def num_extra(self, number: int, micro_batch: int) -> int:
        """Rows of a micro-batch of window `number` that are left free for what comes from elsewhere."""
        batch = number * self.accumulate + micro_batch
        return self._num_extra(batch + 1) - self._num_extra(batch)

    def window(self, number: int) -> Window:
        """The micro-batches of optimiser step `number`, from 0. Raises IndexError beyond the run's end."""
        if not 0 <= number < self.num_windows:
            raise IndexError(f"window {number} of a run of {self.num_windows}")
        stop = min((number + 1) * self.accumulate, self._num_batches)
        return [self._batch(batch) for batch in range(number * self.accumulate, stop)]

    def _batch(self, number: int) -> MicroBatch:
        return [self._pack_at(p) for p in range(self._place(number), self._place(number + 1))]

    def _place(self, num_batches: int) -> int:
        """Packs seen in the first `num_batches` micro-batches of this run."""
        places = self._num_places(num_batches)
        return places if self.max_epochs is None else min(places, self.max_epochs * len(self.packs))

    def _pack_at(self, place: int) -> Pack:
        epoch, offset = divmod(place, len(self.packs))
        return self.packs[self._order(epoch)[offset]]

    def _order(self, epoch: int) -> list[int]:
        """The packs of one epoch, shuffled; the last few epochs asked for are kept."""
        if epoch not in self._orders:
            order = list(range(len(self.packs)))
            random.Random(f"draftsmith/{self.seed}/{epoch}").shuffle(order)
            while len(self._orders) >= 4:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return self._orders[epoch]

    @property
    def num_epochs(self) -> float:
        """How often a run sees each example."""
        return self._place(self._num_batches) / len(self.packs)

    def num_tokens(self, num_windows: int) -> int:
        """Tokens seen in the first `num_windows` windows, padding apart."""
        places = self._place(min(num_windows * self.accumulate, self._num_batches))
        epochs, rest = divmod(places, len(self.packs))
        partial = [self.packs[index] for index in self._order(epochs)[:rest]]
        return epochs * sum(self.lengths) + sum(self.lengths[index] for members in partial for index in members)


def pack(lengths: Sequence[int], max_length: int) -> list[Pack]:
    """Best fit, longest first: each example goes where it leaves the least room; `max_length` is kept."""
    packs: list[Pack] = []
    room: list[tuple[int, int]] = []  # (free tokens, number of the pack), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[index], -1))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = max_length, len(packs)
            packs.append([])
        packs[number].append(index)
        bisect.insort(room, (free - lengths[index], number))
    return packs


def split_up(packs: list[Pack], batch_size: int) -> list[MicroBatch]:
    """The packs in groups of `batch_size`, in order; the last group may be smaller."""
    return [packs[start : start + batch_size] for start in range(0, len(packs), batch_size)]


def rows_of_rank(micro_batch: MicroBatch, rank: int, world_size: int) -> MicroBatch:
    """What one rank works on: rows rank, rank + world_size, ...; none where there are fewer rows than ranks."""
    return micro_batch[rank::world_size]
