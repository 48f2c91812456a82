"""What a draft length policy is, what it is made from, and the plainest one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from decode.theory import Costs

if TYPE_CHECKING:
    from decode.laws import Law

# Tokens drafted per round where none are stated: by a fixed length, and at most by a policy that chooses.
FIXED_LENGTH = 3
LONGEST_DRAFT = 8


@dataclass(frozen=True)
class LengthSetup:
    """All that a policy may need; every policy is made from one."""

    most: int = LONGEST_DRAFT  # tokens that a round may draft; 0: none ever
    threshold: float | None = None  # of the policies that stop where the draft is unsure; None: their own default
    costs: Costs | None = None  # of rounds of 0..most drafted tokens, for policies that need them


class DraftLength(Protocol):
    watches: ClassVar[bool]
    """Whether `stop` is to be asked; that costs a read from the device for each token."""
    needs_costs: ClassVar[bool]
    """Whether the setup must hold the pair's costs, unless nothing is ever drafted."""

    def __init__(self, setup: LengthSetup) -> None: ...

    def limit(self) -> int:
        """The most tokens to draft in the next round; 0 is a plain step."""

    def stop(self, law: "Law") -> bool:
        """Whether drafting ends before a token is drawn. `law`: one row, the draft's own law of that token; under
        greedy decoding the law at temperature 1, for a point mass doesn't tell how sure the draft is."""

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Learn how the round went. Fewer may have been drafted than the limit allowed."""


class Fixed:
    """The same length in every round."""

    watches: ClassVar[bool] = False
    needs_costs: ClassVar[bool] = False

    def __init__(self, setup: LengthSetup) -> None:
        self._most = setup.most

    def limit(self) -> int:
        return self._most

    def stop(self, law: "Law") -> bool:
        return False

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learnt."""
