"""Brings a target's law and a draft's logits onto one support, whichever part of the target's law was kept.

Every loss and metric then sees two laws over the same buckets. Shapes: N positions (any leading dimensions), V target
ids, M columns of the draft, K kept ids, S buckets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    def part(self, start: int, stop: int) -> "FullLaw":
        """The law at positions start to stop of [N, V]."""
        return FullLaw(self.log_probs[start:stop])


@dataclass(frozen=True)
class HeadLaw:
    """The target's law over all of its ids, kept as what its head reads: [N, V] is made for a part at a time."""

    hidden: Tensor  # [N, d], last hidden states
    head: Callable[[Tensor], Tensor]  # [n, d] -> logits [n, V]
    temperature: float = 1.0

    @property
    def num_positions(self) -> int:
        return len(self.hidden)

    @torch.no_grad()
    def part(self, start: int, stop: int) -> FullLaw:
        """The law at positions start to stop, fp32 or wider.

        Without gradients rather than in inference mode: a loss may save the law for its backward, which inference
        tensors allow only after a copy.
        """
        with torch.autocast(self.hidden.device.type, enabled=False):  # the target keeps its own precision
            logits = self.head(self.hidden[start:stop])
        return FullLaw(tempered(logits, self.temperature).log_softmax(-1))

    @property
    def log_probs(self) -> Tensor:  # [N, V]
        """All of it at once."""
        return self.part(0, self.num_positions).log_probs


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

    def part(self, start: int, stop: int) -> "TopKLaw":
        """The law at positions start to stop of [N, K]."""
        return TopKLaw(*(tensor[start:stop] for tensor in vars(self).values()))


@dataclass(frozen=True)
class SampledLaw:
    """S ids drawn from the target's law conditioned on the draft's ids, independently, with their true probabilities.

    A mean over the draws is an unbiased estimate of what the law says; nothing is known of the ids that were not drawn.
    """

    ids: Tensor  # [N, S] int64, of all V; an id may be there more than once
    log_probs: Tensor  # [N, S]: of the whole law, not conditioned; -inf where the draft's ids have no mass to draw from
    log_mass: Tensor  # [N]: log of the mass of the draft's ids; 0 for a draft of all ids

    @property
    def num_positions(self) -> int:
        return self.log_mass.numel()

    def part(self, start: int, stop: int) -> "SampledLaw":
        """The law at positions start to stop - 1."""
        return SampledLaw(self.ids[start:stop], self.log_probs[start:stop], self.log_mass[start:stop])


Law = FullLaw | HeadLaw | TopKLaw | SampledLaw


class Columns(nn.Module):
    """Which id each column of the draft's logits stands for: all V, or the `vocab_ids` of a reduced vocabulary.

    Both models of a pair have the same V ids: a draft that is trained, judged or exported is refused otherwise.
    """

    ids: Tensor  # [M] int64, ascending: id of each column
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


def likeliest(law: Law) -> Tensor:  # [N] int64
    """The target's likeliest id, the lowest where several tie: exact from the K kept ids, unless more than K tie."""
    law = _refuse_drawn(law)
    if isinstance(law, TopKLaw):
        best = law.log_probs == law.log_probs.amax(-1, keepdim=True)
        return law.ids.masked_fill(~best, torch.iinfo(torch.int64).max).amin(-1)
    return law.log_probs.argmax(-1)


def align(law: Law, draft_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Two normalised laws over the same buckets: log p and log q, each [N, S].

    p is the target's law *conditioned* on the draft's ids: mass outside them is dropped and the rest divided by what
    remains, for no draft could ever propose it. With a top-k law the kept ids that the draft has and its tail are
    the buckets, so both kinds of law have one fixed point; -inf on both sides marks a bucket that does not exist at a
    position. Raises ValueError for a sampled law, of which `drawn` tells what can be had.
    """
    known = _refuse_drawn(law)
    if isinstance(known, TopKLaw):
        return _align_top_k(known, draft_logits, columns)
    return _align_full(known, draft_logits, columns)


def _refuse_drawn(law: Law) -> FullLaw | HeadLaw | TopKLaw:
    if isinstance(law, SampledLaw):
        raise ValueError("ids drawn from a law are no buckets of it: only forward_kl and the overlap are estimated")
    return law


def drawn(law: SampledLaw, draft_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """At the ids of a sampled law: log p, conditioned on the draft's ids, and log q, each [N, S].

    Where the draft's ids had no mass to draw from, log p is log q, so that no estimate counts the position.
    """
    logits = upcast(draft_logits)
    log_q = logits.gather(-1, columns.column_of[law.ids]) - logits.logsumexp(-1, keepdim=True)
    nothing = law.log_probs == -INF
    log_p = law.log_probs.masked_fill(nothing, 0.0) - law.log_mass.masked_fill(law.log_mass == -INF, 0.0).unsqueeze(-1)
    return torch.where(nothing, log_q.detach(), log_p), log_q


def _align_full(law: FullLaw | HeadLaw, draft_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
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
    column = columns.column_of[law.ids]  # [N, K]; M where the draft lacks the id
    kept = column < logits.shape[-1]
    chosen, others = _Split.apply(logits, column)
    tail = others.masked_fill(kept.sum(-1) == logits.shape[-1], -INF)
    chosen = chosen.masked_fill(~kept, -INF)
    # The total from its parts: the only pass over [N, M], forward and backward, is the tail's.
    total = torch.cat([chosen, tail.unsqueeze(-1)], -1).logsumexp(-1)
    return Buckets(kept, chosen - total.unsqueeze(-1), tail - total)


class _Split(torch.autograd.Function):
    """Logits [N, M] at the columns [N, K], and the log of the sum over the other columns [N].

    By hand, for autograd would make three gradients [N, M] of it and add them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        chosen = logits.gather(-1, column.clamp(max=size - 1))
        # One column more takes the writes of ids that the draft lacks. The fill is finite: logsumexp over nothing but
        # -inf would be -inf, and its difference from any other nan.
        lowest = torch.finfo(logits.dtype).min / 2
        others = nn.functional.pad(logits, (0, 1), value=lowest).scatter_(-1, column, lowest)
        tail = others.logsumexp(-1)
        ctx.save_for_backward(others, tail, column)
        return chosen, tail

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_chosen: Tensor, grad_tail: Tensor) -> tuple[Tensor, None]:
        others, tail, column = ctx.saved_tensors
        grad = (others - tail.unsqueeze(-1)).exp_().mul_(grad_tail.unsqueeze(-1))
        return grad.scatter_(-1, column, grad_chosen)[..., :-1], None


def _normalise(log_mass: Tensor) -> Tensor:
    """[N, S]: divided by the total; a row without any mass stays as it is, and no loss counts it."""
    total = log_mass.logsumexp(-1, keepdim=True)
    return log_mass - total.masked_fill(total == -INF, 0.0)
