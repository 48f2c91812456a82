"""A table of variants over seeds, from the reports of eval: means, spreads, and what lies beyond the spread."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

Cells = dict[str, dict[str, list[float]]]
"""Variant -> column -> the value of each seed."""


def read_cells(report: str, columns: Mapping[str, str]) -> Cells:
    """The figures of a report over checkpoints that lie in run folders named VARIANT-SEED."""
    rows = json.loads((Path(report) / "metrics.json").read_text(encoding="utf-8"))["drafts"]
    cells: Cells = defaultdict(lambda: defaultdict(list))
    for row in rows:
        run = Path(row["path"]).parent.parent.name
        variant = run.rpartition("-")[0] or run
        for name, key in columns.items():
            if row.get(key) is not None:
                cells[variant][name].append(float(row[key]))
    return {variant: dict(values) for variant, values in cells.items()}


def table_lines(cells: Cells, columns: Mapping[str, str], baseline: str) -> list[str]:
    """A Markdown table. A star marks what is better than the baseline in every seed of both, beyond their spread."""
    head = ["variant", "seeds", *columns]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for variant, values in cells.items():
        seeds = max(len(found) for found in values.values())
        shown = [_figure(values.get(name, []), cells.get(baseline, {}).get(name, [])) for name in columns]
        lines.append(f"| {' | '.join([variant, str(seeds), *shown])} |")
    return lines


def _figure(values: list[float], reference: list[float]) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
    better = len(values) > 1 and len(reference) > 1 and min(values) > max(reference)
    return f"{mean:.3f}{spread}{' *' if better else ''}"
