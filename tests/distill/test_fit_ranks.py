"""Two processes train to what one does, from the start or from where the other left off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill.training.fit import FitReport, fit
from distill.training.history import TIMED_COLUMNS, metrics_table, steps_table
from distill.training.run_parts import load_parts
from tests.distill.two_ranks import ONE_SEGMENT, ranks_config
from tests.draft_files import make_draft, save_target
from tests.fit_runs import distance, write_id_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FitReport, subprocess.CompletedProcess[str]]:
    """One run by one process, one by two, and two that were each begun by so many and ended by the others."""
    folder = tmp_path_factory.mktemp("ranks")
    save_target(folder / "target")
    write_id_rows(folder / "rows.jsonl", count=22)
    make_draft(folder / "target", folder / "draft")
    assert fit(ranks_config(folder, "grown", 1, **ONE_SEGMENT)).step == 2
    two = subprocess.run(
        [sys.executable, "-m", "tests.distill.two_ranks", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert two.returncode == 0, two.stderr
    assert fit(ranks_config(folder, "shrunk", 1)).resumed_from == 2
    return folder, fit(ranks_config(folder, "one", 1)), two


def test_t32_two_gloo_ranks_go_through_the_whole_run(
    runs: tuple[Path, FitReport, subprocess.CompletedProcess[str]],
) -> None:
    folder, one, two = runs
    feed = load_parts(ranks_config(folder, "one", devices=1)).feed
    assert [len(rows) for rows in feed.schedule.window(feed.num_steps - 1)][-1] == 1
    assert one.complete and one.num_steps > 2
    for told in (f"two: {one.step} of {one.step} from None", f"grown: {one.step} of {one.step} from 2"):
        assert two.stdout.count(told) == 2, two.stdout  # both ranks came to the end
    assert two.stdout.count(f"shrunk: 2 of {one.step} from None") == 2
    assert "trainer.devices: continues with 2, was 1" in two.stderr
    assert "sync_dist" not in two.stderr


@pytest.mark.parametrize("other", ["two", "grown", "shrunk"])
def test_t32_r15_however_many_processes_a_run_has_it_equals_one(
    other: str, runs: tuple[Path, FitReport, subprocess.CompletedProcess[str]]
) -> None:
    folder = runs[0]
    names = [sorted(p.name for p in (folder / run / "checkpoints").iterdir()) for run in ("one", other)]
    assert names[0] == names[1]
    for name in names[0]:
        states = [
            torch.load(folder / run / "checkpoints" / name, weights_only=True)["state_dict"] for run in ("one", other)
        ]
        assert distance(*states) < 1e-9
    for table in (metrics_table, steps_table):
        rows = [table(folder / run).rows() for run in ("one", other)]
        assert len(rows[0]) == len(rows[1])
        for a, b in zip(*rows, strict=True):
            for column in a.keys() - set(TIMED_COLUMNS):
                assert a[column] == pytest.approx(b[column], abs=1e-9), column
