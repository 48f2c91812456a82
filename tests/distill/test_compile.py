"""Checkpointed and compiled layers: the same run, with less memory or in less time."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from decode.errors import UsageError
from distill.config import LoraConfig
from distill.drafts.adapters import add_adapters
from distill.runs import plain
from distill.teacher.online import OnlineTeacher
from distill.training import prepare
from distill.training.module import Distillation
from distill.training.prepare import checkpoint_layers, compile_layers, decoder_layers
from distill.training.resume import Record, Standing, refuse_changes
from tests.distill.training import Probe
from tests.fit_runs import QUIET, distance, examples_of, feed_of, fit_config, run, weights_of
from tests.fixtures import FAMILIES, loaded, tiny_llama

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]


def trained(draft: Any, packing: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of 20 steps over documents of 5 to 40 tokens, and the weights after them."""
    draw = random.Random(1)
    lengths = [draw.randint(3, 37) for _ in range(40)]
    feed = feed_of(examples_of(lengths), batch_size=2, every=5, packing=packing, max_length=48, max_steps=20)
    probe = Probe()
    run(Distillation(loaded(draft), OnlineTeacher(tiny_llama(seed=2)), num_steps=20), feed, [probe])
    assert len(probe.losses) == 20
    return probe.losses, weights_of(draft)


@pytest.mark.parametrize("family", FAMILIES)
def test_t21_checkpointed_layers_train_alike_with_dropout_and_packing(family: str) -> None:
    plain, leaner = FAMILIES[family](seed=1), FAMILIES[family](seed=1)
    checkpoint_layers(leaner)
    calls = count_calls(leaner)
    (losses, weights), (others, their_weights) = trained(plain, packing=True), trained(leaner, packing=True)
    assert losses == others
    assert distance(weights, their_weights) == 0
    assert calls["training"] == 2 * 20  # each layer ran again in each backward pass


def count_calls(model: Any) -> dict[str, int]:
    """How often the first layer begins, by mode: the second time it stops when it has all it needs."""
    calls = {"training": 0, "eval": 0}

    def note(module: Any, *_: Any) -> None:
        calls["training" if module.training else "eval"] += 1

    next(decoder_layers(model)[0].children()).register_forward_pre_hook(note)
    return calls


@pytest.mark.parametrize("adapters_first", [True, False])
def test_t21_behind_frozen_embeddings_every_adapter_gets_a_gradient(adapters_first: bool) -> None:
    found = []
    for checkpointed in (True, False):
        draft = tiny_llama(seed=1)
        torch.manual_seed(3)
        steps = [lambda d: add_adapters(d, LoraConfig(rank=2)), checkpoint_layers if checkpointed else lambda d: None]
        for step in steps if adapters_first else reversed(steps):
            step(draft.train())
        draft.get_decoder()(input_ids=torch.arange(12).view(2, 6), use_cache=False)[0].square().sum().backward()
        grads = {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}
        assert len(grads) == 2 * 2 * 7
        assert all(grad is not None and grad.abs().max() > 0 for name, grad in grads.items() if "lora_B" in name)
        found.append(grads)
    assert distance(*found) < 1e-12


def test_r13_a_run_continues_with_either_changed_and_tells(tmp_path: Path) -> None:
    config = fit_config(tmp_path)
    standing = Standing(Path("step-000002.ckpt"), 2, Record(plain(config), 6, "sha"), [])
    told: list[str] = []
    refuse_changes(standing, replace(config, compile=True, gradient_checkpointing=True), told.append)
    assert told == [f"{key}: continues with True, was False" for key in ("compile", "gradient_checkpointing")]


def test_a_model_that_cannot_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_llama()
    monkeypatch.setattr(type(draft), "supports_gradient_checkpointing", False)
    with pytest.raises(UsageError, match=r"^gradient_checkpointing: True is not legal .*LlamaForCausalLM"):
        checkpoint_layers(draft)


def test_t35_without_a_compiler_it_is_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin several lines")

    monkeypatch.setattr(torch, "compile", missing)
    draft = tiny_llama()
    told: list[str] = []
    compile_layers(draft, told.append)
    assert told == ["compile: goes on without, for here it fails: RuntimeError: No working C++ compiler found"]
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(draft))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_t35_x09_compiled_layers_train_alike_with_few_compilations(packing: bool, checkpointed: bool) -> None:
    plain, compiled = tiny_llama(seed=1, layers=3), tiny_llama(seed=1, layers=3)
    names = set(compiled.state_dict())
    if checkpointed:
        checkpoint_layers(compiled)
    assert prepare.why_not(torch.device("cpu")) is None
    torch._dynamo.reset()
    counters.clear()
    told: list[str] = []
    compile_layers(compiled, told.append)
    (losses, weights), (others, their_weights) = trained(plain, packing), trained(compiled, packing)
    assert not told
    assert others == pytest.approx(losses, abs=1e-4)
    assert distance(weights, their_weights) < 1e-4
    assert set(compiled.state_dict()) == names
    # for training and validation, rows with borders and without: whatever the lengths, and not for each layer
    assert 1 <= counters["stats"]["unique_graphs"] <= 8
    assert not counters["recompile_limit"]
