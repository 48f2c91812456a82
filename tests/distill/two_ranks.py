"""A program for test_fit_ranks: runs of `ranks_config` in two gloo processes. Usage: two_ranks.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

from decode.config import ModelConfig
from distill.config import DataConfig, FitConfig, OptimizerConfig, TeacherConfig
from distill.training.fit import fit
from tests.fit_runs import fit_config

ONE_SEGMENT = {"max_time": {"seconds": 0}}
"""Trainer options that end a run at its next checkpoint."""


STARTS: list[tuple[str, dict[str, Any]]] = [
    ("two", {}),
    ("grown", {"strategy": "ddp"}),
    ("shrunk", {"strategy": "ddp_find_unused_parameters_false", **ONE_SEGMENT}),
    ("sharded", {"strategy": "fsdp2", **ONE_SEGMENT}),
    ("sharded", {"strategy": "fsdp2"}),
    ("sharded_grown", {"strategy": "fsdp2"}),
    ("sharded_shrunk", {"strategy": "fsdp2", **ONE_SEGMENT}),
    ("narrow_sharded", {"strategy": "fsdp2"}),
]


def ranks_config(folder: Path, output: str, devices: int, **trainer: Any) -> FitConfig:
    """Windows of 3 x 2 rows and a short last one, whose last micro-batch has a single row: one rank goes without.

    Outputs that begin with narrow are of a draft with a reduced vocabulary and an online teacher.
    """
    data = DataConfig(train=[str(folder / "rows.jsonl")], max_length=32, batch_size=2, packing=False)
    narrow: dict[str, Any] = {
        "draft": str(folder / "narrow"),
        "teacher": TeacherConfig(kind="online"),
        "gradient_checkpointing": devices > 1,
    }
    return fit_config(
        folder,
        data=data,
        output=str(folder / output),
        max_steps=None,
        max_epochs=1,
        optimizer=OptimizerConfig(accumulate=3, gradient_clip=0.1),
        model=ModelConfig(device="cpu", dtype="float64", backend="eager"),
        trainer={"devices": devices, "log_every_n_steps": 1, "enable_progress_bar": False, **trainer},
        **(narrow if output.startswith("narrow") else {}),
    )


def main(folder: Path) -> None:
    """Whole runs, the rest of some that a single process began, and beginnings of some for it to end."""
    for output, options in STARTS:
        report = fit(ranks_config(folder, output, 2, **options))
        # in one write: the other process prints too
        sys.stdout.write(f"{output}: {report.step} of {report.num_steps} from {report.resumed_from}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
