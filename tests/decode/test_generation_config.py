"""transformers' settings and ours say the same; what one side lacks is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from decode.config import SamplingConfig
from decode.errors import UsageError
from decode.generation import decode_config, generation_config, only_settings, sampling_of
from decode.processors import Processors
from decode.sampling import law_of
from tests.fixtures import random_prompt, tiny_llama

EOS = [7, 9]
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "plain": SamplingConfig(temperature=1.0),
    "filters": SamplingConfig(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, typical_p=0.8),
    "greedy_penalties": SamplingConfig(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=3),
    "bans": SamplingConfig(temperature=1.5, bad_words_ids=[[4], [3, 5], [7]], logit_bias={"6": 1.5, "0": -2.0}),
    "integers": SamplingConfig(temperature=2, top_k=5, repetition_penalty=2),
}


def generate_law(model: Any, settings: GenerationConfig, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """[n, V] the laws from which transformers' generate draws its first tokens, and what it drew after them."""
    torch.manual_seed(0)
    done = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=settings,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return torch.cat(done.scores).softmax(-1), done.sequences[0]


def our_law(model: Any, sampling: SamplingConfig, eos: list[int], text: Tensor, rows: int) -> Tensor:
    """[rows, V] ours at the same positions, as one block."""
    history = text[:-1]
    logits = model(input_ids=history.unsqueeze(0)).logits[0, -rows:].float()
    processors = Processors.of(sampling, len(text) - rows, eos)
    return law_of(logits if processors is None else processors(logits, history), sampling).dense(logits.shape[-1])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@torch.no_grad()
def test_d15_generate_draws_from_our_law(sampling: SamplingConfig) -> None:
    """generate works in fp32 and reports the processed scores; ours, of one block, must give the same laws."""
    model, prompt = tiny_llama(), random_prompt(6)
    settings = generation_config(sampling, 4, EOS)
    with only_settings(model, settings):
        theirs, text = generate_law(model, settings, prompt)
    ours = our_law(model, sampling, EOS, text, len(theirs))
    if sampling.greedy:
        assert torch.equal(theirs.argmax(-1), ours.argmax(-1))
    else:
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)  # generate's are fp32


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_settings_survive_the_way_there_and_back(sampling: SamplingConfig) -> None:
    settings = generation_config(sampling, 33, EOS)
    back = sampling_of(settings)
    assert sorted(back.bad_words_ids) == sorted(sampling.bad_words_ids)
    assert {**vars(back), "bad_words_ids": None} == {**vars(sampling), "bad_words_ids": None}
    config = decode_config(settings)
    assert (config.max_new_tokens, config.eos_token_ids, config.sampling) == (33, EOS, back)


def test_unset_top_k_is_fifty_as_in_generate() -> None:
    assert GenerationConfig._get_default_generation_params()["top_k"] == 50
    assert sampling_of(GenerationConfig(do_sample=True)) == SamplingConfig(temperature=1.0, top_k=50)
    assert sampling_of(GenerationConfig(do_sample=True, top_k=0)) == SamplingConfig(temperature=1.0)
    model = tiny_llama(vocab_size=60)
    model.generation_config = GenerationConfig(do_sample=True, max_new_tokens=3)
    laws, _ = generate_law(model, GenerationConfig(), random_prompt(5))
    assert (laws > 0).sum(-1).tolist() == [50, 50, 50]


def test_what_is_unset_is_taken_from_the_models_own() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, eos_token_id=[1, 2], repetition_penalty=1.1)
    config = decode_config(GenerationConfig(temperature=0.9, max_new_tokens=5), own)
    assert config.sampling == SamplingConfig(temperature=0.9, top_k=20, repetition_penalty=1.1)
    assert (config.max_new_tokens, config.eos_token_ids) == (5, [1, 2])


def test_without_do_sample_the_filters_take_no_part() -> None:
    settings = GenerationConfig(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, typical_p=0.5, epsilon_cutoff=0.1)
    assert sampling_of(settings) == SamplingConfig()


def test_bans_and_biases_are_taken() -> None:
    settings = GenerationConfig(
        eos_token_id=7,
        bad_words_ids=[[7], [3, 4]],
        suppress_tokens=[5, 7],
        sequence_bias=[[[6], -1.5], [[2], float("-inf")], [[1, 2], float("-inf")]],
    )
    sampling = sampling_of(settings)
    assert sampling.bad_words_ids == [[3, 4], [5], [7], [2], [1, 2]]  # generate drops a lone end from the bad words
    assert sampling.logit_bias == {"6": -1.5}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"stop_strings": "end"}, {"stop_strings": ["end"]}),
        ({"stop_strings": ["a", "b"]}, {"stop_strings": ["a", "b"]}),
        ({"eos_token_id": 3}, {"eos_token_ids": [3]}),
        ({"eos_token_id": [3, 4]}, {"eos_token_ids": [3, 4]}),
        ({}, {"eos_token_ids": None, "stop_strings": [], "max_new_tokens": 128}),
        ({"max_new_tokens": 9, "max_length": 300}, {"max_new_tokens": 9}),
    ],
)
def test_what_ends_a_text_is_taken(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = decode_config(GenerationConfig(**given))
    assert {key: getattr(config, key) for key in expected} == expected


REFUSED: dict[str, Any] = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "num_return_sequences": 3,
    "diversity_penalty": 0.5,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "remove_invalid_values": True,
    "token_healing": True,
    "watermarking_config": {"bias": 2.0},
    "dola_layers": "low",
    "constraints": ["x"],
    "force_words_ids": [[1]],
    "max_time": 3.0,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 1,
    "begin_suppress_tokens": [1],
    "exponential_decay_length_penalty": (5, 1.2),
    "assistant_ensemble_weight": 0.5,
    "top_h": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "min_length": 12,
    "sequence_bias": [[[1, 2], 1.0]],
}


@pytest.mark.parametrize("key", REFUSED)
def test_d15_what_cannot_be_exact_is_refused_by_name(key: str) -> None:
    settings = GenerationConfig(do_sample=True, **{key: REFUSED[key]})
    with pytest.raises(UsageError, match=rf"generation config: {key}: .* is not supported"):
        sampling_of(settings)


def test_a_length_that_counts_the_prompt_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"max_length: 300 .*set max_new_tokens"):
        decode_config(GenerationConfig(max_length=300))
    assert sampling_of(GenerationConfig(max_length=300)) == SamplingConfig()
    assert sampling_of(GenerationConfig(min_length=5, min_new_tokens=2)).min_new_tokens == 2


def test_the_librarys_defaults_are_harmless() -> None:
    settings = GenerationConfig(**GenerationConfig._get_default_generation_params())
    assert sampling_of(settings) == SamplingConfig()


def test_a_setting_of_a_later_transformers_is_refused_and_a_users_own_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GenerationConfig(my_note="hello")
    assert sampling_of(settings) == SamplingConfig()
    made = GenerationConfig.__init__

    def with_another(self: GenerationConfig, **settings: Any) -> None:
        made(self, **settings)
        self.my_note = None

    monkeypatch.setattr(GenerationConfig, "__init__", with_another)
    with pytest.raises(UsageError, match="my_note"):
        sampling_of(settings)


@pytest.mark.parametrize("key, value", [("frequency_penalty", 0.5), ("presence_penalty", 0.5), ("allowed_ids", [1])])
def test_what_transformers_lacks_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key):
        generation_config(SamplingConfig(**{key: value}), 5, EOS)
