"""Measures drafts by real decoding: every draft, plain decoding and transformers' generate in one interleaved run."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from decode.backends import with_backend
from decode.benchmark import Method, MethodResult, decoder_method, run_benchmark, transformers_method
from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.models import LoadedModel, load_model
from distill.data.examples import load_prompts
from distill.data.rows import check_source
from distill.drafts.load import load_draft
from distill.folders import run_folder
from distill.results.candidates import Candidate, check_apart, find_candidates, left_out
from distill.results.config import EvalConfig
from distill.results.held_out import acceptance_on
from distill.results.report import EvalReport, print_report, report_of, write_report
from distill.runs import record_run

PLAIN, TRANSFORMERS = "plain decoding", "transformers' generate"


def evaluate(config: EvalConfig) -> EvalReport:
    """Measure all of `config.drafts`, write the report files into `config.output` and print the table.

    Raises UsageError for drafts, prompts or models that cannot be used, before anything is decoded.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for source in filter(None, (config.prompts, config.held_out)):
        check_source(source)
    candidates = find_candidates(config.drafts)
    for role, model in [("target", config.target), *(("draft", draft) for draft in config.drafts)]:
        check_apart(Path(config.output), role, model)
    with run_folder(config.output, "draftsmith eval") as output:
        busy = busy_share()
        target = load_model(config.target, config.model, role="target")
        prompts = prompts_of(config.prompts, config.skip_prompts, config.num_prompts, target)
        config = replace(config, decode=seeded(SpeculativeDecoder(target).settings(config.decode), console))
        record_run(output, config)
        drafts = [load_draft(c.path, target, config.model) for c in candidates]
        if config.held_out is not None:
            candidates = with_measured(config.held_out, target, candidates, drafts)
        results = measure(config, target, candidates, drafts, prompts, console)
        report = report_of(config, candidates, results, [len(ids) for ids in prompts], busy)
        report.warnings.extend(left_out(config.drafts))
        write_report(report, output)
    print_report(report)
    return report


def with_measured(
    file: str, target: LoadedModel, candidates: Sequence[Candidate], drafts: Sequence[LoadedModel]
) -> list[Candidate]:
    """The candidates with acceptance as it is on the answers of `file`, in place of what their runs recorded."""
    measured = acceptance_on(file, target, drafts)
    return [
        replace(candidate, recorded={**candidate.recorded, **figures}, temperature=1.0)
        for candidate, figures in zip(candidates, measured, strict=True)
    ]


def seeded(decode: DecodeConfig, console: Console) -> DecodeConfig:
    """Complete settings of which sampling has a seed, so that the figures can be taken again."""
    assert decode.sampling is not None
    if decode.sampling.greedy or decode.seed is not None:
        return decode
    console.print("decode.seed: none is given; sampling with seed 0")
    return replace(decode, seed=0)


def prompts_of(file: str, skip: int, count: int, target: LoadedModel) -> list[list[int]]:
    """`count` prompts of a file, after the first `skip`. Raises UsageError for a bad row, or where none is left."""
    found = load_prompts(file, target.tokenizer, skip + count, target.vocab_size)
    if len(found) <= skip:
        raise UsageError(
            f"skip_prompts: {skip} leaves no prompt; {file} has {len(found)}, so expected at most {len(found) - 1}"
        )
    return found[skip:]


@contextmanager
def told(console: Console, methods: int, prompts: int, repeats: int) -> Iterator[Callable[[str], None]]:
    """Shows how far a comparison is; what comes out is to be called with the name of each method that begins."""
    total, done = methods * prompts * repeats, 0
    with console.status(f"decoding {prompts} prompts in {methods} ways") as status:

        def advance(name: str) -> None:
            nonlocal done
            status.update(f"decoding: {done} of {total}, now {name}")
            done += 1

        yield advance


def measure(
    config: EvalConfig,
    target: LoadedModel,
    candidates: Sequence[Candidate],
    drafts: Sequence[LoadedModel],
    prompts: list[list[int]],
    console: Console,
) -> list[MethodResult]:
    """Timings of plain decoding, transformers' generate, then each candidate."""
    ready = with_backend(target, config.model.backend)
    methods: list[Method] = [
        decoder_method(PLAIN, SpeculativeDecoder(ready), config.decode),
        transformers_method(TRANSFORMERS, target, config.decode),
    ]
    for candidate, draft in zip(candidates, drafts, strict=True):
        decoder = SpeculativeDecoder(ready, with_backend(draft, config.model.backend))
        methods.append(decoder_method(candidate.name, decoder, config.decode))
    assert config.decode.max_new_tokens is not None
    with told(console, len(methods), len(prompts), config.repeats) as advance:
        return run_benchmark(methods, prompts, config.decode.max_new_tokens, config.repeats, advance)


def busy_share(seconds: float = 0.5) -> float | None:
    """Share of all CPU time that other processes took while this one slept; None where the system does not tell.

    The load average would not do: it still shows this process's own training of a minute ago.
    """
    before = _cpu_times()
    if before is None:
        return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None
    time.sleep(seconds)
    after = _cpu_times()
    assert after is not None
    passed, idle = after[0] - before[0], after[1] - before[1]
    return max(0.0, 1 - idle / passed) if passed > 0 else None


def _cpu_times() -> tuple[int, int] | None:
    """Clock ticks of all CPUs since the start, and those of them that were idle; Linux only."""
    try:
        ticks = [int(n) for n in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    return sum(ticks), ticks[3] + ticks[4]
