"""A teacher cache on disk: shards written whole or not at all, listed with checksums that show damage."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.runs import write_json_atomic

INDEX, LOCK = "index.json", ".shards.lock"

Table = dict[str, Tensor]
"""Examples and their laws.

token_ids [T] and mask [T]: the ids of E examples one after another, and which are supervised; lengths [E]. For each of
their N supervised positions, in that order: ids [N, K], log_probs [N, K], and log_tail [N] of the likeliest ids or
log_mass [N] of drawn ones.
"""


@dataclass(frozen=True)
class Size:
    """What a store holds."""

    shards: int
    examples: int
    positions: int
    num_bytes: int

    def __str__(self) -> str:
        each = self.num_bytes / max(self.positions, 1)
        return f"{self.positions} tokens of {self.examples} examples, {each:.0f} bytes each, in {self.shards} shards"


class Store:
    """Shards by name, in one folder. Only a shard that the index lists, with the checksum it lists, counts."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.folder, self.key = folder, key
        self.checksums = self._read_index()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from filling this cache; wait for one that does, then see what it made.

        The kernel lets go when a process ends, however it ends.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for leftover in self.folder.glob("*.tmp"):  # of a process that was killed while writing
                leftover.unlink()
            self.checksums = self._read_index()
            yield

    def _read_index(self) -> dict[str, str]:
        index = read_index(self.folder)
        return dict(index["shards"]) if index is not None and index["key"] == self.key else {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def damaged(self) -> list[str]:
        """The listed shards whose file is gone or has changed."""
        return [name for name, checksum in self.checksums.items() if sha256_of(self.path(name)) != checksum]

    def free_name(self) -> str:
        """The first name that no listed shard has."""
        numbers = range(len(self.checksums) + 1)
        return next(name for name in (f"shard-{number:05d}" for number in numbers) if name not in self.checksums)

    def write(self, name: str, table: Table) -> None:
        """Write one shard, then list it: a kill in between leaves it unlisted, and it is made again."""
        temporary = self.path(name).with_suffix(".tmp")
        save_file(table, temporary)
        self.checksums[name] = sha256_of(temporary)
        temporary.replace(self.path(name))
        write_json_atomic(self.folder / INDEX, {"key": self.key, "shards": dict(sorted(self.checksums.items()))})

    def read(self, name: str) -> Table:
        """The tensors of a whole shard, mapped from the file: memory holds only what is looked at."""
        return load_file(self.path(name))

    def size(self) -> Size:
        tables = [self.read(name) for name in self.checksums]
        return Size(
            len(tables),
            sum(len(table["lengths"]) for table in tables),
            sum(len(table["ids"]) for table in tables),
            sum(self.path(name).stat().st_size for name in self.checksums),
        )


def read_index(folder: Path) -> dict[str, Any] | None:
    """The key of the cache in `folder` and the checksums of its shards; None where there is none that can be read."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(index, dict) and isinstance(index.get("key"), dict) and isinstance(index.get("shards"), dict)
    return index if whole else None


def sha256_of(path: Path) -> str:
    """Checksum of a file; the empty string where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
