"""Which column a row is read by, and odd chats."""

from typing import Any

import pytest

from distill.data.formats import RowError, completion_of, ids_and_mask, kind_of, messages_of, prompt_of
from distill.data.rows import Row

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}


def row(**fields: Any) -> Row:
    return Row(fields, "f.jsonl", 1, 0)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"prompt": "a", "text": "b"}, "prompt"),
        ({"text": "b", "source": 3}, "text"),
        ({"messages": None, "prompt": None, "text": "b"}, "text"),
        ({"input_ids": [1], "prompt": "a"}, "prompt"),
        ({"input_ids": [1], "mask": [1], "messages": [USER]}, "input_ids"),
        ({"conversations": [USER], "text": "b"}, "conversations"),
    ],
)
def test_a10_a_row_is_read_by_the_first_column_that_has_a_value(fields: dict[str, Any], kind: str) -> None:
    assert kind_of(row(**fields)) == kind


def test_a09_only_a_missing_needed_column_is_an_error() -> None:
    with pytest.raises(RowError, match=r"expected input_ids\+mask, messages"):
        kind_of(row(question="a"))


def test_prompts_of_every_format() -> None:
    assert prompt_of(row(prompt="a", completion="b")) == "a"
    assert prompt_of(row(text="a")) == "a"
    assert prompt_of(row(prompt=[USER])) == [USER]
    assert prompt_of(row(messages=[USER, ANSWER])) == [USER]
    assert prompt_of(row(messages=[USER, ANSWER, USER, ANSWER, ANSWER])) == [USER, ANSWER, USER]
    sharegpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    assert prompt_of(row(conversations=sharegpt)) == [{"role": "system", "content": "s"}, USER]
    assert messages_of(row(conversations=[USER, ANSWER]), "conversations") == [USER, ANSWER]


def test_completions() -> None:
    assert completion_of(row(prompt="a", completion="b")) == "b"
    assert completion_of(row(prompt=[USER], completion=[ANSWER])) == "ho"
    assert completion_of(row(prompt="a")) is None
    for wrong in (3, "", [USER], [ANSWER, ANSWER], [3]):
        with pytest.raises(RowError, match="completion"):
            completion_of(row(prompt="a", completion=wrong))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ANSWER, USER], "assistant turn comes before the first user turn"),
        ([{"role": "narrator", "content": "x"}], "role 'narrator' is not known; expected one of system"),
        ([{"role": ["user"], "content": "x"}], "is not known"),
        ([USER, {"role": "assistant", "content": ""}], r"messages\[1\].content: it is empty"),
        ([USER, {"role": "assistant", "content": " \n"}], "it is empty"),
        ([USER, {"role": "assistant", "content": None}], "expected text, found a value of type NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "expected text, found a value of type list"),
        ([{"role": "user"}], "expected text"),
        ([{"role": "system", "content": "x"}], "there is no user turn"),
        (["hi"], r"messages\[0\]: expected an object"),
        ([], "at least one message"),
        ("hi", "expected a list"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_a12_odd_chats_are_bad_rows_with_a_reason(messages: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        prompt_of(row(messages=messages))


def test_a12_two_user_turns_in_a_row_are_left_to_the_template() -> None:
    assert prompt_of(row(messages=[USER, USER])) == [USER, USER]


@pytest.mark.parametrize(
    ("ids", "mask"),
    [([1, 2], [1]), ([], []), ([1, "2"], [0, 1]), ([1, -2], [0, 1]), ([1, 2], [0, 2]), ([True, 2], [0, 1]), (3, [1])],
)
def test_malformed_ids_and_masks_are_refused(ids: Any, mask: Any) -> None:
    with pytest.raises(RowError, match=r"^(input_ids|mask): "):
        ids_and_mask(row(input_ids=ids, mask=mask))
