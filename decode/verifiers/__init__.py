"""Acceptance rules. Each is pure: (draft, target probabilities, generator) -> verdict; no model, no temperature."""

from collections.abc import Callable

import torch
from torch import Tensor

from decode.draft import Draft, Verdict
from decode.verifiers.token import verify_tokens

Verifier = Callable[[Draft, Tensor, torch.Generator], Verdict]

# Every rule here leaves the target's law unchanged.
VERIFIERS: dict[str, Verifier] = {
    "token": verify_tokens,
}
