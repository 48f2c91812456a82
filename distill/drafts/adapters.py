"""Low-rank adapters on a draft: put in, taken out of a state, merged into the weights and proven to be the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decode.errors import DraftsmithError, UsageError, require
from decode.models import LoadedModel, some_of
from distill.config import LoraConfig

MARK = ".lora_"
"""In the names of an adapter's weights, and in no others."""
# Of the largest logit, between a merged draft and the same with its adapter; fp32 sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
PROBE_TOKENS = 16


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Put adapters of `config` into `model`, in place; nothing else of it is trained from now on.

    Raises UsageError for targets that it does not have, that are no linear layers, and for tables that are tied: an
    update of one of the two is lost when it is merged.
    """
    from peft import LoraConfig as PeftConfig  # seconds to import, and needed by few runs
    from peft.tuners.lora import LoraModel

    names = _targets(model, config.targets)
    model.requires_grad_(False)
    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft takes any number
        use_rslora=config.rank_stabilised,
        lora_dropout=config.dropout,
        target_modules=names,
        fan_in_fan_out=not any(isinstance(model.get_submodule(name), nn.Linear) for name in names),  # GPT-2's layers
    )
    LoraModel(model, settings, "default")


def _targets(model: Any, wanted: list[str]) -> list[str]:
    """Full names of the linear layers that `wanted` stands for."""
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    if wanted == ["all-linear"]:
        return [name for name, module in linear.items() if module is not head]
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    found: list[str] = []
    for end in wanted:
        matching = [name for name in linear if name == end or name.endswith(f".{end}")]
        ends = sorted({name.rpartition(".")[2] for name in linear})
        require(bool(matching), "lora.targets", end, f"all-linear, or of the draft's linear layers {', '.join(ends)}")
        if tied and any(linear[name] is head for name in matching):
            raise UsageError(f"lora.targets: {end!r} is tied to the embeddings; make the draft with tie: false")
        found += matching
    return found


def check_adaptable(draft: LoadedModel) -> None:
    """Raise UsageError for a draft of a reduced vocabulary: updates would write to the channel that guards its head."""
    if draft.vocab_ids is not None:
        raise UsageError(f"lora.rank: {draft.name!r} has a reduced vocabulary; train all its weights (lora.rank: 0)")


def has_adapters(model: nn.Module) -> bool:
    return any(MARK in name for name, _ in model.named_parameters())


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's part of a state: what a checkpoint keeps, as the rest lies in the draft's own folder."""
    return {name: value for name, value in state.items() if MARK in name}


def is_adapter(state: Mapping[str, Tensor]) -> bool:
    return all(MARK in name for name in state)


def load_adapters(model: Any, state: Mapping[str, Tensor]) -> None:
    """Fill the adapters of `model`, all of them and no others. Raises UsageError with the names otherwise."""
    wanted = set(adapter_state(model.state_dict()))
    for kind, names in (("missing", wanted - set(state)), ("unexpected", set(state) - wanted)):
        if names:
            raise UsageError(f"draft: the checkpoint has {kind} adapter weights: {some_of(names)}")
    model.load_state_dict(dict(state), strict=False)


@torch.no_grad()
def merge_adapters(model: Any) -> None:
    """Add every update to its layer's weight and take the adapters out, in place; in fp32 or wider.

    The logits before and after are compared: raises DraftsmithError where they differ by more than rounding.
    """
    from peft.tuners.lora import LoraLayer

    model.eval()
    dtype = next(p.dtype for p in model.parameters())
    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    before = model(input_ids=ids, use_cache=False).logits
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    after = model(input_ids=ids, use_cache=False).logits
    gap = float((after - before).abs().max() / before.abs().max().clamp(min=1e-9))
    if not gap <= TOLERANCE.get(dtype, 0.0):
        raise DraftsmithError(
            f"draft: merging its adapter moved the logits by {gap:.1e} of the largest; it is not used"
        )
