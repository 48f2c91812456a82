"""SpeculativeDecoder: the public face of this package. Prompts in, texts and counts out."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig

from decode.answers import Generation, StreamChunk
from decode.backends import with_backend
from decode.config import DecodeConfig, ModelConfig
from decode.costs import pair_costs
from decode.draft import Round
from decode.draft_length import DRAFT_LENGTHS
from decode.errors import UsageError, require
from decode.generation import decode_config, sampling_of
from decode.loop import decode_rounds
from decode.models import LoadedModel, load_model
from decode.prepare import prepare_row
from decode.prompts import Messages, encode_prompt
from decode.proposers import PROPOSERS, Setup
from decode.row import Row
from decode.session import check_cache, context_limit, new_session
from decode.text import GrowingText
from decode.theory import Costs
from decode.verifiers import verifier_of
from decode.vocabulary import check_pair, pair_vocabulary

Prompt = str | Messages | Sequence[int]

_log = logging.getLogger(__name__)


class SpeculativeDecoder:
    """Decodes a target with a draft, or plainly without one; the output law is the target's own either way."""

    def __init__(self, target: LoadedModel, draft: LoadedModel | None = None) -> None:
        """Raises UsageError when the pair does not fit or a cache cannot be rewound."""
        self.target, self.draft = target, draft
        self._told_of_limit = False
        if draft is not None:
            check_pair(target, draft)
        self.vocabulary = pair_vocabulary(target, draft).on(target.device)
        for loaded in filter(None, (target, draft)):
            if loaded.forward is None:  # those of our own run over slots, where a rewind is bookkeeping
                with _evaluating(loaded.model):
                    check_cache(loaded.model, loaded.name, rewinds=draft is not None)

    @classmethod
    def from_pretrained(
        cls, target: str | PathLike[str], draft: str | PathLike[str] | None = None, config: ModelConfig | None = None
    ) -> "SpeculativeDecoder":
        """Load a pair by hub id, directory or embedded name.

        Raises UsageError for what cannot be found or does not fit.
        """
        config = config or ModelConfig()
        target, draft = os.fspath(target), None if draft is None else os.fspath(draft)
        loaded = load_model(target, config, role="target")
        small = None if draft is None else load_model(draft, config, role="draft")
        if small is not None:
            check_pair(loaded, small)
        packed = with_backend(loaded, config.backend)
        return cls(packed, None if small is None else with_backend(small, config.backend))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: Any = None,
        *,
        chat: bool = True,
        trace: bool = False,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Generation]:
        """Answer each prompt: text, chat messages, or token ids. One prompt may stand alone.

        `config`: a DecodeConfig, a transformers GenerationConfig, or None for the target's own settings. With `trace`
        each answer carries its rounds. `logits_processor` and `stopping_criteria` are transformers' own kinds.
        With a seed every prompt is decoded with that seed, so an answer does not depend on its neighbours. Processors
        and criteria serve all prompts, so what they answer must depend on their arguments alone.
        Raises UsageError for a prompt or setting that cannot be served exactly.
        """
        prompts = _listed(prompts)
        listed: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        settings = self.settings(config)
        rows = [
            self._row(self.encode(prompt, chat=chat), settings, logits_processor, stopping_criteria)
            for prompt in listed
        ]
        answers = []
        for first in range(0, len(rows), settings.batch_size):
            batch = rows[first : first + settings.batch_size]
            rounds: list[list[Round]] = [[] for _ in batch]
            for step in self._rounds(batch, settings):
                for index, done in step:
                    rounds[index].append(done)
            answers += [self._answer(row, done, trace) for row, done in zip(batch, rounds, strict=True)]
        return answers

    def stream(
        self,
        prompt: Prompt,
        config: Any = None,
        *,
        chat: bool = True,
        trace: bool = False,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
    ) -> Iterator[StreamChunk]:
        """The answer to one prompt as it grows, a chunk per round. May be abandoned at any point. See generate."""
        settings = self.settings(config)
        row = self._row(self.encode(prompt, chat=chat), settings, logits_processor, stopping_criteria)
        rounds: list[Round] = []
        text = GrowingText(self.target.tokenizer)
        for step in self._rounds([row], settings):
            done = step[0][1]
            rounds.append(done)
            if row.stopping.reason is None:
                yield StreamChunk(done.emitted, text.extend(done.emitted))
        answer = self._answer(row, rounds, trace)
        yield StreamChunk(rounds[-1].emitted if rounds else [], text.rest_of(answer.text), answer)

    def settings(self, config: Any = None) -> DecodeConfig:
        """`config` as a DecodeConfig that leaves nothing to the target's own settings."""
        if not isinstance(config, DecodeConfig):
            asked = GenerationConfig() if config is None else config
            require(isinstance(asked, GenerationConfig), "config", asked, "a DecodeConfig, a GenerationConfig or None")
            config = decode_config(asked, self.target.model.generation_config)
        if config.sampling is None:
            config = replace(config, sampling=sampling_of(self.target.model.generation_config))
        return config

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt. Raises UsageError for an empty one, an unknown id, or a missing tokenizer."""
        prompt = _listed(prompt)
        if not isinstance(prompt, str) and (not prompt or _is_id(prompt[0])):
            strange = next((i for i in prompt if not _is_id(i)), None)
            require(strange is None, "prompt", strange, "token ids, which are integers")
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        elif self.target.tokenizer is None:
            raise UsageError("prompt: the target has no tokenizer; give token ids")
        else:
            ids = encode_prompt(self.target.tokenizer, prompt, chat)  # type: ignore[arg-type]
        if not ids:
            raise UsageError("prompt: it is empty; expected at least one token")
        wrong = next((i for i in ids if not 0 <= i < self.vocabulary.size), None)
        if wrong is not None:
            raise UsageError(f"prompt: token id {wrong} is outside the vocabulary of {self.vocabulary.size}")
        return ids

    def _answer(self, row: Row, rounds: list[Round], trace: bool) -> Generation:
        assert row.stopping.reason is not None
        ids = [token for done in rounds for token in done.emitted]
        tokenizer = self.target.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        return Generation.of(rounds, row.stopping.reason, text, trace=trace, log_probs=row.log_probs)

    def _row(
        self, ids: list[int], config: DecodeConfig, processors: Sequence[Any] | None, criteria: Sequence[Any] | None
    ) -> Row:
        extras = processors or (), criteria or ()
        row = prepare_row(self.target, self.draft, self.vocabulary, ids, config, self.costs(config), *extras)
        self._tell_of_draft_limit(row.length + row.stopping.room)
        return row

    def costs(self, config: Any = None) -> Costs | None:
        """What rounds of this pair cost, where `config` drafts by that. To ask beforehand keeps the second or two that
        measuring takes, where it isn't known yet, out of a first answer's time."""
        settings = self.settings(config)
        if self.draft is None or not settings.most_drafted or not DRAFT_LENGTHS[settings.draft_length].needs_costs:
            return None
        with self._evaluating_both():
            return pair_costs(self.target, self.draft, settings)

    def _tell_of_draft_limit(self, length: int) -> None:
        if self.draft is None or self._told_of_limit:
            return
        limit = context_limit(self.draft.model)
        if length > limit:
            self._told_of_limit = True
            _log.warning("draft %r sees %d tokens; beyond them decoding goes on without it", self.draft.name, limit)

    @contextmanager
    def _evaluating_both(self) -> Iterator[None]:
        with ExitStack() as stack:
            for loaded in filter(None, (self.target, self.draft)):
                stack.enter_context(_evaluating(loaded.model))
            yield

    def _rounds(self, rows: list[Row], config: DecodeConfig) -> Iterator[list[tuple[int, Round]]]:
        longest = max(row.length + row.stopping.room for row in rows)
        drafting = self.draft is not None and config.most_drafted > 0
        session = new_session(self.draft, len(rows), longest) if drafting and self.draft is not None else None
        with self._evaluating_both():
            yield from decode_rounds(
                rows,
                new_session(self.target, len(rows), longest),
                PROPOSERS["draft_model" if drafting else "none"](Setup(session, self.vocabulary.size)),
                verifier_of(config),
            )


def _listed(prompts: Any) -> Any:
    """Token ids in a tensor or an array as lists. Raises UsageError for what holds no prompts."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    legal = "text, chat messages, token ids, or a list of those"
    require(isinstance(prompts, str | Sequence) and not isinstance(prompts, bytes), "prompt", prompts, legal)
    return prompts


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and (isinstance(prompts[0], dict) or _is_id(prompts[0])))


def _is_id(value: Any) -> bool:
    """Whether `value` is an integer, of Python or of an array."""
    return type(value.tolist() if hasattr(value, "tolist") else value) is int


_EVALUATED: WeakKeyDictionary[Any, tuple[int, list[Any]]] = WeakKeyDictionary()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Eval mode inside, each module's own mode restored after; of nested and interleaved uses, after the last."""
    count, training = _EVALUATED.get(model, (0, []))
    training = training or [module for module in model.modules() if module.training]
    model.eval()
    _EVALUATED[model] = (count + 1, training)
    try:
        yield
    finally:
        count, training = _EVALUATED.pop(model)
        if count > 1:
            _EVALUATED[model] = (count - 1, training)
        else:
            for module in training:
                module.training = True
