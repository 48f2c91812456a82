"""Which ids stand for a token: of one model, and of a pair whose tables differ by unused rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.errors import IncompatiblePair


class HasVocabulary(Protocol):
    """What is asked of a model."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """[N] the ids that the rows of a narrowed head stand for."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Vocabulary:
    """The ids that may be produced. Rows that pad a table stand for no token; their logits mean nothing, and a row of
    zeros gives the logit 0, not minus infinity."""

    size: int
    """Logits are cut to their first `size` columns."""
    banned: Tensor | None = None
    """[b] int64 ascending: the columns among them that stand for no token; None where there are none."""

    def on(self, device: torch.device) -> "Vocabulary":
        """The same for logits on `device`."""
        return self if self.banned is None else Vocabulary(self.size, self.banned.to(device))

    def cut(self, logits: Tensor) -> Tensor:  # [..., V] -> [..., size]
        """The logits of the tokens that there are: a view, unless some ids in the middle are unused."""
        if logits.shape[-1] > self.size:
            logits = logits[..., : self.size]
        if self.banned is None:
            return logits
        return logits.index_fill(-1, self.banned.to(logits.device), float("-inf"))

    @classmethod
    def of(cls, ids: Iterable[int], rows: int) -> "Vocabulary":
        """The vocabulary of tokens `ids` and a table with `rows` rows."""
        used = torch.tensor(sorted({index for index in ids if 0 <= index < rows}), dtype=torch.int64)
        if not len(used):
            return cls(rows)
        size = int(used[-1]) + 1
        if len(used) == size:
            return cls(size)
        unused = torch.ones(size, dtype=torch.bool).index_fill_(0, used, False)
        return cls(size, unused.nonzero().squeeze(-1))


def pair_vocabulary(target: HasVocabulary, draft: HasVocabulary | None = None) -> Vocabulary:
    """What a target, alone or with a draft that `check_pair` let pass, may produce.

    An id counts that a token of the target's tokenizer has, added tokens included, and so do the ids that end a text.
    A target without a tokenizer can produce every id.
    """
    rows = target.vocab_size if draft is None else min(target.vocab_size, draft.vocab_size)
    if target.tokenizer is None:
        return Vocabulary(rows)
    return Vocabulary.of({*target.tokenizer.get_vocab().values(), *target.eos_token_ids}, rows)


def check_pair(target: HasVocabulary, draft: HasVocabulary, *, equal_tables: bool = False) -> None:
    """Refuse a draft whose ids do not mean what the target's mean.

    Unused rows at the end of a table are no difference, unless `equal_tables` holds: engines that load a draft compare
    nothing but the sizes.
    Raises IncompatiblePair naming both vocabulary sizes, or the first id that differs with both strings.
    """
    missing_tokenizer = target.tokenizer is None or draft.tokenizer is None
    if target.vocab_size != draft.vocab_size and (equal_tables or missing_tokenizer):
        where = "where a tokenizer is missing" if missing_tokenizer else "here, unused rows included"
        raise IncompatiblePair(f"{_sizes(target, draft)}; they must be equal {where}")
    if missing_tokenizer:
        return
    ours, theirs = _strings_by_id(target.tokenizer), _strings_by_id(draft.tokenizer)
    for index in sorted(ours.keys() | theirs.keys()) if ours != theirs else ():
        if ours.get(index) != theirs.get(index):
            raise IncompatiblePair(
                f"draft {draft.name!r} has another tokenizer than target {target.name!r}: id {index} is "
                f"{theirs.get(index)!r} in the draft and {ours.get(index)!r} in the target"
            )
    less, more = sorted((target.vocab_size, draft.vocab_size))
    missing = min((index for index in ours if less <= index < more), default=None)
    if missing is not None:
        raise IncompatiblePair(
            f"{_sizes(target, draft)}; they may differ by unused rows only, and id {missing} is {ours[missing]!r}"
        )
    subset = () if draft.vocab_ids is None else draft.vocab_ids.tolist()
    if (unused := next((index for index in subset if index not in ours), None)) is not None:
        raise IncompatiblePair(f"draft {draft.name!r}: its reduced vocabulary has id {unused}, which no token has")
    for special in ("bos_token_id", "eos_token_id"):
        a, b = getattr(target.tokenizer, special, None), getattr(draft.tokenizer, special, None)
        if a != b:
            raise IncompatiblePair(f"draft {draft.name!r}: its tokenizer's {special} is {b}, the target's is {a}")


def _sizes(target: HasVocabulary, draft: HasVocabulary) -> str:
    return f"draft {draft.name!r} has vocab_size {draft.vocab_size}, target {target.name!r} has {target.vocab_size}"


def _strings_by_id(tokenizer: Any) -> dict[int, str]:
    # Sorted, so that of several strings with one id it is always the same that counts.
    return {index: token for token, index in sorted(tokenizer.get_vocab().items())}
