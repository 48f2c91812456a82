"""A batch's rows do not know of one another: unequal prompts, padding that looks like real tokens."""

from typing import Any

import pytest

from decode.config import SamplingConfig
from distill.answering import answer_batch
from tests.fixtures import FAMILIES, greedy_reference, loaded, random_prompt

GREEDY = SamplingConfig()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_d45_each_row_equals_itself_alone(family: str, attention: str) -> None:
    # fp32: transformers' eager attention takes its softmax in it, where fp64's lowest mask value would be -inf
    target: Any = FAMILIES[family](0).float()
    target.set_attn_implementation(attention)
    prompts = [random_prompt(n, seed=n) for n in (1, 5, 33, 60)]
    answers = answer_batch(loaded(target), prompts, GREEDY, 16, seed=0)
    assert answers == [greedy_reference(target, p, 16) for p in prompts]


def test_d47_an_end_token_inside_a_prompt_is_no_padding() -> None:
    """The padding id is the end-of-text id; only lengths tell which positions are padding."""
    target: Any = FAMILIES["llama"](0)
    eos = 7
    target.generation_config.eos_token_id = eos
    prompts = [[3, eos, 9, 20, eos], random_prompt(19)]
    answers = answer_batch(loaded(target), prompts, GREEDY, 16, seed=0)
    assert answers == [greedy_reference(target, p, 16, eos=[eos]) for p in prompts]
