"""Reads rows from files, folders and the hub, each with its place. Knows nothing of what the columns mean."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.errors import UsageError, first_line

BLANK = b" \t\r\n\f\v"


@dataclass(frozen=True)
class Row:
    """One input row as it was read."""

    fields: dict[str, Any]
    file: str
    line: int
    """Physical line of a jsonl file, else the row's number; both count from 1."""
    index: int
    """Position among all rows, bad ones included, from 0."""

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why. It never holds the row's content."""

    file: str
    line: int
    index: int
    reason: str

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


def read_rows(name: str, first: int = 0, streaming: bool = False) -> Iterator[Row | BadRow]:
    """Rows of a jsonl, json or parquet file, a save_to_disk folder or a hub id; the last two may end in `#split`.

    The rows before number `first` are skipped without a look at what they hold. `streaming` reads a hub id row by row
    instead of fetching all of it. Raises UsageError when there is no such file or folder, it is of another kind, or
    it holds no row at all.
    """
    check_source(name, streaming)
    path = Path(name).expanduser()
    found = READERS[path.suffix.lower()](path, first) if path.is_file() else _read_dataset(name, first, streaming)
    yield from found if first else _not_empty(name, found)


def source_sha256(name: str) -> str:
    """Tells whether what `name` stands for has changed: a checksum of a file's bytes, a data set's own fingerprint."""
    path = Path(name).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    data = _open_dataset(name, streaming=True)
    told = getattr(data, "_fingerprint", None) or str(data.info)
    return hashlib.sha256(str(told).encode()).hexdigest()


def check_source(name: str, streaming: bool = False) -> None:
    """Raise UsageError where `name` is certainly nothing that read_rows can open; a hub id is not asked for."""
    path = Path(name).expanduser()
    if streaming and path.is_file() and path.suffix.lower() == ".json":
        raise UsageError(f"{name}: a .json file is read as a whole, not streamed; write it as .jsonl or .parquet")
    if path.is_file() and path.suffix.lower() not in READERS:
        raise UsageError(f"{name}: unknown kind of file; expected one that ends in {', '.join(READERS)}")
    if not path.exists() and not Path(name.partition("#")[0]).expanduser().exists():
        _check_hub_id(name.partition("#")[0])


def _not_empty(name: str, rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UsageError(f"{name}: it is empty, there is no row in it")


def _read_jsonl(path: Path, first: int) -> Iterator[Row | BadRow]:
    """Lines end at \\n only: U+2028 and its kin are legal inside JSON strings and must not cut a row in two."""
    index = 0
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            content = content.removeprefix(b"\xef\xbb\xbf") if line == 1 else content
            if content.strip(BLANK):
                if index >= first:
                    yield _parse(content, str(path), line, index)
                index += 1


def _parse(content: bytes, file: str, line: int, index: int) -> Row | BadRow:
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(file, line, index, f"not UTF-8 (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return BadRow(file, line, index, f"not valid JSON: {error.msg} (column {error.colno})")
    except (RecursionError, ValueError):
        return BadRow(file, line, index, "not valid JSON: nested too deeply, or a number with too many digits")
    return _row(value, file, line, index)


def _row(value: Any, file: str, line: int, index: int) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(value, file, line, index)
    return BadRow(file, line, index, f"expected an object with named fields, found {KINDS[type(value)]}")


KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


def _read_json(path: Path, first: int) -> Iterator[Row | BadRow]:
    """A list of objects, or a single one. Files named .json that hold one object a line are read as jsonl."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (RecursionError, ValueError):
        yield from _read_jsonl(path, first)
        return
    items = value if isinstance(value, list) else [value]
    yield from (_row(items[number], str(path), number + 1, number) for number in range(first, len(items)))


def _read_parquet(path: Path, first: int) -> Iterator[Row | BadRow]:
    import pyarrow
    import pyarrow.parquet

    start = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                skipped = min(max(first - start, 0), batch.num_rows)
                for index, fields in enumerate(batch.slice(skipped).to_pylist(), start + skipped):
                    yield Row(fields, str(path), index + 1, index)
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: not a readable parquet file: {first_line(error)[:200]}") from error


READERS: dict[str, Callable[[Path, int], Iterator[Row | BadRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_dataset(name: str, first: int, streaming: bool) -> Iterator[Row | BadRow]:
    data = _open_dataset(name, streaming)
    if first:
        at_end = hasattr(data, "__len__") and first >= len(data)  # a data set skips to each of its rows, no further
        data = [] if at_end else data.skip(first)
    for index, fields in enumerate(data, first):
        yield Row(fields, name, index + 1, index)


def _open_dataset(name: str, streaming: bool) -> Any:
    base, _, split = name.partition("#")
    folder = Path(base).expanduser()
    if folder.is_file():
        raise UsageError(f"{name}: a file has no splits; leave out #{split}")
    data = _load_folder(folder) if folder.is_dir() else _load_hub(base, streaming)
    return _choose_split(data, base, split)


def _load_folder(folder: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many kinds for one fault
        raise UsageError(f"{folder}: not a folder made by save_to_disk: {first_line(error)[:200]}") from error


def _check_hub_id(name: str) -> None:
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or Path(name).suffix in READERS:
        raise UsageError(f"{name}: no such file or folder")


def _load_hub(name: str, streaming: bool) -> Any:
    _check_hub_id(name)
    import datasets

    try:
        return datasets.load_dataset(name, streaming=streaming)
    except Exception as error:  # offline, missing, gated: told in the library's words
        reason = first_line(error)[:200]
        raise UsageError(f"{name}: no such file or folder, nor a data set that the hub gives: {reason}") from error


def _choose_split(data: Any, name: str, split: str) -> Any:
    if not isinstance(data, dict):
        if split:
            raise UsageError(f"{name}#{split}: this data set has no splits; leave out #{split}")
        return data
    wanted = split or ("train" if "train" in data else _only(list(data)))
    if wanted not in data:
        legal = ", ".join(f"{name}#{key}" for key in data)
        raise UsageError(f"{name}: the split {wanted!r} is not one of its splits; expected one of {legal}")
    return data[wanted]


def _only(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "train"
