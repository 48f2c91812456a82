"""Values of `trainer:` are checked before anything is loaded or written."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry

from decode.config import ModelConfig
from decode.errors import UsageError
from distill.cli import main as cli
from distill.training import trainer_options
from distill.training.sharding import ShardedStrategy
from distill.training.trainer_options import PASSED_ON, STRATEGIES, check_options, make_trainer
from tests.fit_runs import run_fit

CPU = ModelConfig(device="cpu")

ILLEGAL: dict[str, list[Any]] = {
    "benchmark": ["yes", 1],
    "detect_anomaly": ["yes", None],
    "deterministic": ["x", 1],
    "devices": [0, -1, True, "x", [], [0, 0], [-1], ["a"], 1.5, None, {}],
    "enable_model_summary": ["no", 0],
    "enable_progress_bar": ["no", None],
    "gradient_clip_algorithm": ["x", 1, []],
    "log_every_n_steps": [0, True, 2.5, None],
    "logger": [True, 0, ["tensorboard"], "x"],
    "max_time": [5, "5", "1:2:3", "00:00:00", {}, {"hour": 1}, {"hours": "x"}, {"hours": -1}, {"days": 1e12}, []],
    "num_nodes": [0, "2", True],
    "precision": ["x", 8, [], {}, True],
    "profiler": ["x", True, []],
    "strategy": ["x", None, []],
}
LEGAL: dict[str, list[Any]] = {
    "benchmark": [True, None],
    "detect_anomaly": [True],
    "deterministic": [True, "warn"],
    "devices": [1, "auto"],
    "enable_model_summary": [True],
    "enable_progress_bar": [False],
    "gradient_clip_algorithm": ["norm", "value"],
    "log_every_n_steps": [1],
    "logger": [None, False],
    "max_time": [None, "00:12:00:00", {"hours": 1, "minutes": 0.5}, {"seconds": 0}],
    "num_nodes": [1],
    "precision": ["32-true", "bf16-mixed", "bf16", 64, None],
    "profiler": [None, "simple"],
    "strategy": ["auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "fsdp2"],
}


def test_every_option_has_examples() -> None:
    assert ILLEGAL.keys() == LEGAL.keys() == PASSED_ON.keys()


@pytest.mark.parametrize("name, value", [(name, value) for name, values in ILLEGAL.items() for value in values])
def test_an_illegal_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^trainer\.{name}: [^\n]* is not legal; expected [^\n]+$"):
        check_options({name: value})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, value", [(name, value) for name, values in LEGAL.items() for value in values])
def test_a_legal_value_makes_a_trainer(name: str, value: Any, tmp_path: Path) -> None:
    check_options({name: value})
    make_trainer({name: value}, CPU, tmp_path, [], max_epochs=1)


@pytest.mark.parametrize("kind", [AttributeError, RuntimeError, ModuleNotFoundError, ValueError, TypeError])
def test_what_lightning_refuses_leaves_no_run(
    kind: type[Exception], fit_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(**_: Any) -> None:
        raise kind("two\nlines")

    monkeypatch.setattr(trainer_options, "Trainer", trainer)
    with pytest.raises(UsageError, match=r"^trainer: two lines$"):
        run_fit(fit_pair, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted({*StrategyRegistry.available_strategies(), "model_parallel"} - {*STRATEGIES}))
def test_r15_what_shards_the_draft_or_spawns_is_refused_at_the_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"  # neither target nor draft is there: no model has been looked at
    options = f"--target t --draft d --output {output} --data.train a.jsonl --max_steps 1 --trainer.strategy {name}"
    assert cli.main(["fit", *options.split()]) == 2
    told = capsys.readouterr().err
    if "deepspeed" in name or "fsdp" in name or name == "model_parallel":
        assert told.startswith(f"draftsmith fit: trainer.strategy: '{name}' is not offered: ") and "fsdp2" in told
    else:
        legal = ", ".join(STRATEGIES)
        assert told == f"draftsmith fit: trainer.strategy: '{name}' is not legal; expected one of {legal}\n"
    assert told.count("\n") == 1 and not output.exists()


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_r15_a_sharded_strategy_in_person_is_refused(strategy: Any) -> None:
    with pytest.raises(
        UsageError, match=rf"^trainer\.strategy: <.*{strategy.__name__} .* is not legal; expected [^\n]+$"
    ):
        check_options({"strategy": strategy()})


@pytest.mark.parametrize(("dtype", "precision"), [("float64", "32-true"), ("float32", "32-true")])
def test_shared_weights_keep_their_precision(dtype: Any, precision: str, tmp_path: Path) -> None:
    model = ModelConfig(device="cpu", dtype=dtype)
    trainer = make_trainer({"strategy": "fsdp2"}, model, tmp_path, [], max_epochs=1)
    assert isinstance(trainer.strategy, ShardedStrategy)
    assert trainer.precision == precision  # which converts nothing; lightning refuses 64-true here
