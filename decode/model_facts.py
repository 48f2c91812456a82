"""What decoding must know of a transformers model before it runs: its longest context, its input's device, its layers.

Imports no sibling.
"""

from typing import Any

import torch

NO_LIMIT = 2**31 - 1  # tokens of context, where a model states none
# The kinds of layers whose states are keys and values, one a token, of which a mask chooses those that are seen.
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
# Rotations that depend on the longest row: rows of a batch would not be apart.
LENGTH_BOUND_ROTATIONS = {"dynamic", "longrope"}


def context_limit(model: Any) -> int:
    """The longest context in tokens; models that state none get a limit that is never met."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return NO_LIMIT


def input_device(model: Any) -> torch.device:
    """Where token ids must lie: beside the input embeddings, or where accelerate brings those when they are used."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return embeddings.weight.device


def layer_windows(model: Any) -> dict[str, int | None] | None:
    """Each kind of attention layer to the positions that it sees (None: all of them).

    None where a layer is of another kind, or layers of one kind differ.
    """
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, settings = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    windows: dict[str, int | None] = {}
    for kind, setting in zip(kinds, settings, strict=True):
        window = setting.get("sliding_window")
        if kind not in PLAIN_LAYERS or windows.setdefault(kind, window) != window:
            return None
    return windows or None


def rotation_depends_on_length(model: Any) -> bool:
    """Whether a token's rotation depends on how long the longest row of its batch is."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(part.get("rope_type") in LENGTH_BOUND_ROTATIONS for part in kinds)
