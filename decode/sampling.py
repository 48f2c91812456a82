"""From logits to probabilities to tokens. Greedy is a point mass made here, not a second algorithm."""

import math

import torch
from torch import Tensor

from decode.config import SamplingConfig

# Candidates for a nucleus that are sorted first.
FIRST_CANDIDATES = 512


def probabilities(
    logits: Tensor,  # [..., V] any float dtype
    config: SamplingConfig,
) -> Tensor:  # [..., V], fp32 (fp64 for fp64 logits)
    """The law that a token is drawn from: temperature, top-k, top-p, min-p, in transformers' order.

    At temperature 0 all mass is on the argmax, ties to the lowest id. A row with NaN yields NaN or a point mass
    that `is_healthy` would have refused.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.greedy:
        return torch.zeros_like(scores).scatter_(-1, argmax(scores).unsqueeze(-1), 1.0)
    # The largest score becomes 0 before the division, so that no temperature, however small, overflows.
    scores = (scores - scores.amax(-1, keepdim=True)) / config.temperature
    if 0 < config.top_k < scores.shape[-1]:
        kth = scores.topk(config.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if config.top_p < 1:
        scores = _keep_nucleus(scores, config.top_p)
    if config.min_p > 0:
        scores = scores.masked_fill(scores < math.log(config.min_p), -math.inf)
    return scores.softmax(-1)


def argmax(scores: Tensor) -> Tensor:
    """Index of the largest score along the last axis, the lowest one among equals."""
    return scores.max(-1).indices


def _keep_nucleus(
    scores: Tensor,  # [..., V]
    top_p: float,
) -> Tensor:
    """Keep the likeliest tokens until their mass reaches `top_p`, the lower id first among equals; at least one.

    A sort of the whole vocabulary costs more than the model's head. So only the likeliest candidates are sorted, and
    more of them where the nucleus reaches down to the last one. A GPU sorts all: asking it first would cost a read.
    """
    size = scores.shape[-1]
    log_total = scores.logsumexp(-1, keepdim=True)
    count = min(FIRST_CANDIDATES, size) if scores.device.type == "cpu" else size
    while True:
        values, index = _likeliest(scores, count)
        mass = (values - log_total).exp()
        beyond = mass.cumsum(-1) - mass >= top_p
        beyond[..., 0] = False
        if count == size or bool((beyond & (values > values[..., -1:])).any(-1).all()):
            kept = values.masked_fill(beyond, -math.inf)
            return torch.full_like(scores, -math.inf).scatter_(-1, index, kept)
        count = min(8 * count, size)


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores and their ids, [..., count] each, in falling order, equals by rising id."""
    index = scores.topk(count, sorted=False).indices.sort(-1).values
    values, order = scores.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return values, index.gather(-1, order)


def draw(
    weights: Tensor,  # [..., V] not negative, of any positive sum
    uniform: Tensor,  # [...] fp64 in [0, 1)
) -> Tensor:  # [...] int64
    """One token a row, by inverting the distribution function; a token of weight 0 is never drawn."""
    return draw_from_mass(running_mass(weights), uniform)


def running_mass(weights: Tensor) -> Tensor:  # [..., V] -> [..., V] fp64
    """Running sums of weights, in fp64: in fp32 the tail of a large vocabulary would be rounding."""
    return weights.cumsum(-1, dtype=torch.float64)


def draw_from_mass(
    mass: Tensor,  # [..., V] running sums
    uniform: Tensor,  # [...] fp64 in [0, 1)
) -> Tensor:  # [...] int64
    """See draw."""
    total = mass[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not reach past the last token
    point = torch.minimum(uniform.unsqueeze(-1) * total, below_total)
    return torch.searchsorted(mass, point, right=True).squeeze(-1)


def draw_uniform(count: int, generator: torch.Generator) -> Tensor:
    """`count` numbers in [0, 1), fp64, on the generator's device."""
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)


def is_healthy(logits: Tensor) -> Tensor:
    """[] bool: every row has a finite largest logit, so that it defines a law."""
    return logits.amax(-1).isfinite().all()
