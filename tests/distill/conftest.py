"""A pair with its rows, and a finished run of fit, made once for all tests that only read them."""

from pathlib import Path

import pytest

from decode.config import ModelConfig
from decode.models import LoadedModel, load_model
from tests.draft_files import make_draft, save_target, write_rows
from tests.fixtures import byte_tokenizer


@pytest.fixture(scope="session")
def fit_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, a draft with a reduced vocabulary, and rows: read only."""
    from tests.fit_runs import write_id_rows

    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    write_id_rows(folder / "rows.jsonl")
    make_draft(folder / "target", folder / "draft", draft_vocab_size=64, data=[str(folder / "rows.jsonl")])
    return folder


@pytest.fixture(scope="session")
def finished_run(fit_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps, really judged: read only."""
    from tests.fit_runs import run_fit

    output = tmp_path_factory.mktemp("finished") / "run"
    report = run_fit(fit_pair, output)
    assert report.complete and report.step == report.num_steps == 6
    return output


@pytest.fixture
def stub_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are judged without decoding, all alike."""
    from distill.training import callbacks
    from tests.fit_runs import stub_judge

    monkeypatch.setattr(callbacks, "judge", stub_judge([1.0] * 50))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def loaded_target(target: Path) -> LoadedModel:
    return load_model(str(target), ModelConfig(device="cpu", backend="eager"), role="target")


@pytest.fixture(scope="module")
def rows(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return write_rows(file, byte_tokenizer(), ["The fox sat.", "A fox ran far.", "Far hills."])


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(target, tmp_path_factory.mktemp("draft") / "d")


@pytest.fixture(scope="module")
def reduced(target: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(target, tmp_path_factory.mktemp("reduced") / "d", draft_vocab_size=20, data=[str(rows)])
