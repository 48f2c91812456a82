"""generate may be killed at any point: run again, its output equals an uninterrupted one byte for byte."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import distill.generate
from decode.config import SamplingConfig
from decode.errors import UsageError
from distill.config import GenerateConfig
from distill.data.answers import AnswerFile
from distill.data.rows import read_rows
from distill.generate import GenerateReport, answer
from tests.fixtures import byte_tokenizer, loaded, tiny_llama

NUM_ROWS = 11  # batches of 3 rows, of which rows 2 and 7 are bad
# Writes half of the second batch, waits until it is on the disk, and is killed there.
KILLED = """
import os, signal, sys
from distill.data.answers import AnswerFile
from tests.distill.test_generate_resume import run, settings

plain = AnswerFile.append
def killed(self, rows):
    if killed.calls == 1:
        whole = open(self._file.name, "rb").read()
        plain(self, rows)
        written = os.path.getsize(self._file.name)
        os.truncate(self._file.name, (len(whole) + written) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    killed.calls += 1
    plain(self, rows)
killed.calls = 0
AnswerFile.append = killed
run(settings(sys.argv[1]))
"""


def settings(folder: str | Path, **extra: Any) -> GenerateConfig:
    source = Path(folder) / "in.jsonl"
    rows = [{"prompt": "x" * (1 + n % 4)} if n not in (2, 7) else {"bad": n} for n in range(NUM_ROWS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = str(Path(folder) / "a.jsonl")
    config = GenerateConfig("tiny", str(source), output, max_new_tokens=5, batch_size=3)
    return replace(config, sampling=SamplingConfig(temperature=1.0), **extra)


def run(config: GenerateConfig) -> GenerateReport:
    target = loaded(tiny_llama(vocab_size=259), tokenizer=byte_tokenizer())
    return answer(list(read_rows(config.prompts))[: config.limit], target, config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of an uninterrupted run."""
    config = settings(tmp_path_factory.mktemp("whole"))
    assert run(config).num_written == 9
    return Path(config.output).read_bytes()


def test_killed_in_the_middle_of_a_write(tmp_path: Path, whole: bytes) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = (tmp_path / "a.jsonl").read_bytes()
    assert whole.startswith(left) and not left.endswith(b"\n") and left.count(b"\n") >= 2
    report = run(settings(tmp_path))
    assert (tmp_path / "a.jsonl").read_bytes() == whole
    assert report.num_resumed == left.count(b"\n") and report.num_written == 9


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.34, 0.5, 0.77, 0.999])
def test_cut_at_any_byte(tmp_path: Path, whole: bytes, share: float) -> None:
    config = settings(tmp_path)
    run(config)
    os.truncate(config.output, int(share * len(whole)))
    report = run(config)
    assert Path(config.output).read_bytes() == whole
    assert report.num_written + report.num_errors + report.num_skipped == report.num_rows == NUM_ROWS
    assert len((tmp_path / "a.errors.jsonl").read_text().splitlines()) == 2


def test_interrupted_at_each_batch_and_twice_in_a_row(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path)
    plain = distill.generate.answer_batch
    calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(distill.generate, "answer_batch", interrupted)
    for number in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run(config)
        assert len(Path(config.output).read_bytes().splitlines()) in (2 * number, 2 * number + 1)
    run(config)
    assert Path(config.output).read_bytes() == whole
    monkeypatch.setattr(distill.generate, "answer_batch", None)  # nothing is left to answer
    report = run(config)
    assert (report.num_resumed, report.num_tokens, report.num_written) == (9, 0, 9)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"seed": 1}, "seed 0, not 1"),
        ({"sampling": SamplingConfig(temperature=0.5)}, "sampling"),
        ({"max_new_tokens": 4}, "max_new_tokens 5, not 4"),
        ({"batch_size": 2}, "batch_size 3, not 2"),
        ({"target": "other"}, "target 'tiny', not 'other'"),
        ({"max_prompt_tokens": 21}, "9 prompts, and now there are 6 .see limit, max_prompt_tokens"),
    ],
)
def test_an_output_made_by_other_settings_is_refused_and_left_alone(
    tmp_path: Path, whole: bytes, extra: dict[str, Any], named: str
) -> None:
    config = settings(tmp_path)
    run(config)
    with pytest.raises(UsageError, match=rf"a\.jsonl was made with {named}"):
        run(replace(config, **extra))
    assert Path(config.output).read_bytes() == whole


def test_an_output_made_from_other_prompts_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path)
    run(config)
    lines = Path(config.prompts).read_text().splitlines()
    lines[3] = '{"prompt": "other"}'
    Path(config.prompts).write_text("\n".join(lines))
    with pytest.raises(UsageError, match=r"a\.jsonl was made with other prompts"):
        run(config)


@pytest.mark.parametrize("first", [1, 4, 5, 6])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_raised_limit_extends_the_output_to_the_bytes_of_a_run_that_had_it_from_the_start(
    tmp_path: Path, whole: bytes, first: int, share: float
) -> None:
    config = settings(tmp_path)
    output = Path(config.output)
    run(replace(config, limit=first))
    os.truncate(output, int(share * output.stat().st_size))
    report = run(config)
    assert output.read_bytes() == whole
    assert report.num_written == 9
    with pytest.raises(UsageError, match=r"made with 9 prompts, and now there are \d .see limit"):
        run(replace(config, limit=first))
    assert output.read_bytes() == whole


def test_an_output_extended_and_killed_before_it_is_answered_goes_on(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path)
    run(replace(config, limit=5))
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(distill.generate, "answer_batch", None)
        run(config)
    run(config)
    assert Path(config.output).read_bytes() == whole


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    config = settings(tmp_path)
    run(config)
    other = loaded(tiny_llama(1, vocab_size=259), tokenizer=byte_tokenizer())
    with pytest.raises(UsageError, match="was made with target_sha256"):
        answer(list(read_rows(config.prompts)), other, config)


def test_files_that_generate_did_not_make_or_that_are_damaged_are_refused(tmp_path: Path, whole: bytes) -> None:
    config = settings(tmp_path)
    output = Path(config.output)
    output.write_text("precious\n")
    with pytest.raises(UsageError, match=r"there is no a\.jsonl\.meta\.json"):
        run(config)
    assert output.read_text() == "precious\n"
    output.unlink()
    run(config)
    lines = whole.splitlines(keepends=True)
    for damaged in ([lines[0], b"{}\n", *lines[2:]], [lines[0], *lines[2:]], [*lines, lines[-1]]):
        output.write_bytes(b"".join(damaged))
        with pytest.raises(UsageError, match=r"a\.jsonl:\d+ is damaged or misplaced"):
            run(config)


def test_two_processes_do_not_write_to_one_output(tmp_path: Path) -> None:
    config = settings(tmp_path)
    with Path(config.output).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being written by another process"):
            run(config)
    run(config)
    with pytest.raises(UsageError, match="cannot be written"):
        run(replace(config, output=str(tmp_path / "in.jsonl" / "a.jsonl")))


def test_rows_are_appended_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = AnswerFile.append

    def noted(self: AnswerFile, rows: list[dict[str, Any]]) -> None:
        sizes.append(len(rows))
        plain(self, rows)

    monkeypatch.setattr(AnswerFile, "append", noted)
    run(settings(tmp_path))
    assert sizes == [2, 3, 2, 2]  # input rows 0-2, 3-5, 6-8 and 9-10, the bad ones left out
