"""Settings of what is minimised, on which positions, and of what the draft itself says."""

import difflib
from dataclasses import dataclass

from decode.errors import require


@dataclass(frozen=True)
class Serving:
    """What a way of serving a draft asks of its training."""

    watched: str
    """The acceptance that such a server gets, among a validation's metrics."""
    loss: str
    """What is minimised unless loss.name says otherwise."""


SERVINGS = {
    "sampled": Serving("expected_acceptance", "forward_kl"),
    "greedy_draft": Serving("greedy_acceptance", "forward_kl"),
    "greedy": Serving("greedy_agreement", "forward_kl"),
}

# Which settings a loss reads besides the temperature.
OPTIONS = {"jensen_shannon": ("beta",), "adaptive": ("eta",)}


@dataclass(frozen=True)
class LossConfig:
    """How far the draft's law is from the target's, per position."""

    name: str | dict[str, float] | None = None
    """A loss of docs/losses.md, or a mix: the name of each with its weight; null: the default of `serve`."""
    temperature: float = 1.0
    """Both sides' logits are divided by it; the loss is not multiplied by its square."""
    beta: float = 0.5
    """Of jensen_shannon: the target's share of the mixture; 0 is forward_kl, 1 reverse_kl."""
    eta: float = 3.0
    """Of adaptive: how soon total variation takes over from forward KL as the overlap grows."""

    def __post_init__(self) -> None:
        require(0.01 <= self.temperature <= 1000, "loss.temperature", self.temperature, "a number from 0.01 to 1000")
        require(0 <= self.beta <= 1, "loss.beta", self.beta, "a number from 0 to 1")
        require(0 <= self.eta <= 1000, "loss.eta", self.eta, "a number from 0 to 1000")
        if self.name is not None:
            self._check_names()

    def _check_names(self) -> None:
        from distill.losses import LOSSES  # brings torch: only where a loss is named

        names = self.mix("sampled")
        require(bool(names), "loss.name", self.name, "a loss, or one or more of them with their weights")
        for name, weight in names.items():
            near = difflib.get_close_matches(name, LOSSES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            require(name in LOSSES, "loss.name", name, f"one of {', '.join(LOSSES)}{hint}")
            require(0 < weight < float("inf"), f"loss.name.{name}", weight, "a finite weight > 0")

    def mix(self, serve: str) -> dict[str, float]:
        """The weight of each loss that is minimised."""
        name = SERVINGS[serve].loss if self.name is None else self.name
        return {name: 1.0} if isinstance(name, str) else dict(name)

    def describe(self, serve: str) -> str:
        """One line for the report before training."""
        mix = self.mix(serve)
        told = " + ".join(name if mix[name] == 1 else f"{mix[name]:g} {name}" for name in mix)
        return f"loss: {told}; served {serve}: {SERVINGS[serve].watched} is what counts"

    def refuse_unread(self, serve: str) -> None:
        """Raises UsageError for an option of losses that are not in the mix."""
        for loss, keys in OPTIONS.items():
            for key in keys if loss not in self.mix(serve) else ():
                default = getattr(type(self), key)
                legal = f"{default!r}, the default, where {loss} is not minimised"
                require(getattr(self, key) == default, f"loss.{key}", getattr(self, key), legal)


@dataclass(frozen=True)
class SelectionConfig:
    """Train on those positions only that a reference draft shows to be learnable."""

    reference: str | None = None
    """A draft that was trained on such data: a model folder, a checkpoint, or a run's folder; null: every position."""
    keep: float = 0.4
    """Share of the supervised positions that are kept: where the reference is ahead of the starting draft the most."""
    curriculum: bool = False
    """Let the share grow over the steps, from keep to 1."""

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, "selection.keep", self.keep, "a number in (0, 1]")
        for key in ("keep", "curriculum") if self.reference is None else ():
            default = getattr(type(self), key)
            legal = f"{default!r}, the default, without selection.reference"
            require(getattr(self, key) == default, f"selection.{key}", getattr(self, key), legal)
