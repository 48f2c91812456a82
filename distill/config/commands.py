"""Settings of generate, init and run."""

from dataclasses import dataclass, field
from typing import Literal

from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.errors import UsageError, require, require_between, require_least
from distill.config.checks import OF_THE_DRAFT, refuse_model_keys, refuse_unused


@dataclass(frozen=True)
class GenerateConfig:
    """`draftsmith generate`: the target answers prompts."""

    target: str
    """Hub id, directory, or an embedded name such as smollm2-135m."""
    prompts: str
    """jsonl, json or parquet file, save_to_disk folder or hub id; with prompt, messages, conversations or text."""
    output: str
    """A .jsonl file; rows are appended to it, bad rows go to its sibling *.errors.jsonl."""
    max_new_tokens: int = 192
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=1.0))
    batch_size: int = 32
    seed: int = 0
    limit: int | None = None
    """Answer only the first rows of the input. Raised later, the output is extended."""
    max_prompt_tokens: int = 1024
    """Longer prompts are skipped and counted."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Here backend auto prepacks wherever that can be done, unmeasured: the same command gives the same bytes."""

    def __post_init__(self) -> None:
        require_least(self, max_new_tokens=1, batch_size=1, limit=1, max_prompt_tokens=1, seed=0)
        require(self.output.endswith(".jsonl"), "output", self.output, "a path that ends in .jsonl")
        refuse_model_keys(self.model, "no draft takes part", *OF_THE_DRAFT)


@dataclass(frozen=True)
class InitConfig:
    """`draftsmith init`: make an untrained draft for a target."""

    target: str
    output: str
    """Directory of the new draft."""
    num_parameters: int | None = None
    """Wanted size of the layers (embeddings and head apart); exclusive with cost_ratio and hidden_size."""
    cost_ratio: float | None = None
    """Wanted cost of a draft step as a fraction of a target step."""
    hidden_size: int | None = None
    num_layers: int | None = None
    embeddings: Literal["projection", "random"] = "projection"
    """projection: the target's input embeddings, projected on their leading principal directions."""
    draft_vocab_size: int | None = None
    """Train and propose only this many tokens, the most frequent ones of `data`; null: all."""
    data: str | None = None
    """Rows made by generate, whose generated tokens are counted for draft_vocab_size; they go together."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        chosen = [k for k in ("num_parameters", "cost_ratio", "hidden_size") if getattr(self, k) is not None]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(chosen)}: give only one of num_parameters, cost_ratio, hidden_size")
        require_least(self, num_parameters=1, draft_vocab_size=2, seed=0)
        require_between(self, hidden_size=(8, 16384), num_layers=(1, 512))
        require(self.cost_ratio is None or 0 < self.cost_ratio < 1, "cost_ratio", self.cost_ratio, "a number in (0, 1)")
        refuse_model_keys(self.model, "the draft is made on the CPU", *OF_THE_DRAFT)
        if (self.draft_vocab_size is None) != (self.data is None):
            given, lacking = ("draft_vocab_size", "data") if self.data is None else ("data", "draft_vocab_size")
            raise UsageError(f"{given}: needs {lacking}; the tokens of data are counted for draft_vocab_size")


@dataclass(frozen=True)
class RunConfig:
    """`draftsmith run`: decode one prompt and print the text as it comes."""

    target: str
    prompt: str | None = None
    draft: str | None = None
    """Draft directory; null: plain decoding."""
    interactive: bool = False
    """A chat on the terminal; prompt, where there is one, opens it."""
    chat: bool = True
    """Put the prompt in the target's chat template where it has one; false: use it as it is."""
    trace: str | None = None
    """A .jsonl file for what each round did: context length, proposal, accepted, recovered or bonus, times."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        if self.prompt is None and not self.interactive:
            raise UsageError("prompt: none is given; expected a text, or interactive: true")
        if self.interactive and (not self.chat or self.trace):
            key = "chat" if not self.chat else "trace"
            raise UsageError(f"{key}: {getattr(self, key)!r} is not legal with interactive: true")
        refuse_unused(self.decode, "decode.")
        require(self.trace is None or self.trace.endswith(".jsonl"), "trace", self.trace, "a path that ends in .jsonl")
