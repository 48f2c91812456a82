"""Streamed text: joined chunks are the whole text, no half characters, work that does not grow with the text."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.text import LONGEST, GrowingText
from tests.fixtures import byte_tokenizer

BROKEN = "\ufffd"


def fast(core: Any, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>", **options)


@cache
def bytes_only() -> Any:
    """257 is a special token, and half of the other ids are no characters by themselves."""
    return byte_tokenizer()


@cache
def sentence_pieces() -> Any:
    """As Llama 2: pieces that begin with a space mark, bytes for what has no piece, the text's first space dropped."""
    from tokenizers import Tokenizer, decoders, models

    words = ["▁the", "▁cat", "▁", "s", "at", "日", "ing", ".", "▁né", "<0x0G>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    core = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"))
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(core)


@cache
def metaspaces() -> Any:
    from tokenizers import Tokenizer, decoders, models

    tokens = ["<unk>", "</s>", "▁a", "▁bc", "▁", "d", "é", "▁▁", BROKEN]
    core = Tokenizer(models.Unigram([(t, -1.0) for t in tokens], unk_id=0))
    core.add_special_tokens(["<unk>", "</s>"])
    core.decoder = decoders.Metaspace()
    return fast(core)


@cache
def word_pieces(cleanup: bool = True) -> Any:
    """As BERT: words joined by spaces, and spaces before punctuation taken out afterwards."""
    from tokenizers import Tokenizer, decoders, models

    tokens = ["<unk>", "</s>", "the", "##re", ".", ",", "'", "n't", "do", "'s", "'re", "?", "it", "##n't", "##'"]
    core = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    core.add_special_tokens(["<unk>", "</s>"])
    core.decoder = decoders.WordPiece(cleanup=False)
    return fast(core, clean_up_tokenization_spaces=cleanup)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": bytes_only,
    "sentence_pieces": sentence_pieces,
    "metaspaces": metaspaces,
    "word_pieces": word_pieces,
}


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def pieces(tokenizer: Any, blocks: Sequence[Sequence[int]]) -> list[str]:
    """What a stream of `blocks` shows; the last piece is told the whole text."""
    growing = GrowingText(tokenizer)
    shown = [growing.extend(block) for block in blocks]
    return [*shown, growing.rest_of(whole(tokenizer, [i for block in blocks for i in block]))]


def random_blocks(size: int, longest: int = 60) -> Any:
    return st.lists(st.lists(st.integers(0, size - 1), max_size=9), max_size=longest)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_d51_joined_pieces_are_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    blocks = data.draw(random_blocks(len(tokenizer)))
    assert "".join(pieces(tokenizer, blocks)) == whole(tokenizer, [i for block in blocks for i in block])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_d51_long_texts_join_although_old_ids_are_forgotten(name: str) -> None:
    tokenizer, draw = TOKENIZERS[name](), random.Random(7)
    for _ in range(60):
        few = [draw.randrange(len(tokenizer)) for _ in range(draw.choice([2, 4, 8, 99]))]
        blocks = [[draw.choice(few) for _ in range(draw.randint(1, 9))] for _ in range(50)]
        assert "".join(pieces(tokenizer, blocks)) == whole(tokenizer, [i for block in blocks for i in block])


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=8), seed=st.randoms())
def test_d51_real_text_shows_no_half_character(texts: list[str], seed: Any) -> None:
    """Text in which every character is whole shows no broken one, wherever its blocks are cut."""
    tokenizer, text = bytes_only(), "é日🙂".join(texts).replace(BROKEN, "")
    ids = tokenizer(text)["input_ids"]
    blocks = []
    while ids:
        width = seed.randint(1, 7)
        blocks.append(ids[:width])
        ids = ids[width:]
    shown = pieces(tokenizer, blocks)
    assert "".join(shown) == text
    assert not any(BROKEN in piece for piece in shown)


def test_d51_pieces_come_as_soon_as_nothing_can_change_them() -> None:
    tokenizer = bytes_only()
    blocks = [tokenizer(part)["input_ids"] for part in ("a b", " c")] + [[i] for i in tokenizer("é!")["input_ids"]]
    assert pieces(tokenizer, blocks) == ["a b", " c", "", "é", "!", ""]
    sentences = sentence_pieces()
    blocks = [sentences.convert_tokens_to_ids(block) for block in (["▁the", "▁"], ["<0xC3>", "<0xA9>"], ["▁cat"])]
    assert pieces(sentences, blocks) == ["the ", "", "é cat", ""], "a byte that follows could still break the run"


def test_d51_a_text_may_begin_inside_a_character() -> None:
    """The prompt was cut there; what is left of the character is broken in the whole text too."""
    tokenizer = bytes_only()
    ids = tokenizer("日本")["input_ids"][1:]
    assert "".join(pieces(tokenizer, [[i] for i in ids])) == whole(tokenizer, ids) == BROKEN * 2 + "本"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_d51_decoding_blocks_alone_would_be_seen(name: str) -> None:
    """Negative control: the plain way breaks on an ordinary text of each tokenizer."""
    tokenizer = TOKENIZERS[name]()
    words = {
        "bytes": tokenizer.tokenize("né"),
        "sentence_pieces": ["▁the", "▁cat"],
        "metaspaces": ["▁a", "▁bc"],
        "word_pieces": ["it", "do"],
    }
    ids = tokenizer.convert_tokens_to_ids(words[name])
    assert "".join(whole(tokenizer, [i]) for i in ids) != whole(tokenizer, ids)
    assert "".join(pieces(tokenizer, [[i] for i in ids])) == whole(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_work_of_a_chunk_does_not_grow_with_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    counted: list[int] = []

    class Counting:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(tokenizer, attribute)

        def decode(self, ids: list[int], **options: Any) -> str:
            counted.append(len(ids))
            return str(tokenizer.decode(ids, **options))

    growing = GrowingText(Counting())
    words = {"bytes": "x", "sentence_pieces": "▁cat", "metaspaces": "▁a", "word_pieces": "it"}[name]
    ids = tokenizer.convert_tokens_to_ids([words] * 2000)
    shown = [growing.extend([i]) for i in ids]
    assert "".join([*shown, growing.rest_of(whole(tokenizer, ids))]) == whole(tokenizer, ids)
    assert max(counted) <= LONGEST + 1
    assert sum(counted) < 2000 * (LONGEST + 10)


def test_without_a_tokenizer_there_is_no_text() -> None:
    growing = GrowingText(None)
    assert (growing.extend([1, 2]), growing.rest_of("")) == ("", "")
