"""The model's own forward over slots, and whether a model can be run so. Knows transformers' cache interface."""

import inspect
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache

from decode.agreement import agree, relative_gap
from decode.errors import first_line
from decode.model_facts import context_limit, input_device, layer_windows, rotation_depends_on_length
from decode.slots import Slots

log = logging.getLogger(__name__)


class SlotCache(Cache):
    """Slots as transformers' models see a cache. Positions and masks are given to them, so nothing else is asked."""

    slots: Slots

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.slots.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.slots.span - self.slots.width, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.slots.span, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.slots.length


class TransformersForward:
    """A Forward: any model whose attention looks where a mask says."""

    def __init__(self, model: Any) -> None:
        windows = layer_windows(model)
        assert windows is not None, "the model's layers were not asked about"
        arguments = inspect.signature(model.forward).parameters
        self._model, self._windows, self._dtype = model, windows, model.dtype
        self._keeps = "logits_to_keep" in arguments
        self._places = "position_ids" in arguments

    def new_slots(self, rows: int, length: int) -> Slots:
        return Slots(rows, length)

    def pad_width(self, width: int) -> int:
        return width

    def __call__(self, ids: Tensor, slots: Slots, keep: int) -> Tensor:
        """See Forward."""
        # Without a mask grouped heads are not unpacked: 3 % of a step of a small draft.
        masks = {
            kind: None if slots.hides_nothing(window) else slots.mask(window, self._dtype)
            for kind, window in self._windows.items()
        }
        extra: dict[str, Any] = {"logits_to_keep": keep} if self._keeps else {}
        if self._places:
            extra["position_ids"] = slots.positions
        cache = SlotCache()
        cache.slots = slots
        # Only models that mix kinds of layers know what a mask per kind is.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = self._model(input_ids=ids, attention_mask=mask, cache=cache, use_cache=True, return_dict=True, **extra)
        return output.logits[:, -keep:]


_REASONS: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def why_not_slots(model: Any) -> str | None:
    """Why `model` cannot be run over slots, half a sentence; None when it can. Tried out once for each model."""
    if model not in _REASONS:
        _REASONS[model] = reason = _declared_reason(model) or _observed_reason(model)
        if reason is not None:
            log.info("%s is run one row at a time: %s", type(model).__name__, reason)
    return _REASONS[model]


def _declared_reason(model: Any) -> str | None:
    if layer_windows(model) is None:
        return "not all of its layers keep plain keys and values"
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {model.config._attn_implementation!r}; expected sdpa or eager"
    # Models that work in buffers of fixed length read from the mask alone what a token may see. Others may count from
    # the last key back, which shows only in contexts longer than any trial.
    if not getattr(model, "_can_compile_fullgraph", False):
        return "it does not work in buffers of fixed length"
    return "its rotations depend on the longest row" if rotation_depends_on_length(model) else None


@torch.inference_mode()
def _observed_reason(model: Any) -> str | None:
    """Two ragged rows in two steps, one of them over a stale token, against a plain forward without a cache."""
    if context_limit(model) < 6:
        return "its context is too short for a trial"
    device = input_device(model)
    ids = torch.arange(6, device=device) % model.config.get_text_config().vocab_size
    plain = model(input_ids=ids.unsqueeze(0), use_cache=False, return_dict=True).logits[0]
    forward = TransformersForward(model)
    slots = forward.new_slots(2, 6)
    try:
        slots.aim([0, 0], [4, 3], device)
        forward(torch.stack([ids[:4], ids[:4].flip(0)]), slots, 1)  # columns 1 to 3 are row 1's: ids 2, 1, 0
        slots.aim([4, 0], [2, 2], device)
        ours = forward(torch.stack([ids[4:], ids[:2]]), slots, 2)  # row 1 starts anew over its stale slot 2
    except Exception as error:  # any model code may run, and the other way to run it remains
        return f"it does not take slots: {type(error).__name__}: {first_line(error)}"
    plain = plain[[4, 5, 0, 1]]
    ours = ours.flatten(0, 1)
    return None if agree(ours, plain, model.dtype) else f"its logits differ by {relative_gap(ours, plain):.1%}"
