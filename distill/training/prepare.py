"""Trades time for memory in the draft, and compiles it: what a run computes stays as it is, its weights' names too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from decode.errors import UsageError, first_line


def decoder_layers(model: Any) -> list[nn.Module]:
    """The blocks that a model repeats, which is what may not be split up."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def checkpoint_layers(model: Any) -> None:
    """Keep only each layer's input for the backward pass, which runs the layer again; in place.

    The draws of a dropout are repeated too. Raises UsageError for a class of models that cannot.
    """
    if not model.supports_gradient_checkpointing or not decoder_layers(model):
        raise UsageError(
            f"gradient_checkpointing: True is not legal for a draft of class {type(model).__name__}, which knows "
            "nothing of it; expected false"
        )
    # not the reentrant kind: behind a frozen embedding it gives no layer a gradient
    model.activation_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: Any, say: Callable[[str], None]) -> None:
    """Compile each layer in place, for batches of any shape. Where no compiler works it is told, and nothing is done.

    Layer by layer, for what is around them looks at values, as the borders of documents; and one compilation serves
    all layers of a kind.
    """
    reason = why_not(next(model.parameters()).device)
    if reason is not None:
        say(f"compile: goes on without, for here it fails: {reason}")
        return
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def why_not(device: torch.device) -> str | None:
    """Why torch.compile does not work on `device`, found by trying; None where it does."""
    try:
        torch.compile(lambda x: x.sin() + 1, dynamic=True)(torch.ones(8, device=device))
    except Exception as error:  # compilers are missing and fail in many ways
        return f"{type(error).__name__}: {first_line(error)}"
    return None
