"""E08: near ties of coarse dtypes are ties, faults are differences, and neither passes for the other."""

from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.mismatch import RELATIVE_BOUNDS, find_mismatch
from tests.fixtures import greedy_reference, loaded, random_prompt, tiny_llama

PROMPT = random_prompt(6)


class Steps(torch.nn.Module):
    """A model whose logits are the same after any text."""

    def __init__(self, logits: list[float], dtype: torch.dtype) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=dtype))
        self.dtype = dtype
        self.embeddings = torch.nn.Embedding(1, 1)
        self.seen: list[list[int]] = []

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.seen.append(input_ids[0].tolist())
        return type("Output", (), {"logits": self.logits.expand(1, 1, -1)})()


@pytest.mark.parametrize(("dtype", "bound"), RELATIVE_BOUNDS.items(), ids=str)
def test_e08_a_gap_within_the_stated_bound_is_a_tie_and_one_beyond_is_not(dtype: torch.dtype, bound: float) -> None:
    top = 16.0
    for share, kind in ((0.4, "tie"), (4.0, "difference")):
        model = Steps([0.0, top, top * (1 - share * bound), -1.0], dtype)
        found = find_mismatch(loaded(model), [3], [1, 1, 2], [1, 2, 0])
        assert found is not None
        assert (found.position, found.expected, found.found, found.kind) == (1, 1, 2, kind)
        assert model.seen == [[3, 1]], "the logits are those after what both texts share"
        assert found.bound == pytest.approx(bound * top)


def test_e08_two_near_tokens_far_below_the_top_are_no_tie() -> None:
    found = find_mismatch(loaded(Steps([9.0, 1.0, 1.0], torch.float32)), [0], [1], [2])
    assert found is not None and found.kind == "difference"


def test_e08_a_text_that_ends_too_early_or_too_late_is_a_difference() -> None:
    model = loaded(Steps([0.0, 0.0], torch.bfloat16))
    for expected, found in (([1, 0], [1]), ([1], [1, 0]), ([1], [])):
        mismatch = find_mismatch(model, [0], expected, found)
        assert mismatch is not None and mismatch.kind == "difference" and mismatch.gap is None
    assert find_mismatch(model, [0], [1, 0], [1, 0]) is None


def test_e08_a_token_that_was_never_verified_is_a_difference_in_fp64() -> None:
    target = tiny_llama(0)
    right = greedy_reference(target, PROMPT, 12)
    wrong = [*right[:5], (right[5] + 1) % 48]
    wrong += greedy_reference(target, PROMPT + wrong, 6)
    found = find_mismatch(loaded(target), PROMPT, right, wrong)
    assert found is not None
    assert (found.position, found.expected, found.found, found.kind) == (5, right[5], wrong[5], "difference")
    assert found.gap is not None and found.bound is not None and found.gap > 100 * found.bound


def test_e08_bf16_blocks_part_from_single_steps_at_ties_only() -> None:
    """A model of near-equal logits, so that rounding decides often: the texts of both ways part, always at ties."""
    target = tiny_llama(3, std=0.3).bfloat16()
    parted = 0
    for seed in range(12):
        prompt = random_prompt(8, seed=seed)
        exact = greedy_reference(tiny_llama(3, std=0.3), prompt, 24)
        coarse = greedy_reference(target, prompt, 24)
        mismatch = find_mismatch(loaded(target), prompt, coarse, exact)
        if mismatch is not None:
            parted += 1
            assert mismatch.kind == "tie", mismatch
    assert parted, "the model never rounds the other way: the test has no power"


def test_penalties_count_where_the_texts_part() -> None:
    # Token 1 leads, but stands in the text; with the penalty token 2 is as likely, and without it far off.
    model = loaded(Steps([0.0, 4.0, 2.0], torch.float32))
    config = DecodeConfig(sampling=SamplingConfig(repetition_penalty=2.0), eos_token_ids=[])
    tie = find_mismatch(model, [1], [1], [2], config)
    assert tie is not None and tie.gap == 0 and tie.kind == "tie"
    plain = find_mismatch(model, [1], [1], [2])
    assert plain is not None and plain.kind == "difference"
