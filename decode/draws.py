"""From laws and random numbers to tokens: in tensors, which a GPU is asked nothing of, and on the host in numbers."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.laws import Law

# Columns that a draw adds up at once; near the root of a vocabulary's size there are as many blocks as columns in one.
BLOCK = 256


def draw_from(
    law: Law,
    uniform: Tensor | None = None,  # [R] fp64 in [0, 1); not needed by laws of one column
) -> Tensor:  # [R] int64
    """One token id of each row of a law."""
    if law.is_point:
        return law.tokens
    assert uniform is not None
    return law.token_of(draw(law.probs, uniform))


def draw_one(law: Law, uniform: float | None) -> int:
    """`draw_from` for a law of one row on the host, in Python numbers."""
    if law.known is not None:
        return law.known[0]
    if law.is_point:
        return law.number_of(0)
    assert uniform is not None
    return law.number_of(RunningMass(law.array[0]).column(uniform))


class RunningMass:
    """`draw` for one row on the host. The mass is added up in blocks, so that a draw walks through one of them only."""

    def __init__(self, weights: np.ndarray[Any, Any]) -> None:  # [K]
        self._row, whole = weights, len(weights) // BLOCK * BLOCK
        sums = np.add.reduce(weights[:whole].reshape(-1, BLOCK), 1, np.float64)  # fp64 as in _running_mass
        if whole < len(weights):
            sums = np.append(sums, np.add.reduce(weights[whole:], 0, np.float64))
        self._ends = sums.cumsum()
        self.total = self._ends.item(-1)

    def column(self, uniform: float) -> int:
        """The column at that share of the mass; never one of weight 0, unless all are."""
        point = min(uniform * self.total, math.nextafter(self.total, 0.0))  # see _invert
        block = min(int(self._ends.searchsorted(point, "right")), len(self._ends) - 1)
        if block:
            point -= self._ends.item(block - 1)
        mass = self._row[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
        point = min(point, math.nextafter(mass.item(-1), 0.0))  # the block's sum was rounded otherwise
        return block * BLOCK + min(int(mass.searchsorted(point, "right")), len(mass) - 1)


def draw(
    weights: Tensor,  # [..., K] not negative, of any positive sum
    uniform: Tensor,  # [...] fp64 in [0, 1)
) -> Tensor:  # [...] int64
    """One column a row, by inverting the distribution function; a column of weight 0 is never drawn."""
    return _invert(_running_mass(weights), uniform)


def draw_or(
    weights: Tensor,  # [..., K] not negative
    fallback: Tensor,  # [..., K] not negative, of any positive sum
    uniform: Tensor,  # [...] fp64 in [0, 1)
) -> Tensor:  # [...] int64
    """`draw` from `weights`; from `fallback` in rows whose weights are all 0."""
    mass = _running_mass(weights)
    return _invert(torch.where(mass[..., -1:] > 0, mass, _running_mass(fallback)), uniform)


def _running_mass(weights: Tensor) -> Tensor:
    # In fp64: in fp32 the tail of a large vocabulary would be rounding.
    return weights.cumsum(-1, dtype=torch.float64)


def _invert(mass: Tensor, uniform: Tensor) -> Tensor:
    total = mass[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not reach past the last column
    point = torch.minimum(uniform.unsqueeze(-1) * total, below_total)
    column = torch.searchsorted(mass, point, right=True).squeeze(-1)
    return column.clamp_(max=mass.shape[-1] - 1)  # of NaN: the law says that it is unhealthy


def draw_uniform(count: int, generator: torch.Generator) -> Tensor:
    """`count` numbers in [0, 1), fp64, on the generator's device."""
    if isinstance(generator, Ahead):
        return torch.tensor(generator.take(count), dtype=torch.float64)
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)


def draw_numbers(count: int, generator: torch.Generator) -> list[float]:
    """`draw_uniform` in Python numbers."""
    if isinstance(generator, Ahead):
        return generator.take(count)
    numbers: list[float] = draw_uniform(count, generator).tolist()
    return numbers


class Ahead(torch.Generator):
    """A generator on the host that draws what is asked of it in advance: the same numbers as one by one, cheaper."""

    COUNT = 64

    def __init__(self) -> None:
        self._drawn: list[float] = []  # the next one last

    def take(self, count: int) -> list[float]:
        """The next `count` numbers in [0, 1), fp64."""
        while len(self._drawn) < count:
            fresh = torch.rand(self.COUNT, generator=self, dtype=torch.float64)
            self._drawn = fresh.tolist()[::-1] + self._drawn
        return [self._drawn.pop() for _ in range(count)]
