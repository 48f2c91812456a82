"""Exports that would go wrong: types, ties, views, leftovers, faults of the reload, mistakes of the user."""

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from decode.errors import DraftsmithError, UsageError
from decode.models import LoadedModel
from distill.drafts.vocab import pin_guard_channel
from distill.export import clean_reload, reload_check
from distill.export.config import ExportConfig
from distill.export.export import export
from tests.distill.export_fixtures import KEPT, VOCAB, here, loaded_target, run, target, trained
from tests.draft_files import narrowed, save_target, write_checkpoint
from tests.fixtures import byte_tokenizer, random_prompt, tiny_llama, with_noise

__all__ = ["here", "loaded_target", "run", "target", "trained"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_x06_weights_are_cast_once_from_fp32(
    dtype: str, run: Path, target: Path, trained: LoadedModel, tmp_path: Path, here: None, capsys: Any
) -> None:
    output = export(ExportConfig(str(run), str(target), str(tmp_path / "out"), dtype=dtype))  # type: ignore[arg-type]
    written, meant = load_file(output / "model.safetensors"), trained.model.state_dict()
    kind = getattr(torch, dtype)
    for name, value in written.items():
        value = value[KEPT] if name == "lm_head.weight" else value
        assert torch.equal(value, meant[name].to(kind)), name
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    assert f"weights in {dtype}: the cast moved logits by at most" in capsys.readouterr().err
    whole = AutoModelForCausalLM.from_pretrained(output)
    assert torch.isin(whole(input_ids=torch.tensor([random_prompt(30, VOCAB)])).logits.argmax(-1), KEPT).all()


def test_x01_a_tied_draft_stays_tied_and_keeps_its_own_type(target: Path, tmp_path: Path, here: None) -> None:
    tied = save_target(tmp_path / "tied", tiny_llama(1, vocab_size=VOCAB, tie_word_embeddings=True).bfloat16())
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    model.save_pretrained(tied)
    output = export(ExportConfig(str(tied), str(target), str(tmp_path / "out")))
    ours, theirs = load_file(output / "model.safetensors"), load_file(tied / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = AutoModelForCausalLM.from_pretrained(output)
    assert again.config.tie_word_embeddings
    assert again.generation_config.num_assistant_tokens == 3


def test_x10_views_into_larger_tensors_are_saved_alone(run: Path, target: Path, tmp_path: Path, here: None) -> None:
    exported = export(ExportConfig(str(run), str(target), str(tmp_path / "whole")))
    file = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-000700.ckpt"
    content = torch.load(file, weights_only=True)
    for name, value in content["state_dict"].items():
        parent = torch.zeros(2, *value.shape[::-1])
        parent[1] = value.permute(*range(value.ndim)[::-1])
        content["state_dict"][name] = parent[1].permute(*range(value.ndim)[::-1])  # transposed, and half of its storage
    torch.save(content, file)
    output = export(ExportConfig(str(file), str(target), str(tmp_path / "out")))
    assert (output / "model.safetensors").stat().st_size == (exported / "model.safetensors").stat().st_size
    before, after = (load_file(p / "model.safetensors") for p in (exported, output))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_x11_nothing_asks_the_network(
    run: Path, target: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    output = export(ExportConfig(str(run), str(target), str(tmp_path / "out")))
    assert (output / "model.safetensors").is_file()


def test_x12_training_settings_are_not_exported(run: Path, target: Path, tmp_path: Path, here: None) -> None:
    file = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-000700.ckpt"
    content = torch.load(file, weights_only=True)
    content["draft_config"]["use_cache"] = False
    torch.save(content, file)
    output = export(ExportConfig(str(file), str(target), str(tmp_path / "out"), num_assistant_tokens=7))
    assert json.loads((output / "config.json").read_text())["use_cache"] is True
    assert json.loads((output / "generation_config.json").read_text())["num_assistant_tokens"] == 7


def test_a_folder_that_does_not_give_the_logits_back_is_not_left_and_the_earlier_one_stays(
    run: Path, target: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(str(run), str(target), str(tmp_path / "out"))
    export(config)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    run_here = clean_reload.run_clean

    def lose_a_tensor(folder: Path, request: dict[str, Any]) -> Any:
        logits, account = run_here(folder, request)
        logits[0] = logits[0] + 0.01
        return logits, account

    monkeypatch.setattr(clean_reload, "run_clean", lose_a_tensor)
    with pytest.raises(DraftsmithError, match=r"logits differ from the draft's by 0\.01"):
        export(config)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    monkeypatch.setattr(clean_reload, "run_clean", run_here)
    export(config)  # an earlier export is replaced


def test_a_clean_process_that_fails_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('first line\\nlast line')")
    monkeypatch.setattr(reload_check, "__file__", str(script))
    with pytest.raises(DraftsmithError, match="plain transformers cannot load the folder: last line") as caught:
        clean_reload.run_clean(tmp_path, {"input_ids": [[1]], "texts": [], "messages": []})
    assert "\n" not in str(caught.value)


def test_hidden_states_too_large_for_the_guard_are_refused(
    trained: LoadedModel, target: Path, tmp_path: Path, here: None
) -> None:
    model = with_noise(trained.model, 0) if trained.vocab_ids is None else LlamaForCausalLM(trained.model.config)
    draft = narrowed(LoadedModel(model.eval().requires_grad_(False), None, "large"), KEPT)
    draft.model.load_state_dict(trained.model.state_dict())
    draft.model.model.embed_tokens.weight.mul_(1e6)
    pin_guard_channel(draft.model)
    file = write_checkpoint(tmp_path / "run", 1, draft, target)
    with pytest.raises(DraftsmithError, match="tokens outside the draft's vocabulary get"):
        export(ExportConfig(str(file), str(target), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_mistakes_are_refused_before_anything_is_written(run: Path, target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    other = save_target(tmp_path / "other", tiny_llama(0, vocab_size=VOCAB), byte_tokenizer(swap=(65, 66)))
    larger = save_target(tmp_path / "larger", tiny_llama(0, vocab_size=264))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output": str(tmp_path / "mine")}, "`draftsmith export` did not make"),
        ({"draft": str(tmp_path / "mine")}, "no checkpoint, no run folder and no model folder"),
        ({"draft": str(tmp_path / "gone.ckpt")}, "there is no checkpoint"),
        ({"target": str(other)}, "id 65 is"),
        ({"target": str(larger)}, "vocab_size"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens: 0"),
        ({"target": str(tmp_path / "nowhere")}, "no such directory"),
    ]
    for change, words in cases:
        options = {"draft": str(run), "target": str(target), "output": str(tmp_path / "out"), **change}
        with pytest.raises(UsageError, match=words):
            export(ExportConfig(**options))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "content", ["{", "{}", "[]", '{"model_type": "llama", "hidden_size": "wide"}', '{"dtype": "foo"}', '{"dtype": [1]}']
)
def test_a_config_that_cannot_be_names_role_and_folder(
    role: str, content: str, target: Path, tmp_path: Path, here: None
) -> None:
    other = Path(shutil.copytree(target, tmp_path / "other"))
    settings = json.loads((other / "config.json").read_text())
    whole = json.dumps({**settings, **json.loads(content)}) if "dtype" in content else content
    (other / "config.json").write_text(whole)
    folders = {"target": str(target), "draft": str(target), role: str(other)}
    with pytest.raises(UsageError, match=rf"^{role} '.*other': .*config") as caught:
        export(ExportConfig(folders["draft"], folders["target"], str(tmp_path / "out")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_generation_settings_of_the_target_that_cannot_be_are_named(target: Path, tmp_path: Path, content: str) -> None:
    other = Path(shutil.copytree(target, tmp_path / "other"))
    (other / "generation_config.json").write_text(content)
    with pytest.raises(UsageError, match=r"target '.*other': its generation_config.json cannot be read"):
        export(ExportConfig(str(target), str(other), str(tmp_path / "out")))


def test_a_record_of_another_shape_is_left_aside(target: Path, tmp_path: Path, here: None) -> None:
    draft = Path(shutil.copytree(target, tmp_path / "draft"))
    wrong = {"step": "x", "metrics": [1], "num_assistant_tokens": "many", "loss_temperature": {}}
    (draft / "draftsmith.json").write_text(json.dumps(wrong))
    output = export(ExportConfig(str(draft), str(target), str(tmp_path / "out")))
    assert json.loads((output / "generation_config.json").read_text())["num_assistant_tokens"] == 3


def test_a_draft_of_nan_weights_is_blamed_itself(run: Path, target: Path, tmp_path: Path) -> None:
    file = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-000700.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"]["student.model.model.norm.weight"][3] = float("nan")
    torch.save(content, file)
    with pytest.raises(DraftsmithError, match=r"^draft: its logits are NaN or infinite"):
        export(ExportConfig(str(file), str(target), str(tmp_path / "out")))


def test_weights_too_large_for_a_type_are_refused_by_it(target: Path, tmp_path: Path) -> None:
    model = tiny_llama(1, vocab_size=VOCAB)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1e5
    draft = save_target(tmp_path / "draft", model)
    with pytest.raises(UsageError, match=r"^dtype: 'float16' is not legal"):
        export(ExportConfig(str(draft), str(target), str(tmp_path / "out"), dtype="float16"))


def test_an_output_below_a_file_is_refused_at_once(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"output: .* cannot be written: .*file is no folder"):
        export(ExportConfig("no/such/draft", str(target), str(tmp_path / "file" / "out")))


def test_a_mistyped_hub_id_is_refused_at_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.models.hub_is_reachable", lambda: False)
    config = ExportConfig(str(run), "no-such-owner/no-such-model", str(tmp_path / "out"))
    started = time.monotonic()
    with pytest.raises(UsageError, match="target 'no-such-owner/no-such-model': its config cannot be loaded"):
        export(config)
    assert time.monotonic() - started < 5
    assert not (tmp_path / "out").exists()
