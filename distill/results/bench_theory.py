"""What theory says of a measured pair, beside what was measured: closed forms, costs, acceptance by position."""

from collections.abc import Sequence
from typing import Any

from decode.draft import Round
from decode.theory import (
    TABLE_ACCEPTANCES,
    TABLE_SPEEDS,
    Costs,
    best_length,
    expected_tokens,
    operations_factor,
    predict,
    predict_best,
    textbook_estimate,
    textbook_table,
    walltime_improvement,
)
from distill.results.bench_methods import Entry
from distill.results.bench_rows import all_rounds, steady_speed
from distill.results.bench_run import Measured

Row = dict[str, Any]


def theory_of(measured: Measured) -> list[Row]:
    """A row for each domain in which the pair drafted; acceptance is taken from the longest fixed length."""
    source = _source(measured)
    if source is None:
        return []
    found = (_domain(measured, source, domain, prompts) for domain, prompts in measured.parts.items())
    return [row for row in found if row is not None]


def _source(measured: Measured) -> Entry | None:
    drafting = [entry for entry in measured.entries if entry.name.is_drafting]
    return max(drafting, key=lambda e: (e.name.kind == "fixed", e.name.length or 0), default=None)


def _domain(measured: Measured, source: Entry, domain: str, prompts: Sequence[int]) -> Row | None:
    costs = source.costs
    if costs is None:  # no round could be timed
        return None
    reached, kept = acceptance_counts(all_rounds(measured.result_of(source.name.text).only(prompts)))
    if not reached:
        return None
    rates, acceptance = [k / r for k, r in zip(kept, reached, strict=True)], sum(kept) / sum(reached)
    step = costs.ms(0)  # of plain decoding; the unit of all ratios
    ratio, host = costs.draft_ms / step, (costs.round_ms + costs.start_ms) / step
    verify = [ms / step for ms in costs.verify_ms]
    return {
        "domain": domain,
        "acceptance_from": source.name.text,
        "acceptance": acceptance,
        "conditional_acceptance_rates": rates,
        "plain_step_ms": step,
        "cost_ratio": ratio,
        "verify_ratios": verify,
        "overhead_ratio": host,
        "textbook_estimate": textbook_estimate(acceptance, 1 / ratio),
        "best_length": best_length(acceptance, ratio),
        "best_length_by_costs": best_length(acceptance, ratio, verify, host),
        "best_length_by_positions": predict_best(costs, rates)[0],
        "lengths": [
            _length(k, acceptance, ratio, rates, costs, _measured_speedup(measured, k, prompts))
            for k in range(1, min(len(rates), costs.most) + 1)
        ],
    }


def _length(
    k: int, acceptance: float, ratio: float, rates: Sequence[float], costs: Costs, measured: float | None
) -> Row:
    """One draft length: Leviathan's forms from one acceptance, and what costs and positions promise."""
    promised = predict(costs, rates, k)
    return {
        "length": k,
        "expected_tokens": expected_tokens(acceptance, k),
        "walltime_improvement": walltime_improvement(acceptance, k, ratio),
        "operations_factor": operations_factor(acceptance, k, ratio),
        "predicted_tokens_per_round": promised.tokens_per_round,
        "predicted_speedup": promised.speedup,
        "measured_speedup": measured,
        "measured_share": None if measured is None else measured / promised.speedup,
    }


def _measured_speedup(measured: Measured, length: int, prompts: Sequence[int]) -> float | None:
    """Of fixed:LENGTH over plain decoding, the rounds that read the prompts left out; None where it wasn't run."""
    result = next((r for r in measured.results if r.name == f"fixed:{length}"), None)
    speeds = [None if r is None else steady_speed(r.only(prompts)) for r in (result, measured.plain)]
    return None if speeds[0] is None or speeds[1] is None else speeds[0] / speeds[1]


def acceptance_counts(rounds: Sequence[Round]) -> tuple[list[int], list[int]]:
    """For each position: how often a token there was decided on (all before it were accepted), and how often kept."""
    reached: list[int] = []
    kept: list[int] = []
    for done in rounds:
        for position in range(min(done.num_accepted + 1, len(done.drafted))):
            if position == len(reached):
                reached.append(0)
                kept.append(0)
            reached[position] += 1
            kept[position] += position < done.num_accepted
    return reached, kept


def estimate_table() -> Row:
    """The textbook's table, for JSON: rows are speeds of the draft, columns acceptances."""
    return {"speeds": list(TABLE_SPEEDS), "acceptances": list(TABLE_ACCEPTANCES), "estimates": textbook_table()}
