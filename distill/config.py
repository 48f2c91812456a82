"""Settings of the commands: frozen dataclasses, ranges checked on construction. Imports nothing heavy.

Those of the commands that measure lie in their room, distill/results.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.errors import UsageError, require, require_between, require_least


def require_budget(decode: DecodeConfig, section: str) -> None:
    """What is timed has a stated length: refuse 0 and null as the most new tokens."""
    tokens = decode.max_new_tokens
    require(tokens is not None and tokens >= 1, f"{section}max_new_tokens", tokens, "an integer >= 1")


def refuse_unused(decode: DecodeConfig, section: str, *further: str) -> None:
    """Raises UsageError for keys of `decode` that prompts decoded one by one, beside others' methods, cannot honour."""
    default = DecodeConfig()
    for key in ("batch_size", "log_probs", *further):
        legal = f"{getattr(default, key)!r}, the default: it would have no part in the figures"
        require(getattr(decode, key) == getattr(default, key), f"{section}{key}", getattr(decode, key), legal)


OF_THE_DRAFT = ("draft_device", "draft_quantization", "draft_vocab_size", "draft_vocab_data")


def refuse_model_keys(model: ModelConfig, why: str, *keys: str) -> None:
    """Raises UsageError for keys of `model` that a command could not honour."""
    for key in keys:
        default = getattr(ModelConfig(), key)
        require(getattr(model, key) == default, f"model.{key}", getattr(model, key), f"{default!r} here: {why}")


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
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        require(len(self.train) >= 1, "data.train", self.train, "at least one file")
        require(0 < self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "in (0, 1)")
        require_least(self, "data.", max_length=2, batch_size=1)


@dataclass(frozen=True)
class LossConfig:
    """How far the draft's law is from the target's, per position."""

    name: Literal["forward_kl"] = "forward_kl"
    temperature: float = 1.0
    """Both sides' logits are divided by it; the loss is not multiplied by its square."""

    def __post_init__(self) -> None:
        require(0.01 <= self.temperature <= 1000, "loss.temperature", self.temperature, "a number from 0.01 to 1000")


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


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over time."""

    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_fraction: float = 0.05
    """Share of the optimiser steps over which the rate rises; then a cosine down to final_fraction of it."""
    final_fraction: float = 0.0
    gradient_clip: float | None = 1.0
    accumulate: int = 1
    """Micro-batches per optimiser step; the mean is over the supervised tokens of the whole window."""

    def __post_init__(self) -> None:
        rate, clip = self.learning_rate, self.gradient_clip
        require(0 < rate < float("inf"), "optimizer.learning_rate", rate, "a finite number > 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "a number >= 0")
        require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        require(0 <= self.warmup_fraction < 1, "optimizer.warmup_fraction", self.warmup_fraction, "a number in [0, 1)")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "a number in [0, 1]")
        require(clip is None or clip > 0, "optimizer.gradient_clip", clip, "a number > 0, or null")
        require_least(self, "optimizer.", accumulate=1)


@dataclass(frozen=True)
class JudgeConfig:
    """How each checkpoint is judged, in process, by real decoding."""

    every_n_steps: int = 100
    """Optimiser steps between checkpoints; the last step always has one."""
    prompts: str | None = None
    """Held-out prompts; null: the prompts of the validation rows."""
    num_prompts: int = 4
    decode: DecodeConfig = field(default_factory=lambda: DecodeConfig(max_new_tokens=64, draft_length="fixed"))
    """One draft length for all checkpoints: their acceptance compares, and only times depend on the machine."""

    def __post_init__(self) -> None:
        require_least(self, "judge.", every_n_steps=1, num_prompts=1)
        require_budget(self.decode, "judge.decode.")


@dataclass(frozen=True)
class FitConfig:
    """`draftsmith fit`: distil the draft on the target's logits."""

    target: str
    draft: str
    """Directory made by init, or any draft directory with the target's tokenizer."""
    output: str
    """Folder of the run. The same command again resumes it."""
    data: DataConfig
    loss: LossConfig = field(default_factory=LossConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    max_steps: int | None = None
    """Optimiser steps; exclusive with max_epochs."""
    max_epochs: int | None = None
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further options of lightning's Trainer, such as devices, strategy, precision, logger: tensorboard."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UsageError("max_steps, max_epochs: give exactly one of the two")
        require_least(self, max_steps=1, max_epochs=1, seed=0)
        refuse_model_keys(self.model, "the trainer places both models", "draft_device", "device_map")
        refuse_model_keys(self.model, "a draft is trained as it was made", *OF_THE_DRAFT[1:])
        refuse_unused(self.judge.decode, "judge.decode.", "stop_strings")


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
