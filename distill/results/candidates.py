"""What the names of drafts stand for: runs with all their checkpoints, single checkpoints, model folders."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decode.errors import UsageError
from decode.models import resolve_model_path
from distill.drafts.checkpoint import loss_temperature, read_checkpoint, recorded_metrics
from distill.drafts.load import checkpoints_of, is_run_folder, step_of
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
    temperature: float | None = None  # of the loss, at which recorded acceptance was taken


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
    found = checkpoints_of(run)
    temperature = loss_temperature(read_checkpoint(found[-1][1]))  # one run has one loss
    for step, path in found:
        name = f"{prefix}{step or 'untrained'}"
        recorded = dict(rows.get(step) or recorded_metrics(_content(path)))
        listed.append(Candidate(name, path, step, run.name, recorded, temperature))
    return listed


def left_out(drafts: Sequence[str]) -> list[str]:
    """A line on each run whose untrained draft is no longer where its config says, and so has no row."""
    runs = [Path(draft).expanduser() for draft in drafts if is_run_folder(Path(draft).expanduser())]
    return [
        f"{run}: its untrained draft has no row; the folder that {run / 'config.yaml'} names as draft is not there"
        for run in runs
        if checkpoints_of(run)[0][0] != 0
    ]


def _single(draft: str) -> Candidate:
    path = Path(draft).expanduser()
    if path.suffix == ".ckpt":
        step, name = step_of(path), f"{step_of(path)}" if step_of(path) else path.stem
    else:
        resolve_model_path(draft)
        step, name = sound_record(path).get("step"), path.name
    content = _content(path)
    return Candidate(name, path, step, None, recorded_metrics(content), loss_temperature(content))


def check_apart(output: Path, role: str, model: str, replaced: bool = False) -> None:
    """Raises UsageError where `output` is or lies in the folder that holds a model's weights.

    One that is `replaced` as a whole may not hold the model either. A run may hold its own reports and exports.
    """
    place, there = _place_of_weights(Path(model).expanduser()), output.expanduser().resolve()
    if place is None:
        return
    if there.is_relative_to(place):
        raise UsageError(f"output: {output} lies in the {role}'s own folder {place}; choose a place outside it")
    if replaced and place.is_relative_to(there):
        raise UsageError(f"output: {output} is replaced as a whole and holds the {role} {model}; choose another")


def _place_of_weights(path: Path) -> Path | None:
    """The folder that is a model's own; a checkpoint that was moved out of its run has none. None for a hub's id."""
    if path.suffix == ".ckpt":
        place = path.parent if path.parent.name == "checkpoints" else path
    else:
        place = path / "checkpoints" if is_run_folder(path) else path
    is_there = is_run_folder(path) or path.is_file() or (path / "config.json").is_file()
    return place.resolve() if is_there else None


def _content(path: Path) -> dict[str, Any]:
    """What holds the records of a checkpoint or an exported folder."""
    return read_checkpoint(path) if path.suffix == ".ckpt" else sound_record(path)


def sound_record(folder: Path) -> dict[str, Any]:
    """A model folder's record, less what is of a wrong shape: its figures are a courtesy, and no reason to stop."""
    kinds: dict[str, Any] = {"step": int, "num_assistant_tokens": int, "metrics": dict, "loss_temperature": int | float}
    return {k: v for k, v in read_record(folder).items() if k not in kinds or isinstance(v, kinds[k])}


def _renamed(candidate: Candidate) -> Candidate:
    return replace(candidate, name=str(candidate.path))
