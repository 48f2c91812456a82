"""Checks that several commands' settings share."""

from decode.config import DecodeConfig, ModelConfig
from decode.errors import require


def require_budget(decode: DecodeConfig, section: str) -> None:
    """What is timed has a stated length: refuse 0 and null as the most new tokens."""
    tokens = decode.max_new_tokens
    require(tokens is not None and tokens >= 1, f"{section}max_new_tokens", tokens, "an integer >= 1")


def refuse_unused(decode: DecodeConfig, section: str, *further: str) -> None:
    """Raises UsageError for keys of `decode` that prompts decoded one by one, beside others' methods, cannot honour."""
    default = DecodeConfig()
    for key in ("batch_size", "log_probs", *further):
        legal = f"{getattr(default, key)!r}, the default: it would have no part in the figures"
        require(getattr(decode, key) == getattr(default, key), f"{section}{key}", getattr(decode, key), legal)


OF_THE_DRAFT = ("draft_device", "draft_quantization", "draft_vocab_size", "draft_vocab_data")


def refuse_model_keys(model: ModelConfig, why: str, *keys: str) -> None:
    """Raises UsageError for keys of `model` that a command could not honour."""
    for key in keys:
        default = getattr(ModelConfig(), key)
        require(getattr(model, key) == default, f"model.{key}", getattr(model, key), f"{default!r} here: {why}")
