"""Compares ways to decode a pair: loads it, has them timed, writes and prints the report; fails on wrong texts."""

import os
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from decode.decoder import SpeculativeDecoder
from decode.errors import DraftsmithError
from decode.models import load_model
from distill.data.rows import check_source
from distill.drafts.load import load_draft
from distill.folders import run_folder
from distill.results.bench_methods import Pair, build_entries
from distill.results.bench_names import method_names
from distill.results.bench_report import BenchReport, print_report, report_of, write_report
from distill.results.bench_run import Circumstances, load_domains, measure
from distill.results.candidates import check_apart
from distill.results.config import BenchConfig
from distill.results.evaluate import busy_share, seeded
from distill.runs import record_run


def bench(config: BenchConfig) -> BenchReport:
    """Run the comparison, write its files into `config.output` and print its tables.

    Raises UsageError for names, files, models or settings that cannot be used, before anything is decoded; and
    DraftsmithError, when all is written and printed, where greedy texts differ beyond a tie.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    names = method_names(config.methods)
    for file in config.prompts:
        check_source(file)
    for role, model in (("target", config.target), ("draft", config.draft)):
        check_apart(Path(config.output), role, model)
    with run_folder(config.output, "draftsmith bench") as output:
        around = Circumstances(busy_share(), os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
        pair = _load(config, around)
        domains = load_domains(config, pair.target)
        settings = SpeculativeDecoder(pair.target, pair.draft).settings(config.decode)
        config = replace(config, decode=seeded(settings, console))
        record_run(output, config)
        entries = build_entries(names, pair, config.decode)
        around.seconds.update({f"backend {name}": took for name, took in pair.backend_seconds.items()})
        report = report_of(config, measure(config, entries, pair.target, domains, console), around)
        write_report(report, output)
    print_report(report)
    if report.failures:
        raise DraftsmithError(f"{'; '.join(report.failures)}; see metrics.json in {config.output}")
    return report


def _load(config: BenchConfig, around: Circumstances) -> Pair:
    started = time.perf_counter()
    target = load_model(config.target, config.model, role="target")
    loaded = time.perf_counter()
    draft = load_draft(config.draft, target, config.model)
    around.seconds.update({"load target": loaded - started, "load draft": time.perf_counter() - loaded})
    return Pair(target, draft, config.model)
