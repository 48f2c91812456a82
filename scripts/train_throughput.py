#!/usr/bin/env python
"""Print supervised tokens per second of training: ours, online and cached, beside TRL's GKDTrainer on the same data."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli


def main(
    target: str = "smollm2-135m",
    data: str = "configs/quickstart/train.jsonl",
    trl_python: str = sys.executable,
    num_rows: int = 128,
    batch_size: int = 8,
    steps: int = 8,
    repeats: int = 2,
) -> None:
    """Train one draft (256 wide, 4 layers, all tokens) on the forward KL, each method in turn, in processes of its own.

    Args:
        trl_python: The interpreter of an environment that has trl.
        num_rows: Answers that take part, of the first in `data`.
        steps: Optimiser steps; the first is not timed.
    """
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        small = folder / "train.jsonl"
        small.write_text("".join(Path(data).read_text().splitlines(keepends=True)[:num_rows]))
        spec = prepare(target, str(small), batch_size, steps, folder)
        methods = ("trl", "rows", "packed", "cached rows", "cached")
        found: dict[str, list[float]] = {name: [] for name in methods}
        for repeat in range(repeats):
            for name in methods:
                found[name].append(measure(name, spec, trl_python, folder / f"{repeat}-{name.replace(' ', '-')}"))
                print(f"{name}: {found[name][-1]:.0f} supervised tokens/s", file=sys.stderr)
    table = Table("method", "supervised tokens/s (best)", "least", "over TRL", title=f"batches of {batch_size} rows")
    for name, speeds in found.items():
        over = f"{max(speeds) / max(found['trl']):.2f}"
        table.add_row(TITLES[name], f"{max(speeds):.0f}", f"{min(speeds):.0f}", over)
    Console().print(table)


TITLES = {
    "trl": "TRL's GKDTrainer, lmbda 0, beta 0",
    "rows": "ours, online, the same rows in each batch",
    "packed": "ours, online, packed",
    "cached rows": "ours, cached (top 32), the same rows in each batch",
    "cached": "ours, cached (top 32), packed",
}


def prepare(target: str, data: str, batch_size: int, steps: int, folder: Path) -> dict[str, Any]:
    """Make the draft and the batches, so that each process only trains."""
    from decode.models import resolve_model_path
    from distill.config import InitConfig
    from distill.drafts.make import init_draft

    draft = init_draft(InitConfig(target, str(folder / "draft"), hidden_size=256, num_layers=4))
    place = resolve_model_path(target)
    return {"target": place, "draft": str(draft), "data": data, "batch_size": batch_size, "steps": steps}


def measure(name: str, spec: dict[str, Any], trl_python: str, folder: Path) -> float:
    """Supervised tokens per second of one method, all steps but the first."""
    folder.mkdir()
    file = folder / "spec.json"
    file.write_text(json.dumps(spec | {"method": name, "folder": str(folder)}))
    ours = [sys.executable, __file__, "--one", str(file)]
    answer = run(ours)
    if name == "trl":
        batches = folder / "batches.json"
        marks = json.loads(run([trl_python, str(Path(__file__).with_name("trl_gkd.py")), str(batches)]))
        return json.loads(answer)["tokens"] / (marks[-1] - marks[0])
    figures = json.loads(answer)
    return figures["tokens"] / figures["seconds"]


def run(command: list[str]) -> str:
    """The last line that begins with `marks`, without that word."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("marks ")]
    if done.returncode or not lines:
        raise SystemExit(f"train_throughput: {' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return lines[-1].removeprefix("marks ")


def one(spec: dict[str, Any]) -> None:
    """In a process of its own: train as `fit` does and read its log; for TRL, write the batches that it is to see."""
    import torch

    from distill.config import DataConfig, FitConfig, JudgeConfig, OptimizerConfig, TeacherConfig
    from distill.training.fit import fit
    from distill.training.history import steps_table
    from distill.training.run_parts import load_parts

    name, folder = spec["method"], Path(spec["folder"])
    data = DataConfig([spec["data"]], batch_size=spec["batch_size"], packing=name in ("packed", "cached"))
    judge = JudgeConfig(every_n_steps=spec["steps"], num_prompts=1)
    config = FitConfig(
        spec["target"],
        spec["draft"],
        str(folder / "run"),
        data,
        teacher=TeacherConfig("cached") if "cached" in name else TeacherConfig(),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        judge=replace(judge, decode=replace(judge.decode, max_new_tokens=4)),
        max_steps=spec["steps"],
        trainer={"log_every_n_steps": 1},
    )
    feed = load_parts(config).feed
    windows = [feed.schedule.window(step) for step in range(spec["steps"])]
    chosen = [[feed.train_examples[i] for batch in window for pack in batch for i in pack] for window in windows]
    tokens = sum(example.num_supervised for window in chosen[1:] for example in window)
    if name == "trl":
        batches = [[[example.input_ids, example.mask] for example in window] for window in chosen]
        cuda = torch.cuda.is_available()
        told = {"target": spec["target"], "draft": spec["draft"], "batches": batches, "bf16": cuda, "use_cpu": not cuda}
        (folder / "batches.json").write_text(json.dumps(told))
        print("marks " + json.dumps({"tokens": tokens}))
        return
    fit(config)
    rows = steps_table(folder / "run").rows()
    print("marks " + json.dumps({"tokens": tokens, "seconds": rows[-1]["seconds"] - rows[0]["seconds"]}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(json.loads(Path(sys.argv[2]).read_text()))
    else:
        auto_cli(main, as_positional=False)
