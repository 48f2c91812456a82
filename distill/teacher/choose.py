"""Makes the teachers that a run's settings ask for: one for training, one for validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.prepacked import can_prepack, prepack
from distill.config import TeacherConfig
from distill.data.examples import Example
from distill.teacher import Teacher
from distill.teacher.cached import fill_cache
from distill.teacher.online import OnlineTeacher


def make_teachers(
    config: TeacherConfig,
    model: Any,
    temperature: float,
    train: Sequence[Example],
    validation: Sequence[Example],
    folder: Path,
    console: Console,
) -> tuple[Teacher, Teacher]:
    """(training, validation). An online teacher serves both; a cached one scores both sets, each under its own key.

    On a CPU the target runs with prepacked linear layers wherever it can, not where that measures faster: a resumed run
    must see the same rounding. It scores 1.18 times as many tokens a second (embedded target, 2 threads).
    """
    runner = prepack(model) if can_prepack(model) else model
    if config.kind == "online":
        teacher = OnlineTeacher(runner, temperature)
        return teacher, teacher
    folder = Path(config.cache_dir).expanduser() if config.cache_dir else folder / "teacher_cache"
    made = [
        fill_cache(
            model,
            examples,
            folder,
            runner=runner,
            top_k=config.top_k,
            temperature=temperature,
            batch_size=config.batch_size,
            console=console,
        )
        for examples in (train, validation)
    ]
    return made[0], made[1]


def describe_teacher(config: TeacherConfig, temperature: float) -> str:
    """One line for the report before training."""
    kept = f", top {config.top_k} log-probs and the tail: losses and acceptance are lower bounds"
    return f"teacher: {config.kind}, temperature {temperature:g}" + (kept if config.kind == "cached" else "")
