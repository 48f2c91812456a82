"""Ctrl-C in a terminal: fit and generate end with 130 and a line, and the same command ends as if there was none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill.cli import main as cli
from distill.runs import config_yaml
from distill.training.history import TIMED_COLUMNS, metrics_table, steps_table
from tests.fit_runs import fit_config

ROOT = Path(__file__).parents[2]
# The command line, its N-th call of OWNER.NAME announced and then never done.
PROGRAM = """
import importlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
owner, name, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
module, _, kind = owner.partition(":")
place = importlib.import_module(module)
place = getattr(place, kind) if kind else place
plain, calls = getattr(place, name), []
def slow(*args, **kwargs):
    calls.append(name)
    if len(calls) == number:
        print("here", flush=True)
        time.sleep(60)
    return plain(*args, **kwargs)
setattr(place, name, slow)
from distill.cli.main import main
sys.exit(main(sys.argv[4:]))
"""


def interrupt(place: list[str], command: list[str]) -> list[str]:
    """Run `command` and press Ctrl-C when it comes to `place`; the lines that it left on its standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *place, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},  # sums are split among threads
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout and process.stderr
        if process.stdout.readline() == "here\n":
            os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    return said.splitlines()


def test_ctrl_c_ends_fit_with_130_and_the_next_start_with_the_same_run(
    fit_pair: Path, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "fit.yaml"
    settings.write_text(config_yaml(fit_config(fit_pair, output=str(tmp_path / "run"))))
    command = ["fit", "--config", str(settings)]
    seventh = ["distill.training.module:Distillation", "training_step", "7"]  # two make a step
    *_, told, last = interrupt(seventh, command)
    assert told == "interrupted after step 3; the same command continues from step 2"
    assert last == "draftsmith fit: interrupted"
    assert cli.main(command) == 0
    assert "continues from step 2" in capsys.readouterr().err
    weights = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (finished_run, tmp_path / "run")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for table in (metrics_table, steps_table):
        rows = [table(run).rows() for run in (finished_run, tmp_path / "run")]
        assert rows[0] and len(rows[0]) == len(rows[1])
        assert all(a[k] == b[k] for a, b in zip(*rows, strict=True) for k in a.keys() - set(TIMED_COLUMNS))


def test_ctrl_c_ends_generate_with_130_and_the_next_start_with_the_same_bytes(fit_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(7)))
    command = f"generate --target {fit_pair / 'target'} --prompts {tmp_path / 'prompts.jsonl'} --max_new_tokens 5"
    command += " --batch_size 2 --sampling.temperature 1 --model.backend eager --output"
    third = ["distill.generate", "answer_batch", "3"]
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    assert interrupt(third, [*command.split(), str(killed)])[-1] == "draftsmith generate: interrupted"
    left = killed.read_bytes()
    for output in (killed, whole):
        assert cli.main([*command.split(), str(output)]) == 0
    assert left.count(b"\n") == 4 and whole.read_bytes().startswith(left)
    assert killed.read_bytes() == whole.read_bytes()
