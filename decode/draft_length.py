"""Draft length policies: how many tokens a round drafts. A policy lives for one call and never biases the output.

A policy decides from counts of earlier rounds only; it never discards a token because of that token's value.
"""

from collections.abc import Callable
from typing import Protocol


class DraftLength(Protocol):
    def limit(self) -> int:
        """The most tokens to draft in the next round; 0 is a plain step."""

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Learn how the round went."""


class Fixed:
    """The same length in every round."""

    def __init__(self, most: int) -> None:
        self._most = most

    def limit(self) -> int:
        return self._most

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learnt."""


class Heuristic:
    """Two more after a fully accepted round, one less after any other; between 1 and `most`.

    The rule of transformers' assisted generation, kept within one call and within bounds.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._current = most

    def limit(self) -> int:
        return self._current

    def update(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            return
        step = 2 if num_accepted == num_drafted else -1
        self._current = min(max(self._current + step, min(1, self._most)), self._most)


DRAFT_LENGTHS: dict[str, Callable[[int], DraftLength]] = {
    "fixed": Fixed,
    "heuristic": Heuristic,
}
