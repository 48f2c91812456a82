"""The prepacked backend gives the model's own logits and leaves the model as it was."""

import pytest
import torch

from decode.backends import with_backend
from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.prepacked import PackedLinear, prepack
from tests.fixtures import FAMILIES, greedy_reference, loaded, random_prompt, tiny_llama, with_noise


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
    ids = torch.tensor([random_prompt(12)])
    # One kernel sums in another order than the other: fp32 rounding of logits of size ~30.
    assert torch.allclose(twin(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)


def test_decoding_prepacked_equals_the_reference() -> None:
    target = tiny_llama(0).float()
    draft = with_noise(target, 0.1)
    pair = [with_backend(loaded(m), "prepacked") for m in (target, draft)]
    answer = SpeculativeDecoder(*pair).generate(random_prompt(9), DecodeConfig(max_new_tokens=40))[0]
    assert answer.ids == greedy_reference(target, random_prompt(9), 40)


def test_backends_are_chosen_or_refused_by_name() -> None:
    small = loaded(tiny_llama(0).float())
    assert with_backend(small, "eager") is small
    assert with_backend(small, "auto").backend in ("eager", "prepacked")
    double = loaded(tiny_llama(0))
    assert with_backend(double, "auto") is double
    with pytest.raises(UsageError, match="prepacked"):
        with_backend(double, "prepacked")
