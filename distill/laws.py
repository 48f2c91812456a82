"""Brings a target's law and a draft's logits onto one support, whichever part of the target's law was kept.

Every loss and metric then sees two laws over the same buckets. Shapes: N positions (any leading dimensions), V target
ids, M columns of the draft, K kept ids, S buckets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

INF = float("inf")


@dataclass(frozen=True)
class FullLaw:
    """The target's law over all of its ids."""

    log_probs: Tensor  # [N, V], normalised

    @property
    def num_positions(self) -> int:
        return self.log_probs.shape[:-1].numel()


@dataclass(frozen=True)
class TopKLaw:
    """The target's K likeliest ids, with their true probabilities, and the mass of the draft's other ids in one bucket.

    For a draft that may propose every id the tail is 1 less the sum of the K. For one with a reduced vocabulary it
    leaves out ids that the draft lacks: counted in, they would pull the draft's own tail up, away from what it is
    trained towards, the law conditioned on its ids.
    """

    ids: Tensor  # [N, K] int64, of all V
    log_probs: Tensor  # [N, K]
    log_tail: Tensor  # [N]: log of the mass of the draft's ids beyond the K; -inf where it has none

    @property
    def num_positions(self) -> int:
        return self.log_tail.numel()


Law = FullLaw | TopKLaw


class Columns(nn.Module):
    """Which id each column of the draft's logits stands for: all V, or the `vocab_ids` of a reduced vocabulary.

    Both models of a pair have the same V ids: a draft that is trained, judged or exported is refused otherwise.
    """

    ids: Tensor  # [M] int64: id of each column
    column_of: Tensor  # [V] int64: column of each id; M where there is none

    def __init__(self, vocab_size: int, vocab_ids: Tensor | None = None) -> None:
        super().__init__()
        ids = torch.arange(vocab_size) if vocab_ids is None else vocab_ids.detach().cpu()
        column_of = torch.full((vocab_size,), len(ids))
        column_of[ids] = torch.arange(len(ids))
        self.complete = len(ids) == vocab_size
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("column_of", column_of, persistent=False)


def upcast(values: Tensor) -> Tensor:
    """fp32, or fp64 where it is fp64 already: 16-bit softmax and divergence are rounding noise near convergence."""
    return values if values.dtype == torch.float64 else values.float()


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, in fp32 or wider; no copy of [N, V] where there is nothing to do."""
    logits = upcast(logits)
    return logits if temperature == 1 else logits / temperature


def align(law: Law, draft_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Two normalised laws over the same buckets: log p and log q, each [N, S].

    p is the target's law *conditioned* on the draft's ids: mass outside them is dropped and the rest divided by what
    remains, for no draft could ever propose it. With a top-k law the kept ids that the draft has and its tail are
    the buckets, so both kinds of law have one fixed point; -inf on both sides marks a bucket that does not exist at a
    position.
    """
    if isinstance(law, FullLaw):
        return _align_full(law, draft_logits, columns)
    return _align_top_k(law, draft_logits, columns)


def _align_full(law: FullLaw, draft_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    log_q = upcast(draft_logits).log_softmax(-1)
    if columns.complete:
        return law.log_probs, log_q
    return _normalise(law.log_probs.index_select(-1, columns.ids)), log_q


def _align_top_k(law: TopKLaw, draft_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    buckets = top_k_buckets(law, draft_logits, columns)
    log_p = torch.cat([law.log_probs.masked_fill(~buckets.kept, -INF), law.log_tail.unsqueeze(-1)], -1)
    log_q = torch.cat([buckets.log_q, buckets.log_q_tail.unsqueeze(-1)], -1)
    return _normalise(log_p), log_q


@dataclass(frozen=True)
class Buckets:
    """A draft's law over the buckets of a top-k law."""

    kept: Tensor  # [N, K] bool: the draft has this id
    log_q: Tensor  # [N, K]; -inf where not kept
    log_q_tail: Tensor  # [N]: its mass on all its other ids; -inf where it has none


def top_k_buckets(law: TopKLaw, draft_logits: Tensor, columns: Columns) -> Buckets:
    """Split the draft's law along the ids of a top-k law.

    The draft's tail is summed from its own entries. 1 minus the kept mass would lose all precision, and the gradient
    with it, as the draft gets good.
    """
    logits = upcast(draft_logits)
    size = logits.shape[-1]
    column = columns.column_of[law.ids]  # [N, K]; `size` where the draft lacks the id
    kept = column < size
    has_tail = kept.sum(-1) < size
    chosen = logits.gather(-1, column.clamp(max=size - 1)).masked_fill(~kept, -INF)
    # One column more takes the writes of ids that the draft lacks. The fill is finite, for logsumexp over nothing but
    # -inf has gradient nan.
    lowest = torch.finfo(logits.dtype).min / 2
    others = nn.functional.pad(logits, (0, 1), value=lowest).scatter_(-1, column, lowest)
    tail = others.logsumexp(-1).masked_fill(~has_tail, -INF)
    # The total from its parts: the only pass over [N, M], forward and backward, is the tail's.
    total = torch.cat([chosen, tail.unsqueeze(-1)], -1).logsumexp(-1)
    return Buckets(kept, chosen - total.unsqueeze(-1), tail - total)


def _normalise(log_mass: Tensor) -> Tensor:
    """[N, S]: divided by the total; a row without any mass stays as it is, and no loss counts it."""
    total = log_mass.logsumexp(-1, keepdim=True)
    return log_mass - total.masked_fill(total == -INF, 0.0)
