"""The file that generate appends to: recovery after a kill, and the record of what it was made by."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from decode.errors import UsageError
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
def answer_file(
    output: Path, made_by: dict[str, Any], planned: Sequence[int], notes: dict[str, Any]
) -> Iterator[AnswerFile]:
    """`output`, ready for the rows of the input indices `planned` that it lacks.

    `made_by` decides the rows and has to stay as it was; `notes` are kept beside it from the first start. A last line
    that a kill cut short is removed. Raises UsageError when the file cannot be written, is in use, was made by other
    settings or other prompts, was not made by generate, or is damaged before its last line.
    """
    with _open(output) as file:
        _lock(file, output)
        if output.stat().st_size == 0:
            write_json_atomic(meta_path(output), {**made_by, **notes})
        _check_meta(output, made_by)
        _cut_torn_line(file)
        yield AnswerFile(file, _count_rows(file, output, planned))


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


def _check_meta(output: Path, made_by: dict[str, Any]) -> None:
    try:
        found = json.loads(meta_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"output: {output} exists and there is no {meta_path(output).name} that tells how it was made; "
            "choose another output"
        ) from error
    for key, value in made_by.items():
        if found.get(key) != value:
            raise UsageError(
                f"output: {output} was made with {key} {found.get(key)!r}, not {value!r}; "
                "choose another output or remove it"
            )


def _cut_torn_line(file: IO[bytes]) -> None:
    """Drop what follows the last newline."""
    file.seek(0)
    kept = sum(len(line) for line in file if line.endswith(b"\n"))
    file.truncate(kept)


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
