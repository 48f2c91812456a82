"""A session over transformers' own dynamic caches, one a row, for models that cannot be run over slots."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from decode.agreement import agree
from decode.errors import UsageError, first_line
from decode.model_facts import context_limit, input_device

# A model without a usable cache fails in one of these ways when it is given one.
MISFITS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError)


def chunks(total: int, most: int) -> Iterator[int]:
    """Cuts `total` tokens into parts of `most`, only the first shorter; yields what is left after each, 0 at last."""
    while total > 0:
        total = (total - 1) // most * most
        yield total


def new_tokens(length: int, seen: int, keep: int) -> int:
    """Tokens of a context of `length` to feed after the first `seen`; none where no logits are kept.

    Raises ValueError where fewer are new than are kept.
    """
    if length - seen < keep:
        raise ValueError(f"a session was asked for {keep} logits of {length - seen} new tokens")
    return length - seen if keep else 0


class CachedRow:
    """One text and its cache."""

    def __init__(self, model: Any) -> None:
        arguments = inspect.signature(model.forward).parameters
        self._model = model
        self._extra = {"use_cache": True, "return_dict": True}
        self._keeps, self._places = "logits_to_keep" in arguments, "position_ids" in arguments
        # Code that ships with a model may be older than the argument's present name.
        self._name = "past_key_values" if "cache" not in arguments and "past_key_values" in arguments else "cache"
        self._start_anew()
        # Models with recurrent states go on from them by single tokens only.
        self._in_one_go = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)

    def _start_anew(self) -> None:
        self._cache = new_cache(self._model)
        self._seen = 0  # tokens that the cache holds
        self._floor = 0  # a rewind below this length is beyond what the cache recorded

    def extend(self, context: Tensor, keep: int, most: int) -> Tensor:
        """Logits [keep, V] at the last positions of `context` [n], fed at most `most` tokens at a time."""
        ids = context[self._seen :].to(input_device(self._model)).unsqueeze(0)
        total, done, logits = new_tokens(len(context), self._seen, keep), 0, ids
        for left in chunks(total, total if self._in_one_go else max(most, keep)):
            logits = self._feed(ids[:, done : total - left], 1 if left else keep)
            done = total - left
            if left:
                self._crop(0)
        return logits[0, -keep:]

    def _feed(self, ids: Tensor, keep: int) -> Tensor:
        extra: dict[str, Any] = {"logits_to_keep": keep} if self._keeps else {}
        if self._places:  # what some models take from their cache is of its first layer, which may be of any kind
            extra["position_ids"] = torch.arange(self._seen, self._seen + ids.shape[1], device=ids.device).unsqueeze(0)
        output = self._model(input_ids=ids, **{self._name: self._cache}, **self._extra, **extra)
        self._seen += ids.shape[1]
        return output.logits

    def rewind(self, length: int) -> None:
        """Forget all tokens beyond the first `length`. Called after every round, also when nothing is to be forgotten:
        layers with a window or a convolution then drop states that only a rewind would have needed."""
        if length > 0 and length >= self._floor:
            self._crop(max(self._seen - length, 0))
        elif length < self._seen:
            self._start_anew()  # the text is fed again

    def _crop(self, surplus: int) -> None:
        if self._seen == 0 or (surplus == 0 and self.stuck_layers()):
            return  # a cache that holds no state cannot be cropped, and plain decoding asks it of no other
        self._cache.crop(-surplus)
        self._seen -= surplus
        self._floor = self._seen

    def stuck_layers(self) -> list[str]:
        """Classes of the cache's layers that cannot be rewound; known once something was fed."""
        return sorted({type(layer).__name__ for layer in self._cache.layers if not layer.is_croppable})


class DynamicSession:
    """See Session. Rows are run one after another."""

    def __init__(self, model: Any, rows: int, prefill_chunk: int) -> None:
        self.capacity = context_limit(model)
        self._chunk = prefill_chunk
        self._rows = [CachedRow(model) for _ in range(rows)]

    @torch.inference_mode()
    def extend(self, contexts: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        logits = [
            row.extend(context, count, self._chunk).to(context.device) if count else None
            for row, context, count in zip(self._rows, contexts, keep, strict=True)
        ]
        idle = next((part[:0] for part in logits if part is not None), contexts[0].new_empty(0, 0).float())
        return [idle if part is None else part for part in logits]

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self._rows, lengths, strict=True):
            row.rewind(length)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]


def new_cache(model: Any) -> Any:
    """An empty dynamic cache that can be rewound, whatever the caller's config says of caching."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


@torch.inference_mode()
def check_dynamic_rewind(model: Any, name: str) -> None:
    """Refuse a model whose states do not rewind, by trying it: some declare it, of others only the logits tell.

    Raises UsageError naming the layer class.
    """
    try:
        stuck = _stuck_classes(model)
    except MISFITS as error:
        stuck = f"{type(model).__name__} does not take a key-value cache ({first_line(error)}), so it"
    if stuck:
        raise UsageError(f"model {name!r}: {stuck} cannot be rewound, which speculative decoding needs")


@torch.inference_mode()
def check_continues(model: Any, name: str) -> None:
    """Refuse a model that does not go on from its cache as from the whole text. Raises UsageError naming its class."""
    ids = torch.arange(5, device=input_device(model)) % model.config.get_text_config().vocab_size
    reason = "its logits are others"
    try:
        row = CachedRow(model)
        row.extend(ids[:2], 1, 2)
        row.rewind(2)
        ours = torch.cat([row.extend(ids[:length], 1, 2) for length in (3, 4, 5)])
        plain = model(input_ids=ids.unsqueeze(0), use_cache=False, return_dict=True).logits[0, 2:]
        if agree(ours, plain, model.dtype) or not plain.isfinite().all():
            return  # of weights that are no numbers the first round tells
    except MISFITS as error:
        reason = first_line(error)
    kind = type(model).__name__
    raise UsageError(f"model {name!r}: {kind} does not go on from a cache, which decoding needs: {reason}")


def _stuck_classes(model: Any) -> str | None:
    ids = torch.arange(6, device=input_device(model)) % model.config.get_text_config().vocab_size
    row = CachedRow(model)
    row.extend(ids[:2], 1, 2)
    if layers := row.stuck_layers():
        return f"its cache layers of class {', '.join(layers)}"
    row.rewind(2)
    row.extend(torch.cat([ids[:2], ids[:3]]), 1, 3)
    row.rewind(3)  # two false tokens are forgotten; ids[0] stays
    context = torch.cat([ids[:2], ids[:1], ids[3:5]])
    ours = row.extend(context, 2, 2)
    plain = model(input_ids=context.unsqueeze(0), use_cache=False, return_dict=True).logits[0, -2:]
    return None if agree(ours, plain, model.dtype) else f"the states of {type(model).__name__}"
