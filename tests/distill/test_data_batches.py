"""Packed batches: documents do not see one another, and supervision does not depend on how rows are laid out."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.errors import UsageError
from distill.data.batches import PADDING, Batch, collate, total_weight
from distill.data.examples import Example
from distill.data.isolation import keeps_documents_apart, require_isolation
from distill.data.schedule import MicroBatch, Schedule
from tests.fixtures import FAMILIES, random_prompt, tiny_gpt2, tiny_llama


def example(length: int, prompt: int, seed: int) -> Example:
    mask = [t >= prompt for t in range(length)]
    return Example(random_prompt(length, seed=seed), mask, str(seed))


EXAMPLES = [example(length, prompt, seed) for seed, (length, prompt) in enumerate([(9, 3), (5, 1), (12, 11), (3, 2)])]


def run(model: Any, batch: Batch) -> torch.Tensor:
    """[B, T, V]"""
    return model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits


def pairs(batch: Batch) -> list[tuple[int, int]]:
    """(example, position) of every supervised position."""
    owners, positions = batch.example_ids[batch.supervised], batch.position_ids[batch.supervised]
    return sorted(zip(owners.tolist(), positions.tolist(), strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_documents_have_the_logits_that_they_have_alone(family: str, attention: str) -> None:
    model = FAMILIES[family]()
    model.set_attn_implementation(attention)
    batch = collate([[0, 1, 3], [2]], EXAMPLES, 1)  # the second row ends in padding
    logits = run(model, batch)
    for index, one in enumerate(EXAMPLES):
        alone = model(input_ids=torch.tensor([one.input_ids]), use_cache=False).logits[0]
        # transformers takes norms and eager softmax in fp32 even here; a leak moves these logits by whole units
        torch.testing.assert_close(logits[batch.example_ids == index], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_changing_a_document_or_the_padding_changes_no_other(attention: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(attention)
    batch = collate([[0, 1], [2, 3], [3, 1]], EXAMPLES, 1)
    before = run(model, batch)
    for owner in (0, 1, PADDING):
        changed = batch.input_ids.where(batch.example_ids != owner, 47 - batch.input_ids)
        after = run(model, batch._replace(input_ids=changed))
        others = batch.example_ids != owner
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])


def test_a_model_that_does_not_keep_documents_apart_is_found_and_refused() -> None:
    class NoBorders(torch.nn.Module):
        """Feeds the model an explicit mask, as a model does that knows nothing of packing."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama(std=0.02)  # as weak as a fresh draft
            self.config, self.device = self.inner.config, self.inner.device

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            mask = torch.ones_like(input_ids)
            return self.inner(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=use_cache)

    class NoPositions(NoBorders):
        def forward(self, input_ids: Any, use_cache: bool) -> Any:  # type: ignore[override]
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    for model in (NoBorders(), NoPositions()):
        with pytest.raises(UsageError, match=r"data\.packing: the draft \(No.*set data\.packing to false"):
            require_isolation(model, "draft")
        assert model.training
    for family in FAMILIES.values():
        require_isolation(family(), "target")
    assert keeps_documents_apart(tiny_gpt2(std=0.02))


def test_logits_at_a_position_are_supervised_by_the_next_token_of_the_same_document() -> None:
    batch = collate([[1, 3]], EXAMPLES, 1)  # lengths 5 and 3, prompts 1 and 2
    assert batch.supervised.tolist() == [[True, True, True, True, False, False, True, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.input_ids.tolist() == [EXAMPLES[1].input_ids + EXAMPLES[3].input_ids]
    assert batch.example_ids.tolist() == [[1] * 5 + [3] * 3]
    first = collate([[0]], [Example([4, 5], [True, True], "")], 1)
    assert first.supervised.tolist() == [[True, False]]  # nothing predicts the first token


def test_t05_padding_is_known_by_place_not_by_id() -> None:
    zeros = Example([0, 0, 0], [False, True, True], "")  # the same id as the padding's
    batch = collate([[0], [1]], [zeros, EXAMPLES[0]], 1)
    assert pairs(batch) == [(0, 0), (0, 1)] + [(1, t) for t in range(2, 8)]
    assert (batch.example_ids[0] == PADDING).tolist() == [False] * 3 + [True] * 6
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """Summed negative log-likelihood of the supervised tokens over the normaliser."""
    log_probs = run(model, batch)[:, :-1].log_softmax(-1)
    picked = log_probs.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return -picked[batch.supervised[:, :-1]].sum() / batch.normaliser


LAYOUTS: dict[str, list[MicroBatch]] = {
    "alone": [[[0]], [[1]], [[2]], [[3]]],
    "one batch": [[[0], [1], [2], [3]]],
    "two": [[[3], [2]], [[1], [0]]],
    "packed": [[[2, 0], [1, 3]]],
    "one pack": [[[3, 2, 1, 0]]],
}


@pytest.fixture(scope="module")
def reference_gradient() -> torch.Tensor:
    """Of the mean over all supervised tokens: each example alone, a loop over its tokens, divided once."""
    model = tiny_llama()
    terms = []
    for one in EXAMPLES:
        log_probs = model(input_ids=torch.tensor([one.input_ids])).logits[0].log_softmax(-1)
        terms += [-log_probs[t - 1, one.input_ids[t]] for t in range(1, len(one.input_ids)) if one.mask[t]]
    (torch.stack(terms).sum() / len(terms)).backward()
    return model.model.embed_tokens.weight.grad


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_t05_any_layout_has_the_same_supervised_pairs_normaliser_and_gradient(
    layout: str, world_size: int, reference_gradient: torch.Tensor
) -> None:
    model = tiny_llama()
    normaliser = total_weight(LAYOUTS[layout], EXAMPLES)
    ranks = range(world_size)
    batches = [collate(micro, EXAMPLES, normaliser, r, world_size) for micro in LAYOUTS[layout] for r in ranks]
    assert normaliser == 6 + 4 + 1 + 1
    assert sorted(pair for batch in batches for pair in pairs(batch)) == [
        (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1), (1, 2), (1, 3), (2, 10), (3, 1),
    ]  # fmt: skip
    for batch in batches:
        loss_sum(model, batch).backward()
    # the tolerance is for the fp32 norms, as above
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, reference_gradient, rtol=1e-4, atol=1e-4)


def test_a_rank_without_rows_does_equal_work_with_nothing_supervised() -> None:
    idle = collate([[0, 1]], EXAMPLES, 10, rank=1, world_size=2)
    busy = collate([[0, 1]], EXAMPLES, 10, rank=0, world_size=2)
    assert torch.equal(idle.input_ids, busy.input_ids) and idle.normaliser == busy.normaliser == 10
    assert not idle.supervised.any() and busy.supervised.any()


@given(
    sizes=st.lists(st.tuples(st.integers(2, 9), st.integers(0, 8)), min_size=1, max_size=12),
    batch_size=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    world_size=st.integers(1, 3),
    packing=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_an_epoch_supervises_every_pair_once_whatever_the_settings(
    sizes: list[tuple[int, int]], batch_size: int, accumulate: int, world_size: int, packing: bool
) -> None:
    examples = [example(length, min(prompt, length - 1), seed) for seed, (length, prompt) in enumerate(sizes)]
    order = Schedule([len(e.input_ids) for e in examples], 9, batch_size, accumulate, max_epochs=1, packing=packing)
    windows = [order.window(number) for number in range(order.num_windows)]
    found = [
        pair
        for window in windows
        for micro in window
        for rank in range(world_size)
        for pair in pairs(collate(micro, examples, 1, rank, world_size))
    ]
    wanted = [(i, t - 1) for i, e in enumerate(examples) for t in range(1, len(e.mask)) if e.mask[t]]
    assert sorted(found) == wanted
    assert sum(total_weight(window, examples) for window in windows) == len(wanted)
