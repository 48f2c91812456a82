"""Settings of the commands that measure: eval and bench. Imports nothing heavy."""

from dataclasses import dataclass, field

from decode.config import DecodeConfig, ModelConfig
from decode.errors import require, require_least
from distill.config import refuse_model_keys, refuse_unused, require_budget

METHODS = (
    *("plain", "transformers", "transformers-assisted", "transformers-prompt-lookup"),
    *(f"fixed:{length}" for length in (1, 2, 3, 4, 5, 6, 7, 8)),
    *("heuristic", "confidence", "entropy", "cost_model"),
)
"""What bench compares where nothing else is asked."""


@dataclass(frozen=True)
class EvalConfig:
    """`draftsmith eval`: acceptance and speed of checkpoints and exported drafts, in one interleaved run."""

    target: str
    drafts: list[str]
    """Draft directories, .ckpt files, or run folders (which stand for their untrained draft and every checkpoint)."""
    prompts: str
    output: str
    """Folder for metrics.json, acceptance.csv, perf_results.csv and the pictures."""
    num_prompts: int = 8
    skip_prompts: int = 0
    """Leave out the first prompts of the file, the judge's say."""
    held_out: str | None = None
    """Rows with answers, on which every draft's acceptance is measured against the target's whole law; null: what each
    draft's own run recorded is shown."""
    repeats: int = 1
    """Timed passes over the prompts; each method's time for a prompt is the least of them."""
    decode: DecodeConfig = field(default_factory=lambda: DecodeConfig(draft_length="fixed"))
    """One draft length for all drafts: their acceptance compares. What other lengths give is bench's to tell."""
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        require(len(self.drafts) >= 1, "drafts", self.drafts, "at least one draft, checkpoint or run folder")
        require_least(self, num_prompts=1, skip_prompts=0, repeats=1)
        require_budget(self.decode, "decode.")
        refuse_unused(self.decode, "decode.", "stop_strings")
        refuse_model_keys(self.model, "drafts are measured as they are", "draft_vocab_size", "draft_vocab_data")


@dataclass(frozen=True)
class BenchConfig:
    """`draftsmith bench`: ways to decode one pair, compared in one interleaved run, and checked against each other."""

    target: str
    draft: str
    """Draft directory or hub id."""
    prompts: list[str]
    """Files of prompts, each a domain of its own, named by its stem."""
    output: str
    """Folder for metrics.json, perf_results.csv and bench.png."""
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """NAME[:LENGTH][/VERIFIER][@BACKEND]. Ours: plain (always among them), fixed, heuristic, confidence, entropy,
    cost_model; LENGTH is what a round drafts, at most. Others': transformers, transformers-assisted[:LENGTH],
    transformers-prompt-lookup[:LENGTH], and flashspec[:LENGTH] where that package is installed."""
    num_prompts: int = 8
    """Of each file."""
    skip_prompts: int = 0
    """Leave out the first prompts of each file."""
    repeats: int = 3
    """Timed passes over the prompts. Rates take the least time of each prompt; intervals take all."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """How all methods decode; what tells them apart is said by their names."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """backend: of our methods that name none."""

    def __post_init__(self) -> None:
        require(len(self.prompts) >= 1, "prompts", self.prompts, "at least one file")
        require(len(self.methods) >= 1, "methods", self.methods, "at least one method")
        require_least(self, num_prompts=1, skip_prompts=0, repeats=1)
        require_budget(self.decode, "decode.")
        default = DecodeConfig()
        for key in ("draft_length", "num_speculative_tokens", "verifier"):
            legal = f"{getattr(default, key)!r}, the default: methods say it, such as fixed:3/block"
            require(
                getattr(self.decode, key) == getattr(default, key), f"decode.{key}", getattr(self.decode, key), legal
            )
        for key in ("batch_size", "stop_strings", "log_probs"):
            legal = f"{getattr(default, key)!r}, the default: not every method can do it"
            require(
                getattr(self.decode, key) == getattr(default, key), f"decode.{key}", getattr(self.decode, key), legal
            )
