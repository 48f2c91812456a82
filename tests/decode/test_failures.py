"""Reported failures as whole decoders show them: real models and caches, where rules and filters alone are right."""

import gc
import json
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from decode.benchmark import decoder_method, run_benchmark, transformers_method
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.draft import Draft, Verdict
from decode.draft_length import DRAFT_LENGTHS
from decode.laws import Law
from decode.verifiers import VERIFIERS
from tests.fixtures import (
    P,
    Q,
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


def pair(noise: float, seed: int = 0) -> SpeculativeDecoder:
    target = tiny_llama(seed)
    return SpeculativeDecoder(loaded(target), loaded(with_noise(target, noise)))


@pytest.mark.parametrize("width", [1, 4])
def test_d05_a_draft_that_is_always_wrong_is_never_accepted(width: int) -> None:
    target = tiny_llama(0)
    draft = with_noise(target, 0.0)
    draft.lm_head.weight.data.neg_()  # its likeliest token is the target's least likely one
    answer = SpeculativeDecoder(loaded(target), loaded(draft)).generate(PROMPT, fixed(24, width))[0]
    assert answer.ids == greedy_reference(target, PROMPT, 24)
    assert (answer.stats.num_accepted_draft_tokens, answer.stats.num_spec_steps) == (0, 23)


def rank_p(decoder: SpeculativeDecoder, config: DecodeConfig, rows: int = 4) -> float:
    """p-value of sampled texts under the target's own laws, which are computed over whole texts without a cache.

    For each token the probability of a likelier one is compared with what its law expects of it: the sum of these
    differences is a martingale, and near normal.
    """
    prompts = [random_prompt(3 + at % 7, seed=at) for at in range(rows)]
    total, variance = 0.0, 0.0
    for seed, prompt in enumerate(prompts):
        settings = DecodeConfig(**{**config.__dict__, "seed": seed})
        ids = decoder.generate(prompt, settings)[0].ids
        with torch.no_grad():
            logits = decoder.target.model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0]
        laws = logits[len(prompt) - 1 : -1].softmax(-1)
        above: Tensor = torch.where(laws.unsqueeze(1) > laws.unsqueeze(2), laws.unsqueeze(1), 0.0).sum(-1)  # [T, V]
        expected = (laws * above).sum(-1)
        total += float((above.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1) - expected).sum())
        variance += float(((laws * above.square()).sum(-1) - expected.square()).sum())
    return float(2 * norm.sf(abs(total) / variance**0.5))


def sliding(noise: float) -> SpeculativeDecoder:
    """A pair whose texts outgrow its windows, with laws so flat that sampling shows."""
    target = tiny_mistral(1, std=0.25)
    return SpeculativeDecoder(loaded(target), loaded(with_noise(target, noise)))


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
def test_d16_sampled_texts_follow_the_target_through_real_caches(policy: str) -> None:
    config = DecodeConfig(40, 4, policy, sampling=SAMPLED)  # type: ignore[arg-type]
    assert rank_p(sliding(0.5), config) > 1e-4


def always(draft: Draft, law: Law, generator: torch.Generator) -> Verdict:
    """A wrong rule: keeps the first drafted token whatever the target says of it."""
    done = VERIFIERS["token"](draft, law, generator)
    return done if draft.width == 0 or done.num_accepted else Verdict(torch.tensor(1), done.next_token)


def test_d16_a_rule_that_keeps_the_first_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "block", always)
    assert rank_p(sliding(0.5), fixed(40, 4, sampling=SAMPLED)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-3, 0.5, 1.0])
def test_d20_a_model_that_samples_for_itself_is_accepted_and_breaks_nothing(
    dtype: torch.dtype, temperature: float
) -> None:
    target = tiny_llama(0).to(dtype)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.0)))
    for verifier in VERIFIERS:
        config = fixed(200, 4, sampling=SamplingConfig(temperature), seed=0, verifier=verifier)
        answer = decoder.generate(PROMPT, config)[0]
        assert len(answer.ids) == 200 and all(0 <= token < 48 for token in answer.ids)
        # Blocks and single steps round differently, so their laws differ by some units of the dtype.
        assert (answer.stats.draft_acceptance_rate or 0) > (0.99 if dtype == torch.float32 else 0.8)


def test_d22_tiny_temperatures_are_greedy_on_either_side() -> None:
    decoder = pair(0.1)
    reference = greedy_reference(decoder.target.model, PROMPT, 24)
    greedy = decoder.generate(PROMPT, fixed(24, 4, sampling=SamplingConfig()))[0]
    assert greedy.ids == reference and 0 < greedy.stats.num_accepted_draft_tokens < greedy.stats.num_draft_tokens
    tiny = [SamplingConfig(temperature) for temperature in (0.0, 1e-8, 1e-6, 1e-3)]
    for sampling in tiny:
        for draft_sampling in (None, tiny[0], tiny[-1]):
            config = fixed(24, 4, sampling=sampling, draft_sampling=draft_sampling, seed=0)
            answer = decoder.generate(PROMPT, config)[0]
            assert (answer.ids, answer.stats) == (greedy.ids, greedy.stats), (sampling, draft_sampling)


@pytest.mark.parametrize(("temperature", "top_p", "kept"), [(2.0, 0.65, 3), (0.5, 0.75, 2)])
def test_d23_the_same_ids_can_come_out_as_of_transformers(temperature: float, top_p: float, kept: int) -> None:
    target, draft = loaded(constant_law((0.4, 0.3, 0.2, 0.1))), loaded(constant_law((0.1, 0.2, 0.3, 0.4)))
    config = fixed(100, 3, sampling=SamplingConfig(temperature, top_p=top_p), seed=0)
    for method in (
        transformers_method("transformers", target, config),
        decoder_method("plain", SpeculativeDecoder(target), config),
        decoder_method("ours", SpeculativeDecoder(target, draft), config),
    ):
        assert set(method.run([0], 100).ids) == set(range(kept)), method.name


def tensor_bytes() -> int:
    gc.collect()
    return sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) is torch.Tensor)


def test_d26_abandoned_streams_hold_no_memory() -> None:
    decoder = pair(0.3)
    kept: list[Any] = []

    def abandon(keep: bool = False) -> None:
        stream = decoder.stream(random_prompt(30, seed=5), fixed(20, 3))
        next(stream)
        kept.extend([stream] if keep else [])

    abandon()
    before = tensor_bytes()
    for _ in range(100):
        abandon()
    assert tensor_bytes() - before < 2**20
    for _ in range(50):
        abandon(keep=True)
    assert tensor_bytes() - before > 2**20, "the measure sees no stream that is held"


def test_d57_a_draft_longer_than_the_context_is_cut_to_what_fits() -> None:
    target = tiny_gpt2(0, positions=32)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.0)))
    answer = decoder.generate(PROMPT, fixed(50, 64))[0]
    assert answer.ids == greedy_reference(target, PROMPT, 32 - len(PROMPT))
    assert answer.finish_reason == "length"


def test_e04_a_draft_past_its_context_gives_null_rates_and_speeds_still() -> None:
    decoder = SpeculativeDecoder(loaded(tiny_llama(0)), loaded(tiny_gpt2(0, positions=16)))
    (found,) = run_benchmark([decoder_method("ours", decoder, fixed(8, 4))], [random_prompt(20)], 8)
    assert found.stats is not None and found.tokens_per_second > 0
    told = json.loads(json.dumps(found.stats.as_dict(), allow_nan=False))
    assert (told["num_draft_tokens"], told["draft_acceptance_rate"]) == (0, None)
    assert (told["per_position_acceptance_rate"], told["mean_acceptance_length"]) == ([], 1.0)


def test_e05_e07_real_decoding_accepts_what_the_laws_overlap() -> None:
    """Overlap 1/2 and 4 drafted tokens: 15/64 of all drafted are accepted, and half of those that are decided on."""
    decoder = SpeculativeDecoder(loaded(constant_law(P)), loaded(constant_law(Q)))
    rounds = []
    for seed in range(6):  # constant laws: one seed gives one text, whatever the prompt
        config = fixed(200, 4, sampling=SAMPLED, seed=seed, verifier="token")
        rounds += decoder.generate([0], config, trace=True)[0].rounds[:-1]  # the budget may cut the last one
    accepted = sum(done.num_accepted for done in rounds)
    decided = sum(min(done.num_accepted + 1, 4) for done in rounds)
    assert abs(accepted / decided - 0.5) < 4 * (0.25 / decided) ** 0.5
    assert abs(accepted / (4 * len(rounds)) - 15 / 64) < 4 * 1.12 / 4 / len(rounds) ** 0.5
