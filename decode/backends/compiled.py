"""Any forward over slots, compiled by inductor for a few widths and one text at a time."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from decode.backends.base import Forward
from decode.backends.static import FewWidths, StaticSlots, try_out
from decode.slots import Slots

# A plain step, a few drafted tokens, and the most that are drafted by default, with the one before them.
WIDTHS = (1, 4, 9)

Step = Callable[[Forward, Tensor, Slots], Tensor]


class CompiledForward(FewWidths):
    """`base` compiled for static shapes: once for each width when it is made, and once more for each width where texts
    are longer than 512 tokens, or 2048 and so on. Long chunks of a prompt and batches run uncompiled.

    On a CPU inductor freezes the weights: it packs copies of them, and later changes do not reach these.
    Raises CannotServe where inductor fails, or compiles to other logits.
    """

    def __init__(self, base: Forward, device: torch.device, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__(base, widths)
        self._device = device
        self._steps: dict[tuple[int, int], Step] = {}
        try_out(self, base, widths, device)

    def step(self, ids: Tensor, slots: StaticSlots) -> Tensor:
        """See FewWidths."""
        width = ids.shape[1]
        step = self._steps.get((width, slots.length))
        if step is None:
            step = self._steps[width, slots.length] = self._compile(width, slots.length)
        return step(self._base, ids, slots)

    def _compile(self, width: int, length: int) -> Step:
        # Code of its own for each shape: torch counts recompilations by code, over all models, and gives up at a few.
        code = _step.__code__.replace(co_name=f"step_{width}_{length}_{id(self)}")
        options: dict[str, Any] = {"freezing": True} if self._device.type == "cpu" else {}
        return torch.compile(FunctionType(code, globals()), dynamic=False, options=options)


def _step(forward: Forward, ids: Tensor, slots: Slots) -> Tensor:
    return forward(ids, slots, ids.shape[1])
