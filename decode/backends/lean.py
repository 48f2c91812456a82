"""A forward of our own for models of Llama's shape: few operations a layer, and little Python around them.

A small draft's step is mostly launches. Here query, key and value are one product, gate and up another, the angles are
looked up, and nothing is masked where nothing could be seen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.agreement import agree, relative_gap
from decode.backends.base import CannotServe
from decode.backends.llama_parts import LlamaParts, Multiply, Norm
from decode.slots import Slots

PROBE_CHUNKS = (5, 3, 1)  # a fresh text, a few more tokens, and a step


class LeanSlots(Slots):
    """Slots that know whether a step is plain causal attention among its own tokens, which kernels mask themselves."""

    fresh = False  # every row starts at 0, and none is padded

    def aim(self, starts: Sequence[int], widths: Sequence[int], device: torch.device, width: int | None = None) -> None:
        """See Slots."""
        super().aim(starts, widths, device, width)
        self.fresh = not any(starts) and min(widths) == self.span == self.width


class _Layer(NamedTuple):
    norm: Norm
    qkv: Multiply
    turn_norm: Norm | None  # of queries and keys, before they are turned
    out: Multiply
    mlp_norm: Norm
    gate_up: Multiply
    down: Multiply
    window: int | None


class LeanForward:
    """The forward of a llama, mistral, qwen2 or qwen3 model, checked against the model's own when it is made.

    Memory: fused weights are copies, and on a CPU in fp32 all products hold packed copies; the model itself stays, for
    baselines and embeddings. Later changes of the model's weights do not reach the copies.
    Raises CannotServe naming what does not fit, also where the logits differ.
    """

    def __init__(self, model: Any) -> None:
        parts = LlamaParts(model)
        self._embeddings, self._head, self._norm = parts.embeddings, parts.head, parts.norm(model.model.norm)
        self._heads, self._key_heads, self._head_dim = parts.heads, parts.key_heads, parts.head_dim
        self._scale, self._rotary = parts.scale, parts.rotary
        self._layers = [_layer(parts, layer, index) for index, layer in enumerate(model.model.layers)]
        self._windows = sorted({layer.window for layer in self._layers}, key=str)
        self._angles: list[Tensor] = [parts.embeddings.new_empty(0, 2 * parts.head_dim)]
        _verify(self, model)

    def new_slots(self, rows: int, length: int) -> Slots:
        """See Forward."""
        return LeanSlots(rows, length)

    def pad_width(self, width: int) -> int:
        """See Forward: any width does."""
        return width

    def __call__(self, ids: Tensor, slots: Slots, keep: int) -> Tensor:
        """See Forward."""
        rows, width = ids.shape
        queries, turned = self._heads, self._heads + self._key_heads
        hidden = F.embedding(ids, self._embeddings)
        cos, sin = self._turns(slots)
        masks = {window: self._mask(slots, window) for window in self._windows}
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.norm(hidden)).view(rows, width, -1, self._head_dim).transpose(1, 2)
            qk = heads[:, :turned]
            if layer.turn_norm is not None:
                qk = layer.turn_norm(qk)
            qk = torch.addcmul(qk * cos, torch.roll(qk, self._head_dim // 2, -1), sin)
            keys, values = slots.update(index, qk[:, queries:], heads[:, turned:])
            mask, causal = masks[layer.window]
            seen = F.scaled_dot_product_attention(
                qk[:, :queries], keys, values, mask, 0.0, causal, scale=self._scale, enable_gqa=True
            )
            hidden = hidden + layer.out(seen.transpose(1, 2).reshape(rows, width, -1))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return self._head(self._norm(hidden[:, width - keep :]))

    def _mask(self, slots: Slots, window: int | None) -> tuple[Tensor | None, bool]:
        """What to add to the scores, and whether the kernel's own causal rule does instead."""
        if slots.hides_nothing(window):
            return None, False
        if isinstance(slots, LeanSlots) and slots.fresh and (window is None or slots.span <= window):
            return None, True
        return slots.mask(window, self._embeddings.dtype), False

    def _turns(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the step's positions, [W, D] or [B, 1, W, D] each."""
        used = slots.length + 1 if slots.start is None else slots.start + slots.width
        if used > self._angles[-1].shape[0]:
            self._extend_angles(used)
        if slots.start is not None:
            cos, sin = self._angles[-1][slots.start : slots.start + slots.width].chunk(2, -1)
        else:
            cos, sin = F.embedding(slots.positions, self._angles[-1]).unsqueeze(1).chunk(2, -1)
        return cos, sin

    def _extend_angles(self, length: int) -> None:
        """Look angles up to twice `length`. Outgrown tables are kept: captured graphs go on reading them."""
        positions = torch.arange(2 * length, device=self._embeddings.device).unsqueeze(0)
        cos, sin = self._rotary(self._embeddings, positions)
        # rotate_half(x) * sin is x rolled by half, times sin with its first half negated.
        first, second = sin[0].chunk(2, -1)
        self._angles.append(torch.cat((cos[0], -first, second), -1))


def _layer(parts: LlamaParts, layer: Any, index: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        parts.norm(layer.input_layernorm),
        parts.fused(attention.q_proj, attention.k_proj, attention.v_proj),
        parts.turn_norm(attention),
        parts.fused(attention.o_proj),
        parts.norm(layer.post_attention_layernorm),
        parts.fused(mlp.gate_proj, mlp.up_proj),
        parts.fused(mlp.down_proj),
        parts.window(index),
    )


@torch.inference_mode()
def _verify(forward: LeanForward, model: Any) -> None:
    """Refuse a forward whose logits over a few random tokens, in chunks, are not the model's own."""
    size, device = model.get_input_embeddings().weight.shape[0], model.device
    ids = torch.randint(size, (1, sum(PROBE_CHUNKS)), generator=torch.Generator().manual_seed(0)).to(device)
    slots = forward.new_slots(1, ids.shape[1])
    start, logits = 0, []
    for width in PROBE_CHUNKS:
        slots.aim([start], [width], device)
        logits.append(forward(ids[:, start : start + width], slots, width))
        start += width
    plain = model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    ours = torch.cat(logits, 1)[0]
    if not agree(ours, plain, model.dtype):
        raise CannotServe(f"its logits come out otherwise, by {relative_gap(ours, plain):.1%}")
