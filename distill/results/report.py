"""The report of an evaluation: rows, warnings, metrics.json, CSV files and the table on the terminal."""

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from decode.benchmark import MethodResult
from decode.config import FIXED_LENGTH, LONGEST_DRAFT
from decode.stats import Stats
from decode.timing import spread_of
from distill.results.candidates import Candidate
from distill.results.config import EvalConfig
from distill.results.pictures import write_pictures
from distill.results.terms import recorded_bounds, said_of
from distill.runs import plain, versions, write_json_atomic, write_text_atomic

BUSY_SHARE = 0.25  # of all CPU time
WIDE_SPREAD = 0.5  # plain decoding costs about the same for every token, so more than this is the machine's doing
NEAR_ZERO_ACCEPTANCE = 0.02
UNKNOWN = "-"
COLUMNS = {
    "tokens\nseen": "tokens_seen",
    "expected\naccept.¹": "expected_acceptance",
    "greedy\naccept.¹": "greedy_acceptance",
    "mean acc.\nlength": "mean_acceptance_length",
    "accepted/\ndrafted": "draft_acceptance_rate",
    "speedup,\nplain²": "speedup_over_plain",
    "speedup,\ntransf.³": "speedup_over_transformers",
}
WIDTH = 79  # of the table and its notes


@dataclass(frozen=True)
class EvalReport:
    """All that an evaluation found. `baselines` and `drafts` are JSON-safe rows; what is undefined is None."""

    settings: dict[str, Any]  # with the number of prompts that were decoded
    baselines: list[dict[str, Any]]  # our plain decoding, then transformers' generate
    drafts: list[dict[str, Any]]
    timings: list[dict[str, Any]]  # a row per method and prompt
    busy_share: float | None
    warnings: list[str] = field(default_factory=list)


def report_of(
    config: EvalConfig,
    candidates: Sequence[Candidate],
    results: Sequence[MethodResult],  # plain, transformers, then one per candidate
    prompt_lengths: Sequence[int],  # tokens of each prompt
    busy: float | None,
) -> EvalReport:
    """Counts and ratios of counts; the only judgement is in the warnings."""
    plain_result, generate_result, *drafted = results
    assert config.decode.sampling is not None  # complete settings
    greedy = config.decode.sampling.greedy
    drafts = [
        draft_row(candidate, result, plain_result, generate_result, greedy)
        for candidate, result in zip(candidates, drafted, strict=True)
    ]
    baselines = [speed_row(plain_result), speed_row(generate_result)]
    if greedy:
        baselines[1]["mismatches"] = generate_result.mismatches(plain_result)
    timings = [
        {"method": r.name, "prompt": i, "prompt_tokens": n, "tokens": len(t.answer.ids), "seconds": t.best.seconds}
        for r in results
        for i, (n, t) in enumerate(zip(prompt_lengths, r.timings, strict=True))
    ]
    warnings = [*machine_warnings(busy, baselines[0]["spread"]), *(w for row in drafts for w in draft_warnings(row))]
    settings = {**plain(config), "num_prompts": len(prompt_lengths)}
    return EvalReport(settings, baselines, drafts, timings, busy, warnings)


def speed_row(result: MethodResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "total_tokens": result.total_tokens,
        "total_seconds": result.total_seconds,
        "tokens_per_second": result.tokens_per_second,
        "spread": spread_of([t.paces for t in result.timings]),
    }


def draft_row(
    candidate: Candidate, result: MethodResult, plain_result: MethodResult, generate: MethodResult, greedy: bool
) -> dict[str, Any]:
    """One draft: who it is, what its run recorded (teacher-forced), what decoding counted, what it is worth."""
    recorded = candidate.recorded
    return {
        "path": str(candidate.path),
        "step": candidate.step,
        "run": candidate.run,
        "tokens_seen": recorded.get("tokens_seen"),
        **recorded_bounds(recorded),
        "acceptance_temperature": candidate.temperature,
        **(result.stats or Stats()).as_dict(),
        **speed_row(result),
        "speedup_over_plain": result.speedup_over(plain_result),
        "speedup_over_transformers": result.speedup_over(generate),
        "mismatches": result.mismatches(plain_result) if greedy else None,
    }


def machine_warnings(busy: float | None, spread: float | None) -> list[str]:
    """Lines on what makes the timings doubtful."""
    lines = []
    if busy is not None and busy > BUSY_SHARE:
        lines.append(f"other processes took {busy:.0%} of the CPUs before the measurement; the timings are doubtful")
    if spread is not None and spread > WIDE_SPREAD:
        lines.append(f"plain decoding's slowest prompt took {1 + spread:.1f} times the median per token; a wide spread")
    return lines


def draft_warnings(row: Mapping[str, Any]) -> list[str]:
    """Lines on a draft that is of no use, or not exact: speculation hides a useless draft, its output being right."""
    lines, rate = [], row["draft_acceptance_rate"]
    if rate is not None and rate < NEAR_ZERO_ACCEPTANCE:
        lines.append(f"{row['name']}: {rate:.1%} of the drafted tokens are accepted: untrained, or for other prompts")
    speedup = row["speedup_over_plain"]
    if speedup is not None and speedup < 1:
        lines.append(f"{row['name']}: slower than plain decoding ({speedup:.2f} times its speed)")
    if row["mismatches"]:
        lines.append(f"{row['name']}: {row['mismatches']} of the greedy texts differ from plain decoding's")
    return lines


def conditions(settings: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """How the figures were taken, in a phrase; from the settings and versions that a report holds."""
    decode = settings["decode"]
    temperature = decode["sampling"]["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}, seed {decode.get('seed')}"
    return (
        f"{settings['num_prompts']} prompts, {how}, at most {decode['max_new_tokens']} new tokens, {drafted(decode)}, "
        f"{versions.get('accelerator') or str(versions.get('threads')) + ' CPU threads'}"
    )


def drafted(decode: Mapping[str, Any]) -> str:
    """How many tokens a round drafts, in a phrase; from the settings of decoding in a report."""
    policy, most = decode.get("draft_length", "fixed"), decode["num_speculative_tokens"]
    if policy == "fixed":
        return f"{FIXED_LENGTH if most is None else most} drafted a round"
    return f"at most {LONGEST_DRAFT if most is None else most} drafted a round ({policy})"


def write_report(report: EvalReport, output: Path) -> None:
    """metrics.json, acceptance.csv, perf_results.csv and the pictures; each is there whole or not at all."""
    found = {
        "settings": report.settings,
        "versions": versions(),
        "busy_share": report.busy_share,
        "baselines": report.baselines,
        "drafts": report.drafts,
        "warnings": report.warnings,
    }
    write_json_atomic(output / "metrics.json", found)
    write_text_atomic(output / "acceptance.csv", acceptance_csv(report))
    write_text_atomic(output / "perf_results.csv", perf_csv(report))
    report.warnings.extend(write_pictures(report.drafts, output))


def acceptance_csv(report: EvalReport) -> str:
    """A line per draft and position; the rate is unconditional, over all rounds that drafted."""
    lines: list[Sequence[Any]] = [("draft", "step", "position", "rate")]
    for row in report.drafts:
        step = "" if row["step"] is None else row["step"]
        lines += [(row["name"], step, i, rate) for i, rate in enumerate(row["per_position_acceptance_rate"], start=1)]
    return _csv(lines)


def perf_csv(report: EvalReport) -> str:
    """A line per method and prompt: the least seconds of all repeats; prompts are numbered from 0."""
    lines: list[Sequence[Any]] = [("method", "prompt", "prompt_tokens", "tokens", "seconds", "tokens_per_second")]
    for t in report.timings:
        pace = t["tokens"] / t["seconds"] if t["seconds"] > 0 else ""
        lines.append((t["method"], t["prompt"], t["prompt_tokens"], t["tokens"], t["seconds"], pace))
    return _csv(lines)


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def print_report(report: EvalReport, console: Console | None = None) -> None:
    """The table, its notes, then the warnings."""
    console = console or Console(highlight=False)
    console.print(conditions(report.settings, versions()), soft_wrap=True)
    console.print(table_of(report))
    for note in notes_of(report):
        console.print(textwrap.fill(note, WIDTH, subsequent_indent="  "), soft_wrap=True)
    for line in report.warnings:
        console.print(f"warning: {line}", soft_wrap=True)


def notes_of(report: EvalReport) -> list[str]:
    """What the table's columns are."""
    terms = said_of(row["acceptance_temperature"] for row in report.drafts)
    plain_speed, generate_speed = (row["tokens_per_second"] for row in report.baselines)
    return [
        f"¹ teacher-forced, over held-out text, {terms}; the columns to its right come from decoding",
        f"² over our own plain decoding, {plain_speed:.1f} tokens/s",
        f"³ over transformers' generate, {generate_speed:.1f} tokens/s",
    ]


def table_of(report: EvalReport) -> Table:
    """A row per draft, at most WIDTH columns; the fastest is bold where it beats plain decoding."""
    table = Table(box=HORIZONTALS, show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("step", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", overflow="fold")
    best = max((row["speedup_over_plain"] or 0 for row in report.drafts), default=0)
    for row in report.drafts:
        style = "bold" if row["speedup_over_plain"] == best and best > 1 else None
        table.add_row(row["name"], *(show(key, row[key]) for key in COLUMNS.values()), style=style)
    return table


def show(key: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if key == "tokens_seen":
        return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"
    return f"{value:.2f}×" if key.startswith("speedup") else f"{value:.3f}"
