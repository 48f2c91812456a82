"""Random laws for tests, and the top-k law of a full one."""

import torch
from torch import Tensor

from distill.laws import TopKLaw

V = 11
VOCAB_IDS = torch.tensor([0, 2, 3, 7, 9])


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).to(dtype)


def top_k(log_probs: Tensor, k: int, vocab_ids: Tensor | None = None) -> TopKLaw:
    """The top-k law of a full one, for a draft that may propose `vocab_ids` (all, where None)."""
    values, ids = log_probs.topk(k)
    others = log_probs.scatter(-1, ids, -torch.inf)
    tail = (others if vocab_ids is None else others[..., vocab_ids]).logsumexp(-1)
    return TopKLaw(ids, values, tail)
