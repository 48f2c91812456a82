"""Training examples: exact token ids, and which of them are supervised."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from decode.errors import UsageError
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
)
from distill.data.questions import check_ids, encode_questions
from distill.data.rows import BadRow, Row, read_rows

OnBadRow = Literal["error", "skip"]
Encoded = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Example:
    """One document: prompt and completion."""

    input_ids: list[int]
    mask: list[bool]
    """For each token, whether it is supervised: generated, or an assistant's with its end-of-turn."""
    source: str
    """file:line, for messages."""
    weights: list[float] | None = None
    """For each token, how much its position counts in the loss; None: 1 for all."""

    @property
    def total_weight(self) -> float:
        """Sum over the supervised positions: what the loss is divided by."""
        if self.weights is None:
            return float(self.num_supervised)
        return sum(w for w, bit in zip(self.weights[1:], self.mask[1:], strict=True) if bit)

    @property
    def num_supervised(self) -> int:
        """Supervised positions: position t - 1 predicts token t, so the first token never counts."""
        return sum(self.mask[1:])

    @property
    def prompt_ids(self) -> list[int]:
        """The ids before the first supervised one."""
        return self.input_ids[: self.mask.index(True)] if True in self.mask else self.input_ids


@dataclass
class DataReport:
    """What became of every row: num_examples + num_dropped + len(bad_rows) = num_rows."""

    num_rows: int = 0
    num_examples: int = 0
    num_truncated: int = 0
    """Examples that were cut to max_length."""
    num_tokens: int = 0
    num_supervised: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """How many good rows were left out for each reason."""
    bad_rows: list[BadRow] = field(default_factory=list)

    @property
    def num_dropped(self) -> int:
        return self.dropped.total()

    def count(self, examples: Sequence[Example]) -> None:
        """Take the totals from the examples that are kept."""
        self.num_examples = len(examples)
        self.num_tokens = sum(len(example.input_ids) for example in examples)
        self.num_supervised = sum(example.num_supervised for example in examples)

    def lines(self) -> list[str]:
        """The report in words, a line for each thing worth telling."""
        told = [
            f"{self.num_examples} examples of {self.num_rows} rows: {self.num_tokens} tokens, "
            f"{self.num_supervised} supervised"
        ]
        if self.num_truncated:
            told.append(f"{self.num_truncated} examples cut to max_length")
        told += [f"{count} rows dropped: {reason}" for reason, count in self.dropped.items()]
        if self.bad_rows:
            first = self.bad_rows[0]
            told.append(f"{len(self.bad_rows)} bad rows skipped, the first {first.source}: {first.reason}")
        return told


def load_examples(
    paths: Sequence[str], tokenizer: Any, max_length: int, on_bad_row: OnBadRow, vocab_size: int
) -> tuple[list[Example], DataReport]:
    """The examples of all files, in order, cut to their first `max_length` tokens.

    Raises UsageError for a file that cannot be read, for a bad row unless `on_bad_row` is "skip", for a token id
    that the model has no row for, and when no example is left.
    """
    examples: list[Example] = []
    report = DataReport()
    for row in (row for path in paths for row in read_rows(path)):
        report.num_rows += 1
        found = _encode_row(row, tokenizer)
        if isinstance(found, BadRow):
            _note_bad(found, on_bad_row, report)
            continue
        check_ids(found[0], tokenizer, vocab_size, row.source)
        example = _cut(found, max_length, row.source, report)
        if example is not None:
            examples.append(example)
    report.count(examples)
    if not examples:
        raise UsageError(f"{', '.join(paths)}: no example is left; {'; '.join(report.lines()[1:])}")
    return examples, report


def load_prompts(path: str, tokenizer: Any, limit: int | None, vocab_size: int) -> list[list[int]]:
    """Encoded prompts of the first `limit` rows, as generate encodes them. Raises UsageError for a bad row."""
    found = encode_questions(islice(read_rows(path), limit), tokenizer, None, vocab_size)
    if found.bad_rows:
        raise UsageError(f"{found.bad_rows[0].source}: {found.bad_rows[0].reason}")
    return [question.ids for question in found.questions]


def _encode_row(row: Row | BadRow, tokenizer: Any) -> Encoded | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        return ENCODERS[kind_of(row)](row, tokenizer)
    except RowError as error:
        return BadRow(row.file, row.line, row.index, str(error))


def _encode_ids(row: Row, tokenizer: Any) -> Encoded:
    return ids_and_mask(row)


def _encode_messages(row: Row, tokenizer: Any) -> Encoded:
    return encode_answers(tokenizer, messages_of(row, kind_of(row)))


def _encode_prompt(row: Row, tokenizer: Any) -> Encoded:
    completion = completion_of(row)
    if completion is None:
        raise RowError("prompt: there is no completion beside it; let the target answer it first (generate)")
    return encode_completion(tokenizer, prompt_of(row), completion)


def _encode_text(row: Row, tokenizer: Any) -> Encoded:
    ids = encode_text(tokenizer, check_text(row.fields["text"], "text"))
    return ids, [False, *[True] * (len(ids) - 1)]


ENCODERS: dict[str, Callable[[Row, Any], Encoded]] = {
    "input_ids": _encode_ids,
    "messages": _encode_messages,
    "conversations": _encode_messages,
    "prompt": _encode_prompt,
    "text": _encode_text,
}


def _note_bad(row: BadRow, on_bad_row: OnBadRow, report: DataReport) -> None:
    if on_bad_row == "error":
        raise UsageError(f"{row.source}: {row.reason}")
    report.bad_rows.append(row)


def _cut(encoded: Encoded, max_length: int, source: str, report: DataReport) -> Example | None:
    """The example's first `max_length` tokens; None, and counted, where nothing supervised is left of it."""
    ids, mask = encoded
    example = Example(ids[:max_length], mask[:max_length], source)
    if example.num_supervised:
        report.num_truncated += len(ids) > max_length
        return example
    whole = any(mask[1:])
    reason = f"no supervised token within max_length {max_length}" if whole else "no supervised token"
    report.dropped[reason] += 1
    return None
