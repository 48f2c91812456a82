"""Rows of next-token probabilities, over the whole vocabulary or over the few tokens that can occur. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Law:
    """R laws of a next token. What no column stands for has probability 0.

    Greedy decoding has one column, top-k has k, a draft with a reduced vocabulary has its N: few operations then touch
    rows of the whole vocabulary, each of which costs as much as a small layer.
    """

    probs: Tensor  # [R, K] fp32 or fp64; each row sums to 1
    ids: Tensor | None = None  # [R, K] or, for every row, [K]; ascending. None: column = id
    healthy: Tensor | bool | None = None  # the logits defined these laws; [] while on a GPU; None: nothing to tell

    def __len__(self) -> int:
        return self.probs.shape[0]

    def __getitem__(self, rows: slice) -> Self:
        """The laws of a slice of rows."""
        ids = self.ids[rows] if self.ids is not None and self.ids.ndim == 2 else self.ids
        return type(self)(self.probs[rows], ids, self.healthy)

    @property
    def is_point(self) -> bool:
        """Whether all mass of each row lies on one token."""
        return self.ids is not None and self.ids.ndim == 2 and self.ids.shape[1] == 1

    @property
    def tokens(self) -> Tensor:
        """[R] the tokens of point masses."""
        assert self.ids is not None and self.is_point
        return self.ids.squeeze(1)

    def row(self, at: Tensor) -> Self:
        """The law of the row `at` [1], as a law of one row; the device isn't asked which one it is."""
        ids = self.ids
        if ids is not None and ids.ndim == 2:
            ids = ids.index_select(0, at)
        return type(self)(self.probs.index_select(0, at), ids, self.healthy)

    def of(self, tokens: Tensor) -> Tensor:  # [R, M] int64 -> [R, M]
        """The probabilities of M tokens in each row."""
        if self.ids is None:
            return self.probs.gather(-1, tokens)
        if self.ids.shape[-1] == 1:
            return self.probs * (self.ids == tokens)
        column = torch.searchsorted(self.ids, tokens.contiguous()).clamp_(max=self.ids.shape[-1] - 1)
        there = self.ids[column] if self.ids.ndim == 1 else self.ids.gather(-1, column)
        return self.probs.gather(-1, column) * (there == tokens)

    def token_of(self, column: Tensor) -> Tensor:  # [R] -> [R] int64
        """The token ids that columns stand for, one a row."""
        if self.ids is None:
            return column
        if self.ids.ndim == 1:
            return self.ids[column]
        return self.ids.gather(-1, column.unsqueeze(-1)).squeeze(-1)

    def residual(self, scale: Tensor, other: "Law") -> Tensor:  # scale [R, 1] -> [R, K]
        """max(scale * self - other, 0), a weight for each column of this law."""
        weights = self.probs * scale
        if self.ids is not None:
            weights -= other.of(self.ids.expand_as(self.probs))
        elif other.ids is None:
            weights -= other.probs
        else:
            weights.scatter_add_(-1, other.ids.expand_as(other.probs), -other.probs.to(weights.dtype))
        return weights.clamp_(min=0.0)

    def excess(self, scale: Tensor, other: "Law") -> Tensor:  # scale [R, 1] -> [R]
        """Sum over all tokens of max(scale * self - other, 0)."""
        if self.ids is not None or other.ids is None:
            return self.residual(scale, other).sum(-1)
        # Where `other` has no mass nothing is taken away, so only its own columns need a look.
        inside = self.of(other.ids.expand_as(other.probs))
        outside = (1 - inside.sum(-1)).clamp(min=0.0) * scale.squeeze(-1)
        return (inside * scale - other.probs).clamp(min=0.0).sum(-1) + outside

    def dense(self, vocab_size: int) -> Tensor:  # -> [R, V]
        """The same laws with a column for each token."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(len(self), vocab_size).scatter_(-1, self.ids.expand_as(self.probs), self.probs)

    @staticmethod
    def point(tokens: Tensor, healthy: Tensor | bool | None = None, dtype: torch.dtype = torch.float32) -> "Law":
        """All mass of each row on one token; `tokens` [R]."""
        return Law(_one(dtype, tokens.device).expand(len(tokens), 1), tokens.unsqueeze(1), healthy)

    @staticmethod
    def cat(laws: "Sequence[Law]", vocab_size: int) -> "Law":
        """All rows of `laws`. Where their columns differ in number the result has a column for each token."""
        if len(laws) == 1:
            return laws[0]
        healthy = all_true([law.healthy for law in laws])
        first = laws[0].ids
        if all(law.ids is first for law in laws) and (first is None or first.ndim == 1):
            return Law(torch.cat([law.probs for law in laws]), first, healthy)
        ids = [law.ids for law in laws if law.ids is not None]
        if len(ids) == len(laws) and len({part.shape[1] for part in ids}) == 1:
            return Law(torch.cat([law.probs for law in laws]), torch.cat(ids), healthy)
        return Law(torch.cat([law.dense(vocab_size) for law in laws]), None, healthy)


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, 1, dtype=dtype, device=device)


def told(flag: Tensor) -> Tensor | bool:
    """A flag [] as a bool where that costs nothing; a GPU isn't asked."""
    return bool(flag) if flag.device.type == "cpu" else flag


def all_true(flags: Sequence[Tensor | bool | None]) -> Tensor | bool | None:
    """Whether all of those that are there hold; None where none is."""
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    known = [flag for flag in flags if isinstance(flag, bool)]
    if not all(known):
        return False
    if tensors:
        return torch.stack(tensors).all()
    return True if known else None
