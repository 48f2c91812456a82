"""A teacher that scored its examples once: kept log-probs of the target's law, looked up at every step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from decode.errors import require
from distill.config import TeacherConfig
from distill.data.batches import Batch
from distill.data.examples import Example
from distill.laws import SampledLaw, TopKLaw
from distill.teacher.contents import Contents, contents_of_all
from distill.teacher.key import TextKey, cache_key
from distill.teacher.scoring import Filled, Scorer, TargetScorer, fill, plan_shards, score
from distill.teacher.store import Store, Table
from distill.weights import weights_sha256

IN_MEMORY = "memory"  # the only shard of laws that lie in no folder


class CachedTeacher:
    """The target's law at each supervised position of `examples`, which `batch.example_ids` number.

    Laws that lie in a folder stay there, mapped: memory holds 4 bytes per token, and what the system has room for.
    """

    def __init__(self, examples: Sequence[Example], contents: Contents, read: Callable[[str], Table]) -> None:
        self._device = torch.device("cpu")
        found = [contents[content] for content in contents_of_all(examples)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(place.shard for place in found))}
        self._shards = [read(name) for name in numbers]
        self._shard_of = torch.tensor([numbers[location.shard] for location in found], dtype=torch.int32)
        self._first = torch.tensor([location.first for location in found])
        lengths = torch.tensor([len(example.input_ids) for example in examples])
        self._starts = lengths.cumsum(0) - lengths
        self._ranks = _ranks(examples)
        self.num_positions = sum(example.num_supervised for example in examples)

    def to(self, device: torch.device) -> None:
        """Where laws are delivered; what is kept stays in host memory."""
        self._device = device

    def law(self, batch: Batch) -> TopKLaw | SampledLaw:
        """The law at `batch.supervised`, found by example and place, so packing and order are free."""
        examples, places = (t[batch.supervised].cpu() for t in (batch.example_ids, batch.position_ids))
        return self.law_at(examples, places)

    def law_at(self, examples: Tensor, places: Tensor) -> TopKLaw | SampledLaw:
        """The law at each of N places [N] of examples [N]; a place predicts the token after it."""
        rows = self._first[examples] + self._ranks[self._starts[examples] + places]
        shards = self._shard_of[examples]
        ids = self._gather("ids", shards, rows, torch.int64)
        log_probs = self._gather("log_probs", shards, rows, torch.float32)
        if "log_mass" in self._shards[0]:
            return SampledLaw(ids, log_probs, self._gather("log_mass", shards, rows, torch.float32))
        return TopKLaw(ids, log_probs, self._gather("log_tail", shards, rows, torch.float32))

    def _gather(self, name: str, shards: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        found = torch.empty(len(rows), *self._shards[0][name].shape[1:], dtype=dtype)
        for number in shards.unique().tolist():
            mine = shards == number
            found[mine] = self._shards[number][name][rows[mine]].to(dtype)
        return found.to(self._device)


def _ranks(examples: Sequence[Example]) -> Tensor:  # [all tokens] int32
    """For each token of all examples, which of its example's supervised positions it is."""
    found = []
    for example in examples:
        supervised = torch.tensor([*example.mask[1:], False], dtype=torch.int32)
        found.append(supervised.cumsum(0, dtype=torch.int32) - supervised)
    return torch.cat(found)


def fill_cache(
    model: Any,
    examples: Sequence[Example],
    folder: Path,
    *,
    runner: Any = None,
    top_k: int = TeacherConfig.top_k,
    sampled: int | None = None,
    store: Any = TeacherConfig.store,
    temperature: float = 1.0,
    batch_size: int = TeacherConfig.batch_size,
    vocab_ids: Tensor | None = None,
    target_sha256: str | None = None,
    text: TextKey | None = None,
    console: Console | None = None,
) -> CachedTeacher:
    """Score what `folder` lacks, then look it up there. The cache lies in a sub-folder named by its key.

    `runner` is a twin of `model` that computes the same, faster; the key is of `model`, whose weights_sha256 may be
    given where it is known. `vocab_ids` are the ids of a draft with a reduced vocabulary; `text` is what made the ids.

    Log-probs are of logits / temperature, so losses and acceptance read from the cache are at that temperature.
    Raises UsageError when top_k exceeds the target's vocabulary.
    """
    console = console or Console(stderr=True, highlight=False, markup=False)
    check_top_k(top_k, int(model.config.get_text_config().vocab_size))
    config = TeacherConfig(kind="cached", top_k=top_k, sampled=sampled, store=store)
    key = cache_key(
        config, target_sha256 or weights_sha256(model), str(model.dtype), temperature, vocab_ids=vocab_ids, text=text
    )
    place = Store(folder / key.short, key.as_dict())
    scorer = TargetScorer(runner or model, top_k, temperature, vocab_ids, sampled)
    return read_teacher(examples, fill_store(scorer, place, examples, batch_size, console).contents, place)


def fill_store(scorer: Scorer, store: Store, examples: Sequence[Example], batch_size: int, console: Console) -> Filled:
    """Score what `store` lacks of `examples`, and tell what it holds."""
    with store.held():
        filled = fill(scorer, store, examples, batch_size, console)
    console.print(f"teacher cache: {store.size()}, {store.folder}")
    return filled


def read_teacher(examples: Sequence[Example], contents: Contents, store: Store) -> CachedTeacher:
    """The teacher of examples that the store holds."""
    return CachedTeacher(examples, contents, store.read)


def score_laws(
    model: Any,
    examples: Sequence[Example],
    *,
    top_k: int,
    temperature: float = 1.0,
    vocab_ids: Tensor | None = None,
    batch_size: int = TeacherConfig.batch_size,
) -> CachedTeacher:
    """The top-k laws of a few examples, scored now and held in memory."""
    members = [index for shard in plan_shards(examples, size=1) for index in shard]
    table = score(TargetScorer(model, top_k, temperature, vocab_ids), members, examples, batch_size)
    contents = Contents()
    contents.add(IN_MEMORY, table)
    return CachedTeacher(examples, contents, lambda _: table)


def check_top_k(top_k: int, vocab_size: int, section: str = "teacher.") -> None:
    require(top_k <= vocab_size, f"{section}top_k", top_k, f"at most the target's {vocab_size} ids")
