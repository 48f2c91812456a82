"""Scores training positions by how far a reference draft is ahead of the one that starts; kept in the run's folder.

What a reference learnt and the draft has not is learnable; what neither predicts is not, and takes room from it
(Hu et al. 2025, AdaSPEC; per token, after Lin et al. 2024).
"""

import fcntl
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.config import ModelConfig
from decode.errors import UsageError
from decode.models import LoadedModel
from distill.config import FitConfig
from distill.data.batches import collate
from distill.data.examples import Example
from distill.data.kept import Kept
from distill.drafts.load import best_checkpoint, is_run_folder, load_draft
from distill.runs import plain
from distill.student import Student
from distill.teacher import Teacher
from distill.teacher.fingerprint import examples_sha256
from distill.weights import weights_sha256

FOLDER = "selection"
# Of a teacher's settings, those that leave its law as it is.
PLACES = ("cache", "cache_dir", "batch_size")
# Places of a scored batch at most: [N, V] of the target and of both drafts are held at once.
BATCH_PLACES = 2048


def load_reference(path: str, target: LoadedModel, draft: LoadedModel, config: ModelConfig) -> LoadedModel:
    """A reference draft: a model folder, a checkpoint, or a run's folder for its best one.

    Raises UsageError where it is no draft for the target, or proposes other ids than `draft` does.
    """
    try:
        reference = load_draft(best_checkpoint(path) if is_run_folder(path) else path, target, config)
    except UsageError as error:
        raise UsageError(f"selection.reference: {str(error).removeprefix('draft: ')}") from error
    ids = [None if loaded.vocab_ids is None else loaded.vocab_ids.tolist() for loaded in (draft, reference)]
    if ids[0] != ids[1]:
        counts = [loaded.vocab_size if i is None else len(i) for i, loaded in zip(ids, (draft, reference), strict=True)]
        raise UsageError(
            f"selection.reference: {path} proposes {counts[1]} ids and the draft {counts[0]}, or other ones; expected "
            "a draft made with the same draft_vocab_size and data: their losses do not compare otherwise"
        )
    return reference


def rests_on(draft_sha256: str, reference: LoadedModel) -> str:
    """sha256 of the weights of both drafts, from that of the starting one."""
    return hashlib.sha256((draft_sha256 + weights_sha256(reference.model)).encode()).hexdigest()


def choose_positions(
    config: FitConfig,
    examples: Sequence[Example],
    students: tuple[Student, Student],
    teacher: Teacher,
    key: str,
    num_steps: int,
    folder: Path,
    console: Console,
) -> Kept:
    """What is kept of `examples` at each step; scored by the (starting, reference) `students` where that is not done.

    `key` is what the drafts' weights and the target's are known by. One process scores, others wait for it.
    """
    settings = config.selection
    teacher_settings = {k: v for k, v in plain(config.teacher).items() if k not in PLACES}
    told = [key, examples_sha256(examples), plain(config.loss), config.serve, teacher_settings]
    whole_key = json.dumps(told, sort_keys=True)
    file = folder / FOLDER / "gaps.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gaps = _read(file, whole_key)
        if gaps is None:
            gaps = score(students, teacher, examples)
            _write(file, gaps, whole_key)
    kept = Kept(examples, gaps, settings.keep, settings.curriculum, num_steps)
    console.print(describe(kept, gaps, config))
    return kept


def score(students: tuple[Student, Student], teacher: Teacher, examples: Sequence[Example]) -> Tensor:
    """Loss of the first student less that of the second at every supervised position [N], in the order of examples.

    Examples are scored unpacked, in batches that depend on their lengths alone.
    """
    found: dict[int, Tensor] = {}
    modes = {module: module.training for student in students for module in student.modules()}
    for student in students:
        student.eval()
    for members in _batches(examples):
        gaps = _score_batch(students, teacher, members, examples)
        found |= zip(members, gaps.split([examples[i].num_supervised for i in members]), strict=True)
    for module, mode in modes.items():
        module.training = mode
    return torch.cat([found[i] for i in range(len(examples))])


def _batches(examples: Sequence[Example]) -> list[list[int]]:
    """Longest first, BATCH_PLACES places in a batch at most."""
    batches: list[list[int]] = []
    for index in sorted(range(len(examples)), key=lambda i: (-len(examples[i].input_ids), i)):
        width = len(examples[batches[-1][0]].input_ids) if batches else BATCH_PLACES
        if not batches or (len(batches[-1]) + 1) * width > BATCH_PLACES:
            batches.append([])
        batches[-1].append(index)
    return batches


@torch.no_grad()
def _score_batch(
    students: tuple[Student, Student], teacher: Teacher, members: list[int], examples: Sequence[Example]
) -> Tensor:
    device = next(students[0].parameters()).device
    batch: Any = move_data_to_device(collate([[i] for i in members], examples, normaliser=1.0), device)
    law = teacher.law(batch)
    start, reference = (student(batch, law).losses.double() for student in students)
    # where both are infinite there is nothing to learn from the reference
    return (start - reference).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).float().cpu()


def _read(file: Path, key: str) -> Tensor | None:
    """The gaps of an earlier start; None where there are none, or of something else, or they are damaged."""
    try:
        with safe_open(file, "pt") as found:
            metadata, gaps = found.metadata() or {}, found.get_tensor("gaps")
    except (OSError, SafetensorError):
        return None
    is_whole = metadata.get("key") == key and metadata.get("sha256") == _sha256(gaps)
    return gaps if is_whole else None


def _write(file: Path, gaps: Tensor, key: str) -> None:
    temporary = file.with_suffix(".tmp")
    save_file({"gaps": gaps}, temporary, metadata={"key": key, "sha256": _sha256(gaps)})
    temporary.replace(file)


def _sha256(gaps: Tensor) -> str:
    return hashlib.sha256(gaps.numpy().tobytes()).hexdigest()


def describe(kept: Kept, gaps: Tensor, config: FitConfig) -> str:
    """A line on what is kept, and how far the reference is ahead there and elsewhere."""
    count = kept.num_positions(0)
    ordered = gaps.sort(descending=True).values
    rest = f", {ordered[count:].mean():.3f} on the rest" if count < len(gaps) else ""
    rises = ", rising to all of them" if config.selection.curriculum else ""
    return (
        f"selection: {count} of {len(gaps)} supervised positions are trained on ({100 * kept.share(0):.1f} %{rises}); "
        f"{config.selection.reference} is ahead by {ordered[:count].mean():.3f} nats there{rest}"
    )
