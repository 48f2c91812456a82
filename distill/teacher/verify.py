"""Compares what a cache holds with what the target says now, at some of its positions."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from distill.data.examples import Example
from distill.teacher.contents import examples_of
from distill.teacher.scoring import TargetScorer
from distill.teacher.store import Store, Table

EXACT_LIMIT = 1e-3
"""Of any probability, where both sides computed in fp32 or wider: far above rounding, and above that of float16."""
ROUGH_LIMIT = 2e-2
"""Of the mean over positions, where one side computed in 16 bits or in a server."""

SHARDS_READ = 8


def is_shapely(table: Table, key: dict[str, Any]) -> bool:
    """Whether the tensors of a shard belong together: as many laws as supervised positions, and laws of `key`."""
    try:
        examples = list(examples_of(table))
        positions = sum(int(mask[1:].sum()) for _, mask in examples)
        shape = (positions, key["sampled"] or key["top_k"])
        mass = table["log_tail" if key["sampled"] is None else "log_mass"]
    except (KeyError, RuntimeError):  # a tensor is missing, or lengths do not add up
        return False
    shapes = table["ids"].shape == table["log_probs"].shape == shape and mass.shape == shape[:1]
    return shapes and bool((table["log_probs"] <= 1e-6).all())


@dataclass(frozen=True)
class Compared:
    """How far kept probabilities are from the target's own."""

    differences: Tensor  # [N]: the largest at each position, over the kept ids and the mass of the rest

    def agrees(self, dtypes: set[str]) -> bool:
        """Whether rounding explains it, for a target whose two sides computed in `dtypes`."""
        exact = dtypes <= {"torch.float32", "torch.float64"}
        found = self.differences.max() if exact else self.differences.mean()
        return bool(found <= (EXACT_LIMIT if exact else ROUGH_LIMIT))

    def __str__(self) -> str:
        return (
            f"{len(self.differences)} positions scored again; a probability differs by {self.differences.max():.1e} at "
            f"most, {self.differences.mean():.1e} in the mean of positions"
        )


def compare(store: Store, model: Any, num_positions: int) -> Compared:
    """Score examples again until `num_positions` are compared, or all are. Always the same ones; shards are whole."""
    scorer = TargetScorer(model, top_k=1, temperature=store.key["temperature"])
    found: list[Tensor] = []
    for example, rows in _shuffled(store):
        found.append(_differences(rows, scorer.logits([0], [example]).log_softmax(-1).cpu(), store.key))
        if sum(map(len, found)) >= num_positions:
            break
    return Compared(torch.cat(found)[:num_positions])


def _shuffled(store: Store) -> Iterator[tuple[Example, Table]]:
    """Examples of a store, each with its rows, from some of its shards in turn."""
    draw = random.Random(0)
    names = sorted(store.checksums)
    shards = [_examples(store.read(name)) for name in draw.sample(names, min(len(names), SHARDS_READ))]
    for shard in shards:
        draw.shuffle(shard)
    turns = zip_longest(*shards)
    return (found for turn in turns for found in turn if found is not None)


def _examples(table: Table) -> list[tuple[Example, Table]]:
    found: list[tuple[Example, Table]] = []
    first = 0
    for ids, mask in examples_of(table):
        example = Example(ids.tolist(), mask.tolist(), "cache")
        rows = slice(first, first + example.num_supervised)
        found.append((example, {name: table[name][rows] for name in ("ids", "log_probs", "log_tail") if name in table}))
        first = rows.stop
    return found


def _differences(rows: Table, log_probs: Tensor, key: dict[str, Any]) -> Tensor:  # [n]
    """`log_probs` [n, V] are the target's own, now."""
    now = log_probs.gather(-1, rows["ids"].long()).exp()
    found = (now - rows["log_probs"].float().exp()).abs().amax(-1)
    if "log_tail" not in rows or key["draft_ids_sha256"] is not None:  # ids of a draft are not at hand
        return found
    return torch.maximum(found, (1 - now.sum(-1) - rows["log_tail"].exp()).abs())
