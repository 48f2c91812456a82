"""The tokens that a draft proposes: those it was trained on, or the most frequent ones of a file. Knows no model."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from decode.errors import UsageError, first_line, require

DRAFT_VOCAB_FILE = "draft_vocab.json"


def read_draft_vocab(folder: Path) -> Tensor | None:
    """The reduced vocabulary beside a draft, [N] int64 ascending, or None. Raises UsageError when malformed."""
    file = folder / DRAFT_VOCAB_FILE
    if not file.is_file():
        return None
    try:
        ids = torch.tensor(json.loads(file.read_text(encoding="utf-8"))["vocab_ids"], dtype=torch.int64)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"{os.fspath(file)}: expected {{'vocab_ids': [ids]}}: {first_line(error)}") from error
    if ids.ndim != 1 or ids.numel() == 0 or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0:
        raise UsageError(f"{os.fspath(file)}: vocab_ids must be ascending, distinct, not negative, not empty")
    return ids


def most_frequent(file: str, size: int, among: Tensor, always: Iterable[int]) -> Tensor:
    """The `size` tokens of `among` [M] ascending that were generated most often in rows that generate wrote, and
    `always` those that end a text, where the draft has them; [size] int64 ascending.

    Raises UsageError for a file that cannot be counted, or a size out of range.
    """
    require(0 < size <= len(among), "model.draft_vocab_size", size, f"an integer from 1 to the draft's {len(among)}")
    counts = count_generated(file)
    first = set(always)
    ranked = sorted(among.tolist(), key=lambda token: (token not in first, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int64)


def count_generated(file: str) -> Counter[int]:
    """How often each token was generated in a .jsonl file whose rows have input_ids and mask, as generate writes.

    Raises UsageError naming file and line.
    """
    counts: Counter[int] = Counter()
    number = 0
    try:
        with Path(file).expanduser().open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                counts.update(token for token, made in zip(row["input_ids"], row["mask"], strict=True) if made)
    except OSError as error:
        raise UsageError(f"model.draft_vocab_data: {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"model.draft_vocab_data: {file}:{number}: expected a row with input_ids and mask, as generate writes: "
            f"{first_line(error)}"
        ) from error
    if not counts:
        raise UsageError(f"model.draft_vocab_data: {file} has no generated token to count")
    return counts
