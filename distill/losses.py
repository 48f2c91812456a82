"""Losses per position, between two laws on one support; masking and the mean are elsewhere.

A loss takes log p (target) and log q (draft), both [N, S] and normalised, as laws.align makes them, and returns [N].
"""

from collections.abc import Callable

import torch
from torch import Tensor

LossFunction = Callable[[Tensor, Tensor], Tensor]


def forward_kl(
    log_p: Tensor,  # [N, S], -inf where p = 0
    log_q: Tensor,  # [N, S]
) -> Tensor:  # [N], nats
    """KL(p||q) = sum_x p(x) (log p(x) - log q(x)): its true value, 0 at p = q (Kullback and Leibler 1951).

    The draft must cover all that the target may say, which is what acceptance asks of a sampling draft. From top-k
    buckets it is a lower bound of the full divergence (data processing), and 0 where the draft is perfect on them.
    It is infinite where q = 0 < p; places with p = 0 give value and gradient 0.
    """
    log_ratio = torch.where(log_p > -torch.inf, log_p - log_q, 0.0)
    return (log_p.exp() * log_ratio).sum(-1)


LOSSES: dict[str, LossFunction] = {
    "forward_kl": forward_kl,
}
