"""Settings of the command that scores data once, for many epochs and runs, or checks what was scored."""

from dataclasses import dataclass, field
from typing import Literal

from decode.config import ModelConfig
from decode.errors import UsageError, require, require_least
from distill.config.checks import OF_THE_DRAFT, refuse_model_keys
from distill.config.commands import OF_WEIGHTS
from distill.config.server import ServerConfig
from distill.config.teacher import TOP_K, StoreName, require_one_kind


@dataclass(frozen=True)
class ScoredDataConfig:
    """The rows that are scored; made into ids as fit makes them."""

    train: list[str] = field(default_factory=list)
    """Files as generate writes or reads them."""
    validation: list[str] = field(default_factory=list)
    """Further files, those of fit's data.validation; rows that fit holds out of data.train are scored anyway."""
    max_length: int = 512
    """Tokens of a row; longer rows are cut. It has to be fit's own."""
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        require_least(self, "data.", max_length=2)


@dataclass(frozen=True)
class CacheConfig:
    """`draftsmith cache`: score data with the target once, for `fit --teacher.kind cached --teacher.cache OUTPUT`."""

    target: str | None = None
    """Hub id, directory, or an embedded name such as smollm2-135m."""
    output: str | None = None
    """Folder of the cache. The same command again continues it; more data is added to what it holds."""
    data: ScoredDataConfig = field(default_factory=ScoredDataConfig)
    draft: str | None = None
    """Directory of the draft that will train, where it has a reduced vocabulary; null: a draft of all ids."""
    temperature: float = 1.0
    """The target's logits are divided by it: fit's loss.temperature."""
    top_k: int = TOP_K
    """The likeliest ids that are kept of each position, beside the mass of the rest."""
    sampled: int | None = None
    """Keep so many ids drawn from the target's law instead of the likeliest."""
    store: StoreName = "float32"
    """Of kept log-probs."""
    batch_size: int = 4
    """Rows scored at once."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Here backend auto prepacks wherever that can be done, unmeasured: the same command gives the same bytes."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """With server.url a server runs the target, and only its tokenizer and settings are loaded here."""
    verify: str | None = None
    """A cache to check instead: its files against their checksums, a sample of positions against the target."""
    verify_positions: int = 256
    """How many positions are scored again by verify, at least, where the cache holds as many."""

    def __post_init__(self) -> None:
        require_least(self, top_k=1, batch_size=1, sampled=1, verify_positions=1)
        require_one_kind(self.top_k, self.sampled, "")
        require(0.01 <= self.temperature <= 1000, "temperature", self.temperature, "a number from 0.01 to 1000")
        refuse_model_keys(self.model, "no draft takes part", *OF_THE_DRAFT)
        if self.verify is None:
            self._check_scoring()
        else:
            self._check_verifying()

    def _check_scoring(self) -> None:
        for key, value in (("target", self.target), ("output", self.output), ("data.train", self.data.train)):
            if not value:
                raise UsageError(f"{key}: none is given; `cache` needs target, output and data.train, or verify")
        default = CacheConfig.verify_positions
        legal = f"{default}, the default, without verify"
        require(self.verify_positions == default, "verify_positions", self.verify_positions, legal)
        if self.server.url is not None:
            refuse_model_keys(self.model, "a server runs the target", *OF_WEIGHTS)
            legal = "null with server.url: a server tells of the likeliest ids only"
            require(self.sampled is None, "sampled", self.sampled, legal)

    def _check_verifying(self) -> None:
        """Refuse what a cache tells of itself."""
        mine = {"output": None, "draft": None, "temperature": 1.0, "top_k": TOP_K, "sampled": None, "store": "float32"}
        told = {"data": ScoredDataConfig(), "server": ServerConfig()}
        for key, default in {**mine, **told}.items():
            value = getattr(self, key)
            if value != default:
                raise UsageError(f"{key}: {value!r} has no effect with verify; the cache tells of it")
