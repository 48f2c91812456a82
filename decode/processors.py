"""What changes logits by the tokens before them: penalties, bans, biases, users' own processors. Knows no sampling.

In a block of several positions each sees the tokens that plain decoding would have seen there, and none after them.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from decode.config import SamplingConfig
from decode.errors import UsageError, require

# Processors of transformers whose answer depends on more than the tokens before a position and its logits.
_NOT_EXACT = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model on a text of its own, token by token",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs a second row of logits for each text",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs a second row of logits for each text",
    "DiaEOSChannelFilterLogitsProcessor": "it needs several channels of logits for each text",
    "DiaEOSDelayPatternLogitsProcessor": "it keeps a state from one call to the next",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps a state from one call to the next",
}


class OccurrencePenalties(LogitsProcessor):
    """Takes `frequency` from a logit for each time that its token occurs in the generated text, and `presence` once
    where it does at all. As OpenAI's API and vLLM mean them: the prompt doesn't count."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self.frequency, self.presence, self.prompt_length = frequency, presence, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [1, n] and [1, V] -> [1, V]
        text = input_ids[0, self.prompt_length :]
        taken = scores.new_zeros(scores.shape[-1]).index_fill_(0, text, self.presence)
        return scores - taken.index_add_(0, text, scores.new_full(text.shape, self.frequency))


@dataclass(frozen=True)
class _Step:
    run: Any  # (history [1, n], scores [1, V]) -> scores [1, V]
    until: int | None = None  # with a history of this length or more it changes nothing


@dataclass(frozen=True)
class Processors:
    """Logits processors of one text, in transformers' order. What follows them is `law_of`."""

    steps: tuple[_Step, ...]
    foreign: bool = False  # a user's are among them, which may write to what they are given

    @classmethod
    def of(
        cls,
        sampling: SamplingConfig,
        prompt_length: int,
        eos_token_ids: Collection[int],
        extra: Iterable[
            Any
        ] = (),  # (history [1, n], scores [1, V]) -> scores [1, V], as a user of transformers has them
        device: torch.device | str = "cpu",  # where the logits will lie
    ) -> "Processors | None":
        """None where nothing is to be done.

        `extra` come where transformers puts them: in the place of one of ours of the same type, else after all of ours
        and before temperature and filters. Their answers must depend on their two arguments alone. Raises UsageError
        naming the type for those that are known not to, and for those that need further arguments.
        """
        users = list(extra)
        for processor in users:
            _check_exact(processor)
        steps = _merged(list(_ours(sampling, prompt_length, eos_token_ids, device)), users)
        return cls(steps, bool(users)) if steps else None

    def __call__(
        self,
        logits: Tensor,  # [R, V]
        history: Tensor,  # [n] int64 tokens before the last row's; row i follows history[: n - R + 1 + i]
    ) -> Tensor:  # [R, V] fp32, or fp64 for fp64 logits
        """The logits that tokens are drawn from; the arguments stay as they are."""
        first = history.shape[0] - logits.shape[0] + 1
        if all(step.until is not None and first >= step.until for step in self.steps):
            return logits
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.cat([self._row(row.unsqueeze(0), history[: first + i]) for i, row in enumerate(scores)])

    def _row(self, scores: Tensor, history: Tensor) -> Tensor:
        if self.foreign:
            scores, history = scores.clone(), history.clone()
        for step in self.steps:
            if step.until is None or history.shape[0] < step.until:
                scores = step.run(history.unsqueeze(0), scores)
        return scores


def _ours(
    sampling: SamplingConfig, prompt_length: int, eos_token_ids: Collection[int], device: torch.device | str
) -> Iterator[_Step]:
    """What the settings ask for, in transformers' order."""
    if sampling.logit_bias:
        biases: list[list[list[int] | float]] = [[[int(token)], float(b)] for token, b in sampling.logit_bias.items()]
        yield _Step(SequenceBiasLogitsProcessor(biases))
    if sampling.repetition_penalty != 1:
        yield _Step(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.frequency_penalty or sampling.presence_penalty:
        yield _Step(OccurrencePenalties(sampling.frequency_penalty, sampling.presence_penalty, prompt_length))
    if sampling.no_repeat_ngram_size:
        yield _Step(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.bad_words_ids:
        yield _Step(NoBadWordsLogitsProcessor(sampling.bad_words_ids))
    least, eos = sampling.min_new_tokens, sorted(eos_token_ids)
    if least and eos:
        ban = MinNewTokensLengthLogitsProcessor(prompt_length, least, eos, device=str(device))
        yield _Step(ban, until=prompt_length + least)
    if sampling.allowed_ids:
        allowed: Any = torch.tensor(sampling.allowed_ids, device=device)
        yield _Step(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))


def _merged(ours: Sequence[_Step], users: Sequence[Any]) -> tuple[_Step, ...]:
    """As transformers' generate merges them: a user's processor stands in for ours of its type."""
    steps = []
    for step in ours:
        instead = next((user for user in users if type(user) is type(step.run)), None)
        steps.append(step if instead is None else _Step(instead))
    steps += [_Step(user) for user in users if not any(user is step.run for step in steps)]
    return tuple(steps)


def _check_exact(processor: Any) -> None:
    name = type(processor).__name__
    reason = next((_NOT_EXACT[base.__name__] for base in type(processor).__mro__ if base.__name__ in _NOT_EXACT), None)
    if reason is not None:
        raise UsageError(f"logits_processor: {name} can't be exact in speculative decoding: {reason}")
    if not callable(processor):
        raise UsageError(f"logits_processor: {name} is not callable; expected transformers' LogitsProcessor objects")
    needed = [p for p in inspect.signature(processor).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    if len([p for p in needed if p.default is p.empty]) > 2:
        raise UsageError(f"logits_processor: {name} needs further arguments than the tokens so far and their logits")


def check_token_ids(sampling: SamplingConfig, vocab_size: int) -> None:
    """Raise UsageError for a token id in the settings that no logit stands for."""
    named = {
        "bad_words_ids": [token for run in sampling.bad_words_ids for token in run],
        "logit_bias": [int(token) for token in sampling.logit_bias],
        "allowed_ids": sampling.allowed_ids,
    }
    for key, ids in named.items():
        require(max(ids, default=0) < vocab_size, key, max(ids, default=0), f"token ids below {vocab_size}")
