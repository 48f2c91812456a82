"""What the steps of a pair cost on this machine: measured once, through sessions, and kept in the user's cache folder.

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from decode.draft_length import LONGEST_DRAFT
from decode.embedded import cache_folder
from decode.models import LoadedModel
from decode.session import Session, new_session
from decode.theory import Costs

FORMAT = 1  # raised when what is measured changes, so that older files aren't used
CONTEXT = 64  # tokens before each timed pass
DENSE = 9  # every width up to here is timed: costs are not monotonic in width. Beyond, only some are
REPEATS = 5  # timed passes of each width at most; the least counts, since what disturbs only ever adds
LEAST_REPEATS = 2
BUDGET_SECONDS = 1.2  # no further repeat once so much was spent
DRAFT_STEPS = 4  # steps timed together: a draft's tokens are drawn one after another without waiting for the device
STEADY = 1.2  # the second best of a width's repeats to the best, over which the machine was busy
# Host work of a round outside the forwards: the loop's own aim. It decides little, for every length pays it alike.
ROUND_MS = 0.5

_log = logging.getLogger(__name__)
_measured: dict[str, Costs] = {}


def pair_costs(target: LoadedModel, draft: LoadedModel, most: int) -> Costs:
    """The costs of rounds of up to `most` drafted tokens: from this process, else from the cache folder, else measured.

    A cache folder that cannot be read or written is passed over, for nothing but a second of time depends on it.
    """
    key = _key(target, draft)
    file = cache_folder() / "costs" / f"{key}.json"
    known = _measured.get(key) or _read(file)
    if known is None or known.most < most:
        fresh, steady = measure_costs(target, draft, max(most, LONGEST_DRAFT))
        # What was measured once stays, so that a longer draft in between changes no other call.
        before = () if known is None else known.verify_ms
        known = replace(fresh if known is None else known, verify_ms=before + fresh.verify_ms[len(before) :])
        if steady:
            _write(file, known, target, draft)
        else:
            _log.info("draft %r: its costs were measured on a busy machine and are not kept", draft.name)
    _measured[key] = known
    return replace(known, verify_ms=known.verify_ms[: most + 1])


@torch.inference_mode()
def measure_costs(target: LoadedModel, draft: LoadedModel, most: int) -> tuple[Costs, bool]:
    """Time the pair now: 1 to 2 seconds where a pass of the target takes 40 ms. Also whether repeats agreed.

    The models are in eval mode; nothing of them is changed.
    """
    large, small = (new_session(model, 1, CONTEXT + max(most + 1, DRAFT_STEPS)) for model in (target, draft))
    start = max(1, min(CONTEXT, large.capacity - most - 1, small.capacity - DRAFT_STEPS))
    # Any tokens do, for time does not depend on them.
    ids = torch.zeros(start + max(most + 1, DRAFT_STEPS), dtype=torch.int64, device=target.device)
    widths = [w for w in _widths(most + 1) if w == 1 or start + w <= large.capacity]
    devices = {target.device, draft.device}
    for session in (large, small):
        session.extend([ids[:start]], [1])
    verify: dict[int, list[float]] = {width: [] for width in widths}
    steps: list[float] = []
    for _ in _repeats():
        for width in widths:
            verify[width].append(_timed_pass(large, ids, start, width, devices))
        steps.append(_timed_steps(small, ids, start, devices))
    least = {width: min(times[1:]) for width, times in verify.items()}
    costs = Costs(min(steps[1:]), tuple(_between(least, width) for width in range(1, most + 2)), ROUND_MS)
    return costs, median(sorted(times[1:])[1] / least[width] for width, times in verify.items()) < STEADY


def _repeats() -> Iterator[int]:
    """One repeat to warm up, which compiles what is to be compiled; then as many as the budget allows."""
    yield 0
    began = time.perf_counter()
    for repeat in range(1, REPEATS + 1):
        yield repeat
        if repeat >= LEAST_REPEATS and time.perf_counter() - began > BUDGET_SECONDS:
            return


def _widths(widest: int) -> list[int]:
    """1, 2, .. DENSE, then half as much again each time, and the widest."""
    widths = list(range(1, min(widest, DENSE) + 1))
    while widths[-1] < widest:
        widths.append(min(widths[-1] * 3 // 2, widest))
    return widths


def _between(known: dict[int, float], width: int) -> float:
    """On the line between the nearest measured widths; beyond the widest (no context holds more) its own time."""
    below = max(w for w in known if w <= width)
    above = min((w for w in known if w >= width), default=below)
    if above == below:
        return known[below]
    share = (width - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


def _timed_pass(session: Session, ids: Tensor, start: int, width: int, devices: set[torch.device]) -> float:
    """Milliseconds of a pass over `width` tokens after the first `start` of `ids`, all of them scored."""
    _finish(devices)
    began = time.perf_counter()
    session.extend([ids[: start + width]], [width])
    _finish(devices)
    taken = time.perf_counter() - began
    session.rewind([start])
    return 1000 * taken


def _timed_steps(session: Session, ids: Tensor, start: int, devices: set[torch.device]) -> float:
    """Milliseconds of one step after the first `start` of `ids`, each fed with the token that the last one chose."""
    ids = ids.clone()
    steps = max(1, min(DRAFT_STEPS, session.capacity - start))
    _finish(devices)
    began = time.perf_counter()
    for end in range(start + 1, start + steps + 1):
        (logits,) = session.extend([ids[:end]], [1])
        ids[end : end + 1] = logits.argmax(-1)[: len(ids) - end]  # behind the last step there may be no room
    _finish(devices)
    taken = time.perf_counter() - began
    session.rewind([start])
    return 1000 * taken / steps


def _finish(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _key(target: LoadedModel, draft: LoadedModel) -> str:
    """A digest of whatever costs depend on."""
    packages = {name: _version(name) for name in ("torch", "transformers", "draftsmith")}
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads()]
    facts = [FORMAT, _facts(target), _facts(draft), machine, packages]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


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
        costs = Costs(float(record["draft_ms"]), tuple(map(float, record["verify_ms"])), float(record["round_ms"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return costs if _sane([costs.draft_ms, costs.round_ms, *costs.verify_ms]) and costs.verify_ms else None


def _sane(times: Sequence[float]) -> bool:
    return all(ms > 0 and math.isfinite(ms) for ms in times)


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
