"""Host time is what the clocks of both models leave over, whoever runs the forwards."""

import time
from typing import Any

import pytest
import torch

from decode.backends import with_backend
from decode.backends.base import Forward
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.models import LoadedModel
from decode.overhead import ForwardClock, clocked, compare_overheads, hooked, measure_overhead
from decode.random_pair import random_pair, random_prompts
from tests.fixtures import loaded, random_prompt, tiny_gpt2, tiny_llama

PROMPTS = [random_prompt(8), random_prompt(8, seed=1)]


class Counted:
    """A forward that is counted."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0
        self.new_slots, self.pad_width = inner.new_slots, inner.pad_width

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.inner(*arguments)


def counted(model: LoadedModel) -> tuple[LoadedModel, Counted]:
    from dataclasses import replace

    ready = with_backend(model, "lean")
    forward: Forward = Counted(ready.forward)
    return replace(ready, forward=forward), forward  # type: ignore[return-value]


def test_every_forward_of_ours_is_clocked() -> None:
    (target, of_target), (draft, of_draft) = counted(loaded(tiny_llama())), counted(loaded(tiny_llama(1)))
    (ours, big), (drafter, small) = clocked(target), clocked(draft)
    decoder = SpeculativeDecoder(ours, drafter)
    config = DecodeConfig(max_new_tokens=12, num_speculative_tokens=2, draft_length="fixed", sampling=SamplingConfig())
    cost = measure_overhead(lambda prompt: decoder.generate(prompt, config), big, small, PROMPTS)
    assert big.calls == of_target.calls > cost.rounds > 0  # the first prompt was run once before
    assert small.calls == of_draft.calls > 0
    assert cost.target_ms > 0
    assert cost.draft_ms > 0
    assert cost.host_ms > 0
    assert target.forward is of_target  # the one that was given is not clocked


def test_what_the_clocks_saw_is_not_host_time() -> None:
    big, small = ForwardClock(), ForwardClock()

    def run(prompt: list[int]) -> None:
        for clock in (big, small, small):
            clock.enter()
            time.sleep(0.002)
            clock.leave()
        time.sleep(0.004)

    cost = measure_overhead(run, big, small, PROMPTS)
    assert cost.rounds == 2
    assert min(cost.target_ms, cost.draft_ms / 2, cost.host_ms / 2) >= 2  # a sleep may only last longer


def test_hooks_clock_whoever_calls_the_model_and_are_removed() -> None:
    model = tiny_llama()
    with hooked(model) as clock:
        model(torch.tensor([[1, 2]]))
    model(torch.tensor([[1, 2]]))
    assert clock.calls == 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_models_own_forward_is_clocked_too() -> None:
    ours, clock = clocked(loaded(tiny_gpt2()))
    SpeculativeDecoder(ours).generate(PROMPTS[0], DecodeConfig(max_new_tokens=5))
    assert clock.calls == 5


def test_models_off_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="on the CPU only"), hooked(tiny_llama().to("meta")):
        pass
    with pytest.raises(ValueError, match="on the CPU only"):
        clocked(loaded(tiny_llama().to("meta")))


def test_the_random_pair_agrees_in_part_and_is_the_same_each_time() -> None:
    state = torch.get_rng_state()
    target, draft = random_pair(vocab_size=512)
    assert torch.equal(torch.get_rng_state(), state)
    again = random_pair(vocab_size=512)[0].model.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in target.model.state_dict().items())
    ids = torch.tensor(random_prompts(4, 512))
    with torch.inference_mode():
        first, second = (loaded.model(ids, use_cache=False).logits.argmax(-1) for loaded in (target, draft))
    assert 0.2 < float((first == second).double().mean()) < 0.95


def test_both_methods_are_compared_on_one_pair() -> None:
    pair = random_pair(vocab_size=64)
    config = DecodeConfig(4, 2, "fixed", sampling=SamplingConfig())
    costs = compare_overheads(pair, "lean", random_prompts(2, 64, length=5), config)
    assert list(costs) == ["draftsmith", "transformers assisted"]
    assert all(cost.rounds > 0 for cost in costs.values())
