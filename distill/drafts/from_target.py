"""Drafts cut out of the target: some of its layers whole, or its layers projected on fewer channels."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from decode.errors import UsageError, require
from decode.models import LoadedModel
from distill.drafts.embeddings import EMBEDDING_STD, SMALLEST_SPREAD, principal_directions


def chosen_layers(layers: Sequence[int] | None, count: int | None, available: int) -> list[int]:
    """The numbers asked for, or `count` of them evenly spaced with the first and the last among them.

    Raises UsageError for numbers that the target does not have, that repeat, or that do not ascend.
    """
    if layers is None:
        count = 2 if count is None else count
        require(count <= available, "num_layers", count, f"at most the target's {available}")
        return [round(i * (available - 1) / max(count - 1, 1)) for i in range(count)]
    right = layers and list(layers) == sorted(set(layers)) and layers[0] >= 0 and layers[-1] < available
    require(bool(right), "layers", list(layers), f"ascending numbers from 0 to {available - 1}")
    return list(layers)


def layer_list(model: Any, role: str = "target") -> tuple[str, nn.ModuleList]:
    """The name and the modules of a model's decoder layers. Raises UsageError where they can't be told."""
    count = model.config.get_text_config().num_hidden_layers
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UsageError(f"{role}: its {count} layers can't be told from its other modules; expected start: scratch")
    return found[0]


def pruned(model: Any, layers: Sequence[int]) -> Any:
    """A copy of `model` that has only these layers: its class, widths, tables and last norm, tied as it is tied.

    Every setting that has an entry for each layer keeps the entries of the chosen ones, and layers count from 0 again,
    so that caches and files have as many as there are.
    """
    name, _ = layer_list(model)
    config = copy.deepcopy(model.config)
    _keep_entries(config.get_text_config(), layers)
    with no_init_weights():
        small = type(model)(config).to(dtype=model.dtype)
    renamed = {f"{name}.{old}.": f"{name}.{new}." for new, old in enumerate(layers)}
    state = {}
    for key, value in model.state_dict().items():
        prefix = next((p for p in renamed if key.startswith(p)), None)
        if prefix is not None:
            state[renamed[prefix] + key.removeprefix(prefix)] = value.clone()
        elif not key.startswith(f"{name}."):
            state[key] = value.clone()
    small.load_state_dict(state)
    small.tie_weights()
    return small.eval()


def _keep_entries(settings: Any, layers: Sequence[int]) -> None:
    """Cut every list of one entry a layer; counts and bounds of layers follow."""
    count = settings.num_hidden_layers
    for key, value in list(vars(settings).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(settings, key, [value[i] for i in layers])
    settings.num_hidden_layers = len(layers)
    if getattr(settings, "max_window_layers", None) is not None:
        settings.max_window_layers = sum(i < settings.max_window_layers for i in layers)


def set_tie(draft: Any, tie: bool | None) -> None:
    """One table for embeddings and head, or two; None leaves the draft as it is. A table that is shared is copied."""
    settings = draft.config.get_text_config()
    if tie is None or tie == settings.tie_word_embeddings:
        return
    settings.tie_word_embeddings = draft.config.tie_word_embeddings = tie
    if tie:
        draft.tie_weights()
    else:
        head = draft.get_output_embeddings()
        head.weight = torch.nn.Parameter(draft.get_input_embeddings().weight.detach().clone())


@torch.no_grad()
def project_layers(draft: Any, target: LoadedModel, layers: Sequence[int], first_channel: int) -> None:
    """Set the draft's layers to the target's, in place, seen through the draft's channels.

    The draft's channels from `first_channel` on are the target's residual stream along the leading principal
    directions of its input embeddings, scaled to equal variance (drafts/embeddings.py). A product that reads the stream
    is read through the inverse of that map, one that writes to it through the map itself. Heads are the first of each
    evenly spaced group of keys and values; neurons are those with the largest product of norms. Raises UsageError
    where the target is no model of Llama's layout with heads of the draft's size.
    """
    _, theirs = layer_list(target.model)
    wide, small = target.model.config.get_text_config(), draft.config
    _require_alike(target.model, wide, small)
    table = target.model.get_input_embeddings().weight.float().cpu()
    channels = min(small.hidden_size - first_channel, table.shape[1])
    directions = principal_directions(table, channels)
    spread = ((table - table.mean(dim=0)) @ directions).std(dim=0).clamp(min=SMALLEST_SPREAD)
    write = directions * (EMBEDDING_STD / spread)  # [D, C]: stream -> channels
    read = directions * (spread / EMBEDDING_STD)
    taken = slice(first_channel, first_channel + channels)
    groups = torch.linspace(0, wide.num_key_value_heads - 1, small.num_key_value_heads).round().long()
    per_group = small.num_attention_heads // small.num_key_value_heads
    shared = wide.num_attention_heads // wide.num_key_value_heads
    heads = torch.cat([group * shared + torch.arange(per_group).clamp(max=shared - 1) for group in groups])
    for ours, number in zip(draft.model.layers, layers, strict=True):
        _project_layer(ours, theirs[number], read, write, taken, _rows(heads, small), _rows(groups, small))


def _rows(heads: Tensor, config: Any) -> Tensor:
    """The rows of a product that belong to these heads."""
    return (heads[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()


def _require_alike(model: Any, wide: Any, small: Any) -> None:
    layer = layer_list(model)[1][0]
    needed = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm")
    names = {name for name, _ in layer.named_modules()}
    head_dim = getattr(wide, "head_dim", None) or wide.hidden_size // wide.num_attention_heads
    if not names.issuperset(needed) or small.intermediate_size > wide.intermediate_size:
        raise UsageError("start: width needs a target of Llama's layout that is wider than the draft; expected scratch")
    require(
        head_dim == small.head_dim, "hidden_size", small.hidden_size, f"a width whose heads have {head_dim} numbers"
    )


def _project_layer(ours: Any, theirs: Any, read: Tensor, write: Tensor, taken: slice, q: Tensor, kv: Tensor) -> None:
    def reads(product: Any, norm: Any, rows: Tensor) -> Tensor:  # [rows, C]
        return (product.weight[rows] * norm.weight).float().cpu() @ read

    attention, mlp = theirs.self_attn, theirs.mlp
    strength = mlp.down_proj.weight.norm(dim=0) * mlp.up_proj.weight.norm(dim=1)
    neurons = strength.topk(len(ours.mlp.up_proj.weight)).indices.sort().values
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        product = getattr(attention, name)
        getattr(ours.self_attn, name).weight[:, taken] = reads(product, theirs.input_layernorm, rows)
    for name in ("gate_proj", "up_proj"):
        product = getattr(mlp, name)
        getattr(ours.mlp, name).weight[:, taken] = reads(product, theirs.post_attention_layernorm, neurons)
    ours.self_attn.o_proj.weight[taken] = write.T @ attention.o_proj.weight[:, q].float().cpu()
    ours.mlp.down_proj.weight[taken] = write.T @ mlp.down_proj.weight[:, neurons].float().cpu()
