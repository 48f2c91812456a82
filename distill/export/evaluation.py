"""Finds what eval measured of the draft that is exported."""

import json
from pathlib import Path
from typing import Any

from decode.errors import UsageError
from distill.results.report import conditions

METRICS_FILE = "metrics.json"


def find_evaluation(draft: Path, folder: str | None) -> dict[str, Any] | None:
    """The row of `draft` in eval's report in `folder`, with the conditions of the measurement.

    Without a folder, the newest report that measured it, inside or beside its run; None where there is none. A report
    older than the draft is of another one. Raises UsageError when a named folder has no such row.
    """
    draft = draft.expanduser().resolve()
    if folder is not None:
        return _named(draft, Path(folder).expanduser())
    run = draft.parent.parent if draft.suffix == ".ckpt" else draft
    files = {*run.glob(f"*/{METRICS_FILE}"), *run.parent.glob(f"*/{METRICS_FILE}")}
    written = _written(draft)
    for file in sorted(files, key=_written, reverse=True):
        if _written(file) >= written and (found := _row_of(draft, file)) is not None:
            return found
    return None


def _named(draft: Path, folder: Path) -> dict[str, Any]:
    file = folder / METRICS_FILE
    if not file.is_file():
        raise UsageError(f"evaluation: {folder} holds no {METRICS_FILE}; expected a folder that draftsmith eval wrote")
    found = _row_of(draft, file)
    if found is None:
        raise UsageError(f"evaluation: {file} has no row of {draft}; name an evaluation that measured it")
    return found


def _written(path: Path) -> float:
    return (path / "config.json" if path.is_dir() else path).stat().st_mtime


def _row_of(draft: Path, file: Path) -> dict[str, Any] | None:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        row = next(row for row in report["drafts"] if _is_of(row["path"], draft))
        return {**row, "conditions": conditions(report["settings"], report["versions"])}
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


def _is_of(recorded: str, draft: Path) -> bool:
    """Whether a report's path is `draft`'s; a relative one counts from wherever eval was called."""
    path = Path(recorded).expanduser()
    if path.resolve() == draft:
        return True
    return not path.is_absolute() and len(path.parts) > 1 and draft.parts[-len(path.parts) :] == path.parts
