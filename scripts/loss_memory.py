#!/usr/bin/env python
"""Print the peak memory of a loss, forward and backward: from whole logits, in chunks, and liger-kernel's in chunks.

Each in a process of its own, on the same hidden states and heads; liger takes part where it is installed.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

METHODS = ("whole logits", "in chunks", "liger", "liger, small chunks")


def main(
    positions: int = 2048,
    vocab_size: int = 49152,
    target_width: int = 576,
    draft_width: int = 256,
    loss: str = "forward_kl",
    device: str = "cpu",
    repeats: int = 1,
    one: str | None = None,
) -> None:
    """Measure the loss of `positions` supervised positions, in fp32, and compare the gradients.

    Args:
        target_width: Width of the target's hidden states.
        draft_width: Width of the draft's hidden states.
        loss: A loss of docs/losses.md; liger has forward_kl, reverse_kl and jensen_shannon.
        repeats: Runs per process; the least time is shown: of the processor on a CPU, so that other work counts little.
        one: For the script's own use: a file that says what to measure in this process.
    """
    if one is not None:
        measure(json.loads(Path(one).read_text()))
        return
    from rich.console import Console
    from rich.table import Table

    sizes = {"positions": positions, "vocab_size": vocab_size, "widths": [draft_width, target_width], "loss": loss}
    with tempfile.TemporaryDirectory() as place:
        found = {}
        for name in METHODS:
            if name.startswith("liger") and (importlib.util.find_spec("liger_kernel") is None or loss not in LIGER):
                continue
            spec = Path(place) / f"{len(found)}.json"
            spec.write_text(
                json.dumps({**sizes, "device": device, "repeats": repeats, "method": name, "folder": place})
            )
            subprocess.run([sys.executable, __file__, "--one", str(spec)], check=True)
            found[name] = json.loads((Path(place) / f"{name}.json").read_text())
        errors = {name: difference(Path(place), name) for name in found}
    whole = found["whole logits"]
    table = Table("", "peak MB", "of whole", "seconds", "gradients differ by", title=f"{loss}, {sizes}, {device}")
    for name, figures in found.items():
        share = f"{figures['peak'] / whole['peak']:.3f}"
        table.add_row(name, f"{figures['peak'] / 1e6:.0f}", share, f"{figures['seconds']:.2f}", f"{errors[name]:.1e}")
    Console().print(table)


LIGER = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": 0.5}


def difference(folder: Path, name: str) -> float:
    """Relative distance of the gradients from those of whole logits; of all of them, as one vector."""
    import torch
    from safetensors.torch import load_file

    found, expected = (load_file(folder / f"{each}.safetensors") for each in (name, "whole logits"))
    far = torch.stack([(found[key] - expected[key]).norm() for key in expected]).norm()
    return float(far / torch.stack([value.norm() for value in expected.values()]).norm())


def measure(spec: dict[str, Any]) -> None:
    """Run one method, after a small run that loads what is loaded once; write its figures and gradients."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    (draft_width, target_width), count, device = spec["widths"], spec["positions"], spec["device"]
    torch.manual_seed(0)
    head = nn.Linear(draft_width, spec["vocab_size"], bias=False, device=device)
    target_head = nn.Linear(target_width, spec["vocab_size"], bias=False, device=device).requires_grad_(False)
    hidden = (3 * torch.randn(count, draft_width, device=device)).requires_grad_()
    target_hidden = 3 * torch.randn(count, target_width, device=device)
    mean_loss = {"whole logits": whole, "in chunks": in_chunks}.get(spec["method"], liger)
    mean_loss(spec, hidden[:8], head, target_hidden[:8], target_head).backward()
    seconds, peak, clock = [], 0, time.process_time if device == "cpu" else time.perf_counter
    for _ in range(spec["repeats"]):
        hidden.grad = head.weight.grad = None
        start_peak = begin_peak(device)
        start = clock()
        mean_loss(spec, hidden, head, target_hidden, target_head).backward()
        peak = max(peak, end_peak(device) - start_peak)
        seconds.append(clock() - start)
    assert hidden.grad is not None and head.weight.grad is not None
    out = Path(spec["folder"])
    save_file({"hidden": hidden.grad, "head": head.weight.grad}, out / f"{spec['method']}.safetensors")
    (out / f"{spec['method']}.json").write_text(json.dumps({"peak": peak, "seconds": min(seconds)}))


def whole(spec: dict[str, Any], hidden: Any, head: Any, target_hidden: Any, target_head: Any) -> Any:
    """All logits of both models at once."""
    from distill.laws import FullLaw

    law = FullLaw(target_head(target_hidden).log_softmax(-1))
    return evaluator(spec, law, len(hidden))(0, len(hidden), head(hidden))[0]


def in_chunks(spec: dict[str, Any], hidden: Any, head: Any, target_hidden: Any, target_head: Any) -> Any:
    from distill.fused import chunk_size, chunked
    from distill.laws import HeadLaw

    law = HeadLaw(target_hidden, target_head)
    return chunked(hidden, head, evaluator(spec, law, len(hidden)), chunk_size(spec["vocab_size"]))[0]


def evaluator(spec: dict[str, Any], law: Any, count: int) -> Any:
    """The mean loss over all positions, as fused.chunked asks for it."""
    import torch

    from distill.config import OPTIONS, LossConfig
    from distill.laws import Columns
    from distill.losses import LOSSES, Pair

    columns = Columns(spec["vocab_size"]).to(spec["device"])
    following = torch.zeros(count, dtype=torch.int64, device=spec["device"])
    options = {key: getattr(LossConfig(), key) for key in OPTIONS.get(spec["loss"], ())}

    def evaluate(start: int, stop: int, logits: Any) -> Any:
        pair = Pair(law.part(start, stop), logits, columns, following[start:stop])
        losses = LOSSES[spec["loss"]](pair, **options)
        return losses.sum() / count, losses.detach(), losses.detach()

    return evaluate


def liger(spec: dict[str, Any], hidden: Any, head: Any, target_hidden: Any, target_head: Any) -> Any:
    """As it comes, or with chunks of as many positions as ours; not compiled, for that takes a compiler."""
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    from distill.fused import chunk_size

    size = chunk_size(spec["vocab_size"]) if "small" in spec["method"] else 1024
    function = LigerFusedLinearJSDLoss(0.0, 1.0, LIGER[spec["loss"]], compiled=False, chunk_size=size)
    following = torch.zeros(len(hidden), dtype=torch.int64, device=spec["device"])
    return function(hidden, head.weight, target_hidden, target_head.weight, following)


def begin_peak(device: str) -> int:
    """Bytes held now; the peak counts from here."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def end_peak(device: str) -> int:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(key: str) -> int:
    """A size that Linux keeps of this process, in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
