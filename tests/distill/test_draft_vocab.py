"""Reduced draft vocabulary: the choice of ids, and guard rows that never win."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from decode.errors import UsageError
from decode.models import narrow_head
from distill.data.examples import Example
from distill.drafts.vocab import GUARD_CHANNEL, choose_draft_vocab, pin_guard_channel, widen_head

V, D = 64, 32
KEPT = torch.tensor([0, 2, 3, 7, 11, 30, 41, 63])


def guarded_model(seed: int = 0, std: float = 0.5) -> LlamaForCausalLM:
    """A strong random draft whose head is narrowed to KEPT."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    pin_guard_channel(model)
    narrow_head(model, KEPT)
    return model.requires_grad_(False)


def excluded() -> Tensor:
    mask = torch.ones(V, dtype=torch.bool)
    mask[KEPT] = False
    return mask


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, seed: int = 1) -> Tensor:
    ids = torch.randint(0, V, (4, 24), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids).logits.float()


def test_wide_head_gives_the_same_law_as_the_narrow_one() -> None:
    model = guarded_model()
    narrow = logits_of(model)  # [B, T, N]
    widen_head(model, KEPT, V)
    wide = logits_of(model)  # [B, T, V]
    assert torch.equal(wide.argmax(-1), KEPT[narrow.argmax(-1)])
    law = torch.zeros_like(wide)
    law[..., KEPT] = narrow.softmax(-1)
    torch.testing.assert_close(wide.softmax(-1), law, rtol=0, atol=1e-6)
    assert wide.softmax(-1)[..., excluded()].max() == 0


def test_zero_rows_would_be_proposed() -> None:
    """The negative control: what the guard rows are for."""
    model = guarded_model()
    model.lm_head.weight[:, GUARD_CHANNEL] -= 2e4  # a draft whose logits are all low, which its law does not show
    widen_head(model, KEPT, V)
    assert not excluded()[logits_of(model).argmax(-1)].any()
    model.lm_head.weight[excluded()] = 0
    assert excluded()[logits_of(model).argmax(-1)].any()


def test_narrow_undoes_widen() -> None:
    model = guarded_model()
    before = model.lm_head.weight.clone()
    widen_head(model, KEPT, V)
    assert model.lm_head.weight.shape == (V, D)
    narrow_head(model, KEPT)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 30.0, 300.0])
def test_guard_rows_never_win_whatever_the_hidden_state(dtype: torch.dtype, scale: float) -> None:
    model = guarded_model()
    kept = model.lm_head.weight.clone()
    widen_head(model, KEPT, V)
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(2)
    mean = kept.mean(0)
    states = torch.randn(200, D, generator=generator) * scale
    # Adversaries: every kept logit as low as can be at once, along the mean of the kept rows and against each row.
    adversaries = -torch.cat([mean.unsqueeze(0), kept])
    states = torch.cat([states, adversaries / adversaries.std() * scale])
    states[:, GUARD_CHANNEL] = 1
    logits = model.lm_head(model.model.norm(states.to(dtype))).float()  # [200 + 1 + N, V]
    assert not excluded()[logits.argmax(-1)].any()
    assert logits.softmax(-1)[:, excluded()].sum(-1).max() < 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.02, 0.3, 1.0]))
def test_channel_0_is_1_after_every_layer(seed: int, std: float) -> None:
    model = guarded_model(seed, std)
    output = model(input_ids=torch.tensor([[1, 5, 9]]), output_hidden_states=True)
    for states in output.hidden_states[:-1]:  # the last is after the norm
        assert (states[..., GUARD_CHANNEL] == 1).all()


def test_pin_repairs_what_an_optimiser_step_moved() -> None:
    model = guarded_model()
    for parameter in model.parameters():
        parameter.add_(0.1)
    with pytest.raises(UsageError, match="channel 0"):
        widen_head(model, KEPT, V)
    pin_guard_channel(model)
    widen_head(model, KEPT, V)
    assert not excluded()[logits_of(model).argmax(-1)].any()


def test_pin_leaves_training_as_it_is() -> None:
    model = guarded_model().requires_grad_(True)
    bias = model.lm_head.weight[:, GUARD_CHANNEL].detach().clone()
    pin_guard_channel(model)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert torch.equal(model.lm_head.weight[:, GUARD_CHANNEL], bias)


def example(prompt: list[int], answer: list[int]) -> Example:
    return Example(prompt + answer, [False] * len(prompt) + [True] * len(answer), "rows.jsonl:1")


def test_most_frequent_generated_tokens_are_chosen_and_ties_go_to_the_lower_id() -> None:
    examples = [example([9, 9, 9, 9], [5, 5, 5, 8, 8, 4, 6]), example([9], [7])]
    vocab = choose_draft_vocab(examples, 4, vocab_size=12, required=[0])
    assert vocab.ids.tolist() == [0, 4, 5, 8]
    assert vocab.num_seen == 5
    assert vocab.coverage == pytest.approx(6 / 8)
    assert "4 of 12 tokens (5 occur), covering 75.0%" in vocab.describe(12)


def test_special_tokens_that_were_generated_are_in_and_others_are_not() -> None:
    examples = [example([1], [5, 5, 6, 6, 11])]
    vocab = choose_draft_vocab(examples, 3, vocab_size=12, required=[2], special=[10, 11])
    assert vocab.ids.tolist() == [2, 5, 11]


def test_a_table_that_is_not_filled_takes_prompt_tokens_then_the_lowest_ids() -> None:
    vocab = choose_draft_vocab([example([9, 8, 8], [5])], 5, vocab_size=12, required=[])
    assert vocab.ids.tolist() == [0, 1, 5, 8, 9]


@pytest.mark.parametrize(("size", "legal"), [(12, "below the target's 12"), (2, "at least 3")])
def test_sizes_out_of_range_are_refused(size: int, legal: str) -> None:
    with pytest.raises(UsageError, match=f"draft_vocab_size: {size} .*{legal}"):
        choose_draft_vocab([example([1], [5])], size, vocab_size=12, required=[0, 1, 2])


def test_data_without_generated_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data: .*no generated token"):
        choose_draft_vocab([example([1, 2, 3], [])], 2, vocab_size=12, required=[0])


def test_log_frequencies_are_those_of_the_kept_tokens() -> None:
    rows = [Example([5, 5, 5, 9, 9, 1], [True] * 6, "row")]
    found = choose_draft_vocab(rows, 3, V, required=[1])
    assert found.ids.tolist() == [1, 5, 9]
    ratios = (found.log_frequency - found.log_frequency[0]).exp()
    torch.testing.assert_close(ratios, torch.tensor([1.5, 3.5, 2.5]) / 1.5)
    assert abs(float(found.log_frequency.mean())) < 1e-6
