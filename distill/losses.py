"""Losses per position, between a target's law and a draft's; masking, weights and the mean are elsewhere.

A divergence takes log p (target) and log q (draft), both [N, S] and normalised, as laws.align makes them, with -inf
where a probability is 0 or a bucket does not exist; it returns [N], its true value: 0 at p = q, where the gradient is
0 too. Every value and gradient is finite, but for a value of +inf that is one in truth.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distill.laws import Columns, Law, SampledLaw, align, drawn, likeliest, tempered

# exp() of it is 0, and sums and differences of such numbers are finite.
LOWEST = -1e30
# Nats. What reverse_kl takes for log p where p = 0 < q: in truth infinite, which no gradient survives.
LOG_OF_ZERO = -1000.0
# Two log-probabilities are equal where they differ by no more than rounding: so many machine epsilons.
ROUNDING = 128


@dataclass(frozen=True)
class Pair:
    """What a loss may read, at N positions."""

    law: Law
    """The target's, of logits / temperature."""
    logits: Tensor  # [N, M], the draft's own, not yet divided
    columns: Columns
    next_ids: Tensor  # [N] int64: the data's next token
    temperature: float = 1.0

    @cached_property
    def aligned(self) -> tuple[Tensor, Tensor]:
        """log p and log q over the same buckets, each [N, S]."""
        return align(self.law, tempered(self.logits, self.temperature), self.columns)

    @property
    def overlap(self) -> Tensor:  # [N]
        """sum of min(p, q) over the buckets; of ids that were drawn, its unbiased estimate."""
        if isinstance(self.law, SampledLaw):
            log_p, log_q = drawn(self.law, tempered(self.logits, self.temperature), self.columns)
            return (log_q - log_p).clamp(max=0.0).exp().mean(-1)
        return log_overlap(*self.aligned).exp()

    def log_q(self, ids: Tensor, temperature: float = 1.0) -> Tensor:  # [N]
        """The draft's log-probability of one id per position; a constant 0 where it has no such id."""
        logits = tempered(self.logits, temperature)
        size = logits.shape[-1]
        column = self.columns.column_of[ids]
        chosen = logits.gather(-1, column.clamp(max=size - 1).unsqueeze(-1)).squeeze(-1)
        return (chosen - logits.logsumexp(-1)).masked_fill(column == size, 0.0)


LossFunction = Callable[..., Tensor]


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


def estimated_forward_kl(
    log_p: Tensor,  # [N, S], of S ids drawn from p
    log_q: Tensor,  # [N, S]
) -> Tensor:  # [N], nats
    """The mean over draws of r - 1 - log r, r = q/p: an estimate of KL(p||q) (Schulman 2020).

    Under p the mean of r - 1 is 0 whatever q is, so value and gradient are unbiased; each draw's value is >= 0, and 0
    with gradient 0 where q = p, so the estimate has no noise there, unlike -log q. Its variance is that of r - log r:
    an r beyond R is met with a probability below 1/R, but then counts for R. Where fp32 overflows, beyond e^88, it is
    infinite.
    """
    log_ratio = log_q - log_p
    return (log_ratio.expm1() - log_ratio).mean(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:  # [N], nats
    """KL(q||p) = sum_x q(x) (log q(x) - log p(x)): the draft must not say what the target would not.

    It settles on the likeliest of what the target may say. Where p = 0 < q, p counts as e^-1000, so that the gradient
    drives q away from it.
    """
    log_p, log_q = log_p.masked_fill(log_p == -torch.inf, LOG_OF_ZERO), log_q.clamp_min(LOWEST)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:  # [N], nats
    """beta KL(p||m) + (1 - beta) KL(q||m), m = beta p + (1 - beta) q (Lin 1991; as generalised by Agarwal et al. 2023).

    Bounded by the entropy of (beta, 1 - beta). At beta 0 and 1 it would vanish; what it tends to there, divided by
    beta or 1 - beta, is returned instead: the forward and the reverse KL.
    """
    if beta in (0, 1):
        return reverse_kl(log_p, log_q) if beta else forward_kl(log_p, log_q)
    log_p, log_q = log_p.clamp_min(LOWEST), log_q.clamp_min(LOWEST)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:  # [N], in [0, 1]
    """sum_x |p(x) - q(x)| / 2 = 1 - overlap: how often a sampled draft is rejected (Leviathan et al. 2022).

    Its gradient is at most q: where a draft gives next to nothing to the target's tokens it learns next to nothing,
    so it suits a draft that is good already.
    """
    return (_settled(log_p, log_q).exp() - log_q.exp()).abs().sum(-1) / 2


def log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:  # [N], nats
    """-log overlap, overlap = sum_x min(p(x), q(x)) (Samarin et al. 2026): 0 at p = q.

    The gradient of total variation divided by the overlap, so that bad positions count the more. In log space, exact
    however small the overlap; laws that share nothing give +inf, and gradient 0.
    """
    return -log_overlap(_settled(log_p, log_q), log_q)


def adaptive(log_p: Tensor, log_q: Tensor, eta: float = 3.0) -> Tensor:  # [N]
    """w KL(p||q) + (1 - w) TV(p, q), with w = exp(-eta overlap) of the position (Samarin et al. 2026).

    KL leads while a draft is poor, total variation once it is good. w is a constant to the gradient.
    """
    weight = (-eta * log_overlap(log_p.detach(), log_q.detach()).exp()).exp()
    return weight * forward_kl(log_p, log_q) + (1 - weight) * total_variation(log_p, log_q)


def log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:  # [N]
    """log sum_x min(p(x), q(x)); -inf with gradient 0 where no x has both."""
    lower = torch.minimum(log_p, log_q)
    top = lower.detach().amax(-1, keepdim=True)
    nothing = top == -torch.inf
    total = (lower - top.masked_fill(nothing, 0.0)).exp().sum(-1)
    nothing = nothing.squeeze(-1)
    return torch.where(nothing, -torch.inf, total.masked_fill(nothing, 1.0).log() + top.squeeze(-1))


def _settled(log_p: Tensor, log_q: Tensor) -> Tensor:  # [N, S]
    """log p, but log q where the two differ by rounding: a kink at p = q would make a gradient of its noise."""
    near = (log_p - log_q.detach()).abs() <= ROUNDING * torch.finfo(log_q.dtype).eps
    return torch.where(near, log_q.detach(), log_p)


def target_argmax(pair: Pair) -> Tensor:  # [N], nats
    """-log q of the target's likeliest token: for engines that decode greedily.

    At the draft's own temperature 1, whatever the law's is. A token that the draft lacks gives value and gradient 0.
    """
    return -pair.log_q(likeliest(pair.law))


def data(pair: Pair) -> Tensor:  # [N], nats
    """-log q of the data's next token: ordinary language modelling, without the target.

    At temperature 1, whatever the law's is. A token that the draft lacks gives value and gradient 0.
    """
    return -pair.log_q(pair.next_ids)


def divergence(function: LossFunction, estimate: LossFunction | None = None) -> LossFunction:
    """`function` of log p and log q as a loss of a Pair: 0 where the draft has none of the ids that the target may say.

    There p, conditioned on the draft's ids, is 0/0. `estimate` takes the place of `function` where ids were drawn.
    """

    def loss(pair: Pair, **options: float) -> Tensor:
        if isinstance(pair.law, SampledLaw) and estimate is not None:
            return estimate(*drawn(pair.law, tempered(pair.logits, pair.temperature), pair.columns))
        log_p, log_q = pair.aligned
        if pair.columns.complete:
            return function(log_p, log_q, **options)
        return function(log_p, log_q, **options).masked_fill(log_p.amax(-1) == -torch.inf, 0.0)

    return loss


LOSSES: dict[str, LossFunction] = {
    "forward_kl": divergence(forward_kl, estimated_forward_kl),
    "reverse_kl": divergence(reverse_kl),
    "jensen_shannon": divergence(jensen_shannon),
    "total_variation": divergence(total_variation),
    "log_acceptance": divergence(log_acceptance),
    "adaptive": divergence(adaptive),
    "target_argmax": target_argmax,
    "data": data,
}
