"""The pictures of a report: acceptance and speedup over training, acceptance by position."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.results.terms import BOUNDED, said_of

OVER_TRAINING, BY_POSITION = "acceptance_over_training.png", "acceptance_by_position.png"
MAX_CURVES = 8
ACCEPTANCES = {
    "expected_acceptance": "expected acceptance, Σ min(p, q)¹",
    "greedy_acceptance": "greedy acceptance, p(argmax q)¹",
    "draft_acceptance_rate": "accepted / drafted (decoding)",
}
SPEEDUPS = {
    "speedup_over_plain": "over plain decoding",
    "speedup_over_transformers": "over transformers' generate",
}


def write_pictures(drafts: Sequence[Mapping[str, Any]], output: Path) -> list[str]:
    """Draw what can be drawn; returns lines on what was left out and why."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["no pictures: matplotlib is not installed; pip install 'draftsmith[plots]' adds it"]
    steps = [row for row in drafts if row["step"] is not None]
    positions = [row for row in drafts if row["per_position_acceptance_rate"]]
    if steps:
        save_figure(_over_training(Figure(figsize=(10, 4.2), layout="constrained"), steps), output / OVER_TRAINING)
    if positions:
        save_figure(_by_position(Figure(figsize=(6.4, 4.2), layout="constrained"), positions), output / BY_POSITION)
    return []


def _over_training(figure: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    left, right = figure.subplots(1, 2)
    runs = sorted({row["run"] or "" for row in rows})
    for run in runs:
        of_run = sorted((r for r in rows if (r["run"] or "") == run), key=lambda r: r["step"])
        prefix = f"{run}: " if len(runs) > 1 else ""
        _curves(left, of_run, ACCEPTANCES, prefix)
        _bands(left, of_run)
        _curves(right, of_run, SPEEDUPS, prefix)
    left.set(title="Acceptance over training", xlabel="optimiser step", ylabel="acceptance", ylim=(0, 1))
    right.axhline(1, color="gray", linestyle=":", linewidth=1)
    right.set(title="Speedup over training", xlabel="optimiser step", ylabel="times as many tokens per second")
    right.set_ylim(bottom=0)
    terms = said_of(row.get("acceptance_temperature") for row in rows)
    _finish(left, title=textwrap.fill(f"¹ teacher-forced, {terms}", 50))
    _finish(right)
    return figure


def _curves(axes: Any, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], prefix: str) -> None:
    for key, label in names.items():
        points = [(row["step"], row[key]) for row in rows if row[key] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=prefix + label)


def _bands(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Shade what lies between the bounds that a cached teacher leaves."""
    for key in BOUNDED:
        found = [(r["step"], r[key], r[f"{key}_upper"]) for r in rows if None not in (r[key], r.get(f"{key}_upper"))]
        if any(upper > lower for _, lower, upper in found):
            axes.fill_between(*zip(*found, strict=True), alpha=0.15, label=f"{key.split('_')[0]}, to its upper bound")


def _by_position(figure: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    axes = figure.subplots()
    for row in _spread_out(rows, MAX_CURVES):
        rates = row["per_position_acceptance_rate"]
        axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=row["name"])
    axes.set(
        title="Acceptance by position",
        xlabel="position in the draft",
        ylabel="share of rounds that keep this position",
        ylim=(0, 1),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes, title="step")
    return figure


def _spread_out(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of `rows`, evenly, the first and the last among them."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _finish(axes: Any, title: str | None = None) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, title=title, title_fontsize=8)


def save_figure(figure: Any, path: Path) -> None:
    """Write `figure` as PNG; it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(path)
