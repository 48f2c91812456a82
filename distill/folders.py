"""Model folders that are there whole or not at all, and the record in each of how it was made."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decode.errors import UsageError
from distill.runs import write_json_atomic

RECORD_FILE = "draftsmith.json"


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A new folder beside `output` to write in; it takes `output`'s place at the end, or vanishes with an exception.

    What stood at `output` is replaced: the caller has checked that it may be. Left-overs of killed runs are removed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
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
    if not output.exists() or not any(output.iterdir()):
        return None
    record = read_record(output)
    if record.get("made_by") != made_by:
        raise UsageError(f"output: {output} holds files that `{made_by}` did not make; remove it or choose another")
    return record


def read_record(folder: Path) -> dict[str, Any]:
    """How Draftsmith made `folder`; empty where it did not, or the record cannot be read."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_json_atomic(folder / RECORD_FILE, record)
