"""A teacher cache on disk: shards written whole or not at all, listed with checksums that show damage."""

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.runs import write_json_atomic

INDEX = "index.json"


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
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for leftover in self.folder.glob("*.tmp"):  # of a process that was killed while writing
                leftover.unlink()
            self.checksums = self._read_index()
            yield

    def _read_index(self) -> dict[str, str]:
        try:
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        shards = index.get("shards") if isinstance(index, dict) and index.get("key") == self.key else None
        return dict(shards) if isinstance(shards, dict) else {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def lacks(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Which of `names` are damaged (listed, but the file is gone or changed), and which were never finished."""
        lacking = [name for name in names if self.checksums.get(name) != sha256_of(self.path(name))]
        unfinished = [name for name in lacking if name not in self.checksums]
        return [name for name in lacking if name in self.checksums], unfinished

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write one shard, then list it: a kill in between leaves it unlisted, and it is made again."""
        temporary = self.path(name).with_suffix(".tmp")
        save_file(tensors, temporary)
        self.checksums[name] = sha256_of(temporary)
        temporary.replace(self.path(name))
        write_json_atomic(self.folder / INDEX, {"key": self.key, "shards": dict(sorted(self.checksums.items()))})

    def read(self, name: str) -> dict[str, Tensor]:
        """The tensors of a whole shard, mapped from the file."""
        return load_file(self.path(name))

    def num_bytes(self) -> int:
        return sum(self.path(name).stat().st_size for name in self.checksums)


def sha256_of(path: Path) -> str:
    """Checksum of a file; the empty string where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
