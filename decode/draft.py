"""Values that proposers, verifiers and the loop exchange. Imports no sibling."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """What a proposer offers for one round."""

    tokens: Tensor  # [W] int64, on the target's device; W may be 0
    probs: Tensor | None = None  # [W, V] fp32: the exact law that each token was drawn from; None: a point mass
    healthy: Tensor | None = None  # [] bool: the draft's logits were finite; None: there were none

    @property
    def width(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True)
class Verdict:
    """What a verifier decides; both values stay on the device until the loop reads them, once."""

    num_accepted: Tensor  # [] int64: drafted tokens kept
    next_token: Tensor  # [] int64: recovered after a rejection, bonus when all were accepted


@dataclass(frozen=True)
class Round:
    """What one round did."""

    context_length: int
    drafted: list[int]  # proposed tokens; none beyond the text's end, on which nothing was decided
    num_accepted: int  # how many of them were kept
    emitted: list[int]  # accepted tokens, then the recovered or bonus one unless stopping cut it
