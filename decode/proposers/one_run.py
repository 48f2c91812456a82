"""All drafted tokens of a round in one run of the draft model, where nothing but its own laws decides on them."""

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from decode.backends.cuda_graph import Draw
from decode.draft import Draft
from decode.draws import draw_from, draw_uniform
from decode.laws import Law, all_true
from decode.row import Row
from decode.sampler import Sampler
from decode.session import DraftingSession


class OneRun:
    """Drafts for the row of a session of one. Same tokens, laws and random numbers as token after token."""

    def __init__(self, session: DraftingSession, vocab_size: int) -> None:
        self._session, self._vocab_size = session, vocab_size
        self._draw: tuple[Draw, Hashable] | None = None  # of the session's one row

    def serves(self, row: Row) -> bool:
        """Whether drafting `row` needs nothing of the host on the way: no policy that looks at laws, no processor of
        the tokens so far, no other device."""
        alone = not row.draft_length.watches and row.draft_sampler.processors is None
        return alone and row.tokens.device == self._session.device

    def draft(self, row: Row, most: int) -> Draft:
        """`most` tokens after the row's context, written behind it."""
        tokens = row.drafted(max(most, 0))
        if most <= 0:
            return Draft(tokens)
        if self._draw is None:
            self._draw = _draw_of(row.draft_sampler, self._session.device), _key_of(row.draft_sampler)
        greedy = row.draft_sampler.sampling.greedy
        drafted, laws = self._session.draft_steps(row.context(), _uniforms(row, most, greedy), *self._draw)
        tokens.copy_(drafted)
        # The laws may stay in the run's memory: the round is over before it is run again.
        law = None if greedy else Law.cat(laws, self._vocab_size)
        return Draft(tokens, law, all_true([law.healthy for law in laws]))


def _uniforms(row: Row, count: int, greedy: bool) -> Tensor:
    """[count] fp64, drawn one by one: a GPU's generator gives other numbers when asked for several at once, and a
    row's text must not depend on how it is run."""
    if greedy:
        return torch.zeros(count, dtype=torch.float64, device=row.tokens.device)
    return torch.cat([draw_uniform(1, row.generator) for _ in range(count)])


def _draw_of(sampler: Sampler, device: torch.device) -> Draw:
    # Nothing can be brought to a GPU inside a captured run.
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    own = replace(sampler, vocabulary=sampler.vocabulary.on(device))

    def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Law]:
        law = own.law(logits, nothing, 0)
        return draw_from(law, uniform), law

    return draw


def _key_of(sampler: Sampler) -> Hashable:
    """All that the draws of a sampler without processors depend on."""
    sampling = sampler.sampling
    filters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p)
    return (*filters, sampler.vocabulary, sampler.vocab_ids)
