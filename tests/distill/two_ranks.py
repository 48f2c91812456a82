"""A program for test_fit_ranks: the run of `ranks_config` in two gloo processes. Usage: two_ranks.py FOLDER."""

import sys
from pathlib import Path

from decode.config import ModelConfig
from distill.config import DataConfig, FitConfig, OptimizerConfig
from distill.training.fit import fit
from tests.fit_runs import fit_config


def ranks_config(folder: Path, output: str, devices: int) -> FitConfig:
    """Windows of 3 x 2 rows and a short last one, whose last micro-batch has a single row: one rank goes without."""
    data = DataConfig(train=[str(folder / "rows.jsonl")], max_length=32, batch_size=2, packing=False)
    return fit_config(
        folder,
        data=data,
        output=str(folder / output),
        max_steps=None,
        max_epochs=1,
        optimizer=OptimizerConfig(accumulate=3),
        model=ModelConfig(device="cpu", dtype="float64", backend="eager"),
        trainer={"devices": devices, "log_every_n_steps": 1, "enable_progress_bar": False},
    )


if __name__ == "__main__":
    report = fit(ranks_config(Path(sys.argv[1]), "two", devices=2))
    sys.stdout.write(f"{report.step} of {report.num_steps}\n")  # in one write: the other process prints too
