"""Loading and pairing: names, strict weights, vocabularies, reduced heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.config import ModelConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import DraftsmithError, UsageError
from decode.health import check_healthy
from decode.models import load_model, resolve_model_path
from decode.session import check_cache
from decode.vocabulary import check_pair
from tests.fixtures import byte_tokenizer, loaded, tiny_gpt2, tiny_llama

CONFIG = ModelConfig()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny_llama(0, vocab_size=len(tokenizer)).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_directory_loads_in_eval_mode_without_gradients(saved: Path) -> None:
    model = load_model(str(saved), CONFIG, role="target").model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.float32


def test_b03_wrong_paths_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    file = tmp_path / "file.bin"
    file.write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    cases = {
        str(tmp_path / "missing"): "no such",
        str(file): "file",
        str(tmp_path / "empty"): "config.json",
        "": "expected",
    }
    for path, word in cases.items():
        with pytest.raises(UsageError, match=word) as caught:
            load_model(path, CONFIG, role="target")
        assert repr(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr("decode.models.hub_is_reachable", lambda: False)
    with pytest.raises(UsageError, match=r"target 'nobody/nothing': .*no such directory.*hub cannot be reached"):
        load_model("nobody/nothing", CONFIG, role="target")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(saved)
    assert resolve_model_path("org/name") == "org/name"
    assert load_model("org/name", CONFIG, role="target").vocab_size == 259


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_t34_incomplete_weights_are_refused_with_their_names(copy: Path, change: str) -> None:
    weights = load_file(copy / "model.safetensors")
    if change == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    else:
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=rf"{change} keys: model.layers.\d.mlp.up_proj.weight"):
        load_model(str(copy), CONFIG, role="draft")


def test_pickled_weights_are_never_read(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="draft"):
        load_model(str(copy), CONFIG, role="draft")


def test_d35_pairs_that_do_not_fit_are_refused_with_both_values() -> None:
    model = tiny_llama(0, vocab_size=259)
    target = loaded(model, "big", byte_tokenizer())
    check_pair(target, loaded(model, "small", byte_tokenizer()))
    with pytest.raises(UsageError, match=r"vocab_size 48, target 'big' has 259; they must be equal where a tokenizer"):
        SpeculativeDecoder(target, loaded(tiny_llama(0), "small"))
    with pytest.raises(UsageError, match=r"id 5 is '.' in the draft and '.' in the target"):
        check_pair(target, loaded(model, "small", byte_tokenizer(swap=(5, 9))))
    other_eos = byte_tokenizer()
    other_eos.eos_token = "<|endoftext|>"
    with pytest.raises(UsageError, match=r"eos_token_id is \d+, the target's is \d+"):
        check_pair(target, loaded(model, "small", other_eos))


def test_a_reduced_vocabulary_narrows_the_head(copy: Path) -> None:
    full = load_model(str(copy), CONFIG, role="draft")
    (copy / "draft_vocab.json").write_text(json.dumps({"vocab_ids": [2, 5, 258]}))
    narrow = load_model(str(copy), CONFIG, role="draft")
    ids = torch.tensor([[1, 2, 3]])
    assert narrow.vocab_ids is not None and narrow.vocab_ids.tolist() == [2, 5, 258]
    assert narrow.vocab_size == full.vocab_size == 259
    assert torch.equal(narrow.model(ids).logits, full.model(ids).logits[..., [2, 5, 258]])


@pytest.mark.parametrize(
    "content", ["{}", "[", '{"vocab_ids": [3, 2]}', '{"vocab_ids": []}', '{"vocab_ids": [1, 999]}']
)
def test_a_malformed_reduced_vocabulary_is_named(copy: Path, content: str) -> None:
    (copy / "draft_vocab.json").write_text(content)
    with pytest.raises(UsageError, match=r"draft_vocab\.json"):
        load_model(str(copy), CONFIG, role="draft")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "JSON"),
        ("{}", "Unrecognized model"),
        ("[]", "config.json"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "TypeError: Field 'hidden_size' expected int"),
        ('{"model_type": "llama", "dtype": "foo"}', "foo"),
        ('{"model_type": 3}', "config cannot be loaded"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_named_in_one_line(copy: Path, content: str, reason: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"target .*copy': its config cannot be loaded: .") as caught:
        load_model(str(copy), CONFIG, role="target")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"tokenizer_class": 3}'])
def test_a_tokenizer_that_cannot_be_is_named(copy: Path, content: str) -> None:
    (copy / "tokenizer_config.json").write_text(content)
    (copy / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"draft .*copy': its tokenizer cannot be loaded: .") as caught:
        load_model(str(copy), CONFIG, role="draft")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", ["x", 1.5, [1, "x"], {"a": 1}])
def test_an_end_of_text_that_is_no_id_is_named(eos: Any) -> None:
    model = tiny_llama(0)
    model.generation_config.eos_token_id = eos
    with pytest.raises(UsageError, match=r"model 'tiny': its eos_token_id is .* expected an id or a list of ids"):
        _ = loaded(model, "tiny").eos_token_ids


def test_weights_that_define_no_law_are_seen_by_a_forward() -> None:
    model = tiny_llama(0)
    check_healthy(loaded(model), "target")
    with torch.no_grad():
        model.lm_head.weight[5, 0] = float("nan")
    with pytest.raises(DraftsmithError, match="draft: its logits are NaN or infinite; its weights or dtype"):
        check_healthy(loaded(model), "draft")


def test_an_unknown_device_is_named(saved: Path) -> None:
    for device in ("nonsense", "cuda:7"):
        with pytest.raises(UsageError, match=f"^model.device: '{device}'"):
            load_model(str(saved), ModelConfig(device=device), role="target")


def test_caches_that_cannot_be_rewound_are_refused_by_layer_class() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model: Any = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    check_cache(tiny_gpt2(0), "fine", rewinds=True)
    with pytest.raises(UsageError, match=r"Layer.* cannot be rewound"):
        check_cache(model, "mamba", rewinds=True)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(num_layers=1, d_model=8, d_ff=8, num_heads=1, d_kv=8, vocab_size=259).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="t5 is an encoder-decoder"):
        load_model(str(tmp_path), CONFIG, role="target")
