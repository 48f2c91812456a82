"""Low-rank adapters: what is trained, what a checkpoint holds, and that merging changes nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.config import ModelConfig
from decode.errors import DraftsmithError, UsageError
from decode.models import load_model
from distill.config import LoraConfig, OptimizerConfig
from distill.drafts.adapters import add_adapters, check_adaptable, has_adapters, merge_adapters
from distill.drafts.checkpoint import read_checkpoint
from distill.drafts.load import load_draft
from distill.export.config import ExportConfig
from distill.export.export import export
from distill.teacher.online import OnlineTeacher
from distill.training.module import Distillation
from tests.draft_files import make_draft, save_target
from tests.fit_runs import QUIET, examples_of, feed_of, run, run_fit, write_id_rows
from tests.fixtures import byte_tokenizer, loaded, tiny_gpt2, tiny_llama

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
LORA = LoraConfig(rank=4, alpha=8)
CPU = ModelConfig(device="cpu")


def randomised(model: Any, scale: float = 0.2) -> Any:
    """With large updates in every adapter, so that a wrong merge shows."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale
    return model


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("stabilised", [False, True])
def test_x02_a_merged_draft_is_the_draft_with_its_adapter(family: Any, stabilised: bool) -> None:
    model = family()
    ids = torch.arange(12).unsqueeze(0)
    bare = model(input_ids=ids).logits
    names = set(model.state_dict())
    add_adapters(model, LoraConfig(rank=4, alpha=8, rank_stabilised=stabilised, dropout=0.5))
    with_adapter = randomised(model).eval()(input_ids=ids).logits
    kept = copy.deepcopy(model)
    merge_adapters(model)
    merged = model(input_ids=ids).logits
    assert torch.allclose(merged, with_adapter, atol=1e-9)
    assert not torch.allclose(merged, bare, atol=1e-2)  # the updates do something
    assert set(model.state_dict()) == names and not has_adapters(model)  # X09: the base class's names
    assert torch.equal(kept(input_ids=ids).logits, with_adapter)  # merging a copy leaves training as it is
    merge_adapters(model)  # twice is once
    assert torch.equal(model(input_ids=ids).logits, merged)


def test_x02_a_merge_that_moves_the_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear

    model = tiny_llama()
    add_adapters(model, LORA)
    monkeypatch.setattr(Linear, "merge", lambda self: None)  # a merge that loses the updates
    with pytest.raises(DraftsmithError, match="merging its adapter moved the logits"):
        merge_adapters(randomised(model))


def test_x04_a_tied_head_is_refused_by_name_and_all_linear_leaves_the_head_out() -> None:
    with pytest.raises(UsageError, match=r"lora.targets: 'lm_head' is tied to the embeddings"):
        add_adapters(tiny_llama(tie_word_embeddings=True), LoraConfig(rank=2, targets=["lm_head"]))
    model = tiny_llama()
    add_adapters(model, LORA)
    trained = {
        name.partition(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad
    }
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    add_adapters(untied := tiny_llama(), LoraConfig(rank=2, targets=["lm_head", "q_proj"]))
    assert sum(p.requires_grad for p in untied.parameters()) == 2 * (1 + 2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rank": -1}, "lora.rank"),
        ({"rank": 2, "dropout": 1.0}, "lora.dropout"),
        ({"rank": 2, "alpha": 0}, "lora.alpha"),
        ({"rank": 2, "targets": []}, "lora.targets"),
        ({"alpha": 3.0}, "lora.rank: 0 trains all weights"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LoraConfig(**settings)


def test_targets_that_the_draft_lacks_are_refused_with_those_it_has() -> None:
    with pytest.raises(UsageError, match=r"lora.targets: 'query' is not legal; .*q_proj"):
        add_adapters(tiny_llama(), LoraConfig(rank=2, targets=["query"]))
    with pytest.raises(UsageError, match=r"lora.rank: .* has a reduced vocabulary"):
        check_adaptable(loaded(tiny_llama(), vocab_ids=torch.arange(20)))


def test_t20_only_the_adapter_learns_and_the_teacher_is_the_bare_model() -> None:
    """The teacher is the very model whose copy is adapted: its law and its weights stay, the draft's dropout is on."""
    target = tiny_llama()
    draft = copy.deepcopy(target)
    add_adapters(draft, LoraConfig(rank=2, dropout=0.5))
    randomised(draft)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    bare = target(input_ids=torch.arange(6).unsqueeze(0)).logits
    feed = feed_of(examples_of([5, 6, 7, 8]), max_epochs=2)
    module = Distillation(
        loaded(draft), OnlineTeacher(target), num_steps=feed.num_steps, optimizer=OptimizerConfig(0.1)
    )
    seen: list[bool] = []
    draft.model.layers[0].self_attn.q_proj.lora_dropout["default"].register_forward_hook(
        lambda dropout, inputs, output: seen.append(dropout.training)
    )
    run(module, feed)
    assert True in seen
    moved = {name for name, value in draft.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert torch.equal(target(input_ids=torch.arange(6).unsqueeze(0)).logits, bare)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of its own tied layers, and rows."""
    folder = tmp_path_factory.mktemp("lora")
    model = tiny_llama(layers=4, vocab_size=len(byte_tokenizer()), tie_word_embeddings=True)
    save_target(folder / "target", model)
    make_draft(folder / "target", folder / "draft", hidden_size=None, num_layers=2, start="layers")
    write_id_rows(folder / "rows.jsonl")
    return folder


def test_r07_x09_x11_a_checkpoint_holds_the_adapter_and_becomes_a_plain_draft(pair: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora": LORA, "optimizer": OptimizerConfig(learning_rate=0.05)}
    report = run_fit(pair, tmp_path / "run", max_steps=2, **changes)
    file = tmp_path / "run" / "checkpoints" / "step-000002.ckpt"
    content = read_checkpoint(file)
    assert report.step == 2
    assert content["state_dict"] and all(".lora_" in name for name in content["state_dict"])
    assert file.stat().st_size < (pair / "draft" / "model.safetensors").stat().st_size
    target = load_model(str(pair / "target"), CPU, role="target")
    draft = load_draft(file, target, CPU).model
    base = load_model(str(pair / "draft"), CPU, role="draft").model
    ids = torch.arange(10).unsqueeze(0)
    assert set(draft.state_dict()) == set(base.state_dict())
    assert not torch.allclose(draft(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-4)
    export(ExportConfig(target=str(pair / "target"), draft=str(file), output=str(tmp_path / "out")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(plain(input_ids=ids).logits, draft(input_ids=ids).logits, atol=1e-5)
    assert plain.config.tie_word_embeddings


def test_r13_a_run_goes_on_with_its_own_base_and_no_other(pair: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora": LORA, "optimizer": OptimizerConfig(learning_rate=0.05)}
    whole = run_fit(pair, tmp_path / "whole", **changes)
    run_fit(pair, tmp_path / "run", **{**changes, "trainer": {"max_time": "00:00:00:00", "enable_progress_bar": False}})
    assert run_fit(pair, tmp_path / "run", **changes).step == whole.step
    states = [
        read_checkpoint(tmp_path / name / "checkpoints" / "step-000006.ckpt")["state_dict"] for name in ("whole", "run")
    ]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_base_of_an_adapter_has_to_be_there_and_the_same(pair: Path, tmp_path: Path) -> None:
    make_draft(pair / "target", tmp_path / "base", hidden_size=None, start="layers", layers=[0, 1], num_layers=None)
    run_fit(pair, tmp_path / "run", draft=str(tmp_path / "base"), lora=LORA, max_steps=2)
    file = tmp_path / "run" / "checkpoints" / "step-000002.ckpt"
    target = load_model(str(pair / "target"), CPU, role="target")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other.model.norm.weight.data += 1
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match=r"is not the draft that the adapter .* belongs to"):
        load_draft(file, target, CPU)
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(UsageError, match="is an adapter, and the draft that its run began with is not there"):
        load_draft(file, target, CPU)
