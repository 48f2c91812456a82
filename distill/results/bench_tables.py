"""What a comparison shows on the terminal: a table of speeds for each domain, where a round's time goes, and theory."""

import textwrap
from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from decode.theory import TABLE_ACCEPTANCES, TABLE_SPEEDS, textbook_table
from distill.results.bench_rows import best_fixed
from distill.results.report import UNKNOWN, WIDTH
from distill.runs import versions

Row = Mapping[str, Any]

NOTES = (
    "¹ milliseconds of a call for one token: reading the prompt, median",
    "² over plain decoding and over transformers, tokens per second of both over all prompts; in brackets the 95% "
    "interval of the median of paired ratios",
    "³ output tokens per pass of the target; accepted over drafted tokens",
)
PHASE_NOTES = (
    "⁴ milliseconds of a round after the first; host is all that is not a pass of a model",
    "⁵ over plain decoding, prompts' first rounds left out; what the costs measured in this run promise for the rounds "
    "that were decoded, what was measured, and its share of that",
)

RULE_NOTES = ("in brackets 95% intervals over prompts; where that of a ratio holds 1, no gain is shown",)


def print_tables(
    settings: Row, circumstances: Row, rows: Sequence[Row], theory: Sequence[Row], console: Console
) -> None:
    """All tables and their notes, WIDTH columns wide."""
    console.print(conditions(settings, rows), soft_wrap=True)
    console.print(cold_line(circumstances), soft_wrap=True)
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    for domain in domains:
        of_domain = [row for row in rows if row["domain"] == domain]
        console.print(f"\n{domain}", style="bold")
        console.print(speed_table(of_domain))
        for line in policy_lines(of_domain):
            console.print(textwrap.fill(line, WIDTH), soft_wrap=True)
    _print_notes(NOTES, console)
    timed = [row for row in rows if row["domain"] == domains[-1] and (row["phases"] or row["prediction"])]
    if timed:
        console.print(f"\nwhere the time goes, {domains[-1]}", style="bold")
        console.print(phase_table(timed))
        _print_notes(PHASE_NOTES, console)
    for row in theory:
        _print_theory(row, console)
    if theory:
        console.print(textbook_lines(), soft_wrap=True)


def _print_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(textwrap.fill(note, WIDTH, subsequent_indent="  "), soft_wrap=True)


def conditions(settings: Row, rows: Sequence[Row]) -> str:
    """How the figures were taken, in a phrase."""
    decode, found = settings["decode"], versions()
    temperature = decode["sampling"]["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}, seeds from {decode['seed']} on"
    machine = found.get("accelerator") or f"{found.get('threads')} CPU threads"
    backends = [next((row[key] for row in rows if row[key]), None) for key in ("target_backend", "draft_backend")]
    return (
        f"{rows[-1]['num_prompts']} prompts, {how}, at most {decode['max_new_tokens']} new tokens, "
        f"{settings['repeats']} repeats, {machine}; methods that name no backend run "
        f"{' and '.join(dict.fromkeys(filter(None, backends)))}"
    )


def cold_line(circumstances: Row) -> str:
    """Seconds before the first token, which no figure below holds."""
    parts = [f"{name} {seconds:.1f} s" for name, seconds in circumstances["seconds"].items()]
    slowest = max(circumstances["warm_up_seconds"].items(), key=lambda pair: pair[1])
    return f"cold start: {', '.join(parts)}; the slowest first call, {slowest[0]}'s, {slowest[1]:.1f} s"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=HORIZONTALS, show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def speed_table(rows: Sequence[Row]) -> Table:
    """A row per method; the fastest is bold."""
    table = _table("method", "tok\n/s", "first\nms¹", "over plain²", "over\ntrf.²", "tok/\npass³", "acc.\nrate³")
    best = max(row["tokens_per_second"] for row in rows)
    for row in rows:
        table.add_row(
            row["method"],
            _number(row["tokens_per_second"], 1),
            _number(row["first_token_ms"], 0),
            _with_interval(row["speedup_over_plain"], row["paired_speedup_over_plain"]),
            _number(row["speedup_over_transformers"], 2),
            _number(row["mean_acceptance_length"], 2),
            _number(row["draft_acceptance_rate"], 2),
            style="bold" if row["tokens_per_second"] == best else None,
        )
    return table


def policy_lines(rows: Sequence[Row]) -> list[str]:
    """What the policies make of the best fixed length, which nobody knows beforehand."""
    return [
        f"best fixed length: {best['method']}; of its speed, " + ", ".join(f"{n} {s:.0%}" for n, s in shares.items())
        for best in best_fixed(rows)
        if (shares := best["policies"])
    ]


def _with_interval(speedup: float | None, paired: Row | None) -> str:
    if speedup is None or paired is None:
        return _number(speedup, 2)
    return f"{speedup:.2f} ({paired['low']:.2f}-{paired['high']:.2f})"


def phase_table(rows: Sequence[Row]) -> Table:
    """A row per method whose rounds are known."""
    table = _table(
        "method", "draft\nms⁴", "target\nms⁴", "host\nms⁴", "promised\nspeedup⁵", "measured\nspeedup⁵", "share⁵"
    )
    for row in rows:
        phases, promised = row["phases"] or {}, row["prediction"] or {}
        share = promised.get("measured_share")
        table.add_row(
            row["method"],
            *(_number(phases.get(key), 2) for key in ("draft_ms", "target_ms", "host_ms")),
            _number(promised.get("speedup"), 2),
            _number(promised.get("measured_speedup"), 2),
            UNKNOWN if share is None else f"{share:.0%}",
        )
    return table


def print_rules(rows: Sequence[Row], console: Console) -> None:
    """A table for each domain: what the block rule adds to the token rule."""
    for domain in dict.fromkeys(row["domain"] for row in rows):
        console.print(f"\nblock over token rule, {domain}", style="bold")
        table = _table("method", "", "token rule", "block rule", "block over token")
        for row in (row for row in rows if row["domain"] == domain):
            over = row["block_over_token"]
            for name, label, key in (
                (row["method"], "tok/pass", "mean_acceptance_length"),
                ("", "tok/s", "tokens_per_second"),
            ):
                figures = (_estimate(found, 3) for found in (row["token"][key], row["block"][key], over[key]))
                table.add_row(name, label, *figures)
        console.print(table)
    if rows:
        _print_notes(RULE_NOTES, console)


def _estimate(found: Row | None, places: int) -> str:
    """With so many significant places."""
    if found is None:
        return UNKNOWN
    digits = max(0, places - 1 - floor(log10(found["value"])))
    return f"{found['value']:.{digits}f} ({found['low']:.{digits}f}-{found['high']:.{digits}f})"


def _print_theory(row: Row, console: Console) -> None:
    console.print(f"\ntheory, {row['domain']}", style="bold")
    told = (
        f"acceptance {row['acceptance']:.3f} ({row['acceptance_from']}), a draft step costs {row['cost_ratio']:.3f} of "
        f"a plain one of {row['plain_step_ms']:.1f} ms. The simple estimate 1/((1-p)+p/k) says "
        f"{row['textbook_estimate']:.2f} times; best draft length: {row['best_length']} by Leviathan's form, "
        f"{row['best_length_by_costs']} with measured costs, {row['best_length_by_positions']} with acceptance by "
        "position too"
    )
    console.print(textwrap.fill(told, WIDTH), soft_wrap=True)
    table = _table("length", "expected\ntokens", "Leviathan\nspeedup", "arithmetic\nfactor", "promised\nspeedup",
                   "measured\nspeedup", "share")  # fmt: skip
    for found in row["lengths"]:
        share = found["measured_share"]
        figures = (
            "expected_tokens",
            "walltime_improvement",
            "operations_factor",
            "predicted_speedup",
            "measured_speedup",
        )
        table.add_row(
            str(found["length"]),
            *(_number(found[key], 2) for key in figures),
            UNKNOWN if share is None else f"{share:.0%}",
        )
    console.print(table)


def textbook_lines() -> str:
    """The table of the simple estimate, a line for each speed of the draft."""
    head = "the simple estimate, p = " + ", ".join(f"{p:g}" for p in TABLE_ACCEPTANCES)
    lines = [
        f"  a draft {speed:g} times faster: " + ", ".join(f"{value:.2f}" for value in values)
        for speed, values in zip(TABLE_SPEEDS, textbook_table(), strict=True)
    ]
    return "\n".join(["", head, *lines])


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
