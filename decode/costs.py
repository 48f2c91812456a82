"""What rounds of a pair cost on this machine: measured once and kept in the user's cache folder.

Figures taken while the machine was busy serve the process that took them and are not kept. To measure anew, delete the
files in `costs/` of that folder.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.draft_length import LONGEST_DRAFT
from decode.embedded import cache_folder
from decode.models import LoadedModel
from decode.round_times import measure_costs, rows_timed
from decode.theory import Costs

FORMAT = 2  # raised when what is measured changes, so that older files aren't used

_log = logging.getLogger(__name__)
_measured: dict[str, Costs] = {}


def pair_costs(target: LoadedModel, draft: LoadedModel, config: DecodeConfig) -> Costs:
    """The costs of rounds of as many drafted tokens as `config`, whose sampling is stated, allows: from this process,
    else from the cache folder, else measured.

    A cache folder that cannot be read or written is passed over, for nothing but three seconds of time depends on it.
    """
    key, most = _key(target, draft, config), config.most_drafted
    file = cache_folder() / "costs" / f"{key}.json"
    known = _measured.get(key) or _read(file)
    if known is None or known.most < most:
        fresh, steady = measure_costs(target, draft, config, max(most, LONGEST_DRAFT))
        if fresh is None:  # there is nothing to choose
            return Costs(1.0, (1.0,) * (most + 1), 0.0)
        # What was measured once stays, so that a longer draft in between changes no other call.
        before = () if known is None else known.verify_ms
        known = replace(fresh if known is None else known, verify_ms=before + fresh.verify_ms[len(before) :])
        if steady:
            _write(file, known, target, draft)
        else:
            _log.info("draft %r: its costs were measured on a busy machine and are not kept", draft.name)
    _measured[key] = known
    return replace(known, verify_ms=known.verify_ms[: most + 1])


def _key(target: LoadedModel, draft: LoadedModel, config: DecodeConfig) -> str:
    """A digest of whatever costs depend on."""
    packages = {name: _version(name) for name in ("torch", "transformers", "draftsmith")}
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads()]
    # The size that is asked for, not how many texts are left of it: a row's length is not to depend on its neighbours.
    way: list[Any] = [rows_timed(config), config.verifier, config.log_probs]
    way += [_used(sampling) for sampling in (config.sampling, config.draft_sampling)]
    facts = [FORMAT, _facts(target), _facts(draft), way, machine, packages]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _used(sampling: SamplingConfig | None) -> list[str] | None:
    """Which settings are in use: what they are set to changes no cost."""
    if sampling is None:
        return None
    plain = vars(replace(SamplingConfig(), temperature=0.0 if sampling.greedy else sampling.temperature))
    names = [name for name, value in vars(sampling).items() if name != "temperature" and value != plain[name]]
    return ["greedy" if sampling.greedy else "sampled", *sorted(names)]


def _facts(loaded: LoadedModel) -> list[Any]:
    """What of one model its costs depend on. Values of weights don't matter, so all checkpoints of a fit share them."""
    model, device = loaded.model, loaded.device
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    weights = list(model.parameters())
    kinds = sorted({(str(w.dtype), str(w.device)) for w in weights})
    size = sum(w.numel() for w in weights)
    narrow = None if loaded.vocab_ids is None else len(loaded.vocab_ids)
    attention = getattr(model.config, "_attn_implementation", None)
    kept = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return [type(model).__name__, kept, size, kinds, chip, loaded.backend, narrow, attention]


@functools.cache
def _version(package: str) -> str | None:
    with contextlib.suppress(ImportError):
        return version(package)
    return None  # run from a checkout that is not installed


def _read(file: Path) -> Costs | None:
    """What `file` holds, or None when it is missing, damaged or no record of costs."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        one = (float(record[name]) for name in ("draft_ms", "round_ms", "start_ms"))
        costs = Costs(next(one), tuple(map(float, record["verify_ms"])), next(one), next(one))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return costs if _sane([costs.draft_ms, costs.round_ms, costs.start_ms, *costs.verify_ms]) else None


def _sane(times: Sequence[float]) -> bool:
    return len(times) > 3 and all(ms >= 0 and math.isfinite(ms) for ms in times) and min(times[3:]) > 0


def _write(file: Path, costs: Costs, target: LoadedModel, draft: LoadedModel) -> None:
    """Atomic: several processes may measure the same pair at once; each leaves a whole file."""
    record = {"target": target.name, "draft": draft.name, **asdict(costs)}
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        _log.debug("%s: the costs are not kept: %s", file, error)
