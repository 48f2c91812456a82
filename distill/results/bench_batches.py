"""Times whole batches of prompts of different lengths: ours beside transformers' generate, each row checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.backends import with_backend
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError, require
from decode.mismatch import Mismatch, find_mismatch
from decode.models import LoadedModel
from decode.timing import PairedRatio, interleaved, paired_ratio, timed
from distill.answering import answer_batch
from distill.results.bench_names import PLAIN, TRANSFORMERS, MethodName, parse_name

Texts = list[list[int]]  # new ids of each prompt
GREEDY = SamplingConfig()


@dataclass(frozen=True)
class BatchMethod:
    """A way to decode a batch greedily."""

    name: str
    run: Callable[[Texts, int], Texts]  # prompts and the most new tokens


@dataclass(frozen=True)
class BatchTiming:
    """One method on one batch."""

    seconds: list[float]  # of each repeat
    texts: list[Texts]  # of each repeat

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts[0]))


@dataclass(frozen=True)
class BatchResult:
    """One method at one batch size, over all prompts."""

    method: str
    batch_size: int
    num_tokens: int
    seconds: float  # the least of each batch's repeats, summed
    over_transformers: PairedRatio | None  # from pairs of the same batch and repeat
    mismatches: list[Mismatch]  # one for each text that differs from plain decoding of its prompt alone

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def num_differences(self) -> int:
        """Texts that differ by more than a tie."""
        return sum(mismatch.kind == "difference" for mismatch in self.mismatches)


def batch_methods(
    names: Sequence[str], target: LoadedModel, draft: LoadedModel, backend: str = "auto"
) -> list[BatchMethod]:
    """The methods that are named as bench names them; all greedy, transformers on the model as it was loaded.

    Raises UsageError for a method that decodes no batches, or is given another backend than `backend`.
    """
    parsed = [parse_name(text) for text in names]
    for name in parsed:
        if (not name.is_ours and name.kind != TRANSFORMERS) or name.backend:
            raise UsageError(f"methods: {name.text!r} is not legal; expected plain, transformers or NAME[:LENGTH][/"
                             "VERIFIER] with one of our draft lengths")  # fmt: skip
    pair = with_backend(target, backend), with_backend(draft, backend)
    return [_theirs(name.text, target) if name.kind == TRANSFORMERS else _ours(name, *pair) for name in parsed]


def _theirs(name: str, target: LoadedModel) -> BatchMethod:
    return BatchMethod(name, lambda prompts, count: answer_batch(target, prompts, GREEDY, count, seed=0))


def _ours(name: MethodName, target: LoadedModel, draft: LoadedModel) -> BatchMethod:
    decoder = SpeculativeDecoder(target, None if name.kind == PLAIN else draft)
    chosen: dict[str, Any] = {"sampling": GREEDY}
    if name.is_drafting:
        chosen |= {
            "draft_length": name.kind,
            "num_speculative_tokens": name.length,
            "verifier": name.verifier or "auto",
        }
    config = DecodeConfig(**chosen)

    def run(prompts: Texts, count: int) -> Texts:
        settings = replace(config, max_new_tokens=count, batch_size=len(prompts))
        return [answer.ids for answer in decoder.generate(prompts, settings)]

    return BatchMethod(name.text, run)


def measure_batches(
    methods: Sequence[BatchMethod],
    target: LoadedModel,
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    max_new_tokens: int,
    repeats: int = 1,
) -> list[BatchResult]:
    """Time every method at every batch size on the same prompts, batch by batch in turn; each is run once before.

    Raises UsageError for a size that leaves a smaller batch at the end, and where no token may be decoded.
    """
    require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "an integer >= 1")
    require(repeats >= 1, "repeats", repeats, "an integer >= 1")
    for size in sizes:
        require(
            size >= 1 and len(prompts) % size == 0, "batch_sizes", size, f"a divisor of {len(prompts)}, the prompts"
        )
    alone = [_plain(target)([prompt], max_new_tokens)[0] for prompt in prompts]
    results = []
    for size in sizes:
        batches = [list(prompts[first : first + size]) for first in range(0, len(prompts), size)]
        timings = _time(methods, batches, max_new_tokens, repeats)
        theirs = next((timings[at] for at, m in enumerate(methods) if m.name == TRANSFORMERS), None)
        for method, own in zip(methods, timings, strict=True):
            results.append(
                BatchResult(
                    method.name,
                    size,
                    sum(timing.num_tokens for timing in own),
                    sum(min(timing.seconds) for timing in own),
                    None if theirs is None else paired_ratio(_paces(own), _paces(theirs)),
                    _mismatches(target, prompts, alone, own),
                )
            )
    return results


def _plain(target: LoadedModel) -> Callable[[Texts, int], Texts]:
    return _ours(parse_name(PLAIN), target, target).run


def _time(
    methods: Sequence[BatchMethod], batches: Sequence[Texts], max_new_tokens: int, repeats: int
) -> list[list[BatchTiming]]:
    """[method][batch]"""
    for method in methods:
        method.run(batches[0], max_new_tokens)
    found = [[BatchTiming([], []) for _ in batches] for _ in methods]
    for at, index in interleaved(len(methods), len(batches), repeats):
        run, batch = methods[index].run, batches[at]
        texts, seconds = timed(lambda run=run, batch=batch: run(batch, max_new_tokens))  # type: ignore[misc]
        found[index][at].texts.append(texts)
        found[index][at].seconds.append(seconds)
    return found


def _paces(timings: Sequence[BatchTiming]) -> list[list[float]]:
    """Seconds per token, [batch][repeat]."""
    return [[seconds / timing.num_tokens for seconds in timing.seconds] for timing in timings]


def _mismatches(
    target: LoadedModel, prompts: Sequence[list[int]], alone: Texts, timings: Sequence[BatchTiming]
) -> list[Mismatch]:
    """How texts differ from `alone`; the worst of all repeats is kept."""
    repeats = [[text for texts in rows for text in texts] for rows in zip(*(t.texts for t in timings), strict=True)]
    found = []
    for prompt, expected, *texts in zip(prompts, alone, *repeats, strict=True):
        differing = {tuple(text) for text in texts} - {tuple(expected)}
        each = [m for text in differing if (m := find_mismatch(target, prompt, expected, text))]
        if each:
            found.append(min(each, key=lambda mismatch: mismatch.kind))  # "difference" < "tie"
    return found
