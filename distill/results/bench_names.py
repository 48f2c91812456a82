"""What the names of methods mean: NAME[:LENGTH][/VERIFIER][@BACKEND]."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from decode.config import BackendName, VerifierName
from decode.draft_length import DRAFT_LENGTHS
from decode.errors import UsageError

PLAIN = "plain"
TRANSFORMERS, ASSISTED, LOOKUP = "transformers", "transformers-assisted", "transformers-prompt-lookup"
FLASHSPEC = "flashspec"
DRAFTING = tuple(DRAFT_LENGTHS)
VERIFIERS, BACKENDS = get_args(VerifierName), get_args(BackendName)
LONGEST = 64
FORM = re.compile(r"(?P<kind>[\w-]+)(:(?P<length>\d+))?(/(?P<verifier>\w+))?(@(?P<backend>\w+))?")


@dataclass(frozen=True)
class MethodName:
    """A method as it was asked for; what was left out is None."""

    text: str
    kind: str
    length: int | None = None
    verifier: str | None = None
    backend: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.kind == PLAIN or self.is_drafting

    @property
    def is_drafting(self) -> bool:
        """Ours, with the draft."""
        return self.kind in DRAFTING


def method_names(methods: Sequence[str]) -> list[MethodName]:
    """The methods of `methods` in order; plain decoding, over which all speedups are, comes first where it lacks.

    Raises UsageError for a name that is unknown, takes no such addition, or is given twice.
    """
    names = [parse_name(text) for text in methods]
    twice = next((name.text for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise UsageError(f"methods: {twice} is given twice")
    plain = parse_name(PLAIN)
    return names if plain in names else [plain, *names]


def parse_name(text: str) -> MethodName:
    found = FORM.fullmatch(text)
    kinds = (PLAIN, *DRAFTING, TRANSFORMERS, ASSISTED, LOOKUP, FLASHSPEC)
    if found is None or found["kind"] not in kinds:
        raise UsageError(
            f"methods: {text!r} is not legal; expected NAME[:LENGTH][/VERIFIER][@BACKEND], such as fixed:3@eager; "
            f"names: {', '.join(kinds)}"
        )
    length = None if found["length"] is None else int(found["length"])
    name = MethodName(text, found["kind"], length, found["verifier"], found["backend"])
    _check(name)
    return name


def _check(name: MethodName) -> None:
    takes_length = name.is_drafting or name.kind in (ASSISTED, LOOKUP, FLASHSPEC)
    for part, value, taken, legal in (
        ("length", name.length, takes_length, range(1, LONGEST + 1)),
        ("verifier", name.verifier, name.is_drafting, VERIFIERS),
        ("backend", name.backend, name.is_ours, BACKENDS),
    ):
        if value is None or (taken and value in legal):
            continue
        expected = ("from 1 to 64" if part == "length" else f"one of {', '.join(map(str, legal))}") if taken else "none"
        raise UsageError(f"methods: {name.text!r}: {part} {value} is not legal; expected {expected}")
