"""Plain decoding: drafts nothing, so that every round is one step of the target."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.proposers.base import Setup


class NoDraft:
    def __init__(self, setup: Setup) -> None:
        """Nothing of it is needed."""

    def propose(self, context: Tensor, limit: int) -> Draft:
        """An empty draft."""
        return Draft(tokens=torch.empty(0, dtype=torch.int64, device=context.device))

    def rewind(self, length: int) -> None:
        """There is nothing to forget."""
