"""Settings of the data that a draft trains on."""

from dataclasses import dataclass, field
from typing import Literal

from decode.errors import require, require_least

SHUFFLE_BUFFER = 2000


@dataclass(frozen=True)
class DataConfig:
    """Training and held-out rows."""

    train: list[str]
    """Files as generate writes or reads them; rows of all are joined."""
    validation: list[str] = field(default_factory=list)
    """Held-out rows; empty: validation_fraction of the training rows is held out, by the hash of the prompt."""
    validation_fraction: float = 0.05
    max_length: int = 512
    """Tokens of a packed sequence; longer rows are cut, those left without a supervised token dropped and counted."""
    packing: bool = True
    """Join short rows in one sequence, without attention between them."""
    batch_size: int = 8
    """Sequences per micro-batch, over all ranks."""
    streaming: bool = False
    """Read training rows while training goes on, instead of all before it; for files that memory does not hold."""
    shuffle_buffer: int = SHUFFLE_BUFFER
    """Rows that are read, packed and shuffled together when streaming; validation_fraction is of the first of them."""
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        require(len(self.train) >= 1, "data.train", self.train, "at least one file")
        require(0 < self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "in (0, 1)")
        require_least(self, "data.", max_length=2, batch_size=1, shuffle_buffer=1)
        if not self.streaming:
            legal = f"{SHUFFLE_BUFFER}, the default: rows that are not streamed are shuffled all together"
            require(self.shuffle_buffer == SHUFFLE_BUFFER, "data.shuffle_buffer", self.shuffle_buffer, legal)
