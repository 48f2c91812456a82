"""The texts of a run, made anew every so many steps, the same on all ranks, kept in checkpoints; and who gets which."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import distributed

from decode.errors import UsageError
from distill.data.examples import Example
from distill.on_policy.sources import Pair, Source


class Pool(Callback):
    """Gives a feed the rows that a schedule leaves free (distill.data.extra.Extra), and a trainer its state to keep.

    A source is made at every step that is a multiple of its reuse_steps, from the draft's weights at that step and a
    seed that names it. Between those steps a checkpoint holds the texts, for the weights that made them are gone.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        pair: Callable[[Any], Pair],
        *,
        seed: int,
        accumulate: int,
        packing: bool,
    ) -> None:
        """`pair` makes of a copy of the draft, which it may change, the models that decode; on rank 0 only."""
        self.sources, self._pair = list(sources), pair
        self.say: Callable[[str], None] = print
        self._seed, self._accumulate, self._packing = seed, accumulate, packing
        self._module: Any = None
        self._made: dict[str, list[Example]] = {}
        self.version = 0
        """Raised whenever texts have changed."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Know whose draft it is."""
        self._module = pl_module

    @property
    def share(self) -> float:
        return sum(source.config.fraction for source in self.sources)

    @property
    def texts(self) -> list[Example]:
        """All texts that there are; a text's number is its place."""
        return [text for source in self.sources for text in self._texts(source)]

    def _texts(self, source: Source) -> list[Example]:
        return [*self._made[source.name], *source.fixed]

    def examples(self, step: int, micro_batch: int) -> list[tuple[int, Example]]:
        """Numbered texts in the order in which they are to be taken; see Extra."""
        if micro_batch == 0:
            self._refresh(step)
        place = 0
        queues = []
        for source in self.sources:
            texts = self._texts(source)
            queues.append([(place + i, texts[i]) for i in self._order(source, len(texts), step, micro_batch)])
            place += len(texts)
        return self._mixed(queues, random.Random(f"draftsmith/mix/{self._seed}/{step}/{micro_batch}"))

    def _order(self, source: Source, count: int, step: int, micro_batch: int) -> list[int]:
        """One shuffle for each making; the micro-batches begin at places spread evenly over it."""
        since = step % source.config.reuse_steps
        order = list(range(count))
        random.Random(f"draftsmith/order/{self._seed}/{source.name}/{step - since}").shuffle(order)
        start = (since * self._accumulate + micro_batch) * count // (source.config.reuse_steps * self._accumulate)
        return order[start:] + order[:start]

    def _mixed(self, queues: list[list[tuple[int, Example]]], draw: random.Random) -> list[tuple[int, Example]]:
        """Sources by chance, so that in the mean each has its share of the rows."""
        mixed: list[tuple[int, Example]] = []
        weights = [self._weight(*both) for both in zip(self.sources, queues, strict=True)]
        queues = [queue[::-1] for queue in queues]
        while any(queues):
            left = [weight * bool(queue) for weight, queue in zip(weights, queues, strict=True)]
            mixed.append(draw.choices(queues, left)[0].pop())
        return mixed

    def _weight(self, source: Source, queue: list[tuple[int, Example]]) -> float:
        """How often a text is to be taken: a row holds the fewer of them, the longer they are."""
        tokens = sum(len(text.input_ids) for _, text in queue)
        return source.config.fraction * (len(queue) / max(tokens, 1) if self._packing else 1.0)

    def _refresh(self, step: int) -> None:
        due = [source for source in self.sources if step % source.config.reuse_steps == 0]
        if due:
            copied = self._module.draft_copy()  # processes that share its weights ask for it together
            self._made |= on_one_rank(lambda: self._make(due, self._pair(copied), step))
            self.version += 1
        lacking = [source.name for source in self.sources if source.name not in self._made]
        if lacking:
            raise UsageError(f"{lacking[0]}: the checkpoint before step {step} holds no texts of it")

    def _make(self, sources: list[Source], pair: Pair, step: int) -> dict[str, list[Example]]:
        made = {}
        for source in sources:
            started = time.perf_counter()
            made[source.name] = texts = source.texts(pair, f"draftsmith/{source.name}/{self._seed}/{step}")
            if not texts and not source.fixed:
                raise UsageError(f"{source.name}: at step {step} no text came out of {source.config.num_texts} prompts")
            supervised, seconds = sum(text.num_supervised for text in texts), time.perf_counter() - started
            self.say(f"{source.name}: {len(texts)} texts, {supervised} tokens to train on, {seconds:.1f} s")
        return made

    def state_dict(self) -> dict[str, Any]:
        """Tensors by source."""
        return {name: packed(texts) for name, texts in self._made.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._made = {name: unpacked(tensors, name) for name, tensors in state_dict.items()}
        self.version += 1


def on_one_rank(make: Callable[[], dict[str, list[Example]]]) -> dict[str, list[Example]]:
    """What rank 0 makes, on every rank: the sum over ranks of a window's loss rests on equal texts."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return make()
    made: list[Any] = [make() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(made, src=0)
    found: dict[str, list[Example]] = made[0]
    return found


def packed(texts: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Texts of one source as flat tensors; weights and advantages where they have them."""
    tensors = {
        "lengths": torch.tensor([len(text.input_ids) for text in texts], dtype=torch.int32),
        "ids": torch.tensor([token for text in texts for token in text.input_ids], dtype=torch.int32),
        "mask": torch.tensor([bit for text in texts for bit in text.mask], dtype=torch.bool),
    }
    for name in ("weights", "advantages"):
        if texts and getattr(texts[0], name) is not None:
            tensors[name] = torch.tensor([v for text in texts for v in getattr(text, name)], dtype=torch.float64)
    return tensors


def unpacked(tensors: dict[str, torch.Tensor], source: str) -> list[Example]:
    """The texts that `packed` made tensors of."""
    lengths = tensors["lengths"].tolist()
    columns = {name: [part.tolist() for part in tensors[name].split(lengths)] for name in tensors if name != "lengths"}
    none = [None] * len(lengths)
    rows = zip(
        columns["ids"], columns["mask"], columns.get("weights", none), columns.get("advantages", none), strict=True
    )
    return [Example(ids, mask, source, weights, advantages) for ids, mask, weights, advantages in rows]
