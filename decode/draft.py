"""Values that proposers, verifiers and the loop exchange. Imports no sibling but the law."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from decode.laws import Law


@dataclass(frozen=True)
class Draft:
    """What a proposer offers one row for one round."""

    tokens: Tensor  # [W] int64, on the target's device; W may be 0
    law: Law | None = None  # W rows: the exact law that each token was drawn from; None: point masses
    healthy: Tensor | bool | None = None  # the draft's logits defined laws; [] on a GPU; None: there were none

    @cached_property
    def width(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def listed(self) -> list[int]:
        """The tokens in Python numbers; on a GPU to ask for them is a read."""
        tokens: list[int] = self.tokens.tolist()
        return tokens

    @property
    def laws(self) -> Law:
        """The laws that the tokens were drawn from, point masses included."""
        return Law.point(self.tokens) if self.law is None else self.law


@dataclass(frozen=True)
class Verdict:
    """What a verifier decides; on a GPU both values stay there until the loop reads them, once a round."""

    num_accepted: Tensor | int  # [] int64: drafted tokens kept
    next_token: Tensor | int  # [] int64: recovered after a rejection, bonus when all were accepted


@dataclass(frozen=True)
class Round:
    """What one round did for one row."""

    context_length: int
    drafted: list[int]  # proposed tokens; none beyond the text's end, on which nothing was decided
    num_accepted: int  # how many of them were kept
    emitted: list[int]  # accepted tokens, then the recovered or bonus one unless stopping cut it
    draft_seconds: float = 0.0  # of the whole batch; on a GPU the time to queue the work, not to do it
    target_seconds: float = 0.0
    log_probs: list[float] | None = None  # of `emitted` under the target's law, where they were asked for

    @property
    def next_token(self) -> int | None:
        """The recovered or bonus token; None where the text ended before it."""
        return self.emitted[-1] if len(self.emitted) > self.num_accepted else None

    @property
    def kind(self) -> str:
        """What ended the round: "recovered" after a rejection, "bonus" when all was accepted, else "ended"."""
        if self.next_token is None:
            return "ended"
        return "bonus" if self.num_accepted == len(self.drafted) else "recovered"
