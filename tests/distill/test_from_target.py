"""Drafts cut out of the target: layers counted anew, tables as they are, matrices seen through fewer channels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from decode.config import ModelConfig
from decode.errors import UsageError
from decode.models import load_model
from distill.config import InitConfig
from distill.drafts.from_target import chosen_layers, pruned
from tests.draft_files import make_draft, save_target
from tests.fixtures import byte_tokenizer, strengthen, tiny_gpt2, tiny_llama

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def mixed_layers(family: str) -> Any:
    """Six layers, some of a sliding window, told by a list of layer types."""
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    if family == "gemma3":
        config: Any = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=types)
        return strengthen(Gemma3ForCausalLM(config), 0, 0.4)
    config = Qwen2Config(**SIZES, sliding_window=8, use_sliding_window=True, max_window_layers=4, layer_types=types)
    return strengthen(Qwen2ForCausalLM(config), 0, 0.4)


MODELS = {
    "llama": lambda: tiny_llama(layers=4),
    "tied llama": lambda: tiny_llama(layers=4, tie_word_embeddings=True),
    "gpt2": tiny_gpt2,
    "qwen2": lambda: mixed_layers("qwen2"),
    "gemma3": lambda: mixed_layers("gemma3"),
}


@pytest.mark.parametrize("family", MODELS)
def test_t33_layers_are_counted_anew_for_caches_and_files(family: str, tmp_path: Path) -> None:
    model = MODELS[family]().double().eval()
    count = model.config.num_hidden_layers
    draft = pruned(model, [0, count - 1])
    assert draft.config.num_hidden_layers == 2
    ids = torch.randint(0, 48, (1, 24), generator=torch.Generator().manual_seed(0))
    whole = draft(input_ids=ids, use_cache=False).logits
    first = draft(input_ids=ids[:, :20], use_cache=True)
    rest = draft(input_ids=ids[:, 20:], cache=first.past_key_values, use_cache=True)
    assert torch.allclose(whole[:, 20:], rest.logits, atol=1e-9)
    draft.save_pretrained(tmp_path / "d")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "d", dtype=torch.float64)
    # Gemma's scale of embeddings is a buffer that double() rounds and loading computes anew
    assert torch.allclose(again(input_ids=ids, use_cache=False).logits, whole, rtol=1e-5, atol=1e-6)
    types = getattr(again.config, "layer_types", None)
    assert types is None or types == [model.config.layer_types[i] for i in (0, count - 1)]


def test_all_layers_are_the_target_itself_and_the_target_is_left_alone() -> None:
    model = tiny_llama(layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draft = pruned(model, [0, 1, 2])
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(draft(input_ids=ids).logits, model(input_ids=ids).logits)
    draft.lm_head.weight.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_are_evenly_spaced_or_as_asked_for() -> None:
    assert chosen_layers(None, 4, 30) == [0, 10, 19, 29]
    assert chosen_layers(None, 1, 30) == [0]
    assert chosen_layers([2, 5], None, 6) == [2, 5]


@pytest.mark.parametrize("layers", [[], [3, 1], [1, 1], [-1, 0], [0, 6]])
def test_layers_that_the_target_lacks_are_refused_by_number(layers: list[int]) -> None:
    with pytest.raises(UsageError, match=r"layers: .*expected ascending numbers from 0 to 5"):
        chosen_layers(layers, None, 6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"start": "layers", "hidden_size": 64}, "hidden_size"),
        ({"start": "layers", "draft_vocab_size": 20, "data": ["rows.jsonl"]}, "draft_vocab_size"),
        ({"layers": [0, 1]}, "layers"),
        ({"start": "layers", "layers": [0], "num_layers": 1}, "layers"),
        ({"tie": True, "draft_vocab_size": 20, "data": ["rows.jsonl"]}, "tie"),
        ({"data": "rows.jsonl", "draft_vocab_size": 20}, "data"),
    ],
)
def test_what_a_start_cannot_honour_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=rf"^{named}:"):
        InitConfig("target", "out", **options)


@pytest.mark.parametrize("tie", [None, True, False])
def test_init_writes_a_draft_of_whole_layers_tied_as_asked(tie: bool | None, tmp_path: Path) -> None:
    model = tiny_llama(layers=4, vocab_size=len(byte_tokenizer()), tie_word_embeddings=True)
    target = save_target(tmp_path / "t", model)
    folder = make_draft(
        target, tmp_path / "d", hidden_size=None, num_layers=None, start="layers", layers=[0, 3], tie=tie
    )
    draft = load_model(str(folder), ModelConfig(device="cpu"), role="draft").model
    assert draft.config.tie_word_embeddings is (tie is not False)
    shared = draft.lm_head.weight.data_ptr() == draft.model.embed_tokens.weight.data_ptr()
    assert shared is (tie is not False)
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(draft(input_ids=ids).logits, pruned(model.float(), [0, 3])(input_ids=ids).logits)
    assert json.loads((folder / "draftsmith.json").read_text())["settings"]["layers"] == [0, 3]


def test_a_tied_draft_from_scratch_has_one_table(tmp_path: Path) -> None:
    target = save_target(tmp_path / "t")
    folder = make_draft(target, tmp_path / "d", tie=True)
    draft = load_model(str(folder), ModelConfig(device="cpu"), role="draft").model
    assert draft.lm_head.weight.data_ptr() == draft.model.embed_tokens.weight.data_ptr()


def test_a_draft_of_full_width_and_all_layers_reads_and_writes_as_the_target_does(tmp_path: Path) -> None:
    """As wide as the target, the projection is a change of basis: each layer's products are the target's own."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2}
    sizes = {**SIZES, **heads, "vocab_size": len(byte_tokenizer()), "intermediate_size": 96}
    model = strengthen(LlamaForCausalLM(LlamaConfig(**sizes)), 0, 0.4).float()
    target, width = save_target(tmp_path / "t", model), model.config.hidden_size
    folder = make_draft(target, tmp_path / "d", hidden_size=width, num_layers=2, start="width")
    ours = load_model(str(folder), ModelConfig(device="cpu"), role="draft").model.model.layers[1]
    theirs = model.model.layers[1]
    # reading through the inverse of the map and writing through the map cancel out
    path = ours.self_attn.v_proj.weight @ ours.mlp.down_proj.weight
    seen = (theirs.input_layernorm.weight * theirs.self_attn.v_proj.weight)[: len(path)]
    wanted = seen @ theirs.mlp.down_proj.weight
    assert path.shape == wanted.shape
    assert torch.allclose(path, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def test_width_needs_heads_of_the_targets_size(tmp_path: Path) -> None:
    target = save_target(tmp_path / "t", tiny_gpt2(vocab_size=len(byte_tokenizer())))
    with pytest.raises(UsageError, match="start: width needs a target of Llama's layout"):
        make_draft(target, tmp_path / "d", start="width")
