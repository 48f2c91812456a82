"""What a forward of a model over slots is, and how one says that it cannot serve a model. Knows no backend."""

from typing import Protocol

from torch import Tensor

from decode.slots import Slots


class Forward(Protocol):
    """Runs one model over key and value slots; has no state of its own between steps, so any number of sessions may
    share it."""

    def new_slots(self, rows: int, length: int) -> Slots:
        """Empty slots for `rows` texts of at most `length` tokens each, of the kind that this forward runs on."""

    def __call__(self, ids: Tensor, slots: Slots, keep: int) -> Tensor:
        """Logits [B, keep, V] of the last `keep` columns of `ids` [B, W] int64, padding columns counted.

        `slots.aim` was called for this step. V is the head's number of rows.
        """

    def pad_width(self, width: int) -> int:
        """The width to pad a step of `width` columns to: `width` itself, or the next one that is made ready."""


class CannotServe(Exception):
    """A backend cannot run a model; the text is the reason, half a sentence."""
