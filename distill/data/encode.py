"""Turns a row of any format into token ids and a mask. Knows nothing of lengths or of what is kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

from decode.prompts import encode_text
from distill.data.chat import encode_answers, encode_completion
from distill.data.formats import (
    RowError,
    check_text,
    completion_of,
    ids_and_mask,
    kind_of,
    messages_of,
    prompt_of,
    weights_of,
)
from distill.data.rows import BadRow, Row


class Encoded(NamedTuple):
    """One row in tokens."""

    ids: list[int]
    mask: list[bool]
    """For each token, whether it is supervised."""
    weights: list[float] | None = None
    """For each token, how much it counts; None: 1 for all."""
    num_rewritten: int = 0
    """Answers that are not supervised because the template shortens them in the middle of a chat."""


def encode_row(row: Row | BadRow, tokenizer: Any) -> Encoded | BadRow:
    """Ids and mask of a row, by the column that it is read by; a BadRow, with the reason, where that cannot be."""
    if isinstance(row, BadRow):
        return row
    try:
        return ENCODERS[kind_of(row)](row, tokenizer)
    except RowError as error:
        return BadRow(row.file, row.line, row.index, str(error))


def _encode_ids(row: Row, tokenizer: Any) -> Encoded:
    return Encoded(*ids_and_mask(row), weights_of(row))


def _encode_messages(row: Row, tokenizer: Any) -> Encoded:
    found = encode_answers(tokenizer, messages_of(row, kind_of(row)))
    return Encoded(found.ids, found.mask, num_rewritten=found.num_rewritten)


def _encode_prompt(row: Row, tokenizer: Any) -> Encoded:
    completion = completion_of(row)
    if completion is None:
        raise RowError("prompt: there is no completion beside it; let the target answer it first (generate)")
    return Encoded(*encode_completion(tokenizer, prompt_of(row), completion))


def _encode_text(row: Row, tokenizer: Any) -> Encoded:
    ids = encode_text(tokenizer, check_text(row.fields["text"], "text"))
    return Encoded(ids, [False, *[True] * (len(ids) - 1)])


ENCODERS: dict[str, Callable[[Row, Any], Encoded]] = {
    "input_ids": _encode_ids,
    "messages": _encode_messages,
    "conversations": _encode_messages,
    "prompt": _encode_prompt,
    "text": _encode_text,
}
