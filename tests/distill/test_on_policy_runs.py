"""Runs of fit with texts of their own, from start to end, resumed, killed and on two ranks; and what is refused."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.errors import UsageError
from distill.cli.main import main
from distill.config import DataConfig, FitConfig, OnPolicyConfig, ReinforceConfig, ReplayConfig, TeacherConfig
from distill.on_policy.traces import read_traces
from distill.training import callbacks
from distill.training.fit import fit
from distill.training.history import TIMED_COLUMNS, steps_table
from tests.distill.on_policy_ranks import ranks_config
from tests.draft_files import EOS, make_draft, save_target
from tests.fit_runs import QUIET, distance, fit_config, stub_judge, write_id_rows
from tests.fixtures import byte_tokenizer, tiny_gpt2

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]
ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {"reuse_steps": 3, "num_texts": 6, "max_new_tokens": 8, "batch_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "on_policy": {"on_policy": OnPolicyConfig(fraction=0.5, **SMALL)},
    "replay": {"replay": ReplayConfig(fraction=0.5, weight=3.0, num_speculative_tokens=2, **SMALL)},
    "reinforce": {"reinforce": ReinforceConfig(fraction=0.5, num_speculative_tokens=2, num_rounds=8, **SMALL)},
}
KINDS["all"] = {name: replace(section, fraction=0.2) for kind in list(KINDS.values()) for name, section in kind.items()}
ONE_SEGMENT = {"log_every_n_steps": 1, "enable_progress_bar": False, "max_time": {"seconds": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft with dropout, one of a reduced vocabulary, and rows."""
    folder = tmp_path_factory.mktemp("on_policy")
    tokenizer = byte_tokenizer()
    save_target(folder / "target", tokenizer=tokenizer)
    save_target(folder / "draft", tiny_gpt2(seed=1, vocab_size=len(tokenizer)), tokenizer)  # dropout 0.1 everywhere
    write_id_rows(folder / "rows.jsonl")
    make_draft(folder / "target", folder / "narrow", draft_vocab_size=64, data=[str(folder / "rows.jsonl")])
    return folder


@pytest.fixture(autouse=True)
def no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "judge", stub_judge([1.0] * 20))


def config_of(folder: Path, output: str, kind: str, **changes: Any) -> FitConfig:
    settings = {"teacher": TeacherConfig(), **KINDS.get(kind, {}), **changes}
    return fit_config(folder, output=str(folder / output), **settings)


def losses(folder: Path, output: str) -> list[dict[str, Any]]:
    rows = steps_table(folder / output).rows()
    return [{k: v for k, v in row.items() if k not in TIMED_COLUMNS} for row in rows]


def weights(folder: Path, output: str) -> dict[str, torch.Tensor]:
    content = torch.load(folder / output / "checkpoints" / "step-000006.ckpt", weights_only=True)
    found: dict[str, torch.Tensor] = content["state_dict"]
    return found


def check_equal(folder: Path, whole: str, resumed: str) -> None:
    assert [row["step"] for row in losses(folder, whole)] == [1, 2, 3, 4, 5, 6]
    assert losses(folder, whole) == losses(folder, resumed)
    ours, theirs = weights(folder, whole), weights(folder, resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "teacher"),
    [
        ("all", "online"),
        pytest.param("all", "cached", marks=pytest.mark.slow),
        *(pytest.param(k, t, marks=pytest.mark.slow) for k in list(KINDS)[:3] for t in ("online", "cached")),
    ],
)
def test_r04_a_run_stopped_between_two_makings_and_resumed_equals_a_whole_one(
    kind: str, teacher: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dropout. Texts are made at steps 0 and 3; the run stops at 2 and 4."""
    chosen = TeacherConfig(kind=teacher, top_k=8) if teacher == "cached" else TeacherConfig()
    whole, parts = f"{kind}-{teacher}-whole", f"{kind}-{teacher}-parts"
    assert fit(config_of(folder, whole, kind, teacher=chosen)).complete
    told = capsys.readouterr().err
    assert all(told.count(f"{name}: ") >= 2 for name in KINDS[kind])
    ends = [fit(config_of(folder, parts, kind, teacher=chosen, trainer=ONE_SEGMENT)).step for _ in range(3)]
    assert ends == [2, 4, 6]
    check_equal(folder, whole, parts)


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.distill.on_policy_ranks", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_t32_two_gloo_ranks_and_a_killed_run_see_the_same_texts(folder: Path) -> None:
    """fp64, a draft of a reduced vocabulary; rows of all kinds are split over two ranks."""
    fit(ranks_config(folder, "one", 1, KINDS["all"]))
    two = program(folder, "two", "2")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("two: 6 of 6 from None") == 2
    assert distance(weights(folder, "one"), weights(folder, "two")) < 1e-9
    for a, b in zip(losses(folder, "one"), losses(folder, "two"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-9)
    assert program(folder, "killed", "1", "9").returncode == -signal.SIGKILL  # inside the window of step 5
    assert "from 4" in program(folder, "killed", "1").stdout
    check_equal(folder, "one", "killed")


def test_fractions_of_0_cost_nothing(folder: Path) -> None:
    from distill.training.run_parts import load_parts

    config = config_of(folder, "none", "none")
    assert load_parts(config).feed.extra is None
    assert config.on_policy == OnPolicyConfig() and not config.replay.wanted and not config.reinforce.wanted


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: OnPolicyConfig(fraction=1.0), r"on_policy.fraction: 1.0 is not legal; expected a number in \[0, 1\)"),
        (lambda: OnPolicyConfig(num_texts=3), r"on_policy.num_texts: 3 has no effect with on_policy.fraction 0"),
        (lambda: OnPolicyConfig(fraction=0.5, reuse_steps=0), "on_policy.reuse_steps: 0 is not legal"),
        (
            lambda: ReplayConfig(fraction=0.5, weight=1.0),
            "replay.weight: 1.0 is not legal; expected a finite number > 1",
        ),
        (lambda: ReplayConfig(fraction=0.5, num_texts=0), "replay.num_texts: 0 is not legal; .*needs replay.log"),
        (lambda: ReplayConfig(fraction=0.5, num_speculative_tokens=0), "replay.num_speculative_tokens: 0 is not legal"),
        (lambda: ReinforceConfig(fraction=0.5, anchor=0.0), "reinforce.anchor: 0.0 is not legal"),
        (lambda: ReinforceConfig(weight=2.0), "reinforce.weight: 2.0 has no effect with reinforce.fraction 0"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(make: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}"):
        make()


def test_sections_that_do_not_go_together_are_refused(folder: Path) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises(UsageError) as caught:
            fit(config_of(folder, "refused", "none", **changes))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    half = OnPolicyConfig(fraction=0.5, **SMALL)
    told = refused(on_policy=half, replay=ReplayConfig(fraction=0.5, **SMALL))
    assert told == "on_policy.fraction, replay.fraction: they add up to 1; expected less than 1"
    streamed = DataConfig(train=[str(folder / "rows.jsonl")], streaming=True)
    assert refused(on_policy=half, data=streamed) == (
        "on_policy.fraction: 0.5 is not legal with data.streaming; expected 0"
    )
    assert refused(on_policy=half, teacher=TeacherConfig(kind="cached", sampled=4)).startswith(
        "on_policy.fraction: 0.5"
    )
    assert refused(on_policy=replace(half, max_new_tokens=32)).startswith(
        "on_policy.max_new_tokens: 32 is not legal; expected less than 32: a text has to fit in a row"
    )
    prompts = folder / "long.jsonl"
    prompts.write_text('{"prompt": "' + "long " * 20 + '"}\n', encoding="utf-8")
    assert "has no prompt of 1 to 24 tokens" in refused(on_policy=replace(half, prompts=str(prompts)))
    assert "replay.log: gone.jsonl cannot be read" in refused(
        replay=ReplayConfig(fraction=0.5, log="gone.jsonl", **SMALL)
    )


def test_a_log_of_real_traffic_is_trained_on_and_one_that_changed_is_refused(folder: Path) -> None:
    log = folder / "log.jsonl"
    row = '{"prompt_ids": [1, 2], "context_length": 2, "drafted": [3, 4], "num_accepted": 1, "emitted": [3, %d]}\n'
    log.write_text(row % 5, encoding="utf-8")
    section = ReplayConfig(fraction=0.5, log=str(log), num_texts=0)
    changes = {"replay": section, "trainer": ONE_SEGMENT, "teacher": TeacherConfig(kind="cached", top_k=8)}
    assert fit(config_of(folder, "logged", "none", **changes)).step == 2
    log.write_text(row % 6, encoding="utf-8")
    with pytest.raises(UsageError, match=r"replay.log: what they hold has changed since the run's checkpoint"):
        fit(config_of(folder, "logged", "none", **changes))


def test_what_run_traces_can_be_trained_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = folder / "traced.jsonl"
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    decode = ["--decode.max_new_tokens", "6", "--decode.draft_length", "fixed", "--model.backend", "eager"]
    assert main(["run", *pair, *decode, "--prompt", "Hi.", "--chat", "false", "--trace", str(trace)]) == 0
    (text,) = read_traces(str(trace), 2.0, 64, 259)
    assert text.prompt_ids == byte_tokenizer()("Hi.")["input_ids"]
    assert text.num_supervised == 6 or text.input_ids[-1] == EOS
