"""A draft under training as engines would run it."""

from dataclasses import replace
from typing import Any

from decode.models import LoadedModel


def as_served(draft: LoadedModel, model: Any, like: Any) -> LoadedModel:
    """`draft` with `model` for its model: in eval mode, in the precision and on the device of the model `like`.

    In place: `model` is a copy that nothing else needs.
    """
    model = model.eval().requires_grad_(False).to(device=like.device, dtype=like.dtype)
    vocab_ids = None if draft.vocab_ids is None else draft.vocab_ids.to(like.device)
    return replace(draft, model=model, vocab_ids=vocab_ids)
