"""A cached teacher that also knows a pool's texts: the target scores them when they are made."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distill.data.batches import Batch
from distill.data.examples import Example
from distill.laws import SampledLaw, TopKLaw
from distill.on_policy.pool import Pool
from distill.teacher.cached import CachedTeacher


class PoolTeacher:
    """The top-k law at each supervised position, of training rows from the cache, of a pool's texts from the pool."""

    def __init__(
        self,
        teacher: CachedTeacher,
        num_train: int,
        pool: Pool,
        score: Callable[[Sequence[Example]], CachedTeacher],
    ) -> None:
        """`score` runs the target over texts, at the temperature and with the top_k of `teacher`."""
        self.teacher, self.num_train, self.pool, self._score = teacher, num_train, pool, score
        self._scored: CachedTeacher | None = None
        self._version = -1
        self._device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        self._device = device
        for teacher in filter(None, (self.teacher, self._scored)):
            teacher.to(device)

    def law(self, batch: Batch) -> TopKLaw | SampledLaw:
        extra = batch.supervised & (batch.example_ids >= self.num_train)
        if not extra.any():  # as while positions are chosen, before any text is made
            return self.teacher.law(batch)
        own = self.teacher.law(batch._replace(supervised=batch.supervised & ~extra))
        others = self._of_pool().law(batch._replace(supervised=extra, example_ids=batch.example_ids - self.num_train))
        assert isinstance(own, TopKLaw) and isinstance(others, TopKLaw)  # fit refuses laws of drawn ids
        return joined(own, others, extra[batch.supervised])

    def _of_pool(self) -> CachedTeacher:
        if self._scored is None or self._version != self.pool.version:
            self._scored, self._version = self._score(self.pool.texts), self.pool.version
            self._scored.to(self._device)
        return self._scored


def joined(own: TopKLaw, others: TopKLaw, is_other: Tensor) -> TopKLaw:
    """The laws of both, in the order of positions that `is_other` [N] tells."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(len(is_other), *a.shape[1:])
        out[~is_other], out[is_other] = a, b
        return out

    return TopKLaw(
        both(own.ids, others.ids), both(own.log_probs, others.log_probs), both(own.log_tail, others.log_tail)
    )
