"""The token after the last accepted one: what is left of the target's law, or that law after a whole block."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.draws import RunningMass, draw, draw_or
from decode.laws import Law


def next_token(
    draft: Draft,
    target: Law,  # W + 1 rows
    num_accepted: Tensor,  # [] int64
    scale: Tensor,  # [] of the target's law at that position; 1 for the token rule
    uniform: Tensor,  # [] fp64 in [0, 1)
) -> Tensor:  # [] int64
    """Draw from norm(max(scale p - q, 0)) after a rejection, and from p behind the last drafted token.

    p = q leaves nothing but rounding; a rejection then has probability 0 and any law would do: p.
    A GPU isn't asked how many were accepted: both cases are worked out on one row.
    """
    if target.is_point:
        return target.tokens.take(num_accepted)  # all that can be left of a point mass
    at, uniform = num_accepted.reshape(1), uniform.reshape(1)
    p = target.row(at)
    if draft.width == 0:
        return p.token_of(draw(p.probs, uniform)).squeeze(0)
    q = draft.laws.row(at.clamp(max=draft.width - 1))
    rejected = at < draft.width
    taken = Law(q.probs * rejected, q.ids)
    weights = p.residual(torch.where(rejected, scale, 1.0).unsqueeze(-1), taken)
    return p.token_of(draw_or(weights, p.probs, uniform)).squeeze(0)


def left_mass(draft: Draft, target: Law, num_accepted: int, scale: float) -> RunningMass:
    """What `next_token` draws from, on the host: max(scale p - q, 0), or p behind the last drafted token."""
    p = target[num_accepted : num_accepted + 1]
    if num_accepted == draft.width:
        return RunningMass(p.array[0])
    return RunningMass(p.residual(scale, draft.laws[num_accepted : num_accepted + 1]).numpy()[0])


def next_number(
    draft: Draft, target: Law, num_accepted: int, scale: float, uniform: float, mass: RunningMass | None = None
) -> int:
    """`next_token` on the host, in Python numbers. `mass`: of `left_mass`, where it is known already."""
    if target.is_point:
        return target[num_accepted:].number_of(0)
    if mass is None:
        mass = left_mass(draft, target, num_accepted, scale)
    if not mass.total > 0:
        mass = RunningMass(target.array[num_accepted])
    return target[num_accepted:].number_of(mass.column(uniform))
