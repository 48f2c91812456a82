"""Models that remember the text so far. The only room, with dynamic_session and slots, that touches caches.

A session is given the whole context and feeds the model only the suffix that it has not seen, so a round in which
all drafted tokens were accepted, or none, needs no case of its own.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from decode.backends.cuda_graph import Draw, GraphForward
from decode.backends.eager import TransformersForward, why_not_slots
from decode.backends.static import StaticSlots
from decode.dynamic_session import DynamicSession, check_continues, check_dynamic_rewind, chunks, new_tokens
from decode.laws import Law
from decode.model_facts import context_limit as context_limit
from decode.model_facts import input_device

if TYPE_CHECKING:
    from decode.backends.base import Forward
    from decode.models import LoadedModel

# The most tokens of a row, and of all rows together, that one forward is fed: attention scores of long prompts, and
# hidden states of many, would else outgrow the weights.
PREFILL_CHUNK = 512
PREFILL_TOKENS = 4096


class Session(Protocol):
    """What proposers and the loop need of a model. Every list has one entry for each live row."""

    capacity: int  # the longest context that the model can see

    def extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        """Logits [keep[i], V] at the last keep[i] positions of contexts[i] [n_i], on the contexts' device.

        A context is the whole text of a row and continues what the row has seen; at least keep[i] of its tokens are
        new. keep[i] == 0: the row is idle, nothing of it is fed, and its logits have no rows.
        """

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all tokens of row i beyond the first lengths[i]; called after every round."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Only these rows, ascending, stay in the batch."""


class SlotSession:
    """See Session. All rows are run at once; a rewind is bookkeeping only."""

    def __init__(self, forward: "Forward", model: Any, rows: int, length: int) -> None:
        self.capacity = context_limit(model)
        self._forward, self._device = forward, input_device(model)
        self._slots = forward.new_slots(rows, length)
        self._seen = [0] * rows

    def extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        """See Session."""
        if torch.is_inference_mode_enabled():
            return self._extend(contexts, keep)
        with torch.inference_mode():  # to enter it again at every step would cost as much as two operations
            return self._extend(contexts, keep)

    def _extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        """Rows end together: a shorter suffix begins in a later column or chunk than a longer one."""
        if len(keep) == 1 and 0 < keep[0] <= contexts[0].shape[0] - self._seen[0] <= PREFILL_CHUNK:
            return [self._feed_one(contexts[0], keep[0])]
        unseen = [
            new_tokens(len(context), seen, count)
            for context, seen, count in zip(contexts, self._seen, keep, strict=True)
        ]
        most = max(keep)
        logits = None
        for left in chunks(max(unseen), max(most, min(PREFILL_CHUNK, PREFILL_TOKENS // len(keep)))):
            fed = [max(count - left, 0) for count in unseen]
            unseen = [count - part for count, part in zip(unseen, fed, strict=True)]
            logits = self._feed(contexts, fed, 1 if left else most)
        if logits is None:  # every row is idle
            return [torch.empty(0, 0, device=contexts[0].device) for _ in keep]
        logits = logits.to(contexts[0].device)
        return [logits[row, most - count :] if count < most else logits[row] for row, count in enumerate(keep)]

    def _feed_one(self, context: Tensor, keep: int) -> Tensor:
        """The everyday step of a single row, with as few operations as there can be."""
        length, seen = context.shape[0], self._seen[0]
        fed = length - seen
        if self._forward.pad_width(fed) > fed:
            return _on(context.device, self._feed([context], [fed], keep)[0])
        self._slots.aim([seen], [fed], self._device, fed)
        self._seen[0] = length
        ids = context[seen:].unsqueeze(0)
        if ids.device == self._device:
            return self._forward(ids, self._slots, keep).squeeze(0)
        return self._forward(ids.to(self._device), self._slots, keep).squeeze(0).to(context.device)

    def _feed(self, contexts: Sequence[Tensor], fed: list[int], keep: int) -> Tensor:
        width = self._forward.pad_width(max(fed))
        suffixes = [
            context[seen : seen + count] for context, seen, count in zip(contexts, self._seen, fed, strict=True)
        ]
        if min(fed) == width:
            ids = suffixes[0].unsqueeze(0) if len(fed) == 1 else torch.stack(suffixes)
        else:
            ids = contexts[0].new_zeros(len(fed), width)
            for row, suffix in zip(ids, suffixes, strict=True):
                row[width - len(suffix) :] = suffix
        self._slots.aim(self._seen, fed, self._device, width)
        self._seen = [seen + count for seen, count in zip(self._seen, fed, strict=True)]
        return self._forward(ids.to(self._device), self._slots, keep)

    def rewind(self, lengths: Sequence[int]) -> None:
        self._seen = [min(seen, length) for seen, length in zip(self._seen, lengths, strict=True)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._slots.keep_rows(rows)
        self._seen = [self._seen[row] for row in rows]


class DraftingSession(SlotSession):
    """A session of one row that can draft several tokens in one run, in between which the host is not needed."""

    def __init__(self, forward: GraphForward, model: Any, length: int) -> None:
        super().__init__(forward, model, 1, length)
        self._loops = forward
        self.device = self._device  # contexts must lie there

    @torch.inference_mode()
    def draft_steps(
        self,
        context: Tensor,  # [n] the whole text; at least its last token is new
        uniforms: Tensor,  # [steps] fp64 in [0, 1)
        draw: Draw,
        key: Hashable,  # names what `draw` does; runs made ready for one text serve later ones with the same key
    ) -> tuple[Tensor, list[Law]]:
        """The tokens [steps] that follow `context`, each drawn by `draw` with its number, and the laws they were drawn
        from; both are overwritten by the next such run. All tokens but the last are seen then.

        `context` and all drafted tokens but the last must fit into the capacity.
        """
        last, steps = len(context) - 1, len(uniforms)
        if new_tokens(last + 1, self._seen[0], 1) > 1:
            self._extend([context[:last]], [1])
        assert isinstance(self._slots, StaticSlots)
        loop = self._loops.draft_loop(self._slots, draw, steps, key)
        position = torch.full((1,), last, device=self.device)  # filled on the device: nothing waits for a copy
        drafted = loop(context[last:], position, uniforms)
        self._seen[0] = last + steps
        return drafted


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def new_session(loaded: "LoadedModel", rows: int, length: int) -> Session:
    """An empty session of `rows` texts of at most `length` tokens each."""
    forward = loaded.forward
    if forward is None and why_not_slots(loaded.model) is None:
        forward = TransformersForward(loaded.model)
    if forward is None:
        return DynamicSession(loaded.model, rows, PREFILL_CHUNK)
    if rows == 1 and isinstance(forward, GraphForward):
        return DraftingSession(forward, loaded.model, length)
    return SlotSession(forward, loaded.model, rows, length)


def check_cache(model: Any, name: str, *, rewinds: bool) -> None:
    """Refuse, before decoding starts, a model that cannot go on from what it remembers; with `rewinds` also one that
    cannot forget tokens.

    Raises UsageError naming the class that holds its states.
    """
    if why_not_slots(model) is None:
        return
    if rewinds:
        check_dynamic_rewind(model, name)
    else:
        check_continues(model, name)
