"""Fingerprints of what a run and a cached teacher rest on: weights, tokenizer, examples, ids."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from distill.data.examples import Example


def ids_sha256(rows: Iterable[Iterable[int]]) -> str:
    """sha256 over rows of token ids, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", row))
        digest.update(b"end")
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """sha256 of how text becomes ids: pieces, merges, normaliser, special tokens; the chat template is not in it.

    What a call may leave behind in a tokenizer, padding and truncation, is left out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python: its pieces and its settings
        found: dict[str, Any] = {"vocab": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    else:
        found = json.loads(backend.to_str())
        found = {name: value for name, value in found.items() if name not in ("padding", "truncation")}
    found["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _json_sha256(found)


def chat_template_sha256(tokenizer: Any) -> str | None:
    """sha256 of the chat template, or of all where there are several; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return _json_sha256(template) if template else None


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def content_of(input_ids: Iterable[int], mask: Iterable[bool]) -> bytes:
    """16 bytes that tell one example's ids and mask from all others'."""
    digest = hashlib.sha256(array("q", input_ids))
    digest.update(bytes(mask))
    return digest.digest()[:16]


def examples_sha256(examples: Sequence[Example]) -> str:
    """sha256 over the ids and masks of all examples, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(array("q", example.input_ids))
        digest.update(bytes(example.mask))
        digest.update(b"end")
    return digest.hexdigest()
