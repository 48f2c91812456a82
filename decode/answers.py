"""What comes out of decoding a prompt: whole, or chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class StreamChunk:
    """What became final since the last chunk. The texts of all chunks join to the whole text."""

    ids: list[int]
    text: str
    generation: Generation | None = None  # with the last chunk only
