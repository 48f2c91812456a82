"""Settings of the decoder: frozen dataclasses, every range checked on construction. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Literal

from decode.errors import require

DraftLengthName = Literal["fixed", "heuristic"]
BackendName = Literal["auto", "eager", "prepacked"]
DTypeName = Literal["auto", "float32", "float64", "bfloat16", "float16"]


# Below it the law is a point mass to every purpose, and transformers' own fp32 division of logits nears overflow.
SMALLEST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingConfig:
    """How logits become probabilities. Order of the filters: temperature, top-k, top-p, min-p (as transformers)."""

    temperature: float = 0.0
    """0 is greedy: all mass on the argmax. So is whatever lies below 1e-6."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest; 0 drops none."""

    def __post_init__(self) -> None:
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "a finite number >= 0")
        require(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE


@dataclass(frozen=True)
class DecodeConfig:
    """One decoding call."""

    max_new_tokens: int = 128
    num_speculative_tokens: int = 3
    """Tokens drafted per round; with a draft length policy, the most that a round may draft. 0 is plain decoding."""
    draft_length: DraftLengthName = "fixed"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    draft_sampling: SamplingConfig | None = None
    """How the draft's tokens are drawn; none: as the target's. Any choice leaves the output law unchanged."""
    seed: int | None = None
    """None draws a fresh seed for each call; ignored by greedy decoding."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "an integer >= 0")
        k = self.num_speculative_tokens
        require(0 <= k <= 64, "num_speculative_tokens", k, "an integer from 0 (plain decoding) to 64")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "an integer >= 0, or null")


@dataclass(frozen=True)
class ModelConfig:
    """How models are loaded."""

    device: str = "auto"
    """auto: CUDA when there is one, else the CPU; or a torch device such as cuda:1."""
    dtype: DTypeName = "auto"
    """auto: float32 on the CPU, the checkpoint's own type on a GPU."""
    backend: BackendName = "auto"
    """auto: on a CPU, oneDNN-prepacked linear layers when they measure faster; else eager."""
    trust_remote_code: bool = False
    """Run code that ships with a model from the hub. Off unless asked."""
