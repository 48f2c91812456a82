"""The quick start's shipped data is what its page says, and its parts share nothing."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from distill.cli.options import Words, build, parse
from distill.config import GenerateConfig
from distill.runs import plain, provenance

FOLDER = Path(__file__).parents[2] / "configs" / "quickstart"
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_story_prompts.py"
ANSWERED = ("train", "held_out")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_bytes().split(b"\n")[:-1]]


def story_prompts() -> Any:
    """The script as a module; scripts are no package."""
    spec = importlib.util.spec_from_file_location("make_story_prompts", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_the_shipped_prompts_again() -> None:
    made = story_prompts().make_prompts()
    assert {name: len(prompts) for name, prompts in made.items()} == story_prompts().SIZES
    for name, prompts in made.items():
        assert [{"prompt": prompt} for prompt in prompts] == rows(name)


def combinations(prompts: list[str]) -> list[tuple[str, ...]]:
    """Adjective, character and object of each prompt, read back from its text."""
    script = story_prompts()
    heroes = [(a, c) for a in script.ADJECTIVES for c in script.CHARACTERS]
    found = []
    for prompt in prompts:
        (hero,) = [(a, c) for a, c in heroes if f"a {a} {c}" in prompt]
        thing = max((o for o in script.OBJECTS if f" a {o}" in prompt), key=len)
        found.append((*hero, thing))
    return found


def test_the_files_share_no_combination_and_half_of_the_held_out_noun_pairs_are_unseen() -> None:
    made = {name: combinations(prompts) for name, prompts in story_prompts().make_prompts().items()}
    everything = [words for found in made.values() for words in found]
    assert len(set(everything)) == len(everything)
    seen = {words[1:] for words in made["train_prompts.jsonl"]}
    for name in ("held_out_prompts.jsonl", "quick_prompts.jsonl"):
        unseen = [words for words in made[name] if words[1:] not in seen]
        assert len(unseen) >= len(made[name]) // 2


@pytest.mark.parametrize("name", ANSWERED)
def test_the_record_beside_the_answers_is_what_generate_writes(name: str) -> None:
    record = json.loads((FOLDER / f"{name}.jsonl.meta.json").read_text())
    file = f"configs/quickstart/make_{name}.yaml"
    made_by = parse("generate", GenerateConfig, Words(config_files=[str(FOLDER.parents[1] / file)]))
    assert plain(build(GenerateConfig, record["config"])) == plain(made_by)
    assert record["command"] == f"draftsmith generate --config {file}"
    assert (record["num_prompts"], len(record["target_sha256"])) == (len(rows(f"{name}.jsonl")), 64)
    assert record["versions"]["transformers"]
    # What decides the bytes: the list is the one that generate compares.
    decided = {"sampling", "max_new_tokens", "batch_size", "seed", "dtype", "device", "backend"}
    assert record.keys() == decided | {"target", "target_sha256", "prompts", "num_prompts"} | provenance({}).keys()


@pytest.mark.parametrize("name", ANSWERED)
def test_answers_belong_to_the_prompts_and_their_checksum_is_recorded(name: str) -> None:
    answers, prompts = rows(f"{name}.jsonl"), rows(f"{name}_prompts.jsonl")
    assert [row["prompt"] for row in answers] == [row["prompt"] for row in prompts]
    assert [row["row"] for row in answers] == list(range(len(prompts)))
    assert all(len(row["input_ids"]) == len(row["mask"]) and 1 <= sum(row["mask"]) <= 192 for row in answers)
    page = (FOLDER / "DATA.md").read_text()
    content = (FOLDER / f"{name}.jsonl").read_bytes()
    num_tokens = sum(sum(row["mask"]) for row in answers)
    assert hashlib.sha256(content).hexdigest() in page
    assert f"| {len(answers)} | {num_tokens:,} |" in page
    assert len(content) < 3_000_000
