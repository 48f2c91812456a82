"""fit with chosen positions and with streamed rows: resumed as it was, and what has changed is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.errors import UsageError
from distill import selection
from distill.config import DataConfig, LoraConfig, SelectionConfig, TeacherConfig
from distill.training.history import TIMED_COLUMNS, metrics_table
from tests.draft_files import make_draft
from tests.fit_runs import fit_config, run_fit

pytestmark = pytest.mark.usefixtures("stub_judging")

BRIEF = {"max_time": {"seconds": 0}, "enable_progress_bar": False}
ONLINE = TeacherConfig(kind="online")


def in_one_go_and_in_pieces(pair: Path, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """The same run, uninterrupted and stopped at every checkpoint."""
    run_fit(pair, folder / "whole", **changes)
    steps = []
    while not steps or steps[-1] < 6:
        steps.append(run_fit(pair, folder / "pieces", **changes, trainer=BRIEF).step)
    assert steps == [2, 4, 6]
    return folder / "whole", folder / "pieces"


def assert_equal(a: Path, b: Path) -> None:
    states = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (a, b)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    rows = [
        [{k: v for k, v in row.items() if k not in TIMED_COLUMNS} for row in metrics_table(run).rows()]
        for run in (a, b)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 4


@pytest.fixture
def pair(fit_pair: Path, finished_run: Path, tmp_path: Path) -> Path:
    """The pair, with a finished run on it as the reference."""
    shutil.copytree(fit_pair, tmp_path / "pair")
    shutil.copytree(finished_run, tmp_path / "pair" / "reference", ignore=shutil.ignore_patterns("teacher_cache"))
    return tmp_path / "pair"


def chosen(pair: Path, keep: float = 0.5, **more: Any) -> SelectionConfig:
    return SelectionConfig(str(pair / "reference"), keep, **more)


@pytest.mark.parametrize("teacher", ["cached", "online"])
def test_a_run_on_chosen_positions_resumes_exactly_and_scores_once(
    pair: Path, tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scored: list[int] = []
    score = selection.score
    monkeypatch.setattr(selection, "score", lambda *args: scored.append(1) or score(*args))
    changes = {"selection": chosen(pair, curriculum=teacher == "cached")}
    if teacher == "online":
        changes["teacher"] = ONLINE
    assert_equal(*in_one_go_and_in_pieces(pair, tmp_path, **changes))
    assert len(scored) == 2  # once for each run
    told = capsys.readouterr().err
    assert "supervised positions are trained on (50.0 %" in told and "nats there" in told
    run_fit(pair, tmp_path / "plain", **{**changes, "selection": SelectionConfig()})
    states = [
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in ("whole", "plain")
    ]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    rows = [metrics_table(tmp_path / run).rows()[0]["val/loss"] for run in ("whole", "plain")]
    assert rows[0] == rows[1]  # validation is on all positions


@pytest.mark.parametrize("damage", ["lost", "cut", "a bit turned"])
def test_scores_that_are_lost_or_damaged_are_made_again(pair: Path, tmp_path: Path, damage: str) -> None:
    run_fit(pair, tmp_path / "whole", selection=chosen(pair))
    run_fit(pair, tmp_path / "hurt", selection=chosen(pair), trainer=BRIEF)
    file = tmp_path / "hurt" / "selection" / "gaps.safetensors"
    before, gaps = file.read_bytes(), load_file(file)["gaps"].clone()
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(before[:-4] if damage == "cut" else before[:-1] + bytes([before[-1] ^ 1]))
    run_fit(pair, tmp_path / "hurt", selection=chosen(pair))
    assert torch.equal(load_file(file)["gaps"], gaps)
    assert_equal(tmp_path / "whole", tmp_path / "hurt")


def test_r13_another_reference_or_share_is_refused_on_resume(pair: Path, tmp_path: Path) -> None:
    run_fit(pair, tmp_path / "run", selection=chosen(pair), trainer=BRIEF)
    with pytest.raises(UsageError, match=r"selection.keep: 0.5 before, 0.6 now"):
        run_fit(pair, tmp_path / "run", selection=chosen(pair, 0.6))
    with pytest.raises(UsageError, match=r"selection.reference: "):
        run_fit(pair, tmp_path / "run")
    best = pair / "reference" / "best.json"
    content = json.loads(best.read_text())
    others = {"step-000002.ckpt", "step-000004.ckpt", "step-000006.ckpt"} - {content["checkpoint"]}
    best.write_text(json.dumps({**content, "checkpoint": min(others)}))
    with pytest.raises(UsageError, match=r"draft, selection.reference: their weights have changed since the run's"):
        run_fit(pair, tmp_path / "run", selection=chosen(pair))


def test_a_reference_that_does_not_fit_is_refused_by_name(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"selection.reference: .*nowhere"):
        run_fit(pair, tmp_path / "run", selection=SelectionConfig(str(pair / "nowhere")))
    make_draft(pair / "target", pair / "other", draft_vocab_size=32, data=[str(pair / "rows.jsonl")])
    with pytest.raises(UsageError, match=r"selection.reference: .*other proposes 32 ids and the draft 64"):
        run_fit(pair, tmp_path / "run", selection=SelectionConfig(str(pair / "other")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("packing", [True, False])
def test_a18_a_streamed_run_resumes_exactly(fit_pair: Path, tmp_path: Path, packing: bool) -> None:
    rows = str(fit_pair / "rows.jsonl")
    data = DataConfig([rows], max_length=32, batch_size=2, streaming=True, shuffle_buffer=12, packing=packing)
    changes = {"data": replace(data, validation_fraction=0.3), "teacher": ONLINE}
    whole, pieces = in_one_go_and_in_pieces(fit_pair, tmp_path, **changes)
    assert_equal(whole, pieces)
    seen = [row["tokens_seen"] for row in metrics_table(whole).rows()]
    assert seen[0] == 0 and sorted(set(seen)) == seen


def test_r13_a_stream_whose_files_have_changed_is_refused_on_resume(fit_pair: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((fit_pair / "rows.jsonl").read_text())
    data = DataConfig(
        [str(rows)], max_length=32, batch_size=2, streaming=True, shuffle_buffer=12, validation_fraction=0.3
    )
    run_fit(fit_pair, tmp_path / "run", data=data, teacher=ONLINE, trainer=BRIEF)
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[:-1], lines[0]]))
    with pytest.raises(UsageError, match=r"data.train, data.validation: their rows have changed"):
        run_fit(fit_pair, tmp_path / "run", data=data, teacher=ONLINE)
    long = replace(data, max_length=100_000)
    with pytest.raises(
        UsageError, match=r"data.max_length: 100000 is not legal; expected \d+ at most with data.stream"
    ):
        run_fit(fit_pair, tmp_path / "other", data=long, teacher=ONLINE)


def test_the_report_before_training_tells_of_the_data(
    fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_fit(fit_pair, tmp_path / "run", max_steps=2)
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.split(":")[0] in ("data", "validation", "run")
    ]
    assert lines[0].startswith("data: 30 examples of 30 rows: ") and lines[0].endswith(" %)")
    assert lines[1].startswith("data: tokens of an example: median ")
    assert lines[2].startswith("validation: ")
    assert (
        lines[3].startswith("run: 2 steps of 4 sequences (2 in a batch, 2 accumulated), 1.") and "% padding" in lines[3]
    )
    assert fit_config(fit_pair).data.packing


def test_adapters_that_are_drawn_anew_at_each_start_do_not_look_like_another_draft(pair: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("full", "other")):
        make_draft(pair / "target", pair / name, seed=seed)
    changes: dict[str, Any] = {"draft": str(pair / "full"), "lora": LoraConfig(rank=2)}
    changes["selection"] = SelectionConfig(str(pair / "other"), 0.5)
    assert run_fit(pair, tmp_path / "run", **changes, trainer=BRIEF).step == 2
    torch.manual_seed(5)
    assert run_fit(pair, tmp_path / "run", **changes).complete
