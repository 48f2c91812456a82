"""Drafts with a small model, one token after another."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.proposers.base import Setup
from decode.sampling import argmax, draw, draw_uniform, probabilities


class DraftModel:
    """A chain of tokens drawn from a draft model.

    Greedy drafting yields point masses. A draft with a reduced vocabulary draws over that subset, and q is declared
    as zero elsewhere, which keeps every lossless rule lossless.
    """

    def __init__(self, setup: Setup) -> None:
        assert setup.session is not None
        self._session = setup.session
        self._sampling = setup.sampling
        self._vocab_size = setup.vocab_size
        self._vocab_ids = setup.vocab_ids
        self._generator = setup.generator

    def propose(self, context: Tensor, limit: int) -> Draft:
        """See Proposer. Past the draft's own context limit nothing is drafted."""
        # The last drafted token is not fed, so one more than the free positions can be drafted.
        limit = min(limit, self._session.capacity - context.shape[1] + 1)
        tokens, laws, peaks = [], [], []
        for _ in range(limit):
            logits = self._session.extend(context, keep=1)  # [1, N]
            peaks.append(logits.amax(-1))
            token, law = self._draw(logits)
            tokens.append(token)
            laws.append(law)
            context = torch.cat([context, token.unsqueeze(0)], dim=1)
        if not tokens:
            return Draft(tokens=context.new_empty(0))
        probs = None if self._sampling.greedy else torch.cat(laws)
        return Draft(torch.cat(tokens), probs, healthy=torch.cat(peaks).isfinite().all())

    def rewind(self, length: int) -> None:
        """See Proposer."""
        self._session.rewind(length)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token [1] and the law [1, V] it was drawn from (for greedy drafting an unused placeholder)."""
        if self._sampling.greedy:
            return self._to_ids(argmax(logits)), logits
        law = probabilities(logits, self._sampling)
        uniform = draw_uniform(1, self._generator)
        token = self._to_ids(draw(law, uniform))
        return token, self._to_full_law(law)

    def _to_ids(self, rows: Tensor) -> Tensor:
        """Rows of the head as token ids. NaN logits may point past the last row; `healthy` reports them."""
        if self._vocab_ids is None:
            return rows.clamp(max=self._vocab_size - 1)
        return self._vocab_ids[rows.clamp(max=len(self._vocab_ids) - 1)]

    def _to_full_law(self, law: Tensor) -> Tensor:
        if self._vocab_ids is None:
            return law
        return law.new_zeros(law.shape[0], self._vocab_size).index_copy_(1, self._vocab_ids, law)
