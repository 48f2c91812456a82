"""Any forward over slots, compiled by inductor for a few widths and one text at a time."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from decode.backends.base import Forward
from decode.backends.static import SlotPool, StaticSlots, next_width, try_out
from decode.slots import Slots

# A plain step, a few drafted tokens, and the most that are drafted by default, with the one before them.
WIDTHS = (1, 4, 9)

Step = Callable[[Forward, Tensor, Slots], Tensor]


class CompiledForward:
    """`base` compiled for static shapes: once for each width when it is made, and once more for each width where texts
    are longer than 512 tokens, or 2048 and so on. Long chunks of a prompt and batches run uncompiled.

    On a CPU inductor freezes the weights: it packs copies of them, and later changes do not reach these.
    Raises CannotServe where inductor fails, or compiles to other logits.
    """

    def __init__(self, base: Forward, device: torch.device, widths: tuple[int, ...] = WIDTHS) -> None:
        self._base, self._device, self._widths = base, device, widths
        self._pool = SlotPool()
        self._steps: dict[tuple[int, int], Step] = {}
        try_out(self, base, widths, device)

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
        step = self._steps.get((width, slots.length))
        if step is None:
            step = self._steps[width, slots.length] = self._compile(width, slots.length)
        return step(self._base, ids, slots)[:, width - keep :]

    def _compile(self, width: int, length: int) -> Step:
        # Code of its own for each shape: torch counts recompilations by code, over all models, and gives up at a few.
        code = _step.__code__.replace(co_name=f"step_{width}_{length}_{id(self)}")
        options: dict[str, Any] = {"freezing": True} if self._device.type == "cpu" else {}
        return torch.compile(FunctionType(code, globals()), dynamic=False, options=options)


def _step(forward: Forward, ids: Tensor, slots: Slots) -> Tensor:
    return forward(ids, slots, ids.shape[1])
