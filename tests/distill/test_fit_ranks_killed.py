"""Two processes, of which one is killed twice in a row, end as one process that never stopped."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill.training.fit import fit
from tests.distill.two_ranks import ranks_config
from tests.draft_files import make_draft, save_target
from tests.fit_runs import distance, write_id_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, rows, and the run of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    save_target(folder / "target")
    write_id_rows(folder / "rows.jsonl", count=22)
    make_draft(folder / "target", folder / "draft")
    assert fit(ranks_config(folder, "one", 1)).step == 4
    return folder


def start(folder: Path, strategy: str, rank: int = 0, call: int = 0) -> tuple[int, str]:
    """Exit status and output. When the first process is gone, what is left of the other goes too, as launchers do."""
    words = [str(folder), f"killed_{strategy}", strategy, str(rank), str(call)]
    told = folder / "told.txt"
    with told.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.distill.killed_ranks", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return status, told.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_r02_t32_killed_twice_in_a_row_two_processes_still_equal_one(strategy: str, folder: Path) -> None:
    draw = random.Random(strategy)
    # the first after the checkpoint of step 2, of three micro-batches each; the next anywhere before that of step 4
    for rank, call in ((0, draw.randint(7, 9)), (1, draw.randint(1, 4))):
        assert start(folder, strategy, rank, call)[0] != 0
        assert (folder / f"killed_{strategy}" / "checkpoints" / "last.ckpt").resolve().name == "step-000002.ckpt"
    status, told = start(folder, strategy)
    assert status == 0, told
    assert "4 from 2" in told.splitlines(), told
    for name in ("step-000002.ckpt", "step-000004.ckpt"):
        one, other = (
            torch.load(folder / run / "checkpoints" / name, weights_only=True) for run in ("one", f"killed_{strategy}")
        )
        assert distance(one["state_dict"], other["state_dict"]) < 1e-9
        for number, kept in one["optimizer_states"][0]["state"].items():
            assert distance(kept, other["optimizer_states"][0]["state"][number]) < 1e-9
