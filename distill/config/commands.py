"""Settings of generate, init and run."""

from dataclasses import dataclass, field
from typing import Literal

from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.errors import UsageError, require, require_between, require_least
from distill.config.checks import OF_THE_DRAFT, refuse_model_keys, refuse_unused
from distill.config.server import ServerConfig, check_can_be_asked

OF_WEIGHTS = ("device", "device_map", "max_memory", "dtype", "backend", "quantization")


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
    server: ServerConfig = field(default_factory=ServerConfig)
    """With server.url a server runs the target, and only the target's tokenizer and settings are loaded here."""

    def __post_init__(self) -> None:
        require_least(self, max_new_tokens=1, batch_size=1, limit=1, max_prompt_tokens=1, seed=0)
        require(self.output.endswith(".jsonl"), "output", self.output, "a path that ends in .jsonl")
        refuse_model_keys(self.model, "no draft takes part", *OF_THE_DRAFT)
        if self.server.url is not None:
            refuse_model_keys(self.model, "a server runs the target", *OF_WEIGHTS)
            legal = "32, the default, with server.url; server.concurrency says how many prompts are under way"
            require(self.batch_size == 32, "batch_size", self.batch_size, legal)
            check_can_be_asked(self.sampling)


@dataclass(frozen=True)
class InitConfig:
    """`draftsmith init`: make an untrained draft for a target."""

    target: str
    output: str
    """Directory of the new draft."""
    num_parameters: int | None = None
    """Wanted size of the layers (embeddings and head apart); exclusive with fit_cost_ratio and hidden_size."""
    fit_cost_ratio: float | None = None
    """Measure the steps of drafts of many sizes; take the largest whose step costs no more than this part of the
    target's."""
    hidden_size: int | None = None
    num_layers: int | None = None
    start: Literal["scratch", "layers", "width"] = "scratch"
    """scratch: a small Llama-type model. layers: layers of the target, whole, between its own tables. width: the small
    model, whose matrices are those of the target's layers seen through fewer channels (Llama-type targets)."""
    layers: list[int] | None = None
    """Of start layers and width: numbers of the target's layers, from 0; null: num_layers of them, evenly spaced."""
    tie: bool | None = None
    """One table for embeddings and head; null: as the target for start layers, else no."""
    embeddings: Literal["projection", "random"] = "projection"
    """projection: the target's input embeddings, projected on their leading principal directions."""
    draft_vocab_size: int | None = None
    """Train and propose only this many tokens, the most frequent ones of `data`; null: all."""
    data: list[str] = field(default_factory=list)
    """Rows made by generate, whose generated tokens are counted for draft_vocab_size; they go together."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        chosen = [k for k in ("num_parameters", "fit_cost_ratio", "hidden_size") if getattr(self, k) is not None]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(chosen)}: give only one of num_parameters, fit_cost_ratio, hidden_size")
        require_least(self, num_parameters=1, draft_vocab_size=2, seed=0)
        require_between(self, hidden_size=(8, 16384), num_layers=(1, 512))
        ratio = self.fit_cost_ratio
        require(ratio is None or 0 < ratio < 1, "fit_cost_ratio", ratio, "a number in (0, 1)")
        refuse_model_keys(self.model, "the draft is made on the CPU", *OF_THE_DRAFT)
        require(isinstance(self.data, list), "data", self.data, "a list of files")
        if (self.draft_vocab_size is None) != (not self.data):
            given, lacking = ("data", "draft_vocab_size") if self.data else ("draft_vocab_size", "data")
            raise UsageError(f"{given}: needs {lacking}; the tokens of data are counted for draft_vocab_size")
        self._check_start()

    def _check_start(self) -> None:
        """Refuse what the chosen start cannot honour."""
        fixed = {"layers": ("hidden_size", "num_parameters", "draft_vocab_size"), "scratch": ("layers",), "width": ()}
        for key in fixed[self.start]:
            require(getattr(self, key) is None, key, getattr(self, key), f"null with start: {self.start}")
        if self.layers is not None and (self.num_layers is not None or self.fit_cost_ratio is not None):
            raise UsageError("layers: they are the depth; give neither num_layers nor fit_cost_ratio with them")
        if self.tie and self.draft_vocab_size is not None:
            raise UsageError("tie: a draft of a reduced vocabulary has a head of its own; give no draft_vocab_size")


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
    """A .jsonl file for what each round did: context length, proposal, accepted, recovered or bonus, times; with the
    prompt's ids, so that fit can train on it (replay.log)."""
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
