"""Where weights lie and how they are kept: devices of each role, spread and offloaded targets, quantised weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.models import choose_device, load_model
from decode.storage import storage_options
from tests.fixtures import byte_tokenizer, greedy_reference, loaded, random_prompt, tiny_llama, with_noise

CPU = torch.device("cpu")
PROMPT = random_prompt(7)
GREEDY = DecodeConfig(12, 4, draft_length="fixed", sampling=SamplingConfig(), eos_token_ids=[])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny_llama(0, vocab_size=len(tokenizer), layers=6).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_each_role_has_its_own_device() -> None:
    config = ModelConfig(device="cpu", draft_device="meta")
    assert (choose_device(config).type, choose_device(config, "draft").type) == ("cpu", "meta")
    assert choose_device(ModelConfig(device="meta"), "draft").type == "meta"
    with pytest.raises(UsageError, match=r"^model\.draft_device: 'nonsense' cannot be used here: "):
        choose_device(ModelConfig(draft_device="nonsense"), "draft")


def test_only_the_target_is_spread() -> None:
    config = ModelConfig(device_map="auto", max_memory={"cpu": "1GB"})
    assert storage_options(config, "target", CPU) == {"device_map": "auto", "max_memory": {"cpu": "1GB"}}
    assert storage_options(config, "draft", CPU) == {}
    assert storage_options(ModelConfig(), "target", CPU) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "model.device: 'cpu' is not legal beside device_map; expected auto"),
        ({"max_memory": {"9": "1GB"}}, "model.max_memory: '9' is no device here; expected cpu"),
        ({"max_memory": {"cpu": "lots"}}, "target .*: it cannot be loaded: .*lots"),
    ],
)
def test_a_map_that_cannot_be_is_named(saved: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_model(str(saved), ModelConfig(device_map="auto", **settings), role="target")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("memory", ["1GB", "100KB"])
def test_a_target_whose_weights_do_not_fit_decodes_the_same(saved: Path, memory: str) -> None:
    """With room for 100 KB all layers but the first stay in the file and are brought in by each forward."""
    config = ModelConfig(device_map="auto", max_memory={"cpu": memory}, backend="eager")
    target = load_model(str(saved), config, role="target")
    whole = load_model(str(saved), ModelConfig(backend="eager"), role="target")
    moved_out = [name for name, weight in target.model.named_parameters() if weight.device.type == "meta"]
    assert bool(moved_out) == (memory == "100KB")
    assert target.device == CPU
    draft = loaded(with_noise(whole.model, 0.1), "draft", whole.tokenizer)
    answer = SpeculativeDecoder(target, draft).generate([PROMPT], GREEDY)[0]
    assert answer.ids == greedy_reference(whole.model, PROMPT, 12)
    assert answer.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("settings", "role", "message"),
    [
        ({"quantization": "int8"}, "target", r"^model\.quantization: int8 needs the package torchao, .* 'draftsmith\["),
        ({"draft_quantization": "bnb-4bit"}, "draft", r"^model\.draft_quantization: bnb-4bit needs .* bitsandbytes, "),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(
    saved: Path, settings: dict[str, Any], role: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.storage.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=message):
        load_model(str(saved), ModelConfig(**settings), role=role)
    other = "draft" if role == "target" else "target"
    assert storage_options(ModelConfig(**settings), other, CPU) == {}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_int8_weights_decode_exactly_as_their_own_law_says(saved: Path, role: str) -> None:
    pytest.importorskip("torchao")
    key = "quantization" if role == "target" else "draft_quantization"
    config = ModelConfig(backend="eager", **{key: "int8"})  # type: ignore[arg-type]
    target, draft = (load_model(str(saved), config, role=each) for each in ("target", "draft"))
    quantised = target if role == "target" else draft
    assert "Int8" in type(quantised.model.model.layers[0].mlp.up_proj.weight).__name__
    answer = SpeculativeDecoder(target, draft).generate([PROMPT], GREEDY)[0]
    assert answer.ids == greedy_reference(target.model, PROMPT, 12)
    assert answer.stats.draft_acceptance_rate > 0
