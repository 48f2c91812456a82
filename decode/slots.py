"""Key and value buffers of several rows, in which the slot of a token is its position.

To forget tokens nothing is moved: stale slots are hidden by the causal mask and overwritten later. Rows of any lengths
lie side by side, so this one layout serves single texts, ragged batches, and models compiled for fixed shapes.
"""

from collections.abc import Sequence
from operator import add

import torch
from torch import Tensor

# Slots that growing buffers start with: short texts then never move.
LEAST_SLOTS = 256


class Slots:
    """Buffers [B, H, T + 1, D] per layer, made when a layer first writes. The last slot takes what is mere padding."""

    def __init__(self, rows: int, length: int, *, fixed_shapes: bool = False) -> None:
        """`length`: the most tokens of a row. `fixed_shapes`: hand out whole buffers of that length and write by index
        tensors, for compiled forwards; else buffers grow with the texts and only the slots in use are handed out."""
        self.rows, self.length = rows, length
        self.span = 0  # slots that the current forward sees
        self.width = 0  # columns of the current forward
        self._positions: Tensor | None = torch.empty(rows, 0, dtype=torch.int64)
        self._device = torch.device("cpu")
        self._fixed = fixed_shapes
        self._size = length if fixed_shapes else 0  # slots of a buffer, that for padding apart
        self._start = 0
        self._at: tuple[Tensor, Tensor] | None = None  # rows [B, 1], slots [B, W] to write; None: from _start on
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def aim(self, starts: Sequence[int], widths: Sequence[int], device: torch.device, width: int | None = None) -> None:
        """Prepare a forward that feeds `widths[b]` tokens of row b from position `starts[b]` on. They fill the last
        columns of `width` (default: the widest row's); the columns before them are padding."""
        self.width = most = max(widths) if width is None else width
        self._device = device
        used = max(map(add, starts, widths))
        if used > self._size:
            self._size = max(used, min(self.length, max(2 * self._size, LEAST_SLOTS)))
        self.span = self._size + 1 if self._fixed else used
        self._masks.clear()
        if not self._fixed and min(widths) == most and min(starts) == max(starts):
            self._start, self._at, self._positions = starts[0], None, None
        else:
            self._aim_by_index(starts, widths, device, most)

    @property
    def start(self) -> int | None:
        """The position of the current forward's first column, where that is the same in all rows and none is padded."""
        return self._start if self._at is None else None

    @property
    def positions(self) -> Tensor:
        """[B, W] of the tokens of the current forward."""
        if self._positions is None:
            end = self._start + self.width
            self._positions = torch.arange(self._start, end, device=self._device).expand(self.rows, self.width)
        return self._positions

    def _aim_by_index(self, starts: Sequence[int], widths: Sequence[int], device: torch.device, most: int) -> None:
        # A padding token takes the position of a token that its row has or gets, which every model can embed.
        first = [start if fed else max(start - 1, 0) for start, fed in zip(starts, widths, strict=True)]
        table = torch.tensor([first, widths], device=device)  # [2, B]
        ahead = torch.arange(most, device=device) - most + table[1].unsqueeze(1)  # [B, W]; below 0: padding
        self._positions = table[0].unsqueeze(1) + ahead.clamp(min=0)
        row = torch.arange(self.rows, device=device).unsqueeze(1)
        self._at = (row, self._positions.masked_fill(ahead < 0, self._size))

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the current tokens' [B, H, W, D]; returns all keys and values that may be seen, [B, H, span, D]."""
        stored = self._buffers.get(layer)
        if stored is None or stored[0].shape[2] <= self._size:
            stored = self._buffers[layer] = self._grown(stored, keys, values)
        self._write(stored[0], keys)
        self._write(stored[1], values)
        return stored[0][:, :, : self.span], stored[1][:, :, : self.span]

    def _write(self, buffer: Tensor, fresh: Tensor) -> None:
        if self._at is None:
            buffer[:, :, self._start : self._start + fresh.shape[2]] = fresh
        else:  # layers may lie on several devices
            row, slot = (index.to(buffer.device) for index in self._at)
            buffer[row, :, slot] = fresh.transpose(1, 2)

    def _grown(self, stored: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        # Zeros: a hidden slot weighs nothing, but nothing times a stray NaN would be NaN.
        new = [like.new_zeros(self.rows, like.shape[1], self._size + 1, like.shape[3]) for like in (keys, values)]
        for buffer, old in zip(new, stored or (), strict=False):
            buffer[:, :, : old.shape[2]] = old
        return new[0], new[1]

    def hides_nothing(self, window: int | None) -> bool:
        """Whether every token of this step may see the whole span, so that the mask may be left out."""
        return self._at is None and self.width == 1 and (window is None or window >= self.span)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, W, span], to be added to attention scores: 0 where a token may look, -inf elsewhere. With a `window` a
        token sees the last `window` positions, its own included."""
        mask = self._masks.get((window, dtype))
        if mask is None:
            slot = torch.arange(self.span, device=self.positions.device)
            at = self.positions.unsqueeze(-1)
            hidden = slot > at
            if window is not None:
                hidden |= slot <= at - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=slot.device)
            mask = self._masks[window, dtype] = zeros.masked_fill_(hidden, float("-inf")).unsqueeze(1)
        return mask

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(rows) == self.rows:
            return
        self.rows = len(rows)
        for layer, pair in self._buffers.items():
            index = torch.tensor(rows, device=pair[0].device)
            self._buffers[layer] = (pair[0].index_select(0, index), pair[1].index_select(0, index))
