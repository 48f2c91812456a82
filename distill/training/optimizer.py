"""AdamW and its learning rate, by optimiser step."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import AdamW

from distill.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The rate of optimiser step `step`, from 0, of a run of `num_steps`.

    It rises linearly, already above 0 at the first step, to its peak at the last warm-up step, then follows a cosine
    that reaches final_fraction of the peak at the run's last step.
    """
    warmup = round(config.warmup_fraction * num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    peak = max(warmup - 1, 0)
    progress = (step - peak) / max(num_steps - 1 - peak, 1)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)


def make_optimizer(model: nn.Module, config: OptimizerConfig, fused: bool) -> AdamW:
    """AdamW; weight decay for matrices only, not for embeddings, biases and norms.

    A head that is tied to the embeddings counts as an embedding. `fused` takes one pass over the weights, not ten.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused and can_fuse(trained))


def can_fuse(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch has the one-pass AdamW for these devices."""
    return all(p.device.type in ("cpu", "cuda") for p in parameters)
