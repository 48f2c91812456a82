"""Random laws for tests, the top-k law of a full one, and what a loss gives for them."""

from typing import Any

import torch
from torch import Tensor, nn

from distill.config import OPTIONS, LossConfig
from distill.laws import Columns, FullLaw, HeadLaw, Law, TopKLaw
from distill.losses import LOSSES, Pair

V = 11
VOCAB_IDS = torch.tensor([0, 2, 3, 7, 9])
DIVERGENCES = [name for name in LOSSES if name not in ("target_argmax", "data")]


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).to(dtype)


def random_ids(count: int, size: int = V) -> Tensor:
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(7))


def top_k(log_probs: Tensor, k: int, vocab_ids: Tensor | None = None) -> TopKLaw:
    """The top-k law of a full one, for a draft that may propose `vocab_ids` (all, where None)."""
    values, ids = log_probs.topk(k)
    others = log_probs.scatter(-1, ids, -torch.inf)
    tail = (others if vocab_ids is None else others[..., vocab_ids]).logsumexp(-1)
    return TopKLaw(ids, values, tail)


def head_law(log_probs: Tensor) -> HeadLaw:
    """A law that is made of hidden states when it is asked for; here they are the log-probabilities."""
    return HeadLaw(log_probs, nn.Identity())


LAWS: dict[str, Any] = {
    "full": lambda log_probs, ids: FullLaw(log_probs),
    "top 3": lambda log_probs, ids: top_k(log_probs, 3, ids),
    "top V": lambda log_probs, ids: top_k(log_probs, log_probs.shape[-1], ids),
}


def loss_of(
    name: str,
    law: Law,
    logits: Tensor,
    columns: Columns | None = None,
    next_ids: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The loss per position, with the default options."""
    columns = columns or Columns(logits.shape[-1])
    if next_ids is None:
        next_ids = random_ids(logits.shape[:-1].numel(), len(columns.column_of)).reshape(logits.shape[:-1])
    options = {key: getattr(LossConfig(), key) for key in OPTIONS.get(name, ())}
    return LOSSES[name](Pair(law, logits, columns, next_ids, temperature), **options)


def gradient(name: str, law: Law, logits: Tensor, *further: Any) -> Tensor:
    logits = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(name, law, logits, *further).sum(), logits)
    return grad
