"""Drafts with a small model, one token after another, for all rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decode.draft import Draft
from decode.draws import draw_from, draw_numbers, draw_one, draw_uniform
from decode.laws import Law, all_true
from decode.proposers.base import Setup
from decode.proposers.one_run import OneRun
from decode.row import Row
from decode.session import DraftingSession


@dataclass
class _Chain:
    """The draft of one row as it grows."""

    row: Row
    most: int
    laws: list[Law] = field(default_factory=list)
    ended: bool = False

    @property
    def width(self) -> int:
        return len(self.laws)

    @property
    def grows(self) -> bool:
        return not self.ended and self.width < self.most

    def extend(self, logits: Tensor) -> None:
        """Draw one more token from `logits` [1, V or N], unless the length policy, seeing the law first, ends it."""
        row, length = self.row, self.row.length + self.width
        if row.draft_length.watches and row.draft_length.stop(row.draft_sampler.soft_law(logits, row.tokens, length)):
            self.ended = True
            return
        law = row.draft_sampler.law(logits, row.tokens, length)
        draws = not row.draft_sampler.sampling.greedy
        if row.on_host:
            row.put(self.width, draw_one(law, draw_numbers(1, row.generator)[0] if draws else None))
        else:
            row.put(self.width, draw_from(law, draw_uniform(1, row.generator) if draws else None))
        self.laws.append(law)

    def finish(self, vocab_size: int) -> Draft:
        tokens = self.row.drafted(self.width)
        if not self.laws:
            return Draft(tokens)
        law = None if self.row.draft_sampler.sampling.greedy else Law.cat(self.laws, vocab_size)
        return Draft(tokens, law, all_true([each.healthy for each in self.laws]))


class DraftModel:
    """Chains of tokens drawn from a draft model.

    Greedy drafting yields point masses. A draft with a reduced vocabulary draws over that subset, and q is declared
    as zero elsewhere, which keeps every lossless rule lossless.
    """

    def __init__(self, setup: Setup) -> None:
        assert setup.session is not None
        self._session = setup.session
        self._vocab_size = setup.vocab_size
        self._one_run = OneRun(setup.session, setup.vocab_size) if isinstance(setup.session, DraftingSession) else None

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        """See Proposer. Past the draft's own context limit nothing is drafted."""
        if self._one_run is not None and self._one_run.serves(rows[0]):
            return [self._one_run.draft(rows[0], self._most(rows[0]))]
        chains = [_Chain(row, self._most(row)) for row in rows]
        while any(grow := [chain.grows for chain in chains]):
            contexts = [chain.row.context(chain.width) for chain in chains]
            logits = self._session.extend(contexts, [int(grows) for grows in grow])
            for chain, own, grows in zip(chains, logits, grow, strict=True):
                if grows:
                    chain.extend(own)
        return [chain.finish(self._vocab_size) for chain in chains]

    def _most(self, row: Row) -> int:
        # The last drafted token is not fed, so one more than the free positions can be drafted.
        return min(row.most, self._session.capacity - row.length + 1)

    def rewind(self, lengths: Sequence[int]) -> None:
        """See Proposer."""
        self._session.rewind(lengths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See Proposer."""
        self._session.keep_rows(rows)
