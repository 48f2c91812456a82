"""Settings of where the target's law comes from."""

from dataclasses import dataclass
from typing import Literal

from decode.errors import require, require_least

TOP_K = 32
StoreName = Literal["float32", "float16"]


@dataclass(frozen=True)
class TeacherConfig:
    """Where the target's law of a position comes from."""

    kind: Literal["online", "cached"] = "online"
    """online: the target runs at every step; cached: the data is scored once, top_k log-probs and the tail kept."""
    top_k: int = TOP_K
    sampled: int | None = None
    """Keep so many ids drawn from the target's law instead of the likeliest; an unbiased estimate of forward KL."""
    store: StoreName = "float32"
    """Of kept log-probs. float16 is wrong by one part in 2048 at most: under 2e-6 nats of KL, 1e-3 of acceptance."""
    cache: str | None = None
    """A cache made by `draftsmith cache`; whatever differs in it is refused. null: caches are made as needed."""
    cache_dir: str | None = None
    """Where the caches that are made lie, each under its own key; null: teacher_cache in the run's folder."""
    batch_size: int = 4
    """Rows scored at once when a cache is made."""

    def __post_init__(self) -> None:
        require_least(self, "teacher.", top_k=1, batch_size=1, sampled=1)
        require_one_kind(self.top_k, self.sampled, "teacher.")
        if self.cache is not None:
            legal = "null beside teacher.cache, which is a cache of its own"
            require(self.cache_dir is None, "teacher.cache_dir", self.cache_dir, legal)
            legal = f"{TeacherConfig.batch_size}, the default, beside teacher.cache: nothing is scored"
            require(self.batch_size == TeacherConfig.batch_size, "teacher.batch_size", self.batch_size, legal)


def require_one_kind(top_k: int, sampled: int | None, section: str) -> None:
    """Refuse a number of likeliest ids beside one of drawn ids."""
    legal = f"{TOP_K}, the default, beside {section}sampled: one of the two is kept"
    require(sampled is None or top_k == TOP_K, f"{section}top_k", top_k, legal)
