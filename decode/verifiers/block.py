"""The block rule: all drafted tokens stand one trial together, which keeps at least as many of them."""

import torch
from torch import Tensor

from decode.draft import Draft, Verdict
from decode.draws import draw_numbers, draw_uniform
from decode.laws import Law
from decode.verifiers.residual import left_mass, next_number, next_token


def verify_block(
    draft: Draft,
    target: Law,  # W + 1 rows: at each drafted position, and after the last
    generator: torch.Generator,
) -> Verdict:
    """Keep the longest prefix whose coin falls, then draw from norm(max(p_i p - q, 0)) at its end, or from p.

    p_0 = 1, p_i = min(p_{i-1} p(x_i) / q(x_i), 1). The coin of a prefix of i < W tokens falls with
    h_i = S_i / (S_i + 1 - p_i), S_i = sum_x max(p_i p(x) - q(x), 0) at its end; that of the whole block with h_W = p_W.
    Lossless for chains, also where the draft's length was decided along the way by what had been drafted.
    Source: Sun et al. 2024, algorithm 2.
    """
    if target.on_host:
        return _on_host(draft, target, draw_numbers(draft.width + 1, generator))
    return _unread(draft, target, draw_uniform(draft.width + 1, generator))


def _on_host(draft: Draft, target: Law, uniform: list[float]) -> Verdict:
    """The rule in Python numbers, from the longest prefix down. Each tensor operation costs as much as all of these,
    and most rounds need the sum over the vocabulary, if at all, of the one prefix that is kept."""
    width, reach = draft.width, _walk(draft, target)
    for kept in range(width, 0, -1):
        p, coin, mass = reach[kept - 1], uniform[kept - 1], None
        if not coin < p:  # S_i <= p_i, and so h_i <= p_i
            continue
        if kept < width and p < 1:  # p_i = 1 makes h_i = 1
            mass = left_mass(draft, target, kept, p)
            if not coin * (mass.total + 1 - p) < mass.total:
                continue
        return Verdict(kept, next_number(draft, target, kept, p, uniform[width], mass))
    return Verdict(0, next_number(draft, target, 0, 1.0, uniform[width]))


def _walk(draft: Draft, target: Law) -> list[float]:
    """p_1 .. p_W."""
    p = target.numbers_of(draft.listed)
    q = [1.0] * draft.width if draft.law is None else draft.law.numbers_of(draft.listed)
    reach, now = [], 1.0
    for own, drafted in zip(p, q, strict=True):
        now *= own
        now = now / drafted if now < drafted else float(now > 0)
        reach.append(now)
    return reach


def _unread(draft: Draft, target: Law, uniform: Tensor) -> Verdict:
    """The rule in tensors, so that a GPU isn't asked for anything."""
    width, reach = draft.width, _reach(draft, target)
    falls = reach.clone()
    if width > 1:
        inner = reach[:-1]
        excess = target[1:width].excess(inner.unsqueeze(-1), draft.laws[1:]).to(inner.dtype)
        # p_i = 1 and p = q leave 0 / 0: from there on the rest is kept with certainty, so the coin is never asked.
        falls[:-1] = (excess / (excess + 1 - inner)).nan_to_num(nan=1.0)
    kept = uniform[:width] < falls
    index = torch.arange(1, width + 1, device=kept.device)
    num_accepted = torch.cat([index.new_zeros(1), index * kept]).amax()
    scale = torch.cat([reach.new_ones(1), reach]).take(num_accepted)
    return Verdict(num_accepted, next_token(draft, target, num_accepted, scale, uniform[width]))


def _reach(draft: Draft, target: Law) -> Tensor:
    """[W] fp64: p_1 .. p_W. In logarithms the recursion is a walk held below 0: its sum less its running maximum."""
    drafted = draft.tokens.unsqueeze(-1)  # [W, 1]
    p = target[: draft.width].of(drafted).squeeze(-1).double()
    q = draft.laws.of(drafted).squeeze(-1).double()
    walk = (p.log() - q.log()).cumsum(0)
    if draft.width == 0:
        return walk
    return (walk - walk.cummax(0).values.clamp(min=0.0)).exp()
