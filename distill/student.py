"""The draft with its objective: from a batch and the target's law to a loss. It is what training wraps and saves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decode.models import LoadedModel
from distill.acceptance import Acceptance, acceptance
from distill.config import LossConfig
from distill.data.batches import Batch
from distill.heads import head_stands_apart, supervised_logits
from distill.laws import Columns, Law, align, tempered
from distill.losses import LOSSES


@dataclass(frozen=True)
class Outcome:
    """What a batch gave, over this rank's N supervised positions."""

    total: Tensor
    """Scalar with gradient: the sum of weights * losses."""
    losses: Tensor  # [N], no gradient
    overlap: Tensor  # [N], no gradient: sum of min(p, q) over the buckets of the law


class Student(nn.Module):
    """A draft under training."""

    def __init__(self, draft: LoadedModel, loss: LossConfig, default_loss: str = "forward_kl") -> None:
        super().__init__()
        self.model: Any = draft.model.requires_grad_(True)
        self.columns = Columns(draft.vocab_size, draft.vocab_ids)
        self.loss = loss
        self._function = LOSSES[loss.name if isinstance(loss.name, str) else default_loss]
        self._apart = head_stands_apart(draft.model)

    def forward(self, batch: Batch, law: Law) -> Outcome:
        log_p, log_q = align(law, self._logits(batch), self.columns)
        losses = self._function(log_p, log_q)
        total = (batch.weights[batch.supervised].to(losses.dtype) * losses).sum()
        with torch.no_grad():
            overlap = torch.minimum(log_p, log_q).exp().sum(-1)
        return Outcome(total, losses.detach(), overlap)

    @torch.no_grad()
    def measure(self, batch: Batch, law: Law) -> tuple[Tensor, Acceptance]:
        """Losses [N], and the probabilities of acceptance, at the supervised positions in the order of rows."""
        logits = self._logits(batch)
        losses = self._function(*align(law, logits, self.columns))
        return losses, acceptance(law, logits, self.columns)

    def _logits(self, batch: Batch) -> Tensor:  # [N, M]
        return tempered(supervised_logits(self.model, batch, self._apart), self.loss.temperature)
