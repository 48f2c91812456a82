"""Times all methods on the prompts of all domains in one interleaved run, and compares their greedy texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from decode.benchmark import MethodResult, run_benchmark
from decode.config import DecodeConfig
from decode.errors import UsageError
from decode.mismatch import Mismatch, find_mismatch
from decode.models import LoadedModel
from distill.results.bench_methods import Entry
from distill.results.bench_names import PLAIN
from distill.results.config import BenchConfig
from distill.results.evaluate import prompts_of, told


@dataclass
class Circumstances:
    """What the machine did before the run, and the seconds that came before the first token."""

    busy_share: float | None
    load_average: float | None  # of one minute, as the run began
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Domain:
    """The prompts of one file."""

    name: str
    prompts: list[list[int]]


@dataclass(frozen=True)
class Measured:
    """What a run found, before it is put into figures."""

    entries: list[Entry]
    results: list[MethodResult]  # one for each entry, over the prompts of all domains in order
    domains: list[Domain]
    mismatches: dict[str, dict[int, Mismatch]] | None  # method -> prompt -> how it differs; None when sampling

    @property
    def plain(self) -> MethodResult:
        return self.result_of(PLAIN)

    def result_of(self, name: str) -> MethodResult:
        return next(result for result in self.results if result.name == name)

    @property
    def parts(self) -> dict[str, list[int]]:
        """The numbers of each domain's prompts, and of all where there are several domains."""
        found, first = {}, 0
        for domain in self.domains:
            found[domain.name] = list(range(first, first + len(domain.prompts)))
            first += len(domain.prompts)
        return found if len(found) == 1 else {**found, "all": list(range(first))}


def load_domains(config: BenchConfig, target: LoadedModel) -> list[Domain]:
    """The prompts of each file. Raises UsageError for a bad row, and for files whose names do not tell them apart."""
    domains = []
    for file in config.prompts:
        found = prompts_of(file, config.skip_prompts, config.num_prompts, target)
        domains.append(Domain(Path(file).stem, found))
    names = [domain.name for domain in domains]
    for name in names:
        if names.count(name) > 1 or name == "all":
            raise UsageError(f"prompts: the domain {name!r} is there twice; a domain has the name of its file")
    return domains


def measure(
    config: BenchConfig, entries: list[Entry], target: LoadedModel, domains: list[Domain], console: Console
) -> Measured:
    """Time every method on every prompt. `config.decode` states sampling, seed and the most new tokens."""
    prompts = [ids for domain in domains for ids in domain.prompts]
    decode = config.decode
    assert decode.max_new_tokens is not None and decode.sampling is not None
    with told(console, len(entries), len(prompts), config.repeats) as advance:
        results = run_benchmark(
            [entry.method for entry in entries],
            prompts,
            decode.max_new_tokens,
            config.repeats,
            advance,
            seed=None if decode.sampling.greedy else decode.seed,
            first_tokens=True,
        )
    found = compare_texts(target, prompts, results, decode) if decode.sampling.greedy else None
    return Measured(entries, results, domains, found)


def compare_texts(
    target: LoadedModel, prompts: Sequence[list[int]], results: Sequence[MethodResult], config: DecodeConfig
) -> dict[str, dict[int, Mismatch]]:
    """How greedy texts differ from plain decoding's, by method and prompt. The worst of all repeats is kept."""
    plain = next(result for result in results if result.name == PLAIN)
    found: dict[str, dict[int, Mismatch]] = {}
    for result in results:
        found[result.name] = {}
        for at, (prompt, timing) in enumerate(zip(prompts, result.timings, strict=True)):
            expected = plain.outputs[at]
            texts = {tuple(run.answer.ids) for run in timing.runs} - {tuple(expected)}
            differing = [m for text in texts if (m := find_mismatch(target, prompt, expected, text, config))]
            if differing:
                found[result.name][at] = min(differing, key=lambda mismatch: mismatch.kind)  # "difference" < "tie"
    return found
