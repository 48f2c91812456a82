"""What the loop asks of a proposer."""

from typing import Protocol

from torch import Tensor

from decode.draft import Draft


class Proposer(Protocol):
    def propose(self, context: Tensor, limit: int) -> Draft:
        """At most `limit` tokens that may follow `context` [1, n], with the exact law each was drawn from."""

    def rewind(self, length: int) -> None:
        """Forget all tokens beyond the first `length` of the context."""
