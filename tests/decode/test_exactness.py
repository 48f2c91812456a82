"""The output is the target's own: greedy token for token, sampled in law, over families, lengths and policies."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.draft import Draft, Verdict
from decode.draft_length import DRAFT_LENGTHS
from decode.loop import decode_rounds
from decode.models import narrow_head
from decode.proposers import PROPOSERS, Setup
from decode.sampling import draw, draw_uniform
from decode.stopping import Stopping
from decode.verifiers import VERIFIERS
from tests.fixtures import (
    FAMILIES,
    P,
    Q,
    TableSession,
    chi_square_p,
    constant_law,
    greedy_reference,
    joint_law,
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
                config = DecodeConfig(max_new_tokens=32, num_speculative_tokens=width)
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
                config = DecodeConfig(max_new_tokens=64, num_speculative_tokens=width)
                assert decoder.generate(prompt, config)[0].ids == reference, (prompt_length, eps, width)


@pytest.mark.parametrize("pair", [(tiny_mistral, tiny_llama), (tiny_llama, tiny_mistral), (tiny_mistral, tiny_gpt2)])
def test_d28_windows_on_either_side(pair: tuple[Callable, Callable]) -> None:
    target, draft = pair[0](0), pair[1](1)
    for length in (5, 20):
        prompt = random_prompt(length)
        config = DecodeConfig(max_new_tokens=40, num_speculative_tokens=6)
        answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(prompt, config)[0]
        assert answer.ids == greedy_reference(target, prompt, 40)


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
def test_every_draft_length_policy_is_exact(policy: str) -> None:
    target = tiny_llama(3)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.2)))
    config = DecodeConfig(max_new_tokens=48, num_speculative_tokens=6, draft_length=policy)  # type: ignore[arg-type]
    assert decoder.generate(random_prompt(5), config)[0].ids == greedy_reference(target, random_prompt(5), 48)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_d02_a_model_that_drafts_for_itself_is_always_accepted(family: str, temperature: float) -> None:
    target = FAMILIES[family](0)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0)))
    sampling = SamplingConfig(temperature=temperature)
    config = DecodeConfig(max_new_tokens=41, num_speculative_tokens=4, sampling=sampling, seed=0)
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
    config = DecodeConfig(max_new_tokens=40, num_speculative_tokens=2)
    answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(prompt, config)[0]
    whole = prompt + answer.ids
    after_full_acceptance = 0
    for before, done in zip([None, *answer.rounds], answer.rounds, strict=False):
        assert done.drafted == greedy_reference(draft, whole[: done.context_length], len(done.drafted))
        after_full_acceptance += before is not None and before.num_accepted == len(before.drafted)
    assert after_full_acceptance >= 3


# Three laws that depend on the last token, for target and draft; the first rows are the reference pair.
TARGET_ROWS = [P, (0.1, 0.1, 0.2, 0.2, 0.2, 0.2), (0.5, 0.3, 0.1, 0.05, 0.05, 0.0), P[::-1], Q, P]
DRAFT_ROWS = [Q, (0.3, 0.1, 0.1, 0.1, 0.2, 0.2), (0.2, 0.2, 0.2, 0.2, 0.1, 0.1), P, P, (0.9, 0.1, 0, 0, 0, 0)]
Rows = list[tuple[float, ...]]


def joint_counts(
    verify: Callable[[Draft, Tensor, torch.Generator], Verdict],
    policy: str = "fixed",
    draft_sampling: SamplingConfig | None = None,
    draws: int = 5000,
    count: int = 3,
    vocab_ids: Tensor | None = None,
    proposer: str = "draft_model",
) -> Tensor:
    """How often each sequence of `count` tokens came out, [6 ** count]."""
    sampling = SamplingConfig(temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(6**count, dtype=torch.int64)
    draft_rows: Rows = DRAFT_ROWS if vocab_ids is None else [tuple(row[i] for i in vocab_ids) for row in DRAFT_ROWS]
    for _ in range(draws):
        setup = Setup(TableSession(draft_rows), draft_sampling or sampling, 6, vocab_ids, generator)
        rounds = decode_rounds(
            torch.tensor([[0]]),
            TableSession(TARGET_ROWS),
            PROPOSERS[proposer](setup),
            verify,
            DRAFT_LENGTHS[policy](2),
            sampling,
            Stopping(count, ()),
            generator,
        )
        index = 0
        for token in (token for done in rounds for token in done.emitted):
            index = index * 6 + token
        counts[index] += 1
    return counts


LAW = joint_law(TARGET_ROWS, 0, 3)


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_d16_sampled_joint_law_equals_enumeration(proposer: str, verifier: str, policy: str) -> None:
    assert chi_square_p(joint_counts(VERIFIERS[verifier], policy, proposer=proposer), LAW) > 1e-4


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_d17_a_greedy_draft_is_scored_as_a_point_mass(verifier: str) -> None:
    assert chi_square_p(joint_counts(VERIFIERS[verifier], draft_sampling=SamplingConfig()), LAW) > 1e-4


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_reduced_draft_vocabulary_is_lossless(verifier: str) -> None:
    assert chi_square_p(joint_counts(VERIFIERS[verifier], vocab_ids=torch.tensor([0, 3, 4])), LAW) > 1e-4


def replaced_from_target(draft: Draft, target_probs: Tensor, generator: torch.Generator) -> Verdict:
    """A wrong rule: the token after a rejection is drawn from p instead of the residual."""
    right = VERIFIERS["token"](draft, target_probs, generator)
    law = target_probs[right.num_accepted]
    return Verdict(right.num_accepted, draw(law, draw_uniform(1, generator)[0]))


def only_drafted_token_removed(draft: Draft, target_probs: Tensor, generator: torch.Generator) -> Verdict:
    """A wrong rule: the residual zeroes the drafted token and keeps p elsewhere."""
    right = VERIFIERS["token"](draft, target_probs, generator)
    law = target_probs[right.num_accepted].clone()
    if right.num_accepted < draft.width:
        law[draft.tokens[right.num_accepted]] = 0
    return Verdict(right.num_accepted, draw(law, draw_uniform(1, generator)[0]))


def never_compared(draft: Draft, target_probs: Tensor, generator: torch.Generator) -> Verdict:
    """A wrong rule: the first drafted token is committed without a trial."""
    right = VERIFIERS["token"](draft, target_probs, generator)
    count = right.num_accepted.clamp(min=min(1, draft.width))
    return Verdict(count, draw(target_probs[count], draw_uniform(1, generator)[0]))


@pytest.mark.parametrize("wrong", [replaced_from_target, only_drafted_token_removed, never_compared])
def test_d16_d19_the_same_test_catches_wrong_rules(wrong: Callable) -> None:
    assert chi_square_p(joint_counts(wrong), LAW) < 1e-4


def test_greedy_with_a_narrowed_head_equals_the_reference() -> None:
    target = tiny_llama(5)
    draft = with_noise(target, 0.1)
    vocab_ids = torch.arange(0, 48, 2)
    narrow_head(draft, vocab_ids)
    prompt = random_prompt(6)
    decoder = SpeculativeDecoder(loaded(target), loaded(draft, vocab_ids=vocab_ids))
    answer = decoder.generate(prompt, DecodeConfig(max_new_tokens=40, num_speculative_tokens=4))[0]
    assert answer.ids == greedy_reference(target, prompt, 40)
    drafted = {token for done in answer.rounds for token in done.drafted}
    assert drafted <= set(vocab_ids.tolist())
    assert answer.stats.num_accepted_draft_tokens > 0


def test_the_constant_law_fixture_is_what_it_says() -> None:
    logits = constant_law(P)(input_ids=torch.tensor([[0, 5, 3]])).logits
    assert torch.allclose(logits.softmax(-1), torch.tensor(P).double().expand(1, 3, 6), atol=1e-7)


@pytest.mark.parametrize("width, mean", [(1, 1.5), (4, 1.9375), (8, 1.99609375)])
def test_e05_counts_meet_the_closed_forms(width: int, mean: float) -> None:
    """alpha = 0.5: tokens a round (1 - .5 ** (W + 1)) / .5; position i is kept in .5 ** i of the rounds."""
    from decode.stats import Stats

    generator = torch.Generator().manual_seed(1)
    sampling = SamplingConfig(temperature=1.0)
    rounds = list(
        decode_rounds(
            torch.tensor([[0]]),
            TableSession([P] * 6),
            PROPOSERS["draft_model"](Setup(TableSession([Q] * 6), sampling, 6, None, generator)),
            VERIFIERS["token"],
            DRAFT_LENGTHS["fixed"](width),
            sampling,
            Stopping(5000, ()),
            generator,
        )
    )
    stats = Stats.of(rounds[:-1])  # the budget may cut the last round
    assert stats.mean_acceptance_length is not None
    assert abs(stats.mean_acceptance_length - mean) < 3 * 1.4 / stats.num_spec_steps**0.5
    for i, rate in enumerate(stats.per_position_acceptance_rate[:4], start=1):
        assert abs(rate - 0.5**i) < 4 * (0.25 / stats.num_spec_steps) ** 0.5
    assert stats.num_output_tokens == sum(len(r.emitted) for r in rounds[:-1])
