"""Asks a loaded model, before anything costly is done with it, whether its logits define a law."""

import torch

from decode.errors import unhealthy
from decode.models import LoadedModel
from decode.sampling import is_healthy


@torch.no_grad()
def check_healthy(loaded: LoadedModel, role: str) -> None:
    """Feed two tokens. Raises DraftsmithError when a logit of either is NaN or the largest infinite.

    Decoding looks at every round itself; this is for what only reads weights or generates by the library's own loop.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device=loaded.device)
    if not is_healthy(loaded.model(input_ids=ids).logits):
        raise unhealthy(role)
