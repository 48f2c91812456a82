"""Stop strings and custom criteria: every token as plain transformers would have judged it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.stopping import Stopping
from tests.fixtures import byte_tokenizer, greedy_reference, loaded, tiny_llama, with_noise

GREEDY = SamplingConfig()
LETTERS = "abcd"


@cache
def letters() -> Any:
    """Single letters and pairs of them, so that most stop strings end inside a token, plus the bytes of "é"."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", *LETTERS, *(a + b for a in LETTERS for b in LETTERS), "Ã", "©", "Ġa", "ĠÃ"]
    core = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>"))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="<unk>")


def run(stopping: Stopping, blocks: Sequence[Sequence[int]]) -> list[int]:
    return [token for block in blocks for token in stopping.cut(block)]


def plain(ids: Sequence[int], prompt: Sequence[int], criteria: Any, budget: int) -> list[int]:
    """Token by token, as transformers' loop does it."""
    for count in range(1, min(len(ids), budget) + 1):
        if criteria(torch.tensor([[*prompt, *ids[:count]]]), None).all():
            return list(ids[:count])
    return list(ids[:budget])


random_ids = st.lists(st.integers(0, 25), max_size=30)
STRINGS = ["ab", "bcd", "a", "é", "dé", " a", "aaaa", "dcba", "c<end>", "a b"]


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(0, 25), max_size=6), max_size=12),
    prompt=random_ids,
    strings=st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3),
    budget=st.integers(1, 40),
)
def test_d10_stop_strings_end_a_text_where_transformers_ends_it(
    blocks: list[list[int]], prompt: list[int], strings: list[str], budget: int
) -> None:
    tokenizer = letters()
    ids = [i for block in blocks for i in block]
    stopping = Stopping(budget, (), stop_strings=strings, tokenizer=tokenizer, prompt=prompt)
    wanted = plain(ids, prompt, StopStringCriteria(tokenizer, strings), budget)
    assert run(stopping, blocks) == wanted
    assert stopping.room == budget - len(wanted)
    ended = len(wanted) < min(len(ids), budget)
    assert stopping.reason == "stop" if ended else stopping.reason in (None, "length", "stop")


def ids_of(*tokens: str) -> list[int]:
    return letters().convert_tokens_to_ids(list(tokens))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("string", "blocks", "kept"),
    [
        ("bc", [["a", "bc", "d"]], 2),
        ("bc", [["ab", "cd", "d"]], 2),
        ("bcd", [["ab"], ["c"], ["da", "a"]], 3),
        ("é", [["Ã"], ["a", "Ã", "©", "a"]], 4),
        ("aé", [["aa", "Ã", "©"]], 3),
        ("abcd", [["ab", "<end>", "cd"], ["ab", "c", "da", "a"]], 6),
    ],
)
def test_d10_the_token_that_completes_it_is_the_last(string: str, blocks: list[list[str]], kept: int) -> None:
    ids = [ids_of(*block) for block in blocks]
    stopping = Stopping(20, (), stop_strings=[string], tokenizer=letters())
    assert len(run(stopping, ids)) == kept
    assert stopping.reason == "stop"
    assert run(Stopping(20, ()), ids) == [i for block in ids for i in block], "without the string all of it passes"


def test_d10_a_string_may_begin_in_the_prompt_but_not_lie_in_it() -> None:
    """transformers looks at prompt and text alike, and asks only after a new token."""
    stopping = Stopping(9, (), stop_strings=["abc"], tokenizer=letters(), prompt=ids_of("ab", "c", "d", "ab"))
    assert run(stopping, [ids_of("d", "a", "b", "c", "d")]) == ids_of("d", "a", "b", "c")
    stopping = Stopping(9, (), stop_strings=["abc"], tokenizer=letters(), prompt=ids_of("ab", "c", "d", "ab"))
    assert run(stopping, [ids_of("c", "d")]) == ids_of("c")


def test_d10_nothing_stands_before_the_first_token() -> None:
    first = byte_tokenizer().convert_ids_to_tokens(0)
    stopping = Stopping(9, (), stop_strings=[first * 3], tokenizer=byte_tokenizer())
    assert run(stopping, [[0, 0], [0, 0]]) == [0, 0, 0]


def test_the_first_of_several_ends_counts() -> None:
    end, block = ids_of("<end>")[0], ids_of("a", "b", "<end>", "c")
    assert Stopping(9, {end}, stop_strings=["ab"], tokenizer=letters()).cut(block) == block[:2]
    assert Stopping(9, {end}, stop_strings=["c"], tokenizer=letters()).cut(block) == block[:3]
    counting = Counting(stop_at=2)
    stopping = Stopping(9, {end}, stop_strings=["bc"], tokenizer=letters(), criteria=[counting])
    assert (stopping.cut(block), stopping.reason) == (block[:2], "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": ["a"]}, r"stop_strings: \['a'\] need the target's tokenizer"),
        ({"stop_strings": ["日"], "tokenizer": letters}, r"stop_strings: \['日'\] cannot be looked for: "),
        ({"criteria": ["a"]}, r"stopping_criteria: 'a' is not legal; expected a callable"),
    ],
)
def test_what_cannot_be_looked_for_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    made = {key: value() if value is letters else value for key, value in options.items()}
    with pytest.raises(UsageError, match=message) as caught:
        Stopping(9, (), **made)
    assert "\n" not in str(caught.value)


class Counting(StoppingCriteria):
    """Keeps what it was asked; says yes at the `stop_at`-th question."""

    def __init__(self, stop_at: int = -1, answer: Any = True) -> None:
        self.seen: list[list[int]] = []
        self._stop_at, self._answer = stop_at, answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        assert input_ids.shape[0] == 1 and input_ids.dtype == torch.int64 and scores is None
        self.seen.append(input_ids[0].tolist())
        return self._answer if len(self.seen) == self._stop_at else torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("answer", [True, torch.tensor(True), torch.tensor([True]), torch.tensor([[True]])], ids=str)
def test_a_criterion_is_asked_once_a_token_with_all_that_came_before(answer: Any) -> None:
    first, second = Counting(stop_at=4, answer=answer), Counting()
    stopping = Stopping(9, (), criteria=[first, second], prompt=[7, 8])
    assert run(stopping, [[1, 2], [], [3, 4, 5], [6]]) == [1, 2, 3, 4]
    assert first.seen == second.seen == [[7, 8, *range(1, n + 1)] for n in (1, 2, 3, 4)]
    assert (stopping.reason, stopping.room) == ("stop", 5)


def test_any_of_several_criteria_ends_the_text() -> None:
    for place in (0, 1, 2):
        criteria = [Counting(stop_at=2 if i == place else -1) for i in range(3)]
        assert run(Stopping(9, (), criteria=criteria), [[1, 2, 3]]) == [1, 2]


def test_a_criterion_is_not_asked_beyond_the_text() -> None:
    asked = Counting()
    assert run(Stopping(3, {9}, criteria=[asked]), [[1, 2, 3, 4]]) == [1, 2, 3]
    assert run(Stopping(8, {9}, criteria=[asked]), [[1, 9, 3]]) == [1, 9]
    assert len(asked.seen) == 5


def test_an_answer_for_several_rows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stopping_criteria: function returned shape \[2\]; expected a bool, or"):
        Stopping(9, (), criteria=[lambda ids, scores: torch.ones(2, dtype=torch.bool)]).cut([1])


def test_transformers_own_list_of_criteria_is_taken() -> None:
    stopping = Stopping(9, (), criteria=StoppingCriteriaList([MaxLengthCriteria(5)]), prompt=[7, 8])
    assert run(stopping, [[1, 2, 3, 4]]) == [1, 2, 3]


def text_pair(noise: float) -> tuple[Any, SpeculativeDecoder, list[int], list[int]]:
    """A target that writes bytes, its decoder with a noisy copy as draft, a prompt, and 40 greedy tokens."""
    tokenizer = byte_tokenizer()
    target = tiny_llama(3, vocab_size=len(tokenizer))
    draft = with_noise(target, noise)
    decoder = SpeculativeDecoder(loaded(target, tokenizer=tokenizer), loaded(draft, tokenizer=tokenizer))
    prompt = tokenizer("ab")["input_ids"]
    return target, decoder, prompt, greedy_reference(target, prompt, 40)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_d10_decoding_ends_at_a_stop_string_as_plain_generate_does(noise: float) -> None:
    target, decoder, prompt, reference = text_pair(noise)
    tokenizer = decoder.target.tokenizer
    names = tokenizer.convert_ids_to_tokens(reference)
    cut_at = []
    for first in range(2, 30):
        bytes_ = tokenizer.backend_tokenizer.decoder.decode(names[first : first + 3])
        if "\ufffd" in bytes_ or len(bytes_) < 2:
            continue
        config = DecodeConfig(40, 6, draft_length="fixed", sampling=GREEDY, stop_strings=[bytes_])
        inputs = torch.tensor([prompt])
        wanted = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=40,
            do_sample=False,
            stop_strings=[bytes_],
            tokenizer=tokenizer,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        streamed = list(decoder.stream(prompt, config))
        answer = streamed[-1].generation
        assert answer is not None
        assert answer.ids == wanted == reference[: len(wanted)]
        assert answer.finish_reason == "stop" and bytes_ in answer.text
        assert [i for chunk in streamed for i in chunk.ids] == answer.ids
        assert "".join(chunk.text for chunk in streamed) == answer.text
        assert answer.stats.num_output_tokens == len(wanted)
        cut_at.append(len(wanted))
    assert len(set(cut_at)) > 3, "too few places to show anything"


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_custom_criteria_end_decoding_as_plain_generate_does(noise: float) -> None:
    target, decoder, prompt, reference = text_pair(noise)
    for count in (1, 3, 4, 9):
        ours, theirs = Counting(stop_at=count), Counting(stop_at=count)
        config = DecodeConfig(20, 6, draft_length="fixed", sampling=GREEDY)
        answer = decoder.generate([prompt], config, stopping_criteria=[ours])[0]
        inputs = torch.tensor([prompt])
        target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=20,
            do_sample=False,
            stopping_criteria=[theirs],
            pad_token_id=0,
        )
        assert answer.ids == reference[:count]
        assert answer.finish_reason == "stop"
        assert ours.seen == theirs.seen
