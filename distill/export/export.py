"""Writes a draft as a plain model folder that other engines load, and proves it in a clean process first."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GenerationConfig

from decode.config import ModelConfig
from decode.errors import UsageError, first_line, require
from decode.health import check_healthy
from decode.hub import hub_is_reachable
from decode.models import LoadedModel, load_config, load_tokenizer, resolve_model_path
from decode.sampling import is_healthy
from distill.drafts.checkpoint import loss_temperature, read_checkpoint, recorded_metrics
from distill.drafts.load import best_checkpoint, is_run_folder, load_draft, step_of
from distill.drafts.make import save_draft
from distill.drafts.vocab import widen_head
from distill.export.clean_reload import Expected, check_excluded, check_reload, expect
from distill.export.config import ExportConfig
from distill.export.evaluation import find_evaluation
from distill.export.model_card import measured_lines, model_card
from distill.folders import check_output, whole_folder, write_record
from distill.outputs import check_writable
from distill.results.candidates import check_apart, sound_record
from distill.runs import provenance, write_text_atomic

MADE_BY = "draftsmith export"
DEFAULT_ASSISTANT_TOKENS = 3
GENERATION_FILE = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Source:
    """What is exported, and what is known of it."""

    path: Path
    dtype: str  # of its own weights
    step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    num_assistant_tokens: int = DEFAULT_ASSISTANT_TOKENS
    temperature: float | None = None  # of the loss, at which the metrics' acceptance was taken
    evaluation: dict[str, Any] | None = None  # its row in a report of eval

    def as_record(self) -> dict[str, Any]:
        return {
            "source": self.path.name,
            "step": self.step,
            "num_assistant_tokens": self.num_assistant_tokens,
            "loss_temperature": self.temperature,
            "metrics": self.metrics,
        }


def export(config: ExportConfig) -> Path:
    """Write the draft to `config.output` and return that folder; only after plain transformers gave its logits back.

    An earlier export there is replaced. Raises UsageError for what cannot be exported before anything is written, and
    DraftsmithError when the written folder does not give the draft's own logits; then nothing is left behind.
    """
    output = Path(config.output).expanduser().resolve()
    check_writable(output)
    for role in ("draft", "target"):
        check_apart(output, role, getattr(config, role), replaced=True)
    check_output(output, MADE_BY)
    source = find_source(config)
    require(source.num_assistant_tokens >= 1, "num_assistant_tokens", source.num_assistant_tokens, "an integer >= 1")
    loading = ModelConfig(device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
    target = describe_target(config.target, loading)
    draft = load_draft(source.path, target, loading)
    check_healthy(draft, "draft")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(_cast(draft, target, config.dtype if config.dtype != "auto" else source.dtype))
    with whole_folder(output) as folder:
        expected = write_export(folder, draft, target, source, config)
        check_reload(folder, expected)
    console.print(f"reloaded in a clean process by plain transformers: logits of {len(expected.logits)} texts agree")
    return output


def find_source(config: ExportConfig) -> Source:
    """The checkpoint or folder that `config.draft` stands for, with its recorded figures.

    Raises UsageError when there is none.
    """
    path = Path(config.draft).expanduser()
    if is_run_folder(path):
        path = best_checkpoint(path)
    if path.suffix == ".ckpt":
        return _checkpoint_source(path, config)
    if not (path / "config.json").is_file():
        raise UsageError(f"draft: {config.draft!r} is no checkpoint, no run folder and no model folder")
    record, dtype = sound_record(path), _own_dtype(path)
    tokens = config.num_assistant_tokens or record.get("num_assistant_tokens") or DEFAULT_ASSISTANT_TOKENS
    measured = find_evaluation(path, config.evaluation)
    return Source(path, dtype, record.get("step"), recorded_metrics(record), tokens, loss_temperature(record), measured)


def _own_dtype(folder: Path) -> str:
    """The type of a model folder's weights, as its config tells. Raises UsageError for one that engines do not load."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"draft {str(folder)!r}: its config cannot be loaded: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"draft {str(folder)!r}: its config cannot be loaded: config.json holds no JSON object")
    found = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    dtype = "float32" if found == "float64" else found  # engines load no float64
    require(dtype in DTYPES, f"draft {str(folder)!r}: dtype of its config", found, f"one of {', '.join(DTYPES)}")
    return str(dtype)


def _checkpoint_source(path: Path, config: ExportConfig) -> Source:
    content = read_checkpoint(path)
    judged: Any = content.get("config")
    for key in ("judge", "decode", "num_speculative_tokens"):
        judged = judged.get(key) if isinstance(judged, Mapping) else None
    tokens = config.num_assistant_tokens or judged or DEFAULT_ASSISTANT_TOKENS
    dtype = str(next(iter(content["state_dict"].values())).dtype).removeprefix("torch.")
    dtype = "float32" if dtype == "float64" else dtype  # engines load no float64
    measured = find_evaluation(path, config.evaluation)
    return Source(path, dtype, step_of(path), recorded_metrics(content), tokens, loss_temperature(content), measured)


def describe_target(name: str, config: ModelConfig) -> LoadedModel:
    """The target's config, special ids and tokenizer; its weights are not read.

    Raises UsageError when one of them cannot be.
    """
    path = resolve_model_path(name)
    settings = load_config(path, config, role="target")
    tokenizer = load_tokenizer(path, config, role="target")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # settings that a model class refuses, in its own way
        raise UsageError(f"target {path!r}: its config makes no model: {first_line(error)}") from error
    if (special := _generation_settings(path)) is not None:
        model.generation_config = special
    return LoadedModel(model, tokenizer, name)


def _generation_settings(path: str) -> GenerationConfig | None:
    """The target's, which say what ends a text; None where there are none: then the model's config says it."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=not hub_is_reachable())
    except Exception as error:  # an OSError where there are none; else what odd content leads to
        if isinstance(error, OSError) and not (Path(path) / GENERATION_FILE).is_file():
            return None
        raise UsageError(f"target {path!r}: its {GENERATION_FILE} cannot be read: {first_line(error)}") from error


@torch.no_grad()
def _cast(draft: LoadedModel, target: LoadedModel, dtype: str) -> str:
    """Widen the head, then round the weights to `dtype`, once, from fp32; returns how far that moved the logits.

    Raises UsageError when the weights are too large for `dtype`.
    """
    if draft.vocab_ids is not None:
        widen_head(draft.model, draft.vocab_ids, target.vocab_size)
    before = expect(draft.model, target, {})
    rounded = getattr(torch, dtype)
    for tensor in draft.model.state_dict().values():  # what is saved; rotary tables are not, and stay exact
        if tensor.is_floating_point() and tensor.dtype != rounded:
            tensor.copy_(tensor.to(rounded))
    after = expect(draft.model, target, {})
    healthy = all(bool(is_healthy(table)) for table in after.logits)
    require(
        healthy, "dtype", dtype, "a type that holds the draft's weights: in this one its logits are NaN or infinite"
    )
    kept = slice(None) if draft.vocab_ids is None else draft.vocab_ids
    gaps = [(a[:, kept] - b[:, kept]).abs().max() for a, b in zip(before.logits, after.logits, strict=True)]
    return f"weights in {dtype}: the cast moved logits by at most {float(max(gaps)):.2g}"


def write_export(
    folder: Path, draft: LoadedModel, target: LoadedModel, source: Source, config: ExportConfig
) -> Expected:
    """Fill `folder`; returns what plain transformers must find in it. `draft` is fp32, its values already rounded."""
    dtype = config.dtype if config.dtype != "auto" else source.dtype
    tokens = source.num_assistant_tokens
    expected = expect(draft.model, target, _account(draft.model, dtype, tokens))
    if draft.vocab_ids is not None:
        check_excluded(expected.logits, draft.vocab_ids)
    draft.model.config.use_cache = True
    model = draft.model.to(getattr(torch, dtype))
    save_draft(model, target, draft.vocab_ids, folder, assistant_settings(tokens))
    recorded = measured_lines(source.metrics, source.temperature, source.evaluation)
    card = model_card(Path(config.output).name, config.target, draft, tokens, recorded)
    write_text_atomic(folder / "README.md", card)
    write_record(
        folder,
        {
            "made_by": MADE_BY,
            "target": config.target,
            "dtype": dtype,
            **source.as_record(),
            **provenance(config),
        },
    )
    return expected


def _account(model: Any, dtype: str, num_assistant_tokens: int) -> dict[str, Any]:
    """Class, type and tensor names that the reloaded folder must show: those of the base class, no more."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names = sorted(set(model.state_dict()) - tied)
    return {
        "class": type(model).__name__,
        "dtype": dtype,
        "tensors": names,
        "num_assistant_tokens": num_assistant_tokens,
    }


def assistant_settings(num_assistant_tokens: int) -> dict[str, Any]:
    """Generation settings that plain transformers reads from an assistant: a fixed number of drafted tokens a round."""
    return {
        "num_assistant_tokens": num_assistant_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
