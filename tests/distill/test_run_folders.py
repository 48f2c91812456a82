"""The folder of a run: whose it is, and its lock."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decode.errors import UsageError
from distill.folders import read_record, run_folder
from distill.runs import record_run
from tests.draft_files import make_draft, save_target
from tests.fit_runs import run_fit, tree

FIT, EVAL = "draftsmith fit", "draftsmith eval"


def test_a_folder_in_use_is_refused_with_the_process(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run", FIT) as folder:
        assert folder == tmp_path / "run"
        with (
            pytest.raises(UsageError, match=f"in use by another run \\(process {os.getpid()}\\)"),
            run_folder(folder, FIT),
        ):
            pass
    with run_folder(tmp_path / "run", FIT):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = "import sys\nfrom distill.folders import run_folder\n"
    code += "with run_folder(sys.argv[1], 'draftsmith fit'): print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin and holder.stdout
    with holder, holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {holder.pid}"), run_folder(tmp_path, FIT):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run_folder(tmp_path, FIT):
            pass


def test_an_exception_frees_the_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), run_folder(tmp_path, FIT):
        raise KeyboardInterrupt
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_another_rank_of_the_same_run_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with run_folder(tmp_path, FIT):
        monkeypatch.setenv(variable, "1")
        with run_folder(tmp_path, FIT) as folder:
            assert folder == tmp_path


@pytest.mark.parametrize("output", ["file", "file/run"])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"output: .*expected a folder"), run_folder(tmp_path / output, FIT):
        pass


@pytest.mark.parametrize("content", ["thesis.tex", "checkpoints/step-000002.ckpt", "draftsmith.json"])
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_is(content: str, tmp_path: Path) -> None:
    file = tmp_path / content
    file.parent.mkdir(exist_ok=True)
    file.write_text("[]")
    (tmp_path / "more").write_text("")
    before = tree(tmp_path)
    told = r"^output: .* holds files that `draftsmith fit` did not make; remove it or choose another$"
    with pytest.raises(UsageError, match=told), run_folder(tmp_path, FIT):
        pass
    assert tree(tmp_path) == before and not (tmp_path / ".lock").exists()


def test_a_folder_belongs_to_the_command_that_made_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("")  # alone, no content
    with run_folder(tmp_path, FIT) as folder:
        (folder / "metrics.csv").write_text("")
    assert read_record(tmp_path) == {"made_by": FIT}
    before = tree(tmp_path)
    with run_folder(tmp_path, FIT):
        pass
    assert tree(tmp_path) == before
    with pytest.raises(UsageError, match="holds files that `draftsmith eval` did not make"), run_folder(tmp_path, EVAL):
        pass


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_run_without_its_record_is_refused_with_what_would_continue_it(content: str | None, tmp_path: Path) -> None:
    with run_folder(tmp_path, FIT):
        record_run(tmp_path, {"seed": 1})
    if content is None:
        (tmp_path / "draftsmith.json").unlink()
    else:
        (tmp_path / "draftsmith.json").write_text(content)
    told = r"^output: .* holds files that `draftsmith fit` did not make; remove it or choose another\. "
    told += r"If `draftsmith fit` did, as command\.txt there tells: write (?P<record>{.*}) to (?P<file>/.*)$"
    with pytest.raises(UsageError, match=told) as caught, run_folder(tmp_path, FIT):
        pass
    found = re.match(told, str(caught.value))
    assert found
    Path(found["file"]).write_text(found["record"])
    with run_folder(tmp_path, FIT):
        pass


def test_a_command_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError), run_folder(tmp_path / "new", FIT):
        raise UsageError("no such target")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError), run_folder(tmp_path / "empty", FIT):
        raise UsageError("no such target")
    with run_folder(tmp_path / "empty", EVAL):
        pass


def test_an_output_without_a_name_is_refused() -> None:
    with (
        pytest.raises(UsageError, match=r"^output: '' is not legal; expected the path of a folder"),
        run_folder("", FIT),
    ):
        pass


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG, errno.EACCES])
def test_whatever_the_system_says_of_a_folder_is_told(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UsageError, match=f"^output: .*: {os.strerror(code)}$"), run_folder(tmp_path / "run", FIT):
        pass


def test_fit_writes_into_no_draft_and_leaves_no_run_when_it_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    make_draft(target, tmp_path / "draft")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=r"^output: .* did not make"):
        run_fit(tmp_path, tmp_path / "draft")
    with pytest.raises(UsageError):
        run_fit(tmp_path, tmp_path / "run", target="nowhere")
    assert tree(tmp_path) == before and not (tmp_path / "run").exists()
