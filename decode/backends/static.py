"""Slots whose every tensor stays where it is, so that what was compiled or captured for them can be run again."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode.agreement import agree, relative_gap
from decode.backends.base import CannotServe, Forward
from decode.errors import first_line
from decode.slots import Slots

LEAST_LENGTH = 512


@dataclass
class Store:
    """The memory of one text at a time, and the runs that were made ready for it. Outlives the slots lent from it."""

    length: int
    buffers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    steps: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # width: positions, rows, slots
    runs: dict[Hashable, Any] = field(default_factory=dict)
    loops: dict[Hashable, Any] = field(default_factory=dict)  # runs of several steps, those used last at the end
    lent: Callable[[], "StaticSlots | None"] = field(default=lambda: None)

    @property
    def slots(self) -> "StaticSlots":
        """The slots that are lent now."""
        slots = self.lent()
        assert slots is not None, "a run outlived its slots"
        return slots


class StaticSlots(Slots):
    """Slots of one row over a store's memory. Steps of one width share their positions tensor and its place."""

    def __init__(self, store: Store) -> None:
        super().__init__(1, store.length, fixed_shapes=True)
        self._buffers, self.store = store.buffers, store
        self.span = store.length + 1

    @torch.inference_mode()
    def aim(self, starts: Sequence[int], widths: Sequence[int], device: torch.device, width: int | None = None) -> None:
        """See Slots."""
        super().aim(starts, widths, device, width)
        assert self._at is not None
        fresh = (self.positions, *self._at)
        step = self.store.steps.setdefault(self.width, fresh)
        for stays, moves in zip(step, fresh, strict=True):
            if stays is not moves:
                stays.copy_(moves)
        self._positions, self._at = step[0], step[1:]

    def _aim_by_index(self, starts: Sequence[int], widths: Sequence[int], device: torch.device, most: int) -> None:
        # As in Slots, for the one row. Its numbers go to kernels as they are: to copy them would wait for a GPU.
        (start,), (fed,) = starts, widths
        ahead = torch.arange(fed - most, fed, device=device).unsqueeze(0)  # [1, W]; below 0: padding
        self._positions = ahead.clamp(min=0) + (start if fed else max(start - 1, 0))
        self._at = (torch.zeros_like(ahead[:, :1]), self._positions.masked_fill(ahead < 0, self._size))

    def aim_at(self, positions: Tensor) -> None:
        """Prepare a forward at `positions` [1, W], which are not read by the host; none of them is padding."""
        self._masks.clear()
        self.width, self._positions = positions.shape[1], positions
        self._at = (torch.zeros_like(positions[:, :1]), positions)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See Slots. The memory is the store's and stays."""
        self.rows = len(rows)

    def forget_masks(self) -> None:
        """A captured run makes its own masks, from the positions of the day."""
        self._masks.clear()


class SlotPool:
    """Lends slots for texts of one row, and takes their memory back when they are no longer used."""

    def __init__(self) -> None:
        self._free: dict[int, list[Store]] = {}

    @torch.inference_mode()
    def lend(self, length: int) -> StaticSlots:
        """Slots for at least `length` tokens; lengths are few, each four times the one before."""
        size = LEAST_LENGTH
        while size < length:
            size *= 4
        free = self._free.setdefault(size, [])
        store = free.pop() if free else Store(size)
        for buffer in (buffer for pair in store.buffers.values() for buffer in pair):
            buffer.zero_()  # a NaN of an earlier text would not stay hidden behind a mask
        slots = StaticSlots(store)
        store.lent = weakref.ref(slots)
        weakref.finalize(slots, free.append, store)
        return slots


def next_width(width: int, widths: Sequence[int]) -> int:
    """The least of the ascending `widths` that is not below `width`; `width` itself beyond them all."""
    return next((ready for ready in widths if ready >= width), width)


@torch.inference_mode()
def try_out(ready: Forward, base: Forward, widths: Sequence[int], device: torch.device) -> None:
    """Run every width of `ready` once, which makes it ready, and compare its logits with those of `base`.

    Raises CannotServe where they differ, or a run fails.
    """
    slots = ready.new_slots(1, LEAST_LENGTH)
    for width in widths:
        ids = torch.ones(1, width, dtype=torch.int64, device=device)
        try:
            slots.aim([1], [width], device)
            plain = base(ids, slots, width)[0]
            slots.aim([1], [width], device)
            ours = ready(ids, slots, width)[0]
        except Exception as error:  # compilers and captures fail in many ways, and the other backends remain
            raise CannotServe(f"{type(ready).__name__} fails: {type(error).__name__}: {first_line(error)}") from error
        if not agree(ours, plain, plain.dtype):
            raise CannotServe(f"{type(ready).__name__} gives other logits, by {relative_gap(ours, plain):.1%}")


class FewWidths(ABC):
    """A Forward over `base` that is made ready for a few widths of one row's static slots; whatever else it is given,
    long chunks of a prompt and batches, runs by `base` as it is. What is ready for a width is the subclass's `step`."""

    def __init__(self, base: Forward, widths: tuple[int, ...]) -> None:
        self._base, self._widths = base, widths
        self._pool = SlotPool()

    def new_slots(self, rows: int, length: int) -> Slots:
        """See Forward."""
        return self._pool.lend(length) if rows == 1 else self._base.new_slots(rows, length)

    def pad_width(self, width: int) -> int:
        """See Forward."""
        return next_width(width, self._widths)

    def __call__(self, ids: Tensor, slots: Slots, keep: int) -> Tensor:
        """See Forward."""
        width = ids.shape[1]
        if not isinstance(slots, StaticSlots) or width not in self._widths:
            return self._base(ids, slots, keep)
        return self.step(ids, slots)[:, width - keep :]

    @abstractmethod
    def step(self, ids: Tensor, slots: StaticSlots) -> Tensor:
        """Logits [1, W, V] of all columns of `ids` [1, W], W one of the widths."""
