"""Judges a draft by real decoding on held-out prompts: acceptance and speedup over plain decoding, in one run."""

from collections.abc import Sequence
from dataclasses import dataclass

from decode.benchmark import decoder_method, run_benchmark
from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import require
from decode.models import LoadedModel
from decode.stats import Stats


@dataclass(frozen=True)
class Judgement:
    """What a draft is worth."""

    stats: Stats
    speedup: float  # over our own plain decoding, same prompts, same run
    tokens_per_second: float
    plain_tokens_per_second: float
    mismatches: int  # greedy: prompts whose text differs from plain decoding's; sampling: always 0


def judge(target: LoadedModel, draft: LoadedModel, prompts: Sequence[list[int]], config: DecodeConfig) -> Judgement:
    """Decode every prompt plainly and with the draft, in turn. Backends are those that the two were loaded with.

    Raises UsageError where `config` states no `max_new_tokens`.
    """
    require(config.max_new_tokens is not None, "max_new_tokens", None, "an integer >= 1")
    alone = SpeculativeDecoder(target)
    settings = alone.settings(config)
    assert settings.max_new_tokens is not None and settings.sampling is not None
    methods = [
        decoder_method("plain", alone, settings),
        decoder_method("draft", SpeculativeDecoder(target, draft), settings),
    ]
    plain, drafted = run_benchmark(methods, prompts, settings.max_new_tokens)
    return Judgement(
        stats=drafted.stats or Stats(),
        speedup=drafted.speedup_over(plain) or 0.0,
        tokens_per_second=drafted.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
        mismatches=drafted.mismatches(plain) if settings.sampling.greedy else 0,
    )
