"""Examples from rows: what is supervised, what is cut, what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decode.errors import UsageError
from decode.prompts import encode_prompt
from distill.data.examples import Example, load_examples, load_prompts
from distill.data.report import DataReport
from tests.fixtures import byte_tokenizer

USER = {"role": "user", "content": "hi there"}
ANSWER = {"role": "assistant", "content": "ho"}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(
    path: Path, rows: Sequence[dict[str, Any]], tokenizer: Any = None, max_length: int = 500, skip: bool = False
) -> tuple[list[Example], DataReport]:
    name = write(path / "rows.jsonl", rows)
    return load_examples([name], tokenizer or byte_tokenizer(), max_length, "skip" if skip else "error", 259)


def supervised_text(example: Example, tokenizer: Any) -> str:
    return tokenizer.decode([i for i, m in zip(example.input_ids, example.mask, strict=True) if m])


def test_chats_without_an_answer_and_prompts_without_completion_are_bad_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=":1: messages: there is no assistant turn"):
        load(tmp_path, [{"messages": [USER]}])
    with pytest.raises(UsageError, match=":1: prompt: there is no completion beside it"):
        load(tmp_path, [{"prompt": "a"}])
    with pytest.raises(UsageError, match=":1: messages: the target's tokenizer has no chat template"):
        load(tmp_path, [{"messages": [USER, ANSWER]}], byte_tokenizer(None))


BOS_TEMPLATE = "{{ '<|im_start|>' }}{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", [None, BOS_TEMPLATE])
def test_a03_d52_one_bos_where_it_is_wanted_and_the_same_ids_as_generate(
    tmp_path: Path, add_bos: bool, template: str | None
) -> None:
    tokenizer = byte_tokenizer(template, add_bos)
    rows = [{"prompt": "abc", "completion": "de"}, {"text": "abc"}]
    if template:
        rows.append({"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]})
    examples, _ = load(tmp_path, rows, tokenizer)
    bos = tokenizer.bos_token_id
    wants = [add_bos or template is not None, add_bos, template is not None]
    assert [example.input_ids.count(bos) for example in examples] == [int(w) for w in wants[: len(rows)]]
    assert examples[0].prompt_ids == encode_prompt(tokenizer, "abc")
    asked = load_prompts(write(tmp_path / "p.jsonl", rows[:1]), tokenizer, None, 259)
    assert asked == [examples[0].prompt_ids]
    if template:
        assert examples[2] == Example(examples[0].input_ids, examples[0].mask, examples[2].source)


def test_text_is_supervised_but_for_its_first_token(tmp_path: Path) -> None:
    (example,), report = load(tmp_path, [{"text": "abc"}])
    assert example.mask == [False, True, True] and example.num_supervised == 2
    assert (report.num_tokens, report.num_supervised) == (3, 2)


def test_prompt_and_completion(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (example,), _ = load(tmp_path, [{"prompt": "abc", "completion": "de"}], tokenizer)
    assert supervised_text(example, tokenizer) == "de<|im_end|>"


def test_generated_rows_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [{"row": 0, "messages": [USER], "completion": "x", "input_ids": [9, 7, 258, 258], "mask": [0, 0, 1, 1]}]
    examples, _ = load(tmp_path, rows)
    assert examples == [Example([9, 7, 258, 258], [False, False, True, True], f"{tmp_path}/rows.jsonl:1")]
    assert load_prompts(f"{tmp_path}/rows.jsonl", byte_tokenizer(), None, 259) == [[9, 7]]


def test_weights_beside_the_mask_say_how_much_a_token_counts(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3, 4], "mask": [0, 1, 0, 1]}
    (weighted, plain), _ = load(tmp_path, [row | {"weights": [9, 2, 9, 0.5]}, row])
    assert (weighted.weights, weighted.total_weight) == ([9.0, 2.0, 9.0, 0.5], 2.5)
    assert (plain.weights, plain.total_weight) == (None, 2.0)
    (cut,), _ = load(tmp_path, [row | {"weights": [9, 2, 9, 0.5]}], max_length=3)
    assert cut.weights == [9.0, 2.0, 9.0]
    _, report = load(tmp_path, [row | {"weights": [1, 0, 1, 0]}, row])
    assert report.dropped == {"every supervised token has weight 0": 1}
    for wrong in ([1, 1, 1], [1, 1, 1, -1], [1, 1, 1, "a"], 4, [1, 1, 1, True]):
        with pytest.raises(UsageError, match=":1: weights: "):
            load(tmp_path, [row | {"weights": wrong}])


def test_the_report_tells_lengths_shares_and_reasons(tmp_path: Path) -> None:
    rows = [lengths_row(2, n) for n in range(1, 11)] + [lengths_row(10, 20), lengths_row(40, 5), {"nothing": 1}]
    _, report = load(tmp_path, rows, max_length=16, skip=True)
    assert report.lines()[:5] == [
        "11 examples of 13 rows: 91 tokens, 61 supervised (67.0 %)",
        "tokens of an example: median 8, 90 % have up to 12, the longest 16",
        "1 examples (7.7 % of the rows) cut to max_length, 14 tokens left out",
        "1 rows (7.7 %) dropped: no supervised token within max_length 16",
        f"1 bad rows (7.7 %) skipped, the first {tmp_path}/rows.jsonl:13: none of the needed columns has a value; "
        "expected input_ids+mask, messages, conversations, prompt+completion, prompt or text",
    ]


def lengths_row(prompt: int, answer: int) -> dict[str, Any]:
    return {"input_ids": [5] * (prompt + answer), "mask": [0] * prompt + [1] * answer}


def test_a04_rows_without_room_for_an_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [lengths_row(40, 5), lengths_row(10, 20), lengths_row(3, 3)]
    examples, report = load(tmp_path, rows, max_length=16)
    assert [(len(e.input_ids), e.num_supervised) for e in examples] == [(16, 6), (6, 3)]
    assert report.dropped == {"no supervised token within max_length 16": 1}
    assert (report.num_rows, report.num_examples, report.num_truncated) == (3, 2, 1)
    with pytest.raises(
        UsageError, match=r"no example is left; 1 rows \(100.0 %\) dropped: no supervised token within max_length 16"
    ):
        load(tmp_path, rows[:1], max_length=16)


def test_a05_edges_of_the_cut(tmp_path: Path) -> None:
    sizes = [(0, 1), (1, 1), (15, 1), (16, 1), (1, 40), (0, 40), (40, 40), (3, 0)]
    examples, report = load(tmp_path, [lengths_row(*size) for size in sizes], max_length=16)
    assert all(len(e.input_ids) <= 16 and e.num_supervised >= 1 for e in examples)
    assert [e.num_supervised for e in examples] == [1, 1, 15, 15]
    assert report.dropped == {"no supervised token": 2, "no supervised token within max_length 16": 2}
    assert report.num_examples + report.num_dropped == report.num_rows


def test_a06_bad_row_stops_or_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\nnonsense\n{"text": "two"}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl:3: not valid JSON"):
        load_examples([str(path)], byte_tokenizer(), 16, "error", 259)
    examples, report = load_examples([str(path)], byte_tokenizer(), 16, "skip", 259)
    assert [e.source for e in examples] == [f"{path}:1", f"{path}:4"]
    assert [bad.line for bad in report.bad_rows] == [3]
    assert "1 bad rows (33.3 %) skipped, the first" in report.lines()[-1]


def test_a09_files_with_other_columns_are_joined(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", [{"text": "ab"}]), write(tmp_path / "b.jsonl", [{"text": "cd", "source": 1}])]
    examples, _ = load_examples(paths, byte_tokenizer(), 16, "error", 259)
    assert [e.source for e in examples] == [f"{paths[0]}:1", f"{paths[1]}:1"]


def test_a12_odd_chats_are_skipped_and_no_row_without_loss_gets_through(tmp_path: Path) -> None:
    good = {"messages": [USER, ANSWER]}
    odd = [
        {"messages": m}
        for m in ([ANSWER, USER], [USER], [{"role": "x", "content": "y"}], [USER, {"role": "assistant"}])
    ]
    examples, report = load(tmp_path, [good, *odd, good], skip=True)
    assert len(examples) == 2 and len(report.bad_rows) == 4
    assert all(e.num_supervised for e in examples)


@pytest.mark.parametrize("row", [{"text": "a<new>b"}, {"prompt": "<new>", "completion": "b"}])
def test_a19_ids_beyond_the_model_are_refused_with_both_sizes(tmp_path: Path, row: dict[str, str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(
        UsageError, match=r":1: token id 259 \('<new>'\).*has 260 tokens, the model's vocab_size is 259"
    ):
        load(tmp_path, [row], tokenizer, skip=True)
    with pytest.raises(UsageError, match="token id 259"):
        load_prompts(str(tmp_path / "rows.jsonl"), tokenizer, None, 259) if "text" in row else load(
            tmp_path, [row], tokenizer
        )
    with pytest.raises(UsageError, match="token id 300"):
        load(tmp_path, [{"input_ids": [1, 300], "mask": [0, 1]}])


def test_load_prompts_takes_the_first_rows_and_names_a_bad_one(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"text": "b"}, {"messages": []}])
    assert load_prompts(path, byte_tokenizer(None), 2, 259) == [encode_prompt(byte_tokenizer(None), t) for t in "ab"]
    with pytest.raises(UsageError, match=r"p\.jsonl:3: messages: expected a list"):
        load_prompts(path, byte_tokenizer(), None, 259)
