"""Settings of fit: the run, its optimiser and its judge."""

from dataclasses import dataclass, field
from typing import Any, Literal

from decode.config import DecodeConfig, ModelConfig
from decode.errors import UsageError, require, require_least
from distill.config.checks import OF_THE_DRAFT, refuse_model_keys, refuse_unused, require_budget
from distill.config.data import DataConfig
from distill.config.lora import LoraConfig
from distill.config.objective import LossConfig, SelectionConfig
from distill.config.on_policy import OnPolicyConfig, ReinforceConfig, ReplayConfig, check_together
from distill.config.teacher import TeacherConfig


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
    serve: Literal["sampled", "greedy_draft", "greedy"] = "sampled"
    """How the draft will be served: decides the acceptance that is watched and the default loss. sampled: draft and
    target sample; greedy_draft: the draft takes its likeliest token, the target samples; greedy: both are greedy."""
    loss: LossConfig = field(default_factory=LossConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    max_steps: int | None = None
    """Optimiser steps; exclusive with max_epochs."""
    max_epochs: int | None = None
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    gradient_checkpointing: bool = False
    """Run each layer of the draft again in the backward pass instead of keeping what it made: less memory for time."""
    compile: bool = False
    """Compile the draft's layers with torch.compile; where no compiler works, that is told and the run goes on."""
    dry_run: bool = False
    """Tell what the run would need of memory, and what its data is; nothing is trained or written."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further options of lightning's Trainer, such as devices, strategy, precision, logger: tensorboard."""

    def __post_init__(self) -> None:
        if self.data.streaming:
            self._check_streaming()
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UsageError("max_steps, max_epochs: give exactly one of the two")
        require_least(self, max_steps=1, max_epochs=1, seed=0)
        self.loss.refuse_unread(self.serve)
        refuse_model_keys(self.model, "the trainer places both models", "draft_device")
        refuse_model_keys(
            self.model, "each process holds a whole target, smaller by dtype or quantization", "device_map"
        )
        refuse_model_keys(self.model, "a draft is trained as it was made", *OF_THE_DRAFT[1:])
        refuse_unused(self.judge.decode, "judge.decode.", "stop_strings")
        check_together(self.on_policy, self.replay, self.reinforce, self.data.streaming)

    def _check_streaming(self) -> None:
        """Refuse what asks for all rows at once."""
        if self.max_steps is None:
            raise UsageError(
                f"max_steps: none is given (max_epochs: {self.max_epochs}); data.streaming needs it, for the rows are "
                "not counted before they are read"
            )
        require(self.max_epochs is None, "max_epochs", self.max_epochs, "null with data.streaming; give max_steps")
        legal = "online with data.streaming: a cache is made of all rows before training"
        require(self.teacher.kind == "online", "teacher.kind", self.teacher.kind, legal)
        legal = "null with data.streaming: positions are chosen among all rows before training"
        require(self.selection.reference is None, "selection.reference", self.selection.reference, legal)
