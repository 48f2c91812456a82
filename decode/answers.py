"""What comes out of decoding a prompt: whole, or chunk by chunk."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from decode.draft import Round
from decode.stats import Stats
from decode.stopping import FinishReason


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt."""

    ids: list[int]  # new tokens only, an end-of-text id included
    text: str  # of `ids`, special tokens left out
    finish_reason: FinishReason
    stats: Stats
    log_probs: list[float] | None = None  # one for each of `ids`, where they were asked for
    rounds: list[Round] = field(default_factory=list)  # where a trace was asked for

    @classmethod
    def of(
        cls, rounds: Sequence[Round], reason: FinishReason, text: str, *, trace: bool, log_probs: bool
    ) -> "Generation":
        """What `rounds` made; they are kept where `trace` holds."""
        ids = [token for done in rounds for token in done.emitted]
        logs = [value for done in rounds for value in done.log_probs or ()]
        return cls(ids, text, reason, Stats.of(rounds), logs if log_probs else None, list(rounds) if trace else [])

    def trace(self, prompt: Sequence[int]) -> list[dict[str, Any]]:
        """A row for each round, fit for JSON; the first also has the prompt's ids, so that the rows of several texts
        may stand in one file."""
        rows = [asdict(done) | {"next_token": done.next_token, "kind": done.kind} for done in self.rounds]
        return [{"prompt_ids": list(prompt), **row} if place == 0 else row for place, row in enumerate(rows)]


@dataclass(frozen=True)
class StreamChunk:
    """What became final since the last chunk. The texts of all chunks join to the whole text."""

    ids: list[int]
    text: str
    generation: Generation | None = None  # with the last chunk only
