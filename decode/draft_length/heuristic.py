"""Longer after success, shorter after failure."""

from decode.draft_length.base import Fixed, LengthSetup


class Heuristic(Fixed):
    """Two more after a fully accepted round, one less after any other; between 1 and `most`.

    The rule of transformers' assisted generation, kept within one text and within bounds.
    """

    def __init__(self, setup: LengthSetup) -> None:
        super().__init__(setup)
        self._current = setup.most

    def limit(self) -> int:
        return self._current

    def update(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            return
        step = 2 if num_accepted == num_drafted else -1
        self._current = min(max(self._current + step, min(1, self._most)), self._most)
