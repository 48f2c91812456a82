"""Which supervised positions of the training examples count at an optimiser step: a share of all, by their rank."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distill.data.examples import Example


class Kept:
    """The positions with the largest gaps among all of `examples`; of equal gaps the first.

    The choice is made over all examples at once, so it depends on no batch, pack or rank. Where `rises`, the share
    grows in equal parts from `keep` at the first step to 1 at the last: then it depends on the step's number too.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        gaps: Tensor,  # [N]: of every supervised position, in the order of examples and of their tokens
        keep: float,
        rises: bool = False,
        num_steps: int = 1,
    ) -> None:
        self.examples, self.keep, self.rises, self.num_steps = examples, keep, rises, num_steps
        ranks = torch.empty(len(gaps), dtype=torch.int64)
        ranks[gaps.argsort(descending=True, stable=True)] = torch.arange(len(gaps))
        self._ranks = ranks.split([example.num_supervised for example in examples])
        self._size = len(gaps)

    def share(self, step: int) -> float:
        """Of the positions that are kept at optimiser step `step`, from 0."""
        risen = step / (self.num_steps - 1) if self.rises and self.num_steps > 1 else 0.0
        return self.keep + (1 - self.keep) * risen

    def num_positions(self, step: int) -> int:
        """How many are kept, one at least."""
        return max(1, math.floor(self.share(step) * self._size + 0.5))

    def example(self, index: int, step: int) -> Example:
        """Example `index` with the mask of what is kept of it, which may be nothing."""
        example, border = self.examples[index], self.num_positions(step)
        is_kept = iter((self._ranks[index] < border).tolist())
        mask = [example.mask[0], *(bool(bit) and next(is_kept) for bit in example.mask[1:])]
        return replace(example, mask=mask)
