"""Reports from timings that are made up: ratios, warnings, tables and pictures."""

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from decode.benchmark import Answer, MethodResult, Run, Timing
from decode.config import DecodeConfig, SamplingConfig
from decode.stats import Stats
from distill.results import pictures
from distill.results.candidates import Candidate
from distill.results.config import EvalConfig
from distill.results.pictures import write_pictures
from distill.results.report import EvalReport, acceptance_csv, conditions, perf_csv, print_report, report_of

CONFIG = EvalConfig(
    "t", ["d"], "p.jsonl", "o", decode=DecodeConfig(num_speculative_tokens=2, sampling=SamplingConfig())
)
STATS = Stats(10, 20, 8, 16, 10, (1, 4, 3))


def result(name: str, seconds: float, tokens: int = 10, stats: Stats | None = None, first: int = 1) -> MethodResult:
    """Two prompts of `tokens` tokens each, in `seconds` each."""
    return MethodResult(name, [Timing([Run(Answer([first] * tokens, stats), seconds)]) for _ in range(2)])


def make_report(*drafted: MethodResult, busy: float | None = 0.0, steps: bool = True) -> EvalReport:
    candidates = [Candidate(r.name, Path(r.name), step=i * 10 if steps else None) for i, r in enumerate(drafted)]
    baselines = [result("plain decoding", 1.0), result("transformers' generate", 2.0)]
    return report_of(CONFIG, candidates, [*baselines, *drafted], [5, 7], busy)


def printed(report: EvalReport) -> str:
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        print_report(report, console)
        return console.export_text()


def test_speedups_are_total_tokens_over_total_time_of_both_sides() -> None:
    # 12 tokens in half the time of 10: 2.4 times plain, and transformers needs twice as long as plain.
    row = make_report(result("d", 0.5, tokens=12, stats=STATS)).drafts[0]
    assert row["speedup_over_plain"] == pytest.approx(2.4)
    assert row["speedup_over_transformers"] == pytest.approx(4.8)
    assert (row["total_tokens"], row["total_seconds"]) == (24, 1.0)


def test_e05_counts_and_rates_follow_one_definition() -> None:
    row = make_report(result("d", 0.5, stats=STATS)).drafts[0]
    assert row["acceptance_histogram"] == [2, 8, 6]  # both prompts
    assert row["draft_acceptance_rate"] == 20 / 32
    assert row["mean_acceptance_length"] == 2.0
    assert row["per_position_acceptance_rate"] == [14 / 16, 6 / 16]
    lines = acceptance_csv(make_report(result("d", 0.5, stats=STATS))).splitlines()
    assert lines == ["draft,step,position,rate", "d,0,1,0.875", "d,0,2,0.375"]


def test_e09_useless_drafts_are_shown_and_warned_of() -> None:
    useless = replace(STATS, num_accepted_draft_tokens=0, acceptance_histogram=(8, 0, 0))
    report = make_report(result("bad", 1.6, stats=useless), result("good", 0.5, stats=STATS))
    text = printed(report)
    assert "0.62×" in text
    assert "warning: bad: slower than plain decoding (0.62 times its speed)" in text
    assert "warning: bad: 0.0% of the drafted tokens are accepted" in text
    assert not any(line.startswith("good") for line in report.warnings)


def test_texts_that_differ_are_counted_and_warned_of() -> None:
    report = make_report(result("d", 0.5, stats=STATS, first=7))
    assert report.drafts[0]["mismatches"] == 2
    assert "warning: d: 2 of the greedy texts differ from plain decoding's" in printed(report)


def test_what_is_unknown_is_a_dash(tmp_path: Path) -> None:
    report = make_report(result("d", 0.5), steps=False)
    assert report.drafts[0]["draft_acceptance_rate"] is None
    assert report.drafts[0]["expected_acceptance"] is None
    assert "nan" not in printed(report).lower()
    assert " - " in printed(report)


def test_a_busy_machine_and_a_wide_spread_are_told() -> None:
    report = make_report(result("d", 0.5, stats=STATS), busy=0.8)
    assert any("other processes took 80% of the CPUs" in line for line in report.warnings)
    baselines = [result("plain decoding", 1.0), result("transformers' generate", 2.0)]
    wide = MethodResult(
        "plain decoding", [baselines[0].timings[0], Timing([Run(Answer([1] * 10), s) for s in (1.0, 4.0)])]
    )
    found = report_of(CONFIG, [], [wide, baselines[1]], [5, 7], None).warnings
    assert found == ["plain decoding's slowest prompt took 4.0 times the median per token; a wide spread"]
    assert make_report(result("d", 0.5, stats=STATS), busy=0.1).warnings == []


def test_no_tokens_at_all_give_no_ratio() -> None:
    empty = [result(name, 0.1, tokens=0) for name in ("plain decoding", "transformers' generate", "d")]
    report = report_of(CONFIG, [Candidate("d", Path("d"))], empty, [5, 7], None)
    assert report.drafts[0]["speedup_over_plain"] is None
    assert report.baselines[0]["spread"] is None
    printed(report)


def test_pictures_are_left_out_with_a_line_where_matplotlib_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    (line,) = write_pictures(make_report(result("d", 0.5, stats=STATS)).drafts, tmp_path)
    assert "draftsmith[plots]" in line
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_drawn_for_many_runs_and_checkpoints(tmp_path: Path) -> None:
    rows = [dict(row) for row in make_report(*(result(f"{i}", 0.5, stats=STATS) for i in range(12))).drafts]
    for row in rows[6:]:
        row["run"] = "second"
    assert write_pictures(rows, tmp_path) == []
    assert {p.name for p in tmp_path.iterdir()} == {"acceptance_over_training.png", "acceptance_by_position.png"}


BOUNDED = {
    "val/expected_acceptance": 0.4,
    "val/expected_acceptance_upper": 0.45,
    "val/greedy_acceptance": 0.5,
    "val/greedy_acceptance_upper": 0.5,
}


def bounded_report(*temperatures: float | None) -> EvalReport:
    baselines = [result("plain decoding", 1.0), result("transformers' generate", 2.0)]
    candidates = [Candidate(f"{i}", Path("d"), i, "run", BOUNDED, t) for i, t in enumerate(temperatures)]
    drafted = [result("d", 0.5, stats=STATS) for _ in temperatures]
    return report_of(CONFIG, candidates, [*baselines, *drafted], [5, 7], 0.0)


def test_acceptance_keeps_its_upper_bound_and_its_temperature(tmp_path: Path) -> None:
    report = bounded_report(0.7)
    row = report.drafts[0]
    assert (row["expected_acceptance"], row["expected_acceptance_upper"]) == (0.4, 0.45)
    assert (row["greedy_acceptance_upper"], row["acceptance_temperature"]) == (0.5, 0.7)
    text = " ".join(printed(report).split())
    assert "at temperature 0.7, a lower bound where the teacher is cached; the columns to its right" in text
    assert "at the run's loss temperature, a lower bound" in " ".join(printed(bounded_report(0.7, 1.0)).split())
    assert write_pictures(bounded_report(0.7, 0.7).drafts, tmp_path) == []


def test_pictures_name_the_temperature_and_shade_up_to_the_upper_bound() -> None:
    figure = pictures._over_training(Figure(), bounded_report(0.7, 0.7).drafts)
    legend = figure.axes[0].get_legend()
    assert "at temperature 0.7, a lower bound where the" in " ".join(legend.get_title().get_text().split())
    labels = [text.get_text() for text in legend.get_texts()]
    assert "expected, to its upper bound" in labels
    assert "greedy, to its upper bound" not in labels  # both bounds are one


@pytest.mark.parametrize("temperatures", [(1.0,), (0.123456, 1.0)])
def test_the_table_and_its_notes_are_at_most_79_columns_wide(temperatures: tuple[float, ...]) -> None:
    report = bounded_report(*temperatures)
    for row in report.drafts:
        row["tokens_seen"] = 123_456_789
    lines = printed(report).splitlines()[1:]  # the first says how the figures were taken, and wraps
    assert max(map(len, lines)) <= 79
    assert sum(line.startswith(("¹", "²", "³")) for line in lines) == 3


def test_e06_the_lengths_of_the_prompts_are_beside_the_timings() -> None:
    lines = perf_csv(bounded_report(1.0)).splitlines()
    assert lines[0] == "method,prompt,prompt_tokens,tokens,seconds,tokens_per_second"
    assert [line.split(",")[1:3] for line in lines[1:3]] == [["0", "5"], ["1", "7"]]


def test_the_conditions_tell_how_many_prompts_were_decoded_how_and_with_which_seed() -> None:
    report = bounded_report(1.0)
    assert CONFIG.num_prompts == 8
    assert printed(report).startswith(
        "2 prompts, greedy, at most 128 new tokens, at most 2 drafted a round (cost_model), "
    )
    decode = {**report.settings["decode"], "sampling": {"temperature": 0.7}, "seed": 0, "draft_length": "fixed"}
    told = conditions({**report.settings, "decode": decode}, {})
    assert "temperature 0.7, seed 0" in told and ", 2 drafted a round, " in told
    assert ", 3 drafted a round, " in conditions(
        {**report.settings, "decode": {**decode, "num_speculative_tokens": None}}, {}
    )
