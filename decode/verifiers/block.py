"""The block rule: all drafted tokens stand one trial together, which keeps at least as many of them."""

import torch
from torch import Tensor

from decode.draft import Draft, Verdict
from decode.laws import Law
from decode.sampling import draw_uniform
from decode.verifiers.residual import next_token


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
    width = draft.width
    uniform = draw_uniform(width + 1, generator)
    reach = _reach(draft, target)
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
