"""What the loop asks of a proposer, and what proposers are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode.draft import Draft
from decode.row import Row
from decode.session import Session


@dataclass(frozen=True)
class Setup:
    """All that a proposer may need; every proposer is made from one."""

    session: Session | None  # of the draft model, with a row for each row of the batch; None where there is none
    vocab_size: int


class Proposer(Protocol):
    def __init__(self, setup: Setup) -> None: ...

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        """For each live row at most `row.most` tokens that may follow its context, written behind it, with the exact
        laws they were drawn from."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget, for each live row, all tokens beyond the first so many of its context."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these of the live rows only."""
