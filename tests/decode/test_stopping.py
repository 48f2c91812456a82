"""Budgets and end-of-text ids, alone and inside accepted blocks."""

import pytest

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.stopping import Stopping
from tests.fixtures import CallCounter, greedy_reference, loaded, random_prompt, tiny_llama, tiny_mistral, with_noise

PROMPT = random_prompt(7)


def greedy(count: int | None, most: int = 3) -> DecodeConfig:
    """`count` tokens, and always as many drafted as there is room for, up to `most`."""
    return DecodeConfig(count, most, draft_length="fixed", sampling=SamplingConfig())


def test_a_block_is_cut_token_by_token() -> None:
    stopping = Stopping(10, {7})
    assert stopping.cut([1, 2]) == [1, 2]
    assert stopping.reason is None
    assert stopping.cut([3, 7, 4, 7]) == [3, 7]
    assert (stopping.reason, stopping.room) == ("stop", 6)
    assert stopping.cut([5]) == []


def test_d06_the_first_token_counts_and_an_eos_there_ends_the_text() -> None:
    target = tiny_llama(0)
    reference = greedy_reference(target, PROMPT, 10)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.3)))
    for count in (1, 2, 3, 10):
        assert decoder.generate(PROMPT, greedy(count))[0].ids == reference[:count]
    target.generation_config.eos_token_id = reference[0]
    answer = decoder.generate(PROMPT, greedy(10))[0]
    assert (answer.ids, answer.finish_reason) == (reference[:1], "stop")


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_d07_an_eos_inside_a_block_ends_the_text_there(noise: float) -> None:
    target = tiny_llama(1)
    reference = greedy_reference(target, PROMPT, 24)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, noise)))
    config = greedy(24, 6)
    for index, token in enumerate(reference):
        if token in reference[:index]:
            continue
        target.generation_config.eos_token_id = token
        streamed: list[int] = []
        for chunk in decoder.stream(PROMPT, config, trace=True):
            streamed += chunk.ids
            answer = chunk.generation
        assert answer is not None
        assert streamed == answer.ids == reference[: index + 1]
        assert answer.finish_reason == "stop"
        assert answer.stats.num_output_tokens == index + 1
        assert sum(len(r.emitted) for r in answer.rounds) == index + 1
        assert noise or answer.stats.draft_acceptance_rate == 1.0, "what lies beyond the end was counted"


def test_d08_every_eos_of_the_target_counts_and_none_of_the_draft() -> None:
    target = tiny_llama(2)
    draft = with_noise(target, 0.0)
    reference = greedy_reference(target, PROMPT, 24)
    distinct = list(dict.fromkeys(reference))
    never = next(t for t in range(48) if t not in reference)
    target.generation_config.eos_token_id = [never, distinct[4]]
    draft.generation_config.eos_token_id = distinct[1]
    draft.config.eos_token_id = distinct[1]
    answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(PROMPT, greedy(24))[0]
    assert answer.ids == reference[: reference.index(distinct[4]) + 1]
    assert answer.finish_reason == "stop"


def test_d09_an_eos_that_only_the_draft_says_does_not_end_the_text() -> None:
    target = tiny_llama(3)
    reference = greedy_reference(target, PROMPT, 30)
    never = next(t for t in range(48) if t not in reference)
    target.generation_config.eos_token_id = never
    draft = with_noise(target, 0.0)
    draft.lm_head.weight.data[never] = draft.lm_head.weight.data.abs().sum(0) * 10
    draft.model.norm.weight.data.abs_()
    answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(PROMPT, greedy(30), trace=True)[0]
    assert answer.ids == reference
    assert any(never in r.drafted for r in answer.rounds), "the draft never said it, the test shows nothing"


def test_d06_d31_a_draft_with_a_window_that_is_never_fed() -> None:
    """Nothing can be drafted for a last token, so the draft's cache holds no state when it is rewound."""
    target, draft = tiny_llama(0), tiny_mistral(0)
    decoder = SpeculativeDecoder(loaded(target), loaded(draft))
    assert decoder.generate(PROMPT, greedy(1))[0].ids == greedy_reference(target, PROMPT, 1)
    draft.config.max_position_embeddings = 4
    answer = decoder.generate(PROMPT, greedy(9))[0]
    assert answer.ids == greedy_reference(target, PROMPT, 9)


@pytest.mark.parametrize("count", range(1, 14))
def test_d11_the_budget_is_met_exactly_and_nothing_is_drafted_beyond_it(count: int) -> None:
    target = tiny_llama(0)
    draft = with_noise(target, 0.0)
    counter = CallCounter(draft)
    config = greedy(count, 5)
    decoder = SpeculativeDecoder(loaded(target), loaded(draft))
    counter.widths.clear()
    answer = decoder.generate(PROMPT, config)[0]
    counter.remove()
    assert answer.ids == greedy_reference(target, PROMPT, 13)[:count]
    assert answer.finish_reason == "length"
    assert len(counter.widths) == answer.stats.num_draft_tokens == answer.stats.num_accepted_draft_tokens
    assert answer.stats.num_draft_tokens == count - answer.stats.num_target_steps, "the bonus token needs no draft"


def test_d12_no_budget_means_no_call() -> None:
    target = tiny_llama(0)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.0)))
    counter = CallCounter(target)
    answer = decoder.generate(PROMPT, greedy(0))[0]
    assert (answer.ids, answer.text, answer.finish_reason, counter.widths) == ([], "", "length", [])
    counter.remove()
    with pytest.raises(UsageError, match="max_new_tokens"):
        greedy(-1)


def test_d12_without_a_limit_a_text_ends_at_an_eos_or_with_the_context() -> None:
    target = tiny_llama(0)
    target.config.max_position_embeddings = 48
    reference = greedy_reference(target, PROMPT, 48 - len(PROMPT))
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.3)))
    answer = decoder.generate(PROMPT, greedy(None))[0]
    assert (answer.ids, answer.finish_reason) == (reference, "length")
    target.generation_config.eos_token_id = reference[20]
    answer = decoder.generate(PROMPT, greedy(None))[0]
    assert (answer.ids, answer.finish_reason) == (reference[: reference.index(reference[20]) + 1], "stop")
