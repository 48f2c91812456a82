"""Builds the methods that bench compares, from one loaded pair: each backend is prepared once, whole drafts are read
again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decode.backends import with_backend
from decode.benchmark import Method, decoder_method, transformers_method
from decode.config import DecodeConfig, ModelConfig
from decode.decoder import SpeculativeDecoder
from decode.models import LoadedModel, resolve_model_path
from decode.peers import flashspec_method
from decode.round_times import measure_costs
from decode.theory import Costs
from distill.results.bench_names import ASSISTED, FLASHSPEC, LOOKUP, TRANSFORMERS, MethodName

LOOKUP_TOKENS = 10  # as transformers' guide has it


@dataclass
class Pair:
    """A target and its draft as they were loaded, and as each backend runs them."""

    target: LoadedModel
    draft: LoadedModel
    model: ModelConfig
    backend_seconds: dict[str, float] = field(default_factory=dict)  # to prepare both models, by the name asked for
    _ready: dict[str, tuple[LoadedModel, LoadedModel]] = field(default_factory=dict)
    _whole: Any = None

    def ready(self, backend: str) -> tuple[LoadedModel, LoadedModel]:
        """Both models with `backend` to run them."""
        if backend not in self._ready:
            started = time.perf_counter()
            self._ready[backend] = with_backend(self.target, backend), with_backend(self.draft, backend)
            self.backend_seconds[backend] = time.perf_counter() - started
        return self._ready[backend]

    def whole_draft(self) -> Any:
        """The draft with all rows of its head, as other packages load it; they cannot use a narrowed one."""
        if self._whole is None:
            self._whole = self.draft.model if self.draft.vocab_ids is None else self._load_whole()
        return self._whole

    def _load_whole(self) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(self.draft.name),
            dtype=self.draft.model.dtype,
            use_safetensors=True,
            trust_remote_code=self.model.trust_remote_code,
        )
        return model.to(self.draft.device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Entry:
    """A method, and what bench knows of it beside its name."""

    name: MethodName
    method: Method
    target_backend: str | None = None  # what runs the forwards; None for others' methods
    draft_backend: str | None = None
    costs: Costs | None = None  # of the pair with this method's backend; None for others' methods
    costs_agree: bool = True  # whether repeats of their measurement did


def build_entries(names: Sequence[MethodName], pair: Pair, config: DecodeConfig) -> list[Entry]:
    """A method for each name. `config` states the sampling. Raises UsageError for what cannot run here."""
    entries = [_ours(name, pair, config) if name.is_ours else _theirs(name, pair, config) for name in names]
    return _with_costs(entries, pair, config)


def _ours(name: MethodName, pair: Pair, config: DecodeConfig) -> Entry:
    target, draft = pair.ready(name.backend or pair.model.backend)
    if not name.is_drafting:
        return Entry(name, decoder_method(name.text, SpeculativeDecoder(target), config), target.backend)
    settings = replace(
        config,
        draft_length=name.kind,  # the name was checked
        num_speculative_tokens=name.length,
        verifier=name.verifier or "auto",  # type: ignore[arg-type]
    )
    method = decoder_method(name.text, SpeculativeDecoder(target, draft), settings)
    return Entry(name, method, target.backend, draft.backend)


def _theirs(name: MethodName, pair: Pair, config: DecodeConfig) -> Entry:
    text, target = name.text, pair.target
    if name.kind == TRANSFORMERS:
        method = transformers_method(text, target, config)
    elif name.kind == ASSISTED:
        method = transformers_method(text, target, config, pair.whole_draft(), num_assistant_tokens=name.length)
    elif name.kind == LOOKUP:
        method = transformers_method(text, target, config, prompt_lookup_tokens=name.length or LOOKUP_TOKENS)
    else:
        assert name.kind == FLASHSPEC
        method = flashspec_method(text, target, pair.whole_draft(), config, name.length)
    return Entry(name, method)


def _with_costs(entries: list[Entry], pair: Pair, config: DecodeConfig) -> list[Entry]:
    """Measure each backend's costs now, in the same minutes as the methods: kept ones may be of another day."""
    most = max((_most(entry.name) for entry in entries), default=0)
    found: dict[str, tuple[Costs | None, bool]] = {}
    measured = []
    for entry in entries:
        if entry.name.is_ours and most:
            backend = entry.name.backend or pair.model.backend
            if backend not in found:
                found[backend] = measure_costs(*pair.ready(backend), replace(config, batch_size=1), most)
            entry = replace(entry, costs=found[backend][0], costs_agree=found[backend][1])
        measured.append(entry)
    return measured


def _most(name: MethodName) -> int:
    if not name.is_drafting:
        return 0
    return DecodeConfig(draft_length=name.kind, num_speculative_tokens=name.length).most_drafted
