"""Where eval and export may write: neither into the models that they read, nor over them."""

import shutil
from pathlib import Path

import pytest

from decode.errors import UsageError
from distill.cli import main as cli
from distill.export import export as exporting
from distill.folders import write_record
from distill.results import evaluate as evaluating
from distill.results.candidates import check_apart
from tests.fit_runs import tree


@pytest.fixture
def work(target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a target, an export, the beginning of a run, a checkpoint that was moved, and prompts."""
    shutil.copytree(target, tmp_path / "target")
    shutil.copytree(draft, tmp_path / "exports" / "draft")
    write_record(tmp_path / "exports" / "draft", {"made_by": "draftsmith export"})
    write_record(tmp_path / "exports", {"made_by": "draftsmith export"})
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "moved.ckpt").write_bytes(b"")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("output", ["exports/draft", "exports/draft/deep/er", "target/out", "link/out"])
@pytest.mark.parametrize("command", ["eval --prompts prompts.jsonl --drafts", "export --draft"])
def test_an_output_inside_a_model_is_refused_in_a_line(
    command: str, output: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "link").symlink_to(work / "exports" / "draft")
    monkeypatch.setattr(evaluating, "load_model", None)
    monkeypatch.setattr(exporting, "find_source", None)
    before = tree(work)
    assert cli.main([*command.split(), "exports/draft", "--target", "target", "--output", output]) == 2
    said = capsys.readouterr().err
    role = "target" if output.startswith("target") else "draft"
    assert f" lies in the {role}'s own folder {work}/" in said and said.count("\n") == 1
    assert tree(work) == before


@pytest.mark.parametrize("model", ["exports/draft", "exports/run", "exports/run/checkpoints/a.ckpt", "exports/a.ckpt"])
def test_an_export_replaces_no_folder_that_holds_its_models(model: str, work: Path) -> None:
    shutil.move(work / "run", work / "exports" / "run")
    for file in ("run/checkpoints/a.ckpt", "a.ckpt"):
        (work / "exports" / file).write_bytes(b"")
    with pytest.raises(UsageError, match=rf"^output: exports is replaced as a whole and holds the draft {model}; "):
        check_apart(Path("exports"), "draft", model, replaced=True)
    check_apart(Path("exports"), "draft", model)  # a report joins what is there


@pytest.mark.parametrize("output, model", [("run/eval", "run"), ("out", "moved.ckpt"), ("owner", "owner/name")])
def test_reports_and_exports_may_lie_in_a_run_and_beside_a_model(output: str, model: str, work: Path) -> None:
    check_apart(Path(output), "draft", model, replaced=True)


@pytest.mark.parametrize("model", ["run", "run/checkpoints/a.ckpt"])
def test_nothing_is_written_among_checkpoints(model: str, work: Path) -> None:
    (work / "run" / "checkpoints" / "a.ckpt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"lies in the draft's own folder .*/run/checkpoints; choose a place"):
        check_apart(Path("run/checkpoints/out"), "draft", model)
