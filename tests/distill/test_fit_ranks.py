"""Two processes train to what one does, from the start or from where the other left off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill.export.config import ExportConfig
from distill.export.export import export
from distill.training.fit import FitReport, fit
from distill.training.history import TIMED_COLUMNS, metrics_table, steps_table
from distill.training.run_parts import load_parts
from tests.distill.two_ranks import ONE_SEGMENT, ranks_config
from tests.draft_files import make_draft, save_target, write_rows
from tests.fit_runs import distance, write_id_rows
from tests.fixtures import byte_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FitReport, subprocess.CompletedProcess[str]]:
    """One run by one process, one by two, and two that were each begun by so many and ended by the others."""
    folder = tmp_path_factory.mktemp("ranks")
    save_target(folder / "target")
    write_id_rows(folder / "rows.jsonl", count=22)
    make_draft(folder / "target", folder / "draft")
    words = write_rows(folder / "words.jsonl", byte_tokenizer(), ["The fox sat.", "A fox ran far."])
    make_draft(folder / "target", folder / "narrow", draft_vocab_size=20, data=[str(words)])
    for output in ("grown", "sharded_grown"):
        assert fit(ranks_config(folder, output, 1, **ONE_SEGMENT)).step == 2
    two = subprocess.run(
        [sys.executable, "-m", "tests.distill.two_ranks", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert two.returncode == 0, two.stderr
    for output in ("shrunk", "sharded_shrunk"):
        assert fit(ranks_config(folder, output, 1)).resumed_from == 2
    fit(ranks_config(folder, "narrow_one", 1))
    return folder, fit(ranks_config(folder, "one", 1)), two


def test_t32_two_gloo_ranks_go_through_the_whole_run(
    runs: tuple[Path, FitReport, subprocess.CompletedProcess[str]],
) -> None:
    folder, one, two = runs
    feed = load_parts(ranks_config(folder, "one", devices=1)).feed
    assert [len(rows) for rows in feed.schedule.window(feed.num_steps - 1)][-1] == 1
    assert one.complete and one.num_steps > 2
    told = two.stdout.splitlines()
    ends = {"two": "None", "grown": "2", "sharded": "2", "sharded_grown": "2", "narrow_sharded": "None"}
    for output, begun in ends.items():  # both ranks came to the end
        assert told.count(f"{output}: {one.step} of {one.step} from {begun}") == 2, two.stdout
    for output in ("shrunk", "sharded", "sharded_shrunk"):
        assert told.count(f"{output}: 2 of {one.step} from None") == 2
    assert "trainer.devices: continues with 2, was 1" in two.stderr
    assert "sync_dist" not in two.stderr


@pytest.mark.parametrize(
    "other", ["two", "grown", "shrunk", "sharded", "sharded_grown", "sharded_shrunk", "narrow_sharded"]
)
def test_t32_r15_however_many_processes_a_run_has_it_equals_one(
    other: str, runs: tuple[Path, FitReport, subprocess.CompletedProcess[str]]
) -> None:
    folder, one = runs[0], "narrow_one" if other.startswith("narrow") else "one"
    names = [sorted(p.name for p in (folder / run / "checkpoints").iterdir()) for run in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        found = [torch.load(folder / run / "checkpoints" / name, weights_only=True) for run in (one, other)]
        assert distance(*(content["state_dict"] for content in found)) < 1e-9
        states = [content["optimizer_states"][0] for content in found]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert distance(*(_flat(state["state"]) for state in states)) < 1e-9
    for table in (metrics_table, steps_table):
        rows = [table(folder / run).rows() for run in (one, other)]
        assert len(rows[0]) == len(rows[1])
        for a, b in zip(*rows, strict=True):
            for column in a.keys() - set(TIMED_COLUMNS):
                assert a[column] == pytest.approx(b[column], abs=1e-9), column


def _flat(state: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": tensor for number, kept in state.items() for name, tensor in kept.items()}


@pytest.mark.slow
def test_r15_what_processes_share_is_exported_as_any_draft(
    runs: tuple[Path, FitReport, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    checkpoint = runs[0] / "sharded" / "checkpoints" / "last.ckpt"
    export(ExportConfig(target=str(runs[0] / "target"), draft=str(checkpoint), output=str(tmp_path / "out")))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    gathered = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert exported.keys() <= {name.removeprefix("student.model.") for name in gathered}
    for name, tensor in exported.items():
        assert torch.equal(tensor, gathered[f"student.model.{name}"].to(tensor.dtype)), name
