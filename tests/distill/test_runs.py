"""What a run leaves to tell how it was made, and atomic writes."""

import json
import math
import os
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from distill.config import DataConfig, FitConfig, OptimizerConfig
from distill.runs import config_yaml, plain, record_run, versions, write_json_atomic, write_text_atomic

CONFIG = FitConfig("t", "d", "o", DataConfig(["a.jsonl"]), max_steps=3, trainer={"precision": "16-mixed"})


def test_text_replaces_text_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.txt"
    write_text_atomic(path, "first\n")
    write_text_atomic(str(path), "zweite Zeile: ü\n")
    assert path.read_text(encoding="utf-8") == "zweite Zeile: ü\n"
    assert [p.name for p in path.parent.iterdir()] == ["report.txt"]


def test_a_reader_sees_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_text_atomic(path, "the first text\n")
    with path.open() as reader:
        write_text_atomic(path, "the second\n")
        assert reader.read() == "the first text\n"


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "best.json"
    write_json_atomic(path, {"step": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json_atomic(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_without_a_value_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "metrics.json", {"speedup": value})
    assert not list(tmp_path.iterdir())


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Path("/a/b"), "/a/b"),
        (Colour.RED, "red"),
        ((1, 2.5), [1, 2.5]),
        ({"k": (True, None)}, {"k": [True, None]}),
        (np.float64(0.25), 0.25),
        (OptimizerConfig().betas, [0.9, 0.95]),
        (object, repr(object)),
    ],
)
def test_r06_settings_become_primitives(value: Any, expected: Any) -> None:
    result = plain(value)
    assert result == expected
    assert type(result) is type(expected)


def test_r06_config_from_paths_is_the_config_from_text() -> None:
    from_paths: Any = FitConfig(Path("t"), Path("d"), Path("o"), DataConfig([Path("a.jsonl")]), max_steps=3)  # type: ignore[arg-type, list-item]
    from_text = FitConfig("t", "d", "o", DataConfig(["a.jsonl"]), max_steps=3)
    assert plain(from_paths) == plain(from_text)


def test_the_record_holds_config_versions_and_every_start(tmp_path: Path) -> None:
    record_run(tmp_path, CONFIG, ["/usr/bin/draftsmith", "fit", "--output", "a b"])
    record_run(tmp_path, CONFIG, ["/usr/bin/draftsmith", "fit"])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == plain(CONFIG)
    recorded = json.loads((tmp_path / "versions.json").read_text())
    assert recorded["torch"] and recorded["python"] and recorded["threads"] >= 1
    lines = (tmp_path / "command.txt").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["draftsmith fit --output 'a b'", "draftsmith fit"]


def test_a_package_that_is_not_there_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.runs.RECORDED_PACKAGES", ("draftsmith-no-such-package",))
    assert versions()["draftsmith-no-such-package"] is None


def test_floats_survive_yaml() -> None:
    config = OptimizerConfig(learning_rate=1e-05, weight_decay=2e-3)
    assert yaml.safe_load(config_yaml(config))["learning_rate"] == 1e-05
