"""Measures what one decoding step of a model costs, through a session as decoding itself uses it."""

import time

import torch

from decode.models import LoadedModel
from decode.session import ModelSession

CONTEXT = 64
WARM_UP_STEPS = 3
TIMED_STEPS = 12


@torch.inference_mode()
def step_seconds(loaded: LoadedModel) -> float:
    """Least seconds that `loaded` takes for one more token after a short context, its argmax read from the device."""
    session = ModelSession(loaded.model)
    length = min(CONTEXT, session.capacity - WARM_UP_STEPS - TIMED_STEPS)
    ids = torch.ones(1, length + WARM_UP_STEPS + TIMED_STEPS, dtype=torch.int64, device=loaded.device)
    session.extend(ids[:, :length], keep=1)
    times = [_timed_step(session, ids[:, : length + i + 1]) for i in range(WARM_UP_STEPS + TIMED_STEPS)]
    return min(times[WARM_UP_STEPS:])


def _timed_step(session: ModelSession, context: torch.Tensor) -> float:
    start = time.perf_counter()
    int(session.extend(context, keep=1).argmax())
    return time.perf_counter() - start
