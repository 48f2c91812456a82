"""The judge of checkpoints: one choice of what runs the models, a seed of its own, honest words for mismatches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.models import LoadedModel
from distill.config import JudgeConfig
from distill.training import callbacks
from distill.training.callbacks import describe_mismatches
from distill.training.fit import judged_decoding
from distill.training.history import TIMED_COLUMNS, metrics_table
from tests.fit_runs import fit_config, run_fit, stub_judge

SAMPLING = DecodeConfig(max_new_tokens=8, sampling=SamplingConfig(temperature=1.0))


def test_a_judge_without_a_seed_takes_the_runs(fit_pair: Path) -> None:
    config = fit_config(fit_pair, seed=11, judge=JudgeConfig(decode=SAMPLING))
    assert judged_decoding(config) == replace(SAMPLING, seed=11)
    own = replace(SAMPLING, seed=0)
    assert judged_decoding(replace(config, judge=JudgeConfig(decode=own))) == own


def test_r04_a_judge_that_samples_gives_the_same_figures_again(fit_pair: Path, tmp_path: Path) -> None:
    judge = JudgeConfig(every_n_steps=2, num_prompts=2, decode=SAMPLING)
    runs = [run_fit(fit_pair, tmp_path / name, judge=judge, max_steps=2).rows for name in ("one", "two")]
    rows = [[{k: v for k, v in row.items() if k not in TIMED_COLUMNS} for row in run] for run in runs]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_e08_mismatches_are_told_as_what_is_known(dtype: torch.dtype) -> None:
    said, name = describe_mismatches(2, 4, dtype), str(dtype).removeprefix("torch.")
    assert "2 of 4 greedy texts differ from plain decoding's" in said
    exact = dtype in (torch.float32, torch.float64)
    assert said.startswith("warning: ") == exact
    assert (f"decoding is not exact here, in {name}: please report it" in said) == exact
    assert (f"on {name} near ties may round differently" in said) == (not exact)


def test_mismatches_of_a_checkpoint_are_told(
    fit_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = stub_judge([1.0] * 9)
    monkeypatch.setattr(callbacks, "judge", lambda *args: replace(stub(*args), mismatches=1))
    run_fit(fit_pair, tmp_path / "run", max_steps=1)
    assert "warning: 1 of 2 greedy texts differ from plain decoding's" in capsys.readouterr().err


@pytest.mark.usefixtures("stub_judging")
@pytest.mark.parametrize("chosen", ["eager", "prepacked"])
def test_what_runs_the_models_is_measured_once_a_run(
    chosen: str, fit_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def with_backend(loaded: LoadedModel, name: str = "auto") -> LoadedModel:
        asked.append(name)
        return replace(loaded, backend=chosen)

    monkeypatch.setattr(callbacks, "with_backend", with_backend)
    run_fit(fit_pair, tmp_path / "run", model=ModelConfig(device="cpu", backend="auto"))
    assert len(metrics_table(tmp_path / "run").rows()) == 4
    assert asked == ["auto", "auto", chosen, chosen, chosen]  # target and draft, then the draft of each checkpoint
