"""Teachers: online and cached give each example the target's law, whatever the batch, and are never trained."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from decode.errors import UsageError
from distill.data.batches import collate
from distill.heads import head_stands_apart, supervised_logits
from distill.laws import Columns, HeadLaw, align
from distill.losses import forward_kl
from distill.teacher import scoring
from distill.teacher.online import OnlineTeacher
from distill.weights import weights_sha256
from tests.distill.teacher_samples import PACKS, K, alone, batches, cached, make_examples
from tests.fixtures import FAMILIES, tiny_gpt2, tiny_llama


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", PACKS)
def test_t26_online_law_of_an_example_does_not_depend_on_its_batch(family: str, layout: str) -> None:
    model, examples = FAMILIES[family](), make_examples()
    teacher = OnlineTeacher(model)
    for batch in batches(examples, layout):
        law = teacher.law(batch)
        owners = batch.example_ids[batch.supervised]
        for index in owners.unique().tolist():
            assert torch.allclose(law.log_probs[owners == index], alone(model, examples[index]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", PACKS)
@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_t26_cached_law_belongs_to_its_example(
    layout: str, batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SHARD_POSITIONS", 40)  # several shards
    model, examples = tiny_llama(), make_examples()
    teacher = cached(model, examples, tmp_path, batch_size=batch_size)
    again = cached(model, examples, tmp_path, batch_size=7)  # a second call finds all of it
    assert teacher.num_positions == sum(e.num_supervised for e in examples)
    for batch in batches(examples, layout):
        law = teacher.law(batch)
        assert all(torch.equal(a, b) for a, b in zip(vars(law).values(), vars(again.law(batch)).values(), strict=True))
        owners = batch.example_ids[batch.supervised]
        for index in owners.unique().tolist():
            values, ids = alone(model, examples[index]).topk(K)
            mine = owners == index
            assert torch.equal(law.ids[mine], ids)
            assert torch.allclose(law.log_probs[mine].double(), values, rtol=0, atol=1e-6)
            rest = (1 - values.exp().sum(-1)).log()
            assert torch.allclose(law.log_tail[mine].double(), rest, rtol=0, atol=1e-5)


def test_temperature_is_applied_to_logits_before_both_softmaxes(tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples(4)
    batch = collate([[0, 1, 2, 3]], examples, normaliser=1)
    online = OnlineTeacher(model, temperature=2.0).law(batch)
    plain = OnlineTeacher(model).law(batch)
    assert torch.allclose(online.log_probs, (plain.log_probs / 2).log_softmax(-1), atol=1e-12)
    kept = cached(model, examples, tmp_path, temperature=2.0).law(batch)
    assert torch.allclose(kept.log_probs.double(), online.log_probs.gather(-1, kept.ids), atol=1e-6)


def test_t19_teacher_stays_frozen_in_eval_mode_and_t22_its_law_can_be_trained_on() -> None:
    model = tiny_gpt2()
    model.config.resid_pdrop = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    before = weights_sha256(model)
    teacher, batch = OnlineTeacher(model), collate([[0, 1], [2]], make_examples(3), normaliser=1)
    first = teacher.law(batch)
    assert not any(p.requires_grad for p in model.parameters())
    draft = torch.zeros_like(first.log_probs, requires_grad=True)
    (forward_kl(*align(first, draft, Columns(48))).sum() + (first.log_probs * draft).sum()).backward()
    assert draft.grad is not None and draft.grad.isfinite().all()
    assert torch.equal(first.log_probs, teacher.law(batch).log_probs)  # no dropout
    assert weights_sha256(model) == before
    assert isinstance(first, HeadLaw) and not isinstance(teacher, torch.nn.Module)


def test_only_supervised_positions_pass_the_head_and_odd_heads_run_whole() -> None:
    batch = collate([[5, 6], [7]], make_examples(8), normaliser=1)
    model = tiny_llama()
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
    assert head_stands_apart(model)
    seen.clear()
    logits = supervised_logits(model, batch, apart=True)
    assert seen == [int(batch.supervised.sum())]
    assert torch.allclose(logits, supervised_logits(model, batch, apart=False), atol=1e-10)

    capped = tiny_llama()
    plain_forward = capped.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain_forward(*args, **kwargs)
        out.logits = torch.tanh(out.logits / 30) * 30
        return out

    capped.forward = forward
    assert not head_stands_apart(capped)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a15_interrupted_scoring_continues_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SHARD_POSITIONS", 40)
    model, examples = tiny_llama(), make_examples()
    cached(model, examples, tmp_path / "whole")
    write, written = scoring.Store.write, []

    def dies(self: Any, name: str, tensors: dict[str, Tensor]) -> None:
        if len(written) == 2:  # of 5 shards: 40 %
            self.path(name).with_suffix(".tmp").write_bytes(b"half a sha")  # as SIGKILL leaves it
            raise KeyboardInterrupt
        written.append(name)
        write(self, name, tensors)

    monkeypatch.setattr(scoring.Store, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        cached(model, examples, tmp_path / "cut")
    monkeypatch.setattr(scoring.Store, "write", write)
    calls: list[int] = []
    monkeypatch.setattr(scoring, "score", counted(scoring.score, calls))
    cached(model, examples, tmp_path / "cut")
    assert len(calls) == len(scoring.plan_shards(examples, 40)) - 2 == 3  # nothing twice, nothing left out
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def counted(function: Any, calls: list[int]) -> Any:
    def wrapper(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return wrapper


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "unlisted"])
def test_a15_damaged_shard_is_named_and_made_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SHARD_POSITIONS", 40)
    model, examples = tiny_llama(), make_examples()
    cached(model, examples, tmp_path)
    before = files(tmp_path)
    shard = sorted(tmp_path.rglob("*.safetensors"))[1]
    data = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(data[:-7])
    elif damage == "flipped":
        shard.write_bytes(data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    elif damage == "gone":
        shard.unlink()
    else:  # killed between the shard and the index
        index = json.loads((shard.parent / "index.json").read_text())
        del index["shards"][shard.stem]
        (shard.parent / "index.json").write_text(json.dumps(index))
    said = io.StringIO()
    cached(model, examples, tmp_path, console=Console(file=said, width=400))
    assert files(tmp_path) == before
    assert (f"{shard} is damaged" in said.getvalue()) == (damage != "unlisted")


def test_a_cache_for_a_reduced_draft_holds_the_tail_of_its_ids(tmp_path: Path) -> None:
    model, examples, ids = tiny_llama(), make_examples(), torch.arange(0, 48, 3)
    batch = batches(examples, "packed")[1]
    full, columns = OnlineTeacher(model).law(batch), Columns(48, ids)
    law = cached(model, examples, tmp_path, vocab_ids=ids).law(batch)
    mass = full.log_probs.exp().scatter(-1, full.log_probs.topk(K).indices, 0.0)[:, ids].sum(-1)
    assert torch.allclose(law.log_tail.double().exp(), mass, rtol=0, atol=1e-6)
    perfect = full.log_probs[:, ids]
    assert forward_kl(*align(law, perfect, columns)).abs().max() < 1e-6  # caches are fp32


def test_top_k_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"teacher.top_k: 49 .* 48"):
        cached(tiny_llama(), make_examples(2), tmp_path, top_k=49)


def test_all_ids_kept_equals_the_online_teacher(tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples()
    batch = batches(examples, "packed")[1]
    draft = supervised_logits(tiny_llama(seed=3), batch, apart=True)
    full = forward_kl(*align(OnlineTeacher(model).law(batch), draft, Columns(48)))
    kept = forward_kl(*align(cached(model, examples, tmp_path, top_k=48).law(batch), draft, Columns(48)))
    assert torch.allclose(kept, full, atol=1e-6)
