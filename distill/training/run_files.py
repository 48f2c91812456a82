"""The files that stand for checkpoints of a run: best.json and last.ckpt. Knows nothing of training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.drafts.load import BEST_FILE
from distill.runs import write_json_atomic
from distill.training.history import Number, Table
from distill.training.resume import checkpoint_name

LAST_FILE = "last.ckpt"


def best_row(rows: Sequence[dict[str, Number]]) -> dict[str, Number] | None:
    """The fastest checkpoint's row; of equals the later. The untrained draft is a baseline, no candidate."""
    judged = [row for row in rows if row["step"] and row["val/speedup"] is not None]
    return max(judged, key=lambda row: (row["val/speedup"], row["step"]), default=None)


def write_best(folder: Path, table: Table) -> bool:
    """Bring best.json in line with metrics.csv: none where there is no judged checkpoint. Whether it was written."""
    best, file = best_row(table.rows()), folder / BEST_FILE
    if best is None:
        file.unlink(missing_ok=True)
        return False
    name = checkpoint_name(int(best["step"] or 0))
    content = {"checkpoint": name, "step": best["step"], "speedup": best["val/speedup"]}
    if file.is_file() and _read_json(file) == content:
        return False
    write_json_atomic(file, content)
    return True


def _read_json(file: Path) -> Any:
    """What a JSON file holds; None where it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None


def link_last(checkpoints: Path, name: str) -> None:
    """Make last.ckpt stand for checkpoint `name`."""
    link = checkpoints / f".{LAST_FILE}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(checkpoints / LAST_FILE)


def finish_writing(folder: Path, table: Table, newest: Path) -> list[str]:
    """Do what a kill left undone after checkpoint `newest` was in its place; the names of the files made."""
    made = []
    if (folder / "checkpoints" / LAST_FILE).resolve() != newest.resolve():
        link_last(newest.parent, newest.name)
        made.append(LAST_FILE)
    if table.rows() and write_best(folder, table):
        made.append(BEST_FILE)
    return made


def clear_leftovers(checkpoints: Path) -> None:
    """Make the folder, and remove what a kill left half written in it."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for leftover in checkpoints.glob(".*.tmp"):
        leftover.unlink()
