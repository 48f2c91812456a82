"""What the loop asks of a proposer, and what proposers are made from."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.draft import Draft
from decode.session import Session


@dataclass(frozen=True)
class Setup:
    """All that a proposer may need; every proposer is made from one."""

    session: Session | None  # of the draft model; None where there is none
    sampling: SamplingConfig  # how drafted tokens are drawn
    vocab_size: int
    vocab_ids: Tensor | None  # [N] ids that the rows of the draft's narrowed head stand for; None: the head is whole
    generator: torch.Generator


class Proposer(Protocol):
    def __init__(self, setup: Setup) -> None: ...

    def propose(self, context: Tensor, limit: int) -> Draft:
        """At most `limit` tokens that may follow `context` [1, n], with the exact law each was drawn from."""

    def rewind(self, length: int) -> None:
        """Forget all tokens beyond the first `length` of the context."""
