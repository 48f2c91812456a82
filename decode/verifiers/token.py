"""The token rule: each drafted token stands its own trial, the first failure ends the round."""

import torch
from torch import Tensor

from decode.draft import Draft, Verdict
from decode.sampling import draw_from_mass, draw_uniform, running_mass


def verify_tokens(
    draft: Draft,
    target_probs: Tensor,  # [W + 1, V] law of the target at each drafted position, and after the last
    generator: torch.Generator,
) -> Verdict:
    """Accept x ~ q when u q(x) < p(x), u ~ U[0, 1); then draw from norm(max(p - q, 0)), or from p after the last.

    Lossless for chains: what is emitted follows p whatever q is. A draft without probabilities is a point mass,
    q(x) = 1. The comparison is strict, so a token with p = 0 is never accepted, not even at u = 0.
    Source: Leviathan et al. 2022, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    width = draft.width
    uniform = draw_uniform(width + 1, generator)
    drafted = draft.tokens.unsqueeze(-1)  # [W, 1]
    p = target_probs[:width].gather(-1, drafted).squeeze(-1)
    q = torch.ones_like(p) if draft.probs is None else draft.probs.gather(-1, drafted).squeeze(-1)
    accepted = uniform[:width] * q < p
    num_accepted = accepted.long().cumprod(0).sum()
    return Verdict(num_accepted, draw_from_mass(_next_mass(draft, target_probs, num_accepted), uniform[width]))


def _next_mass(draft: Draft, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    """[V] running sums of what the next token is drawn from: the residual, or p behind the last drafted token.

    Few operations on whole rows: after a forward the caches are cold, and each costs as much as a small layer.
    """
    p = target_probs.index_select(0, num_accepted.reshape(1)).squeeze(0)
    if draft.width == 0:
        return running_mass(p)
    mass = running_mass(_residual(draft, p.clone(), num_accepted))
    # p = q leaves nothing but rounding; a rejection then has probability 0 and any law would do: p.
    if mass.device.type != "cpu":  # to ask the device would be a second read of the round
        return torch.where(mass[-1] > 0, mass, running_mass(p))
    return mass if mass[-1] > 0 else running_mass(p)


def _residual(
    draft: Draft,
    p: Tensor,  # [V], is overwritten
    num_accepted: Tensor,
) -> Tensor:
    """[V] max(p - q, 0), unnormalised; behind the last drafted token q is 0, which leaves p."""
    rejected = (num_accepted < draft.width).to(p.dtype)
    at = num_accepted.clamp(max=draft.width - 1).reshape(1)
    if draft.probs is None:
        return p.index_add_(0, draft.tokens.index_select(0, at), -rejected.reshape(1)).clamp_(min=0.0)
    q = draft.probs.index_select(0, at).squeeze(0).to(p.dtype)
    return p.addcmul_(q, rejected, value=-1.0).clamp_(min=0.0)
