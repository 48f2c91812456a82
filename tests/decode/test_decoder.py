"""The public decoder: limits of context, seeds, streams, modes of the models, bad weights, text."""

from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import DraftsmithError, UsageError
from tests.fixtures import (
    CallCounter,
    P,
    Q,
    byte_tokenizer,
    constant_law,
    fixed,
    greedy_reference,
    loaded,
    random_prompt,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    with_noise,
)

PROMPT = random_prompt(9)


SAMPLED = SamplingConfig(temperature=1.0)


def pair(noise: float = 0.3, seed: int = 0) -> SpeculativeDecoder:
    target = tiny_llama(seed)
    return SpeculativeDecoder(loaded(target), loaded(with_noise(target, noise)))


@pytest.mark.parametrize("length", [10, 20])
def test_d31_past_the_drafts_context_decoding_goes_on_without_it(length: int) -> None:
    target, draft = tiny_llama(0), tiny_gpt2(0, positions=16)
    prompt = random_prompt(length)
    config = fixed(40, 4)
    answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(prompt, config, trace=True)[0]
    assert answer.ids == greedy_reference(target, prompt, 40)
    assert all(not r.drafted for r in answer.rounds if r.context_length > 16)
    assert (answer.stats.num_draft_tokens > 0) == (length <= 16)
    if length > 16:
        assert answer.stats.draft_acceptance_rate is None


def test_d32_the_targets_own_limit_is_kept() -> None:
    target = tiny_gpt2(0, positions=32)
    prompt = random_prompt(25)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.0)))
    plain = SpeculativeDecoder(loaded(target))
    for count in (7, 8, 50):
        config = fixed(count, 6)
        answer = decoder.generate(prompt, config)[0]
        assert answer.ids == greedy_reference(target, prompt, 7)
        assert answer.finish_reason == plain.generate(prompt, config)[0].finish_reason == "length"
    with pytest.raises(UsageError, match="32"):
        decoder.generate(random_prompt(32))


def test_d24_d25_seeds() -> None:
    decoder = pair()
    config = DecodeConfig(max_new_tokens=16, sampling=SAMPLED, seed=7)
    again = DecodeConfig(max_new_tokens=16, sampling=SAMPLED, seed=8)
    alone = decoder.generate(PROMPT, config)[0].ids
    assert decoder.generate(PROMPT, config)[0].ids == alone
    assert decoder.generate([random_prompt(3), PROMPT, random_prompt(5)], config)[1].ids == alone
    assert decoder.generate(PROMPT, again)[0].ids != alone
    greedy = [decoder.generate(PROMPT, DecodeConfig(max_new_tokens=8, seed=s))[0].ids for s in (1, 2)]
    assert greedy[0] == greedy[1]
    unseeded = DecodeConfig(max_new_tokens=8, sampling=SAMPLED)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert len({tuple(decoder.generate(PROMPT, unseeded)[0].ids) for _ in range(10)}) > 1
    assert torch.equal(torch.rand(1), expected), "the global stream was touched"


def test_d26_an_abandoned_stream_leaves_no_trace() -> None:
    decoder = pair()
    config = fixed(20, 3)
    stream = decoder.stream(random_prompt(30, seed=5), config)
    next(stream)
    stream.close()
    assert decoder.generate(PROMPT, config)[0].ids == greedy_reference(decoder.target.model, PROMPT, 20)


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2, tiny_mistral])
def test_d33_a_config_without_caching_changes_nothing(family: Any) -> None:
    target = family(0)
    draft = with_noise(target, 0.3)
    target.config.use_cache = draft.config.use_cache = False
    target.generation_config.use_cache = False
    decoder = SpeculativeDecoder(loaded(target), loaded(draft))
    counter = CallCounter(target)
    answer = decoder.generate(PROMPT, fixed(20, 3))[0]
    counter.remove()
    assert answer.ids == greedy_reference(target, PROMPT, 20)
    assert counter.widths[0] == len(PROMPT) + 3
    assert all(width <= 4 for width in counter.widths[1:])


@pytest.mark.parametrize(
    "sampling, allowed",
    [
        (SamplingConfig(temperature=1.0, top_k=2), {0, 1}),
        (SamplingConfig(temperature=1.0, top_p=0.3), {0}),
        (SamplingConfig(temperature=1.0, min_p=0.5), {0, 1, 2}),
        (SamplingConfig(temperature=0.01), {0}),
        (SamplingConfig(temperature=0.0), {0}),
        (SamplingConfig(temperature=50.0), set(range(6))),
    ],
)
def test_d15_every_sampling_option_reaches_the_output(sampling: SamplingConfig, allowed: set[int]) -> None:
    """The draft is told to draw otherwise, so what keeps ids out can only be the target's own filter."""
    decoder = SpeculativeDecoder(loaded(constant_law(P)), loaded(constant_law(Q)))
    config = fixed(120, 4, sampling=sampling, draft_sampling=SAMPLED, seed=0)
    assert set(decoder.generate([0], config)[0].ids) == allowed


def test_d26_an_error_in_the_reader_leaves_no_trace() -> None:
    decoder = pair()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="reader"):
            for _ in decoder.stream(random_prompt(30, seed=5), DecodeConfig(max_new_tokens=20)):
                raise RuntimeError("reader")
    answer = decoder.generate(PROMPT, DecodeConfig(max_new_tokens=20))[0]
    assert answer.ids == greedy_reference(decoder.target.model, PROMPT, 20)


def test_d31_the_drafts_limit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = SpeculativeDecoder(loaded(tiny_llama(0)), loaded(tiny_gpt2(0, positions=16), "short"))
    for _ in range(2):
        decoder.generate(random_prompt(10), DecodeConfig(max_new_tokens=10))
    told = [r.getMessage() for r in caplog.records]
    assert told == ["draft 'short' sees 16 tokens; beyond them decoding goes on without it"]


def test_a_length_policy_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="draft_length: 'cost' is not legal; expected one of fixed, heuristic"):
        DecodeConfig(draft_length="cost")
    with pytest.raises(UsageError, match="unless draft_length is one of confidence, entropy"):
        DecodeConfig(draft_length="fixed", draft_threshold=0.3)


def test_d29_a_static_cache_in_the_generation_config_changes_nothing() -> None:
    decoder = pair()
    decoder.target.model.generation_config.cache_implementation = "static"
    assert decoder.generate(PROMPT, DecodeConfig(max_new_tokens=20))[0].ids == greedy_reference(
        decoder.target.model, PROMPT, 20
    )


def test_d54_modes_and_configs_are_left_as_found() -> None:
    target = tiny_llama(0, attention_dropout=0.3)
    draft = with_noise(target, 0.05)
    reference = greedy_reference(target, PROMPT, 24)
    decoder = SpeculativeDecoder(loaded(target), loaded(draft))
    target.train()
    draft.train()
    draft.model.norm.eval()
    before = (target.config.to_dict(), target.generation_config.to_dict())
    prompt = list(PROMPT)
    for _ in range(2):
        assert decoder.generate(prompt, DecodeConfig(max_new_tokens=24))[0].ids == reference
    assert target.training and draft.training and not draft.model.norm.training
    assert (target.config.to_dict(), target.generation_config.to_dict()) == before
    assert prompt == PROMPT


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED])
@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_d55_bad_weights_are_an_error_that_names_the_model(role: str, value: float, sampling: SamplingConfig) -> None:
    decoder = pair()
    model = decoder.target.model if role == "target" else decoder.draft.model  # type: ignore[union-attr]
    model.model.norm.weight.data[0] = value
    with pytest.raises(DraftsmithError, match=f"^{role}: "):
        decoder.generate(PROMPT, DecodeConfig(max_new_tokens=8, sampling=sampling, seed=0))


def test_d48_lengths_stay_in_bounds_rise_and_fall_and_start_afresh() -> None:
    target = tiny_llama(0)
    good = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.0)))
    bad = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 2.0)))
    config = DecodeConfig(max_new_tokens=100, num_speculative_tokens=8, draft_length="heuristic")
    answers = [decoder.generate(PROMPT, config, trace=True)[0] for decoder in (good, bad, good)]
    widths = [[len(r.drafted) for r in answer.rounds[:-1]] for answer in answers]
    assert all(1 <= w <= 8 for row in widths for w in row[:-1])
    assert widths[1][0] == 8 and min(widths[1]) == 1 and max(widths[0][2:-1]) == 8
    assert widths[0] == widths[2]
    assert answers[0].ids == answers[1].ids == greedy_reference(target, PROMPT, 100)


def test_d57_zero_drafts_are_plain_decoding_and_an_empty_prompt_is_refused() -> None:
    decoder = pair()
    answer = decoder.generate(PROMPT, DecodeConfig(max_new_tokens=8, num_speculative_tokens=0))[0]
    assert answer.ids == greedy_reference(decoder.target.model, PROMPT, 8)
    assert answer.stats.num_draft_tokens == 0 and answer.stats.mean_acceptance_length == 1.0
    for prompt, word in (([], "empty"), ([48], "48"), ([-1], "-1"), ("text", "tokenizer")):
        with pytest.raises(UsageError, match=word):
            decoder.generate([prompt])
    for wrong in (-1, 65):
        with pytest.raises(UsageError, match="num_speculative_tokens"):
            DecodeConfig(num_speculative_tokens=wrong)


def test_d51_streamed_text_joins_to_the_whole_and_every_id_comes_once() -> None:
    tokenizer = byte_tokenizer()
    target = tiny_llama(0, vocab_size=len(tokenizer))
    decoder = SpeculativeDecoder(
        loaded(target, tokenizer=tokenizer), loaded(with_noise(target, 0.0), tokenizer=tokenizer)
    )
    chunks = list(decoder.stream(tokenizer("né 日本語 🙂")["input_ids"], DecodeConfig(max_new_tokens=40)))
    answer = chunks[-1].generation
    assert answer is not None and len(chunks) > 2
    assert "".join(c.text for c in chunks) == answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert [i for c in chunks for i in c.ids] == answer.ids
