"""Prompts become the same ids everywhere, with one beginning-of-text token."""

import pytest

from decode.errors import UsageError
from decode.prompts import encode_chat, encode_prompt, encode_text
from tests.fixtures import CHATML, byte_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
BOS = byte_tokenizer().bos_token_id


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, None])
@pytest.mark.parametrize("add_bos", [False, True])
def test_d52_a03_exactly_one_bos(template: str | None, add_bos: bool) -> None:
    tokenizer = byte_tokenizer(template, add_bos)
    assert encode_text(tokenizer, "hi").count(BOS) == int(add_bos)
    if template is None:
        with pytest.raises(UsageError, match="chat template"):
            encode_chat(tokenizer, CHAT)
        assert encode_prompt(tokenizer, "hi") == encode_text(tokenizer, "hi")
        return
    ids = encode_chat(tokenizer, CHAT)
    assert ids[0] == BOS and ids[1] != BOS
    assert ids.count(BOS) == 2  # ChatML's own token opens each turn: the user's and the answer's
    assert encode_prompt(tokenizer, "hi") == encode_prompt(tokenizer, CHAT) == ids


def test_special_tokens_of_a_template_are_single_ids() -> None:
    ids = encode_chat(byte_tokenizer(), CHAT)
    assert byte_tokenizer().decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_d57_an_empty_prompt_is_the_bos_or_refused() -> None:
    tokenizer = byte_tokenizer(None)
    assert encode_prompt(tokenizer, "") == [BOS]
    tokenizer.bos_token = None
    with pytest.raises(UsageError, match="empty"):
        encode_prompt(tokenizer, "")


def test_a_template_that_refuses_is_one_line() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        encode_chat(tokenizer, CHAT)
