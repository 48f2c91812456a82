"""Draws ids from laws. What is drawn at a position depends on its example and place alone, not on any batch."""

import torch
from torch import Tensor

from distill.data.examples import Example
from distill.teacher.fingerprint import content_of

# Positions per block: the sums of [64, V] in fp64 are 64 MB where V is 128k.
BLOCK = 64
LARGEST_UNIFORM = 1 - 2.0**-50  # times a total of about 1 it stays below the total, whatever the rounding


def uniforms_of(example: Example, count: int) -> Tensor:  # [n, count] fp64 in [0, 1)
    """A row for each of the n supervised positions of `example`."""
    seed = int.from_bytes(content_of(example.input_ids, example.mask)[:8], "big") >> 1  # torch takes 63 bits
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(example.num_supervised, count, dtype=torch.float64, generator=generator)
    return drawn.clamp_(max=LARGEST_UNIFORM)


def draw_columns(
    log_mass: Tensor,  # [N, M], of any total per row
    uniforms: Tensor,  # [N, S] fp64 in [0, 1)
) -> Tensor:  # [N, S] int64
    """Columns drawn in proportion to their mass: the first whose running total exceeds `uniforms` of the whole."""
    blocks = zip(log_mass.split(BLOCK), uniforms.to(log_mass.device).split(BLOCK), strict=True)
    return torch.cat([_columns(*block) for block in blocks])


def _columns(log_mass: Tensor, uniforms: Tensor) -> Tensor:
    totals = log_mass.double().exp().cumsum(-1)
    found = torch.searchsorted(totals, uniforms * totals[:, -1:], right=True)
    return found.clamp_(max=log_mass.shape[-1] - 1)  # a row without mass has no column that exceeds
