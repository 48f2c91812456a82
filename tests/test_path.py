"""The whole path through the command line, on a tiny target: data, draft, distillation, report, export, decoding."""

import json
from pathlib import Path

import pytest

from distill.cli import main as cli
from tests.fixtures import byte_tokenizer, tiny_llama


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny target directory, beside prompts for it."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer)).float()
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [json.dumps({"prompt": f"say {i} and {7 * i}"}) for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "target"


def test_b05_each_command_takes_what_the_one_before_it_left(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(command: str, options: str, wanted: str) -> None:
        model = [] if command == "export" else ["--model.backend", "eager"]
        assert cli.main([command, "--target", "target", *model, *options.split()]) == 0
        assert wanted in capsys.readouterr().out

    run(
        "generate",
        "--prompts prompts.jsonl --output answers.jsonl --max_new_tokens 12 --batch_size 4",
        "answers.jsonl: 10 answers to 10 rows (0 bad rows, 0 skipped)\n",
    )
    run(
        "init",
        "--output draft --hidden_size 16 --num_layers 1 --draft_vocab_size 64 --data answers.jsonl",
        "draft: the untrained draft\n",
    )
    fit = "--draft draft --output run --data.train answers.jsonl --data.max_length 64 --data.batch_size 2"
    fit += " --max_steps 2 --judge.every_n_steps 1 --judge.num_prompts 1 --judge.decode.max_new_tokens 4"
    run("fit", fit, "run: checkpoints, metrics.csv, best.json; step 2 of 2\n")
    run("fit", fit, "run: checkpoints, metrics.csv, best.json; step 2 of 2\n")
    evaluation = "--drafts run --prompts prompts.jsonl --output report --num_prompts 1 --decode.max_new_tokens 4"
    run("eval", evaluation, "report: acceptance.csv, ")
    run("export", "--draft run --output exported", "exported: the draft, for any engine")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "By `draftsmith eval`, 1 prompts, greedy, at most 4 new tokens" in card
    assert "at temperature 1, a lower bound where the teacher is cached" in card
    run("run", "--draft exported --prompt hello --decode.max_new_tokens 4", "\n")
    for folder in ("run", "report"):
        assert (tmp_path / folder / "command.txt").read_text().count("\n") == 1
        assert json.loads((tmp_path / folder / "versions.json").read_text())["torch"]
        assert (tmp_path / folder / "config.yaml").is_file()


def test_r06_the_recorded_config_of_a_run_resumes_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--target target --draft target --output run --data.train rows.jsonl --data.max_length 64 --max_steps 1"
    options += " --judge.num_prompts 1 --judge.decode.max_new_tokens 4 --model.backend eager"
    assert cli.main(["fit", *options.split(), "--trainer.enable_progress_bar", "false"]) == 0
    assert cli.main(["fit", "--config", "run/config.yaml"]) == 0
    assert "nothing is changed" in capsys.readouterr().err
