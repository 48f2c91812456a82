"""A program for test_fit_ranks_killed: a run of `ranks_config` in two gloo processes, one of which kills itself.

Usage: killed_ranks.py FOLDER OUTPUT STRATEGY RANK CALL: process RANK is gone after its CALL-th micro-batch; 0: none.
"""

import os
import sys
from pathlib import Path

from distill.training.fit import fit
from distill.training.module import Distillation
from tests.distill.killed_runs import after, on_call
from tests.distill.two_ranks import ranks_config


def main(folder: Path, output: str, strategy: str, rank: str, call: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == rank:
        on_call(Distillation, "training_step", call, after)
    report = fit(ranks_config(folder, output, 2, strategy=strategy))
    sys.stdout.write(f"{report.step} from {report.resumed_from}\n")


if __name__ == "__main__":
    _, place, name, kind, number, count = sys.argv
    main(Path(place), name, kind, number, int(count))
