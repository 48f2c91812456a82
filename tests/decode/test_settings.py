"""What the decoder takes beside its own settings, and what it tells beside the text."""

import pytest
import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from tests.fixtures import fixed, greedy_reference, loaded, random_prompt, tiny_gpt2, tiny_llama, with_noise

PROMPT = random_prompt(9)


def pair(noise: float = 0.3) -> SpeculativeDecoder:
    target = tiny_llama(0)
    return SpeculativeDecoder(loaded(target), loaded(with_noise(target, noise)))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.7, top_k=5)])
def test_d50_log_probs_are_the_targets_own(sampling: SamplingConfig) -> None:
    decoder = pair()
    eos = greedy_reference(decoder.target.model, PROMPT, 12)[-1]
    config = DecodeConfig(24, 4, sampling=sampling, seed=1, log_probs=True, eos_token_ids=[eos])
    answer = decoder.generate(PROMPT, config)[0]
    with torch.no_grad():
        logits = decoder.target.model(input_ids=torch.tensor([PROMPT + answer.ids])).logits[0]
    rows = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = rows.gather(-1, torch.tensor(answer.ids).unsqueeze(-1)).squeeze(-1)
    assert answer.log_probs is not None and len(answer.log_probs) == len(answer.ids)
    assert torch.allclose(torch.tensor(answer.log_probs, dtype=torch.float64), expected, atol=1e-9)
    assert decoder.generate(PROMPT, DecodeConfig(4))[0].log_probs is None


def test_a_trace_tells_every_round_and_costs_nothing_unasked() -> None:
    decoder = pair(0.1)
    answer = decoder.generate(PROMPT, fixed(24, 3), trace=True)[0]
    length = len(PROMPT)
    for done in answer.rounds:
        assert done.context_length == length
        assert done.kind in ("recovered", "bonus", "ended")
        assert (done.kind == "bonus") == (done.num_accepted == len(done.drafted) and done.next_token is not None)
        assert done.target_seconds > 0 and done.draft_seconds > 0
        length += len(done.emitted)
    assert {done.kind for done in answer.rounds} >= {"recovered", "bonus"}
    assert decoder.generate(PROMPT, fixed(24, 3))[0].rounds == []


def test_the_targets_own_generation_config_is_taken_where_nothing_is_given() -> None:
    target = tiny_llama(0)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.1)))
    target.generation_config.repetition_penalty = 3.0
    own = decoder.generate(PROMPT, DecodeConfig(30))[0].ids
    ids = torch.tensor([PROMPT])
    theirs = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, pad_token_id=0)
    assert own == theirs[0, len(PROMPT) :].tolist()
    plain = decoder.generate(PROMPT, DecodeConfig(30, sampling=SamplingConfig()))[0].ids
    assert plain == greedy_reference(target, PROMPT, 30) != own


def test_transformers_settings_processors_and_criteria_are_taken() -> None:
    from transformers import GenerationConfig, MaxLengthCriteria, SuppressTokensLogitsProcessor

    decoder = pair(0.1)
    settings = GenerationConfig(max_new_tokens=30, do_sample=False, no_repeat_ngram_size=2)
    banned = greedy_reference(decoder.target.model, PROMPT, 1)
    processors = [SuppressTokensLogitsProcessor(banned)]
    criteria = [MaxLengthCriteria(len(PROMPT) + 17)]
    ours = decoder.generate(PROMPT, settings, logits_processor=processors, stopping_criteria=criteria)[0]
    settings.pad_token_id = 0
    ids = torch.tensor([PROMPT])
    theirs = decoder.target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=settings,
        logits_processor=processors,
        stopping_criteria=criteria,
    )
    assert ours.ids == theirs[0, len(PROMPT) :].tolist() and len(ours.ids) == 17 and banned[0] not in ours.ids


def test_d12_no_budget_runs_to_the_end_of_the_context() -> None:
    target = tiny_gpt2(0, positions=40)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.1)))
    answer = decoder.generate(PROMPT, DecodeConfig(None))[0]
    assert answer.ids == greedy_reference(target, PROMPT, 31) and answer.finish_reason == "length"


def test_ids_come_in_tensors_and_arrays_too() -> None:
    decoder = pair()
    wanted = decoder.generate(PROMPT, fixed(6, 2))[0].ids
    ids = torch.tensor(PROMPT)
    for prompts in (ids, ids.numpy(), [ids], ids.unsqueeze(0), [ids.numpy()]):
        assert [answer.ids for answer in decoder.generate(prompts, fixed(6, 2))] == [wanted]  # type: ignore[arg-type]
    assert decoder.generate([], fixed(6, 2)) == []


def test_a_processor_that_writes_to_what_it_is_given_changes_nothing_but_its_own_answer() -> None:
    def writes(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, history[0, -1]] -= 5.0
        history.zero_()
        return scores

    drafted = pair(0.1).generate(PROMPT, fixed(24, 4), logits_processor=[writes])[0].ids
    assert drafted == pair(0.1).generate(PROMPT, fixed(24, 0), logits_processor=[writes])[0].ids


def test_d26_streams_that_take_turns_do_not_wake_each_others_dropout() -> None:
    target = tiny_llama(0, attention_dropout=0.4)
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.1)))
    wanted = greedy_reference(target, PROMPT, 20)
    target.train()
    first, second = decoder.stream(PROMPT, fixed(4, 2)), decoder.stream(PROMPT, fixed(20, 2))
    next(second)
    list(first)
    ids = [token for chunk in second for token in chunk.ids]
    assert ids == wanted[-len(ids) :] and target.training


def test_settings_that_no_model_could_serve_are_refused_by_name() -> None:
    decoder = pair()
    for config, words in (
        (DecodeConfig(4, eos_token_ids=[99]), "eos_token_ids: 99"),
        (DecodeConfig(4, sampling=SamplingConfig(allowed_ids=[77])), "allowed_ids"),
        ("greedy", "config: 'greedy' is not legal"),
    ):
        with pytest.raises(UsageError, match=words):
            decoder.generate(PROMPT, config)
    for settings, words in (
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"num_speculative_tokens": 1.5}, "num_speculative_tokens"),
        ({"verifier": "blok"}, "verifier: 'blok' is not legal; expected one of auto, token, block"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(UsageError, match=words):
            DecodeConfig(**settings)
