"""The file that generate appends to: recovery after a kill, and the record of what it was made by."""

import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from decode.errors import UsageError
from distill.data.questions import Questions
from distill.runs import write_json_atomic


class AnswerFile:
    """An output that can be appended to; held by one process at a time."""

    def __init__(self, file: IO[bytes], num_done: int) -> None:
        self._file = file
        self.num_done = num_done
        """How many of the planned rows, from the first, earlier runs wrote."""

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows in one write and wait until they are on the disk.

        Non-ASCII characters are escaped, so readers that split lines at U+2028 and its kin see whole rows too.
        """
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        self._file.write(lines.encode("ascii"))
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def answer_file(output: Path, made_by: dict[str, Any], found: Questions, notes: dict[str, Any]) -> Iterator[AnswerFile]:
    """`output`, ready for the answers to `found` that it lacks.

    `made_by` decides the rows and has to stay as it was, its batch_size among it; so do the prompts, but more of them
    may follow. `notes` are kept beside both. A last line that a kill cut short is removed. Raises UsageError when the
    file cannot be written, is in use, was made by other settings or other prompts, was not made by generate, or is
    damaged before its last line.
    """
    planned = [question.index for question in found.questions]
    plan = {"prompts": found.fingerprint(len(planned)), "num_prompts": len(planned)}
    with _open(output) as file:
        _lock(file, output)
        if output.stat().st_size == 0:
            write_json_atomic(meta_path(output), {**made_by, **plan, **notes})
        before = _check_meta(output, made_by, found)
        _cut_torn_line(file)
        done = _count_rows(file, output, planned[:before])
        if before < len(planned):
            done = _reopen_last_batch(file, done, planned, before, made_by["batch_size"])
            write_json_atomic(meta_path(output), {**made_by, **plan, **notes})
        yield AnswerFile(file, done)


def meta_path(output: Path) -> Path:
    """The sidecar that records settings and the fingerprint of the prompts."""
    return output.with_name(output.name + ".meta.json")


def _open(output: Path) -> IO[bytes]:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.open("a+b")
    except OSError as error:
        raise UsageError(f"output: {output} cannot be written: {error.strerror}") from error


def _lock(file: IO[bytes], output: Path) -> None:
    """Take the file for this process; the kernel lets go of it, however the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"output: {output} is being written by another process") from None


def _check_meta(output: Path, made_by: dict[str, Any], found: Questions) -> int:
    """How many prompts the output was planned for; raises UsageError unless `found` begins with these very prompts."""
    meta = _read_meta(output)
    for key, value in made_by.items():
        if meta.get(key) != value:
            raise UsageError(
                f"output: {output} was made with {key} {meta.get(key)!r}, not {value!r}; "
                "choose another output or remove it"
            )
    before, now = int(meta.get("num_prompts") or 0), len(found.questions)
    if before > now:
        raise UsageError(
            f"output: {output} was made with {before} prompts, and now there are {now} (see limit, max_prompt_tokens "
            "and the file); choose another output or remove it"
        )
    if meta.get("prompts") != found.fingerprint(before):
        raise UsageError(f"output: {output} was made with other prompts; choose another output or remove it")
    return before


def _read_meta(output: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(meta_path(output).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"output: {output} exists and there is no {meta_path(output).name} that tells how it was made; "
            "choose another output"
        ) from error


def _cut_torn_line(file: IO[bytes]) -> None:
    """Drop what follows the last newline."""
    file.seek(0)
    kept = sum(len(line) for line in file if line.endswith(b"\n"))
    file.truncate(kept)


def _reopen_last_batch(file: IO[bytes], done: int, planned: Sequence[int], before: int, batch_size: int) -> int:
    """Drop the rows of a batch that the `before` first prompts did not fill; returns how many rows are left.

    What a batch draws depends on all its rows, so it is answered anew, as a run that knew of all would have done.
    """
    batch = planned[before] // batch_size
    kept = min(done, sum(index // batch_size < batch for index in planned[:before]))
    file.seek(0)
    file.truncate(sum(len(line) for line in itertools.islice(file, kept)))
    os.fsync(file.fileno())
    return kept


def _count_rows(file: IO[bytes], output: Path, planned: Sequence[int]) -> int:
    file.seek(0)
    count = 0
    for number, line in enumerate(file, start=1):
        if number > len(planned) or _row_index(line) != planned[number - 1]:
            raise UsageError(f"output: {output}:{number} is damaged or misplaced; remove the file and run again")
        count = number
    return count


def _row_index(line: bytes) -> object:
    try:
        return json.loads(line)["row"]
    except (ValueError, TypeError, KeyError):
        return None
