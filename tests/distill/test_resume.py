"""A run killed with SIGKILL, again and again, ends as one that never stopped: bit for bit, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.training.history import TIMED_COLUMNS, Table, metrics_table, steps_table
from distill.training.run_files import best_row
from tests.draft_files import save_target
from tests.fit_runs import write_id_rows
from tests.fixtures import byte_tokenizer, tiny_gpt2

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Two runs of one command on a draft with dropout: one whole, one killed at nine points."""
    folder = tmp_path_factory.mktemp("killed")
    tokenizer = byte_tokenizer()
    save_target(folder / "target", tokenizer=tokenizer)
    draft = tiny_gpt2(seed=1, vocab_size=len(tokenizer))  # dropout 0.1 everywhere
    assert draft.config.resid_pdrop == 0.1
    save_target(folder / "draft", draft, tokenizer)
    write_id_rows(folder / "rows.jsonl")
    command = [sys.executable, "-m", "tests.distill.killed_runs", str(folder)]
    single = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=single, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, [*done.stdout.splitlines(), done.stderr]


def test_every_kill_happened_and_the_last_start_finished(runs: tuple[Path, list[str]]) -> None:
    *ends, said = runs[1]
    assert ends[-1] == "last 0", said
    assert len(ends) == 10
    assert all(end.endswith(" 9") for end in ends[:-1]), "\n".join([*ends, said])
    assert "continues from step 2" in said and "continues from step 4" in said


def test_r01_r02_r04_killed_run_equals_the_uninterrupted_one(runs: tuple[Path, list[str]]) -> None:
    folder = runs[0]
    names = sorted(p.name for p in (folder / "whole" / "checkpoints").iterdir())
    assert names == ["last.ckpt", "step-000002.ckpt", "step-000004.ckpt", "step-000006.ckpt"]
    assert (
        sorted(p.name for p in (folder / "killed" / "checkpoints").iterdir()) == names
    )  # nothing half written is left
    for name in names:
        whole, killed = (
            torch.load(folder / run / "checkpoints" / name, weights_only=True) for run in ("whole", "killed")
        )
        for part in ("state_dict", "optimizer_states"):
            assert same(whole[part], killed[part]), f"{name}: {part}"
        assert whole["step"] == killed["step"] and whole["global_step"] == killed["global_step"]


def test_r01_a_kill_after_the_last_checkpoint_leaves_neither_best_nor_last_behind(runs: tuple[Path, list[str]]) -> None:
    folder = runs[0] / "killed"
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == "step-000006.ckpt"
    best = best_row(metrics_table(folder).rows())
    assert best is not None
    assert json.loads((folder / "best.json").read_text()) == {
        "checkpoint": f"step-{best['step']:06d}.ckpt",
        "step": best["step"],
        "speedup": best["val/speedup"],
    }
    assert "complete at step 6; last.ckpt" in runs[1][-1]


def same(a: Any, b: Any) -> bool:
    """Equal in structure and in every bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("table", [metrics_table, steps_table])
def test_r03_tables_of_both_runs_are_equal_but_for_time(runs: tuple[Path, list[str]], table: Any) -> None:
    whole, killed = (untimed(table(runs[0] / run)) for run in ("whole", "killed"))
    assert whole == killed
    assert [row["step"] for row in whole] == ([0, 2, 4, 6] if table is metrics_table else [1, 2, 3, 4, 5, 6])


def untimed(table: Table) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED_COLUMNS} for row in table.rows()]


def test_a15_teacher_caches_of_both_runs_are_equal(runs: tuple[Path, list[str]]) -> None:
    caches = [
        {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        for root in (runs[0] / run / "teacher_cache" for run in ("whole", "killed"))
    ]
    assert caches[0] == caches[1]
    assert sum(path.suffix == ".safetensors" for path in caches[0]) > 3
