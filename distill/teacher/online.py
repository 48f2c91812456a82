"""A teacher that runs the target on every batch: frozen, in eval mode, outside any module tree."""

from typing import Any

import torch

from distill.data.batches import Batch
from distill.heads import head_stands_apart, supervised_hidden, supervised_logits
from distill.laws import FullLaw, HeadLaw, tempered


class OnlineTeacher:
    """The target's full law at each supervised position.

    It is no nn.Module, so whatever holds it neither trains it, nor switches its mode, nor saves or wraps it.
    """

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model = model.eval().requires_grad_(False)
        self.temperature = temperature
        self._apart = head_stands_apart(model)

    def to(self, device: torch.device) -> None:
        """Move the target; called when training knows its device."""
        self.model.to(device)

    @torch.no_grad()
    def law(self, batch: Batch) -> FullLaw | HeadLaw:
        """The law at `batch.supervised`, of N positions, fp32 or wider; of hidden states where the head stands apart.

        Without gradients rather than in inference mode: a loss may save the law for its backward, which inference
        tensors allow only after a copy.
        """
        with torch.autocast(batch.input_ids.device.type, enabled=False):  # the target keeps its own precision
            if self._apart:
                hidden = supervised_hidden(self.model, batch)
                return HeadLaw(hidden, self.model.get_output_embeddings(), self.temperature)
            logits = supervised_logits(self.model, batch, apart=False)
        return FullLaw(tempered(logits, self.temperature).log_softmax(-1))
