"""Laws against transformers' own filters, in every form that a law has; health of logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decode.config import SamplingConfig
from decode.draws import draw_from, draw_uniform
from decode.errors import UsageError
from decode.sampling import SHORTLIST, is_healthy, law_of

PROBS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
PLAIN = SamplingConfig(temperature=1.0)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_k_of_one": {"top_k": 1},
    "top_k_of_all": {"top_k": 100_000},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.5},
    "top_k_top_p": {"top_k": 20, "top_p": 0.8},
    "top_p_min_p": {"top_p": 0.9, "min_p": 0.05},
    "top_p_typical": {"top_p": 0.9, "typical_p": 0.6},
    "min_p_typical": {"min_p": 0.02, "typical_p": 0.7},
    "all": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.03, "typical_p": 0.8},
}


def sampled(options: dict[str, Any]) -> SamplingConfig:
    return SamplingConfig(**({"temperature": 1.0} | options))


def random_logits(rows: int, size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def transformers_law(logits: Tensor, config: SamplingConfig) -> Tensor:
    """[R, V] what transformers' generate would draw from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(config.temperature)])
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(config.min_p))
    if config.typical_p < 1:
        warpers.append(TypicalLogitsWarper(config.typical_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone()).softmax(-1)


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("size, spread", [(50, 3.0), (6000, 0.3), (6000, 1.5), (6000, 6.0)])
def test_d15_d23_every_filter_equals_transformers(options: dict[str, Any], size: int, spread: float) -> None:
    """fp64, so rounding is 1e-15. The flat laws keep more tokens than a shortlist holds, the steep ones fewer."""
    logits, config = random_logits(6, size, spread), sampled(options)
    law = law_of(logits, config)
    assert torch.allclose(law.dense(size), transformers_law(logits, config), atol=1e-9, rtol=0)
    assert law.healthy


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_d15_every_filter_has_an_effect(options: dict[str, Any]) -> None:
    logits = random_logits(4, 40)
    law, plain = law_of(logits, sampled(options)).dense(40), law_of(logits, PLAIN).dense(40)
    no_effect = options.get("top_k", 0) > 40 or not options
    assert torch.equal(law, plain) == no_effect


@pytest.mark.parametrize(
    "key, right, wrong", [("top_k", 7, 6), ("top_p", 0.8, 0.7), ("min_p", 0.05, 0.1), ("typical_p", 0.9, 0.7)]
)
def test_d23_a_wrong_value_is_seen(key: str, right: float, wrong: float) -> None:
    """The control of the comparison with transformers."""
    logits = random_logits(6, 50, 1.0)
    expected = transformers_law(logits, sampled({key: right}))
    assert torch.allclose(law_of(logits, sampled({key: right})).dense(50), expected, atol=1e-9, rtol=0)
    assert not torch.allclose(law_of(logits, sampled({key: wrong})).dense(50), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature, top_p, kept", [(2.0, 0.65, 3), (0.5, 0.75, 2)])
def test_d23_temperature_comes_before_the_nucleus(temperature: float, top_p: float, kept: int) -> None:
    law = law_of(PROBS.log().unsqueeze(0), SamplingConfig(temperature=temperature, top_p=top_p))
    assert int((law.probs > 0).sum()) == kept


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("size", [40, 5000])
def test_narrowed_columns_are_the_law_of_those_tokens_alone(options: dict[str, Any], size: int) -> None:
    full = random_logits(5, 6000, 2.0)
    ids = torch.randperm(6000, generator=torch.Generator().manual_seed(1))[:size].sort().values
    elsewhere = torch.full_like(full, float("-inf"))
    elsewhere[:, ids] = full[:, ids]
    law = law_of(full[:, ids], sampled(options), ids)
    assert torch.allclose(law.dense(6000), law_of(elsewhere, sampled(options)).dense(6000), atol=1e-9, rtol=0)


def test_greedy_laws_of_narrowed_columns_name_tokens() -> None:
    law = law_of(torch.tensor([[0.0, 5.0, 1.0], [9.0, 5.0, 1.0]]), SamplingConfig(), torch.tensor([3, 8, 20]))
    assert draw_from(law).tolist() == [8, 3]


def test_few_survivors_make_a_law_of_few_columns() -> None:
    logits = random_logits(4, 8000, 8.0)
    assert law_of(logits, SamplingConfig()).probs.shape == (4, 1)
    assert law_of(logits, sampled({"top_k": 50})).probs.shape == (4, 50)
    assert law_of(logits, sampled({"top_p": 0.9})).probs.shape == (4, SHORTLIST)
    assert law_of(logits, sampled({"typical_p": 0.9})).probs.shape == (4, SHORTLIST)


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_a_row_does_not_depend_on_its_neighbours(options: dict[str, Any]) -> None:
    """One flat row sends all rows to wide columns; neither their laws nor the tokens drawn from them change."""
    steep = random_logits(3, 6000, 6.0)
    beside = torch.cat([steep, torch.zeros(1, 6000, dtype=torch.float64)])
    alone, among = law_of(steep, sampled(options)), law_of(beside, sampled(options))[:3]
    assert torch.allclose(alone.dense(6000), among.dense(6000), atol=1e-12, rtol=0)
    for seed in range(20):
        uniform = draw_uniform(3, torch.Generator().manual_seed(seed))
        assert torch.equal(draw_from(alone, uniform), draw_from(among, uniform))


def test_equals_of_the_kth_likeliest_token_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    config = sampled({"top_k": 2})
    assert torch.allclose(law_of(logits, config).dense(6), transformers_law(logits, config), atol=1e-12)
    assert int((law_of(logits, config).dense(6)[0] > 0).sum()) == 4


def test_fewer_tokens_than_top_k_may_be_left() -> None:
    logits = torch.full((2, 100), float("-inf"), dtype=torch.float64)
    logits[:, [4, 70]] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    law = law_of(logits, sampled({"top_k": 50, "top_p": 0.99, "typical_p": 0.99}))
    assert law.healthy
    assert (law.dense(100) > 0).nonzero()[:, 1].tolist() == [4, 70, 4, 70]


@pytest.mark.parametrize("size", [2000, 8000])
def test_equals_at_the_border_of_a_nucleus_are_kept_by_rising_id(size: int) -> None:
    law = law_of(torch.zeros(1, size), sampled({"top_p": 0.25})).dense(size)
    kept = int((law > 0).sum())
    assert torch.equal((law > 0).nonzero()[:, 1], torch.arange(kept))
    assert abs(kept - size // 4) <= 1


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-30, 1e-8, 1e-6, 1e-3])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0), (0, 0.9)])
def test_d22_tiny_temperatures_are_greedy_and_finite(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * 30
    law = law_of(logits, SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(law.dense(100).argmax(-1), logits.argmax(-1))
    assert law.probs.amax(-1).min() > 0.999


def test_ties_go_to_the_lowest_id() -> None:
    assert draw_from(law_of(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), SamplingConfig())).item() == 1


@pytest.mark.parametrize("config", [PLAIN, SamplingConfig(), sampled({"top_k": 5})])
def test_half_precision_logits_become_fp32_laws(config: SamplingConfig) -> None:
    law = law_of(random_logits(2, 1000).bfloat16(), config)
    assert law.probs.dtype == torch.float32
    assert torch.allclose(law.probs.sum(-1), torch.ones(2), atol=1e-6)


def test_logits_stay_as_they_are() -> None:
    logits = random_logits(3, 5000)
    before = logits.clone()
    for options in FILTERS.values():
        law_of(logits, sampled(options))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size", [12, 5000])
def test_d55_rows_that_define_no_law_are_reported_and_break_nothing(
    options: dict[str, Any], bad: float, size: int
) -> None:
    logits = random_logits(3, size)
    logits[1, 2 if bad != float("-inf") else slice(None)] = bad
    for config in (sampled(options), replace(sampled(options), temperature=0.0)):
        law = law_of(logits, config)
        assert law.healthy is not None and not law.healthy
        tokens = draw_from(law, torch.full((3,), 0.5, dtype=torch.float64))
        assert bool(((tokens >= 0) & (tokens < size)).all())


def test_d55_bad_logits_are_seen() -> None:
    logits = torch.zeros(3, 5)
    assert is_healthy(logits)
    for bad in (float("nan"), float("inf")):
        logits[1, 2] = bad
        assert not is_healthy(logits)
    logits[1, 2] = float("-inf")
    assert is_healthy(logits)
    assert law_of(logits, PLAIN).healthy


@pytest.mark.parametrize(
    "key, value",
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("typical_p", 0.0),
    ],
)
def test_d57_values_out_of_range_are_named(key: str, value: float) -> None:
    with pytest.raises(UsageError, match=key):
        SamplingConfig(**{key: value})
