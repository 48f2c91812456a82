"""Decides where a text ends: end-of-text ids and the token budget, applied token by token inside a block."""

from collections.abc import Collection, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]


class Stopping:
    """Counts what was emitted and says when, and why, to stop."""

    def __init__(self, budget: int, eos_token_ids: Collection[int]) -> None:
        self.room = budget
        self._eos = frozenset(eos_token_ids)
        self.reason: FinishReason | None = "length" if budget <= 0 else None

    def cut(self, block: Sequence[int]) -> list[int]:
        """The part of `block` that may be emitted: up to the first end-of-text id, that included, or the budget."""
        kept: list[int] = []
        for token in block:
            if self.reason:
                break
            kept.append(token)
            self.room -= 1
            if token in self._eos:
                self.reason = "stop"
            elif self.room == 0:
                self.reason = "length"
        return kept
