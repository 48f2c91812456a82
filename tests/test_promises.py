"""What README promises: each claim says where it holds and is shown by tests that are there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from tests.fixtures import FAMILIES, greedy_reference, loaded, random_prompt, with_noise

ROOT = Path(__file__).resolve().parent.parent
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## What is promised\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| ")]
PROMISES = ROWS[1:]
SAYS_WHERE = re.compile(r"\b(fp32|fp64|bf16|16-bit|CPU|GPU|machine|greedy|sampled)\b")


def test_b04_there_are_promises() -> None:
    assert ROWS[0] == ["promise", "where it holds", "how it is shown"]
    assert len(PROMISES) >= 6


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0][:40])
def test_b04_a_promise_says_where_it_holds_and_names_its_tests(row: list[str]) -> None:
    _, where, how = row
    assert SAYS_WHERE.search(where), where
    named = re.findall(r"`(tests/[\w/]+\.py)`", how)
    assert named, f"no test is named: {how}"
    for name in named:
        assert re.search(r"^def test_", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), name


def test_b04_every_test_that_readme_names_is_there() -> None:
    named = set(re.findall(r"\btests/[\w/]+\.py\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named and all((ROOT / name).is_file() for name in named)


def decoded(target: Any, prompt: list[int], count: int, width: int) -> list[int]:
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.3)))
    return decoder.generate(prompt, DecodeConfig(max_new_tokens=count, num_speculative_tokens=width))[0].ids


@pytest.mark.parametrize("family", FAMILIES)
def test_b04_greedy_output_is_the_targets_own_in_fp32(family: str) -> None:
    for seed in range(3):
        target = FAMILIES[family](seed).float()
        prompt = random_prompt(7, seed=seed)
        assert decoded(target, prompt, 32, width=5) == greedy_reference(target, prompt, 32)


TIE = 2.0**-5
"""Gap to the largest logit, relative to it, that counts as a tie in bf16: 8 of its roundings of 2**-8."""


@pytest.mark.parametrize("family", FAMILIES)
def test_b04_e08_in_bf16_greedy_output_leaves_the_targets_own_at_near_ties_only(family: str) -> None:
    for seed in range(3):
        target = FAMILIES[family](seed).bfloat16()
        prompt = random_prompt(7, seed=seed)
        plain, ours = (decoded(target, prompt, 32, width) for width in (0, 5))
        assert len(ours) == len(plain)
        place = next((i for i, pair in enumerate(zip(plain, ours, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            with torch.no_grad():
                logits = target(input_ids=torch.tensor([prompt + plain[:place]])).logits[0, -1].float()
            gap = logits.max() - logits[ours[place]]
            assert gap <= TIE * logits.abs().max(), f"seed {seed}, token {place}: {gap} is no near tie"
