"""A draft that proposes fewer tokens when it decodes: which ones, whose output it is, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from decode.config import DecodeConfig, ModelConfig
from decode.decoder import SpeculativeDecoder
from decode.draft_vocab import most_frequent
from decode.errors import UsageError
from decode.models import load_model
from tests.draft_files import make_draft, save_target
from tests.fixtures import random_prompt

EVERY = torch.arange(20)


def rows(folder: Path, *texts: tuple[list[int], list[int]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": ids, "mask": mask}) + "\n" for ids, mask in texts))
    return str(file)


def test_the_most_frequent_generated_tokens_are_kept_and_those_that_end_a_text(tmp_path: Path) -> None:
    file = rows(tmp_path, ([9, 9, 9, 5, 5, 7], [0, 0, 0, 1, 1, 1]), ([7, 7, 3], [1, 1, 0]))
    assert most_frequent(file, 2, EVERY, []).tolist() == [5, 7]
    assert most_frequent(file, 3, EVERY, [19]).tolist() == [5, 7, 19]
    assert most_frequent(file, 2, torch.tensor([2, 5, 6]), [19]).tolist() == [2, 5], "only what the draft can propose"


def test_the_output_stays_the_targets_and_fewer_tokens_are_proposed(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    draft = make_draft(target, tmp_path / "draft")
    file = rows(tmp_path, (list(range(60)), [1] * 60))
    config = ModelConfig(device="cpu", draft_vocab_size=40, draft_vocab_data=file)
    small = load_model(str(draft), config, role="draft")
    assert small.vocab_ids is not None and len(small.vocab_ids) == 40
    large = load_model(str(target), config, role="target")
    assert large.vocab_ids is None
    prompt = random_prompt(6)
    decode = DecodeConfig(24, 4, "fixed")
    answer = SpeculativeDecoder(large, small).generate(prompt, decode, trace=True)[0]
    assert answer.ids == SpeculativeDecoder(large).generate(prompt, decode)[0].ids
    assert {token for done in answer.rounds for token in done.drafted} <= set(small.vocab_ids.tolist())


@pytest.mark.parametrize("size", [0, 21])
def test_a_size_out_of_range_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(UsageError, match=r"model\.draft_vocab_size: \d+ is not legal; expected an integer from 1 to"):
        most_frequent(rows(tmp_path, ([1], [1])), size, EVERY, [])


@pytest.mark.parametrize(
    "text", ["", '{"input_ids": [1], "mask": [0]}\n', "{}\n", "[1]\n", '{"input_ids": [1]', "\x00"]
)
def test_a_file_that_cannot_be_counted_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"model\.draft_vocab_data: .*bad\.jsonl"):
        most_frequent(str(file), 1, EVERY, [])
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read"):
        most_frequent(str(tmp_path / "none.jsonl"), 1, EVERY, [])


def test_size_and_data_go_together() -> None:
    with pytest.raises(UsageError, match="draft_vocab_data: None is not legal"):
        ModelConfig(draft_vocab_size=4)
    with pytest.raises(UsageError, match="draft_vocab_size: None is not legal"):
        ModelConfig(draft_vocab_data="rows.jsonl")
