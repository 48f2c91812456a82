"""The three kinds of texts of a run, each made from prompts by a pair of models as it stands."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode.config import DecodeConfig, SamplingConfig
from decode.models import LoadedModel
from distill.config import OnPolicyConfig, ReinforceConfig, ReplayConfig, TextsConfig
from distill.data.examples import Example
from distill.laws import Columns
from distill.on_policy.reinforce import advantages_of, proposal, trials_of, where_draft_fits
from distill.on_policy.rollout import ready, roll_out
from distill.on_policy.texts import own_text, replayed


@dataclass(frozen=True)
class Pair:
    """A target and a frozen draft, both in eval mode."""

    target: LoadedModel
    draft: LoadedModel
    backend: str = "auto"
    """What runs their forwards when they decode."""


Prompts = Sequence[list[int]]
Make = Callable[[Pair, Prompts, str], list[Example]]
"""Texts from prompts, one or more of each; the last argument seeds all that is drawn."""


@dataclass(frozen=True)
class Source:
    """Texts of one kind."""

    name: str
    config: TextsConfig
    prompts: Prompts
    make: Make
    fixed: list[Example] = field(default_factory=list)
    """Texts that stay, beside those that are made."""

    def texts(self, pair: Pair, seed: str) -> list[Example]:
        """`num_texts` prompts drawn by chance, none again before all were drawn, and what is made of them."""
        draw, wanted = random.Random(seed), self.config.num_texts
        chosen: list[list[int]] = []
        while len(chosen) < wanted:
            chosen += draw.sample(self.prompts, min(len(self.prompts), wanted - len(chosen)))
        return self.make(pair, chosen, seed) if chosen else []


def own_texts(config: OnPolicyConfig) -> Make:
    """What the draft writes by itself."""

    def make(pair: Pair, prompts: Prompts, seed: str) -> list[Example]:
        decode = decoding(config, config.sampling, pair, 0)
        found = roll_out(ready(pair.draft, pair.backend), None, prompts, decode, seed, config.batch_size)
        texts = (own_text(rollout, "on_policy") for rollout in found)
        return [text for text in texts if text is not None]

    return make


def replays(config: ReplayConfig, max_length: int) -> Make:
    """What the target writes, decoded with the draft."""

    def make(pair: Pair, prompts: Prompts, seed: str) -> list[Example]:
        decode = decoding(config, config.sampling, pair, config.num_speculative_tokens)
        models = ready(pair.target, pair.backend), ready(pair.draft, pair.backend)
        found = roll_out(*models, prompts, decode, seed, config.batch_size)
        return [replayed(text.prompt, text.rounds, config.weight, max_length, "replay") for text in found]

    return make


def proposals(config: ReinforceConfig, temperature: float) -> Make:
    """What the draft proposes while the target is decoded, with advantages."""

    def make(pair: Pair, prompts: Prompts, seed: str) -> list[Example]:
        width = config.num_speculative_tokens
        decode = decoding(config, SamplingConfig(temperature=temperature), pair, width)
        models = ready(pair.target, pair.backend), ready(pair.draft, pair.backend)
        rollouts = roll_out(*models, prompts, decode, seed, config.batch_size)
        whole = [text for rollout in rollouts if (text := own_text(rollout, "reinforce")) is not None]
        columns = Columns(pair.draft.vocab_size, pair.draft.vocab_ids).to(pair.target.device)
        fits = where_draft_fits(models[0].model, models[1].model, columns, whole, temperature, config.batch_size)
        trials = [
            trial
            for number, (rollout, own) in enumerate(zip(rollouts, fits, strict=True))
            for trial in trials_of(rollout, number, width, own)
        ]
        pairs = list(zip(trials, advantages_of(trials), strict=True))
        chosen = random.Random(f"{seed}/rounds").sample(pairs, min(config.num_rounds, len(pairs)))
        return [proposal(*each, config.weight, config.anchor, "reinforce") for each in chosen]

    return make


def decoding(config: TextsConfig, sampling: SamplingConfig, pair: Pair, width: int) -> DecodeConfig:
    """The settings of a rollout, with nothing left to a model's own: a text ends as the target's do."""
    return DecodeConfig(
        max_new_tokens=config.max_new_tokens,
        num_speculative_tokens=width,
        draft_length="fixed",
        sampling=sampling,
        eos_token_ids=sorted(pair.target.eos_token_ids),
    )
