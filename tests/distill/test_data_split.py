"""The validation split: disjoint, and the same whatever the run."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from decode.errors import UsageError
from distill.config import DataConfig
from distill.data.examples import Example
from distill.data.split import drop_overlap, load_data, split_examples
from tests.fixtures import byte_tokenizer

SCRIPT = """
from distill.data.examples import Example
from distill.data.split import split_examples
examples = [Example([7, 8, i, 5], [False] * 3 + [True], str(i)) for i in range(200)]
print([e.source for e in split_examples(examples, 0.1)[1]])
"""


def example(number: int, answer: int = 5) -> Example:
    return Example([7, 8, number, answer], [False, False, False, True], str(number))


def text(number: int) -> Example:
    return Example([1, number, number], [False, True, True], str(number))


@pytest.mark.parametrize("make", [example, text])
def test_a17_split_is_disjoint_and_does_not_depend_on_order_or_other_rows(make: type) -> None:
    rows = [make(number) for number in range(200)]
    train, held_out = split_examples(rows, 0.1)
    assert 8 <= len(held_out) <= 32
    assert {e.source for e in train} | {e.source for e in held_out} == {e.source for e in rows}
    assert not {e.source for e in train} & {e.source for e in held_out}
    shuffled = random.Random(3).sample(rows, 200)
    assert {e.source for e in split_examples(shuffled, 0.1)[1]} == {e.source for e in held_out}
    kept = {e.source for e in split_examples(rows[:150], 0.1)[1]}
    assert kept == {e.source for e in held_out if int(e.source) < 150}


def test_a17_two_processes_with_other_hash_seeds_hold_out_the_same_rows() -> None:
    rows = [Example([7, 8, i, 5], [False] * 3 + [True], str(i)) for i in range(200)]
    here = str([e.source for e in split_examples(rows, 0.1)[1]])
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == here


def test_rows_that_share_a_prompt_stay_on_one_side() -> None:
    rows = [example(number % 20, answer) for number, answer in zip(range(200), range(200), strict=True)]
    train, held_out = split_examples(rows, 0.3)
    assert not {e.source for e in train} & {e.source for e in held_out}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_either_side_has_a_row(fraction: float) -> None:
    train, held_out = split_examples([example(1), example(2), example(3)], fraction)
    assert train and held_out and len(train) + len(held_out) == 3
    with pytest.raises(UsageError, match=r"data\.validation_fraction: all rows share one prompt"):
        split_examples([example(1), example(1, 6)], fraction)


def write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "completion": "x"}) + "\n" for p in prompts))
    return str(path)


def test_a17_training_rows_with_a_validation_prompt_are_dropped_and_counted(tmp_path: Path) -> None:
    files = write(tmp_path / "t.jsonl", ["a", "b", "c"]), write(tmp_path / "v.jsonl", ["b", "d"])
    data = load_data(DataConfig([files[0]], [files[1]]), byte_tokenizer(), 259)
    assert [e.source[-1] for e in data.train] == ["1", "3"] and len(data.validation) == 2
    assert data.report.dropped == {"the prompt is among the validation rows": 1}
    assert data.report.num_examples + data.report.num_dropped == data.report.num_rows == 3
    assert data.validation_report and data.validation_report.num_examples == 2
    with pytest.raises(UsageError, match=r"data\.validation"):
        load_data(DataConfig([files[0]], [files[0]]), byte_tokenizer(), 259)
    assert drop_overlap(data.train, data.validation) == data.train


def test_without_validation_files_training_rows_are_held_out(tmp_path: Path) -> None:
    name = write(tmp_path / "t.jsonl", [str(n) for n in range(60)])
    data = load_data(DataConfig([name], validation_fraction=0.2), byte_tokenizer(), 259)
    assert len(data.train) + len(data.validation) == 60 and len(data.validation) > 2
    assert data.validation_report is None
