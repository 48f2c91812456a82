"""Loads all that a run needs, checks that it fits together, and says what the run is about to do."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from decode.config import DTypeName, ModelConfig
from decode.errors import UsageError
from decode.health import check_healthy
from decode.models import LoadedModel, choose_device, load_model
from distill.config import FitConfig
from distill.data.examples import load_prompts
from distill.data.isolation import require_isolation
from distill.data.module import DraftDataModule
from distill.data.rows import check_source
from distill.data.split import Data, load_data
from distill.drafts.load import load_draft
from distill.runs import plain
from distill.teacher.choose import describe_teacher
from distill.teacher.fingerprint import examples_sha256, ids_sha256, weights_sha256
from distill.training.resume import Record, Standing


@dataclass(frozen=True)
class Parts:
    """All that a run needs in memory."""

    target: LoadedModel
    draft: LoadedModel
    data: Data
    feed: DraftDataModule
    prompts: list[list[int]]
    record: Record


def load_parts(config: FitConfig) -> Parts:
    """Load and check everything; what is wrong with the pair, the data or the prompts is told here."""
    for source in (*config.data.train, *config.data.validation, *filter(None, [config.judge.prompts])):
        check_source(source)
    model = _on_this_rank(config.model, config.trainer)
    target = load_model(config.target, model, role="target")
    trained_in: DTypeName = "float64" if config.model.dtype == "float64" else "float32"
    draft = load_draft(config.draft, target, replace(model, dtype=trained_in))
    check_healthy(target, "target")
    check_healthy(draft, "draft")
    if config.data.packing:
        require_isolation(draft.model, "draft")
        if config.teacher.kind == "online":
            require_isolation(target.model, "target")
    data = load_data(config.data, target.tokenizer, target.vocab_size)
    _check_lengths(data, target, "target")
    _check_lengths(data, draft, "draft")
    feed = DraftDataModule(data.train, data.validation, config)
    prompts = _judge_prompts(config, target, data)
    record = Record(
        config=plain(config),
        num_steps=feed.num_steps,
        data_sha256=examples_sha256([*data.train, *data.validation]),
        target_sha256=weights_sha256(target.model),
        draft_vocab_sha256=ids_sha256([] if draft.vocab_ids is None else [draft.vocab_ids.tolist()]),
        judge_prompts_sha256=ids_sha256(prompts),
    )
    return Parts(target, draft, data, feed, prompts, record)


def _check_lengths(data: Data, loaded: LoadedModel, role: str) -> None:
    """Refuse examples beyond the positions that a model has, which would fail at the step that meets them."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    longest = max((*data.train, *data.validation), key=lambda example: len(example.input_ids))
    if limit is not None and len(longest.input_ids) > limit:
        raise UsageError(
            f"data.max_length: {longest.source} has {len(longest.input_ids)} tokens, the {role} {loaded.name!r} takes "
            f"{limit}; set it to {limit} at most"
        )


def _judge_prompts(config: FitConfig, target: LoadedModel, data: Data) -> list[list[int]]:
    """Held-out prompts, distinct, in order. Raises UsageError when there is none."""
    if config.judge.prompts is None:
        found = [example.prompt_ids for example in data.validation]
    else:
        found = load_prompts(config.judge.prompts, target.tokenizer, None, target.vocab_size)
    distinct = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found) if ids]
    if not distinct:
        raise UsageError(f"judge.prompts: {config.judge.prompts or 'the validation rows'} have no prompt to decode")
    return distinct[: config.judge.num_prompts]


def _on_this_rank(model: ModelConfig, trainer: dict[str, Any]) -> ModelConfig:
    """Where several GPUs train, each process loads onto its own."""
    if choose_device(model) != torch.device("cuda"):
        return model
    local, devices = int(os.environ.get("LOCAL_RANK") or 0), trainer.get("devices")
    return replace(model, device=f"cuda:{devices[local] if isinstance(devices, list) else local}")


def report_lines(config: FitConfig, parts: Parts, standing: Standing | None) -> list[str]:
    """What a run is about to do, before it does it."""
    feed, draft = parts.feed, parts.draft
    held_out = parts.data.validation_report
    trained = sum(p.numel() for p in draft.model.parameters())
    proposed = "" if draft.vocab_ids is None else f", proposes {len(draft.vocab_ids)} of {draft.vocab_size} tokens"
    sequences = config.data.batch_size * config.optimizer.accumulate
    epochs = config.max_epochs or feed.num_steps * sequences / len(feed.schedule.packs)
    return [
        *(f"data: {line}" for line in parts.data.report.lines()),
        *(f"validation: {line}" for line in (held_out.lines() if held_out else [_held_out(parts)])),
        f"draft: {trained / 1e6:.1f}M parameters{proposed}",
        describe_teacher(config.teacher, config.loss.temperature),
        f"run: {feed.num_steps} steps of {sequences} sequences ({config.data.batch_size} in a batch, "
        f"{config.optimizer.accumulate} accumulated), {epochs:.1f} epochs",
        f"checkpoints: {feed.num_segments}, each judged on {len(parts.prompts)} prompts",
        "starts from the untrained draft" if standing is None else f"continues from step {standing.step}",
    ]


def _held_out(parts: Parts) -> str:
    validation = parts.data.validation
    return f"{len(validation)} examples held out, {sum(e.num_supervised for e in validation)} supervised tokens"
