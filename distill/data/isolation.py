"""Asks a model, by trying it, whether it keeps packed documents apart."""

from typing import Any

import torch
from torch import Tensor

from decode.errors import UsageError

LEAK = 1e-5
"""Greatest change, relative to the largest logit, that counts as none. Masked attention gives exactly 0."""


def require_isolation(model: Any, role: str) -> None:
    """Raise UsageError, naming `data.packing` and the model's class, where attention crosses documents."""
    if not keeps_documents_apart(model):
        raise UsageError(
            f"data.packing: the {role} ({type(model).__name__}) lets attention cross the borders of packed documents; "
            "set data.packing to false"
        )


@torch.no_grad()
def keeps_documents_apart(model: Any) -> bool:
    """Whether the second of two packed documents keeps its logits when the first one is changed."""
    vocab_size = model.config.get_text_config().vocab_size
    first = torch.arange(6) % vocab_size
    second = torch.arange(5, 10) % vocab_size
    positions = torch.cat([torch.arange(6), torch.arange(5)])
    was_training = model.training
    model.eval()
    try:
        logits = [
            _logits(model, torch.cat([document, second]), positions)[len(first) :]
            for document in (first, first.flip(0))
        ]
    except TypeError:  # a forward that takes no position_ids cannot be told where documents begin
        return False
    finally:
        model.train(was_training)
    return bool((logits[0] - logits[1]).abs().max() <= LEAK * logits[0].abs().max())


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    ids, positions = ids.to(model.device), positions.to(model.device)
    return model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
