"""Caches that the command makes of the pair and rows in a folder, and ways to break and change them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from decode.config import ModelConfig
from distill.cache import CacheReport, cache
from distill.config import CacheConfig, ScoredDataConfig
from distill.teacher.store import Store, read_index

MODEL = ModelConfig(device="cpu", backend="eager")


def config_of(pair: Path, output: Path, **changes: Any) -> CacheConfig:
    settings: dict[str, Any] = {
        "target": str(pair / "target"),
        "output": str(output),
        "data": ScoredDataConfig(train=[str(pair / "rows.jsonl")], max_length=32),
        "draft": str(pair / "draft"),
        "top_k": 8,
        "model": MODEL,
    }
    return CacheConfig(**{**settings, **changes})


def made(pair: Path, output: Path, **changes: Any) -> CacheReport:
    return cache(config_of(pair, output, **changes))


def copied(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place, symlinks=True)
    return place


def change_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor * 1.01 for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def replace_ids(file: Path) -> None:
    ids = json.loads(file.read_text())["vocab_ids"]
    unused = next(i for i in range(256) if i not in ids)
    file.write_text(json.dumps({"vocab_ids": sorted([*ids[:-1], unused])}))


def damage(kind: str, folder: Path) -> str:
    """Break one shard; its name."""
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    if kind == "gone":
        shard.unlink()
    else:
        shard.write_bytes(data[:-7] if kind == "cut" else data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    return shard.name


def shards_in(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


def rewrite(folder: Path, change: Callable[[Any], Any]) -> str:
    """Change a shard's tensors behind a true checksum."""
    store = Store(folder, (read_index(folder) or {})["key"])
    name = sorted(store.checksums)[0]
    store.write(name, {k: v.clone() for k, v in change(dict(store.read(name))).items()})
    return f"{name}.safetensors"
