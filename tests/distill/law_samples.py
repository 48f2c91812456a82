"""Random laws for tests, and the top-k law of a full one."""

import torch
from torch import Tensor

from distill.laws import TopKLaw

V = 11
VOCAB_IDS = torch.tensor([0, 2, 3, 7, 9])


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).to(dtype)


def top_k(log_probs: Tensor, k: int) -> TopKLaw:
    values, ids = log_probs.topk(k)
    tail = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return TopKLaw(ids, values, tail)
