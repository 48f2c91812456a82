"""Every backend gives the model's own logits, leaves the model as it was, or says why it cannot serve it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode.backends import BACKENDS, with_backend
from decode.backends.base import CannotServe
from decode.backends.eager import TransformersForward
from decode.backends.lean import LeanForward
from decode.backends.prepacked import PackedLinear, prepack
from decode.models import narrow_head
from tests.decode.backend_checks import LEAN, Feeder, check_rows, check_text, own_logits, rope, tiny_qwen3
from tests.fixtures import FAMILIES, loaded, random_prompt, tiny_gpt2, tiny_llama


@pytest.mark.parametrize("family", LEAN)
def test_lean_logits_equal_the_models_own(family: str) -> None:
    model = LEAN[family]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward = LeanForward(model)
    check_text(forward, model, atol=1e-9)
    check_rows(forward, model, atol=1e-9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama biases", "qwen2 mixed windows", "qwen3"])
def test_lean_runs_prepacked_in_single_precision(family: str) -> None:
    model = LEAN[family]().float()
    forward = LeanForward(model)
    # fp32 rounding of logits of size ~30, through two layers
    check_text(forward, model, atol=2e-3)
    check_rows(forward, model, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lean_serves_half_precision(dtype: torch.dtype) -> None:
    model = tiny_llama(std=0.2).to(dtype)
    got = Feeder(LeanForward(model), 1).feed([0], [random_prompt(12)])[0]
    want = own_logits(model, random_prompt(12))
    assert (got - want).float().norm() < 0.05 * want.float().norm()


@pytest.mark.parametrize("bias", [False, True])
def test_lean_takes_a_narrowed_head(bias: bool) -> None:
    model = tiny_llama()
    if bias:
        head = torch.nn.Linear(32, 48, dtype=torch.float64)
        model.set_output_embeddings(head.requires_grad_(False))
    narrow_head(model, torch.tensor([1, 5, 7, 40]))
    assert Feeder(LeanForward(model), 1).feed([0], [[3, 4]])[0].shape == (2, 4)
    check_text(LeanForward(model), model, atol=1e-9)


def test_lean_angles_reach_as_far_as_the_text() -> None:
    model, text = tiny_llama(), random_prompt(200)
    forward = LeanForward(model)
    for length in (16, 200):
        got = Feeder(forward, 1, length).feed([0], [text[:length]])[0]
        torch.testing.assert_close(got, own_logits(model, text[:length]), atol=1e-9, rtol=0)


def spread(model: Any) -> Any:
    model.model.layers[1].to("meta")
    return model


def quantized(model: Any) -> Any:
    class Int8Linear(torch.nn.Linear):
        pass

    model.model.layers[0].mlp.down_proj = Int8Linear(48, 32, bias=False)
    return model.float()


def hooked(model: Any) -> Any:
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return model


def altered(model: Any) -> Any:
    """Its code does what its config does not say."""
    layer = model.model.layers[0]
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: -own(x)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_gpt2(), "it is a gpt2; expected llama, mistral, qwen2, qwen3"),
        (lambda: tiny_llama(hidden_act="gelu"), "its activation is gelu; expected silu"),
        (lambda: tiny_llama(**rope("dynamic")), "rotations depend on the text's length"),
        (lambda: spread(tiny_llama()), "its weights are spread over cpu, meta"),
        (lambda: quantized(tiny_llama()), r"'model.layers.0.mlp.down_proj' is a Int8Linear"),
        (lambda: hooked(tiny_llama()), r"its module 'model.layers.1' has hooks"),
        (lambda: altered(tiny_llama()), r"its logits come out otherwise, by \d+"),
    ],
)
def test_lean_says_what_it_cannot_serve(model: Callable[[], Any], reason: str) -> None:
    with pytest.raises(CannotServe, match=reason):
        LeanForward(model())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_prepacked_logits_equal_the_models_own(family: str, tied: bool) -> None:
    model = FAMILIES[family](0).float()
    if tied:
        model.set_output_embeddings(torch.nn.Linear(32, 48, bias=False))
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    before = {name: id(module) for name, module in model.named_modules()}
    twin = prepack(model)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert any(isinstance(m, PackedLinear) for m in twin.modules())
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    assert twin.get_input_embeddings().weight is model.get_input_embeddings().weight
    for length in (12, 1):
        ids = random_prompt(length)
        # One kernel sums in another order than the other: fp32 rounding of logits of size ~30.
        torch.testing.assert_close(own_logits(twin, ids), own_logits(model, ids), atol=1e-4, rtol=1e-5)


def test_auto_measures_and_says_what_it_picked(caplog: pytest.LogCaptureFixture) -> None:
    small = loaded(tiny_llama(0).float())
    with caplog.at_level(logging.INFO, logger="decode.backends"):
        chosen = with_backend(small)
    assert chosen.backend in ("eager", "prepacked", "lean")
    assert (chosen.forward is not None) == (chosen.backend == "lean")
    said = caplog.messages[-1]
    assert f"backend of model 'tiny': {chosen.backend}, the fastest" in said
    assert all(f"{name} " in said and " ms" in said for name in ("eager", "prepacked", "lean"))


def test_auto_says_why_others_are_out(caplog: pytest.LogCaptureFixture) -> None:
    double = loaded(tiny_gpt2())
    with caplog.at_level(logging.INFO, logger="decode.backends"):
        assert with_backend(double) is double
    assert "eager, the only one (prepacked out: it needs float32" in caplog.text
    assert "lean out: it is a gpt2" in caplog.text


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("prepacked", tiny_llama, "needs float32 weights on the CPU"),
        ("lean", tiny_gpt2, "it is a gpt2"),
        ("cuda_graph", tiny_llama, "it lies on cpu; expected a CUDA device"),
    ],
)
def test_a_backend_that_cannot_serve_falls_back_loudly(
    name: str, model: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = loaded(model())
    assert with_backend(small, name) is small
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"backend {name} cannot serve model 'tiny', which runs eager instead" in caplog.text
    assert reason in caplog.text


def test_backends_name_what_runs_and_leave_the_original() -> None:
    small = loaded(tiny_llama().float())
    for name in ("eager", "prepacked", "lean"):
        assert with_backend(small, name).backend == name
    assert with_backend(small, "eager") is small
    assert small.backend == "eager"
    assert small.forward is None
    assert with_backend(with_backend(small, "lean"), "eager").forward is None
    assert set(BACKENDS) == {"eager", "prepacked", "lean", "compiled", "cuda_graph"}


def test_the_models_own_forward_passes_the_same_checks() -> None:
    model = tiny_qwen3()
    check_text(TransformersForward(model), model, atol=1e-9)
    check_rows(TransformersForward(model), model, atol=1e-9)
