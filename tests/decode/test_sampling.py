"""Filters in transformers' order, greedy as a limit of temperature, health of logits."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.config import SamplingConfig
from decode.errors import UsageError
from decode.sampling import argmax, is_healthy, probabilities

LAW = torch.tensor([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("temperature, top_p, kept", [(2.0, 0.65, 3), (0.5, 0.75, 2)])
def test_d23_temperature_comes_before_the_nucleus(temperature: float, top_p: float, kept: int) -> None:
    law = probabilities(LAW.log(), SamplingConfig(temperature=temperature, top_p=top_p))
    assert int((law > 0).sum()) == kept


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=0.7),
        SamplingConfig(temperature=1.3, top_k=7),
        SamplingConfig(temperature=1.0, top_p=0.6),
        SamplingConfig(temperature=1.0, min_p=0.2),
        SamplingConfig(temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
        SamplingConfig(temperature=1.0, top_k=10_000),
    ],
)
def test_d23_d15_every_filter_equals_transformers(config: SamplingConfig) -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(config.temperature)])
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(config.min_p))
    expected = warpers(torch.zeros(16, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    assert torch.allclose(probabilities(logits, config), expected, atol=1e-12)


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_a_nucleus_of_many_tokens_equals_transformers(spread: float, top_p: float) -> None:
    """Flat laws reach far beyond the candidates that are sorted first."""
    logits = torch.randn(3, 6000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * spread
    expected = TopPLogitsWarper(top_p)(torch.zeros(3, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    assert torch.allclose(probabilities(logits, SamplingConfig(temperature=1.0, top_p=top_p)), expected, atol=1e-12)


def test_equals_at_the_border_of_a_nucleus_are_kept_by_rising_id() -> None:
    law = probabilities(torch.zeros(1, 2000), SamplingConfig(temperature=1.0, top_p=0.25))
    assert torch.equal((law > 0).nonzero()[:, 1], torch.arange(int((law > 0).sum())))
    assert abs(int((law > 0).sum()) - 500) <= 1


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-30, 1e-8, 1e-6, 1e-3])
def test_d22_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * 30
    law = probabilities(logits, SamplingConfig(temperature=temperature))
    assert torch.equal(law.argmax(-1), logits.argmax(-1))
    assert law.amax(-1).min() > 0.999


def test_ties_go_to_the_lowest_id() -> None:
    assert argmax(torch.tensor([[1.0, 3.0, 3.0, 3.0]])).item() == 1


def test_half_precision_logits_become_fp32_laws() -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(2)).bfloat16()
    law = probabilities(logits, SamplingConfig(temperature=1.0))
    assert law.dtype == torch.float32
    assert torch.allclose(law.sum(-1), torch.ones(2), atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_d55_bad_logits_are_seen(bad: float) -> None:
    logits = torch.zeros(3, 5)
    assert is_healthy(logits)
    logits[1, 2] = bad
    assert not is_healthy(logits)
    masked = torch.zeros(2, 5)
    masked[0, 1] = float("-inf")
    assert is_healthy(masked)


@pytest.mark.parametrize(
    "key, value", [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("min_p", 1.5)]
)
def test_d57_values_out_of_range_are_named(key: str, value: float) -> None:
    with pytest.raises(UsageError, match=key):
        SamplingConfig(**{key: value})  # type: ignore[arg-type]
