"""Padded tables: what may be produced, which pairs fit, and no id without a token from either side."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import IncompatiblePair
from decode.vocabulary import Vocabulary, check_pair, pair_vocabulary
from tests.fixtures import byte_tokenizer, loaded, random_prompt, tiny_llama, with_noise

INFINITY = float("inf")


def word_tokenizer(count: int = 60, hole: int | None = None, **special: Any) -> Any:
    """`count` one-word tokens t0, t1, ...; no token has the id `hole`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(count) if i != hole}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0", **special)


def padded(rows: int, tokenizer: Any, seed: int = 0) -> Any:
    """A model with `rows` rows of which the tokenizer uses the first 60. The others have the greatest logits."""
    model = tiny_llama(seed, vocab_size=rows)
    with torch.no_grad():
        model.lm_head.weight[60:] = 0
        model.lm_head.weight[60:, 0] = 30
        model.model.norm.weight[:] = 1
    return loaded(model, f"rows{rows}", tokenizer)


@pytest.mark.parametrize("special", [False, True])
def test_d35_only_unused_rows_may_differ(special: bool) -> None:
    ours, theirs = word_tokenizer(), word_tokenizer()
    for tokenizer in (ours, theirs):
        tokenizer.add_tokens(["<added>"], special_tokens=special)  # id 60
    target, draft = padded(64, ours), padded(72, theirs)
    for pair in ((target, draft), (draft, target)):
        check_pair(*pair)
        assert pair_vocabulary(*pair) == Vocabulary(61)
    assert pair_vocabulary(target) == Vocabulary(61)


def test_d35_a_token_that_only_one_table_has_is_named() -> None:
    target, draft = padded(64, word_tokenizer(66)), padded(72, word_tokenizer(66))
    line = r"draft 'rows72' has vocab_size 72, target 'rows64' has 64; they may differ by unused rows only, and id 64"
    with pytest.raises(IncompatiblePair, match=line + " is 't64'"):
        check_pair(target, draft)
    check_pair(target, padded(64, word_tokenizer(66)))


def test_d35_a_real_difference_is_named_with_both_strings() -> None:
    for rows in (64, 72):
        with pytest.raises(IncompatiblePair, match="id 7 is None in the draft and 't7' in the target"):
            check_pair(padded(64, word_tokenizer()), padded(rows, word_tokenizer(hole=7)))
    with pytest.raises(IncompatiblePair, match=r"id 60 is 't60' in the draft and None in the target"):
        check_pair(padded(64, word_tokenizer()), padded(72, word_tokenizer(61)))
    target = loaded(tiny_llama(0, vocab_size=300), "big", byte_tokenizer())
    with pytest.raises(IncompatiblePair, match=r"id 5 is '.' in the draft and '.' in the target"):
        check_pair(target, loaded(tiny_llama(0, vocab_size=272), "small", byte_tokenizer(swap=(5, 9))))


@pytest.mark.parametrize("without", [0, 1])
def test_d35_without_both_tokenizers_tables_must_be_equal(without: int) -> None:
    tokenizers = [word_tokenizer(), word_tokenizer()]
    tokenizers[without] = None
    with pytest.raises(IncompatiblePair, match="vocab_size 72, target 'rows64' has 64; they must be equal where a"):
        check_pair(padded(64, tokenizers[0]), padded(72, tokenizers[1]))
    check_pair(padded(64, tokenizers[0]), padded(64, tokenizers[1]))


def test_tables_may_be_asked_to_be_equal() -> None:
    pair = padded(64, word_tokenizer()), padded(72, word_tokenizer())
    check_pair(*pair)
    with pytest.raises(
        IncompatiblePair, match="vocab_size 72, target 'rows64' has 64; they must be equal here, unused"
    ):
        check_pair(*pair, equal_tables=True)
    check_pair(pair[0], padded(64, word_tokenizer()), equal_tables=True)


def test_unused_ids_at_the_end_are_cut_off_as_a_view() -> None:
    vocabulary = pair_vocabulary(padded(64, word_tokenizer()))
    logits = torch.randn(3, 64)
    kept = vocabulary.cut(logits)
    assert vocabulary == Vocabulary(60)
    assert torch.equal(kept, logits[:, :60]) and kept.data_ptr() == logits.data_ptr()
    assert pair_vocabulary(padded(64, None)) == Vocabulary(64), "without a tokenizer every id counts"


def test_unused_ids_in_the_middle_are_banned() -> None:
    vocabulary = pair_vocabulary(padded(64, word_tokenizer(hole=7)))
    assert vocabulary.size == 60 and vocabulary.banned is not None and vocabulary.banned.tolist() == [7]
    logits = torch.randn(3, 64)
    kept = vocabulary.cut(logits)
    assert bool((kept[:, 7] == -INFINITY).all()) and bool(logits.isfinite().all())
    kept[:, 7] = logits[:, 7]
    assert torch.equal(kept, logits[:, :60])


def test_an_end_of_text_counts_though_no_token_has_it() -> None:
    target = padded(64, word_tokenizer())
    target.model.generation_config.eos_token_id = [62, 99]
    vocabulary = pair_vocabulary(target)
    assert vocabulary.size == 63 and vocabulary.banned is not None and vocabulary.banned.tolist() == [60, 61]


def test_a_reduced_vocabulary_has_tokens_only() -> None:
    target = padded(64, word_tokenizer())
    draft = padded(72, word_tokenizer())
    check_pair(target, replace(draft, vocab_ids=torch.tensor([1, 59])))
    with pytest.raises(IncompatiblePair, match="draft 'rows72': its reduced vocabulary has id 60, which no token has"):
        check_pair(target, replace(draft, vocab_ids=torch.tensor([1, 59, 60, 63])))


@pytest.mark.parametrize("rows", [(64, 72), (72, 64), (64, 64), (72, None)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("hole", [None, 7])
def test_d35_no_id_without_a_token_is_drafted_or_emitted(
    rows: tuple[int, int | None], temperature: float, hole: int | None
) -> None:
    target = padded(rows[0], word_tokenizer(hole=hole))
    draft = None if rows[1] is None else padded(rows[1], word_tokenizer(hole=hole), seed=1)
    decoder = SpeculativeDecoder(target, draft)
    config = DecodeConfig(40, 4, draft_length="fixed", sampling=SamplingConfig(temperature=temperature), seed=3)
    prompt = [i for i in random_prompt(9) if i != hole]
    answer = decoder.generate([prompt], config, trace=True)[0]
    seen = {*answer.ids, *(token for done in answer.rounds for token in done.drafted)}
    assert max(seen) < 60 and hole not in seen
    ids = torch.tensor([[*prompt, *answer.ids]])
    logits = target.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    assert bool((logits.argmax(-1) >= 60).any()), "no unused row was ever the likeliest, the test shows nothing"
    if hole is not None:
        logits[:, hole] = -INFINITY
    assert temperature or logits[:, :60].argmax(-1).tolist() == answer.ids


def test_d35_a_padded_copy_of_the_target_is_always_accepted() -> None:
    """Unused rows take no part: the same weights with more of them draft exactly as the target would."""
    target = padded(64, word_tokenizer())
    draft = padded(72, word_tokenizer())
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            draft.model.get_parameter(name)[: len(weight)] = weight
    for temperature in (0.0, 1.0):
        config = DecodeConfig(30, 4, draft_length="fixed", sampling=SamplingConfig(temperature=temperature), seed=3)
        answer = SpeculativeDecoder(target, draft).generate([random_prompt(9)], config)[0]
        assert answer.stats.draft_acceptance_rate == 1.0


def test_equal_tables_need_no_cut() -> None:
    model = tiny_llama(0, vocab_size=60)
    target, draft = loaded(model, "a", word_tokenizer()), loaded(with_noise(model, 0.1), "b", word_tokenizer())
    check_pair(target, draft)
    assert pair_vocabulary(target, draft) == Vocabulary(60)
