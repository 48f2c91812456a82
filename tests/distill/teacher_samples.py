"""Examples, their laws and their batches, for tests of teachers."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from distill.data.batches import Batch, collate
from distill.data.examples import Example
from distill.teacher.cached import CachedTeacher, fill_cache
from tests.fixtures import random_prompt

K = 5


def make_examples(count: int = 20) -> list[Example]:
    """Documents of 3 to 22 tokens; a prompt of 1 to 3 tokens, then supervised ones, some with a gap."""
    made = []
    for index in range(count):
        ids = random_prompt(3 + index, seed=index)
        mask = [place > index % 3 and not (index % 4 == 0 and place == 4) for place in range(len(ids))]
        made.append(Example(ids, mask, f"made:{index}"))
    return made


def alone(model: Any, example: Example) -> Tensor:
    """The oracle: the whole law of one example by itself, at its supervised positions."""
    with torch.no_grad():
        log_probs = model(input_ids=torch.tensor([example.input_ids])).logits[0].log_softmax(-1)
    return log_probs[[t for t in range(len(example.input_ids) - 1) if example.mask[t + 1]]]


def cached(model: Any, examples: Sequence[Example], folder: Path, **settings: Any) -> CachedTeacher:
    return fill_cache(model, examples, folder, **{"top_k": K, "console": Console(file=io.StringIO()), **settings})


PACKS = {
    "alone": [[[i]] for i in range(20)],
    "padded": [[[i] for i in range(20)]],
    "packed": [[[19, 0, 3], [4, 5]], [[1, 2, 6, 7], [8], [9, 10]], [[i] for i in range(11, 19)]],
}


def batches(examples: list[Example], layout: str) -> list[Batch]:
    return [collate(rows, examples, normaliser=1) for rows in PACKS[layout]]
