"""Times decoding methods in one run: interleaved prompt by prompt, warmed up, token ids counted.

Nothing else should run beside a measurement; the caller looks at the machine's load.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.draft import Round
from decode.generation import generation_config, only_settings, sampling_of
from decode.models import LoadedModel
from decode.prepare import ending_ids
from decode.stats import Stats
from decode.timing import PassClock, Phases, interleaved, timed

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Answer:
    """What a method made of one prompt."""

    ids: list[int]  # new tokens
    stats: Stats | None = None
    rounds: list[Round] = field(default_factory=list)  # of our own methods
    phases: Phases | None = None  # where the method can tell


class Decode(Protocol):
    def __call__(self, prompt: list[int], max_new_tokens: int, seed: int | None = None) -> Answer:
        """Decode one prompt of token ids; with `seed` None the method's own settings decide."""


@dataclass(frozen=True)
class Method:
    """A way to decode."""

    name: str
    run: Decode
    warmed_whole: bool = False  # what it makes ready depends on a text's length, and takes long


@dataclass(frozen=True)
class Run:
    """One method on one prompt, once."""

    answer: Answer
    seconds: float
    first_seconds: float | None = None  # of a call for one token, made just before; None where it wasn't timed


@dataclass(frozen=True)
class Timing:
    """One method on one prompt, all repeats."""

    runs: list[Run]

    @property
    def best(self) -> Run:
        """The repeat that took least: what disturbs a measurement only ever adds to it."""
        return min(self.runs, key=lambda run: run.seconds)

    @property
    def answer(self) -> Answer:
        return self.best.answer

    @property
    def paces(self) -> list[float]:
        """Seconds per token of each repeat that made any."""
        return [run.seconds / len(run.answer.ids) for run in self.runs if run.answer.ids]


@dataclass(frozen=True)
class MethodResult:
    """One method on all prompts."""

    name: str
    timings: list[Timing]  # in the order of the prompts
    warm_up_seconds: float = 0.0  # of the first, untimed call: what is compiled or measured once is in it

    def only(self, prompts: Sequence[int]) -> "MethodResult":
        """The same method on some of the prompts."""
        return replace(self, timings=[self.timings[at] for at in prompts])

    @property
    def total_tokens(self) -> int:
        return sum(len(t.answer.ids) for t in self.timings)

    @property
    def total_seconds(self) -> float:
        return sum(t.best.seconds for t in self.timings)

    @property
    def tokens_per_second(self) -> float:
        return self.total_tokens / self.total_seconds if self.total_seconds > 0 else 0.0

    @property
    def outputs(self) -> list[list[int]]:
        return [t.answer.ids for t in self.timings]

    @property
    def rounds(self) -> list[list[Round]]:
        """The rounds of each prompt's best run."""
        return [t.answer.rounds for t in self.timings]

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
    on_cpu = decoder.target.device.type == "cpu"

    def run(prompt: list[int], max_new_tokens: int, seed: int | None = None) -> Answer:
        settings = replace(config, max_new_tokens=max_new_tokens, seed=config.seed if seed is None else seed)
        done = decoder.generate(prompt, settings, trace=True)[0]
        stats = done.stats if decoder.draft is not None else None
        return Answer(done.ids, stats, done.rounds, Phases.of(done.rounds) if on_cpu else None)

    made_ready = {"compiled", "cuda_graph"}
    backends = {loaded.backend for loaded in (decoder.target, decoder.draft) if loaded is not None}
    return Method(name, run, warmed_whole=bool(backends & made_ready))


def transformers_method(
    name: str,
    target: LoadedModel,
    config: DecodeConfig,
    assistant: Any = None,
    *,
    num_assistant_tokens: int | None = None,
    prompt_lookup_tokens: int | None = None,
) -> Method:
    """transformers' generate on the model as it was loaded.

    `assistant`, a whole model, makes it assisted: by the settings of its own generation config, or, where
    `num_assistant_tokens` is given, by that many tokens in every round. `prompt_lookup_tokens`: drafts from the prompt.
    Raises UsageError for sampling that transformers lacks.
    """
    sampling = config.sampling or sampling_of(target.model.generation_config)
    eos_ids = sorted(ending_ids(target, config))
    generation_config(sampling, 1, eos_ids)  # what it refuses, it refuses before anything is decoded

    def run(prompt: list[int], max_new_tokens: int, seed: int | None = None) -> Answer:
        ids = torch.tensor([prompt], device=target.device)
        settings = generation_config(sampling, max_new_tokens, eos_ids)
        settings.prompt_lookup_num_tokens = prompt_lookup_tokens
        seed = config.seed if seed is None else seed
        clock = PassClock()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([target.device] if target.device.type == "cuda" else []))
            stack.enter_context(only_settings(target.model, settings))
            if assistant is not None:
                stack.enter_context(only_settings(assistant, _drafting(assistant, num_assistant_tokens)))
            if target.device.type == "cpu":
                stack.enter_context(clock.watching(target=target.model, draft=assistant))
            if seed is not None:
                torch.manual_seed(seed)
            done = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings, assistant_model=assistant
            )
        return Answer(done[0, len(prompt) :].tolist(), phases=clock.phases())

    return Method(name, run)


def _drafting(assistant: Any, num_tokens: int | None) -> GenerationConfig:
    """A copy of the assistant's settings, since the library writes into them what it has learnt from a text."""
    settings: GenerationConfig = copy.deepcopy(assistant.generation_config)
    if num_tokens is not None:
        settings.num_assistant_tokens = num_tokens
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
    return settings


@torch.inference_mode()
def run_benchmark(
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    repeats: int = 1,
    on_progress: Callable[[str], None] | None = None,
    *,
    seed: int | None = None,
    first_tokens: bool = False,
) -> list[MethodResult]:
    """Time every method on every prompt, in an order that rotates from prompt to prompt and repeat to repeat.

    `seed`: of the first prompt; each next prompt has the next one. `first_tokens`: time calls for one token too.
    """
    few, longest = min(WARM_UP_TOKENS, max_new_tokens), max(prompts, key=len)
    warm_up = [
        _run(method, longest, max_new_tokens if method.warmed_whole else few, seed).seconds for method in methods
    ]
    runs: dict[tuple[int, int], list[Run]] = {}
    for at, index in interleaved(len(methods), len(prompts), repeats):
        method, prompt, own_seed = methods[index], prompts[at], None if seed is None else seed + at
        if on_progress:
            on_progress(method.name)
        first = _run(method, prompt, 1, own_seed).seconds if first_tokens else None
        run = _run(method, prompt, max_new_tokens, own_seed)
        runs.setdefault((index, at), []).append(replace(run, first_seconds=first))
    return [
        MethodResult(method.name, [Timing(runs[i, at]) for at in range(len(prompts))], warm_up[i])
        for i, method in enumerate(methods)
    ]


def _run(method: Method, prompt: list[int], max_new_tokens: int, seed: int | None) -> Run:
    return Run(*timed(lambda: method.run(prompt, max_new_tokens, seed)))
