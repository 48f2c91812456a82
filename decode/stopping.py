"""Decides where a text ends: end-of-text ids, stop strings, criteria and the budget, token by token inside a block."""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from decode.errors import UsageError, first_line

FinishReason = Literal["stop", "length"]
Criterion = Callable[[Tensor, None], Any]  # (input_ids [1, n] int64, None) -> whether the text ends here

_NO_TOKEN = 2**31 - 1  # beyond every vocabulary: completes and continues no stop string


class Stopping:
    """Counts what was emitted and says when, and why, to stop.

    All rules are those of transformers' generate, applied to every token as if it had been decoded alone:
    - a token that completes a stop string is the last one and stays in the text; the end of the prompt takes part, so a
      stop string may begin there;
    - criteria see prompt and text up to each token, every one of them once a token, in order. Their second argument,
      the scores, is None, as in generate unless scores were asked for.
    """

    def __init__(
        self,
        budget: int,
        eos_token_ids: Collection[int],
        *,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
        criteria: Sequence[Criterion] = (),
        prompt: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """`device`: where criteria find the ids; by default the CPU. Only stop strings and criteria need `prompt`.

        Raises UsageError for stop strings that the tokenizer cannot write, and for a criterion that cannot be called.
        """
        self.room = budget
        self._eos = frozenset(eos_token_ids)
        self.reason: FinishReason | None = "length" if budget <= 0 else None
        self._strings = _StopStrings(tokenizer, stop_strings, prompt) if stop_strings else None
        self._criteria = _Criteria(criteria, prompt, device) if criteria else None

    def cut(self, block: Sequence[int]) -> list[int]:
        """The part of `block` that may be emitted: up to the token that ends the text, that included."""
        if self.reason:
            return []
        kept = list(block[: self.room])
        end = next((i for i, token in enumerate(kept) if token in self._eos), None)
        if self._strings is not None and (found := self._strings.first_end(kept)) is not None:
            end = found if end is None else min(end, found)
        if end is not None:
            kept = kept[: end + 1]
        if self._criteria is not None and (found := self._criteria.first_end(kept)) is not None:
            end = found
            kept = kept[: end + 1]
        self.room -= len(kept)
        if end is not None:
            self.reason = "stop"
        elif self.room == 0:
            self.reason = "length"
        return kept


class _StopStrings:
    """Finds the token that completes a stop string, all tokens of a block at once."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: Sequence[int]) -> None:
        if tokenizer is None:
            raise UsageError(f"stop_strings: {list(strings)} need the target's tokenizer, which there is none of")
        self._rule = _stop_string_rule(tokenizer, len(tokenizer), tuple(strings))
        self._window: int = self._rule.maximum_token_len  # each token of a match adds at least one character or byte
        self._tail = [_NO_TOKEN] * (self._window - 1)
        self._remember(prompt)

    def first_end(self, block: Sequence[int]) -> int | None:
        if not block:
            return None
        ids = torch.tensor([*self._tail, *block])
        self._remember(block)
        ends = self._rule(ids.unfold(0, self._window, 1), None)  # [len(block), window] -> [len(block)]
        return int(ends.int().argmax()) if bool(ends.any()) else None

    def _remember(self, ids: Sequence[int]) -> None:
        seen = [*self._tail, *ids[-self._window :]]
        self._tail = seen[len(seen) - self._window + 1 :]


@lru_cache(maxsize=4)
def _stop_string_rule(tokenizer: Any, vocab_size: int, strings: tuple[str, ...]) -> Any:
    """transformers' own rule. Kept, because it looks at every token of the vocabulary; `vocab_size` tells whether the
    tokenizer has grown since."""
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise UsageError(f"stop_strings: {list(strings)} cannot be looked for: {first_line(error)}") from error


class _Criteria:
    """Asks user-given criteria after each token."""

    def __init__(self, criteria: Sequence[Criterion], prompt: Sequence[int], device: torch.device | None) -> None:
        for criterion in criteria:
            if not callable(criterion):
                raise UsageError(
                    f"stopping_criteria: {criterion!r} is not legal; expected a callable (input_ids, scores)"
                )
        self._criteria = list(criteria)
        self._ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)

    def first_end(self, block: Sequence[int]) -> int | None:
        start = self._ids.shape[1]
        self._ids = torch.cat([self._ids, self._ids.new_tensor([list(block)])], dim=1)
        for i in range(len(block)):
            seen = self._ids[:, : start + i + 1]
            # All are asked, also after one has said yes: those that count tokens then count what plain decoding would.
            answers = [self._ask(criterion, seen) for criterion in self._criteria]
            if any(answers):
                return i
        return None

    @staticmethod
    def _ask(criterion: Criterion, ids: Tensor) -> bool:
        answer = criterion(ids, None)
        if isinstance(answer, Tensor) and answer.numel() != 1:
            shape, name = list(answer.shape), type(criterion).__name__
            raise UsageError(f"stopping_criteria: {name} returned shape {shape}; expected a bool, or a tensor of one")
        return bool(answer)
