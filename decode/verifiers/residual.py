"""The token after the last accepted one: what is left of the target's law, or that law after a whole block."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.laws import Law
from decode.sampling import draw, draw_or


def next_token(
    draft: Draft,
    target: Law,  # W + 1 rows
    num_accepted: Tensor,  # [] int64
    scale: Tensor,  # [] of the target's law at that position; 1 for the token rule
    uniform: Tensor,  # [] fp64 in [0, 1)
) -> Tensor:  # [] int64
    """Draw from norm(max(scale p - q, 0)) after a rejection, and from p behind the last drafted token.

    p = q leaves nothing but rounding; a rejection then has probability 0 and any law would do: p.
    """
    if target.is_point:
        return target.tokens.take(num_accepted)  # all that can be left of a point mass
    uniform = uniform.reshape(1)
    if target.probs.device.type != "cpu":
        return _unread(draft, target, num_accepted.reshape(1), scale, uniform)
    at = int(num_accepted)
    p = target[at : at + 1]
    if at >= draft.width:
        return p.token_of(draw(p.probs, uniform)).squeeze(0)
    weights = p.residual(scale, draft.laws[at : at + 1])
    return p.token_of(draw_or(weights, p.probs, uniform)).squeeze(0)


def _unread(draft: Draft, target: Law, at: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
    """The same without asking the device how many were accepted: both cases are worked out on one row."""
    p = target.row(at)
    if draft.width == 0:
        return p.token_of(draw(p.probs, uniform)).squeeze(0)
    q = draft.laws.row(at.clamp(max=draft.width - 1))
    rejected = at < draft.width
    taken = Law(q.probs * rejected, q.ids)
    weights = p.residual(torch.where(rejected, scale, 1.0).unsqueeze(-1), taken)
    return p.token_of(draw_or(weights, p.probs, uniform)).squeeze(0)
