"""fit from files to files: its tables, checkpoints, choices of the best, refusals, and what it leaves alone."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, ModelConfig
from decode.errors import UsageError
from decode.evaluate import Judgement
from decode.stats import Stats
from distill import callbacks
from distill.checkpoint_files import best_checkpoint, checkpoints_of, load_draft
from distill.config import DataConfig, JudgeConfig, LossConfig, OptimizerConfig, TeacherConfig
from distill.fit import FitReport, fit
from distill.history import METRICS_COLUMNS, Table, metrics_table, steps_table
from distill.module import Distillation
from distill.trainer_options import PASSED_ON
from tests.draft_files import make_draft, save_target
from tests.fit_runs import fit_config, write_id_rows

JUDGED: list[str] = []


def stub_judge(speedups: list[float]) -> Any:
    """A judge whose speedups are given in the order of its calls; it notes the mode of the draft that it sees."""
    left = list(speedups)

    def judge(target: Any, draft: Any, prompts: Any, config: Any) -> Judgement:
        JUDGED.append("training" if draft.model.training else "eval")
        return Judgement(Stats(), left.pop(0), 2.0, 1.0, 0)

    return judge


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft with a reduced vocabulary, rows: read only."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    write_id_rows(folder / "rows.jsonl")
    make_draft(folder / "target", folder / "draft", draft_vocab_size=64, data=str(folder / "rows.jsonl"))
    return folder


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "judge", stub_judge([1.0] * 50))


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def run(pair: Path, output: Path, **changes: Any) -> FitReport:
    return fit(fit_config(pair, output=str(output), **changes))


@pytest.fixture(scope="module")
def finished(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, really judged: read only."""
    output = tmp_path_factory.mktemp("finished") / "run"
    report = run(pair, output)
    assert report.complete and report.step == report.num_steps == 6
    return output


def test_tables_have_a_row_per_checkpoint_and_per_step(finished: Path, pair: Path) -> None:
    rows = metrics_table(finished).rows()
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert tuple(rows[0]) == METRICS_COLUMNS
    for row in rows:
        assert row["val/loss"] is not None and row["val/speedup"] is not None
        assert 0 <= row["val/expected_acceptance"] <= row["val/expected_acceptance_upper"] <= 1
        assert row["val/mean_acceptance_length"] >= 1
    assert rows[0]["train/loss"] is None and rows[0]["tokens_seen"] == 0  # the untrained draft
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    steps = steps_table(finished).rows()
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["learning_rate"] == 0.0
    assert steps[-1]["tokens_seen"] == rows[-1]["tokens_seen"] > 0
    for name in ("config.yaml", "versions.json", "command.txt", "best.json"):
        assert (finished / name).is_file()


def test_r07_r06_checkpoint_is_the_draft_in_primitives_and_loads_safely(finished: Path, pair: Path) -> None:
    content = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)
    weights = content["state_dict"]
    assert all(name.startswith("draft.") for name in weights)
    assert weights["draft.lm_head.weight"].shape[0] == 64 == len(content["draft_vocab_ids"])
    size = sum(t.numel() * t.element_size() for t in weights.values())
    assert (finished / "checkpoints" / "last.ckpt").stat().st_size < 3 * size + 100_000  # weights, two moments
    assert content["step"] == 6 and content["config"]["max_steps"] == 6
    assert content["metrics"] == metrics_table(finished).rows()[-1]

    from decode.models import load_model

    target = load_model(str(pair / "target"), ModelConfig(device="cpu"), role="target")
    draft = load_draft(best_checkpoint(finished), target, ModelConfig(device="cpu"))
    assert draft.vocab_ids is not None and len(draft.vocab_ids) == 64
    assert [step for step, _ in checkpoints_of(finished)] == [0, 2, 4, 6]


@pytest.mark.usefixtures("stubbed")
def test_r14_a_finished_run_is_left_as_it_is(
    finished: Path, pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(finished)
    monkeypatch.setattr("distill.fit.load_parts", None)  # not even loaded
    report = run(pair, finished)
    assert report.complete and report.best == callbacks.best_row(report.rows)
    assert "complete at step 6" in capsys.readouterr().err
    assert tree(finished) == before


CHANGES: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 12},
    "data.batch_size": {"data": {"batch_size": 3}},
    "data.max_length": {"data": {"max_length": 31}},
    "optimizer.accumulate": {"optimizer": OptimizerConfig(accumulate=1)},
    "optimizer.learning_rate": {"optimizer": OptimizerConfig(accumulate=2, learning_rate=1e-3)},
    "loss.temperature": {"loss": LossConfig(temperature=2.0)},
    "teacher.kind": {"teacher": TeacherConfig(kind="online", top_k=8)},
    "teacher.top_k": {"teacher": TeacherConfig(kind="cached", top_k=4)},
    "judge.every_n_steps": {
        "judge": JudgeConfig(every_n_steps=3, num_prompts=2, decode=DecodeConfig(max_new_tokens=4))
    },
    "target": {"target": "elsewhere"},
    "draft": {"draft": "elsewhere"},
    "seed": {"seed": 1},
    "trainer.precision": {"trainer": {"log_every_n_steps": 1, "enable_progress_bar": False, "precision": "64-true"}},
}


@pytest.mark.parametrize("key", CHANGES)
def test_r13_a_changed_setting_is_refused_by_name(key: str, finished: Path, pair: Path) -> None:
    changes = dict(CHANGES[key])
    if isinstance(changes.get("data"), dict):
        changes["data"] = replace(fit_config(pair).data, **changes["data"])
    before = tree(finished)
    with pytest.raises(UsageError) as caught:
        run(pair, finished, **changes)
    message = str(caught.value)
    assert message.startswith(f"{key}: ") and " before, " in message and "\n" not in message
    assert tree(finished) == before


@pytest.mark.usefixtures("stubbed")
def test_r13_free_settings_are_honoured_with_a_notice_and_changed_rows_refused(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((pair / "rows.jsonl").read_bytes())
    data = DataConfig(train=[str(rows)], max_length=32, batch_size=2, validation_fraction=0.2)
    run(pair, tmp_path / "run", data=data, max_steps=4)
    (tmp_path / "run" / "checkpoints" / "step-000004.ckpt").unlink()
    quiet = {"log_every_n_steps": 2, "enable_progress_bar": False}
    report = run(pair, tmp_path / "run", data=data, max_steps=4, trainer=quiet)
    assert report.resumed_from == 2 and report.complete
    assert "trainer.log_every_n_steps: continues with 2, was 1" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints" / "step-000004.ckpt").unlink()
    write_id_rows(rows, seed=9)
    with pytest.raises(UsageError, match=r"data.train.*changed since the run's checkpoint step-000002.ckpt"):
        run(pair, tmp_path / "run", data=data, max_steps=4)


def test_r10_r11_r12_checkpoints_count_optimiser_steps_and_the_best_is_this_steps(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "judge", stub_judge([9.0, 1.0, 3.0, 2.0]))  # the untrained draft is no candidate
    judge = JudgeConfig(every_n_steps=3, num_prompts=1)
    JUDGED.clear()
    report = run(pair, tmp_path / "run", max_steps=7, judge=judge, teacher=TeacherConfig())
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    assert names == ["last.ckpt", "step-000003.ckpt", "step-000006.ckpt", "step-000007.ckpt"]
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert best == {"checkpoint": "step-000006.ckpt", "step": 6, "speedup": 3.0}
    assert report.best is not None and report.best["step"] == 6
    saved = torch.load(tmp_path / "run" / "checkpoints" / best["checkpoint"], weights_only=True)
    assert saved["metrics"]["val/speedup"] == 3.0 and saved["step"] == 6
    assert JUDGED == ["eval"] * 4
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").resolve().name == "step-000007.ckpt"


@pytest.mark.usefixtures("stubbed")
def test_r11_a_run_shorter_than_the_interval_still_has_a_checkpoint(pair: Path, tmp_path: Path) -> None:
    run(pair, tmp_path / "run", max_steps=1, judge=JudgeConfig(every_n_steps=50, num_prompts=1))
    assert (tmp_path / "run" / "checkpoints" / "step-000001.ckpt").is_file()
    assert [row["step"] for row in metrics_table(tmp_path / "run").rows()] == [0, 1]


@pytest.mark.usefixtures("stubbed")
def test_damaged_newest_checkpoint_is_named_and_the_one_before_continues(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(pair, tmp_path / "run", max_steps=4)
    newest = tmp_path / "run" / "checkpoints" / "step-000004.ckpt"
    whole = torch.load(newest, weights_only=True)["state_dict"]
    newest.write_bytes(newest.read_bytes()[:-100])
    report = run(pair, tmp_path / "run", max_steps=4)
    assert report.resumed_from == 2 and report.complete
    assert "step-000004.ckpt is passed over" in capsys.readouterr().err
    again = torch.load(newest, weights_only=True)["state_dict"]
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.usefixtures("stubbed")
def test_max_time_stops_at_a_checkpoint_and_the_same_command_goes_on(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = {"max_time": {"seconds": 0}, "enable_progress_bar": False}
    steps = []
    while not steps or steps[-1] < 6:
        steps.append(run(pair, tmp_path / "run", trainer=brief).step)
    assert steps == [2, 4, 6]
    assert "stopped at step 2 by trainer.max_time" in capsys.readouterr().err


@pytest.mark.usefixtures("stubbed")
def test_ctrl_c_reaches_the_caller_and_tells_where_the_next_start_continues(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Distillation.training_step

    def interrupted(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Distillation, "training_step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is handler
    assert "interrupted after step 3; the same command continues from step 2" in capsys.readouterr().err
    monkeypatch.setattr(Distillation, "training_step", step)
    report = run(pair, tmp_path / "run")
    assert report.complete and report.resumed_from == 2


@pytest.mark.usefixtures("stubbed")
def test_t19_target_and_global_random_state_are_left_as_they_were(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(pair / "target")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    run(pair, tmp_path / "run", teacher=TeacherConfig(kind="online"), max_steps=2)
    assert torch.equal(torch.rand(3), expected)
    assert tree(pair / "target") == before


@pytest.mark.usefixtures("stubbed")
def test_b05_tensorboard_float64_and_plain_rows_run(pair: Path, tmp_path: Path) -> None:
    report = run(
        pair,
        tmp_path / "run",
        max_steps=2,
        data=replace(fit_config(pair).data, packing=False),
        model=ModelConfig(device="cpu", dtype="float64"),
        trainer={"logger": "tensorboard", "enable_progress_bar": True, "enable_model_summary": False},
    )
    assert report.complete
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["state_dict"]["draft.lm_head.weight"].dtype == torch.float64


MISTAKES = {
    "devicess": ("trainer.devicess: unknown", "did you mean trainer.devices?"),
    "accumulate_grad_batchs": ("trainer.accumulate_grad_batchs: unknown", "did you mean optimizer.accumulate?"),
    "max_epochs": ("trainer.max_epochs: set max_epochs instead",),
    "gradient_clip_val": ("set optimizer.gradient_clip instead",),
    "callbacks": ("trainer.callbacks: is fixed",),
    "strategy": ("trainer.strategy: 'x'", "ddp"),
    "logger": ("trainer.logger: 'x'", "tensorboard"),
    "precision": ("trainer: ", "'x'"),
    "log_every_n_steps": ("trainer.log_every_n_steps: 'x'",),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_b01_a_wrong_trainer_option_is_refused_by_name(name: str, pair: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run(pair, tmp_path / "run", trainer={name: "x"}, teacher=TeacherConfig())
    assert all(part in str(caught.value) for part in MISTAKES[name])
    assert "\n" not in str(caught.value)


def test_every_option_of_the_trainer_is_passed_on_or_refused_by_name() -> None:
    import inspect

    from lightning import Trainer

    from distill.trainer_options import FIXED, OUR_KEYS

    assert {*PASSED_ON, *FIXED, *OUR_KEYS} == set(inspect.signature(Trainer.__init__).parameters) - {"self"}


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


def test_judge_has_no_prompt_is_refused(pair: Path, tmp_path: Path) -> None:
    rows = tmp_path / "promptless.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [i, i + 1], "mask": [1, 1]}) + "\n" for i in range(9)))
    data = DataConfig(train=[str(pair / "rows.jsonl")], validation=[str(rows)], max_length=32, batch_size=2)
    with pytest.raises(UsageError, match=r"judge.prompts: the validation rows have no prompt"):
        run(pair, tmp_path / "run", data=data)
