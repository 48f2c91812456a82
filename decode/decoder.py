"""SpeculativeDecoder: the public face of this package. Prompts in, texts and counts out."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from decode.backends import with_backend
from decode.config import DecodeConfig, ModelConfig
from decode.draft import Round
from decode.draft_length import DRAFT_LENGTHS
from decode.errors import UsageError
from decode.loop import decode_rounds
from decode.models import LoadedModel, check_pair, load_model
from decode.prompts import Messages, encode_prompt
from decode.proposers import PROPOSERS, Proposer, Setup
from decode.session import ModelSession, check_rewindable, context_limit
from decode.stats import Stats
from decode.stopping import FinishReason, Stopping
from decode.verifiers import VERIFIERS

Prompt = str | Messages | Sequence[int]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt."""

    ids: list[int]  # new tokens only, an end-of-text id included
    text: str  # of `ids`, special tokens left out
    finish_reason: FinishReason
    stats: Stats
    rounds: list[Round]


@dataclass(frozen=True)
class StreamChunk:
    """What became final since the last chunk. The texts of all chunks join to the whole text."""

    ids: list[int]
    text: str
    generation: Generation | None = None  # with the last chunk only


class SpeculativeDecoder:
    """Decodes a target with a draft, or plainly without one; the output law is the target's own either way."""

    def __init__(self, target: LoadedModel, draft: LoadedModel | None = None) -> None:
        """Raises UsageError when the pair does not fit or a cache cannot be rewound."""
        self.target, self.draft = target, draft
        self._told_of_limit = False
        if draft is not None:
            check_pair(target, draft)
            for loaded in (target, draft):
                with _evaluating(loaded.model):
                    check_rewindable(loaded.model, loaded.name)

    @classmethod
    def from_pretrained(
        cls, target: str, draft: str | None = None, config: ModelConfig | None = None
    ) -> "SpeculativeDecoder":
        """Load a pair by hub id, directory or embedded name.

        Raises UsageError for what cannot be found or does not fit.
        """
        config = config or ModelConfig()
        loaded = load_model(target, config, role="target")
        small = None if draft is None else load_model(draft, config, role="draft")
        if small is not None:
            check_pair(loaded, small)
        packed = with_backend(loaded, config.backend)
        return cls(packed, None if small is None else with_backend(small, config.backend))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], config: DecodeConfig | None = None, *, chat: bool = True
    ) -> list[Generation]:
        """Answer each prompt: text, chat messages, or token ids. One prompt may stand alone.

        With a seed every prompt is decoded with that seed, so an answer does not depend on its neighbours.
        """
        listed: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        config = config or DecodeConfig()
        answers = []
        for prompt in listed:
            ids, stopping = self._start(prompt, config, chat)
            answers.append(self._answer(list(self._rounds(ids, config, stopping)), stopping))
        return answers

    def stream(self, prompt: Prompt, config: DecodeConfig | None = None, *, chat: bool = True) -> Iterator[StreamChunk]:
        """The answer to one prompt as it grows, a chunk per round. May be abandoned at any point."""
        config = config or DecodeConfig()
        ids, stopping = self._start(prompt, config, chat)
        rounds: list[Round] = []
        text = _GrowingText(self.target.tokenizer)
        for done in self._rounds(ids, config, stopping):
            rounds.append(done)
            if stopping.reason is None:
                yield StreamChunk(done.emitted, text.extend(done.emitted))
        answer = self._answer(rounds, stopping)
        yield StreamChunk(rounds[-1].emitted if rounds else [], text.rest_of(answer.text), answer)

    def _start(self, prompt: Prompt, config: DecodeConfig, chat: bool) -> tuple[list[int], Stopping]:
        ids = self.encode(prompt, chat=chat)
        budget = self._budget(len(ids), config)
        self._tell_of_draft_limit(len(ids) + budget)
        return ids, Stopping(budget, self.target.eos_token_ids)

    def _answer(self, rounds: list[Round], stopping: Stopping) -> Generation:
        assert stopping.reason is not None
        ids = [token for done in rounds for token in done.emitted]
        tokenizer = self.target.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        return Generation(ids, text, stopping.reason, Stats.of(rounds), rounds)

    def _tell_of_draft_limit(self, length: int) -> None:
        if self.draft is None or self._told_of_limit:
            return
        limit = context_limit(self.draft.model)
        if length > limit:
            self._told_of_limit = True
            _log.warning("draft %r sees %d tokens; beyond them decoding goes on without it", self.draft.name, limit)

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt. Raises UsageError for an empty one, an unknown id, or a missing tokenizer."""
        if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int)):
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        elif self.target.tokenizer is None:
            raise UsageError("prompt: the target has no tokenizer; give token ids")
        else:
            ids = encode_prompt(self.target.tokenizer, prompt, chat)  # type: ignore[arg-type]
        if not ids:
            raise UsageError("prompt: it is empty; expected at least one token")
        wrong = next((i for i in ids if not 0 <= i < self.target.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"prompt: token id {wrong} is outside the vocabulary of {self.target.vocab_size}")
        return ids

    def _budget(self, prompt_length: int, config: DecodeConfig) -> int:
        capacity = context_limit(self.target.model)
        if prompt_length >= capacity:
            raise UsageError(f"prompt: it has {prompt_length} tokens; the target's context holds {capacity}")
        return min(config.max_new_tokens, capacity - prompt_length)

    def _rounds(self, ids: list[int], config: DecodeConfig, stopping: Stopping) -> Iterator[Round]:
        device = self.target.device
        generator = torch.Generator(device)
        _ = generator.seed() if config.seed is None else generator.manual_seed(config.seed)
        with ExitStack() as stack:
            for loaded in filter(None, (self.target, self.draft)):
                stack.enter_context(_evaluating(loaded.model))
            yield from decode_rounds(
                torch.tensor([ids], device=device),
                ModelSession(self.target.model),
                self._proposer(config, generator),
                VERIFIERS["token"],
                DRAFT_LENGTHS[config.draft_length](config.num_speculative_tokens),
                config.sampling,
                stopping,
                generator,
            )

    def _proposer(self, config: DecodeConfig, generator: torch.Generator) -> Proposer:
        draft = self.draft if config.num_speculative_tokens else None
        setup = Setup(
            session=None if draft is None else ModelSession(draft.model),
            sampling=config.draft_sampling or config.sampling,
            vocab_size=self.target.vocab_size,
            vocab_ids=None if draft is None else draft.vocab_ids,
            generator=generator,
        )
        return PROPOSERS["none" if draft is None else "draft_model"](setup)


class _GrowingText:
    """Decodes a growing list of ids; holds back a tail that may be half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # characters

    def extend(self, ids: Sequence[int]) -> str:
        """What `ids` add to the text that can still be shown when more follows."""
        self._ids.extend(ids)
        if self._tokenizer is None:
            return ""
        return self.rest_of(self._tokenizer.decode(self._ids, skip_special_tokens=True).rstrip("\ufffd"))

    def rest_of(self, text: str) -> str:
        """The part of `text` that was not shown yet."""
        fresh = text[self._shown :]
        self._shown += len(fresh)
        return fresh


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | dict))


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Eval mode inside, each module's own mode restored after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
