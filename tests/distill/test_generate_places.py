"""generate writes to its own files only: never over the prompts, nor over what it did not write itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode.config import SamplingConfig
from decode.errors import DraftsmithError, UsageError
from distill.config import GenerateConfig
from distill.data.rows import read_rows
from distill.generate import answer, generate
from tests.distill.test_generate_resume import run, settings
from tests.fixtures import byte_tokenizer, loaded, tiny_llama

NOWHERE = "no/such/target/anywhere"  # whatever is refused with it was refused before a model was looked for


@pytest.mark.parametrize("prompts", ["a.errors.jsonl", "a.jsonl", "link.jsonl", "hard.jsonl"])
def test_an_output_that_would_write_over_its_prompts_is_refused(tmp_path: Path, prompts: str) -> None:
    text = '{"prompt": "mine"}\n'
    (tmp_path / "a.errors.jsonl").write_text(text)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.errors.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match=r"output: .*a\.jsonl would write over its own prompts"):
        generate(GenerateConfig(NOWHERE, str(tmp_path / prompts), str(tmp_path / "a.jsonl")))
    assert all(file.read_text() == text for file in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.errors.jsonl", "a.jsonl.meta.json"])
@pytest.mark.parametrize("content", ["mine", "[]", "{}"])
def test_files_beside_the_output_that_generate_did_not_write_are_refused(
    tmp_path: Path, name: str, content: str
) -> None:
    config = settings(tmp_path)
    (tmp_path / name).write_text(content)
    for attempt in (lambda: generate(replace(config, target=NOWHERE)), lambda: run(config)):
        with pytest.raises(UsageError, match=rf"{name} was not written for a\.jsonl by generate"):
            attempt()
    assert (tmp_path / name).read_text() == content and not (tmp_path / "a.jsonl").exists()


def test_a_list_of_bad_rows_goes_when_none_is_bad_and_a_strangers_stays(tmp_path: Path) -> None:
    config, errors = settings(tmp_path), tmp_path / "a.errors.jsonl"
    run(replace(config, limit=2))
    assert not errors.exists()
    errors.write_text("mine")
    with pytest.raises(UsageError, match=r"a\.errors\.jsonl was not written for"):
        run(config)
    assert errors.read_text() == "mine"
    errors.unlink()
    run(config)
    assert len(errors.read_text().splitlines()) == 2
    assert json.loads((tmp_path / "a.jsonl.meta.json").read_text())["errors_output"] == errors.name
    (tmp_path / "a.jsonl").unlink()  # made anew: the list that lies there is still ours
    run(replace(config, limit=2))
    assert not errors.exists()
    errors.write_text("mine")
    with pytest.raises(UsageError, match=r"a\.errors\.jsonl was not written for"):
        run(replace(config, limit=2))


@pytest.mark.parametrize("content", ["[]", "3", "{}", "[" * 100_000, '{"num_prompts": "many"}'])
def test_a_sidecar_of_another_shape_is_refused_like_a_missing_one(tmp_path: Path, content: str) -> None:
    config = replace(settings(tmp_path), limit=2)
    run(config)
    (tmp_path / "a.jsonl.meta.json").write_text(content)
    with pytest.raises(UsageError, match=r"there is no a\.jsonl\.meta\.json that tells how it was made"):
        run(config)


def test_an_output_that_cannot_be_made_is_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    config = replace(settings(tmp_path), target=NOWHERE)
    for output in (
        tmp_path / "in.jsonl" / "a.jsonl",
        tmp_path / "in.jsonl" / "b" / "a.jsonl",
        Path("/proc/no/a.jsonl"),
    ):
        with pytest.raises(UsageError, match=r"output: .* cannot be written"):
            generate(replace(config, output=str(output)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_of_nan_weights_answers_nothing(tmp_path: Path, temperature: float) -> None:
    config = replace(settings(tmp_path), sampling=SamplingConfig(temperature=temperature))
    model = tiny_llama(vocab_size=259)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(DraftsmithError, match="target: its logits are NaN or infinite; its weights or dtype are at"):
        answer(list(read_rows(config.prompts)), loaded(model, tokenizer=byte_tokenizer()), config)
    assert not Path(config.output).exists()


@pytest.mark.parametrize("temperature", [1e-20, 1e-8])
def test_tiny_temperatures_answer_greedily(tmp_path: Path, temperature: float) -> None:
    for name, value in (("greedy", 0.0), ("tiny", temperature)):
        (tmp_path / name).mkdir()
        run(replace(settings(tmp_path / name), sampling=SamplingConfig(temperature=value)))
    assert (tmp_path / "greedy" / "a.jsonl").read_bytes() == (tmp_path / "tiny" / "a.jsonl").read_bytes()
