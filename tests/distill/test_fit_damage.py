"""What fit does about files of a run that are damaged, lost or of another kind, and about a full disk."""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer

from decode.config import ModelConfig
from decode.errors import DraftsmithError, UsageError
from distill.cli import main as cli
from distill.config import TeacherConfig
from distill.drafts.checkpoint import read_checkpoint
from distill.training.history import TIMED_COLUMNS, DamagedTable, metrics_table, steps_table
from tests.draft_files import save_target
from tests.fit_runs import run_fit, tree
from tests.fixtures import byte_tokenizer, tiny_llama

pytestmark = pytest.mark.usefixtures("stub_judging")


@pytest.fixture
def stopped_run(finished_run: Path, tmp_path: Path) -> Path:
    """The finished run as it was at step 4 of 6."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))
    (run / "checkpoints" / "step-000006.ckpt").unlink()
    return run


def flip_a_weight(file: Path) -> None:
    content = bytearray(file.read_bytes())
    weight = torch.load(file, weights_only=True)["state_dict"]["student.model.lm_head.weight"]
    place = content.find(weight.numpy().tobytes())
    assert place > 0
    content[place + 2] ^= 0x40
    file.write_bytes(content)


def changed(**parts: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        torch.save({**torch.load(file, weights_only=True), **parts}, file)

    return change


def empty_file(file: Path) -> None:
    file.write_bytes(b"")


def lose_all_but_the_draft(file: Path) -> None:
    content = torch.load(file, weights_only=True)
    torch.save({name: content[name] for name in ("state_dict", "draft_config")}, file)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip_a_weight, "the checksum of its .* is wrong"),
    "no weights": (changed(state_dict={}), "its state_dict is not tensors by name"),
    "figures for weights": (changed(state_dict={"a": 1}), "its state_dict is not tensors by name"),
    "no draft": (changed(draft_config={}), "its draft_config is not a model's settings"),
    "settings": (changed(config=[]), "its config is not the run's settings"),
    "metrics": (changed(metrics=[1]), "its metrics is not figures by name"),
    "vocabulary": (changed(draft_vocab_ids="x"), "its draft_vocab_ids is not a row of ids"),
    "loops": (changed(loops=None), "its loops is not where training stands"),
    "rows": (changed(rows=[{"step": "x"}]), "its rows is not the rows of metrics.csv"),
    "other step": (changed(step=2), "it is of step 2, not of the step in its name"),
    "stranger": (lose_all_but_the_draft, "its config is not the run's settings"),
    "list": (lambda file: torch.save([1], file), "has no state_dict and no draft_config"),
    "empty": (empty_file, "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    kind: str, stopped_run: Path, fit_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, told = DAMAGE[kind]
    damage(stopped_run / "checkpoints" / "step-000004.ckpt")
    report = run_fit(fit_pair, stopped_run)
    assert report.resumed_from == 2 and report.complete
    assert re.search(f"^step-000004.ckpt is passed over: .*{told}", capsys.readouterr().err, re.MULTILINE)
    assert [row["step"] for row in report.rows] == [0, 2, 4, 6]


def test_flipped_bytes_are_refused_wherever_a_checkpoint_is_read(stopped_run: Path) -> None:
    file = stopped_run / "checkpoints" / "step-000004.ckpt"
    flip_a_weight(file)
    with pytest.raises(UsageError, match=r"^draft: checkpoint .*step-000004.ckpt is damaged: the checksum of its "):
        read_checkpoint(file)


TEXTS = {
    "lost": None,
    "empty": b"",
    "no header": b"1,2,3\n4,5,6\n",
    "no numbers": b"step,tokens_seen\n0,x\n",
    "no text": b"\xff\xfe\x00step\n",
    "no rows": b"step,val/speedup\n1,2,3,4\n",
    "another": b"step,tokens_seen\n0,99\n2,99\n4,99\n",
}


def damage_table(file: Path, text: bytes | None) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text)


@pytest.mark.parametrize("kind", TEXTS)
def test_metrics_are_made_anew_from_the_checkpoint(
    kind: str, stopped_run: Path, fit_pair: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_table(stopped_run / "metrics.csv", TEXTS[kind])
    rows = run_fit(fit_pair, stopped_run).rows
    whole = metrics_table(finished_run).rows()
    assert rows[:3] == whole[:3] and [row["step"] for row in rows] == [0, 2, 4, 6]
    timed = {*TIMED_COLUMNS, "val/mean_acceptance_length", "val/draft_acceptance_rate"}  # the judge is a stub here
    assert all(rows[3][name] == whole[3][name] for name in whole[3].keys() - timed)
    assert "metrics.csv: it was lost or damaged and is made anew from step-000004.ckpt" in capsys.readouterr().err


@pytest.mark.parametrize("kind", TEXTS)
def test_metrics_of_a_finished_run_are_made_anew(
    kind: str, finished_run: Path, fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))
    damage_table(run / "metrics.csv", TEXTS[kind])
    assert run_fit(fit_pair, run).complete
    assert (run / "metrics.csv").read_bytes() == (finished_run / "metrics.csv").read_bytes()
    assert "complete at step 6; metrics.csv made anew" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["no header", "no numbers", "no text", "no rows"])
def test_a_damaged_log_of_steps_is_started_anew(
    kind: str, stopped_run: Path, fit_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_table(stopped_run / "train.csv", TEXTS[kind])
    with pytest.raises(DamagedTable, match=r"^[^\n]*train.csv: it is damaged: [^\n]*$"):
        steps_table(stopped_run).rows()
    assert run_fit(fit_pair, stopped_run).complete
    assert [row["step"] for row in steps_table(stopped_run).rows()] == [5, 6]
    assert "train.csv: it is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", '{"key": 1}', "half", "null"])
def test_an_index_of_another_shape_is_made_anew(text: str, stopped_run: Path, fit_pair: Path) -> None:
    indices = list((stopped_run / "teacher_cache").glob("*/index.json"))
    whole = [index.read_text() for index in indices]
    for index in indices:
        index.write_text(text)
    assert run_fit(fit_pair, stopped_run).complete
    assert [index.read_text() for index in indices] == whole


def test_a_full_disk_is_told_with_the_checkpoint(
    fit_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "save_checkpoint", save)
    with pytest.raises(DraftsmithError, match=r"step-000002.ckpt can't be written: No space left on device \(it is"):
        run_fit(fit_pair, tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(role: str, value: float, fit_pair: Path, tmp_path: Path) -> None:
    model = tiny_llama(1, vocab_size=len(byte_tokenizer()))
    with torch.no_grad():
        model.lm_head.weight[3] = value
    save_target(tmp_path / role, model)
    with pytest.raises(
        DraftsmithError, match=f"^{role}: its logits are NaN or infinite; its weights or dtype are at fault$"
    ):
        run_fit(fit_pair, tmp_path / "run", **{role: str(tmp_path / role)})
    assert not (tmp_path / "run").exists()


def test_fit_and_generate_say_the_same_of_a_target_that_is_no_numbers(
    fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(1, vocab_size=len(byte_tokenizer()))
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    save_target(tmp_path / "target", model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    pair, rows = f"--target {tmp_path / 'target'} --model.backend eager", fit_pair / "rows.jsonl"
    commands = {
        "fit": f"{pair} --draft {fit_pair / 'draft'} --data.train {rows} --data.max_length 32 --max_steps 1",
        "generate": f"{pair} --prompts {tmp_path / 'prompts.jsonl'} --max_new_tokens 2",
    }
    for name, options in commands.items():
        assert cli.main([name, *options.split(), "--output", str(tmp_path / "out.jsonl")]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"draftsmith {name}: target: its logits are NaN or infinite; its weights or dtype are at fault"
        assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU.*")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("kind", ["online", "cached"])
def test_other_precisions_train_on_a_cpu(precision: str, kind: Any, fit_pair: Path, tmp_path: Path) -> None:
    trainer = {"precision": precision, "enable_progress_bar": False}
    settings: dict[str, Any] = {"trainer": trainer, "teacher": TeacherConfig(kind=kind), "max_steps": 2}
    model = ModelConfig(device="cpu", backend="eager")
    report = run_fit(fit_pair, tmp_path / "run", model=model, **settings)
    assert report.complete and report.rows[-1]["val/loss"] is not None


def test_a_refused_cache_folder_leaves_nothing(fit_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = tree(tmp_path)
    for place in ("file", "file/cache"):
        teacher = TeacherConfig(kind="cached", cache_dir=str(tmp_path / place))
        with pytest.raises(UsageError, match=r"^teacher.cache_dir: .* is a file or lies below one"):
            run_fit(fit_pair, tmp_path / "run", teacher=teacher)
    assert tree(tmp_path) == before
