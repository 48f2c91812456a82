"""The report of a comparison: rows, warnings, failures; metrics.json and perf_results.csv; what the terminal shows."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.results.bench_names import TRANSFORMERS
from distill.results.bench_picture import write_picture
from distill.results.bench_rows import best_fixed, mismatch_rows, rows_of, timing_rows
from distill.results.bench_rules import rule_rows
from distill.results.bench_run import Circumstances, Measured
from distill.results.bench_tables import print_rules, print_tables
from distill.results.bench_theory import estimate_table, theory_of
from distill.results.config import BenchConfig
from distill.results.report import NEAR_ZERO_ACCEPTANCE, WIDE_SPREAD, machine_warnings
from distill.runs import plain, versions, write_json_atomic, write_text_atomic

Row = dict[str, Any]
OFTEN = 0.1  # share of all pairs of method and prompt


@dataclass(frozen=True)
class BenchReport:
    """All that a comparison found; every row is JSON-safe, and what is undefined is None."""

    settings: Row
    circumstances: Row
    rows: list[Row]  # of each domain and method, then of all domains
    theory: list[Row]  # of each domain
    rules: list[Row]  # of each domain and method that was run with both rules
    mismatches: list[Row]
    timings: list[Row]
    failures: list[str]  # greedy texts that should be equal and are not
    warnings: list[str] = field(default_factory=list)


def report_of(config: BenchConfig, measured: Measured, around: Circumstances) -> BenchReport:
    """Figures, and the lines on what is doubtful or wrong about them."""
    rows, mismatches = rows_of(measured), mismatch_rows(measured)
    last = [row for row in rows if row["domain"] == rows[-1]["domain"]]  # over all prompts
    ours = {e.name.text for e in measured.entries if e.name.is_ours}
    spread = next(row["spread"] for row in last if row["method"] == measured.plain.name)
    warm_up = {result.name: result.warm_up_seconds for result in measured.results}
    return BenchReport(
        settings=plain(config),
        circumstances={**plain(around), "warm_up_seconds": warm_up},
        rows=rows,
        theory=theory_of(measured),
        rules=rule_rows(measured),
        mismatches=mismatches,
        timings=timing_rows(measured),
        failures=_difference_lines(mismatches, [*ours, TRANSFORMERS]),
        warnings=[
            *machine_warnings(around.busy_share, spread),
            *_repeat_warnings(measured),
            *_cost_warnings(measured),
            *_backend_warnings(measured, config),
            *_draft_warnings(last),
            *_tie_lines(mismatches),
            *_difference_lines(mismatches, {row["method"] for row in last} - ours - {TRANSFORMERS}),
        ],
    )


def _difference_lines(mismatches: Sequence[Row], methods: Sequence[str] | set[str]) -> list[str]:
    """A line on each of `methods` whose greedy texts differ from plain decoding's beyond a tie."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in mismatches if row["method"] in methods):
        found = [row for row in mismatches if row["method"] == method and row["kind"] == "difference"]
        if found:
            lines.append(f"{method}: {len(found)} greedy texts differ from plain decoding's, {_told(found[0])}")
    return lines


def _told(row: Row) -> str:
    place = f"the first in prompt {row['prompt']} at new token {row['position']}"
    if row["gap"] is None:
        return f"{place}, where one of the two has ended"
    ids = f"id {row['found']} for {row['expected']}"
    return f"{place}: {ids}, {row['gap']:.3g} below the largest logit, where {row['bound']:.3g} would be a tie"


def _tie_lines(mismatches: Sequence[Row]) -> list[str]:
    ties = [row for row in mismatches if row["kind"] == "tie"]
    if not ties:
        return []
    worst = max(ties, key=lambda row: row["gap"] / row["bound"])
    methods = len({row["method"] for row in ties})
    return [
        f"{len(ties)} greedy texts of {methods} methods part from plain decoding's at ties: logits at most "
        f"{worst['gap']:.3g} apart, where rounding may reach {worst['bound']:.3g}"
    ]


def _repeat_warnings(measured: Measured) -> list[str]:
    """Repeats of one prompt decode the same text, so what tells their times apart is the machine."""
    repeats = [[run.seconds for run in t.runs] for result in measured.results for t in result.timings]
    wide = sum(max(seconds) > (1 + WIDE_SPREAD) * min(seconds) for seconds in repeats)
    if wide <= OFTEN * len(repeats):
        return []
    return [
        f"on {wide} of {len(repeats)} pairs of method and prompt the slowest repeat took more than {1 + WIDE_SPREAD:g} "
        "times the quickest; something else ran, and the timings are doubtful"
    ]


def _cost_warnings(measured: Measured) -> list[str]:
    if all(entry.costs_agree for entry in measured.entries):
        return []
    return ["the costs of single rounds differed from repeat to repeat; what they promise is doubtful"]


def _backend_warnings(measured: Measured, config: BenchConfig) -> list[str]:
    """A method that asked for a backend which could not serve its models."""
    lines = []
    for entry in measured.entries:
        asked = entry.name.backend or config.model.backend
        used = {entry.target_backend, entry.draft_backend} - {None}
        if entry.name.is_ours and asked != "auto" and used != {asked}:
            lines.append(
                f"{entry.name.text}: {asked} could not serve both models; ran {', '.join(sorted(map(str, used)))}"
            )
    return lines


def _draft_warnings(rows: Sequence[Row]) -> list[str]:
    """A useless draft is hidden by its output being right: say so. One line for all methods."""
    rates = [row["draft_acceptance_rate"] for row in rows if row["draft_acceptance_rate"] is not None]
    lines = []
    if rates and max(rates) < NEAR_ZERO_ACCEPTANCE:
        lines.append(f"at most {max(rates):.1%} of the drafted tokens are accepted: untrained, or for other prompts")
    drafted = [row for row in rows if row["num_draft_tokens"] and row["speedup_over_plain"] is not None]
    if drafted and all(row["speedup_over_plain"] < 1 for row in drafted):
        best = max(drafted, key=lambda row: row["speedup_over_plain"])
        lines.append(f"every drafting method is slower than plain decoding; the best, {best['method']}, has "
                     f"{best['speedup_over_plain']:.2f} times its speed")  # fmt: skip
    return lines


def write_report(report: BenchReport, output: Path) -> None:
    """metrics.json, perf_results.csv and bench.png; each is there whole or not at all."""
    report.warnings.extend(write_picture(report.rows, report.theory, output))
    found = {
        "settings": report.settings,
        "versions": versions(),
        "circumstances": report.circumstances,
        "rows": report.rows,
        "best_fixed": best_fixed(report.rows),
        "theory": report.theory,
        "textbook": estimate_table(),
        "rules": report.rules,
        "mismatches": report.mismatches,
        "failures": report.failures,
        "warnings": report.warnings,
    }
    write_json_atomic(output / "metrics.json", found)
    write_text_atomic(output / "perf_results.csv", perf_csv(report))


def perf_csv(report: BenchReport) -> str:
    """A line per method, prompt and repeat; prompts are numbered from 0 over all domains."""
    text = io.StringIO()
    lines = csv.DictWriter(text, list(report.timings[0]), lineterminator="\n")
    lines.writeheader()
    lines.writerows(report.timings)
    return text.getvalue()


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """The tables, then the warnings. Failures are the caller's to tell."""
    console = console or Console(highlight=False)
    print_tables(report.settings, report.circumstances, report.rows, report.theory, console)
    print_rules(report.rules, console)
    for line in report.warnings:
        console.print(f"warning: {line}", soft_wrap=True)
