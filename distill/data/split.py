"""Training and validation examples that share no prompt; the same ones in every run and process."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode.errors import UsageError
from distill.config import DataConfig
from distill.data.examples import Example, ExampleMaker, count, load_examples
from distill.data.report import DataReport
from distill.data.stream import Place, Stream


@dataclass(frozen=True)
class Data:
    """The examples of a run and what became of the rows that they were read from."""

    train: list[Example]
    validation: list[Example]
    report: DataReport
    validation_report: DataReport | None
    """None where the validation examples were held out of the training rows."""
    stream: Stream | None = None
    """Where the training rows come from when they are streamed; `train` is empty then, `report` of the first buffer."""


def load_data(config: DataConfig, tokenizer: Any, vocab_size: int, seed: int = 0) -> Data:
    """Read both sides; of a stream, whose order depends on `seed`, the beginning.

    A training row whose prompt is a validation row's too is dropped and counted. Raises UsageError for what
    `load_examples` refuses, and where nothing is left on one side.
    """
    if config.streaming:
        return _load_streamed(config, tokenizer, vocab_size, seed)
    examples, report = load_examples(config.train, tokenizer, config.max_length, config.on_bad_row, vocab_size)
    if not config.validation:
        return Data(*split_examples(examples, config.validation_fraction), report, None)
    held_out, held_out_report = load_examples(
        config.validation, tokenizer, config.max_length, config.on_bad_row, vocab_size
    )
    train = drop_overlap(examples, held_out)
    if not train:
        raise UsageError("data.validation: its prompts are those of every training row; expected other rows")
    if len(train) < len(examples):
        report.dropped["the prompt is among the validation rows"] += len(examples) - len(train)
        count(report, train)
    return Data(train, held_out, report, held_out_report)


def _load_streamed(config: DataConfig, tokenizer: Any, vocab_size: int, seed: int) -> Data:
    """Open a stream, and read its first buffer and the validation rows.

    Where no validation rows are given, a row is held out by the hash of its prompt wherever it stands in the stream;
    those of the first buffer are kept and validated on. Raises UsageError where there is none.
    """
    maker = ExampleMaker(tokenizer, config.max_length, config.on_bad_row, vocab_size)
    held_out: list[Example] = []
    held_out_report = None
    if config.validation:
        held_out, held_out_report = load_examples(
            config.validation, tokenizer, config.max_length, config.on_bad_row, vocab_size
        )
    places = {_place(example) for example in held_out}

    def is_held_out(example: Example) -> bool:
        place = _place(example)
        return place in places if places else place < config.validation_fraction

    stream, report = Stream(config, maker, seed, is_held_out), DataReport()
    buffer = stream.read(Place(), report)
    count(report, buffer.examples)
    validation = held_out or buffer.held_out
    if not validation:
        raise UsageError(
            f"data.validation_fraction: {config.validation_fraction} holds out none of the first "
            f"{report.num_rows} rows; raise it or data.shuffle_buffer, or give data.validation"
        )
    return Data([], validation, report, held_out_report, stream)


def split_examples(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(training, validation): about `fraction` of the prompts are held out, one at least.

    Which ones depends on each prompt's ids alone: not on seed, order or other rows. Rows that share a prompt stay
    together. Raises UsageError where all rows share one prompt.
    """
    places = [_place(example) for example in examples]
    distinct = sorted(set(places))
    if len(distinct) < 2:
        raise UsageError(
            "data.validation_fraction: all rows share one prompt, so none can be held out; give data.validation"
        )
    border = min(max(fraction, distinct[0]), distinct[-2])  # one prompt at least on either side
    train = [example for example, place in zip(examples, places, strict=True) if place > border]
    return train, [example for example, place in zip(examples, places, strict=True) if place <= border]


def drop_overlap(train: Sequence[Example], validation: Sequence[Example]) -> list[Example]:
    """The training examples whose prompt is not among the validation examples' prompts."""
    held_out = {_place(example) for example in validation}
    return [example for example in train if _place(example) not in held_out]


def _place(example: Example) -> float:
    """A number in [0, 1) from the prompt's ids; from all ids where the prompt is a lone beginning-of-text token."""
    ids = example.prompt_ids if len(example.prompt_ids) > 1 else example.input_ids
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
