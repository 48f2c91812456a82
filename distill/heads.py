"""Runs a causal LM so that its output head sees supervised positions only; [B, T, V] then never exists.

Models that change logits after the head (scaling, soft caps) are found by comparing, once, and run whole instead.
"""

from typing import Any

import torch
from torch import Tensor

from distill.data.batches import Batch

# A probe's length: any few tokens show whether the head stands apart.
PROBE_TOKENS = 4


@torch.no_grad()
def head_stands_apart(model: Any) -> bool:
    """Whether the logits are exactly the output head applied to the body's last hidden states.

    Same shapes run the same kernels, so equal means bit for bit. The model's mode is left as it was.
    """
    head = model.get_output_embeddings()
    if head is None:
        return False
    training = model.training
    model.eval()
    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    whole = model(input_ids=ids, use_cache=False).logits
    hidden = model.get_decoder()(input_ids=ids, use_cache=False)[0]
    model.train(training)
    return hidden.shape[-1] == head.in_features and torch.equal(head(hidden), whole)


def supervised_hidden(model: Any, batch: Batch) -> Tensor:  # [N, d], positions in the order of rows
    """The body's last hidden states at `batch.supervised`; where nothing is, their gradient is zero, not absent."""
    return model.get_decoder()(**_inputs(batch))[0][batch.supervised]


def supervised_logits(
    model: Any,
    batch: Batch,  # B rows, T positions
    apart: bool,  # as head_stands_apart says
) -> Tensor:  # [N, V], positions in the order of rows
    """The logits at `batch.supervised`. Gradient flows; where nothing is supervised it is zero, not absent."""
    if not apart:
        return model(**_inputs(batch)).logits[batch.supervised]
    return model.get_output_embeddings()(supervised_hidden(model, batch))


def _inputs(batch: Batch) -> dict[str, Any]:
    return {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
