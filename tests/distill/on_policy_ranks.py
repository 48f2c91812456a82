"""A program for test_on_policy_runs: a run of all kinds of texts in so many gloo processes, or one that is killed.

Usage: on_policy_ranks.py FOLDER OUTPUT DEVICES [BATCH], killed after so many micro-batches where BATCH is given.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from decode.config import ModelConfig
from distill.config import DataConfig, FitConfig, TeacherConfig
from distill.training.fit import fit
from distill.training.module import Distillation
from tests.distill.killed_runs import after, on_call
from tests.fit_runs import fit_config


def ranks_config(folder: Path, output: str, devices: int, sections: dict[str, Any], **changes: Any) -> FitConfig:
    """Windows of two micro-batches of three rows, half of them made texts; no dropout, whose draws differ by rank."""
    settings: dict[str, Any] = {
        "draft": str(folder / "narrow"),
        "data": DataConfig(train=[str(folder / "rows.jsonl")], max_length=32, batch_size=3, packing=False),
        "teacher": TeacherConfig(),
        "model": ModelConfig(device="cpu", dtype="float64", backend="eager"),
        "trainer": {"devices": devices, "log_every_n_steps": 1, "enable_progress_bar": False},
    }
    return fit_config(folder, output=str(folder / output), **{**settings, **sections, **changes})


def main(folder: Path, output: str, devices: int, killed_at: int) -> None:
    from tests.distill.test_on_policy_runs import KINDS

    torch.set_num_threads(1)
    if killed_at:
        on_call(Distillation, "training_step", killed_at, after)
    report = fit(ranks_config(folder, output, devices, KINDS["all"]))
    sys.stdout.write(f"{output}: {report.step} of {report.num_steps} from {report.resumed_from}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int((*sys.argv, "0")[4]))
