"""Tensors of a micro-batch from packed examples. What is supervised comes from masks, never from token ids."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distill.data.examples import Example
from distill.data.schedule import MicroBatch, rows_of_rank

PADDING = -1
"""The example id of positions that belong to no example."""


class Batch(NamedTuple):
    """One micro-batch of one rank. Feed `input_ids` and `position_ids` to a model, with no mask and no cache.

    transformers then reads the borders of the documents off the positions, which restart at 0, and lets attention
    cross none of them. The padding at the right end of a row is a document of its own.
    """

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64: place in the document, which is also the place in the example
    supervised: Tensor  # [B, T] bool: logits at t are trained on token t + 1 of the same document
    example_ids: Tensor  # [B, T] int64: index of the example, PADDING where there is none
    normaliser: int
    """Supervised positions of the whole optimiser window over all ranks; of a validation batch, over all ranks."""


def num_supervised(micro_batches: Sequence[MicroBatch], examples: Sequence[Example]) -> int:
    """Supervised positions of all rows of all ranks."""
    return sum(examples[i].num_supervised for batch in micro_batches for members in batch for i in members)


def collate(
    micro_batch: MicroBatch, examples: Sequence[Example], normaliser: int, rank: int = 0, world_size: int = 1
) -> Batch:
    """The tensors of one rank's rows; a rank without rows gets the first row with nothing supervised (equal work)."""
    rows = rows_of_rank(micro_batch, rank, world_size)
    batch = _stack(rows or micro_batch[:1], examples, normaliser)
    return batch if rows else batch._replace(supervised=torch.zeros_like(batch.supervised))


def _stack(rows: MicroBatch, examples: Sequence[Example], normaliser: int) -> Batch:
    width = max(sum(len(examples[i].input_ids) for i in members) for members in rows)
    columns = [_row(members, examples, width) for members in rows]
    ids, positions, supervised, owners = (torch.tensor(column) for column in zip(*columns, strict=True))
    return Batch(ids, positions, supervised, owners, normaliser)


def _row(members: list[int], examples: Sequence[Example], width: int) -> tuple[Sequence[int], ...]:
    ids: list[int] = []
    positions: list[int] = []
    supervised: list[bool] = []
    owners: list[int] = []
    for index in members:
        example = examples[index]
        length = len(example.input_ids)
        ids += example.input_ids
        positions += range(length)
        # shifted by one: the logits at t predict t + 1; the last token of a document has no successor in it
        supervised += [*example.mask[1:], False]
        owners += [index] * length
    tail = width - len(ids)
    return (
        ids + [0] * tail,
        positions + list(range(tail)),
        supervised + [False] * tail,
        owners + [PADDING] * tail,
    )
