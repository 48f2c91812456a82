"""`draftsmith cache`: scores data with the target once, or checks a cache that was made."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from torch import Tensor

from decode.draft_vocab import read_draft_vocab
from decode.errors import DraftsmithError, UsageError, require
from decode.health import check_healthy
from decode.model_facts import context_limit
from decode.models import LoadedModel, load_model
from distill.config import CacheConfig, TeacherConfig
from distill.data.examples import Example, load_examples
from distill.data.rows import check_source
from distill.folders import run_folder
from distill.remote.scores import RemoteScorer
from distill.remote.target import describe_target
from distill.runs import record_run
from distill.teacher.cached import check_top_k, fill_store
from distill.teacher.choose import runner_of
from distill.teacher.key import UNKNOWN, CacheKey, cache_key, differences, text_key
from distill.teacher.scoring import Scorer, TargetScorer
from distill.teacher.store import Size, Store, read_index
from distill.teacher.verify import Compared, compare, is_shapely
from distill.weights import weights_sha256

MADE_BY = "draftsmith cache"


@dataclass(frozen=True)
class CacheReport:
    """A cache as it stands when `cache` returns."""

    output: Path
    size: Size
    num_scored: int
    """Positions that this call scored."""
    seconds: float
    """The whole of it, the scoring and the reading of what was there."""


def cache(config: CacheConfig) -> CacheReport:
    """Score what `config.output` lacks of the data. Killed at any point, the same call goes on from the last shard.

    Raises UsageError for what cannot be used, and where the folder is a cache of something else: each difference is
    named with both values.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for source in (*config.data.train, *config.data.validation):
        check_source(source)
    vocab_ids = _draft_ids(config.draft)
    target, scorer, key = _prepare(config, vocab_ids)
    if vocab_ids is not None:
        legal = f"a draft of the target's {target.vocab_size} ids"
        require(int(vocab_ids.max()) < target.vocab_size, "draft", config.draft, legal)
    with run_folder(str(config.output), MADE_BY) as folder:
        _require_same(folder, key)
        examples = _load(config, target, console)
        record_run(folder, config)
        store = Store(folder, key.as_dict())
        started = time.perf_counter()
        batch_size = max(config.batch_size, config.server.concurrency if config.server.url else 1)
        filled = fill_store(scorer, store, examples, batch_size, console)
    return CacheReport(folder, store.size(), filled.num_scored, time.perf_counter() - started)


def _prepare(config: CacheConfig, vocab_ids: Tensor | None) -> tuple[LoadedModel, Scorer, CacheKey]:
    """The target, or what is known of it where a server runs it; what scores; and the key of the cache."""
    kept = TeacherConfig(kind="cached", top_k=config.top_k, sampled=config.sampled, store=config.store)
    name = str(config.target)
    if config.server.url is not None:
        target = describe_target(name, config.model)
        remote = RemoteScorer(config.server, config.top_k, config.temperature, target.vocab_size, vocab_ids)
        text = text_key(target.tokenizer, config.data.max_length)
        return target, remote, cache_key(kept, UNKNOWN, UNKNOWN, config.temperature, vocab_ids, text)
    target = load_model(name, config.model, role="target")
    check_healthy(target, "target")
    check_top_k(config.top_k, target.vocab_size, section="")
    text, weights = text_key(target.tokenizer, config.data.max_length), weights_sha256(target.model)
    key = cache_key(kept, weights, str(target.model.dtype), config.temperature, vocab_ids, text)
    runner = _runner(target, config)
    return target, TargetScorer(runner, config.top_k, config.temperature, vocab_ids, config.sampled), key


def _runner(target: LoadedModel, config: CacheConfig) -> Any:
    legal = "auto, eager or prepacked here: texts are scored whole, not decoded"
    backend = config.model.backend
    require(backend in ("auto", "eager", "prepacked"), "model.backend", backend, legal)
    return target.model if backend == "eager" else runner_of(target.model)


def _draft_ids(draft: str | None) -> Tensor | None:
    if draft is None:
        return None
    folder = Path(draft).expanduser()
    require((folder / "config.json").is_file(), "draft", draft, "the directory of a draft, such as init makes")
    return read_draft_vocab(folder)


def _require_same(folder: Path, key: CacheKey) -> None:
    index = read_index(folder)
    if index is not None and (different := differences(index["key"], key.as_dict())):
        told = "; ".join(different)
        raise UsageError(f"output: {folder} is a cache of something else: {told}; choose another folder")


def _load(config: CacheConfig, target: LoadedModel, console: Console) -> list[Example]:
    """The rows of all files, each as fit makes it an example."""
    found: list[Example] = []
    data, limit = config.data, context_limit(target.model)
    for name, paths in (("data", data.train), ("validation", data.validation)):
        if not paths:
            continue
        examples, report = load_examples(paths, target.tokenizer, data.max_length, data.on_bad_row, target.vocab_size)
        for line in report.lines():
            console.print(f"{name}: {line}")
        found += examples
    longest = max(len(example.input_ids) for example in found)
    require(longest <= limit, "data.max_length", data.max_length, f"{limit} at most, which is what the target takes")
    return found


@dataclass(frozen=True)
class VerifyReport:
    """A whole cache, and how far a sample of it is from what the target says."""

    size: Size
    compared: Compared


def verify(config: CacheConfig) -> VerifyReport:
    """Check every shard of `config.verify`, and score a sample of positions again.

    The target is the one that the cache was made with, or `config.target`. Raises DraftsmithError that names the
    damaged shards, or tells that the laws are not the target's.
    """
    folder = Path(str(config.verify)).expanduser()
    index = read_index(folder)
    if index is None:
        raise UsageError(f"verify: {config.verify} holds no cache; expected the output of `{MADE_BY}`")
    store = Store(folder, index["key"])
    if damaged := store.damaged() or [name for name in store.checksums if not is_shapely(store.read(name), store.key)]:
        names = ", ".join(store.path(name).name for name in damaged)
        raise DraftsmithError(f"{folder}: damaged: {names}; the command that made the cache makes them again")
    target = load_model(config.target or _made_with(folder), config.model, role="target")
    _require_weights(store, target)
    compared = compare(store, runner_of(target.model), config.verify_positions)
    if not compared.agrees({str(target.model.dtype), store.key["dtype"]}):
        raise DraftsmithError(f"{folder}: its laws are not those of {target.name!r}: {compared}")
    return VerifyReport(store.size(), compared)


def _require_weights(store: Store, target: LoadedModel) -> None:
    found, now = store.key["target_sha256"], weights_sha256(target.model)
    if found not in (now, UNKNOWN):
        raise UsageError(f"target: {target.name!r} has the weights {now[:12]}, the cache was scored with {found[:12]}")


def _made_with(folder: Path) -> str:
    """The target that a cache's own settings name."""
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return str(settings["target"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"target: none is given, and {folder}/config.yaml names none") from error
