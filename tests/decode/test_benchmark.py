"""Timing arithmetic with a clock of its own, and the methods' outputs."""

import random
from collections.abc import Iterator

import pytest

from decode import timing
from decode.benchmark import Answer, Method, decoder_method, run_benchmark, transformers_method
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.evaluate import judge
from tests.fixtures import greedy_reference, loaded, random_prompt, tiny_llama, with_noise

PROMPTS = [random_prompt(n, seed=n) for n in (3, 9, 5)]


class Clock:
    """Time that passes only where a method says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    fake = Clock()
    monkeypatch.setattr(timing, "time", fake)
    yield fake


def test_e06_speed_is_tokens_over_the_least_time_warm_up_left_out(clock: Clock) -> None:
    calls: list[tuple[str, int]] = []

    def stub(name: str, seconds: list[float]) -> Method:
        left = iter([100.0, *seconds])  # the warm-up is slow

        def run(prompt: list[int], count: int, seed: int | None = None) -> Answer:
            calls.append((name, len(prompt)))
            clock.now += next(left)
            return Answer([1] * count)

        return Method(name, run)

    slow = stub("slow", [2.0, 2.0, 2.0, 9.0, 9.0, 9.0])
    fast = stub("fast", [5.0, 1.0, 1.0, 1.0, 5.0, 1.0])
    a, b = run_benchmark([slow, fast], PROMPTS, 10, repeats=2)
    assert (a.total_tokens, a.total_seconds, a.tokens_per_second) == (30, 6.0, 5.0)
    assert (b.total_tokens, b.total_seconds) == (30, 3.0)
    assert (a.warm_up_seconds, b.warm_up_seconds) == (100.0, 100.0)
    assert [t.paces for t in b.timings] == [[0.5, 0.1], [0.1, 0.5], [0.1, 0.1]]
    assert b.speedup_over(a) == 2.0
    assert a.speedup_over(b) == 0.5
    by_prompt = [calls[2 + 2 * i : 4 + 2 * i] for i in range(6)]
    assert [row[0][1] for row in by_prompt] == [row[1][1] for row in by_prompt] == [3, 9, 5] * 2, "not interleaved"
    assert [row[0][0] for row in by_prompt] == ["slow", "fast"] * 3, "the order does not rotate"


def test_e06_reading_the_prompt_is_timed_apart_and_each_prompt_has_its_own_seed(clock: Clock) -> None:
    seeds: list[int | None] = []

    def run(prompt: list[int], count: int, seed: int | None = None) -> Answer:
        seeds.append(seed)
        clock.now += len(prompt) + 2.0 * (count - 1)
        return Answer([1] * count)

    (found,) = run_benchmark([Method("one", run)], PROMPTS, 5, repeats=2, seed=7, first_tokens=True)
    assert [[r.first_seconds for r in t.runs] for t in found.timings] == [[3.0] * 2, [9.0] * 2, [5.0] * 2]
    assert [t.best.seconds for t in found.timings] == [11.0, 17.0, 13.0]
    assert seeds == [7, *[7, 7, 8, 8, 9, 9] * 2]
    assert found.only([2]).total_seconds == 13.0


def test_all_methods_give_the_targets_greedy_text() -> None:
    target = tiny_llama(0)
    reference = [greedy_reference(target, p, 12) for p in PROMPTS]
    target.generation_config.eos_token_id = reference[1][5]
    reference = [greedy_reference(target, p, 12, eos=[reference[1][5]]) for p in PROMPTS]
    draft = loaded(with_noise(target, 0.05))
    config = DecodeConfig(max_new_tokens=12)
    methods = [
        decoder_method("plain", SpeculativeDecoder(loaded(target)), config),
        decoder_method("draft", SpeculativeDecoder(loaded(target), draft), config),
        transformers_method("transformers", loaded(target), config),
        transformers_method("lookup", loaded(target), config, prompt_lookup_tokens=3),
        transformers_method("assisted", loaded(target), config, draft.model),
        transformers_method("assisted:3", loaded(target), config, draft.model, num_assistant_tokens=3),
    ]
    kept = draft.model.generation_config.to_dict()
    plain, drafted, theirs, looked_up, assisted, _ = run_benchmark(methods, PROMPTS, 12, first_tokens=True)
    assert draft.model.generation_config.to_dict() == kept
    assert plain.outputs == drafted.outputs == theirs.outputs == looked_up.outputs == reference
    # Lengths only: their assisted generation is not ours to prove.
    assert [o[:4] for o in assisted.outputs] == [r[:4] for r in reference]
    assert plain.stats is None and drafted.stats is not None
    assert drafted.stats.num_output_tokens == drafted.total_tokens
    assert drafted.mismatches(plain) == 0


def test_the_phases_of_a_call_are_those_of_its_passes() -> None:
    target, draft = loaded(tiny_llama(0)), loaded(with_noise(tiny_llama(0), 0.05))
    config = DecodeConfig(max_new_tokens=12, draft_length="fixed", num_speculative_tokens=3)
    ours = decoder_method("draft", SpeculativeDecoder(target, draft), config).run(PROMPTS[0], 12)
    assert ours.phases is not None and ours.stats is not None
    assert ours.phases.rounds == len(ours.rounds) - 1 == ours.stats.num_target_steps - 1
    theirs = transformers_method("transformers", target, config).run(PROMPTS[0], 12)
    assert theirs.phases is not None
    assert (theirs.phases.rounds, theirs.phases.draft_seconds) == (11, 0.0)
    assisted = transformers_method("assisted", target, config, draft.model, num_assistant_tokens=3).run(PROMPTS[0], 12)
    assert assisted.phases is not None and assisted.phases.draft_seconds > 0
    assert not target.model._forward_hooks and not draft.model._forward_hooks


def test_sampled_baselines_leave_global_randomness_alone() -> None:
    import torch

    target = loaded(tiny_llama(0))
    config = DecodeConfig(max_new_tokens=6, sampling=SamplingConfig(temperature=1.0, top_k=3), seed=3)
    method = transformers_method("transformers", target, config)
    torch.manual_seed(5)
    before, pythons = torch.get_rng_state(), random.getstate()
    first, second = method.run(PROMPTS[0], 6), method.run(PROMPTS[0], 6)
    assert first.ids == second.ids
    assert len({tuple(method.run(PROMPTS[0], 6, seed).ids) for seed in range(8)}) > 1
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == pythons


def test_the_baseline_takes_nothing_from_the_models_own_generation_config() -> None:
    target = tiny_llama(0)
    target.generation_config.update(repetition_penalty=5.0, max_length=3, top_k=1, no_repeat_ngram_size=1)
    kept = target.generation_config.to_dict()
    method = transformers_method("transformers", loaded(target), DecodeConfig(sampling=SamplingConfig()))
    assert method.run(PROMPTS[1], 16).ids == greedy_reference(target, PROMPTS[1], 16)
    assert target.generation_config.to_dict() == kept


def test_e09_a_useless_draft_shows() -> None:
    target = tiny_llama(0)
    verdict = judge(loaded(target), loaded(tiny_llama(99)), PROMPTS, DecodeConfig(max_new_tokens=12))
    assert verdict.stats.draft_acceptance_rate is not None and verdict.stats.draft_acceptance_rate < 0.3
    assert verdict.mismatches == 0
    assert verdict.speedup == pytest.approx(verdict.tokens_per_second / verdict.plain_tokens_per_second)
