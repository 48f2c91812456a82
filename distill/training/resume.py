"""Finds where a run stands and refuses to continue it with other settings. Knows nothing of models or training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from decode.errors import UsageError
from distill.config import FitConfig
from distill.drafts.checkpoint import check_parts, read_checkpoint
from distill.drafts.load import STEP_NAME
from distill.runs import plain
from distill.training.history import Number

# A run may continue with another value of these: where things lie, what runs them, what is shown. They leave the data
# order, the loss and the schedule as they are; on other hardware sums may round differently, and what a dropout draws
# depends on how many processes share a step.
FREE_KEYS = frozenset(
    {
        "output",
        "teacher.cache",
        "teacher.cache_dir",
        "teacher.batch_size",
        "model.device",
        "model.backend",
        "model.trust_remote_code",
        "gradient_checkpointing",
        "compile",
        "dry_run",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy",
        "trainer.max_time",
        "trainer.logger",
        "trainer.log_every_n_steps",
        "trainer.enable_progress_bar",
        "trainer.enable_model_summary",
        "trainer.profiler",
    }
)


@dataclass(frozen=True)
class Record:
    """What a checkpoint tells of its run, in primitives; None where an older version wrote it and did not tell."""

    config: dict[str, Any]
    num_steps: int
    data_sha256: str
    target_sha256: str | None = None
    draft_vocab_sha256: str | None = None
    judge_prompts_sha256: str | None = None
    texts_sha256: str | None = None
    draft_sha256: str | None = None
    selection_sha256: str | None = None
    teacher_cache_sha256: str | None = None


# Fields of Record that tell inputs which settings only name: the keys at fault, and what has changed.
INPUTS = {
    "data_sha256": "data.train, data.validation: their rows have changed",
    "target_sha256": "target: its weights have changed",
    "draft_vocab_sha256": "draft: its draft_vocab.json has changed",
    "judge_prompts_sha256": "judge.prompts: the prompts have changed",
    "texts_sha256": "on_policy.prompts, replay.prompts, reinforce.prompts, replay.log: what they hold has changed",
    "draft_sha256": "draft: its weights, which the adapter belongs to, have changed",
    "selection_sha256": "draft, selection.reference: their weights have changed",
    "teacher_cache_sha256": "teacher.cache: the laws that it holds have changed",
}


CONTENT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "config": (lambda v: isinstance(v, Mapping), "the run's settings"),
    "num_steps": (lambda v: isinstance(v, int), "a number"),
    "data_sha256": (lambda v: isinstance(v, str), "a checksum"),
    "rows": (lambda v: isinstance(v, list) and bool(v) and all(map(_is_row, v)), "the rows of metrics.csv"),
    "global_step": (lambda v: isinstance(v, int), "a number"),
    "epoch": (lambda v: isinstance(v, int), "a number"),
    "loops": (lambda v: isinstance(v, Mapping) and "fit_loop" in v, "where training stands"),
    "optimizer_states": (lambda v: isinstance(v, list) and bool(v), "the optimiser's state"),
}
"""What a run continues from, beside the draft."""


def _is_row(value: Any) -> bool:
    numbers = isinstance(value, Mapping) and all(v is None or isinstance(v, int | float) for v in value.values())
    return numbers and isinstance(value.get("step"), int)


@dataclass(frozen=True)
class Standing:
    """A checkpoint that a run can continue from."""

    path: Path
    step: int
    record: Record
    rows: list[dict[str, Number]]
    """metrics.csv up to this checkpoint."""

    @property
    def num_steps(self) -> int:
        return self.record.num_steps

    @property
    def complete(self) -> bool:
        return self.step >= self.num_steps


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}.ckpt"


def last_step(checkpoints: Path) -> int:
    """Step of the newest checkpoint by its name, 0 where there is none."""
    return max(_steps(checkpoints), default=0)


def _steps(checkpoints: Path) -> dict[int, Path]:
    return {int(m[1]): file for file in checkpoints.glob("step-*.ckpt") if (m := STEP_NAME.fullmatch(file.name))}


def find_standing(checkpoints: Path, say: Callable[[str], None]) -> Standing | None:
    """The newest whole checkpoint; damaged ones are named and passed over. None where there is none."""
    steps = _steps(checkpoints)
    for step in sorted(steps, reverse=True):
        try:
            return _standing(steps[step], step)
        except UsageError as error:
            say(f"{steps[step].name} is passed over: {error}")
    return None


def _standing(path: Path, step: int) -> Standing:
    content = read_checkpoint(path)
    check_parts(content, CONTENT, path)
    if content.get("step") != step:
        raise UsageError(f"draft: {path}: it is of step {content.get('step')}, not of the step in its name")
    record: dict[str, Any] = {field.name: content.get(field.name) for field in fields(Record)}
    return Standing(path, step, Record(**record), content["rows"])


def refuse_changes(standing: Standing, config: FitConfig, say: Callable[[str], None]) -> None:
    """Raise UsageError naming every setting that differs from the run's own, with both values.

    Settings of FREE_KEYS are honoured, and told.
    """
    before, now = _flat(standing.record.config), _flat(plain(config))
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    refused = sorted(key for key in changed if not _is_free(key))
    if refused:
        told = "; ".join(f"{key}: {before.get(key)!r} before, {now.get(key)!r} now" for key in refused)
        raise UsageError(
            f"{told}; the run in {config.output} continues with the settings it began with. "
            f"Restore them, or choose another output (draft: {standing.path} starts from its weights)"
        )
    for key in sorted(changed - {"output"}):
        say(f"{key}: continues with {now.get(key)!r}, was {before.get(key)!r}")


def _is_free(key: str) -> bool:
    """Whether `key` is of FREE_KEYS or part of one: max_time may be given in units of time."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)


def refuse_other_inputs(standing: Standing, record: Record) -> None:
    """Raise UsageError where files hold something else than they did when the run began, under the same names."""
    for name, changed in INPUTS.items():
        before = getattr(standing.record, name)
        if before is not None and before != getattr(record, name):
            raise UsageError(
                f"{changed} since the run's checkpoint {standing.path.name} was written; restore them, or choose "
                "another output"
            )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
