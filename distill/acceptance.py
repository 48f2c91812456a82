"""How often a target would accept a draft's token, position by position, from their laws; fp64, no gradient.

Teacher-forced: measured at the positions of given text. Real decoding visits other contexts; the judge measures that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.laws import Columns, FullLaw, Law, TopKLaw, top_k_buckets

# Positions per fp64 block: [256, V] of a 128k vocabulary is 260 MB.
BLOCK = 256


@dataclass(frozen=True)
class Acceptance:
    """Probabilities of acceptance per position, [N] fp64; a top-k law leaves them between two bounds."""

    expected: Tensor  # overlap sum_x min(p, q): a sampling draft
    expected_upper: Tensor
    greedy: Tensor  # p(argmax q): an engine that always drafts the likeliest token
    greedy_upper: Tensor


@torch.no_grad()
def acceptance(law: Law, draft_logits: Tensor, columns: Columns) -> Acceptance:
    """Acceptance at every position of `draft_logits` [N, M].

    p is the target's whole law, not conditioned on the draft's ids: a draft pays for what it cannot propose.
    With K ids kept, sum_K min(p, q) <= overlap <= sum_K min(p, q) + min(p_tail, q_tail), where both
    tails are of the draft's ids alone.
    """
    starts = range(0, max(len(draft_logits), 1), BLOCK)  # no position still makes one block, of nothing
    blocks = [_measure(_block(law, i), draft_logits[i : i + BLOCK].double(), columns) for i in starts]
    return Acceptance(*torch.cat(blocks, dim=1).unbind())


def _block(law: Law, start: int) -> Law:
    """BLOCK positions of `law`, in fp64."""
    parts = [tensor[start : start + BLOCK] for tensor in vars(law).values()]
    return type(law)(*(part.double() if part.is_floating_point() else part for part in parts))


def _measure(law: Law, draft_logits: Tensor, columns: Columns) -> Tensor:  # [4, N]
    if isinstance(law, FullLaw):
        return _full(law, draft_logits, columns)
    return _top_k(law, draft_logits, columns)


def _full(law: FullLaw, draft_logits: Tensor, columns: Columns) -> Tensor:  # [4, N]
    q = draft_logits.softmax(-1)
    p = law.log_probs.index_select(-1, columns.ids).exp()
    overlap = torch.minimum(p, q).sum(-1)
    greedy = p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.stack([overlap, overlap, greedy, greedy])


def _top_k(law: TopKLaw, draft_logits: Tensor, columns: Columns) -> Tensor:  # [4, N]
    buckets = top_k_buckets(law, draft_logits, columns)
    overlap = torch.minimum(law.log_probs, buckets.log_q).exp().sum(-1)
    tail = torch.minimum(law.log_tail, buckets.log_q_tail).exp()
    choice = columns.ids[draft_logits.argmax(-1, keepdim=True)]  # [N, 1]
    greedy = law.log_probs.masked_fill(law.ids != choice, -torch.inf).exp().sum(-1)
    # Beyond the K likeliest, one id of the draft has at most the least of theirs, and at most the whole tail.
    beyond = torch.minimum(law.log_probs.amin(-1), law.log_tail).exp()
    greedy_upper = torch.where((law.ids == choice).any(-1), greedy, beyond)
    return torch.stack([overlap, overlap + tail, greedy, greedy_upper])
