"""Loads all that a run needs, checks that it fits together, and says what the run is about to do."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from decode.config import DTypeName, ModelConfig
from decode.errors import UsageError, require
from decode.health import check_healthy
from decode.models import LoadedModel, choose_device, load_model
from distill.config import FitConfig
from distill.data.examples import load_prompts
from distill.data.feed import content_sha256, data_lines, make_feed
from distill.data.isolation import require_isolation
from distill.data.module import DraftDataModule
from distill.data.rows import check_source
from distill.data.split import Data, load_data
from distill.drafts.adapters import add_adapters, check_adaptable
from distill.drafts.load import load_draft
from distill.on_policy.make import content_of, make_pool
from distill.runs import plain
from distill.selection import load_reference, rests_on
from distill.teacher.choose import describe_teacher, find_given, key_of
from distill.teacher.fingerprint import examples_sha256, ids_sha256
from distill.teacher.given import GivenCache
from distill.teacher.key import CacheKey
from distill.training.prepare import checkpoint_layers
from distill.training.resume import Record, Standing
from distill.weights import weights_sha256


@dataclass(frozen=True)
class Parts:
    """All that a run needs in memory."""

    target: LoadedModel
    draft: LoadedModel
    data: Data
    feed: DraftDataModule
    prompts: list[list[int]]
    record: Record
    key: CacheKey
    """Of the caches that the teacher makes."""
    given: GivenCache | None = None
    """The cache of teacher.cache."""
    reference: LoadedModel | None = None
    """The draft of selection.reference."""


def load_parts(config: FitConfig) -> Parts:
    """Load and check everything; what is wrong with the pair, the data or the prompts is told here."""
    for source in config.data.train:
        check_source(source, config.data.streaming)
    for source in (*config.data.validation, *filter(None, [config.judge.prompts])):
        check_source(source)
    model = _on_this_rank(config.model, config.trainer)
    target = load_model(config.target, model, role="target")
    trained_in: DTypeName = "float64" if config.model.dtype == "float64" else "float32"
    draft = load_draft(config.draft, target, replace(model, dtype=trained_in))
    if config.lora.rank:
        check_adaptable(draft)
        base = weights_sha256(draft.model)
        add_adapters(draft.model, config.lora)
    if config.gradient_checkpointing:
        checkpoint_layers(draft.model)
    check_healthy(target, "target")
    check_healthy(draft, "draft")
    if config.data.packing:
        require_isolation(draft.model, "draft")
        if config.teacher.kind == "online":
            require_isolation(target.model, "target")
    data = load_data(config.data, target.tokenizer, target.vocab_size, config.seed)
    _check_lengths(data, target, "target")
    _check_lengths(data, draft, "draft")
    pool = make_pool(config, target, draft, data.train)
    feed = make_feed(data, config, pool)
    prompts = _judge_prompts(config, target, data)
    weights, examples = weights_sha256(target.model), [*data.train, *data.validation]
    key = key_of(config, target, weights, draft.vocab_ids)
    given = find_given(config.teacher, key, examples, target.model)
    record = Record(
        config=plain(config),
        num_steps=feed.num_steps,
        data_sha256=content_sha256(data, examples_sha256(examples)),
        target_sha256=weights,
        draft_sha256=base if config.lora.rank else None,
        draft_vocab_sha256=ids_sha256([] if draft.vocab_ids is None else [draft.vocab_ids.tolist()]),
        judge_prompts_sha256=ids_sha256(prompts),
        texts_sha256=content_of(pool),
        teacher_cache_sha256="" if given is None else given.sha256(examples),
    )
    if config.selection.reference is None:
        return Parts(target, draft, data, feed, prompts, record, key, given)
    reference = load_reference(config.selection.reference, target, draft, replace(model, dtype=trained_in))
    _check_lengths(data, reference, "reference")
    begins_with = record.draft_sha256 or weights_sha256(draft.model)  # new adapters are random, and change no law
    record = replace(record, selection_sha256=rests_on(begins_with, reference))
    return Parts(target, draft, data, feed, prompts, record, key, given, reference)


def _check_lengths(data: Data, loaded: LoadedModel, role: str) -> None:
    """Refuse examples beyond the positions that a model has, which would fail at the step that meets them."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if data.stream is not None and limit is not None:  # no row is known ahead
        legal = f"{limit} at most with data.streaming, which is what the {role} {loaded.name!r} takes"
        require(data.stream.config.max_length <= limit, "data.max_length", data.stream.config.max_length, legal)
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
    trained = sum(p.numel() for p in draft.model.parameters() if p.requires_grad or not config.lora.rank)
    proposed = "" if draft.vocab_ids is None else f", proposes {len(draft.vocab_ids)} of {draft.vocab_size} tokens"
    return [
        *data_lines(parts.data, feed, config),
        f"draft: {trained / 1e6:.1f}M parameters{' in adapters' if config.lora.rank else ''}{proposed}",
        describe_teacher(config.teacher, config.loss.temperature),
        config.loss.describe(config.serve),
        f"checkpoints: {feed.num_segments}, each judged on {len(parts.prompts)} prompts",
        "starts from the untrained draft" if standing is None else f"continues from step {standing.step}",
    ]
