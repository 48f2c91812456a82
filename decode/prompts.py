"""The one place where prompts become token ids; every command goes through it, so that all see the same ids."""

from collections.abc import Sequence
from typing import Any

from decode.errors import UsageError

Messages = Sequence[dict[str, Any]]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text, with the special tokens that the tokenizer itself adds (a BOS, say), once."""
    return _one_bos(tokenizer, tokenizer(_utf8(text), add_special_tokens=True)["input_ids"])


def encode_chat(tokenizer: Any, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
    """Ids of a chat in the tokenizer's own template. The template writes the special tokens, nothing is added.

    Raises UsageError when the tokenizer has no template or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("messages: the target's tokenizer has no chat template; give plain text prompts instead")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise what they like, from inside a sandbox
        raise UsageError(f"messages: the chat template refuses them: {error}") from error
    return _one_bos(tokenizer, tokenizer(_utf8(text), add_special_tokens=False)["input_ids"])


def encode_prompt(tokenizer: Any, prompt: str | Messages, chat: bool = True) -> list[int]:
    """Ids of a prompt: a string is one user turn when `chat` holds and there is a template, else plain text.

    Raises UsageError for a prompt that yields no token.
    """
    if not isinstance(prompt, str):
        ids = encode_chat(tokenizer, prompt)
    elif chat and getattr(tokenizer, "chat_template", None):
        ids = encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    else:
        ids = encode_text(tokenizer, prompt)
    if not ids and getattr(tokenizer, "bos_token_id", None) is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise UsageError("prompt: it is empty and the tokenizer has no beginning-of-text token")
    return ids


def _one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Fold a doubled BOS at the start (a template's and the tokenizer's) into one."""
    bos = getattr(tokenizer, "bos_token_id", None)
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return list(ids)


def _utf8(text: str) -> str:
    """`text`, which no tokenizer takes with half a surrogate pair in it, as bytes that are no UTF-8 leave behind."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"prompt: character {error.start} is not valid Unicode; expected UTF-8 text") from None
    return text
