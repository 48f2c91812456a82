"""Rows of next-token probabilities, over the whole vocabulary or over the few tokens that can occur. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
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

    def __getitem__(self, rows: slice) -> "Law":
        """The laws of a slice of rows."""
        ids = self.ids[rows] if self.ids is not None and self.ids.ndim == 2 else self.ids
        return Law(self.probs[rows], ids, self.healthy)

    @property
    def known(self) -> list[int] | None:
        """The tokens [R] of point masses that are Python numbers already; else None."""
        return None

    @property
    def on_host(self) -> bool:
        """Whether to look at single numbers costs no wait."""
        return self.probs.is_cpu

    @cached_property
    def array(self) -> np.ndarray[Any, Any]:
        """`probs` as NumPy sees them; on the host only."""
        return self.probs.numpy()

    @property
    def is_point(self) -> bool:
        """Whether all mass of each row lies on one token."""
        return self.ids is not None and self.ids.ndim == 2 and self.ids.shape[1] == 1

    @property
    def tokens(self) -> Tensor:
        """[R] the tokens of point masses."""
        assert self.ids is not None and self.is_point
        return self.ids.squeeze(1)

    def row(self, at: Tensor) -> "Law":
        """The law of the row `at` [1], as a law of one row; the device isn't asked which one it is."""
        ids = self.ids
        if ids is not None and ids.ndim == 2:
            ids = ids.index_select(0, at)
        return Law(self.probs.index_select(0, at), ids, self.healthy)

    def of(self, tokens: Tensor) -> Tensor:  # [R, M] int64 -> [R, M]
        """The probabilities of M tokens in each row."""
        if self.ids is None:
            return self.probs.gather(-1, tokens)
        if self.ids.shape[-1] == 1:
            return self.probs * (self.ids == tokens)
        column = torch.searchsorted(self.ids, tokens.contiguous()).clamp_(max=self.ids.shape[-1] - 1)
        there = self.ids[column] if self.ids.ndim == 1 else self.ids.gather(-1, column)
        return self.probs.gather(-1, column) * (there == tokens)

    def numbers_of(self, tokens: Sequence[int]) -> list[float]:
        """`of` for a token of each of the first rows, in Python numbers; on the host only."""
        probs = self.array
        if self.ids is None:
            return [probs.item(row, token) for row, token in enumerate(tokens)]
        ids = self.ids.numpy()
        found = []
        for row, token in enumerate(tokens):
            own = ids if ids.ndim == 1 else ids[row]
            column = int(own.searchsorted(token))
            found.append(probs.item(row, column) if column < len(own) and own.item(column) == token else 0.0)
        return found

    def number_of(self, column: int) -> int:
        """`token_of` for the first row, in Python numbers; on the host only."""
        return column if self.ids is None else self.ids.numpy()[..., column].item(0)

    def token_of(self, column: Tensor) -> Tensor:  # [R] -> [R] int64
        """The token ids that columns stand for, one a row."""
        if self.ids is None:
            return column
        if self.ids.ndim == 1:
            return self.ids[column]
        return self.ids.gather(-1, column.unsqueeze(-1)).squeeze(-1)

    def residual(self, scale: Tensor | float, other: "Law") -> Tensor:  # scale [R, 1] -> [R, K]
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
        if all(law.on_host for law in laws):
            return Rows(laws, vocab_size)
        return _joined(laws, vocab_size)


def _joined(laws: Sequence[Law], vocab_size: int) -> Law:
    healthy = all_true([law.healthy for law in laws])
    first = laws[0].ids
    if all(law.ids is first for law in laws) and (first is None or first.ndim == 1):
        return Law(torch.cat([law.probs for law in laws]), first, healthy)
    ids = [law.ids for law in laws if law.ids is not None]
    if len(ids) == len(laws) and len({part.shape[1] for part in ids}) == 1:
        return Law(torch.cat([law.probs for law in laws]), torch.cat(ids), healthy)
    return Law(torch.cat([law.dense(vocab_size) for law in laws]), None, healthy)


class Rows(Law):
    """Laws of one row each on the host, which are joined, at the cost of a copy, only where all are asked for."""

    _laws: Sequence[Law]
    _vocab_size: int

    def __init__(self, laws: Sequence[Law], vocab_size: int) -> None:
        self.__dict__.update(_laws=laws, _vocab_size=vocab_size, healthy=all_true([law.healthy for law in laws]))

    def __len__(self) -> int:
        return len(self._laws)

    def __getitem__(self, rows: slice) -> Law:
        return Law.cat(self._laws[rows], self._vocab_size)

    on_host = True

    def numbers_of(self, tokens: Sequence[int]) -> list[float]:
        return [law.numbers_of([token])[0] for law, token in zip(self._laws, tokens, strict=False)]

    @cached_property
    def _whole(self) -> Law:
        return _joined(self._laws, self._vocab_size)

    @property
    def ids(self) -> Tensor | None:
        return self._whole.ids

    @property
    def probs(self) -> Tensor:
        return self._whole.probs


class Known(Law):
    """Point masses on tokens that are Python numbers. Tensors are made where they are asked for, which is seldom."""

    _tokens: list[int]
    _dtype: torch.dtype

    def __init__(self, tokens: list[int], healthy: Tensor | bool | None, dtype: torch.dtype) -> None:
        self.__dict__.update(_tokens=tokens, _dtype=dtype, healthy=healthy)  # as the class is frozen

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, rows: slice) -> Law:
        return Known(self._tokens[rows], self.healthy, self._dtype)

    @property
    def known(self) -> list[int]:
        return self._tokens

    on_host = is_point = True

    @cached_property
    def ids(self) -> Tensor:
        return torch.tensor(self._tokens, dtype=torch.int64).unsqueeze(1)

    @cached_property
    def probs(self) -> Tensor:
        return _one(self._dtype, self.ids.device).expand(len(self._tokens), 1)


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, 1, dtype=dtype, device=device)


def all_true(flags: Sequence[Tensor | bool | None]) -> Tensor | bool | None:
    """Whether all of those that are there hold; None where none is."""
    if all(flag is True for flag in flags):
        return True if flags else None
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    known = [flag for flag in flags if isinstance(flag, bool)]
    if not all(known):
        return False
    if tensors:
        return torch.stack(tensors).all()
    return True if known else None
