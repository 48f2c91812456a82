"""Loads models: where they lie, device, dtype, strict weights, tokenizer, reduced vocabulary."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decode.config import ModelConfig
from decode.draft_vocab import DRAFT_VOCAB_FILE, most_frequent, read_draft_vocab
from decode.embedded import EMBEDDED, materialise
from decode.errors import UsageError, first_line
from decode.hub import hub_is_reachable
from decode.model_facts import input_device
from decode.storage import storage_options


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in eval mode, ready to decode."""

    model: Any  # a transformers PreTrainedModel
    tokenizer: Any
    name: str
    vocab_ids: Tensor | None = None  # [N] int64, ascending: the ids that the rows of a narrowed head stand for
    backend: str = "eager"
    forward: Any = None  # a decode.backends.base.Forward; None: the model's own, as a session runs it

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, whatever the head was narrowed to."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        """Where token ids go in, also where the weights lie elsewhere and are brought there when used."""
        return input_device(self.model)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: the generation config's, else the tokenizer's. Raises UsageError for no ids."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        if eos is None:
            eos = getattr(self.tokenizer, "eos_token_id", None)
        if eos is None:
            return frozenset()
        ids = [eos] if isinstance(eos, int) else eos
        if not isinstance(ids, list | tuple | set | frozenset) or not all(isinstance(i, int) for i in ids):
            raise UsageError(f"model {self.name!r}: its eos_token_id is {eos!r}; expected an id or a list of ids")
        return frozenset(ids)


def resolve_model_path(name: str) -> str:
    """The directory or hub id that `name` stands for; an embedded name is converted into the user's cache.

    Raises UsageError for a path that is missing, is a file, or holds no config.json.
    """
    if name in EMBEDDED:
        return str(materialise(name))
    if not name.strip():
        raise UsageError(f"model {name!r}: expected a model directory, a hub id or {_embedded()}")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"model {name!r}: the directory holds no config.json")
        return str(path)
    if path.exists():
        raise UsageError(f"model {name!r}: it is a file; expected a model directory, a hub id or {_embedded()}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"model {name!r}: there is no such directory")
    return name


def _embedded() -> str:
    return "an embedded name (" + ", ".join(sorted(EMBEDDED)) + ")"


def choose_device(config: ModelConfig, role: str = "target") -> torch.device:
    """The device that `config` names for `role`; `auto` is CUDA when there is one."""
    own = role == "draft" and config.draft_device is not None
    key, name = ("draft_device", str(config.draft_device)) if own else ("device", config.device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model.{key}: {name!r} cannot be used here: {reason}") from error
    return device


def _choose_dtype(config: ModelConfig, device: torch.device) -> torch.dtype | str:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.float32 if device.type == "cpu" else "auto"


def load_model(name: str, config: ModelConfig, *, role: str) -> LoadedModel:
    """Load `name` for inference, as `config` says for its `role` ("target" or "draft").

    Raises UsageError when it cannot be found, is no decoder-only model, or its weights are not complete.
    """
    path = resolve_model_path(name)
    device = choose_device(config, role)
    storage = storage_options(config, role, device)
    settings = load_config(path, config, role=role)
    tokenizer = load_tokenizer(path, config, role=role)
    model = _load_weights(path, settings, config, role, dtype=_choose_dtype(config, device), **storage)
    vocab_ids = read_draft_vocab(Path(path))
    if role == "draft" and config.draft_vocab_size is not None and config.draft_vocab_data is not None:
        every = torch.arange(settings.get_text_config().vocab_size) if vocab_ids is None else vocab_ids
        always = LoadedModel(model, tokenizer, name).eos_token_ids
        vocab_ids = most_frequent(config.draft_vocab_data, config.draft_vocab_size, every, always)
    if vocab_ids is not None:
        narrow_head(model, vocab_ids)
    model = (model if "device_map" in storage else model.to(device)).eval().requires_grad_(False)
    vocab_ids = None if vocab_ids is None else vocab_ids.to(device)
    return LoadedModel(model, tokenizer, name, vocab_ids)


def load_tokenizer(path: str, config: ModelConfig, *, role: str) -> Any:
    """The tokenizer that lies with a model. Raises UsageError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, **_source_options(path, config))
    except Exception as error:  # hub, file and format errors of many kinds
        raise UsageError(f"{role} {path!r}: its tokenizer cannot be loaded: {_reason(path, error)}") from error


def load_config(path: str, config: ModelConfig, *, role: str) -> Any:
    """The settings that lie with a model. Raises UsageError when there are none, or it is no decoder-only model."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(path, **_source_options(path, config))
    except Exception as error:  # hub, file and format errors of many kinds
        raise UsageError(f"{role} {path!r}: its config cannot be loaded: {_reason(path, error)}") from error
    if settings.is_encoder_decoder:
        kind = settings.model_type
        raise UsageError(f"{role} {path!r}: {kind} is an encoder-decoder; expected a decoder-only model")
    return settings


def _load_weights(path: str, settings: Any, config: ModelConfig, role: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=settings,
            use_safetensors=True,
            output_loading_info=True,
            **options,
            **_source_options(path, config),
        )
    except Exception as error:  # hub, file and format errors of many kinds
        raise UsageError(f"{role} {path!r}: it cannot be loaded: {_reason(path, error)}") from error
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise UsageError(f"{role} {path!r}: its weights have {kind.replace('_', ' ')}: {some_of(info[kind])}")
    return model


def some_of(keys: Iterable[object], most: int = 8) -> str:
    """The first of `keys` in order, and how many more there are."""
    names = sorted(str(key) for key in keys)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _source_options(path: str, config: ModelConfig) -> dict[str, Any]:
    """A hub id is looked for in the local cache only where the hub cannot be reached."""
    local_only = not Path(path).is_dir() and not hub_is_reachable()
    return {"trust_remote_code": config.trust_remote_code, "local_files_only": local_only}


def _reason(path: str, error: Exception) -> str:
    if not Path(path).is_dir() and not hub_is_reachable():
        return "there is no such directory, the hub's cache does not hold it, and the hub cannot be reached"
    if isinstance(error, OSError | ValueError):
        return first_line(error)
    return f"{type(error).__name__}: {first_line(error)}"  # a KeyError's words alone, say, tell little


@torch.no_grad()
def narrow_head(model: Any, vocab_ids: Tensor) -> None:
    """Replace the output head by its rows `vocab_ids` [N], in place; the model then yields logits [.., N].

    Raises UsageError when an id lies beyond the head.
    """
    head = model.get_output_embeddings()
    if int(vocab_ids[-1]) >= head.weight.shape[0]:
        raise UsageError(f"{DRAFT_VOCAB_FILE}: id {int(vocab_ids[-1])} is beyond the {head.weight.shape[0]} head rows")
    narrow = nn.Linear(head.weight.shape[1], len(vocab_ids), bias=head.bias is not None, device=head.weight.device)
    narrow = narrow.to(head.weight.dtype)
    narrow.weight.copy_(head.weight[vocab_ids])
    if head.bias is not None:
        narrow.bias.copy_(head.bias[vocab_ids])
    model.set_output_embeddings(narrow)
