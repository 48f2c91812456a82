"""Reads what decoding logged of real traffic, a line a round, and makes training examples of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode.draft import Round
from decode.errors import UsageError, first_line
from distill.data.examples import Example
from distill.on_policy.texts import replayed

EXPECTED = "a trace written by draftsmith run --trace"


def read_traces(path: str, weight: float, max_length: int, vocab_size: int) -> list[Example]:
    """The texts of a file of traces, cut to `max_length` tokens, with weights at rejected positions.

    A line with prompt_ids begins a text; so files of several texts may be joined. Raises UsageError naming file and
    line for what is no trace, and for a file without any text that is left.
    """
    texts = [
        replayed(prompt, rounds, weight, max_length, source) for source, prompt, rounds in _texts(path, vocab_size)
    ]
    texts = [text for text in texts if text.num_supervised]
    if not texts:
        raise UsageError(f"replay.log: {path} has no text with a new token within data.max_length {max_length}")
    return texts


def _texts(path: str, vocab_size: int) -> Iterator[tuple[str, list[int], list[Round]]]:
    prompt: list[int] | None = None
    rounds: list[Round] = []
    source = ""
    for place, row in _rows(path):
        if "prompt_ids" in row:
            if prompt is not None:
                yield source, prompt, rounds
            prompt, rounds, source = _ids(row["prompt_ids"], place, "prompt_ids", vocab_size), [], place
        if prompt is None:
            raise UsageError(
                f"replay.log: {place}: it has no prompt_ids, nor has a line before it; expected {EXPECTED}"
            )
        rounds.append(_round(row, place, len(prompt) + sum(len(done.emitted) for done in rounds), vocab_size))
    if prompt is not None:
        yield source, prompt, rounds


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"replay.log: {path} cannot be read: {first_line(error)}") from error
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"replay.log: {place}: it is no JSON; expected {EXPECTED}") from error
        if not isinstance(row, dict):
            raise UsageError(f"replay.log: {place}: it is no object; expected {EXPECTED}")
        yield place, row


def _round(row: dict[str, Any], place: str, length: int, vocab_size: int) -> Round:
    drafted, emitted = (_ids(row.get(key), place, key, vocab_size) for key in ("drafted", "emitted"))
    accepted: Any = row.get("num_accepted")
    is_count = type(accepted) is int and 0 <= accepted <= min(len(drafted), len(emitted))
    if not is_count or len(emitted) > accepted + 1 or drafted[:accepted] != emitted[:accepted]:
        raise UsageError(f"replay.log: {place}: drafted, num_accepted and emitted make no round; expected {EXPECTED}")
    if row.get("context_length") != length:
        raise UsageError(
            f"replay.log: {place}: context_length is {row.get('context_length')!r}; {length} tokens come before it"
        )
    return Round(length, drafted, accepted, emitted)


def _ids(value: Any, place: str, key: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < vocab_size for i in value):
        raise UsageError(f"replay.log: {place}: {key} is not a list of the target's token ids, below {vocab_size}")
    return value
