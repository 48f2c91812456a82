"""Takes a model of Llama's shape apart, or says what about it is of another shape. Knows no forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decode.backends.base import CannotServe
from decode.backends.prepacked import PackedLinear, can_prepack
from decode.model_facts import rotation_depends_on_length

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Multiply = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]


class LlamaParts:
    """The parts of one model. Raises CannotServe naming what does not fit."""

    def __init__(self, model: Any) -> None:
        _check_kind(model)
        _check_modules(model)
        try:
            attention = model.model.layers[0].self_attn
            self.scale, self.head_dim = float(attention.scaling), int(attention.head_dim)
            self.rotary = model.model.rotary_emb
            self.embeddings = model.get_input_embeddings().weight
            self.heads, self.key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        except (AttributeError, IndexError) as error:
            raise CannotServe(f"it is not built as a {model.config.model_type} is: {error}") from error
        self._config = model.config
        self._packed = can_prepack(model)
        self.head = self.fused(model.get_output_embeddings())

    @torch.no_grad()
    def fused(self, *linears: nn.Linear) -> Multiply:
        """One product that gives the outputs of all `linears` side by side."""
        weights = [linear.weight.detach() for linear in linears]
        biases: list[Any] = [linear.bias for linear in linears]
        if any(bias is not None for bias in biases):
            biases = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        one = len(linears) == 1  # what needs no fusing is no copy
        weight = weights[0] if one else torch.cat(weights)
        bias = biases[0] if one or biases[0] is None else torch.cat(biases)
        if self._packed:
            return PackedLinear(weight, bias).forward
        return partial(F.linear, weight=weight, bias=bias)

    def norm(self, module: Any) -> Norm:
        """The root-mean-square norm that `module` is."""
        return _rms_norm(module.weight.detach(), float(module.variance_epsilon))

    def turn_norm(self, attention: Any) -> Norm | None:
        """The norms of query and key heads as one, for [B, heads, W, D]; None where the model has none."""
        if not hasattr(attention, "q_norm"):
            return None
        q, k = attention.q_norm, attention.k_norm
        weight = torch.stack([q.weight.detach()] * self.heads + [k.weight.detach()] * self.key_heads).unsqueeze(1)
        unit = _rms_norm(None, float(q.variance_epsilon))
        return lambda heads: weight * unit(heads)

    def window(self, layer: int) -> int | None:
        """How many positions the attention of a layer sees; None: all."""
        size = getattr(self._config, "sliding_window", None)
        types = getattr(self._config, "layer_types", None)
        if types is None:
            return size if self._config.model_type == "mistral" else None
        return size if types[layer] == "sliding_attention" else None


def _rms_norm(weight: Tensor | None, eps: float) -> Norm:
    def norm(x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        # In fp64 the models still round to fp32 here: their own steps make the logits equal, not only close.
        single = x.float()
        unit = (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return unit if weight is None else weight * unit

    return norm


def _check_kind(model: Any) -> None:
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise CannotServe(f"it is a {config.model_type}; expected {', '.join(MODEL_TYPES)}")
    if config.hidden_act not in ("silu", "swish"):
        raise CannotServe(f"its activation is {config.hidden_act}; expected silu")
    if rotation_depends_on_length(model):
        raise CannotServe("its rotations depend on the text's length")


def _check_modules(model: Any) -> None:
    """One device, one dtype, plain linear layers, no hooks."""
    devices = {str(p.device) for p in model.parameters()}
    dtypes = {p.dtype for p in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise CannotServe(f"its weights are spread over {', '.join(sorted(devices))}")
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise CannotServe(f"its weights are of {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}")
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") or module._forward_hooks or module._forward_pre_hooks:
            raise CannotServe(f"its module {name or type(module).__name__!r} has hooks")
        if name.endswith(("_proj", "lm_head")) and type(module) is not nn.Linear:
            raise CannotServe(f"its module {name!r} is a {type(module).__name__}; expected a plain linear layer")
        if type(module) is nn.Linear and type(module.weight) is not nn.Parameter:
            raise CannotServe(f"its weight {name!r} is a {type(module.weight).__name__}; expected a plain tensor")
