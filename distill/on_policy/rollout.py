"""Decodes prompts for training: the draft alone, or the pair with a trace. Knows nothing of examples or losses."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode.backends import with_backend
from decode.backends.prepacked import can_prepack
from decode.config import DecodeConfig
from decode.draft import Round
from decode.loop import decode_rounds
from decode.models import LoadedModel
from decode.prepare import prepare_row
from decode.proposers import PROPOSERS, Setup
from decode.row import Row
from decode.session import new_session
from decode.verifiers import VERIFIERS
from decode.vocabulary import pair_vocabulary


@dataclass(frozen=True)
class Rollout:
    """One text and how it came about."""

    prompt: list[int]
    rounds: list[Round]

    @property
    def new_ids(self) -> list[int]:
        return [token for done in self.rounds for token in done.emitted]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new_ids]


def roll_out(
    model: LoadedModel,
    draft: LoadedModel | None,  # None: `model` decodes alone
    prompts: Sequence[list[int]],
    config: DecodeConfig,  # whose sampling, length and ends are stated
    seed: str,
    batch_size: int,
) -> list[Rollout]:
    """A text for each prompt. Each draws from a generator of its own, seeded by `seed` and its place: equal prompts get
    different texts, and no global random state is touched. Both models have to be in eval mode.

    Acceptance is by the token rule: a rejection tells of the position where it stands, and of no other.
    """
    vocabulary = pair_vocabulary(model, draft).on(model.device)
    configs = [replace(config, seed=row_seed(seed, place)) for place in range(len(prompts))]
    rows = [
        prepare_row(model, draft, vocabulary, prompt, own, None) for prompt, own in zip(prompts, configs, strict=True)
    ]
    rounds: list[list[Round]] = []
    for first in range(0, len(rows), batch_size):
        rounds += _decode(model, draft, rows[first : first + batch_size], vocabulary.size)
    return [Rollout(list(prompt), done) for prompt, done in zip(prompts, rounds, strict=True)]


def row_seed(seed: str, place: int) -> int:
    return random.Random(f"{seed}/{place}").getrandbits(62)


def _decode(model: LoadedModel, draft: LoadedModel | None, rows: list[Row], vocab_size: int) -> list[list[Round]]:
    longest = max(row.length + row.stopping.room for row in rows)
    session = None if draft is None else new_session(draft, len(rows), longest)
    proposer = PROPOSERS["none" if draft is None else "draft_model"](Setup(session, vocab_size))
    rounds: list[list[Round]] = [[] for _ in rows]
    for step in decode_rounds(rows, new_session(model, len(rows), longest), proposer, VERIFIERS["token"]):
        for place, done in step:
            rounds[place].append(done)
    return rounds


def ready(loaded: LoadedModel, backend: str) -> LoadedModel:
    """`loaded` as it decodes fast; nothing is measured, so that a resumed run sees the same rounding."""
    if backend == "auto":
        backend = "prepacked" if can_prepack(loaded.model) else "eager"
    return with_backend(loaded, backend)
