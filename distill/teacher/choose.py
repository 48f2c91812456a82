"""Makes the teachers that a run's settings ask for: one for training, one for validation."""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from decode.backends.prepacked import can_prepack, prepack
from decode.errors import UsageError, require
from decode.models import LoadedModel
from distill.config import FitConfig, TeacherConfig
from distill.data.examples import Example
from distill.teacher import Teacher
from distill.teacher.cached import check_top_k, fill_store, read_teacher
from distill.teacher.given import GivenCache, open_cache
from distill.teacher.key import CacheKey, cache_key, text_key
from distill.teacher.online import OnlineTeacher
from distill.teacher.scoring import TargetScorer
from distill.teacher.store import Store


def make_teachers(
    config: TeacherConfig,
    model: Any,
    key: CacheKey,
    train: Sequence[Example],
    validation: Sequence[Example],
    folder: Path,
    console: Console,
    vocab_ids: Tensor | None = None,
    given: GivenCache | None = None,
) -> tuple[Teacher, Teacher]:
    """(training, validation). An online teacher serves both; a cached one has both sets in one cache, that of `key`.

    `vocab_ids`: the ids of a draft with a reduced vocabulary; `given`: the cache of teacher.cache, opened.
    """
    if given is not None:
        return given.teacher(train), given.teacher(validation)
    runner = runner_of(model)
    if config.kind == "online":
        teacher = OnlineTeacher(runner, key.temperature)
        return teacher, teacher
    check_top_k(config.top_k, int(model.config.get_text_config().vocab_size))
    folder = Path(config.cache_dir).expanduser() if config.cache_dir else folder / "teacher_cache"
    store = Store(folder / key.short, key.as_dict())
    scorer = TargetScorer(runner, config.top_k, key.temperature, vocab_ids, config.sampled)
    contents = fill_store(scorer, store, [*train, *validation], config.batch_size, console).contents
    return read_teacher(train, contents, store), read_teacher(validation, contents, store)


def runner_of(model: Any) -> Any:
    """What scores with `model`'s weights: on a CPU with prepacked linear layers wherever that can be done.

    Not where it measures faster: a resumed run must see the same rounding. It scores 1.18 times as many tokens a second
    (embedded target, 2 threads).
    """
    return prepack(model) if can_prepack(model) else model


def key_of(config: FitConfig, target: LoadedModel, target_sha256: str, vocab_ids: Tensor | None) -> CacheKey:
    """The key of the cache that a run reads or makes."""
    text = text_key(target.tokenizer, config.data.max_length)
    dtype = str(target.model.dtype)
    return cache_key(config.teacher, target_sha256, dtype, config.loss.temperature, vocab_ids, text)


def find_given(config: TeacherConfig, key: CacheKey, examples: Sequence[Example], model: Any) -> GivenCache | None:
    """The cache of teacher.cache, opened; None where none is named. Raises UsageError as open_cache does."""
    return None if config.cache is None else open_cache(config.cache, key, examples, model)


def check_teacher(config: FitConfig) -> None:
    """Raise UsageError for settings of caches where there is none, and for a folder that can't hold one."""
    teacher = config.teacher
    if teacher.kind == "cached":
        _check_folder(teacher.cache_dir)
        if teacher.sampled is not None:
            _check_estimated(config)
        return
    for field in fields(teacher):
        value = getattr(teacher, field.name)
        if field.name != "kind" and value != field.default:
            raise UsageError(
                f"teacher.{field.name}: {value!r} has no effect with teacher.kind {teacher.kind}; leave it out, or set "
                "teacher.kind: cached"
            )


ESTIMATED = ("forward_kl", "data")
"""The losses that ids drawn from the target's law can tell of without bias, and the one that needs no law."""


def _check_estimated(config: FitConfig) -> None:
    for name in config.loss.mix(config.serve):
        legal = f"{' or '.join(ESTIMATED)} with teacher.sampled: drawn ids give no unbiased estimate of another"
        require(name in ESTIMATED, "loss.name", name, legal)
    legal = "sampled with teacher.sampled: drawn ids tell nothing of greedy drafts"
    require(config.serve == "sampled", "serve", config.serve, legal)
    legal = "null with teacher.sampled: what is chosen needs more than an estimate at each position"
    require(config.selection.reference is None, "selection.reference", config.selection.reference, legal)
    for name, section in (("on_policy", config.on_policy), ("replay", config.replay), ("reinforce", config.reinforce)):
        legal = "0 with teacher.sampled: texts that are made on the way are scored for their likeliest ids"
        require(not section.wanted, f"{name}.fraction", section.fraction, legal)


def _check_folder(cache_dir: str | None) -> None:
    folder = Path(cache_dir or ".").expanduser().absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if cache_dir and not nearest.is_dir():
        raise UsageError(f"teacher.cache_dir: {cache_dir!r} is a file or lies below one; expected a folder")
    if cache_dir and not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"teacher.cache_dir: {cache_dir!r} can't be written to; expected a folder of your own")


def describe_teacher(config: TeacherConfig, temperature: float) -> str:
    """One line for the report before training."""
    return f"teacher: {config.kind}, temperature {temperature:g}" + (_kept(config) if config.kind == "cached" else "")


def _kept(config: TeacherConfig) -> str:
    place = "" if config.cache is None else f", from {config.cache}"
    if config.sampled is not None:
        return f"{place}, {config.sampled} ids drawn: loss and expected acceptance are unbiased estimates"
    return f"{place}, top {config.top_k} log-probs and the tail: losses and acceptance are lower bounds"
