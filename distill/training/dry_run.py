"""`draftsmith fit --dry-run true`: what a run would need of memory, and what its data is; nothing is written."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from decode.config import ModelConfig
from decode.draft_vocab import read_draft_vocab
from decode.models import choose_device, load_config, load_tokenizer, resolve_model_path
from distill.config import FitConfig
from distill.data.feed import data_lines, make_feed
from distill.data.module import DraftDataModule
from distill.data.split import Data, load_data
from distill.drafts.adapters import add_adapters
from distill.drafts.checkpoint import read_checkpoint
from distill.teacher.choose import check_teacher
from distill.training import memory
from distill.training.memory import Need, megabytes
from distill.training.prepare import checkpoint_layers
from distill.training.trainer_options import check_options, precision


def dry_run(config: FitConfig) -> list[str]:
    """The lines to show. Models are built without memory, from their settings; the data is read.

    Raises UsageError for what the settings alone show to be wrong.
    """
    check_options(config.trainer)
    check_teacher(config)
    device = choose_device(config.model)
    path = resolve_model_path(config.target)
    settings = load_config(path, config.model, role="target")
    target = memory.empty_model(settings, _target_dtype(config.model, settings, device))
    draft = _draft(config)
    data = load_data(config.data, load_tokenizer(path, config.model, role="target"), _vocab_size(target), config.seed)
    feed = make_feed(data, config)
    needs = _needs(config, target, draft, feed, device)
    return [*data_lines(data, feed, config), *_told(config, needs, draft, data, device)]


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _target_dtype(model: ModelConfig, settings: Any, device: torch.device) -> torch.dtype:
    if model.dtype != "auto":
        dtype: torch.dtype = getattr(torch, model.dtype)
        return dtype
    return torch.float32 if device.type == "cpu" else getattr(settings, "dtype", None) or torch.float32


def _draft(config: FitConfig) -> Any:
    """The draft as it is trained, without memory."""
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    if config.draft.endswith(".ckpt"):
        content = read_checkpoint(Path(config.draft))
        settings, vocab_ids = AutoConfig.for_model(**content["draft_config"]), content.get("draft_vocab_ids")
    else:
        path = resolve_model_path(config.draft)
        settings, vocab_ids = load_config(path, config.model, role="draft"), read_draft_vocab(Path(path))
    draft = memory.empty_model(settings, dtype, vocab_ids)
    if config.lora.rank:
        add_adapters(draft, config.lora)
    if config.gradient_checkpointing:
        checkpoint_layers(draft)
    return draft


def num_processes(config: FitConfig, device: torch.device) -> int:
    """Processes that train, as the trainer's options or torchrun's variables say."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    devices = config.trainer.get("devices", 1)
    if devices == "auto":
        devices = torch.cuda.device_count() if device.type == "cuda" else 1
    return (len(devices) if isinstance(devices, list) else int(devices)) * int(config.trainer.get("num_nodes", 1))


def _needs(config: FitConfig, target: Any, draft: Any, feed: DraftDataModule, device: torch.device) -> list[Need]:
    """What each process needs, in the order in which it comes up."""
    processes = num_processes(config, device)
    sharing = processes if config.trainer.get("strategy") == "fsdp2" else 1
    rows, width = -(-config.data.batch_size // processes), _width(feed)
    precise = str(config.trainer.get("precision") or precision(device, config.model))
    weights = memory.weight_bytes(draft)
    trained = weights * memory.num_weights(draft, trained_only=True) // memory.num_weights(draft)
    activations = memory.kept_for_backward(draft, rows, width, precise)
    needs = [
        Need("target", memory.weight_bytes(target, config.model.quantization)),
        Need("draft", weights // sharing),
        Need("gradients", trained // sharing),
        Need("optimiser state", memory.STATES_PER_WEIGHT * trained // sharing),
        Need(f"draft's activations, {rows} x {width} tokens", activations),
        Need("draft's short-lived tensors", int(memory.SHORT_LIVED * activations)),
        Need("loss", memory.loss_bytes(draft, _law_width(config, target), rows * width)),
        Need("draft's copies to judge", _copies(draft, target, sharing)),
    ]
    if precise.endswith("-mixed"):
        needs.append(Need("draft's weights in 16 bits", memory.num_weights(draft) * 2))
    if sharing > 1:
        needs.append(Need("draft's weights while gathered", weights))
    if config.teacher.kind == "online":
        needs.append(Need("target's forward", memory.target_forward(target, rows, width)))
    return needs


def _law_width(config: FitConfig, target: Any) -> int:
    """Ids of the target's law at a position."""
    kept = config.teacher.sampled or config.teacher.top_k
    return kept if config.teacher.kind == "cached" else _vocab_size(target)


def _copies(draft: Any, target: Any, sharing: int) -> int:
    served = memory.num_weights(draft) * next(target.parameters()).element_size()
    return served + (memory.weight_bytes(draft) if sharing > 1 else 0)


def _width(feed: DraftDataModule) -> int:
    """Tokens of the longest row."""
    if feed.packing or not feed.train_examples:
        return feed.max_length
    return max(len(example.input_ids) for example in feed.train_examples)


def _told(config: FitConfig, needs: Sequence[Need], draft: Any, data: Data, device: torch.device) -> list[str]:
    processes = num_processes(config, device)
    total = sum(need.num_bytes for need in needs)
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _main_memory()
    place = f"each of {processes} processes" if processes > 1 else "one process"
    lines = [
        f"draft: {memory.num_weights(draft):,} weights, {memory.num_weights(draft, trained_only=True):,} are trained",
        f"memory of {place} on {device.type}, libraries apart:",
        *(f"  {need.name:<40} {megabytes(need.num_bytes):>12}" for need in needs),
        f"  {'in all, at most':<40} {megabytes(total):>12} of {megabytes(room)}",
    ]
    if config.teacher.kind == "cached" and config.teacher.cache is None:
        lines.append(f"disk: teacher cache {megabytes(_cache_bytes(config, data, _vocab_size(draft)))}")
    return lines


def _cache_bytes(config: FitConfig, data: Data, vocab_size: int) -> int:
    """Of the cache that the teacher will make: kept ids and log-probs of each supervised position, and its tail."""
    examples, kept = [*data.train, *data.validation], config.teacher.sampled or config.teacher.top_k
    id_bytes = 2 if vocab_size <= 2**16 else 4
    position = kept * (id_bytes + getattr(torch, config.teacher.store).itemsize) + 4
    tokens = sum(len(example.input_ids) for example in examples)
    return position * sum(example.num_supervised for example in examples) + tokens * (id_bytes + 1)


def _main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
