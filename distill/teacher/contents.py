"""Finds an example's law in a store by what the example is: its ids and its mask, wherever it stands in any list."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from distill.data.examples import Example
from distill.teacher.fingerprint import content_of
from distill.teacher.store import Store, Table


class Location(NamedTuple):
    """Where the laws of an example lie."""

    shard: str
    first: int
    """The row of its first supervised position; the others follow."""


class Contents(dict[bytes, Location]):
    """The examples of a store by their content."""

    def add(self, shard: str, table: Table) -> None:
        """Note the examples of one shard. Those that another shard has are left where they are."""
        first = 0
        for ids, mask in examples_of(table):
            self.setdefault(content_of(ids.tolist(), mask.tolist()), Location(shard, first))
            first += int(mask[1:].sum())


def examples_of(table: Table) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, mask) of each example of a table."""
    lengths = table["lengths"].tolist()
    return zip(table["token_ids"].split(lengths), table["mask"].split(lengths), strict=True)


def find_contents(store: Store) -> Contents:
    """All that the store lists. Its shards have to be whole."""
    found = Contents()
    for name in sorted(store.checksums):
        found.add(name, store.read(name))
    return found


def contents_of_all(examples: Iterable[Example]) -> list[bytes]:
    return [content_of(example.input_ids, example.mask) for example in examples]
