"""Losses and their gradients by loops over numbers: the slow twin of distill/losses.py."""

import math
from collections.abc import Callable

Probs = list[float]
BETA, ETA = 0.5, 3.0


def softmax(logits: list[float]) -> Probs:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def mixture(p: Probs, q: Probs) -> Probs:
    return [BETA * a + (1 - BETA) * b for a, b in zip(p, q, strict=True)]


def forward_kl(p: Probs, q: Probs) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jensen_shannon(p: Probs, q: Probs) -> float:
    return BETA * forward_kl(p, mixture(p, q)) + (1 - BETA) * forward_kl(q, mixture(p, q))


def overlap(p: Probs, q: Probs) -> float:
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def kl_share(p: Probs, q: Probs) -> float:
    return math.exp(-ETA * overlap(p, q))


def adaptive(p: Probs, q: Probs) -> float:
    share = kl_share(p, q)
    return share * forward_kl(p, q) + (1 - share) * (1 - overlap(p, q))


VALUES: dict[str, Callable[[Probs, Probs], float]] = {
    "forward_kl": forward_kl,
    "reverse_kl": lambda p, q: forward_kl(q, p),
    "jensen_shannon": jensen_shannon,
    "total_variation": lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "log_acceptance": lambda p, q: -math.log(overlap(p, q)),
    "adaptive": adaptive,
}

# The derivative by q of one bucket, as the formulas give it; (p, q) are the laws, a and b their values there.
SLOPES: dict[str, Callable[[Probs, Probs, float, float], float]] = {
    "forward_kl": lambda p, q, a, b: -a / b,
    "reverse_kl": lambda p, q, a, b: math.log(b / a) + 1,
    "jensen_shannon": lambda p, q, a, b: (1 - BETA) * math.log(b / (BETA * a + (1 - BETA) * b)),
    "total_variation": lambda p, q, a, b: math.copysign(0.5, b - a),
    "log_acceptance": lambda p, q, a, b: -(b < a) / overlap(p, q),
    "adaptive": lambda p, q, a, b: -kl_share(p, q) * a / b + (1 - kl_share(p, q)) * math.copysign(0.5, b - a),
}


def buckets_of(kept: list[int] | None, draft_ids: list[int]) -> list[list[int]]:
    """The draft's ids in buckets: each kept one alone, the others together; all alone where nothing was cut."""
    if kept is None:
        return [[i] for i in draft_ids]
    rest = [i for i in draft_ids if i not in kept]
    return [[i] for i in kept if i in draft_ids] + ([rest] if rest else [])


def divergence(name: str, p: Probs, q: Probs, buckets: list[list[int]], draft_ids: list[int]) -> tuple[float, Probs]:
    """Value, and gradient by the draft's logits. p is over all ids and gets conditioned on the draft's."""
    column = {token: index for index, token in enumerate(draft_ids)}
    inside = sum(p[i] for i in draft_ids)
    law_p = [sum(p[i] for i in bucket) / inside for bucket in buckets]
    law_q = [sum(q[column[i]] for i in bucket) for bucket in buckets]
    slope = {i: SLOPES[name](law_p, law_q, a, b) for a, b, bs in zip(law_p, law_q, buckets, strict=True) for i in bs}
    mean = sum(q[column[i]] * slope[i] for i in draft_ids)
    return VALUES[name](law_p, law_q), [q[column[i]] * (slope[i] - mean) for i in draft_ids]


def cross_entropy(token: int, q: Probs, draft_ids: list[int]) -> tuple[float, Probs]:
    """-log q of a token, and its gradient; nothing where the draft lacks it."""
    if token not in draft_ids:
        return 0.0, [0.0] * len(q)
    column = draft_ids.index(token)
    return -math.log(q[column]), [b - (i == column) for i, b in enumerate(q)]
