"""Settings in transformers' words: what a GenerationConfig says in ours, and ours as a GenerationConfig.

Every setting of transformers that changes what is generated is either taken or refused by name.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from decode.config import DecodeConfig, SamplingConfig
from decode.errors import UsageError

# generate's own default: it draws from the 50 likeliest tokens where neither the user nor the model says otherwise.
UNSET_TOP_K = 50

# Settings that change the output in ways that are not served, with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    **dict.fromkeys(("watermarking_config", "dola_layers", "constraints", "force_words_ids", "max_time"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "assistant_ensemble_weight"), ()),
}
_NEUTRAL_WHEN_SAMPLING: dict[str, tuple[Any, ...]] = {"top_h": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,)}

_TAKEN = """
    do_sample temperature top_k top_p min_p typical_p repetition_penalty no_repeat_ngram_size bad_words_ids
    suppress_tokens sequence_bias min_new_tokens min_length max_new_tokens max_length stop_strings eos_token_id
"""
# Speed, memory, what else is returned, other kinds of model, and other ways to the same law.
_WITHOUT_EFFECT = """
    use_cache cache_implementation cache_config max_cache_len prefill_chunk_size low_memory compile_config
    disable_compile continuous_batching_config output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate pad_token_id bos_token_id decoder_start_token_id early_stopping length_penalty
    renormalize_logits is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size
    speculation_type use_mtp transformers_version
"""


def sampling_of(settings: GenerationConfig, own: GenerationConfig | None = None) -> SamplingConfig:
    """How transformers' generate draws with `settings`; what they leave unset is taken from `own`, the model's.

    Raises UsageError naming a setting that changes what is generated and can't be served exactly.
    """
    settings = _filled(settings, own)
    _refuse(settings)
    filters: dict[str, Any] = {}
    if settings.do_sample:
        filters = {key: float(_set(settings, key, 1)) for key in ("temperature", "top_p", "typical_p")}
        filters |= {"top_k": int(_set(settings, "top_k", UNSET_TOP_K)), "min_p": float(_set(settings, "min_p", 0))}
    banned, biases = _biases(settings)
    return SamplingConfig(
        **filters,
        repetition_penalty=float(_set(settings, "repetition_penalty", 1)),
        no_repeat_ngram_size=int(_set(settings, "no_repeat_ngram_size", 0)),
        bad_words_ids=banned,
        logit_bias=biases,
        min_new_tokens=_least_new_tokens(settings),
    )


def decode_config(settings: GenerationConfig, own: GenerationConfig | None = None) -> DecodeConfig:
    """One call of transformers' generate as one of ours. Ids that end a text stay unset where `settings` leave them so,
    and without `max_new_tokens` the length is our own default. Raises UsageError as `sampling_of` does."""
    sampling = sampling_of(settings, own)
    settings = _filled(settings, own)
    if settings.max_new_tokens is None and settings.max_length is not None:
        raise _refusal("max_length", settings.max_length, "it counts the prompt too; set max_new_tokens")
    chosen: dict[str, Any] = {}
    if settings.max_new_tokens is not None:
        chosen["max_new_tokens"] = settings.max_new_tokens
    if settings.stop_strings:
        strings = settings.stop_strings
        chosen["stop_strings"] = [strings] if isinstance(strings, str) else list(strings)
    if settings.eos_token_id is not None:
        chosen["eos_token_ids"] = _ids(settings.eos_token_id)
    return DecodeConfig(sampling=sampling, **chosen)


def _filled(settings: GenerationConfig, own: GenerationConfig | None) -> GenerationConfig:
    if own is None:
        return settings
    settings = copy.deepcopy(settings)
    settings.update(**own.to_dict(), defaults_only=True)
    return settings


def _set(settings: GenerationConfig, key: str, default: float) -> Any:
    value = getattr(settings, key)
    return default if value is None else value


def _ids(eos: int | Sequence[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _refuse(settings: GenerationConfig) -> None:
    neutral = _NEUTRAL | (_NEUTRAL_WHEN_SAMPLING if settings.do_sample else {})
    handled = {*_TAKEN.split(), *_WITHOUT_EFFECT.split(), *_NEUTRAL, *_NEUTRAL_WHEN_SAMPLING}
    # What a later version of transformers adds may change the output; a user's own entries don't.
    newer = {key: () for key in vars(GenerationConfig()) if key not in handled and not key.startswith("_")}
    for key, harmless in (neutral | newer).items():
        value = getattr(settings, key, None)
        if value is not None and value != [] and value not in harmless:
            raise _refusal(key, value, "it can't be served exactly; unset it")


def _refusal(key: str, value: object, reason: str) -> UsageError:
    return UsageError(f"generation config: {key}: {value!r} is not supported: {reason}")


def _least_new_tokens(settings: GenerationConfig) -> int:
    if settings.min_new_tokens is not None:
        return int(settings.min_new_tokens)
    if settings.min_length:
        raise _refusal("min_length", settings.min_length, "it counts the prompt too; set min_new_tokens")
    return 0


def _biases(settings: GenerationConfig) -> tuple[list[list[int]], dict[str, float]]:
    """Runs of ids that are never completed, and what is added to the logits of single ids."""
    eos = _ids(settings.eos_token_id)
    # generate itself drops a lone end-of-text id from the bad words.
    banned = [list(run) for run in settings.bad_words_ids or [] if list(run) not in [[end] for end in eos]]
    banned += [[token] for token in settings.suppress_tokens or []]
    biases: dict[str, float] = {}
    given = settings.sequence_bias or {}
    for run, bias in given.items() if isinstance(given, dict) else given:
        if bias == float("-inf"):
            banned.append(list(run))
        elif len(run) == 1:
            biases[str(run[0])] = float(bias)
        else:
            raise _refusal("sequence_bias", [list(run), bias], "of several tokens only a bias of -inf is")
    return banned, biases


def generation_config(sampling: SamplingConfig, max_new_tokens: int, eos_ids: Sequence[int]) -> GenerationConfig:
    """The settings that draw as `sampling` says; the library's own defaults (top-k 50, say) are switched off.

    Raises UsageError naming a setting that transformers lacks.
    """
    for key in ("frequency_penalty", "presence_penalty", "allowed_ids"):
        if getattr(sampling, key):
            raise UsageError(
                f"{key}: {getattr(sampling, key)!r} is not possible with transformers' generate, which has none"
            )
    ends = [[end] for end in eos_ids]
    banned = sampling.bad_words_ids
    common: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": list(eos_ids) or None,
        "pad_token_id": eos_ids[0] if eos_ids else 0,
        "do_sample": not sampling.greedy,
        "repetition_penalty": float(sampling.repetition_penalty),
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "bad_words_ids": [run for run in banned if run not in ends] or None,
        "suppress_tokens": [run[0] for run in banned if run in ends] or None,
        "sequence_bias": [[[int(token)], float(bias)] for token, bias in sampling.logit_bias.items()] or None,
        "min_new_tokens": sampling.min_new_tokens or None,
    }
    if sampling.greedy:
        return GenerationConfig(**common)
    return GenerationConfig(
        temperature=float(sampling.temperature),
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        typical_p=sampling.typical_p,
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
