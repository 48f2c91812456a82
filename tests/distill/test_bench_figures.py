"""Figures, tables and lines of a comparison, from seconds that are known."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from decode.config import DecodeConfig, SamplingConfig
from decode.draft import Round
from decode.mismatch import Mismatch
from distill.results.bench_report import BenchReport, print_report, report_of
from distill.results.bench_rows import best_fixed, rows_of
from distill.results.bench_run import Circumstances, Measured
from distill.results.bench_theory import acceptance_counts, theory_of
from distill.results.config import BenchConfig
from tests.distill.bench_samples import drafted_answer, entry, measured, plain_answer, result, usual

CONFIG = BenchConfig("t", "d", ["a.jsonl", "b.jsonl"], "o", decode=DecodeConfig(sampling=SamplingConfig()))


def row(found: Measured, method: str, domain: str = "all") -> dict[str, Any]:
    (one,) = (r for r in rows_of(found) if (r["method"], r["domain"]) == (method, domain))
    return one


def test_e06_speedups_are_total_tokens_over_total_time_of_both_sides() -> None:
    found = row(usual(), "fixed:2")
    assert (found["total_tokens"], found["total_seconds"]) == (19, 0.12)
    assert found["speedup_over_plain"] == pytest.approx(19 / 0.12 / 100)
    assert found["speedup_over_transformers"] == pytest.approx(19 / 0.12 / 50)
    assert row(usual(), "transformers")["speedup_over_plain"] == pytest.approx(0.5)
    # prompt 0: 9 tokens in .06 and .07 beside 10 in .10 and .14; prompt 1: 10 in .06 twice beside 10 in .10 and .12.
    pairs = sorted([0.010 / (0.06 / 9), 0.014 / (0.07 / 9), 0.010 / 0.006, 0.012 / 0.006])
    paired = found["paired_speedup_over_plain"]
    assert paired["median"] == pytest.approx((pairs[1] + pairs[2]) / 2)
    assert pairs[0] <= paired["low"] < paired["median"] < paired["high"] <= pairs[3]
    assert row(usual(), "fixed:2", "a")["speedup_over_plain"] == pytest.approx(9 / 0.06 / 100)


def test_policies_stand_beside_the_best_fixed_length_of_each_domain() -> None:
    seconds = {"fixed:1": 0.05, "fixed:2": 0.04, "cost_model": 0.03}
    answers = [drafted_answer([2, 2])] * 2
    results = [result(name, *answers, seconds=[[s, s], [0.09 - s, 0.2]]) for name, s in seconds.items()]
    found = {best["domain"]: best for best in best_fixed(rows_of(measured(usual().plain, *results)))}
    assert (found["a"]["method"], found["a"]["policies"]) == ("fixed:2", {"cost_model": pytest.approx(4 / 3)})
    assert (found["b"]["method"], found["b"]["policies"]) == ("fixed:1", {"cost_model": pytest.approx(2 / 3)})
    assert best_fixed(rows_of(measured(usual().plain))) == []


def test_repeats_that_made_no_token_are_in_no_pair() -> None:
    found = usual()
    broken = found.results[2].timings[0].runs[0]
    found.results[2].timings[0].runs[0] = replace(broken, answer=replace(broken.answer, ids=[]), seconds=9.0)
    paired = row(found, "fixed:2", "a")["paired_speedup_over_plain"]
    assert (paired["count"], paired["median"]) == (1, pytest.approx(0.014 / (0.07 / 9)))


def test_e06_reading_the_prompt_is_apart_from_decoding() -> None:
    found = row(usual(), "plain", "a")
    assert found["first_token_ms"] == pytest.approx(10.0)
    assert found["decode_tokens_per_second"] == pytest.approx(9 / (0.10 - 0.01))
    assert found["tokens_per_second"] == pytest.approx(100)


def test_the_phases_of_a_round_add_up_to_its_time() -> None:
    phases = row(usual(), "fixed:2", "a")["phases"]
    assert (phases["rounds"], phases["draft_ms"], phases["target_ms"]) == (3, pytest.approx(2), pytest.approx(13))
    assert phases["prompt_ms"] == pytest.approx(15)
    # 60 ms in all, 4 rounds of 15 ms inside the models: nothing is left for the host.
    assert phases["host_ms"] == pytest.approx(0, abs=1e-9)
    assert row(usual(), "transformers")["phases"] is None


def test_what_costs_promise_stands_beside_what_was_measured() -> None:
    found = row(usual(), "fixed:2", "a")["prediction"]
    # After the first round: 3 rounds of 15 ms promised and 7 tokens; plain decoding promises 10 ms a token.
    assert found["tokens_per_second"] == pytest.approx(7 / 0.045)
    assert found["speedup"] == pytest.approx(70 / 45)
    assert found["measured_tokens_per_second"] == pytest.approx(7 / (0.06 - 0.015))
    assert found["measured_share"] == pytest.approx(1.0)
    plain = row(usual(), "plain")["prediction"]
    assert (plain["speedup"], plain["measured_speedup"]) == pytest.approx((1.0, 1.0))
    assert row(usual(), "transformers")["prediction"] is None


def test_where_passes_cannot_be_timed_one_by_one_the_first_token_is_left_out() -> None:
    found = usual()
    for result_ in found.results:
        for timing in result_.timings:
            timing.runs[:] = [replace(run, answer=replace(run.answer, phases=None)) for run in timing.runs]
    promised = row(found, "fixed:2", "a")["prediction"]
    assert promised["measured_tokens_per_second"] == pytest.approx(8 / (0.06 - 0.01))
    assert promised["measured_speedup"] == pytest.approx(160 / 100)
    assert row(found, "fixed:2")["phases"] is None
    assert "where the time goes" in shown(report(found))


def test_acceptance_by_position_counts_what_was_decided() -> None:
    ended = Round(9, [4], 1, [4])  # the text ended inside the block; the second token was never decided on
    rounds = [Round(5, [1, 1], 2, [1, 1, 2]), Round(6, [1, 1], 0, [2]), Round(7, [1, 1], 1, [1, 2]), ended]
    assert acceptance_counts(rounds) == ([4, 2], [3, 1])
    assert acceptance_counts([Round(5, [], 0, [1])]) == ([], [])


def test_theory_stands_beside_measurement() -> None:
    found = theory_of(usual())
    assert [r["domain"] for r in found] == ["a", "b", "all"]
    both = found[2]
    # positions decided: 8 and 7; kept: 7 and 4.
    assert both["acceptance"] == pytest.approx(11 / 15)
    assert both["conditional_acceptance_rates"] == pytest.approx([7 / 8, 4 / 7])
    assert (both["cost_ratio"], both["plain_step_ms"]) == (0.1, 10.0)
    assert both["textbook_estimate"] == pytest.approx(1 / (4 / 15 + 11 / 150))
    one, two = both["lengths"]
    assert two["predicted_tokens_per_round"] == pytest.approx(1 + 7 / 8 + 7 / 8 * 4 / 7)
    assert two["predicted_speedup"] == pytest.approx((1 + 7 / 8 + 1 / 2) * 10 / 15)
    assert two["measured_speedup"] == pytest.approx(14 / 0.09 / 100)
    assert two["measured_share"] == pytest.approx(two["measured_speedup"] / two["predicted_speedup"])
    assert one["measured_speedup"] is None, "fixed:1 was not run"
    assert theory_of(measured(result("plain", plain_answer(3), seconds=[[0.1]]), a=1)) == []


def shown(report: BenchReport) -> str:
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        print_report(report, console)
        return console.export_text()


def report(found: Measured, **around: Any) -> BenchReport:
    return report_of(CONFIG, found, Circumstances(around.get("busy", 0.0), 0.1, {"load target": 1.0}))


def test_tables_are_at_most_79_columns_wide_and_hold_no_nan() -> None:
    found = usual()
    found.results.append(replace(found.results[1], name="transformers-prompt-lookup"))
    found.entries.append(entry("transformers-prompt-lookup"))
    assert found.mismatches is not None
    found.mismatches["transformers-prompt-lookup"] = {}
    text = shown(report(found))
    assert "transformers-prompt-lookup " in text
    assert max(len(line) for line in text.splitlines()[2:]) <= 79
    assert "nan" not in text.lower()
    for words in ("1.58 (1.", "cold start: load target 1.0 s", "a draft 2 times faster: 1.33", "100%", "theory, all"):
        assert words in text, words


def test_e08_ties_are_warned_of_and_differences_fail() -> None:
    tie, fault = Mismatch(3, 1, 2, 1e-5, 1e-4), Mismatch(4, 1, 2, 0.5, 1e-4)
    found = report(usual(mismatches={"fixed:2": {0: tie}}))
    assert found.failures == []
    assert "1 greedy texts of 1 methods part from plain decoding's at ties: logits at most 1e-05 apart" in shown(found)
    found = report(usual(mismatches={"fixed:2": {0: tie, 1: fault}, "transformers": {1: fault}}))
    assert [line.partition(":")[0] for line in found.failures] == ["transformers", "fixed"]
    assert (
        "fixed:2: 1 greedy texts differ from plain decoding's, the first in prompt 1 at new token 4"
        in found.failures[1]
    )
    assert [r["kind"] for r in found.mismatches] == ["difference", "tie", "difference"]
    ended = report(usual(mismatches={"fixed:2": {0: Mismatch(9, 1, None, None, None)}}))
    assert "where one of the two has ended" in ended.failures[0]


def test_what_makes_the_figures_doubtful_is_told() -> None:
    assert any("other processes took 80%" in line for line in report(usual(), busy=0.8).warnings)
    slow = measured(
        result("plain", plain_answer(4), seconds=[[0.04, 0.20]]),
        result("fixed:2", drafted_answer([0] * 4), seconds=[[0.08, 0.08]]),
        a=1,
    )
    lines = report(slow).warnings
    assert any("a wide spread" in line for line in lines)
    assert any(line.startswith("on 1 of 2 pairs of method and prompt the slowest repeat took more") for line in lines)
    assert "at most 0.0% of the drafted tokens are accepted: untrained, or for other prompts" in lines
    assert any("slower than plain decoding; the best, fixed:2, has 0.50 times its speed" in line for line in lines)
    assert report(usual()).warnings == []


def test_a_backend_that_could_not_serve_is_told() -> None:
    found = usual()
    found.entries[2] = replace(found.entries[2], target_backend="prepacked", draft_backend="eager")
    asked = replace(CONFIG, model=replace(CONFIG.model, backend="prepacked"))
    lines = report_of(asked, found, Circumstances(0.0, 0.1, {"x": 1.0})).warnings
    assert "fixed:2: prepacked could not serve both models; ran eager, prepacked" in lines
