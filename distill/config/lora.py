"""Settings of low-rank adapters on the draft."""

from dataclasses import dataclass, field, fields

from decode.errors import UsageError, require, require_least


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank updates of a draft's linear layers instead of all its weights (Hu et al. 2021)."""

    rank: int = 0
    """Of the updates; 0: none, all weights are trained."""
    alpha: float = 16.0
    """Updates are scaled by alpha / rank."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023)."""
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Ends of the layers' names, such as q_proj; all-linear: every linear layer but the head."""

    def __post_init__(self) -> None:
        require_least(self, "lora.", rank=0)
        require(0 < self.alpha < float("inf"), "lora.alpha", self.alpha, "a finite number > 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "a number in [0, 1)")
        names = isinstance(self.targets, list) and self.targets and all(isinstance(t, str) and t for t in self.targets)
        require(bool(names), "lora.targets", self.targets, "a list of names, or [all-linear]")
        unread = [f.name for f in fields(self) if f.name != "targets" and getattr(self, f.name) != f.default]
        if self.rank == 0 and (unread or self.targets != ["all-linear"]):
            raise UsageError("lora.rank: 0 trains all weights, other keys of lora have no effect; set it, or drop them")
