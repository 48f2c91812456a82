"""A config file's keys, checked before any value is read: each is legal, stands in its section, and is given once."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from decode.errors import UsageError
from distill.cli.keys import Keys

MAX_DEPTH = 16  # sections within sections; an alias that holds itself has no end


def check_config_file(path: str, keys: Keys) -> dict[str, str]:
    """Where each dotted key of the YAML file stands, as "file:line".

    Raises UsageError, naming file and line, on a file that can't be read, bad YAML, keys that are unknown,
    misplaced or given twice, and sections that aren't mappings.
    """
    node = _compose(path)
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path}: expected a mapping of keys to values, such as 'target: smollm2-135m'")
    checker = _Checker(path, keys)
    checker.walk(node, "")
    return checker.places


def _compose(path: str) -> yaml.Node | None:
    try:
        text = Path(path).read_text(encoding="utf-8")
        yaml.safe_load(text)  # refuses tags that would build objects, with their line
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise UsageError(f"config: {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"config: {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


@dataclass
class _Checker:
    path: str
    keys: Keys
    places: dict[str, str] = field(default_factory=dict)

    def walk(self, node: yaml.MappingNode, section: str) -> None:
        for key_node, value in node.value:
            place = f"{self.path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError(f"{place}: a key must be a plain word")
            key = f"{section}.{key_node.value}" if section else str(key_node.value)
            self._check(key, place)
            self._descend(key, value, place)

    def _check(self, key: str, place: str) -> None:
        if key not in self.keys:
            raise UsageError(f"{place}: {self.keys.unknown(key)}")
        if key in self.places:
            raise UsageError(f"{place}: {key}: given twice, first at {self.places[key]}")
        if key.count(".") > MAX_DEPTH:
            raise UsageError(f"{place}: {key}: nested too deeply")
        self.places[key] = place

    def _descend(self, key: str, value: yaml.Node, place: str) -> None:
        if isinstance(value, yaml.MappingNode):
            if self.keys.may_hold_keys(key):
                self.walk(value, key)
        elif key in self.keys.sections and not (_is_null(value) and self.keys.may_be_null(key)):
            shown = value.value if isinstance(value, yaml.ScalarNode) and value.value else "a value without keys"
            raise UsageError(f"{place}: {self.keys.illegal(key, shown)}")


def _is_null(value: yaml.Node) -> bool:
    return bool(value.tag == "tag:yaml.org,2002:null")
