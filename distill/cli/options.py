"""Words of a command line and config files in, a checked config dataclass out; mistakes are told in one line."""

import json
import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, set_parsing_settings

from decode.errors import UsageError
from distill.cli.keys import Keys, keys_of, section_class, shorten
from distill.cli.yaml_keys import check_config_file

Config = TypeVar("Config")
TEXTS = {"prompt"}  # keys whose value on the command line is a text as it stands, were it "null"
FLAGS = {"print_config": "print the resolved configuration as YAML and exit", "debug": "show the traceback of an error"}


@dataclass
class Words:
    """A command line, sorted: config files come first, so that options always lie on top of them."""

    config_files: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """Keys that options set."""
    texts: dict[str, str] = field(default_factory=dict)
    """Values of TEXTS, which are not parsed."""
    flags: set[str] = field(default_factory=set)

    @property
    def arguments(self) -> list[str]:
        if "help" in self.flags:
            return ["--help"]
        return [*(f"--config={file}" for file in self.config_files), *self.options]


def parse(command: str, config: type[Config], words: Words) -> Config:
    """The config that `words` describe. Raises UsageError naming key, value and what is legal.

    Raises SystemExit(0) after printing the help where that was asked for.
    """
    keys = keys_of(config)
    places: dict[str, str] = {}
    for file in words.config_files:
        places |= check_config_file(file, keys)
    for key in words.given:
        places.pop(key, None)
    try:
        parser = build_parser(command, config, keys, documented="help" in words.flags)
        if "help" in words.flags:
            parser.print_help()
            print(optional_sections_help(keys), end="")
            raise SystemExit(0)
        parsed = parser.parse_args(words.arguments).as_dict() | words.texts
        return build(config, {k: v for k, v in parsed.items() if k != "config" and k not in FLAGS})
    except ArgumentError as error:
        raise UsageError(_placed(explain(str(error), keys), places)) from None
    except UsageError as error:
        raise UsageError(_placed(str(error), places)) from None


def build_parser(command: str, config: type, keys: Keys, documented: bool) -> ArgumentParser:
    """The parser of one command; `documented` reads the fields' documentation, which only the help shows."""
    set_parsing_settings(docstring_parse_attribute_docstrings=documented)
    parser = ArgumentParser(
        prog=f"draftsmith {command}",
        usage=f"draftsmith {command} [--config FILE] [--KEY VALUE ...] [--print-config] [--debug]",
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
    )
    parser.add_argument("--config", action="config", metavar="FILE", help="YAML file; options lie on top of it")
    for name, meaning in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)
    parser.add_class_arguments(config)
    for action in parser._actions:
        is_section = action.dest in keys.sections and not keys.may_be_null(action.dest)
        if is_section or any(name.endswith(".help") for name in action.option_strings):
            action.help = SUPPRESS  # a section is given key by key, and this help shows them all
    return parser


def optional_sections_help(keys: Keys) -> str:
    """What the help of a command lacks: the keys of sections that may be null. draft_sampling has those of sampling."""
    text = ""
    for section, hint in keys.sections.items():
        nested = section_class(hint)
        if nested is None or not keys.may_be_null(section) or section.endswith("draft_sampling"):
            continue
        parser = ArgumentParser(usage=SUPPRESS, add_help=False, print_config=None)
        parser.add_class_arguments(nested, section)
        for action in parser._actions:
            if action.dest == section:
                action.help = SUPPRESS
        text += f"\nkeys of {section}, where it is not null:\n{parser.format_help()}"
    return text


def build(config: type[Config], values: dict[str, Any], section: str = "") -> Config:
    """Construct `config` and its nested classes; a range error names its key in full."""
    hints = keys_of(config).sections
    arguments = dict(values)
    for name, value in values.items():
        nested = section_class(hints[name]) if name in hints else None
        if nested is not None and value is not None and not is_dataclass(value):
            arguments[name] = build(nested, value, f"{section}{name}.")
    try:
        return config(**arguments)
    except UsageError as error:
        message = str(error)
        raise type(error)(message if message.startswith(section) else section + message) from None


def sort_words(argv: Sequence[str], keys: Keys) -> Words:
    """Sort `argv`. Option names may use dashes; an option for a list takes all values up to the next option.

    Raises UsageError for an unknown option, with the nearest legal one.
    """
    words = Words()
    for name, values in _groups(argv):
        written, key = f"--{name}", name.replace("-", "_").rstrip("+")
        if key == "help" or key in FLAGS:
            _check_flag(written, values)
            words.flags.add(key)
        elif key == "config":
            words.config_files.append(_single(written, values))
        else:
            _check_option(written, key, keys)
            words.given.add(key)
            if key in TEXTS and key in keys:
                words.texts[key] = _single(written, values)
                continue
            words.options += _option(written, name.replace("-", "_"), key, values, keys)
    return words


def _groups(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option's name without dashes, with the values that follow it."""
    name: str | None = None
    values: list[str] = []
    for word in argv:
        word = "--help" if word == "-h" else word
        if not word.startswith("--"):
            if name is None:
                raise UsageError(f"{shorten(word)}: unexpected; options are written --KEY VALUE")
            values.append(word)
            continue
        if name is not None:
            yield name, values
        name, given, value = word[2:].partition("=")
        values = [value] if given else []
    if name is not None:
        yield name, values


def _check_flag(written: str, values: list[str]) -> None:
    if values:
        raise UsageError(f"{written}: takes no value, given {shorten(values[0])}")


def _check_option(written: str, key: str, keys: Keys) -> None:
    if key not in keys:
        meant = keys.nearest(key)
        hint = f"did you mean --{meant}?" if meant else "--help lists them all"
        raise UsageError(f"{written}: unknown option; {hint}")
    if key in keys.sections and not keys.may_be_null(key):
        inside = ", ".join(f"--{key}.{name}" for name in keys.inside(key))
        raise UsageError(f"{written}: is a section; give its keys: {inside}")


def _option(written: str, name: str, key: str, values: list[str], keys: Keys) -> list[str]:
    if keys.is_list(key) and values and not values[0].startswith("["):
        return [f"--{name}={json.dumps(values, ensure_ascii=False)}"]
    if keys.is_switch(key) and not values:  # its name alone turns it on
        return [f"--{name}=true"]
    return [f"--{name}={_single(written, values)}"]


def _single(written: str, values: list[str]) -> str:
    if len(values) > 1:
        raise UsageError(f"{shorten(values[1])}: unexpected after {written} {shorten(values[0])}")
    if not values:
        raise UsageError(f"{written}: needs a value")
    return values[0]


def explain(message: str, keys: Keys) -> str:
    """One line for the parser's message, which may have several and speaks of Python types."""
    if found := re.search(r"arguments are required: (.*)", message):
        return f"missing: {found[1]}; give each as an option or in the --config file"
    path = re.findall(r'Parser key "([^"]+)"', message)
    if unknown := re.search(r"(?:option|Option) '([^']+)'", message):
        return keys.unknown(".".join([*path, unknown[1]]))
    key = ".".join(path) if ".".join(path) in keys else (path or [""])[0]
    got, given = re.search(r"Got value: ([^\n]*)", message), re.search(r"Given value: (.*)", message, flags=re.DOTALL)
    value = got if len(path) > 1 else given or got  # what was given for an outer key holds the inner one's value
    if key and value:
        return keys.illegal(key, value[1])
    return shorten(message, limit=300)


def _placed(message: str, places: dict[str, str]) -> str:
    """`message`, led by the file and line of the key that it names."""
    key = message.partition(":")[0]
    return f"{places[key]}: {message}" if key in places else message
