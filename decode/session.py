"""One model and its key-value cache. The only room that touches caches.

A session is given the whole context and feeds the model only the suffix that it has not seen, so a round in which
all drafted tokens were accepted, or none, needs no case of its own.
"""

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.errors import UsageError


class Session(Protocol):
    """What proposers and the loop need of a model."""

    length: int  # tokens of the context that the cache holds
    capacity: int  # the longest context that the model can see

    def extend(self, context: Tensor, keep: int) -> Tensor:
        """Logits [keep, V] at the last `keep` positions of `context` [1, n], which continues what was seen."""

    def rewind(self, length: int) -> None:
        """Forget all tokens beyond the first `length`."""


class ModelSession:
    """A session over a transformers model with a dynamic cache; one sequence."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = new_cache(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.length = 0
        self.capacity = context_limit(model)

    def extend(self, context: Tensor, keep: int) -> Tensor:
        """See Session. At least `keep` tokens must be new."""
        extra = {"logits_to_keep": keep} if self._keeps else {}
        output = self._model(
            input_ids=context[:, self.length :], cache=self._cache, use_cache=True, return_dict=True, **extra
        )
        self.length = context.shape[1]
        return output.logits[0, -keep:]

    def rewind(self, length: int) -> None:
        """See Session. Called after every round, also when nothing is to be forgotten: layers with a window then
        drop the states that only a rewind would have needed."""
        if self.length == 0:
            return  # nothing was fed, and a cache that holds no state cannot be cropped
        surplus = max(self.length - length, 0)
        self._cache.crop(-surplus)
        self.length -= surplus


def new_cache(model: Any) -> Any:
    """An empty dynamic cache that can be rewound, whatever the caller's config says of caching."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


def context_limit(model: Any) -> int:
    """The longest context in tokens; models that state none get a limit that is never met."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return 2**31 - 1


@torch.inference_mode()
def check_rewindable(model: Any, name: str) -> None:
    """Refuse, before decoding starts, a model whose cache cannot be rewound.

    A cache knows it only once it holds states, so two tokens are fed.
    Raises UsageError naming the layer class.
    """
    cache = new_cache(model)
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    model(input_ids=ids, cache=cache, use_cache=True)
    stuck = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
    if stuck:
        raise UsageError(
            f"model {name!r}: its cache layers of class {', '.join(stuck)} cannot be rewound, which speculative "
            "decoding needs"
        )
