"""Every row of a block is processed with the tokens that plain decoding would have seen there, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from decode.config import SamplingConfig
from decode.errors import UsageError
from decode.generation import generation_config
from decode.processors import OccurrencePenalties, Processors, check_token_ids
from tests.fixtures import tiny_llama

SIZE, PROMPT, EOS = 12, 4, (11, 3)
HISTORY = torch.tensor([1, 2, 5, 2, 7, 1, 2, 9, 9])  # 4 of the prompt, 5 of the text
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_reward": {"repetition_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "presence_penalty": {"presence_penalty": -1.1},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[4], [2, 9], [11]]},
    "logit_bias": {"logit_bias": {"6": 2.5, "0": -4.0}},
    "allowed_ids": {"allowed_ids": [0, 3, 9, 10]},
    "min_new_tokens": {"min_new_tokens": 4},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5], [1, 2]],
        "logit_bias": {"8": 1.0},
        "allowed_ids": [0, 1, 2, 3, 6, 7, 8, 9],
        "min_new_tokens": 5,
    },
}
HISTORY_DEPENDENT = [key for key in OPTIONS if key not in ("logit_bias", "allowed_ids")]


def block(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def made(sampling: SamplingConfig, extra: Any = ()) -> Processors:
    processors = Processors.of(sampling, PROMPT, EOS, extra)
    assert processors is not None
    return processors


def stepwise(process: Callable[[Tensor, Tensor], Tensor], logits: Tensor, history: Tensor = HISTORY) -> Tensor:
    """What plain decoding does: each position alone, with the tokens before it."""
    first = len(history) - len(logits) + 1
    rows = [process(history[None, : first + i], row[None].clone()) for i, row in enumerate(logits)]
    return torch.cat(rows)


def by_hand(options: dict[str, Any], history: list[int], logits: list[float]) -> list[float]:
    """One position, with plain loops: bias, penalties, n-grams, bad words, minimum, allowed ids."""
    scores, text = list(logits), history[PROMPT:]
    banned = {run[-1] for run in options.get("bad_words_ids", []) if history[len(history) - len(run) + 1 :] == run[:-1]}
    n = options.get("no_repeat_ngram_size", 0)
    for start in range(len(history) - n + 1 if n else 0):
        if history[start : start + n - 1] == history[len(history) - n + 1 :]:
            banned.add(history[start + n - 1])
    if len(text) < options.get("min_new_tokens", 0):
        banned.update(EOS)
    banned.update(set(range(SIZE)) - set(options.get("allowed_ids", range(SIZE))))
    for token in range(SIZE):
        scores[token] += options.get("logit_bias", {}).get(str(token), 0.0)
        penalty = options.get("repetition_penalty", 1.0) if token in history else 1.0
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        scores[token] -= options.get("frequency_penalty", 0.0) * text.count(token)
        scores[token] -= options.get("presence_penalty", 0.0) * (token in text)
    return [float("-inf") if token in banned else score for token, score in enumerate(scores)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_d15_each_row_sees_exactly_the_tokens_before_it(options: dict[str, Any], rows: int) -> None:
    logits = block(rows)
    first = len(HISTORY) - rows + 1
    expected = [by_hand(options, HISTORY[: first + i].tolist(), row.tolist()) for i, row in enumerate(logits)]
    got = made(SamplingConfig(**options))(logits, HISTORY)
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("options", [OPTIONS[key] for key in HISTORY_DEPENDENT], ids=HISTORY_DEPENDENT)
def test_one_history_for_all_rows_would_be_seen(options: dict[str, Any]) -> None:
    """The control: a block whose rows all see every drafted token."""
    logits, processors = block(6), made(SamplingConfig(**options))
    wrong = torch.cat([processors(row[None], HISTORY) for row in logits])
    assert not torch.allclose(wrong, processors(logits, HISTORY), atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_d15_every_option_has_an_effect(options: dict[str, Any]) -> None:
    assert not torch.equal(made(SamplingConfig(**options))(block(), HISTORY), block())


@pytest.mark.parametrize("key", [k for k in OPTIONS if k not in ("frequency_penalty", "presence_penalty", "all")])
def test_every_option_equals_what_generate_builds(key: str) -> None:
    """The list that transformers' own generate would use for the same settings, one position after another."""
    sampling = SamplingConfig(**OPTIONS[key])
    if key == "allowed_ids":
        allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: sampling.allowed_ids}
        settings = generation_config(SamplingConfig(), 20, EOS)
    else:
        allowed, settings = {}, generation_config(sampling, 20, EOS)
    model = tiny_llama(vocab_size=SIZE)
    settings.num_beams = settings.num_return_sequences = 1
    model._prepare_special_tokens(settings, kwargs_has_attention_mask=True)
    theirs = model._get_logits_processor(settings, input_ids_seq_length=PROMPT, device="cpu", **allowed)
    expected = stepwise(theirs, block(6))
    assert torch.allclose(made(sampling)(block(6), HISTORY), expected, atol=1e-9, rtol=0)


def test_nothing_to_do_costs_nothing() -> None:
    assert Processors.of(SamplingConfig(temperature=0.7, top_k=5), PROMPT, EOS) is None
    assert Processors.of(SamplingConfig(min_new_tokens=5), PROMPT, ()) is None


def test_d13_a_minimum_counts_tokens_and_is_dropped_once_it_is_met() -> None:
    """The rows of the block follow 0 to 5 tokens of the text."""
    processors = made(SamplingConfig(min_new_tokens=3))
    banned = processors(block(6), HISTORY)[:, list(EOS)].isinf().all(-1)
    assert banned.tolist() == [True, True, True, False, False, False]
    late = block(3)
    assert processors(late, HISTORY) is late


@pytest.mark.parametrize(
    "make",
    [
        lambda: RepetitionPenaltyLogitsProcessor(1.4),
        lambda: SequenceBiasLogitsProcessor([[[1, 2], 3.0], [[6], -1.0]]),
        lambda: MinLengthLogitsProcessor(7, list(EOS)),
        lambda: ForcedEOSTokenLogitsProcessor(9, 11),
        lambda: ExponentialDecayLengthPenalty((1, 1.5), 11, PROMPT),
        lambda: SuppressTokensAtBeginLogitsProcessor([1, 2], 6),
        lambda: WatermarkLogitsProcessor(SIZE, "cpu"),
    ],
)
def test_users_processors_see_each_row_alone(make: Callable[[], Any]) -> None:
    expected = stepwise(make(), block(6))
    assert torch.allclose(made(SamplingConfig(), [make()])(block(6), HISTORY), expected, atol=1e-12)
    assert not torch.equal(expected, block(6))


class Writing(LogitsProcessor):
    """Writes to both of its arguments, as careless processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, int(input_ids[0, -1])] = float("-inf")
        input_ids.zero_()
        return scores


def test_users_processors_may_write_to_what_they_are_given() -> None:
    logits, history = block(3), HISTORY.clone()
    got = made(SamplingConfig(), [Writing()])(logits, history)
    assert torch.equal(logits, block(3)) and torch.equal(history, HISTORY)
    assert got.isinf().nonzero()[:, 1].tolist()[0] == HISTORY[-3]


def test_users_processors_come_after_ours_and_replace_their_own_kind() -> None:
    """The rule of transformers' generate."""
    sampling = SamplingConfig(repetition_penalty=1.5, no_repeat_ngram_size=2)
    own, bias = RepetitionPenaltyLogitsProcessor(3.0), SequenceBiasLogitsProcessor([[[7], 9.0]])
    expected = stepwise(LogitsProcessorList([own, NoRepeatNGramLogitsProcessor(2), bias]), block())
    assert torch.equal(made(sampling, [bias, own])(block(), HISTORY), expected)
    merged = tiny_llama()._merge_criteria_processor_list(
        LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)]),
        LogitsProcessorList([bias, own]),
    )
    assert torch.equal(stepwise(merged, block()), expected)


class Child(SynthIDTextWatermarkLogitsProcessor):
    """A class of a user's own that inherits a state."""


def test_processors_that_cannot_be_exact_are_refused_by_name() -> None:
    synthid = {"ngram_len": 3, "keys": [1, 2], "sampling_table_size": 8, "sampling_table_seed": 0}
    for processor, name in (
        (UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, tiny_llama()), "UnbatchedClassifierFreeGuidance"),
        (SynthIDTextWatermarkLogitsProcessor(**synthid, context_history_size=4, device="cpu"), "SynthIDText"),
        (Child(**synthid, context_history_size=4, device="cpu"), "Child"),
        (object(), "object"),
    ):
        with pytest.raises(UsageError, match=f"logits_processor: {name}"):
            Processors.of(SamplingConfig(), PROMPT, EOS, [processor])


def test_processors_that_need_more_arguments_are_refused_by_name() -> None:
    class Greedy(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor, beam: int) -> Tensor:  # type: ignore[override]
            return scores + beam

    with pytest.raises(UsageError, match="logits_processor: Greedy needs further arguments"):
        Processors.of(SamplingConfig(), PROMPT, EOS, [Greedy()])


@pytest.mark.parametrize(
    "options", [{"bad_words_ids": [[1], [2, 12]]}, {"logit_bias": {"12": 1.0}}, {"allowed_ids": [3, 12]}]
)
def test_token_ids_outside_the_vocabulary_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))}: 12 is not legal; expected token ids below 12"):
        check_token_ids(SamplingConfig(**options), SIZE)
    check_token_ids(SamplingConfig(**options), SIZE + 1)


def test_the_prompt_takes_no_part_in_occurrence_penalties() -> None:
    """As OpenAI's API and vLLM count."""
    scores = OccurrencePenalties(0.5, 0.25, PROMPT)(HISTORY[None], torch.zeros(1, SIZE))[0].tolist()
    assert scores == [0, -0.75, -0.75, 0, 0, 0, 0, -0.75, 0, -1.25, 0, 0]


def test_half_precision_logits_are_processed_in_fp32() -> None:
    logits = block().bfloat16()
    got = made(SamplingConfig(repetition_penalty=1.3))(logits, HISTORY)
    assert got.dtype == torch.float32
    assert torch.equal(got, made(SamplingConfig(repetition_penalty=1.3))(logits.float(), HISTORY))


def test_settings_without_processors_make_a_plain_generation_config() -> None:
    settings = generation_config(SamplingConfig(), 5, ())
    assert isinstance(settings, GenerationConfig) and settings.bad_words_ids is None
