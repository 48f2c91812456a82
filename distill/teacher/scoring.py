"""Scores examples with the target, each once, into a store; what a killed process had finished is kept."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from distill.data.batches import collate
from distill.data.examples import Example
from distill.heads import head_stands_apart, supervised_logits
from distill.laws import upcast
from distill.teacher.store import Store

# Supervised positions per shard: what a kill costs at most; grows so that no cache has more than MAX_SHARDS.
SHARD_POSITIONS = 8192
MAX_SHARDS = 1000
# Seconds between progress lines where there is no terminal to draw a bar on.
TELL_EVERY = 30.0


def plan_shards(examples: Sequence[Example]) -> dict[str, list[int]]:
    """Shard name -> its examples, longest first, so that the rows of a batch have like lengths and memory peaks early.

    The plan depends on the examples alone: another batch size continues a cache that was begun.
    """
    size = max(SHARD_POSITIONS, sum(e.num_supervised for e in examples) // MAX_SHARDS)
    shards: list[list[int]] = []
    filled = size
    for index in sorted(range(len(examples)), key=lambda i: (-len(examples[i].input_ids), i)):
        if filled >= size:
            shards.append([])
            filled = 0
        shards[-1].append(index)
        filled += examples[index].num_supervised
    return {f"shard-{number:05d}": members for number, members in enumerate(shards)}


class Scorer:
    """Runs the target over whole examples, unpacked, and keeps the likeliest ids of each supervised position."""

    def __init__(
        self, model: Any, top_k: int, temperature: float, batch_size: int, vocab_ids: Tensor | None = None
    ) -> None:
        self.model, self.top_k, self.temperature, self.batch_size = model.eval(), top_k, temperature, batch_size
        self._apart = head_stands_apart(model)
        self._device = next(model.parameters()).device
        self._vocab_ids = None if vocab_ids is None else vocab_ids.to(self._device)

    def fill(self, store: Store, examples: Sequence[Example], console: Console) -> None:
        """Make every shard that the store lacks. Damaged shards are named and made again."""
        plan = plan_shards(examples)
        damaged, unfinished = store.lacks(plan)
        for name in damaged:
            console.print(f"teacher cache: {store.path(name)} is damaged and is made again")
        missing = sorted(damaged + unfinished)
        total = sum(examples[i].num_supervised for name in missing for i in plan[name])
        with _Tally(total, console) as tally:
            for name in missing:
                store.write(name, self._score(plan[name], examples, tally))

    def _score(self, members: list[int], examples: Sequence[Example], tally: "_Tally") -> dict[str, Tensor]:
        parts = []
        for start in range(0, len(members), self.batch_size):
            group = members[start : start + self.batch_size]
            parts.append(self._score_batch(group, examples))
            tally.add(len(parts[-1]["tokens"]))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    @torch.inference_mode()
    def _score_batch(self, members: list[int], examples: Sequence[Example]) -> dict[str, Tensor]:
        """Per position: its example, the token that follows it, and the law there; positions of an example in order."""
        batch = move_data_to_device(collate([[index] for index in members], examples, normaliser=0), self._device)
        with torch.autocast(self._device.type, enabled=False):  # the target keeps its own precision
            logits = supervised_logits(self.model, batch, self._apart)
        kept, log_probs, log_tail = top_k_of_(upcast(logits).div_(self.temperature), self.top_k, self._vocab_ids)
        following = batch.input_ids.roll(-1, dims=1)[batch.supervised]
        scored = {
            "example": batch.example_ids[batch.supervised].int(),
            "tokens": following.int(),
            "ids": kept.int(),
            "log_probs": log_probs.float(),
            "log_tail": log_tail.float(),
        }
        return {name: tensor.cpu() for name, tensor in scored.items()}


def top_k_of_(
    logits: Tensor,  # [N, V], spoilt
    k: int,
    vocab_ids: Tensor | None = None,  # [M]: the ids of a draft with a reduced vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest ids [N, K], their log-probs [N, K], and the log of the mass of the draft's other ids [N].

    The tail is summed from its own entries: as 1 minus the kept mass it would be rounding noise where it is small.
    """
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(k)
    others = logits.scatter_(-1, ids, -torch.inf)
    tail = (others if vocab_ids is None else others.index_select(-1, vocab_ids)).logsumexp(-1)
    return ids, values - total, tail - total.squeeze(-1)


class _Tally:
    """A progress bar in tokens, shown while there is something to do; in a log, a line now and then."""

    def __init__(self, total: int, console: Console) -> None:
        self.total, self.console = total, console
        columns = (TextColumn("scoring"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=total == 0)

    def __enter__(self) -> "_Tally":
        self.start = self.told = time.perf_counter()
        self.done = 0
        self.progress.start()
        self.task: TaskID = self.progress.add_task("scoring", total=self.total, shown="")
        return self

    def add(self, count: int) -> None:
        self.done += count
        now = time.perf_counter()
        shown = f"{self.done}/{self.total} tokens, {self.done / max(now - self.start, 1e-9):.0f}/s"
        self.progress.update(self.task, completed=self.done, shown=shown)
        if not self.console.is_terminal and now - self.told >= TELL_EVERY:
            self.console.print(f"scoring: {shown}")
            self.told = now

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
