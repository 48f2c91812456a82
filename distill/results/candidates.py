"""What the names of drafts stand for: runs with all their checkpoints, single checkpoints, model folders."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.models import resolve_model_path
from distill.drafts.load import checkpoints_of, is_run_folder, read_checkpoint, recorded_metrics, step_of
from distill.folders import read_record
from distill.training.history import metrics_table


@dataclass(frozen=True)
class Candidate:
    """A draft to measure, and what its run recorded of it."""

    name: str  # the step of a checkpoint, the name of a folder
    path: Path
    step: int | None = None
    run: str | None = None
    recorded: dict[str, Any] = field(default_factory=dict)


def find_candidates(drafts: Sequence[str]) -> list[Candidate]:
    """What the names stand for, each once, with names that tell them apart.

    Raises UsageError for one that is no run folder, checkpoint, model folder or hub id.
    """
    found: dict[Path, Candidate] = {}
    runs = [d for d in drafts if is_run_folder(Path(d).expanduser())]
    for draft in drafts:
        path = Path(draft).expanduser()
        listed = _of_run(path, len(runs) > 1) if draft in runs else [_single(draft)]
        for candidate in listed:
            found.setdefault(candidate.path, candidate)
    names = [c.name for c in found.values()]
    return [c if names.count(c.name) == 1 else _renamed(c) for c in found.values()]


def _of_run(run: Path, several: bool) -> list[Candidate]:
    rows = {row["step"]: row for row in metrics_table(run).rows()}
    prefix = f"{run.name}: " if several else ""
    listed = []
    for step, path in checkpoints_of(run):
        name = f"{prefix}{step or 'untrained'}"
        listed.append(Candidate(name, path, step, run.name, dict(rows.get(step) or _metrics(path))))
    return listed


def _single(draft: str) -> Candidate:
    path = Path(draft).expanduser()
    if path.suffix == ".ckpt":
        return Candidate(f"{step_of(path)}" if step_of(path) else path.stem, path, step_of(path), None, _metrics(path))
    resolve_model_path(draft)
    return Candidate(path.name, path, read_record(path).get("step"), None, _metrics(path))


def _metrics(path: Path) -> dict[str, Any]:
    """What was recorded with a checkpoint or an exported folder."""
    return recorded_metrics(read_checkpoint(path) if path.suffix == ".ckpt" else read_record(path))


def _renamed(candidate: Candidate) -> Candidate:
    return Candidate(str(candidate.path), candidate.path, candidate.step, candidate.run, candidate.recorded)
