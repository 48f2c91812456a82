"""A teacher that scored its examples once: top-k log-probs and the tail's mass, looked up at every step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from decode.errors import DraftsmithError, require
from distill.data.batches import Batch
from distill.data.examples import Example
from distill.laws import TopKLaw
from distill.teacher.fingerprint import cache_key, short_name, weights_sha256
from distill.teacher.scoring import Scorer, plan_shards
from distill.teacher.store import Store


def fill_cache(
    model: Any,
    examples: Sequence[Example],
    folder: Path,
    *,
    top_k: int,
    runner: Any = None,
    temperature: float = 1.0,
    batch_size: int = 4,
    vocab_ids: Tensor | None = None,
    target_sha256: str | None = None,
    console: Console | None = None,
) -> "CachedTeacher":
    """Score what `folder` lacks, then hold all of it. The cache lies in a sub-folder named by its key.

    `runner` is a twin of `model` that computes the same, faster; the key is of `model`, whose weights_sha256 may be
    given where it is known. `vocab_ids` are the ids of a draft with a reduced vocabulary.

    Log-probs are of logits / temperature, so losses and acceptance read from the cache are at that temperature.
    Raises UsageError when top_k exceeds the target's vocabulary.
    """
    console = console or Console(stderr=True, highlight=False, markup=False)
    size = int(model.config.get_text_config().vocab_size)
    require(top_k <= size, "teacher.top_k", top_k, f"at most the target's {size} ids")
    key = cache_key(
        target_sha256 or weights_sha256(model), model.dtype, examples, top_k, temperature, vocab_ids=vocab_ids
    )
    store = Store(folder / short_name(key), key)
    with store.held():
        Scorer(runner or model, top_k, temperature, batch_size, vocab_ids).fill(store, examples, console)
        teacher = CachedTeacher(store, examples)
    per_token = store.num_bytes() / max(teacher.num_positions, 1)
    console.print(f"teacher cache: {teacher.num_positions} tokens, {per_token:.0f} bytes each, in {store.folder}")
    return teacher


class CachedTeacher:
    """The target's top-k law at each supervised position of `examples`, held in memory."""

    def __init__(self, store: Store, examples: Sequence[Example]) -> None:
        self._device = torch.device("cpu")
        shards = [store.read(name) for name in plan_shards(examples)]
        table = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        self._ids, self._log_probs, self._log_tail = table["ids"], table["log_probs"], table["log_tail"]
        self._starts, self._row_of = _places(examples, table["example"], table["tokens"], store)

    @property
    def num_positions(self) -> int:
        return len(self._log_tail)

    def to(self, device: torch.device) -> None:
        """Where laws are delivered; the table stays in host memory."""
        self._device = device

    def law(self, batch: Batch) -> TopKLaw:
        """The law at `batch.supervised`, found by example and place, so packing and order are free."""
        examples, places = (t[batch.supervised].cpu() for t in (batch.example_ids, batch.position_ids))
        rows = self._row_of[self._starts[examples] + places]
        parts = (self._ids[rows].long(), self._log_probs[rows], self._log_tail[rows])
        return TopKLaw(*(part.to(self._device) for part in parts))


def _places(examples: Sequence[Example], owner: Tensor, tokens: Tensor, store: Store) -> tuple[Tensor, Tensor]:
    """Where each example starts among all tokens, and the row of the table for each token (0 where unsupervised).

    Raises DraftsmithError when a stored position's next token is not the data's.
    """
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    starts = lengths.cumsum(0) - lengths
    flat = torch.tensor([token for example in examples for token in example.input_ids])
    supervised = torch.tensor([bit for example in examples for bit in (*example.mask[1:], False)])
    places = supervised.nonzero().squeeze(-1)  # in the order of examples
    rows = owner.argsort(stable=True)
    if len(rows) != len(places) or not torch.equal(tokens[rows].long(), flat[places + 1]):
        raise DraftsmithError(
            f"teacher cache: {store.folder} does not hold the data's tokens; delete it to make it anew"
        )
    row_of = torch.zeros(len(flat), dtype=torch.int64)
    row_of[places] = rows
    return starts, row_of
