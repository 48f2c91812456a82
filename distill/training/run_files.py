"""The files that can be made anew from checkpoints: best.json, last.ckpt, the tables. Knows nothing of training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distill.drafts.load import BEST_FILE
from distill.runs import write_json_atomic
from distill.training.history import METRICS_FILE, DamagedTable, Number, Table, metrics_table, steps_table
from distill.training.resume import Standing, checkpoint_name

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


def finish_writing(folder: Path, standing: Standing) -> list[str]:
    """Do what a kill left undone after the last checkpoint was in its place; the names of the files made."""
    newest, table = standing.path, metrics_table(folder)
    made = [METRICS_FILE] if table.restore(standing.rows) else []
    if (folder / "checkpoints" / LAST_FILE).resolve() != newest.resolve():
        link_last(newest.parent, newest.name)
        made.append(LAST_FILE)
    if write_best(folder, table):
        made.append(BEST_FILE)
    return made


def cut_tables(folder: Path, standing: Standing | None, say: Callable[[str], None]) -> None:
    """Take the tables back to where the run stands; what is lost or damaged is made anew, and told."""
    metrics = metrics_table(folder)
    if standing is not None and metrics.restore(standing.rows):
        say(f"{metrics.path}: it was lost or damaged and is made anew from {standing.path.name}")
    for table in (metrics, steps_table(folder)):
        try:
            table.cut(-1 if standing is None else standing.step)
        except DamagedTable as error:
            say(f"{error}; it is started anew")
            table.path.unlink()
    write_best(folder, metrics)


def clear_leftovers(checkpoints: Path) -> None:
    """Remove what a kill left half written in the folder, where there is one."""
    for leftover in checkpoints.glob(".*.tmp"):
        leftover.unlink()
