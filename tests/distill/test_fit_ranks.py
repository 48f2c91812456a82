"""Two processes train to what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill.training.fit import fit
from distill.training.history import TIMED_COLUMNS, metrics_table, steps_table
from distill.training.run_parts import load_parts
from tests.distill.two_ranks import ranks_config
from tests.draft_files import make_draft, save_target
from tests.fit_runs import distance, write_id_rows

ROOT = Path(__file__).parents[2]


def test_t32_two_gloo_ranks_equal_one(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    write_id_rows(tmp_path / "rows.jsonl", count=22)
    make_draft(tmp_path / "target", tmp_path / "draft")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    two = subprocess.run(
        [sys.executable, "-m", "tests.distill.two_ranks", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert two.returncode == 0, two.stderr
    config = ranks_config(tmp_path, "one", devices=1)
    feed = load_parts(config).feed
    assert [len(rows) for rows in feed.schedule.window(feed.num_steps - 1)][-1] == 1
    one = fit(config)
    assert one.complete and one.num_steps > 2
    assert two.stdout.count(f"{one.step} of {one.num_steps}") == 2  # both ranks came to the end
    for name in [p.name for p in (tmp_path / "one" / "checkpoints").iterdir()]:
        states = [
            torch.load(tmp_path / run / "checkpoints" / name, weights_only=True)["state_dict"] for run in ("one", "two")
        ]
        assert distance(*states) < 1e-9
    for table in (metrics_table, steps_table):
        rows = [table(tmp_path / run).rows() for run in ("one", "two")]
        assert len(rows[0]) == len(rows[1])
        for a, b in zip(*rows, strict=True):
            for column in a.keys() - set(TIMED_COLUMNS):
                assert a[column] == pytest.approx(b[column], abs=1e-9), column
    assert "sync_dist" not in two.stderr
