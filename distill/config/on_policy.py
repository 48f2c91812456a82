"""Settings of the texts that a run makes for itself: the draft's own, those it was rejected in, and proposals."""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from decode.config import SamplingConfig
from decode.errors import UsageError, require, require_least


@dataclass(frozen=True)
class TextsConfig:
    """What all three kinds of texts have in common."""

    fraction: float = 0.0
    """Share of the rows of the micro-batches, in [0, 1); 0: none, and nothing is made."""
    reuse_steps: int = 50
    """Optimiser steps between two makings; in between texts are used again."""
    num_texts: int = 64
    """Texts made at once."""
    max_new_tokens: int = 128
    prompts: str | None = None
    """What they are made from, a file as generate reads it; null: the training rows' prompts."""
    batch_size: int = 16
    """Texts decoded at once."""

    @property
    def wanted(self) -> bool:
        return self.fraction > 0

    def check(self, section: str) -> None:
        """Raises UsageError for a value out of range, and for one that a fraction of 0 leaves without effect."""
        require(0 <= self.fraction < 1, f"{section}fraction", self.fraction, "a number in [0, 1)")
        require_least(self, section, reuse_steps=1, max_new_tokens=1, batch_size=1, num_texts=0)
        if self.wanted:
            return
        for name in (f.name for f in fields(self) if getattr(self, f.name) != _default(f)):
            raise UsageError(
                f"{section}{name}: {getattr(self, name)!r} has no effect with {section}fraction 0; leave it out, or "
                f"set {section}fraction"
            )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _soft() -> SamplingConfig:
    return SamplingConfig(temperature=1.0)


@dataclass(frozen=True)
class OnPolicyConfig(TextsConfig):
    """Texts that the draft as it stands writes alone, and the target scores."""

    sampling: SamplingConfig = field(default_factory=_soft)
    """How the draft's tokens are drawn; nothing that is not said here has a say."""

    def __post_init__(self) -> None:
        self.check("on_policy.")
        require_least(self, "on_policy.", num_texts=1)


@dataclass(frozen=True)
class ReplayConfig(TextsConfig):
    """Texts of the target, decoded with the draft; where it was rejected, a position counts more."""

    weight: float = 4.0
    """What a position counts at which the target rejected the draft's token; the others count 1."""
    log: str | None = None
    """Traces of your own traffic, as `draftsmith run --trace` writes them; several may be joined in one file. With it
    num_texts may be 0."""
    num_speculative_tokens: int = 4
    sampling: SamplingConfig = field(default_factory=_soft)
    """How target and draft are sampled."""

    def __post_init__(self) -> None:
        self.check("replay.")
        require(1 < self.weight < float("inf"), "replay.weight", self.weight, "a finite number > 1")
        require(
            1 <= self.num_speculative_tokens <= 64,
            "replay.num_speculative_tokens",
            self.num_speculative_tokens,
            "an integer from 1 to 64",
        )
        legal = "an integer >= 1; 0 needs replay.log"
        require(self.num_texts > 0 or self.log is not None, "replay.num_texts", self.num_texts, legal)


@dataclass(frozen=True)
class ReinforceConfig(TextsConfig):
    """Policy gradient on the accepted length of the draft's proposals, with the loss at the same positions as anchor.

    Both models are sampled at loss.temperature; the gradient is of proposals that the draft made at the last making.
    """

    reuse_steps: int = 10
    weight: float = 1.0
    """What the policy gradient is multiplied with."""
    anchor: float = 1.0
    """What the loss counts at the proposed tokens' positions; elsewhere it counts 1."""
    num_rounds: int = 128
    """Rounds of all texts, drawn by chance, whose proposals are trained on; each is a row with its context."""
    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        self.check("reinforce.")
        require_least(self, "reinforce.", num_texts=2, num_rounds=1)
        require(0 < self.weight < float("inf"), "reinforce.weight", self.weight, "a finite number > 0")
        require(0 < self.anchor < float("inf"), "reinforce.anchor", self.anchor, "a finite number > 0")
        require(
            1 <= self.num_speculative_tokens <= 64,
            "reinforce.num_speculative_tokens",
            self.num_speculative_tokens,
            "an integer from 1 to 64",
        )


def check_together(
    on_policy: OnPolicyConfig, replay: ReplayConfig, reinforce: ReinforceConfig, streaming: bool
) -> None:
    """Raises UsageError where the fractions leave nothing to the training rows, or these are streamed."""
    sections = {"on_policy": on_policy, "replay": replay, "reinforce": reinforce}
    wanted = {f"{name}.fraction": config.fraction for name, config in sections.items() if config.wanted}
    if sum(wanted.values()) >= 1:
        raise UsageError(f"{', '.join(wanted)}: they add up to {sum(wanted.values()):g}; expected less than 1")
    if wanted and streaming:
        key, value = next(iter(wanted.items()))
        raise UsageError(f"{key}: {value!r} is not legal with data.streaming; expected 0")
