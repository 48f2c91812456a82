"""The block rule beside the token rule: figures from rounds and laws that are known."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from decode.benchmark import Answer
from decode.config import DecodeConfig, SamplingConfig
from decode.loop import decode_rounds
from decode.proposers import PROPOSERS, Setup
from decode.stats import Stats
from decode.verifiers import VERIFIERS
from distill.results.bench_report import report_of
from distill.results.bench_rules import rule_rows
from distill.results.bench_run import Circumstances, Measured
from distill.results.bench_tables import print_rules
from distill.results.config import BenchConfig
from tests.distill.bench_samples import drafted_answer, measured, plain_answer, result
from tests.fixtures import P, Q
from tests.tables import TableSession, table_row

CONFIG = BenchConfig("t", "d", ["a.jsonl"], "o", decode=DecodeConfig(sampling=SamplingConfig(1.0)))


def both(token: str = "fixed:2/token", block: str = "fixed:2/block", **changes: Any) -> Measured:
    """Sampled: two prompts; the token rule needs 4 and 3 passes for 8 and 4 tokens, the block rule 3 and 2."""
    found = measured(
        result("plain", plain_answer(8), plain_answer(4), seconds=[[0.08, 0.08], [0.04, 0.04]]),
        result(token, drafted_answer([1, 1, 1, 1]), drafted_answer([1, 0, 0]), seconds=[[0.08, 0.09], [0.04, 0.05]]),
        result(block, drafted_answer([2, 2, 1]), drafted_answer([2, 0]), seconds=[[0.04, 0.09], [0.02, 0.05]]),
        a=2,
    )
    return replace(found, **{"mismatches": None, **changes})


def test_figures_are_ratios_of_sums_of_both_rules() -> None:
    (row,) = rule_rows(both())
    assert (row["domain"], row["method"], row["num_prompts"]) == ("a", "fixed:2", 2)
    assert row["token"]["method"] == "fixed:2/token"
    assert row["token"]["mean_acceptance_length"]["value"] == pytest.approx(12 / 7)
    assert row["block"]["mean_acceptance_length"]["value"] == pytest.approx(12 / 5)
    assert row["token"]["tokens_per_second"]["value"] == pytest.approx(12 / 0.12)
    assert row["block"]["tokens_per_second"]["value"] == pytest.approx(12 / 0.06)
    gain = row["block_over_token"]
    assert gain["mean_acceptance_length"]["value"] == pytest.approx(7 / 5)
    assert gain["tokens_per_second"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    length = gain["mean_acceptance_length"]
    assert 4 / 3 <= length["low"] <= 7 / 5 <= length["high"] <= 3 / 2  # of either prompt alone


@pytest.mark.parametrize(
    ("token", "block", "mismatches", "found"),
    [
        ("fixed:2/token", "fixed:2", None, ["fixed:2"]),  # sampled drafts: the block rule is the default
        ("fixed:2", "fixed:2/block", {}, ["fixed:2"]),  # greedy ones: the token rule
        ("fixed:2", "fixed:2/block", None, []),
        ("fixed:2/token@eager", "fixed:2/block@eager", None, ["fixed:2@eager"]),
        ("fixed:2/token@eager", "fixed:2/block", None, []),
        ("fixed:3/token", "fixed:2/block", None, []),
        ("cost_model/token", "cost_model/block", None, ["cost_model"]),
    ],
)
def test_only_methods_that_differ_in_nothing_else_are_compared(
    token: str, block: str, mismatches: Any, found: list[str]
) -> None:
    rows = rule_rows(both(token, block, mismatches=mismatches))
    assert [row["method"] for row in rows] == found
    assert [(row["token"]["method"], row["block"]["method"]) for row in rows] == [(token, block)] * len(found)


def test_the_table_stands_in_the_report() -> None:
    report = report_of(CONFIG, both(), Circumstances(0.0, 0.1, {"x": 1.0}))
    assert report.rules == rule_rows(both())
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        print_rules(report.rules, console)
        print_rules([], console)
        text = console.export_text()
    assert "block over token rule, a" in text
    assert "1.71 (1.33-2.00)" in text and "1.40 (1.33-1.50)" in text and "2.00 (2.00-2.00)" in text
    assert max(map(len, text.splitlines())) <= 79


def known(rule: str, seed: int, tokens: int = 400) -> Answer:
    """A text of constant laws with overlap 1/2, 4 tokens drafted a round."""
    row = table_row(tokens, 4, torch.Generator().manual_seed(seed))
    proposer = PROPOSERS["draft_model"](Setup(TableSession([Q] * 6), 6))
    steps = decode_rounds([row], TableSession([P] * 6), proposer, VERIFIERS[rule])
    rounds = [step[0][1] for step in steps]
    return Answer([1] * tokens, Stats.of(rounds), rounds)


def test_the_gain_of_the_block_rule_is_found_on_laws_that_are_known() -> None:
    seconds = [[1.0]] * 10
    answers = {rule: [known(rule, seed) for seed in range(10)] for rule in ("token", "block")}
    results = [result(f"fixed:4/{rule}", *of_rule, seconds=seconds) for rule, of_rule in answers.items()]
    found = measured(result("plain", *[plain_answer(4)] * 10, seconds=seconds), *results, a=10)
    (row,) = rule_rows(found)
    token, block = row["token"]["mean_acceptance_length"], row["block"]["mean_acceptance_length"]
    assert token["low"] < 1.9375 < token["high"]
    assert row["block_over_token"]["mean_acceptance_length"]["low"] > 1.0
    assert row["block_over_token"]["mean_acceptance_length"]["value"] == pytest.approx(block["value"] / token["value"])
    same = [result(f"fixed:4/{rule}", *answers["token"], seconds=seconds) for rule in ("token", "block")]
    (row,) = rule_rows(measured(found.plain, *same, a=10))
    assert row["block_over_token"]["mean_acceptance_length"] == {"value": 1.0, "low": 1.0, "high": 1.0}
