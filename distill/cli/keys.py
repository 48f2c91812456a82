"""The dotted keys of a config class: which are legal, what each expects, and which one a misspelt key meant."""

import difflib
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Keys:
    """Every dotted key of a config class, with its type; `sections` are the keys that hold further keys."""

    leaves: dict[str, Any]
    sections: dict[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.leaves or key in self.sections or self.is_free(key)

    def is_free(self, key: str) -> bool:
        """Whether `key` lies inside a mapping that takes any key, such as trainer.devices."""
        parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
        return any(self.is_mapping(parent) for parent in parents)

    def may_hold_keys(self, key: str) -> bool:
        return key in self.sections or self.is_mapping(key) or self.is_free(key)

    def may_be_null(self, key: str) -> bool:
        return type(None) in typing.get_args(self.sections.get(key) or self.leaves.get(key))

    def is_mapping(self, key: str) -> bool:
        return typing.get_origin(self.leaves.get(key)) is dict

    def is_list(self, key: str) -> bool:
        return typing.get_origin(self.leaves.get(key)) in (list, tuple)

    def is_switch(self, key: str) -> bool:
        return self.leaves.get(key) is bool

    def inside(self, section: str) -> list[str]:
        """Names of the keys directly inside `section` ("" for the top level)."""
        start = f"{section}." if section else ""
        every = [*self.leaves, *self.sections]
        return [k.removeprefix(start) for k in every if k.startswith(start) and "." not in k[len(start) :]]

    def nearest(self, key: str) -> str | None:
        """The legal key that `key` most likely meant: same words, same name in another section, or near spelling."""
        wanted = key.replace("-", "_")
        if wanted in self.leaves or wanted in self.sections:
            return wanted
        every = [*self.leaves, *self.sections]
        name = wanted.rpartition(".")[2]
        legal = {k.rpartition(".")[2] for k in every}
        longer = [n for n in legal if len(name) > 2 and n.startswith(name)]
        names = difflib.get_close_matches(name, legal, n=1, cutoff=0.75) or longer
        candidates = [k for k in every if k.rpartition(".")[2] in names] or every
        cutoff = 0.0 if names else 0.7
        found = difflib.get_close_matches(wanted, candidates, n=1, cutoff=cutoff)
        return found[0] if found else None

    def unknown(self, key: str, written: str | None = None) -> str:
        """The line that refuses `key`, shown as `written` where the user wrote it in another form."""
        shown = written or key
        if meant := self.nearest(key):
            return f"{shown}: unknown key; did you mean {meant}?"
        section = key.rpartition(".")[0]
        section = section if section in self.sections else ""
        where = f"in section {section}" if section else "at the top level"
        return f"{shown}: unknown key; legal {where}: {', '.join(self.inside(section))}"

    def illegal(self, key: str, value: object) -> str:
        """The line that refuses `value`, of a wrong type or not among the choices of `key`."""
        return f"{key}: {shorten(value)} is not legal; expected {self.expected(key)}"

    def expected(self, key: str) -> str:
        if key in self.sections:
            return f"a section with the keys {', '.join(self.inside(key))}"
        return describe(self.leaves[key]) if key in self.leaves else "another value"


def keys_of(config: type) -> Keys:
    """Walk config class `config` and its nested classes."""
    leaves: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    hints = typing.get_type_hints(config)
    for field in fields(config):
        hint = hints[field.name]
        nested = section_class(hint)
        if nested is None:
            leaves[field.name] = hint
            continue
        sections[field.name] = hint
        inner = keys_of(nested)
        leaves |= {f"{field.name}.{k}": v for k, v in inner.leaves.items()}
        sections |= {f"{field.name}.{k}": v for k, v in inner.sections.items()}
    return Keys(leaves, sections)


def section_class(hint: Any) -> type | None:
    """The dataclass that `hint` is, or is an optional of."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and is_dataclass(option):
            return option
    return None


def describe(hint: Any) -> str:
    """What a value of type `hint` is, in words for a user."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return args[0] if len(args) == 1 else f"one of {', '.join(map(str, args))}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(a) for a in args)
    if origin is list:
        return f"a list, each {describe(args[0])}, such as [a, b]"
    if origin is tuple:
        return f"a list of {len(args)}, each {describe(args[0])}"
    if origin is dict:
        return "a mapping of keys to values"
    return NAMES.get(hint, "another value")


def shorten(value: object, limit: int = 80) -> str:
    """`value` on one line, cut where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
