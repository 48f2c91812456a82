"""What a run needs of memory, from the sizes of its models and batches: no weight is loaded, nothing is computed."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from decode.models import narrow_head
from distill.fused import CHUNK_BYTES
from distill.training.prepare import decoder_layers

# Of AdamW, beside a step counter: the means of gradients and of their squares.
STATES_PER_WEIGHT = 2
# Of the activations: tensors that a layer makes and drops, and what an allocator can't give out again; at most.
SHORT_LIVED = 0.5
# Bytes of a quantised linear layer's weight; scales are left out.
QUANTISED_BYTES = {"int8": 1.0, "bnb-8bit": 1.0, "bnb-4bit": 0.5}
# Tensors of a chunk's size that a loss has at once: both sides' logits and log-probs, their products, gradients.
CHUNK_COPIES = 8
AFTER_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class Need:
    """Bytes that one process needs for one thing."""

    name: str
    num_bytes: int


def empty_model(settings: Any, dtype: torch.dtype, vocab_ids: Tensor | None = None) -> Any:
    """A model of `settings` that has shapes and no memory; its head as narrow as `vocab_ids`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    if vocab_ids is not None:
        narrow_head(model, vocab_ids)
    return model


def num_weights(model: nn.Module, trained_only: bool = False) -> int:
    """Weights, those that are tied counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained_only)


def weight_bytes(model: Any, quantization: str = "none") -> int:
    """Bytes of all weights; of linear layers but the head as `quantization` keeps them."""
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if quantization != "none":
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                sizes[id(module.weight)] = int(module.weight.numel() * QUANTISED_BYTES[quantization])
    return sum(sizes.values())


def kept_for_backward(model: Any, rows: int, width: int, precision: str) -> int:
    """Bytes that the draft's body keeps of one micro-batch until its backward pass, weights apart.

    Counted, not estimated: autograd is asked for what it saves while the model runs on tensors without memory. What a
    layer that is run again in the backward pass (gradient checkpointing) needs for itself there is added.
    """
    model = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        whole = _saved(model, rows, width, precision)
        if not model.is_activation_checkpointing:
            return whole
        model.activation_checkpointing_disable()
        without = _saved(model, rows, width, precision)
    return whole + (without - whole) // len(decoder_layers(model))


def _saved(model: Any, rows: int, width: int, precision: str) -> int:
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}  # by storage: views of one tensor are kept once

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage
        return tensor

    mixed = precision.endswith("-mixed")
    dtype = torch.float16 if precision.startswith("16") else torch.bfloat16
    with saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu", dtype=dtype, enabled=mixed):
        model.get_decoder()(**_inputs(model, rows, width), use_cache=False)
    return sum(storage.nbytes() for storage in found.values())


def _inputs(model: Any, rows: int, width: int) -> dict[str, Any]:
    """Packed rows. Their mask is given as it is made, for documents are found by looking at values."""
    mask = torch.zeros(rows, 1, width, width, dtype=next(model.parameters()).dtype)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "position_ids": torch.arange(width).expand(rows, width),
        "attention_mask": mask if len(kinds) < 2 else dict.fromkeys(kinds, mask),
    }


def target_forward(model: Any, rows: int, width: int) -> int:
    """About what the target's forward holds at once: a few tensors of a layer's widths, and a mask."""
    config = model.config.get_text_config()
    hidden, size = config.hidden_size, next(model.parameters()).element_size()
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return rows * width * (size * (6 * hidden + 3 * inner) + width)


def loss_bytes(draft: Any, law_width: int, positions: int) -> int:
    """What the loss holds at once, of laws over `law_width` ids: chunks of logits, and the gradients that it makes.

    All logits where the draft changes them after its head, as a soft cap or a scale in its settings tells.
    """
    config = draft.config.get_text_config()
    apart = all(getattr(config, name, None) in (None, 1) for name in AFTER_THE_HEAD)
    head = draft.get_output_embeddings().weight
    whole = positions * max(len(head), law_width) * head.element_size()
    if not apart:
        return CHUNK_COPIES * whole
    chunk = CHUNK_BYTES * max(len(head), law_width) // len(head)
    return CHUNK_COPIES * min(chunk, whole) + (len(head) + positions) * head.shape[1] * head.element_size()


def megabytes(num_bytes: float) -> str:
    """In MB below 10 GB, else in GB; powers of ten."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e10 else f"{num_bytes / 1e9:.1f} GB"
