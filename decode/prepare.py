"""A prompt's ids and complete settings become a row, ready to be decoded."""

from collections.abc import Sequence
from typing import Any

import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.draft_length import DRAFT_LENGTHS, LengthSetup
from decode.draws import Ahead
from decode.errors import UsageError, require
from decode.model_facts import NO_LIMIT, context_limit
from decode.models import LoadedModel
from decode.processors import Processors, check_token_ids
from decode.row import Row
from decode.sampler import Sampler
from decode.stopping import Stopping
from decode.theory import Costs
from decode.vocabulary import Vocabulary


def prepare_row(
    target: LoadedModel,
    draft: LoadedModel | None,
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    config: DecodeConfig,  # whose sampling is stated
    costs: Costs | None,
    processors: Sequence[Any] = (),
    criteria: Sequence[Any] = (),
) -> Row:
    """Raises UsageError when the prompt fills the target's context, or a setting cannot be served exactly."""
    assert config.sampling is not None
    device = target.device
    for sampling in filter(None, (config.sampling, config.draft_sampling)):
        check_token_ids(sampling, vocabulary.size)
    budget = _budget(target, len(prompt), config)
    target_ids = None if target.vocab_ids is None else target.vocab_ids.to(device)
    draft_ids = None if draft is None or draft.vocab_ids is None else draft.vocab_ids.to(device)
    eos = ending_ids(target, config)
    wrong = next((index for index in config.eos_token_ids or () if index >= vocabulary.size), None)
    require(wrong is None, "eos_token_ids", wrong, f"ids below {vocabulary.size}, the size of the vocabulary")

    def sampler(sampling: SamplingConfig, vocab_ids: torch.Tensor | None = None) -> Sampler:
        return Sampler(sampling, vocabulary, Processors.of(sampling, len(prompt), eos, processors, device), vocab_ids)

    return Row(
        tokens=Row.buffer(prompt, budget, device),
        length=len(prompt),
        target_sampler=sampler(config.sampling, target_ids),  # a narrowed draft may decode alone
        draft_sampler=sampler(config.draft_sampling or config.sampling, draft_ids),
        stopping=Stopping(
            budget,
            eos,
            stop_strings=config.stop_strings,
            tokenizer=target.tokenizer,
            criteria=criteria,
            prompt=prompt,
            device=device if criteria else None,
        ),
        draft_length=DRAFT_LENGTHS[config.draft_length](
            LengthSetup(config.most_drafted if draft is not None else 0, config.draft_threshold, costs)
        ),
        generator=_generator(config.seed, device),
        log_probs=config.log_probs,
    )


def ending_ids(target: LoadedModel, config: DecodeConfig) -> frozenset[int]:
    """The ids that end a text: those that the settings name, else the target's own."""
    return target.eos_token_ids if config.eos_token_ids is None else frozenset(config.eos_token_ids)


def _budget(target: LoadedModel, prompt_length: int, config: DecodeConfig) -> int:
    capacity = context_limit(target.model)
    if prompt_length >= capacity:
        raise UsageError(f"prompt: it has {prompt_length} tokens; the target's context holds {capacity}")
    if config.max_new_tokens is None and capacity == NO_LIMIT:
        raise UsageError("max_new_tokens: null is not legal: the target states no context length; expected an integer")
    wanted = capacity if config.max_new_tokens is None else config.max_new_tokens
    return min(wanted, capacity - prompt_length)


def _generator(seed: int | None, device: torch.device) -> torch.Generator:
    generator = Ahead() if device.type == "cpu" else torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
