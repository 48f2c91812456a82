"""Measures what one decoding step of a model costs, through a session as decoding itself uses it."""

import time

import torch

from decode.model_facts import input_device
from decode.models import LoadedModel
from decode.session import Session, new_session

CONTEXT = 64
WARM_UP_STEPS = 3
TIMED_STEPS = 12


@torch.inference_mode()
def step_seconds(loaded: LoadedModel) -> float:
    """Least seconds that `loaded` takes for one more token after a short context, its argmax read from the device."""
    steps = WARM_UP_STEPS + TIMED_STEPS
    session = new_session(loaded, 1, CONTEXT + steps)
    length = min(CONTEXT, session.capacity - steps)
    ids = torch.ones(length + steps, dtype=torch.int64, device=input_device(loaded.model))
    session.extend([ids[:length]], [1])
    times = [_timed_step(session, ids[: length + i + 1]) for i in range(steps)]
    return min(times[WARM_UP_STEPS:])


def _timed_step(session: Session, context: torch.Tensor) -> float:
    start = time.perf_counter()
    int(session.extend([context], [1])[0].argmax())
    return time.perf_counter() - start
