"""Output folders: whose they are, models written whole or not at all, runs held for one process."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from decode.errors import UsageError, require
from distill.runs import COMMAND_FILE, is_other_rank, write_json_atomic

RECORD_FILE, LOCK_FILE = "draftsmith.json", ".lock"


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A new folder beside `output` to write in; it takes `output`'s place at the end, or vanishes with an exception.

    What stood at `output` is replaced: the caller has checked that it may be. Left-overs of killed runs are removed.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with _told_of(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(output)
        temporary.mkdir()
    try:
        yield temporary
        _finish_files(temporary)
        _take_place(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_leftovers(output: Path) -> None:
    """Remove what killed processes left beside `output`; a folder that stood aside when the kill came goes back."""
    leftover = re.compile(rf"\.{re.escape(output.name)}\.(old\.)?(\d+)\.tmp")
    for folder in list(output.parent.iterdir()):
        found = leftover.fullmatch(folder.name)
        if found is None or _is_running(int(found[2])):
            continue
        if found[1] and not output.exists():
            folder.replace(output)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _finish_files(folder: Path) -> None:
    """Wait until every file is on the disk, so that a folder that is seen is whole after a power cut too.

    Modes follow the umask: the library writes weights that only their owner may read, and a server is another user.
    """
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def _take_place(new: Path, output: Path) -> None:
    # A folder cannot be replaced by a rename while it holds files; the old one steps aside for that moment.
    aside = output.with_name(f".{output.name}.old.{os.getpid()}.tmp")
    if output.exists():
        output.replace(aside)
    try:
        new.replace(output)
    except OSError:
        if aside.exists():
            aside.replace(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def check_output(output: Path, made_by: str) -> dict[str, Any] | None:
    """The record of the folder that stands at `output`; None when there is none or it is empty.

    Raises UsageError for a file, and for a folder that `made_by` (a command) did not make: such are never replaced.
    """
    if output.exists() and not output.is_dir():
        raise UsageError(f"output: {output} is a file; expected a folder, or a path where there is nothing")
    if not output.exists() or _is_unused(output):
        return None
    record = read_record(output)
    if record.get("made_by") != made_by:
        told = f"output: {output} holds files that `{made_by}` did not make; remove it or choose another"
        raise UsageError(told + ("" if record else _if_lost(output, made_by)))
    return record


def _if_lost(output: Path, made_by: str) -> str:
    """How to own a folder that looks like a run but has no record: it was lost, or an older version wrote none."""
    if not (output / COMMAND_FILE).is_file():
        return ""
    record = json.dumps({"made_by": made_by})
    return f". If `{made_by}` did, as {COMMAND_FILE} there tells: write {record} to {output / RECORD_FILE}"


def read_record(folder: Path) -> dict[str, Any]:
    """How Draftsmith made `folder`; empty where it did not, or the record cannot be read."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_json_atomic(folder / RECORD_FILE, record)


def _is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing but what a run writes before it has begun."""
    return {file.name for file in folder.iterdir()} <= {LOCK_FILE, RECORD_FILE}


@contextmanager
def run_folder(path: str | Path, made_by: str) -> Iterator[Path]:
    """Make the folder and hold it for this process alone; the kernel releases it, however the process ends.

    Raises UsageError when the folder holds what `made_by` (a command) did not make, another process holds it (its pid
    is named), or it can't be made or written. An exception that comes before anything is written leaves no folder.
    Ranks other than 0 of a distributed run don't lock: their rank 0 does.
    """
    require(str(path).strip() != "", "output", str(path), "the path of a folder")
    folder = Path(path).expanduser()
    if is_other_rank():
        yield folder
        return
    with _told_of(folder):
        known = check_output(folder, made_by) is not None
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    with file:
        _take(file, folder)
        try:
            if not known:
                with _told_of(folder):
                    write_record(folder, {"made_by": made_by})
            yield folder
        except BaseException:
            _clear_unused(folder, is_new)
            raise


def _clear_unused(folder: Path, is_new: bool) -> None:
    """Take back what run_folder wrote, where nothing has joined it."""
    with suppress(OSError):
        if _is_unused(folder):
            (folder / RECORD_FILE).unlink(missing_ok=True)
            if is_new:
                (folder / LOCK_FILE).unlink(missing_ok=True)
                folder.rmdir()


@contextmanager
def _told_of(output: Path) -> Iterator[None]:
    """Turn what the system says of a folder that can't be made or read into a UsageError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"output: {output} is a file or lies below one; expected a folder") from None
    except OSError as error:
        raise UsageError(f"output: {output} can't be written to: {error.strerror or error}") from None


def _take(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        raise UsageError(f"output: {folder} is in use by another run (process {holder})") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
