"""The shipped comparisons: their prompts are new to the quick start's draft, their settings are those of bench."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from distill.cli.options import Words, parse
from distill.results.bench_names import method_names
from distill.results.config import BenchConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "bench"
FILES = sorted(FOLDER.glob("*.jsonl"))
CONFIGS = sorted(FOLDER.glob("*.yaml"))


def prompts(file: Path) -> list[str]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all(isinstance(row, dict) for row in rows)
    return [str(row["prompt"]) for row in rows if "prompt" in row]


def script() -> Any:
    """The script that made the quick start's prompts; scripts are no package."""
    spec = importlib.util.spec_from_file_location("stories", ROOT / "scripts" / "make_story_prompts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def combination(words: Any, prompt: str) -> tuple[str, str, str]:
    """Adjective, character and object of a story, read back from its text."""
    ((adjective, character),) = [(a, c) for a in words.ADJECTIVES for c in words.CHARACTERS if f"a {a} {c}" in prompt]
    thing = max((o for o in words.OBJECTS if f" a {o}" in prompt), key=len)
    return adjective, character, thing


def test_the_stories_are_in_no_file_of_the_quick_start_and_half_of_their_noun_pairs_in_no_training_prompt() -> None:
    words = script()
    shipped = {name: [combination(words, text) for text in texts] for name, texts in words.make_prompts().items()}
    stories = [combination(words, text) for text in prompts(FOLDER / "stories.jsonl")]
    assert len(set(stories)) == len(stories) == 10
    assert not set(stories) & {found for of_file in shipped.values() for found in of_file}
    trained = {found[1:] for found in shipped["train_prompts.jsonl"]}
    assert sum(story[1:] not in trained for story in stories) >= 5
    written = {text for file in (ROOT / "configs" / "quickstart").glob("*prompts.jsonl") for text in prompts(file)}
    assert len(written) == sum(words.SIZES.values()) and not written & set(prompts(FOLDER / "stories.jsonl"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_has_ten_prompts_and_is_told_of(file: Path) -> None:
    assert len(set(prompts(file))) == len(file.read_text(encoding="utf-8").splitlines()) == 10
    assert f"`{file.name}`" in (FOLDER / "DATA.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_settings_are_those_of_bench_and_name_files_that_are_there(path: Path) -> None:
    config = parse("bench", BenchConfig, Words(config_files=[str(path)]))
    assert isinstance(config, BenchConfig)
    assert all((ROOT / file).is_file() for file in config.prompts)
    assert [name.text for name in method_names(config.methods)] == config.methods
    assert config.decode.sampling is not None
    assert config.decode.sampling.greedy or config.decode.seed is not None
    assert f"`{path.name}`" in (FOLDER / "DATA.md").read_text(encoding="utf-8")


def test_every_fixed_length_is_run_with_both_rules() -> None:
    rules = parse("bench", BenchConfig, Words(config_files=[str(FOLDER / "rules.yaml")]))
    fixed = [name for name in method_names(rules.methods) if name.kind == "fixed"]
    assert [(name.length, name.verifier) for name in fixed] == [(k, r) for k in (3, 5, 8) for r in ("token", "block")]
