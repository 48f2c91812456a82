"""Tells ties from faults: why a greedy text differs from the one that plain decoding gives.

Two near-equal logits may swap places when a token is computed in a block and not alone. Such a tie is harmless, and
more likely the coarser the dtype. Whatever is not a tie is a fault, of one method or of the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decode.config import DecodeConfig
from decode.models import LoadedModel
from decode.prepare import ending_ids
from decode.processors import Processors

# Over all layers, rounding moves logits by some units in the last place of the largest of them. A gap may be such
# rounding up to this share of the largest absolute logit: about 80 units of fp32, 10 of fp16, 4 of bf16, in which one
# unit is a lot. Norms and angles of fp64 models are computed in fp32 by most of transformers' models.
RELATIVE_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Mismatch:
    """Where two greedy texts part."""

    position: int  # of the first token that differs, among the new ones
    expected: int | None  # plain decoding's token; None: it had ended there
    found: int | None
    gap: float | None  # how far the less likely of the two lies below the largest logit; None where one text had ended
    bound: float | None  # what a gap may be and still be a tie

    @property
    def kind(self) -> Literal["tie", "difference"]:
        return "tie" if self.gap is not None and self.bound is not None and self.gap <= self.bound else "difference"


@torch.inference_mode()
def find_mismatch(
    target: LoadedModel,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    config: DecodeConfig | None = None,
) -> Mismatch | None:
    """Compare two greedy continuations of `prompt`; None where they are equal.

    The logits are those of the target as it was loaded, over the whole text and without a cache, after the penalties
    and bans of `config`. Only the first difference is judged: after it the texts answer different contexts.
    """
    if list(expected) == list(found):
        return None
    same = min(len(expected), len(found))
    at = next((i for i in range(same) if expected[i] != found[i]), same)
    if at == same:
        ended = (expected[at] if at < len(expected) else None, found[at] if at < len(found) else None)
        return Mismatch(at, *ended, gap=None, bound=None)
    logits = _logits_after(target, [*prompt, *expected[:at]], len(prompt), config)
    finite = logits[logits.isfinite()]
    gap = float(logits.max() - torch.minimum(logits[expected[at]], logits[found[at]]))
    bound = RELATIVE_BOUNDS[target.model.dtype] * float(finite.abs().max())
    return Mismatch(at, expected[at], found[at], gap, bound)


def _logits_after(
    target: LoadedModel, ids: list[int], prompt_length: int, config: DecodeConfig | None
) -> Tensor:  # [V] fp32, or fp64 for such models
    history = torch.tensor(ids, device=target.device)
    logits = target.model(input_ids=history.unsqueeze(0), use_cache=False, logits_to_keep=1).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config is not None and config.sampling is not None:
        process = Processors.of(config.sampling, prompt_length, ending_ids(target, config), device=target.device)
        logits = logits if process is None else process(logits, history)
    return logits[-1]
