"""Settings of what is minimised, on which positions, and of what the draft itself says."""

from dataclasses import dataclass

from decode.errors import require


@dataclass(frozen=True)
class LossConfig:
    """How far the draft's law is from the target's, per position."""

    name: str | dict[str, float] | None = None
    """A loss of distill/losses.py, or a mix: the name of each with its weight; null: the default of `serve`."""
    temperature: float = 1.0
    """Both sides' logits are divided by it; the loss is not multiplied by its square."""

    def __post_init__(self) -> None:
        require(0.01 <= self.temperature <= 1000, "loss.temperature", self.temperature, "a number from 0.01 to 1000")
