"""Answers that came before their turn: kept beside the output, so that a run that ends early loses none of them."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from decode.errors import UsageError

HEAD = b'{"request": "'  # of every line


class EarlyAnswers:
    """A file of answers by what was asked. Whoever uses it holds the output that it lies beside.

    Lines are not waited for until they are on the disk: a power cut may cost some, a killed process none.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a file that generate did not write."""
        self.path = path
        self._file: IO[bytes] | None = None
        self._kept = _read(path)

    def get(self, key: str) -> list[int] | None:
        return self._kept.get(key)

    def keep(self, key: str, ids: list[int]) -> None:
        if self._file is None:
            self._file = self.path.open("ab")
            _cut_torn_line(self._file, self.path)
        self._file.write(json.dumps({"request": key, "ids": ids}).encode() + b"\n")
        self._file.flush()
        self._kept[key] = ids

    def forget(self, keys: Sequence[str]) -> None:
        """Those of `keys` are in the output now. A file that keeps none any more is emptied."""
        for key in keys:
            self._kept.pop(key, None)
        if not self._kept and self._file is not None:
            self._file.truncate(0)

    def __enter__(self) -> "EarlyAnswers":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """With an exception the file stays for the next start; else all that it keeps is in the output."""
        if self._file is not None:
            self._file.close()
        if kind is None:
            self.path.unlink(missing_ok=True)


def early_path(output: Path) -> Path:
    return output.with_suffix(".early.jsonl")


def request_key(url: str, request: dict[str, Any]) -> str:
    """sha256 of all that was asked of the server: an answer to anything else is never taken for it."""
    return hashlib.sha256(json.dumps([url, request], sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, list[int]]:
    """What earlier runs kept; a last line that a kill cut short is not counted."""
    if not path.is_file():
        return {}
    kept: dict[str, list[int]] = {}
    *lines, torn = path.read_bytes().split(b"\n")
    try:
        if not torn.startswith(HEAD[: len(torn)]):
            raise ValueError(torn)
        for line in lines:
            entry = json.loads(line)
            kept[entry["request"]] = [int(token) for token in entry["ids"]]
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"output: {path} was not written by generate; move it or choose another output") from None
    return kept


def _cut_torn_line(file: IO[bytes], path: Path) -> None:
    """Drop what follows the last newline."""
    os.ftruncate(file.fileno(), path.read_bytes().rfind(b"\n") + 1)
