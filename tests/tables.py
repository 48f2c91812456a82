"""Pairs of laws without a model, that decode thousands of texts a second; and a test of counts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.draft_length import DRAFT_LENGTHS, LengthSetup
from decode.processors import Processors
from decode.row import Row
from decode.sampler import Sampler
from decode.stopping import Stopping
from decode.theory import Costs
from decode.vocabulary import Vocabulary


class TableSession:
    """A session whose law depends on the last token only, without a model: thousands of decodes a second."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self._logits = torch.tensor(rows, dtype=torch.float64).log()
        self.capacity = 10_000

    def extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        return [self._logits[context[len(context) - k :]] for context, k in zip(contexts, keep, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """There is nothing to forget."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Rows have no state."""


def table_row(
    budget: int,
    most: int,
    generator: torch.Generator,
    sampling: SamplingConfig = SamplingConfig(temperature=1.0),  # noqa: B008 (frozen)
    draft_sampling: SamplingConfig | None = None,
    policy: str = "fixed",
    vocab_ids: Tensor | None = None,
    size: int = 6,
) -> Row:
    """A row that starts with token 0, for table sessions over `size` tokens."""
    vocabulary = Vocabulary(size, None)
    drafting = draft_sampling or sampling
    costs = Costs(draft_ms=0.1, verify_ms=(1.0,) * (most + 1), round_ms=0.1)
    return Row(
        tokens=Row.buffer([0], budget + most, torch.device("cpu")),
        length=1,
        target_sampler=Sampler(sampling, vocabulary, Processors.of(sampling, 1, ())),
        draft_sampler=Sampler(drafting, vocabulary, Processors.of(drafting, 1, ()), vocab_ids),
        stopping=Stopping(budget, ()),
        draft_length=DRAFT_LENGTHS[policy](LengthSetup(most, None, costs)),
        generator=generator,
    )


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """p-value of `counts` under `law`; cells that expect fewer than 5 are pooled, impossible cells must be empty."""
    from scipy.stats import chisquare

    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().reshape(1)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    used = expected > 0
    return float(chisquare(observed[used].numpy(), expected[used].numpy()).pvalue)
