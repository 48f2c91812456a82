"""Turns input rows into encoded prompts for the target; sorts out bad rows and prompts that are too long."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from decode.errors import UsageError
from decode.prompts import encode_prompt
from distill.data.formats import RowError, ids_and_mask, kind_of, prompt_of
from distill.data.rows import BadRow, Row


@dataclass(frozen=True)
class Question:
    """One prompt, ready for the target."""

    index: int
    """Position of its row in the input, from 0."""
    asked: dict[str, Any]
    """The prompt as text or messages, by the name of its column; empty where the row gave token ids only."""
    ids: list[int]


@dataclass
class Questions:
    """What an input gives: every row is a question, a bad row, or counted under the reason why it was skipped."""

    questions: list[Question] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        return len(self.questions) + len(self.bad_rows) + self.skipped.total()

    def fingerprint(self, count: int) -> str:
        """sha256 of the first `count` encoded prompts and their places; the rows, template and limits decide it."""
        digest = hashlib.sha256()
        for question in self.questions[:count]:
            digest.update(f"{question.index}:{question.ids}\n".encode())
        return digest.hexdigest()


def encode_questions(
    rows: Iterable[Row | BadRow], tokenizer: Any, max_prompt_tokens: int | None, vocab_size: int
) -> Questions:
    """Encode each row's prompt through the chat template.

    Raises UsageError when the tokenizer yields an id that the model has no row for.
    """
    found = Questions()
    for row in rows:
        if isinstance(row, BadRow):
            found.bad_rows.append(row)
            continue
        try:
            asked, ids = _encode(row, tokenizer)
        except (RowError, UsageError) as error:
            found.bad_rows.append(BadRow(row.file, row.line, row.index, str(error).splitlines()[0]))
            continue
        check_ids(ids, tokenizer, vocab_size, row.source)
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            found.skipped[f"the prompt is longer than {max_prompt_tokens} tokens"] += 1
        else:
            found.questions.append(Question(row.index, asked, ids))
    return found


def _encode(row: Row, tokenizer: Any) -> tuple[dict[str, Any], list[int]]:
    """What was asked, by the name of its column, and its ids; exact ids are taken as they are."""
    asked: dict[str, Any]
    if kind_of(row) == "input_ids":
        ids, mask = ids_and_mask(row)
        asked = {key: row.fields[key] for key in ("messages", "prompt") if key in row.fields}
        return asked, ids[: mask.index(True)] if True in mask else ids
    prompt = prompt_of(row)
    asked = {"prompt" if isinstance(prompt, str) else "messages": prompt}
    return asked, encode_prompt(tokenizer, prompt)


def check_ids(ids: list[int], tokenizer: Any, vocab_size: int, source: str) -> None:
    """Raise UsageError when an id has no row in the model, naming id, token and both sizes."""
    worst = max(ids, default=0)
    if worst >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(worst) if worst < len(tokenizer) else None
        raise UsageError(
            f"{source}: token id {worst} ({token!r}) has no row in the model: the tokenizer has {len(tokenizer)} "
            f"tokens, the model's vocab_size is {vocab_size}; use the tokenizer that belongs to the model"
        )
