"""fit from files to files: its tables, checkpoints, choice of the best, interruptions, and what it leaves alone."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import ModelConfig
from decode.draft_vocab import DRAFT_VOCAB_FILE
from distill.config import JudgeConfig, TeacherConfig
from distill.drafts.load import best_checkpoint, checkpoints_of, load_draft
from distill.teacher.fingerprint import ids_sha256
from distill.training import callbacks
from distill.training.history import METRICS_COLUMNS, Table, metrics_table, steps_table
from distill.training.module import Distillation
from distill.training.run_files import best_row
from tests.fit_runs import JUDGED, fit_config, run_fit, stub_judge, tree


def test_tables_have_a_row_per_checkpoint_and_per_step(finished_run: Path, fit_pair: Path) -> None:
    rows = metrics_table(finished_run).rows()
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert tuple(rows[0]) == METRICS_COLUMNS
    for row in rows:
        assert row["val/loss"] is not None and row["val/speedup"] is not None
        assert 0 <= row["val/expected_acceptance"] <= row["val/expected_acceptance_upper"] <= 1
        assert row["val/mean_acceptance_length"] >= 1
    assert rows[0]["train/loss"] is None and rows[0]["tokens_seen"] == 0  # the untrained draft
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    steps = steps_table(finished_run).rows()
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["learning_rate"] == 0.0
    assert steps[-1]["tokens_seen"] == rows[-1]["tokens_seen"] > 0
    for name in ("config.yaml", "versions.json", "command.txt", "best.json"):
        assert (finished_run / name).is_file()


def test_r07_r06_checkpoint_is_the_draft_in_primitives_and_loads_safely(finished_run: Path, fit_pair: Path) -> None:
    content = torch.load(finished_run / "checkpoints" / "last.ckpt", weights_only=True)
    weights = content["state_dict"]
    assert all(name.startswith("student.model.") for name in weights)
    assert weights["student.model.lm_head.weight"].shape[0] == 64 == len(content["draft_vocab_ids"])
    size = sum(t.numel() * t.element_size() for t in weights.values())
    assert (finished_run / "checkpoints" / "last.ckpt").stat().st_size < 3 * size + 100_000  # weights, two moments
    assert content["step"] == 6 and content["config"]["max_steps"] == 6
    assert content["metrics"] == metrics_table(finished_run).rows()[-1]

    from decode.models import load_model

    target = load_model(str(fit_pair / "target"), ModelConfig(device="cpu"), role="target")
    draft = load_draft(best_checkpoint(finished_run), target, ModelConfig(device="cpu"))
    assert draft.vocab_ids is not None and len(draft.vocab_ids) == 64
    assert [step for step, _ in checkpoints_of(finished_run)] == [0, 2, 4, 6]


@pytest.mark.usefixtures("stub_judging")
def test_r14_a_finished_run_is_left_as_it_is(
    finished_run: Path, fit_pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(finished_run)
    monkeypatch.setattr("distill.training.fit.load_parts", None)  # not even loaded
    report = run_fit(fit_pair, finished_run)
    assert report.complete and report.best == best_row(report.rows)
    assert "complete at step 6" in capsys.readouterr().err
    assert tree(finished_run) == before


@pytest.mark.parametrize("damage", ["missing", "stale", "torn"])
def test_r01_a_finished_run_gets_back_what_a_kill_left_unwritten(
    damage: str, finished_run: Path, fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))
    best, last = run / "best.json", run / "checkpoints" / "last.ckpt"
    expected = best.read_text()
    last.unlink()
    if damage == "missing":
        best.unlink()
    else:
        last.symlink_to("step-000004.ckpt")
        best.write_text(expected[:20] if damage == "torn" else expected.replace('"step": ', '"step": 9'))
    assert run_fit(fit_pair, run).complete
    assert "complete at step 6; last.ckpt and best.json made anew" in capsys.readouterr().err
    assert best.read_text() == expected and last.resolve().name == "step-000006.ckpt"
    before = tree(run)
    run_fit(fit_pair, run)
    assert tree(run) == before


def test_caches_of_a_run_are_of_the_drafts_own_ids(finished_run: Path, fit_pair: Path) -> None:
    ids = json.loads((fit_pair / "draft" / DRAFT_VOCAB_FILE).read_text())["vocab_ids"]
    keys = [json.loads(file.read_text())["key"] for file in (finished_run / "teacher_cache").glob("*/index.json")]
    assert len(keys) == 1  # training and validation rows lie in one
    assert all(key["draft_ids_sha256"] == ids_sha256([ids]) for key in keys)


def test_r10_r11_r12_checkpoints_count_optimiser_steps_and_the_best_is_this_steps(
    fit_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "judge", stub_judge([9.0, 1.0, 3.0, 2.0]))  # the untrained draft is no candidate
    judge = JudgeConfig(every_n_steps=3, num_prompts=1)
    JUDGED.clear()
    report = run_fit(fit_pair, tmp_path / "run", max_steps=7, judge=judge, teacher=TeacherConfig())
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    assert names == ["last.ckpt", "step-000003.ckpt", "step-000006.ckpt", "step-000007.ckpt"]
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert best == {"checkpoint": "step-000006.ckpt", "step": 6, "speedup": 3.0}
    assert report.best is not None and report.best["step"] == 6
    saved = torch.load(tmp_path / "run" / "checkpoints" / best["checkpoint"], weights_only=True)
    assert saved["metrics"]["val/speedup"] == 3.0 and saved["step"] == 6
    assert JUDGED == ["eval"] * 4
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").resolve().name == "step-000007.ckpt"


@pytest.mark.usefixtures("stub_judging")
def test_r11_a_run_shorter_than_the_interval_still_has_a_checkpoint(fit_pair: Path, tmp_path: Path) -> None:
    run_fit(fit_pair, tmp_path / "run", max_steps=1, judge=JudgeConfig(every_n_steps=50, num_prompts=1))
    assert (tmp_path / "run" / "checkpoints" / "step-000001.ckpt").is_file()
    assert [row["step"] for row in metrics_table(tmp_path / "run").rows()] == [0, 1]


@pytest.mark.usefixtures("stub_judging")
def test_damaged_newest_checkpoint_is_named_and_the_one_before_continues(
    fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_fit(fit_pair, tmp_path / "run", max_steps=4)
    newest = tmp_path / "run" / "checkpoints" / "step-000004.ckpt"
    whole = torch.load(newest, weights_only=True)["state_dict"]
    newest.write_bytes(newest.read_bytes()[:-100])
    report = run_fit(fit_pair, tmp_path / "run", max_steps=4)
    assert report.resumed_from == 2 and report.complete
    assert "step-000004.ckpt is passed over" in capsys.readouterr().err
    again = torch.load(newest, weights_only=True)["state_dict"]
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.usefixtures("stub_judging")
def test_max_time_stops_at_a_checkpoint_and_the_same_command_goes_on(
    fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = {"max_time": {"seconds": 0}, "enable_progress_bar": False}
    steps = []
    while not steps or steps[-1] < 6:
        steps.append(run_fit(fit_pair, tmp_path / "run", trainer=brief).step)
    assert steps == [2, 4, 6]
    assert "stopped at step 2 by trainer.max_time" in capsys.readouterr().err


@pytest.mark.usefixtures("stub_judging")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reaches_the_caller_and_tells_where_the_next_start_continues(
    sent: signal.Signals,
    fit_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Distillation.training_step

    def interrupted(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            os.kill(os.getpid(), sent)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Distillation, "training_step", interrupted)
    handler = signal.default_int_handler
    signal.signal(signal.SIGINT, handler)  # a shell's background jobs are started without one
    with pytest.raises(KeyboardInterrupt if sent == signal.SIGINT else SystemExit) as caught:
        run_fit(fit_pair, tmp_path / "run")
    assert sent == signal.SIGINT or caught.value.code == 143
    assert signal.getsignal(signal.SIGINT) is handler
    assert "interrupted after step 3; the same command continues from step 2" in capsys.readouterr().err
    monkeypatch.setattr(Distillation, "training_step", step)
    report = run_fit(fit_pair, tmp_path / "run")
    assert report.complete and report.resumed_from == 2


@pytest.mark.usefixtures("stub_judging")
def test_t19_target_and_global_random_state_are_left_as_they_were(
    fit_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(fit_pair / "target")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    run_fit(fit_pair, tmp_path / "run", teacher=TeacherConfig(kind="online"), max_steps=2)
    assert torch.equal(torch.rand(3), expected)
    assert tree(fit_pair / "target") == before


@pytest.mark.usefixtures("stub_judging")
def test_b05_tensorboard_float64_and_plain_rows_run(fit_pair: Path, tmp_path: Path) -> None:
    report = run_fit(
        fit_pair,
        tmp_path / "run",
        max_steps=2,
        data=replace(fit_config(fit_pair).data, packing=False),
        model=ModelConfig(device="cpu", dtype="float64"),
        trainer={"logger": "tensorboard", "enable_progress_bar": True, "enable_model_summary": False},
    )
    assert report.complete
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["state_dict"]["student.model.lm_head.weight"].dtype == torch.float64


def test_table_forgets_torn_and_later_rows(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv", ("step", "value"))
    for step in range(3):
        table.append({"step": step, "value": step / 3})
    with table.path.open("a") as file:
        file.write("3,0.12")  # killed while writing 0.125
    assert table.rows() == [{"step": s, "value": s / 3} for s in range(3)]
    table.cut(1)
    assert table.path.read_text() == f"step,value\n0,0.0\n1,{1 / 3!r}\n"
    table.cut(-1)
    assert not table.path.exists() and table.rows() == []
