"""A target, a run and its export, made once for the tests of export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import ModelConfig
from decode.models import LoadedModel, load_model
from distill.drafts.vocab import pin_guard_channel
from distill.export import clean_reload, reload_check
from distill.export.config import ExportConfig
from distill.export.export import export
from tests.draft_files import EOS, narrowed, save_target, write_checkpoint
from tests.fixtures import tiny_llama, with_noise

CONFIG = ModelConfig(device="cpu", backend="eager")
VOCAB = 259
KEPT = torch.tensor([i for i in range(VOCAB) if i % 6 or i == EOS])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose own channel 0 is constant, so that a draft near it can reserve that channel."""
    model = tiny_llama(3, vocab_size=VOCAB)
    pin_guard_channel(model)
    return save_target(tmp_path_factory.mktemp("target") / "t", model)


@pytest.fixture(scope="module")
def loaded_target(target: Path) -> LoadedModel:
    return load_model(str(target), CONFIG, role="target")


@pytest.fixture(scope="module")
def trained(loaded_target: LoadedModel) -> LoadedModel:
    """A draft near the target, with most of its vocabulary."""
    model = with_noise(loaded_target.model, 0.05)
    pin_guard_channel(model)
    return narrowed(LoadedModel(model, loaded_target.tokenizer, "near"), KEPT)


@pytest.fixture(scope="module")
def run(trained: LoadedModel, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    figures = {"expected_acceptance": 0.4321, "draft_acceptance_rate": 0.321, "speedup": 1.234}
    write_checkpoint(folder, 700, trained, target, **figures)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Through a clean process, as users get it; the other tests reload in this process, which is faster."""
    output = tmp_path_factory.mktemp("out") / "exported"
    assert export(ExportConfig(draft=str(run), target=str(target), output=str(output))) == output
    return output


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reload in this process."""

    def run_here(folder: Path, request: dict[str, Any]) -> Any:
        logits, account = reload_check.reload(str(folder), request)
        return logits, json.loads(json.dumps(account))

    monkeypatch.setattr(clean_reload, "run_clean", run_here)
    yield
