"""The token rule: each drafted token stands its own trial, the first failure ends the round."""

import torch

from decode.draft import Draft, Verdict
from decode.draws import draw_numbers, draw_uniform
from decode.laws import Law
from decode.verifiers.residual import next_number, next_token


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
    if draft.law is None and target.is_point:  # greedy on both sides: a trial that needs no luck
        return _compare(draft, target)
    if target.on_host:
        return _on_host(draft, target, draw_numbers(draft.width + 1, generator))
    return _unread(draft, target, draw_uniform(draft.width + 1, generator))


def _compare(draft: Draft, target: Law) -> Verdict:
    known = target.known
    if known is None:
        num_accepted = (target.tokens[: draft.width] == draft.tokens).cumprod(0).sum()
        return Verdict(num_accepted, target.tokens.take(num_accepted))  # to index by it would read the device
    kept = next((at for at, token in enumerate(draft.listed) if token != known[at]), draft.width)
    return Verdict(kept, known[kept])


def _on_host(draft: Draft, target: Law, uniform: list[float]) -> Verdict:
    """The rule in Python numbers: right behind a forward, which sweeps the caches, one tensor operation costs more."""
    p = target.numbers_of(draft.listed)
    q = [1.0] * draft.width if draft.law is None else draft.law.numbers_of(draft.listed)
    kept = next((at for at in range(draft.width) if not uniform[at] * q[at] < p[at]), draft.width)
    return Verdict(kept, next_number(draft, target, kept, 1.0, uniform[draft.width]))


def _unread(draft: Draft, target: Law, uniform: torch.Tensor) -> Verdict:
    """The rule in tensors, so that a GPU isn't asked for anything."""
    width = draft.width
    drafted = draft.tokens.unsqueeze(-1)  # [W, 1]
    p = target[:width].of(drafted).squeeze(-1)
    needed = uniform[:width] if draft.law is None else uniform[:width] * draft.law.of(drafted).squeeze(-1)
    num_accepted = (needed < p).cumprod(0).sum()
    return Verdict(num_accepted, next_token(draft, target, num_accepted, uniform.new_ones(()), uniform[width]))
