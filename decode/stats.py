"""Counts of a decoding run; every rate is a property derived from counts. Names follow vLLM's request schema."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from decode.draft import Round


@dataclass(frozen=True)
class Stats:
    """Counts over any number of rounds. A spec step is a round that drafted at least one token."""

    num_target_steps: int = 0
    num_output_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = field(default=())  # [k]: spec steps that kept exactly k drafted tokens

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> "Stats":
        """Counts of `rounds`."""
        rounds = list(rounds)
        spec = [r for r in rounds if r.drafted]
        widest = max((len(r.drafted) for r in spec), default=-1)
        return cls(
            num_target_steps=len(rounds),
            num_output_tokens=sum(len(r.emitted) for r in rounds),
            num_spec_steps=len(spec),
            num_draft_tokens=sum(len(r.drafted) for r in spec),
            num_accepted_draft_tokens=sum(r.num_accepted for r in spec),
            acceptance_histogram=tuple(sum(r.num_accepted == k for r in spec) for k in range(widest + 1)),
        )

    @classmethod
    def sum(cls, parts: Iterable["Stats"]) -> "Stats":
        """Counts of all `parts` together."""
        parts = list(parts)
        columns = zip_longest(*(p.acceptance_histogram for p in parts), fillvalue=0)
        return cls(
            num_target_steps=sum(p.num_target_steps for p in parts),
            num_output_tokens=sum(p.num_output_tokens for p in parts),
            num_spec_steps=sum(p.num_spec_steps for p in parts),
            num_draft_tokens=sum(p.num_draft_tokens for p in parts),
            num_accepted_draft_tokens=sum(p.num_accepted_draft_tokens for p in parts),
            acceptance_histogram=tuple(sum(column) for column in columns),
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """Output tokens per target pass, recovered and bonus tokens included."""
        return _ratio(self.num_output_tokens, self.num_target_steps)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def per_position_acceptance_rate(self) -> list[float]:
        """[i]: share of all spec steps that kept the drafted token at position i (unconditional)."""
        counts = self.acceptance_histogram
        return [sum(counts[i:]) / self.num_spec_steps for i in range(1, len(counts))]

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates, fit for JSON: what is undefined is None, never NaN."""
        return {
            **asdict(self),
            "acceptance_histogram": list(self.acceptance_histogram),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "per_position_acceptance_rate": self.per_position_acceptance_rate,
        }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
