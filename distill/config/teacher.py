"""Settings of where the target's law comes from."""

from dataclasses import dataclass
from typing import Literal

from decode.errors import require_least


@dataclass(frozen=True)
class TeacherConfig:
    """Where the target's law of a position comes from."""

    kind: Literal["online", "cached"] = "online"
    """online: the target runs at every step; cached: the data is scored once, top_k log-probs and the tail kept."""
    top_k: int = 32
    cache_dir: str | None = None
    """Where caches lie, each under its own key; null: teacher_cache in the run's folder."""
    batch_size: int = 4
    """Rows scored at once when the cache is made."""

    def __post_init__(self) -> None:
        require_least(self, "teacher.", top_k=1, batch_size=1)
