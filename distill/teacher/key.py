"""The key of a teacher cache: everything that its laws depend on, and in words how two keys differ."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from distill.config import TeacherConfig
from distill.teacher.fingerprint import chat_template_sha256, ids_sha256, tokenizer_sha256

# Raised whenever the meaning of a stored value changes, and whenever the rule does by which tokens are supervised.
FORMAT, MASK_RULE = 3, 1

UNKNOWN = "unknown"
"""The weights and the dtype of a target that a server runs; in a key they fit every other."""


@dataclass(frozen=True)
class TextKey:
    """What made token ids and masks of the rows. The ids themselves stand beside each law."""

    tokenizer_sha256: str
    chat_template_sha256: str | None
    max_length: int
    mask_rule: int = MASK_RULE


def text_key(tokenizer: Any, max_length: int) -> TextKey:
    return TextKey(tokenizer_sha256(tokenizer), chat_template_sha256(tokenizer), max_length)


@dataclass(frozen=True)
class CacheKey:
    """Two caches with equal keys hold the same law for an example that is in both, but for the rounding of batches."""

    target_sha256: str
    dtype: str
    temperature: float
    top_k: int | None
    sampled: int | None
    store: str
    draft_ids_sha256: str | None
    """Of the ids of a draft with a reduced vocabulary; drafts of all ids share a cache."""
    text: TextKey | None = None
    """None for examples that no text was made into."""
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Flat, of primitives only, as the index of a cache holds it."""
        found = asdict(self)
        return found | (found.pop("text") or {})

    @property
    def short(self) -> str:
        """The folder of a cache among others: 16 hex digits."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


def cache_key(
    config: TeacherConfig,
    target_sha256: str,
    dtype: str,
    temperature: float,
    vocab_ids: Tensor | None = None,
    text: TextKey | None = None,
) -> CacheKey:
    """The key of the caches that a teacher of `config` reads and makes."""
    draft_ids = None if vocab_ids is None else ids_sha256([vocab_ids.tolist()])
    top_k = config.top_k if config.sampled is None else None
    return CacheKey(target_sha256, dtype, temperature, top_k, config.sampled, config.store, draft_ids, text)


# Each part of a key: where a user sets it, and what is said where there is none.
WORDS = {
    "format": ("the format of caches", "none"),
    "target_sha256": ("target: its weights", "none"),
    "tokenizer_sha256": ("target: its tokenizer", "none"),
    "chat_template_sha256": ("target: its chat template", "none"),
    "draft_ids_sha256": ("draft: the ids that it proposes", "all"),
    "max_length": ("data.max_length", "none"),
    "mask_rule": ("the rule of what is supervised", "none"),
    "temperature": ("loss.temperature", "none"),
    "top_k": ("teacher.top_k", "none"),
    "sampled": ("teacher.sampled", "none"),
    "store": ("teacher.store", "none"),
    "dtype": ("model.dtype", "none"),
}


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One phrase with both values for each part of the key of a cache, `found`, that is not as `wanted`.

    What a server kept to itself is left out.
    """
    return [
        f"{name}: {_shown(found.get(key), absent)} in the cache, {_shown(wanted.get(key), absent)} in this run"
        for key, (name, absent) in WORDS.items()
        if found.get(key) not in (wanted.get(key), UNKNOWN)
    ]


def _shown(value: Any, absent: str) -> str:
    if value is None:
        return absent
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
