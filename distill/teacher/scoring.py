"""Scores examples with the target, each once, into a store; what a killed process had finished is kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor

from distill.data.batches import collate
from distill.data.examples import Example
from distill.heads import head_stands_apart, supervised_logits
from distill.laws import upcast
from distill.teacher.contents import Contents, contents_of_all, find_contents
from distill.teacher.draws import draw_columns, uniforms_of
from distill.teacher.store import Store, Table
from distill.teacher.tally import Tally

# Supervised positions per shard: what a kill costs at most; grows so that no cache has many more than MAX_SHARDS.
SHARD_POSITIONS = 8192
MAX_SHARDS = 1000

LAWS = ("ids", "log_probs", "log_tail", "log_mass")
"""What a table holds of each position."""


class Scorer(Protocol):
    """Gives the target's law at the supervised positions of some examples."""

    def score_batch(self, members: Sequence[int], examples: Sequence[Example]) -> Table:
        """Of examples[m] for m in `members`, in this order, and of each one's supervised positions in theirs:

        ids [N, K] integers, log_probs [N, K], log_tail [N] (or log_mass [N], of ids that were drawn). Whatever else
        the table holds is left out of a cache.
        """
        ...


class TargetScorer:
    """Runs the target over whole examples, unpacked, and keeps the likeliest ids of each position, or drawn ones."""

    def __init__(
        self,
        model: Any,
        top_k: int,
        temperature: float = 1.0,
        vocab_ids: Tensor | None = None,  # [M]: the ids of a draft with a reduced vocabulary
        sampled: int | None = None,
    ) -> None:
        self.model, self.top_k, self.temperature, self.sampled = model.eval(), top_k, temperature, sampled
        self._apart = head_stands_apart(model)
        self._device = next(model.parameters()).device
        self._vocab_ids = None if vocab_ids is None else vocab_ids.to(self._device)

    @torch.inference_mode()
    def score_batch(self, members: Sequence[int], examples: Sequence[Example]) -> Table:
        logits = self.logits(members, examples)
        if self.sampled is not None:
            uniforms = torch.cat([uniforms_of(examples[index], self.sampled) for index in members])
            found = dict(
                zip(("ids", "log_probs", "log_mass"), drawn_of(logits, uniforms, self._vocab_ids), strict=True)
            )
        else:
            kept = top_k_of_(logits, self.top_k, self._vocab_ids)
            found = dict(zip(("ids", "log_probs", "log_tail"), kept, strict=True))
        return {name: (tensor if name == "ids" else tensor.float()).cpu() for name, tensor in found.items()}

    @torch.inference_mode()
    def logits(self, members: Sequence[int], examples: Sequence[Example]) -> Tensor:  # [N, V], fp32 or wider
        """The target's logits at the supervised positions, divided by the temperature."""
        batch = move_data_to_device(collate([[index] for index in members], examples, normaliser=0), self._device)
        with torch.autocast(self._device.type, enabled=False):  # the target keeps its own precision
            logits = supervised_logits(self.model, batch, self._apart)
        return upcast(logits).div_(self.temperature)


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


def drawn_of(
    logits: Tensor,  # [N, V]
    uniforms: Tensor,  # [N, S] fp64 in [0, 1)
    vocab_ids: Tensor | None = None,  # [M]: the ids of a draft with a reduced vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """S ids [N, S] drawn among the draft's, their log-probs in the whole law [N, S], and the log of the mass of the
    draft's ids [N]."""
    log_probs = logits.log_softmax(-1)
    among = log_probs if vocab_ids is None else log_probs.index_select(-1, vocab_ids)
    columns = draw_columns(among, uniforms)
    ids = columns if vocab_ids is None else vocab_ids[columns]
    log_mass = among.new_zeros(len(among)) if vocab_ids is None else among.logsumexp(-1)
    return ids, among.gather(-1, columns), log_mass


class Filled(NamedTuple):
    """What became of a store."""

    contents: Contents
    num_scored: int
    """Positions that were scored now."""


def fill(scorer: Scorer, store: Store, examples: Sequence[Example], batch_size: int, console: Console) -> Filled:
    """Score the examples that the store lacks, shard by shard.

    The store has to be held. Damaged shards are named and made again. How examples are put in shards and batches
    depends on what is missing alone, so a scoring that was interrupted goes on as if it had not been.
    """
    for name in store.damaged():
        console.print(f"teacher cache: {store.path(name)} is damaged and is made again")
        del store.checksums[name]
    contents = find_contents(store)
    wanted = dict(zip(contents_of_all(examples), examples, strict=True))  # each content once
    missing = [example for content, example in wanted.items() if content not in contents]
    size = max(SHARD_POSITIONS, sum(e.num_supervised for e in wanted.values()) // MAX_SHARDS)
    num_missing = sum(e.num_supervised for e in missing)
    with Tally(num_missing, console) as tally:
        for members in plan_shards(missing, size):
            name, table = store.free_name(), score(scorer, members, missing, batch_size, tally)
            store.write(name, _narrow(table, str(store.key["store"])))
            contents.add(name, table)
            tally.wrote(store.path(name).stat().st_size, len(table["ids"]))
    return Filled(contents, num_missing)


def plan_shards(examples: Sequence[Example], size: int) -> list[list[int]]:
    """Numbers of examples by shard, each with at least `size` positions but the last.

    The longest come first, so that the rows of a batch have like lengths and memory peaks early.
    """
    shards: list[list[int]] = []
    filled = size
    for index in sorted(range(len(examples)), key=lambda i: (-len(examples[i].input_ids), i)):
        if filled >= size:
            shards.append([])
            filled = 0
        shards[-1].append(index)
        filled += examples[index].num_supervised
    return shards


def score(
    scorer: Scorer, members: Sequence[int], examples: Sequence[Example], batch_size: int, tally: Tally | None = None
) -> Table:
    """The table of examples[m] for m in `members`, in this order; laws are scored `batch_size` examples at a time."""
    parts: list[Table] = []
    for start in range(0, len(members), batch_size):
        parts.append(scorer.score_batch(members[start : start + batch_size], examples))
        if tally is not None:
            tally.add(len(parts[-1]["ids"]))
    chosen = [examples[index] for index in members]
    return {
        "token_ids": torch.tensor([token for example in chosen for token in example.input_ids]),
        "mask": torch.tensor([bit for example in chosen for bit in example.mask]),
        "lengths": torch.tensor([len(example.input_ids) for example in chosen], dtype=torch.int32),
        **{name: torch.cat([part[name] for part in parts]) for name in LAWS if name in parts[0]},
    }


def _narrow(table: Table, store: str) -> Table:
    """Ids in as few bytes as hold them all, log-probs as `store` says; the mass of the rest stays fp32."""
    largest = max(int(table["ids"].max()), int(table["token_ids"].max()))
    ids = torch.uint16 if largest < 2**16 else torch.int32
    types = {"token_ids": ids, "ids": ids, "log_probs": getattr(torch, store)}
    return {name: tensor.to(types.get(name, tensor.dtype)) for name, tensor in table.items()}
