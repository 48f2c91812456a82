"""Acceptance rules. Each is pure: (draft, target's laws, generator) -> verdict; no model, no temperature."""

from collections.abc import Callable

import torch

from decode.config import DecodeConfig
from decode.draft import Draft, Verdict
from decode.laws import Law
from decode.verifiers.block import verify_block
from decode.verifiers.token import verify_tokens

Verifier = Callable[[Draft, Law, torch.Generator], Verdict]

# Every rule here leaves the target's law unchanged.
VERIFIERS: dict[str, Verifier] = {
    "token": verify_tokens,
    "block": verify_block,
}


def verifier_of(config: DecodeConfig) -> Verifier:
    """The rule that settings, whose sampling is stated, ask for."""
    sampling = config.draft_sampling or config.sampling
    point_masses = sampling is None or sampling.greedy
    return VERIFIERS[config.verifier if config.verifier != "auto" else "token" if point_masses else "block"]
