"""The draft with its objective: from a batch and the target's law to a loss. It is what training wraps and saves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decode.models import LoadedModel
from distill.acceptance import Acceptance, acceptance
from distill.config import OPTIONS, LossConfig
from distill.data.batches import Batch
from distill.drafts.adapters import has_adapters
from distill.fused import Evaluate, chunk_size, chunked
from distill.heads import head_stands_apart, supervised_hidden, supervised_logits
from distill.laws import Columns, Law, tempered
from distill.losses import LOSSES, Pair


class Outcome(NamedTuple):
    """What a batch gave, over this rank's N supervised positions; strategies look for tensors in tuples."""

    total: Tensor
    """Scalar with gradient: the sum of weights * losses, and of advantages * -log q of the next token."""
    losses: Tensor  # [N], no gradient
    overlap: Tensor  # [N], no gradient: sum of min(p, q) over the buckets of the law, or an estimate of it


class Student(nn.Module):
    """A draft under training. `serve` decides what is minimised where `loss` names nothing."""

    def __init__(self, draft: LoadedModel, loss: LossConfig, serve: str = "sampled") -> None:
        super().__init__()
        self.model: Any = draft.model if has_adapters(draft.model) else draft.model.requires_grad_(True)
        self.columns = Columns(draft.vocab_size, draft.vocab_ids)
        self.loss, self.mix = loss, loss.mix(serve)
        self._apart = head_stands_apart(draft.model)

    def forward(self, batch: Batch, law: Law) -> Outcome:
        """Chunk by chunk where the head stands apart and is a plain linear layer; else from all logits at once."""
        evaluate = self._evaluate(batch, law)
        states, head = self._states(batch)
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
            return Outcome(*chunked(states, head, evaluate, chunk_size(head.out_features)))
        return Outcome(*evaluate(0, len(states), head(states)))

    @torch.no_grad()
    def measure(self, batch: Batch, law: Law) -> tuple[Tensor, Acceptance]:
        """Losses [N], and the probabilities of acceptance, at the supervised positions in the order of rows."""
        states, head = self._states(batch)
        size, next_ids = chunk_size(len(self.columns.ids)), batch.next_ids[batch.supervised]
        losses, found = [], []
        for start in range(0, max(len(states), 1), size):
            part, logits = law.part(start, start + size), head(states[start : start + size])
            losses.append(self._losses(self._pair(part, logits, next_ids[start : start + size])))
            found.append(acceptance(part, tempered(logits, self.loss.temperature), self.columns))
        return torch.cat(losses), Acceptance.joined(found)

    def _evaluate(self, batch: Batch, law: Law) -> Evaluate:
        weights, next_ids = batch.weights[batch.supervised], batch.next_ids[batch.supervised]
        advantages = None if batch.advantages is None else batch.advantages[batch.supervised]

        def evaluate(start: int, stop: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            pair = self._pair(law.part(start, stop), logits, next_ids[start:stop])
            losses = self._losses(pair)
            total = (weights[start:stop].to(losses.dtype) * losses).sum()
            if advantages is not None:
                log_q = pair.log_q(pair.next_ids, self.loss.temperature)
                total = total - (advantages[start:stop].to(log_q.dtype) * log_q).sum()
            with torch.no_grad():
                overlap = pair.overlap
            return total, losses.detach(), overlap

        return evaluate

    def _pair(self, law: Law, logits: Tensor, next_ids: Tensor) -> Pair:
        return Pair(law, logits, self.columns, next_ids, self.loss.temperature)

    def _losses(self, pair: Pair) -> Tensor:  # [N]
        """The mix of losses, each with its own options."""
        options = {name: {key: getattr(self.loss, key) for key in OPTIONS.get(name, ())} for name in self.mix}
        parts = [weight * LOSSES[name](pair, **options[name]) for name, weight in self.mix.items()]
        return torch.stack(parts).sum(0)

    def _states(self, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What [N, ..] the logits at the supervised positions are made of, and the function that makes them of it."""
        if self._apart:
            return supervised_hidden(self.model, batch), self.model.get_output_embeddings()
        return supervised_logits(self.model, batch, apart=False), nn.Identity()
