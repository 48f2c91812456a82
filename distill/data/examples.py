"""Training examples: exact token ids, and which of them are supervised."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from decode.errors import UsageError
from distill.data.encode import Encoded, encode_row
from distill.data.questions import check_ids, encode_questions
from distill.data.report import DataReport
from distill.data.rows import BadRow, Row, read_rows

OnBadRow = Literal["error", "skip"]


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
    advantages: list[float] | None = None
    """For each token, how much better than expected it was: the policy gradient's factor; None: no policy gradient."""

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


class ExampleMaker:
    """Makes an example of each row, cut to its first `max_length` tokens."""

    def __init__(self, tokenizer: Any, max_length: int, on_bad_row: OnBadRow, vocab_size: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.on_bad_row, self.vocab_size = on_bad_row, vocab_size

    def make(self, row: Row | BadRow, report: DataReport) -> Example | None:
        """The row's example; None, and the reason counted in `report`, where nothing supervised is left of it.

        Raises UsageError for a bad row unless `on_bad_row` is "skip", and for a token id that the model has no row for.
        """
        report.num_rows += 1
        found = encode_row(row, self.tokenizer)
        if isinstance(found, BadRow):
            if self.on_bad_row == "error":
                raise UsageError(f"{found.source}: {found.reason}")
            report.bad_rows.append(found)
            return None
        check_ids(found.ids, self.tokenizer, self.vocab_size, row.source)
        return self._cut(found, row.source, report)

    def _cut(self, found: Encoded, source: str, report: DataReport) -> Example | None:
        size = self.max_length
        weights = None if found.weights is None else found.weights[:size]
        example = Example(found.ids[:size], found.mask[:size], source, weights)
        if not example.total_weight:
            report.dropped[self._why_dropped(found, example)] += 1
            return None
        report.num_truncated += len(found.ids) > size
        report.num_cut_tokens += max(0, len(found.ids) - size)
        report.num_rewritten += found.num_rewritten
        return example

    def _why_dropped(self, found: Encoded, example: Example) -> str:
        if example.num_supervised:
            return "every supervised token has weight 0"
        if any(found.mask[1:]):
            return f"no supervised token within max_length {self.max_length}"
        return "no supervised token"


def load_examples(
    paths: Sequence[str], tokenizer: Any, max_length: int, on_bad_row: OnBadRow, vocab_size: int
) -> tuple[list[Example], DataReport]:
    """The examples of all files, in order, cut to their first `max_length` tokens.

    Raises UsageError for a file that cannot be read, for what `ExampleMaker.make` refuses, and when no example is left.
    """
    maker, report = ExampleMaker(tokenizer, max_length, on_bad_row, vocab_size), DataReport()
    made = (maker.make(row, report) for path in paths for row in read_rows(path))
    examples = [example for example in made if example is not None]
    count(report, examples)
    if not examples:
        raise UsageError(f"{', '.join(paths)}: no example is left; {'; '.join(report.losses())}")
    return examples, report


def count(report: DataReport, examples: Sequence[Example]) -> None:
    """Take the report's totals from the examples that are kept."""
    report.count([len(example.input_ids) for example in examples], sum(example.num_supervised for example in examples))


def load_prompts(path: str, tokenizer: Any, limit: int | None, vocab_size: int) -> list[list[int]]:
    """Encoded prompts of the first `limit` rows, as generate encodes them. Raises UsageError for a bad row."""
    found = encode_questions(islice(read_rows(path), limit), tokenizer, None, vocab_size)
    if found.bad_rows:
        raise UsageError(f"{found.bad_rows[0].source}: {found.bad_rows[0].reason}")
    return [question.ids for question in found.questions]
