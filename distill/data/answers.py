"""The file that generate appends to and those beside it: recovery after a kill, and the record of what made them."""

import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from decode.config import SamplingConfig
from decode.errors import UsageError
from distill.data.questions import Questions
from distill.data.rows import BadRow
from distill.runs import write_json_atomic, write_text_atomic

ERRORS_KEY = "errors_output"  # of the sidecar: the list of bad rows is ours to replace


class AnswerFile:
    """An output that can be appended to; held by one process at a time."""

    def __init__(self, file: IO[bytes], num_done: int, errors_output: str | None = None) -> None:
        self._file = file
        self.errors_output = errors_output
        """The list of bad rows beside it; None when there is none."""
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
    damaged before its last line; or when a file beside it would be replaced that generate did not write.
    """
    check_beside(output)
    planned = [question.index for question in found.questions]
    plan = {"prompts": found.fingerprint(len(planned)), "num_prompts": len(planned)}
    with _open(output) as file:
        _lock(file, output)
        owned = {ERRORS_KEY: (_own_meta(output) or {}).get(ERRORS_KEY)}
        if output.stat().st_size == 0:
            write_json_atomic(meta_path(output), {**made_by, **plan, **owned, **notes})
        before = _check_meta(output, made_by, found)
        _cut_torn_line(file)
        done = _count_rows(file, output, planned[:before])
        if before < len(planned):
            done = _reopen_last_batch(file, done, planned, before, made_by["batch_size"])
            write_json_atomic(meta_path(output), {**made_by, **plan, **owned, **notes})
        yield AnswerFile(file, done, _write_errors(output, found.bad_rows))


def meta_path(output: Path) -> Path:
    """The sidecar that records settings and the fingerprint of the prompts."""
    return output.with_name(output.name + ".meta.json")


def errors_path(output: Path) -> Path:
    """The list of bad rows beside an output."""
    return output.with_suffix(".errors.jsonl")


def check_prompts_are_apart(output: Path, prompts: str) -> None:
    """Raise UsageError where the file of prompts is one that an output at `output` would write."""
    source = Path(prompts).expanduser()
    for path in (output, errors_path(output), meta_path(output)):
        if source.is_file() and path.exists() and path.samefile(source):
            raise UsageError(
                f"output: {output} would write over its own prompts, {path}; choose another output or rename prompts"
            )


def check_beside(output: Path) -> None:
    """Raise UsageError where a file beside `output` would be replaced that generate did not write for it."""
    meta = _own_meta(output)
    if meta is None and meta_path(output).exists() and not (output.is_file() and output.stat().st_size > 0):
        raise _foreign(output, meta_path(output))
    if errors_path(output).exists() and not (meta or {}).get(ERRORS_KEY):
        raise _foreign(output, errors_path(output))


def _foreign(output: Path, path: Path) -> UsageError:
    return UsageError(f"output: {path} was not written for {output.name} by generate; move it or choose another output")


def _write_errors(output: Path, bad_rows: Sequence[BadRow]) -> str | None:
    """List bad rows beside the output; the whole list is written anew at each start, so resuming repeats none.

    The sidecar says that the list is ours before there is one, and until it is gone: a kill leaves none unowned.
    """
    path, meta = errors_path(output), _own_meta(output) or {}
    if not bad_rows:
        if meta.get(ERRORS_KEY):
            path.unlink(missing_ok=True)
            write_json_atomic(meta_path(output), {**meta, ERRORS_KEY: None})
        return None
    write_json_atomic(meta_path(output), {**meta, ERRORS_KEY: path.name})
    lines = (json.dumps({"file": row.file, "line": row.line, "reason": row.reason}) + "\n" for row in bad_rows)
    write_text_atomic(path, "".join(lines))
    return str(path)


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
        if _completed(meta.get(key)) != value:
            raise UsageError(
                f"output: {output} was made with {key} {meta.get(key)!r}, not {value!r}; "
                "choose another output or remove it"
            )
    before, now = meta["num_prompts"], len(found.questions)
    if before > now:
        raise UsageError(
            f"output: {output} was made with {before} prompts, and now there are {now} (see limit, max_prompt_tokens "
            "and the file); choose another output or remove it"
        )
    if meta.get("prompts") != found.fingerprint(before):
        raise UsageError(f"output: {output} was made with other prompts; choose another output or remove it")
    return before


def _read_meta(output: Path) -> dict[str, Any]:
    meta = _own_meta(output)
    if meta is None:
        raise UsageError(
            f"output: {output} exists and there is no {meta_path(output).name} that tells how it was made; "
            "choose another output"
        )
    return meta


def _own_meta(output: Path) -> dict[str, Any] | None:
    """What the sidecar records; None where there is none, or it is nothing that generate wrote."""
    try:
        meta = json.loads(meta_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) and isinstance(meta.get("num_prompts"), int) else None


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


def _completed(recorded: Any) -> Any:
    """A record of how tokens were drawn that an older version wrote, with the settings that were not there yet."""
    return {**asdict(SamplingConfig()), **recorded} if isinstance(recorded, dict) else recorded
