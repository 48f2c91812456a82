"""transformers' own generate, told everything: no default of the library and no setting of the model takes part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from decode.config import SamplingConfig


def generation_config(sampling: SamplingConfig, max_new_tokens: int, eos_ids: Sequence[int]) -> GenerationConfig:
    """The settings that draw as `sampling` says; the library's own defaults (top-k 50, say) are switched off."""
    common: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": list(eos_ids) or None,
        "pad_token_id": eos_ids[0] if eos_ids else 0,
        "do_sample": not sampling.greedy,
    }
    if sampling.greedy:
        return GenerationConfig(**common)
    return GenerationConfig(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        **common,
    )


@contextmanager
def only_settings(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Hide the model's own generation config, from which the library fills every value that was not set."""
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own
