"""The target answers prompts: the plain law, exact ids and masks, every input row accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from decode.config import ModelConfig, SamplingConfig
from decode.errors import UsageError
from decode.prompts import encode_prompt
from distill.answering import answer_batch, left_pad
from distill.config import GenerateConfig
from distill.data.examples import load_examples
from distill.data.rows import Row, read_rows
from distill.generate import GenerateReport, answer, generate
from tests.fixtures import (
    FAMILIES,
    byte_tokenizer,
    greedy_reference,
    loaded,
    random_prompt,
    tiny_llama,
)
from tests.tables import chi_square_p

GREEDY = SamplingConfig()
PLAIN = SamplingConfig(temperature=1.0)
HOSTILE = GenerationConfig(
    do_sample=True, top_k=2, temperature=0.1, repetition_penalty=3.0, min_new_tokens=5, no_repeat_ngram_size=2
)


def wide_constant_law(probs: torch.Tensor, eos: int | None = None) -> Any:
    """A model over any number of ids whose law is `probs` [V] whatever the context."""
    model = tiny_llama(vocab_size=len(probs))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = probs.double().log() * (1 / 32 + model.config.rms_norm_eps) ** 0.5
    model.generation_config = GenerationConfig(**{**HOSTILE.to_diff_dict(), "eos_token_id": eos})
    return model


def test_t31_answers_are_drawn_from_the_plain_law_whatever_the_models_own_settings() -> None:
    law = torch.linspace(1, 12, 64, dtype=torch.float64)
    law /= law.sum()
    model = wide_constant_law(law)
    own = model.generation_config
    answers = answer_batch(loaded(model), [[1], [1, 2, 3]] * 100, PLAIN, 25, seed=1)
    counts = torch.tensor([token for ids in answers for token in ids]).bincount(minlength=64)
    assert int(counts.sum()) == 5000 and bool((counts > 0).all())
    assert chi_square_p(counts, law) > 1e-4
    assert model.generation_config is own
    hot = answer_batch(loaded(model), [[1]] * 100, SamplingConfig(temperature=2.0), 25, seed=1)
    flat = torch.tensor([token for ids in hot for token in ids]).bincount(minlength=64)
    assert chi_square_p(flat, law.sqrt() / law.sqrt().sum()) > 1e-4 > chi_square_p(flat, law)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(1.0, top_k=5), SamplingConfig(1.0, top_p=0.3), SamplingConfig(1.0, min_p=0.7)]
)
def test_t31_filters_that_are_asked_for_are_honoured(sampling: SamplingConfig) -> None:
    law = torch.linspace(1, 12, 64, dtype=torch.float64)
    answers = answer_batch(loaded(wide_constant_law(law / law.sum())), [[1]] * 40, sampling, 10, seed=1)
    assert min(token for ids in answers for token in ids) > 25


def test_t31_t08_rows_end_at_the_first_end_of_text_id_of_the_set() -> None:
    law = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64)
    model = wide_constant_law(law, eos=2)
    model.generation_config.eos_token_id = [2, 3]
    answers = answer_batch(loaded(model), [[1]] * 500, PLAIN, 30, seed=3)
    for ids in answers:
        assert not {2, 3} & set(ids[:-1])
        assert ids[-1] in (2, 3) or len(ids) == 30
    # lengths are geometric with rate .4: the mean is 2.5 with a deviation of .087
    assert abs(sum(map(len, answers)) / 500 - 2.5) < 0.4


@pytest.mark.parametrize("family", FAMILIES)
def test_e02_t08_padding_on_the_left_changes_no_answer(family: str) -> None:
    model = FAMILIES[family]()
    prompts = [random_prompt(length, seed=length) for length in (20, 3, 1, 11)]
    prompts[1][0] = prompts[3][5] = 7  # the id that is padded with, inside prompts
    model.generation_config.eos_token_id = 7
    answers = answer_batch(loaded(model), prompts, GREEDY, 12, seed=0)
    assert answers == [greedy_reference(model, prompt, 12, eos=(7,)) for prompt in prompts]


def test_left_pad_masks_by_length() -> None:
    ids, mask = left_pad([[5, 5], [5, 6, 7]], pad_id=5)
    assert ids.tolist() == [[5, 5, 5], [5, 6, 7]] and mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_global_random_state_is_left_as_it_was_and_draws_depend_on_the_seed_only() -> None:
    target = loaded(tiny_llama())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = answer_batch(target, [[1], [2, 3]], PLAIN, 10, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert answer_batch(target, [[1], [2, 3]], PLAIN, 10, seed=1) == first
    assert answer_batch(target, [[1], [2, 3]], PLAIN, 10, seed=2) != first


def run(
    tmp_path: Path, lines: list[Any], tokenizer: Any = None, **extra: Any
) -> tuple[list[dict[str, Any]], GenerateReport]:
    """Answers to an input of `lines`, each a row or raw text, and the report."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    config = GenerateConfig(
        **{"target": "tiny", "prompts": str(source), "output": str(tmp_path / "out" / "a.jsonl"), "max_new_tokens": 6,
           "batch_size": 3, "sampling": PLAIN, **extra}
    )  # fmt: skip
    target = loaded(tiny_llama(vocab_size=259), tokenizer=tokenizer or byte_tokenizer())
    report = answer(list(read_rows(config.prompts))[: config.limit], target, config)
    return [row.fields for row in read_rows(config.output) if isinstance(row, Row)], report


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
FORMATS: list[Any] = [
    {"prompt": "abc"},
    {"prompt": "abc", "completion": "d"},
    {"text": "abc", "extra": [1]},
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"input_ids": [9, 8, 7], "mask": [0, 0, 1], "prompt": "x"},
]


def test_d52_every_format_is_answered_through_the_template_with_exact_ids(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(add_bos=True)
    rows, report = run(tmp_path, FORMATS, tokenizer)
    asked = [encode_prompt(tokenizer, "abc")] * 3 + [encode_prompt(tokenizer, CHAT[:1])] * 2 + [[9, 8]]
    assert [row["row"] for row in rows] == list(range(6))
    for row, ids in zip(rows, asked, strict=True):
        answered = row["input_ids"][len(ids) :]
        assert row["input_ids"][: len(ids)] == ids
        assert row["mask"] == [0] * len(ids) + [1] * len(answered) and answered
        assert row["completion"] == tokenizer.decode(answered, skip_special_tokens=True)
        assert row["finish_reason"] == ("stop" if answered[-1] == tokenizer.eos_token_id else "length")
    assert rows[0]["prompt"] == "abc" and rows[3]["messages"] == CHAT[:1] and rows[5]["prompt"] == "x"
    assert (report.num_rows, report.num_written, report.num_errors, report.num_skipped) == (6, 6, 0, 0)
    assert report.num_tokens == sum(sum(row["mask"]) for row in rows)


def test_a06_bad_rows_are_listed_and_every_row_is_accounted_for(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        "",
        "broken",
        {"prompt": "x" * 200},
        {"other": 1},
        {"messages": [CHAT[1]]},
        {"prompt": "b"},
    ]
    rows, report = run(tmp_path, lines, max_prompt_tokens=100)
    assert [row["row"] for row in rows] == [0, 5]
    assert (report.num_rows, report.num_written, report.num_errors, report.num_skipped) == (6, 2, 3, 1)
    assert report.skipped == {"the prompt is longer than 100 tokens": 1}
    assert report.errors_output == str(tmp_path / "out" / "a.errors.jsonl")
    bad = [json.loads(line) for line in Path(report.errors_output).read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in bad] == [(str(tmp_path / "in.jsonl"), n) for n in (3, 5, 6)]
    assert all(set(entry) == {"file", "line", "reason"} for entry in bad) and "broken" not in str(bad)


def test_a08_unusual_line_ends_come_back_unchanged(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d\u000ce é 🎈"
    rows, report = run(tmp_path, [{"prompt": odd}])
    assert rows[0]["prompt"] == odd
    raw = Path(report.output).read_text(encoding="utf-8")
    assert len(raw.splitlines()) == 1  # careless readers see one row too
    (example,), _ = load_examples([report.output], byte_tokenizer(), 500, "error", 259)
    assert example.input_ids == rows[0]["input_ids"] and example.num_supervised == sum(rows[0]["mask"])


def test_limit_takes_the_first_rows_of_the_input(tmp_path: Path) -> None:
    rows, report = run(tmp_path, ["broken", {"prompt": "a"}, {"prompt": "b"}], limit=2)
    assert [row["row"] for row in rows] == [1] and report.num_rows == 2


def test_an_input_of_which_nothing_can_be_answered_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"in\.jsonl:1: none of the needed columns has a value"):
        run(tmp_path, [{"other": 1}])
    with pytest.raises(UsageError, match="the prompt is longer than 5 tokens"):
        run(tmp_path, [{"prompt": "abc"}], max_prompt_tokens=5)


def test_prompts_and_answers_have_to_fit_in_the_context(tmp_path: Path) -> None:
    rows, report = run(tmp_path, [{"prompt": "x" * 60}, {"prompt": "y" * 220}], max_new_tokens=100)
    assert len(rows) == 1 and report.skipped == {"the prompt is longer than 156 tokens": 1}
    with pytest.raises(
        UsageError, match="max_new_tokens: 256 leaves no room for a prompt in the target's context of 256"
    ):
        run(tmp_path, [{"prompt": "x"}], max_new_tokens=256)


def test_a19_ids_that_the_target_has_no_row_for_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UsageError, match=r"in\.jsonl:1: token id 259 \('<new>'\)"):
        run(tmp_path, [{"prompt": "a<new>"}], tokenizer)


def test_a_backend_that_cannot_serve_the_target_falls_back_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [{"prompt": "a"}], model=ModelConfig(backend="prepacked"))  # the fixture is fp64
    assert "backend prepacked cannot serve" in caplog.text


def test_files_are_looked_at_before_the_target_is_loaded(tmp_path: Path) -> None:
    config = GenerateConfig("no/such/target/anywhere", str(tmp_path / "none.jsonl"), str(tmp_path / "a.jsonl"))
    with pytest.raises(UsageError, match=r"none\.jsonl: no such file or folder"):
        generate(config)
