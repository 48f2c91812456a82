"""Opens a cache that the user names, and refuses one that belongs to something else, with the difference named."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.errors import UsageError
from distill.data.examples import Example
from distill.teacher.cached import CachedTeacher, read_teacher
from distill.teacher.contents import Contents, contents_of_all, find_contents
from distill.teacher.key import UNKNOWN, CacheKey, differences
from distill.teacher.store import Store, read_index
from distill.teacher.verify import compare

COMPARED = 256  # positions that show whether a server's target was this one


@dataclass(frozen=True)
class GivenCache:
    """A whole cache that fits a run."""

    store: Store
    contents: Contents

    def teacher(self, examples: Sequence[Example]) -> CachedTeacher:
        return read_teacher(examples, self.contents, self.store)

    def sha256(self, examples: Sequence[Example]) -> str:
        """Of every shard that `examples` lie in: another one gives other laws, if only by rounding."""
        shards = {self.contents[content].shard for content in contents_of_all(examples)}
        return hashlib.sha256("".join(sorted(self.store.checksums[name] for name in shards)).encode()).hexdigest()


def open_cache(folder: str, key: CacheKey, examples: Sequence[Example], model: Any) -> GivenCache:
    """The cache in `folder`, for `examples`, of which it may hold more, and the target `model`.

    Raises UsageError where there is none, it is damaged, lacks an example, or its key is another: each difference is
    named with both values. Of what a server scored the weights are not known; a sample is scored again instead.
    """
    path = Path(folder).expanduser()
    index = read_index(path)
    if index is None:
        raise UsageError(f"teacher.cache: {folder} holds no cache; `draftsmith cache --output {folder} ...` makes one")
    if different := differences(index["key"], key.as_dict()):
        raise UsageError(f"teacher.cache: {folder} belongs to something else: {'; '.join(different)}")
    store = Store(path, index["key"])
    if damaged := store.damaged():
        names = ", ".join(store.path(name).name for name in damaged)
        raise UsageError(f"teacher.cache: {folder}: damaged: {names}; the command that made it makes them again")
    contents = find_contents(store)
    _require_all(folder, contents, examples)
    if index["key"]["target_sha256"] == UNKNOWN:
        _require_target(store, model)
    return GivenCache(store, contents)


def _require_all(folder: str, contents: Contents, examples: Sequence[Example]) -> None:
    missing = [e for e, content in zip(examples, contents_of_all(examples), strict=True) if content not in contents]
    if missing:
        raise UsageError(
            f"teacher.cache: {folder} lacks {len(missing)} of {len(examples)} examples; the first is "
            f"{missing[0].source}: no example in it has these ids and this mask; `draftsmith cache` with this data "
            "adds them"
        )


def _require_target(store: Store, model: Any) -> None:
    compared = compare(store, model, COMPARED)
    if not compared.agrees({UNKNOWN}):
        raise UsageError(f"teacher.cache: {store.folder} was scored by a server with another target: {compared}")
