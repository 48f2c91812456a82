"""The token rule: each drafted token stands its own trial, the first failure ends the round."""

import torch

from decode.draft import Draft, Verdict
from decode.laws import Law
from decode.sampling import draw_uniform
from decode.verifiers.residual import next_token


def verify_tokens(
    draft: Draft,
    target: Law,  # W + 1 rows: at each drafted position, and after the last
    generator: torch.Generator,
) -> Verdict:
    """Accept x ~ q when u q(x) < p(x), u ~ U[0, 1); then draw from norm(max(p - q, 0)), or from p after the last.

    Lossless for chains: what is emitted follows p whatever q is. A draft without laws is made of point masses,
    q(x) = 1. The comparison is strict, so a token with p = 0 is never accepted, not even at u = 0.
    Source: Leviathan et al. 2022, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    width = draft.width
    if draft.law is None and target.is_point:  # greedy on both sides: a trial that needs no luck
        num_accepted = (target.tokens[:width] == draft.tokens).cumprod(0).sum()
        return Verdict(num_accepted, target.tokens.take(num_accepted))  # to index by it would read the device
    uniform = draw_uniform(width + 1, generator)
    drafted = draft.tokens.unsqueeze(-1)  # [W, 1]
    p = target[:width].of(drafted).squeeze(-1)
    needed = uniform[:width] if draft.law is None else uniform[:width] * draft.law.of(drafted).squeeze(-1)
    num_accepted = (needed < p).cumprod(0).sum()
    return Verdict(num_accepted, next_token(draft, target, num_accepted, uniform.new_ones(()), uniform[width]))
