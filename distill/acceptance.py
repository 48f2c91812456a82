"""How often a target would accept a draft's token, position by position, from their laws; fp64, no gradient.

Teacher-forced: measured at the positions of given text. Real decoding visits other contexts; the judge measures that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.laws import Columns, FullLaw, HeadLaw, Law, SampledLaw, TopKLaw, drawn, likeliest, top_k_buckets

# Positions per fp64 block: [256, V] of a 128k vocabulary is 260 MB.
BLOCK = 256


@dataclass(frozen=True)
class Acceptance:
    """Probabilities of acceptance per position, [N] fp64; a top-k law leaves them between two bounds.

    A sampled law gives an unbiased estimate of the expected one, and tells nothing of the others: they are NaN.
    """

    expected: Tensor  # overlap sum_x min(p, q): a sampling draft
    expected_upper: Tensor
    greedy: Tensor  # p(argmax q): an engine that always drafts the likeliest token
    greedy_upper: Tensor
    agreement: Tensor  # 1 where argmax q = argmax p, else 0: both sides greedy; ties go to the lowest id

    @classmethod
    def joined(cls, parts: Sequence["Acceptance"]) -> "Acceptance":
        """That of several runs of positions, one after the other."""
        return cls(*(torch.cat(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))


@torch.no_grad()
def acceptance(law: Law, draft_logits: Tensor, columns: Columns) -> Acceptance:
    """Acceptance at every position of `draft_logits` [N, M].

    p is the target's whole law, not conditioned on the draft's ids: a draft pays for what it cannot propose.
    With K ids kept, sum_K min(p, q) <= overlap <= sum_K min(p, q) + min(p_tail, q_tail), where both
    tails are of the draft's ids alone.
    """
    starts = range(0, max(len(draft_logits), 1), BLOCK)  # no position still makes one block, of nothing
    blocks = [_measure(_block(law, i), draft_logits[i : i + BLOCK].double(), columns) for i in starts]
    return Acceptance.joined(blocks)


def _block(law: Law, start: int) -> Law:
    """BLOCK positions of `law`, in fp64."""
    part = law.part(start, start + BLOCK)
    parts = vars(part).values()
    return type(part)(*(part.double() if part.is_floating_point() else part for part in parts))


def _measure(law: Law, draft_logits: Tensor, columns: Columns) -> Acceptance:
    if isinstance(law, SampledLaw):
        return _estimated(law, draft_logits, columns)
    choice = columns.ids[draft_logits.argmax(-1)]  # columns ascend by id
    agreement = (choice == likeliest(law)).double()
    if isinstance(law, TopKLaw):
        return Acceptance(*_top_k(law, draft_logits, columns), agreement)
    return Acceptance(*_full(law, draft_logits, columns), agreement)


Bounds = tuple[Tensor, Tensor, Tensor, Tensor]
"""Expected acceptance and its upper bound, greedy acceptance and its upper bound: [N] each."""


def _full(law: FullLaw | HeadLaw, draft_logits: Tensor, columns: Columns) -> Bounds:
    q = draft_logits.softmax(-1)
    p = law.log_probs.index_select(-1, columns.ids).exp()
    overlap = torch.minimum(p, q).sum(-1)
    greedy = p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)
    return overlap, overlap, greedy, greedy


def _estimated(law: SampledLaw, draft_logits: Tensor, columns: Columns) -> Acceptance:
    """The mean over draws of mass * min(1, q/p), which is sum_x min(p, q) over the draft's ids in expectation."""
    log_q = drawn(law, draft_logits, columns)[1]
    ratio = (log_q - law.log_probs).clamp(max=0.0).exp()  # 1 where log p is -inf, and so is the mass
    expected = law.log_mass.exp() * ratio.mean(-1)
    unknown = torch.full_like(expected, torch.nan)
    return Acceptance(expected, expected, unknown, unknown, unknown)


def _top_k(law: TopKLaw, draft_logits: Tensor, columns: Columns) -> Bounds:
    buckets = top_k_buckets(law, draft_logits, columns)
    overlap = torch.minimum(law.log_probs, buckets.log_q).exp().sum(-1)
    tail = torch.minimum(law.log_tail, buckets.log_q_tail).exp()
    choice = columns.ids[draft_logits.argmax(-1, keepdim=True)]  # [N, 1]
    greedy = law.log_probs.masked_fill(law.ids != choice, -torch.inf).exp().sum(-1)
    # Beyond the K likeliest, one id of the draft has at most the least of theirs, and at most the whole tail.
    beyond = torch.minimum(law.log_probs.amin(-1), law.log_tail).exp()
    greedy_upper = torch.where((law.ids == choice).any(-1), greedy, beyond)
    return overlap, overlap + tail, greedy, greedy_upper
