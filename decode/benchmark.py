"""Times decoding methods in one run: interleaved prompt by prompt, warmed up, token ids counted.

Nothing else should run beside a measurement; the caller looks at the machine's load.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.generation import generation_config, only_settings
from decode.models import LoadedModel
from decode.stats import Stats

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Answer:
    """What a method made of one prompt."""

    ids: list[int]  # new tokens
    stats: Stats | None = None


@dataclass(frozen=True)
class Method:
    """A way to decode: (prompt ids, most new tokens) -> answer."""

    name: str
    run: Callable[[list[int], int], Answer]


@dataclass(frozen=True)
class Timing:
    """One method on one prompt."""

    answer: Answer
    seconds: list[float]  # of each repeat

    @property
    def best(self) -> float:
        """Least seconds of all repeats: what disturbs a measurement only ever adds to it."""
        return min(self.seconds)


@dataclass(frozen=True)
class MethodResult:
    """One method on all prompts."""

    name: str
    timings: list[Timing]  # in the order of the prompts

    @property
    def total_tokens(self) -> int:
        return sum(len(t.answer.ids) for t in self.timings)

    @property
    def total_seconds(self) -> float:
        return sum(t.best for t in self.timings)

    @property
    def tokens_per_second(self) -> float:
        return self.total_tokens / self.total_seconds if self.total_seconds > 0 else 0.0

    @property
    def outputs(self) -> list[list[int]]:
        return [t.answer.ids for t in self.timings]

    @property
    def stats(self) -> Stats | None:
        """Counts over all prompts; None for methods that have none."""
        parts = [t.answer.stats for t in self.timings if t.answer.stats is not None]
        return Stats.sum(parts) if parts else None

    def speedup_over(self, other: "MethodResult") -> float | None:
        """Tokens per second of this method over those of `other`; None where `other` made no token."""
        rate = other.tokens_per_second
        return self.tokens_per_second / rate if rate else None

    def mismatches(self, other: "MethodResult") -> int:
        """Prompts on which the two outputs differ."""
        return sum(a != b for a, b in zip(self.outputs, other.outputs, strict=True))


def decoder_method(name: str, decoder: SpeculativeDecoder, config: DecodeConfig) -> Method:
    """Our own decoding: plain where the decoder has no draft, speculative where it has one."""

    def run(prompt: list[int], max_new_tokens: int) -> Answer:
        done = decoder.generate(prompt, replace(config, max_new_tokens=max_new_tokens))[0]
        return Answer(done.ids, done.stats if decoder.draft is not None else None)

    return Method(name, run)


def transformers_method(name: str, target: LoadedModel, config: DecodeConfig, assistant: Any = None) -> Method:
    """transformers' generate on the model as it was loaded; assisted where `assistant`, a whole model, is given."""
    eos_ids = sorted(target.eos_token_ids)

    def run(prompt: list[int], max_new_tokens: int) -> Answer:
        ids = torch.tensor([prompt], device=target.device)
        settings = generation_config(config.sampling, max_new_tokens, eos_ids)
        devices = [target.device] if target.device.type == "cuda" else []
        with torch.random.fork_rng(devices), only_settings(target.model, settings):
            if config.seed is not None:
                torch.manual_seed(config.seed)
            done = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings, assistant_model=assistant
            )
        return Answer(done[0, len(prompt) :].tolist())

    return Method(name, run)


@torch.inference_mode()
def run_benchmark(
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    repeats: int = 1,
    on_progress: Callable[[str], None] | None = None,
) -> list[MethodResult]:
    """Time every method on every prompt, in an order that rotates from prompt to prompt and repeat to repeat."""
    for method in methods:
        method.run(prompts[0], WARM_UP_TOKENS)
    answers: dict[tuple[int, int], Answer] = {}
    seconds: dict[tuple[int, int], list[float]] = {}
    order = list(range(len(methods)))
    for _ in range(repeats):
        for at, prompt in enumerate(prompts):
            for index in order:
                if on_progress:
                    on_progress(methods[index].name)
                answer, took = _timed(methods[index], prompt, max_new_tokens)
                answers.setdefault((index, at), answer)
                seconds.setdefault((index, at), []).append(took)
            order = order[1:] + order[:1]
    return [
        MethodResult(m.name, [Timing(answers[i, at], seconds[i, at]) for at in range(len(prompts))])
        for i, m in enumerate(methods)
    ]


def _timed(method: Method, prompt: list[int], max_new_tokens: int) -> tuple[Answer, float]:
    _synchronise()
    start = time.perf_counter()
    answer = method.run(prompt, max_new_tokens)
    _synchronise()
    return answer, time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
