"""What each subcommand does: one library call, then where the result lies and what to do next."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from decode.errors import UsageError
from distill.config import CacheConfig, FitConfig, GenerateConfig, InitConfig, RunConfig
from distill.export.config import ExportConfig
from distill.results.config import BenchConfig, EvalConfig

if TYPE_CHECKING:
    from decode.decoder import Generation


def run_generate(config: GenerateConfig) -> None:
    from distill.generate import generate

    report = generate(config)
    print(f"{config.output}: {report.num_written} answers to {report.num_rows} rows", end="")
    print(f" ({report.num_errors} bad rows, {report.num_skipped} skipped)")
    if report.errors_output:
        print(f"{report.errors_output}: the bad rows, with file, line and reason")
    print(f"next: draftsmith fit --data.train {config.output} ...")


def run_cache(config: CacheConfig) -> None:
    from distill.cache import cache, verify

    if config.verify is not None:
        checked = verify(config)
        print(f"{config.verify}: whole; {checked.size}; {checked.compared}")
        return
    report = cache(config)
    told = (
        f"; {report.num_scored} scored now, {report.num_scored / report.seconds:.0f} tokens/s"
        if report.num_scored
        else ""
    )
    print(f"{config.output}: {report.size}{told}")
    print(f"next: draftsmith fit --target {config.target} --teacher.kind cached --teacher.cache {config.output} ...")
    print(f"      draftsmith cache --verify {config.output}")


def run_init(config: InitConfig) -> None:
    from distill.drafts.make import init_draft

    init_draft(config)
    print(f"{config.output}: the untrained draft")
    print(f"next: draftsmith fit --target {config.target} --draft {config.output} ...")


def run_fit(config: FitConfig) -> None:
    from distill.runs import is_other_rank

    if config.dry_run:
        from distill.training.dry_run import dry_run

        print("\n".join(dry_run(config)))
        return
    from distill.training.fit import fit

    report = fit(config)
    if is_other_rank():
        return
    print(f"{config.output}: checkpoints, metrics.csv, best.json; step {report.step} of {report.num_steps}")
    print(f"next: draftsmith eval --target {config.target} --drafts {config.output} ...")
    print(f"      draftsmith export --target {config.target} --draft {config.output} ...")


def run_eval(config: EvalConfig) -> None:
    from distill.results.evaluate import evaluate

    evaluate(config)
    print(f"{config.output}: {_files_in(config.output)}")
    print(f"next: draftsmith export --target {config.target} --draft {config.drafts[0]} ...")


def run_bench(config: BenchConfig) -> None:
    from distill.results.bench import bench

    _refuse_unexported(config.target, config.draft)
    bench(config)
    print(f"{config.output}: {_files_in(config.output)}")


def _files_in(folder: str) -> str:
    return ", ".join(sorted(p.name for p in Path(folder).expanduser().iterdir() if not p.name.startswith(".")))


def run_export(config: ExportConfig) -> None:
    from distill.export.export import export

    export(config)
    print(f"{config.output}: the draft, for any engine that takes a model directory")
    print(f"next: draftsmith run --target {config.target} --draft {config.output} --prompt '...'")


def run_run(config: RunConfig) -> None:
    from decode.decoder import SpeculativeDecoder
    from distill.outputs import check_writable

    _refuse_unexported(config.target, config.draft)
    if config.trace is not None:
        if Path(config.trace).exists():
            raise UsageError(f"trace: {config.trace} is there already; name a new file")
        check_writable(Path(config.trace))
    decoder = SpeculativeDecoder.from_pretrained(config.target, config.draft, config.model)
    if config.interactive:
        from distill.cli.chat import chat

        chat(decoder, config.decode, config.prompt)
        return
    decoder.costs(config.decode)
    started = time.perf_counter()
    for chunk in decoder.stream(config.prompt or "", config.decode, chat=config.chat, trace=config.trace is not None):
        print(chunk.text, end="", flush=True)
    seconds = time.perf_counter() - started
    print()
    if chunk.generation is not None:
        print(stats_line(chunk.generation, seconds), file=sys.stderr)
        if config.trace is not None:
            prompt = decoder.encode(config.prompt or "", chat=config.chat)
            _write_trace(config.trace, chunk.generation, prompt)


def _write_trace(path: str, generation: "Generation", prompt: list[int]) -> None:
    """A line of JSON for each round, all or none."""
    from distill.runs import write_text_atomic

    lines = [json.dumps(row) for row in generation.trace(prompt)]
    write_text_atomic(path, "".join(line + "\n" for line in lines))
    print(f"{path}: {len(lines)} rounds", file=sys.stderr)


def _refuse_unexported(target: str, draft: str | None) -> None:
    """A run of fit and its checkpoints become model directories by export."""
    path = Path(draft or "").expanduser()
    is_run = (path / "checkpoints").is_dir() and not (path / "config.json").exists()
    if draft and (is_run or (path.suffix == ".ckpt" and path.is_file())):
        raise UsageError(
            f"draft: {draft} is a {'run' if is_run else 'checkpoint'} of fit; export it first: "
            f"draftsmith export --target {target} --draft {draft} --output DIRECTORY"
        )


def stats_line(generation: "Generation", seconds: float) -> str:
    """One line on a finished answer: tokens, speed, and what the draft was worth."""
    stats = generation.stats
    parts = [f"{stats.num_output_tokens} tokens", f"{stats.num_output_tokens / seconds:.1f} tokens/s"]
    if stats.mean_acceptance_length is not None:
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
    if stats.draft_acceptance_rate is not None:
        parts.append(f"draft acceptance rate {stats.draft_acceptance_rate:.2f}")
    return ", ".join(parts)
