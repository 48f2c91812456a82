"""Plain decoding: drafts nothing, so that every round is one step of the target."""

from collections.abc import Sequence

from decode.draft import Draft
from decode.proposers.base import Setup
from decode.row import Row


class NoDraft:
    def __init__(self, setup: Setup) -> None:
        """Nothing of it is needed."""

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        """Empty drafts."""
        return [Draft(row.drafted(0)) for row in rows]

    def rewind(self, lengths: Sequence[int]) -> None:
        """There is nothing to forget."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """There is nothing to drop."""
