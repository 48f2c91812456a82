"""What a run leaves to tell how it was made: settings, versions, command; and writes never seen half done."""

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

RECORDED_PACKAGES = (
    "draftsmith",
    "torch",
    "transformers",
    "tokenizers",
    "lightning",
    "datasets",
    "safetensors",
)
COMMAND_FILE = "command.txt"


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write `text` to `path`. A reader, or a start after a kill, sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON. Raises ValueError on NaN and infinity, which aren't JSON."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """`value` from dict, list, str, int, float, bool and None only: fit for YAML, JSON and safe checkpoints.

    Dataclasses become dicts, sequences lists, paths and enums strings; any other object becomes its repr.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (bool, int, float, str):  # subclasses too, numpy's float64 say: the exact primitive is kept
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else repr(value)


def config_yaml(config: Any) -> str:
    """A config dataclass as YAML that the command line reads back to an equal config."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, width=110)


def versions() -> dict[str, Any]:
    """What the figures of a run depend on: packages, Python, machine, threads, accelerator."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    torch = sys.modules.get("torch")  # asked only where a command has imported it already
    found["threads"] = torch.get_num_threads() if torch else os.cpu_count()
    cuda = torch is not None and torch.cuda.is_available()
    found["accelerator"] = torch.cuda.get_device_name() if torch and cuda else None
    return found


def command_line(command: Sequence[str] | None = None) -> str:
    """`command`, or this process's own, as a shell would take it; the program without its folder."""
    words = list(sys.argv if command is None else command)
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def provenance(config: Any) -> dict[str, Any]:
    """Resolved configuration, versions and command, for results whose record is one JSON file."""
    return {"config": plain(config), "versions": versions(), "command": command_line()}


def record_run(folder: str | Path, config: Any, command: Sequence[str] | None = None) -> None:
    """Write config.yaml, versions.json and command.txt into `folder`.

    `command` defaults to this process's own. command.txt gains a line per start; a resumed run shows all.
    """
    folder = Path(folder)
    write_text_atomic(folder / "config.yaml", config_yaml(config))
    write_json_atomic(folder / "versions.json", versions())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with (folder / COMMAND_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{now} {command_line(command)}\n")


def is_other_rank() -> bool:
    """Whether this process is a rank other than 0 of a distributed run, which leaves files and messages to rank 0."""
    # set by torchrun (RANK) and by lightning's launcher for the processes that it starts (LOCAL_RANK)
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK"))
