"""Tensors of a micro-batch from packed examples. What is supervised comes from masks, never from token ids."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distill.data.examples import Example
from distill.data.schedule import MicroBatch, rows_of_rank

PADDING = -1
"""The example id of positions that belong to no example."""

Examples = Sequence[Example] | Mapping[int, Example]
"""Examples by their ids."""


class Batch(NamedTuple):
    """One micro-batch of one rank. Feed `input_ids` and `position_ids` to a model, with no mask and no cache.

    transformers then reads the borders of the documents off the positions, which restart at 0, and lets attention
    cross none of them. The padding at the right end of a row is a document of its own.
    """

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64: place in the document, which is also the place in the example
    supervised: Tensor  # [B, T] bool: logits at t are trained on token t + 1 of the same document
    example_ids: Tensor  # [B, T] int64: index of the example, PADDING where there is none
    weights: Tensor  # [B, T] fp32: how much each supervised position counts
    normaliser: float
    """Sum of weights of the whole optimiser window over all ranks; of a validation batch, over all ranks."""
    advantages: Tensor | None = None  # [B, T] fp32: policy gradient of token t + 1, where there is one

    @property
    def next_ids(self) -> Tensor:  # [B, T] int64
        """The token that follows each position; of no use at the last of a row, which is never supervised."""
        return self.input_ids.roll(-1, dims=1)


def total_weight(micro_batches: Sequence[MicroBatch], examples: Examples) -> float:
    """Sum of weights over the supervised positions of all rows of all ranks."""
    return sum(examples[i].total_weight for batch in micro_batches for members in batch for i in members)


def collate(
    micro_batch: MicroBatch, examples: Examples, normaliser: float, rank: int = 0, world_size: int = 1
) -> Batch:
    """The tensors of one rank's rows; a rank without rows gets the first row with nothing supervised (equal work)."""
    rows = rows_of_rank(micro_batch, rank, world_size)
    batch = _stack(rows or micro_batch[:1], examples, normaliser)
    return batch if rows else batch._replace(supervised=torch.zeros_like(batch.supervised))


def _stack(rows: MicroBatch, examples: Examples, normaliser: float) -> Batch:
    width = max(sum(len(examples[i].input_ids) for i in members) for members in rows)
    columns = [_row(members, examples, width) for members in rows]
    ids, positions, supervised, owners, weights = (torch.tensor(column) for column in zip(*columns, strict=True))
    return Batch(ids, positions, supervised, owners, weights, normaliser, _advantages(rows, examples, width))


def _advantages(rows: MicroBatch, examples: Examples, width: int) -> Tensor | None:
    """[B, T]; None where no example has any."""
    if all(examples[i].advantages is None for members in rows for i in members):
        return None
    found = torch.zeros(len(rows), width)
    for place, members in enumerate(rows):
        values = [v for i in members for v in _shifted(examples[i], examples[i].advantages, 0.0)]
        found[place, : len(values)] = torch.tensor(values)
    return found


def _shifted(example: Example, values: list[float] | None, default: float) -> list[float]:
    """One number per position, which is that of the next token; 0 at the last, which has none in its document."""
    return [*(values or [default] * len(example.input_ids))[1:], 0.0]


def _row(members: list[int], examples: Examples, width: int) -> tuple[Sequence[float], ...]:
    ids: list[int] = []
    positions: list[int] = []
    supervised: list[bool] = []
    owners: list[int] = []
    weights: list[float] = []
    for index in members:
        example = examples[index]
        length = len(example.input_ids)
        ids += example.input_ids
        positions += range(length)
        # shifted by one: the logits at t predict t + 1; the last token of a document has no successor in it
        supervised += [*example.mask[1:], False]
        owners += [index] * length
        weights += _shifted(example, example.weights, 1.0)
    tail = width - len(ids)
    return (
        ids + [0] * tail,
        positions + list(range(tail)),
        supervised + [False] * tail,
        owners + [PADDING] * tail,
        weights + [0.0] * tail,
    )
