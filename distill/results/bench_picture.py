"""The picture of a comparison: tokens per second by method and domain, and speedup over draft length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.results.pictures import save_figure

PICTURE = "bench.png"
Row = Mapping[str, Any]


def write_picture(rows: Sequence[Row], theory: Sequence[Row], output: Path) -> list[str]:
    """Draw bench.png; returns lines on what was left out and why."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["no picture: matplotlib is not installed; pip install 'draftsmith[plots]' adds it"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(12, max(4.2, 0.34 * len(methods))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _speeds(left, rows, methods)
    _lengths(right, rows, theory)
    save_figure(figure, output / PICTURE)
    return []


def _speeds(axes: Any, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """A bar for each method and domain, the first method on top."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    height = 0.8 / len(domains)
    for number, domain in enumerate(domains):
        speeds = [row["tokens_per_second"] for row in rows if row["domain"] == domain]
        places = [i + height * (number - (len(domains) - 1) / 2) for i in range(len(methods))]
        axes.barh(places, speeds, height, label=domain)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.invert_yaxis()
    axes.set(title="Speed by method", xlabel="tokens per second")
    _finish(axes, several=len(domains) > 1)


def _lengths(axes: Any, rows: Sequence[Row], theory: Sequence[Row]) -> None:
    """Measured and promised speedup of fixed lengths, one colour a domain; cost_model is a line across."""
    for number, domain in enumerate(theory):
        colour = f"C{number}"
        measured = [(p["length"], p["measured_speedup"]) for p in domain["lengths"] if p["measured_speedup"]]
        promised = [(p["length"], p["predicted_speedup"]) for p in domain["lengths"]]
        if measured:
            axes.plot(*zip(*measured, strict=True), "o-", color=colour, label=f"{domain['domain']}: measured")
        axes.plot(*zip(*promised, strict=True), "--", color=colour, alpha=0.6, label=f"{domain['domain']}: promised")
        for row in rows:
            if (row["domain"], row["method"]) == (domain["domain"], "cost_model") and row["prediction"]:
                speed = row["prediction"]["measured_speedup"]
                axes.axhline(speed, color=colour, linestyle=":", label=f"{domain['domain']}: cost_model")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(title="Speedup over draft length", xlabel="tokens drafted a round", ylabel="over plain decoding")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes, several=bool(theory))


def _finish(axes: Any, several: bool) -> None:
    axes.grid(alpha=0.3)
    if several:
        axes.legend(fontsize=8)
