"""The command line: what a config becomes, how a command ends, and what `run` prints."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import SamplingConfig
from decode.errors import DraftsmithError, IncompatiblePair, UsageError
from distill.cli import main as cli
from distill.cli.keys import keys_of
from distill.config import FitConfig, RunConfig
from distill.results.config import EvalConfig
from tests.command_lines import EVAL, FIT, RUN, stub_commands
from tests.fixtures import byte_tokenizer, tiny_llama, with_noise
from tests.test_project import CONFIGS, ROOT, command_of, name_of


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return stub_commands(monkeypatch)


def test_d57_no_speculation_is_plain_decoding(calls: list[Any]) -> None:
    assert cli.main([*RUN, "--decode.num_speculative_tokens", "0"]) == 0
    assert calls[0].decode.num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["fti"], "draftsmith: fti: unknown command; did you mean fit? commands: generate, init, cache, fit, eval,"),
        (["--nonsense"], "draftsmith: --nonsense: unknown command; commands: generate, init, cache, fit, eval,"),
    ],
)  # fmt: skip
def test_an_unknown_command_names_the_known_ones(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith(line)


def test_options_lie_on_top_of_files_wherever_they_stand(calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(FIT + "optimizer:\n  learning_rate: 2e-3\n  weight_decay: 0.1\n")
    (tmp_path / "b.yaml").write_text("optimizer:\n  weight_decay: 1e-2\nseed: 5\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    assert cli.main(["fit", "--seed", "7", *files, "--optimizer.learning-rate=1e-5"]) == 0
    config: FitConfig = calls[0]
    assert (config.seed, config.optimizer.learning_rate, config.optimizer.weight_decay) == (7, 1e-5, 0.01)


def test_trainer_options_keep_their_types(calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FIT + "trainer:\n  limit_val_batches: 2e-3\n  strategy: {name: ddp}\n")
    words = ["--trainer.devices", "2", "--trainer.precision", "bf16-mixed", "--trainer.logger", "null"]
    assert cli.main(["fit", "--config", str(tmp_path / "run.yaml"), *words]) == 0
    assert calls[0].trainer == {
        "limit_val_batches": 0.002,
        "strategy": {"name": "ddp"},
        "devices": 2,
        "precision": "bf16-mixed",
        "logger": None,
    }


def test_a_list_takes_all_values_up_to_the_next_option(calls: list[Any]) -> None:
    assert cli.main([*EVAL[:-2], "--drafts", "a", "b c", "é😀[1]", "--num-prompts", "2"]) == 0
    assert cli.main([*EVAL[:-2], "--drafts", "[a, b]"]) == 0
    configs: list[EvalConfig] = calls
    assert [c.drafts for c in configs] == [["a", "b c", "é😀[1]"], ["a", "b"]]


@pytest.mark.parametrize(
    "prompt", ["key: value\n - {x}", "null", "12", "[1, 2", "'", "é 😀\t\\n", "--not-an-option", ""]
)
def test_a_prompt_is_taken_as_it_is(calls: list[Any], prompt: str) -> None:
    assert cli.main(["run", "--target", "t", f"--prompt={prompt}"]) == 0
    config: RunConfig = calls[0]
    assert config.prompt == prompt


def test_an_optional_section_is_given_key_by_key_or_null(calls: list[Any]) -> None:
    assert cli.main([*RUN, "--decode.draft_sampling.temperature", "0.5"]) == 0
    assert cli.main([*RUN, "--decode.draft_sampling", "null"]) == 0
    assert [c.decode.draft_sampling for c in calls] == [SamplingConfig(temperature=0.5), None]


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_the_printed_config_reads_back_to_the_same(
    calls: list[Any], path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = command_of(path)
    assert cli.main([name, "--config", str(path), "--print-config"]) == 0
    assert not calls
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert cli.main([name, "--config", str(path)]) == 0
    assert cli.main([name, "--config", str(tmp_path / "printed.yaml")]) == 0
    assert calls[0] == calls[1]
    assert type(calls[0]) is cli.COMMANDS[name].config


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("draft: not\nfound"), 2, "draft: not found"),
        (DraftsmithError("the teacher stopped"), 1, "the teacher stopped"),
        (IncompatiblePair("vocab_size: 5 is not 6"), 3, "vocab_size: 5 is not 6"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(2, "No such file or directory", "a.jsonl"), 1, "a.jsonl: No such file or directory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ZeroDivisionError("by zero\nand more"), 1, "ZeroDivisionError: by zero (--debug shows where)"),
        (torch.OutOfMemoryError("CUDA is full."), 1, "OutOfMemoryError: CUDA is full. (--debug shows where)"),
    ],
)  # fmt: skip
def test_each_end_has_its_status_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    end_with(monkeypatch, error)
    assert cli.main(RUN) == status
    assert capsys.readouterr().err == f"draftsmith run: {line}\n"


def end_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def call(config: Any) -> None:
        raise error

    stub_commands(monkeypatch)
    monkeypatch.setitem(cli.COMMANDS, "run", cli.Command("", RunConfig, call))


def test_an_interrupt_that_a_library_turned_into_an_exit_is_still_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(config: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    stub_commands(monkeypatch)
    monkeypatch.setitem(cli.COMMANDS, "run", cli.Command("", RunConfig, call))
    assert cli.main(RUN) == 130
    assert capsys.readouterr().err == "draftsmith run: interrupted\n"


@pytest.mark.parametrize("how", ["--debug", "DRAFTSMITH_DEBUG"])
def test_a_traceback_is_shown_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    end_with(monkeypatch, ZeroDivisionError("by zero"))
    monkeypatch.setenv("DRAFTSMITH_DEBUG", "1" if how == "DRAFTSMITH_DEBUG" else "0")
    assert cli.main([*RUN, "--debug"] if how == "--debug" else RUN) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("draftsmith run: ZeroDivisionError: by zero (--debug shows where)\n")


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    code = "import sys; from distill.cli.main import main; sys.stdin.read(); sys.exit(main(sys.argv[1:]))"
    words = ["run", "--config", str(ROOT / "configs/quickstart/run.yaml"), "--print-config"]
    pipe = subprocess.PIPE
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=buffered
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(f"  {name} " in printed.err for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_tells_every_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    shown_keys = [k for k in keys_of(cli.COMMANDS[name].config).leaves if "draft_sampling." not in k]
    assert all(f"--{key} " in shown for key in shown_keys)
    assert "--config FILE" in shown


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny target and draft as model directories."""
    tokenizer = byte_tokenizer()
    target = tiny_llama(vocab_size=len(tokenizer)).float()
    target.generation_config.eos_token_id = None
    for name, model in (("target", target), ("draft", with_noise(target, 0.05))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path / "target", tmp_path / "draft"


def test_run_prints_the_target_s_text_and_one_line_of_counts(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = pair
    words = ["--prompt", "abc", "--chat", "false", "--decode.max_new_tokens", "24", "--model.backend", "eager"]
    assert cli.main(["run", "--target", str(target), "--draft", str(draft), *words]) == 0
    with_draft = capsys.readouterr()
    assert cli.main(["run", "--target", str(target), *words]) == 0
    plain = capsys.readouterr()
    assert with_draft.out == plain.out
    assert with_draft.out.strip()
    assert with_draft.err.count("\n") == 1
    assert re.fullmatch(
        r"24 tokens, [\d.]+ tokens/s, mean acceptance length [\d.]+, draft acceptance rate [\d.]+\n", with_draft.err
    )
    assert re.fullmatch(r"24 tokens, [\d.]+ tokens/s, mean acceptance length 1.00\n", plain.err)


def test_run_refuses_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--target", str(tmp_path / "nowhere"), "--prompt", "p"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("name", "kind"), [("run", "run"), ("run/checkpoints/step-000003.ckpt", "checkpoint")])
def test_run_tells_to_export_what_fit_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000003.ckpt").write_bytes(b"")
    draft = str(tmp_path / name)
    assert cli.main([*RUN, "--draft", draft]) == 2
    line = f"draft: {draft} is a {kind} of fit; export it first: draftsmith export --target t --draft {draft} --output"
    assert line in capsys.readouterr().err
