"""Greedy output is the target's own, token for token, over families, noise, lengths, policies, batches and caches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.draft_length import DRAFT_LENGTHS
from decode.models import narrow_head
from decode.verifiers import VERIFIERS
from tests.fixtures import (
    FAMILIES,
    fixed,
    greedy_reference,
    loaded,
    random_prompt,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    with_noise,
)

NOISES = (0.0, 0.05, 0.3, 2.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_d01_greedy_equals_the_cache_free_reference(family: str, seed: int) -> None:
    target = FAMILIES[family](seed)
    lengths = {1: (1, 8), 2: (2, 5), 7: (3, 6), 33: (4, 7)}
    for prompt_length, widths in lengths.items():
        prompt = random_prompt(prompt_length, seed=seed)
        reference = greedy_reference(target, prompt, 32)
        assert len(set(reference)) > 5, "the fixture has lost its power"
        for eps in NOISES:
            decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, eps)))
            for width in widths:
                config = fixed(32, width)
                assert decoder.generate(prompt, config)[0].ids == reference, (family, prompt_length, eps, width)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(8))
def test_d01_the_whole_grid(family: str, seed: int) -> None:
    target = FAMILIES[family](seed)
    for prompt_length in (1, 2, 7, 33):
        prompt = random_prompt(prompt_length, seed=seed)
        reference = greedy_reference(target, prompt, 64)
        for eps in NOISES:
            decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, eps)))
            for width in range(1, 9):
                config = fixed(64, width)
                assert decoder.generate(prompt, config)[0].ids == reference, (prompt_length, eps, width)


@pytest.mark.parametrize("pair", [(tiny_mistral, tiny_llama), (tiny_llama, tiny_mistral), (tiny_mistral, tiny_gpt2)])
def test_d28_windows_on_either_side(pair: tuple[Callable, Callable]) -> None:
    target, draft = pair[0](0), pair[1](1)
    for length in (5, 20):
        prompt = random_prompt(length)
        config = fixed(40, 6)
        answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(prompt, config)[0]
        assert answer.ids == greedy_reference(target, prompt, 40)


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_and_rule_is_exact_alone_and_in_a_batch(policy: str, verifier: str, family: str) -> None:
    """d45: rows of a batch accept different numbers of tokens, stop apart and leave, and each equals its solo run."""
    target = FAMILIES[family](3)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.2)))
    prompts = [random_prompt(n, seed=n) for n in (1, 5, 33, 18)]
    references = [greedy_reference(target, prompt, 24) for prompt in prompts]
    eos = [references[0][9]]
    references = [ids[: ids.index(eos[0]) + 1] if eos[0] in ids else ids for ids in references]
    for size in (1, 4):
        config = DecodeConfig(
            24,
            6,
            draft_length=policy,
            verifier=verifier,
            eos_token_ids=eos,
            batch_size=size,  # type: ignore[arg-type]
        )
        assert [answer.ids for answer in decoder.generate(prompts, config)] == references
    assert len({len(ids) for ids in references}) > 1, "the fixture has lost its power"


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
def test_d24_a_sampled_row_of_a_batch_equals_its_solo_run(policy: str) -> None:
    target = tiny_llama(3)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.2)))
    prompts = [random_prompt(n, seed=n) for n in (1, 5, 33)]
    settings: dict[str, Any] = {"draft_length": policy, "sampling": SamplingConfig(temperature=1.0), "seed": 3}
    alone = [decoder.generate(prompt, DecodeConfig(20, 4, **settings))[0].ids for prompt in prompts]
    together = decoder.generate(prompts, DecodeConfig(20, 4, batch_size=3, **settings))
    assert [answer.ids for answer in together] == alone
    others = [answer.ids for answer in decoder.generate(prompts, DecodeConfig(20, 4, **{**settings, "seed": 4}))]
    assert others != alone


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_d02_a_model_that_drafts_for_itself_is_always_accepted(family: str, temperature: float) -> None:
    target = FAMILIES[family](0)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0)))
    sampling = SamplingConfig(temperature=temperature)
    config = fixed(41, 4, sampling=sampling, seed=0)
    stats = decoder.generate(random_prompt(9), config)[0].stats
    assert stats.draft_acceptance_rate == 1.0
    # The prompt's pass verifies a draft as every other does: ceil(41 / 5) passes.
    assert stats.num_target_steps == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_d04_each_proposal_equals_a_cache_free_draft(family: str) -> None:
    """Faults on the draft's side never show in the output, so every proposal is recomputed without a cache."""
    target = FAMILIES[family](0)
    draft = with_noise(target, 0.05)
    prompt = random_prompt(12)
    config = fixed(40, 2)
    answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(prompt, config, trace=True)[0]
    whole = prompt + answer.ids
    after_full_acceptance = 0
    for before, done in zip([None, *answer.rounds], answer.rounds, strict=False):
        assert done.drafted == greedy_reference(draft, whole[: done.context_length], len(done.drafted))
        after_full_acceptance += before is not None and before.num_accepted == len(before.drafted)
    assert after_full_acceptance >= 3


def test_greedy_with_a_narrowed_head_equals_the_reference() -> None:
    target = tiny_llama(5)
    draft = with_noise(target, 0.1)
    vocab_ids = torch.arange(0, 48, 2)
    narrow_head(draft, vocab_ids)
    prompt = random_prompt(6)
    decoder = SpeculativeDecoder(loaded(target), loaded(draft, vocab_ids=vocab_ids))
    answer = decoder.generate(prompt, fixed(40, 4), trace=True)[0]
    assert answer.ids == greedy_reference(target, prompt, 40)
    drafted = {token for done in answer.rounds for token in done.drafted}
    assert drafted <= set(vocab_ids.tolist())
    assert answer.stats.num_accepted_draft_tokens > 0
