"""The speculative loop: propose, score, verify, commit."""

from collections.abc import Iterator

import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.draft import Draft, Round, Verdict
from decode.draft_length import DraftLength
from decode.errors import unhealthy
from decode.proposers import Proposer
from decode.sampling import is_healthy, probabilities
from decode.session import Session
from decode.stopping import Stopping
from decode.verifiers import Verifier


@torch.inference_mode()
def decode_rounds(
    prompt: Tensor,  # [1, n] on the target's device
    target: Session,
    proposer: Proposer,
    verify: Verifier,
    draft_length: DraftLength,
    sampling: SamplingConfig,
    stopping: Stopping,
    generator: torch.Generator,
) -> Iterator[Round]:
    """Rounds until `stopping` has a reason. The first round also reads the prompt, and already verifies a draft.

    Raises DraftsmithError when the target or the draft yields NaN or infinite logits.
    """
    context = prompt
    while stopping.reason is None:
        length = context.shape[1]
        draft = proposer.propose(context, min(draft_length.limit(), stopping.room - 1))
        scored = torch.cat([context, draft.tokens.unsqueeze(0)], dim=1)
        logits = target.extend(scored, keep=draft.width + 1)
        verdict = verify(draft, probabilities(logits, sampling), generator)
        drafted, accepted, next_token = _read(draft, verdict, is_healthy(logits))
        emitted = stopping.cut([*drafted[:accepted], next_token])
        kept = min(accepted, len(emitted))
        target.rewind(length + kept)
        proposer.rewind(length + kept)
        draft_length.update(draft.width, kept)
        context = torch.cat([context, context.new_tensor([emitted])], dim=1)
        ended_inside = kept == len(emitted)
        yield Round(length, drafted[:kept] if ended_inside else drafted, kept, emitted)


def _read(draft: Draft, verdict: Verdict, healthy: Tensor) -> tuple[list[int], int, int]:
    """The round's one read from the device: drafted tokens, how many are accepted, the token after them."""
    draft_healthy = torch.ones_like(healthy) if draft.healthy is None else draft.healthy
    flags = [verdict.num_accepted, verdict.next_token, healthy, draft_healthy]
    *drafted, accepted, next_token, target_ok, draft_ok = torch.cat(
        [draft.tokens, torch.stack([flag.to(torch.int64) for flag in flags])]
    ).tolist()
    for ok, role in ((target_ok, "target"), (draft_ok, "draft")):
        if not ok:
            raise unhealthy(role)
    return drafted, accepted, next_token
