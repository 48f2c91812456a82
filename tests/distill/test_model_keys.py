"""Keys of the model section that a command could not honour are refused; int8 teachers are told apart."""

from pathlib import Path

import pytest

from decode.config import ModelConfig
from decode.errors import UsageError
from decode.models import load_model
from distill.config import DataConfig, FitConfig, GenerateConfig, InitConfig
from distill.weights import weights_sha256
from tests.draft_files import save_target


@pytest.mark.parametrize("key, value", [("draft_quantization", "int8"), ("draft_device", "cpu")])
def test_what_concerns_a_draft_is_refused_where_none_is_run(key: str, value: str) -> None:
    model = ModelConfig(**{key: value})  # type: ignore[arg-type]
    for make in (
        lambda: GenerateConfig("t", "p.jsonl", "o.jsonl", model=model),
        lambda: InitConfig("t", "o", model=model),
        lambda: FitConfig("t", "d", "o", DataConfig(["rows.jsonl"]), max_steps=1, model=model),
    ):
        with pytest.raises(UsageError, match=f"model.{key}: '{value}' is not legal; expected"):
            make()


def test_fit_refuses_a_target_that_is_spread_over_devices() -> None:
    with pytest.raises(UsageError, match=r"model\.device_map: 'auto' is not legal; expected None here"):
        FitConfig("t", "d", "o", DataConfig(["rows.jsonl"]), max_steps=1, model=ModelConfig(device_map="auto"))


def test_a_teacher_with_int8_weights_is_another_teacher(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    save_target(tmp_path / "t")
    found = []
    for kind in ("none", "int8", "int8"):
        config = ModelConfig(device="cpu", quantization=kind)  # type: ignore[arg-type]
        found.append(weights_sha256(load_model(str(tmp_path / "t"), config, role="target").model))
    assert found[1] == found[2] != found[0]
