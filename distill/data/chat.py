"""Which tokens of a chat are the assistant's. Found from the template's structure, never from token values alone."""

import unicodedata
from typing import Any

from decode.errors import UsageError
from decode.prompts import encode_chat, encode_prompt
from distill.data.formats import Messages, Prompt, RowError

LONGEST_LEAD = 32
"""Tokens that a template may put between its generation prompt and the answer's text, an empty thought say."""


def encode_answers(tokenizer: Any, messages: Messages) -> tuple[list[int], list[bool]]:
    """Ids of a chat and a mask, both [T]: true for each assistant turn's content and its end-of-turn token.

    An answer begins where the chat rendered up to it, with the generation prompt, ends; that part has to be a prefix
    of the whole. It ends with the first special token before which its text is complete. Raises RowError where the
    template keeps neither rule, or where there is no assistant turn.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RowError("messages: there is no assistant turn, so nothing to supervise")
    ids = _render(tokenizer, messages, False)
    mask = [False] * len(ids)
    for turn in turns:
        start, stop = _span(tokenizer, messages, turn, ids)
        mask[start:stop] = [True] * (stop - start)
    return ids, mask


def encode_completion(tokenizer: Any, prompt: Prompt, completion: str) -> tuple[list[int], list[bool]]:
    """Ids and mask of a prompt, as generate encodes it, and its completion, closed by the end-of-text token.

    Raises RowError where the chat template refuses the prompt.
    """
    try:
        asked = encode_prompt(tokenizer, prompt)
    except UsageError as error:
        raise RowError(str(error).splitlines()[0]) from error
    answer = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    return asked + answer, [False] * len(asked) + [True] * len(answer)


def _span(tokenizer: Any, messages: Messages, turn: int, ids: list[int]) -> tuple[int, int]:
    """First and one past the last supervised token of one assistant turn."""
    asked = _render(tokenizer, messages[:turn], True)
    if ids[: len(asked)] != asked:
        raise RowError(
            f"messages[{turn}]: the chat template does not render what comes before this answer as it does when "
            "the answer is asked for, so the answer's tokens cannot be told; use rows made by generate"
        )
    content = messages[turn]["content"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for stop in (p for p in range(len(asked), len(ids)) if ids[p] in special):
        start = _start_of(tokenizer, ids, len(asked), stop, content)
        if start is not None:
            return start, stop + 1
    raise RowError(
        f"messages[{turn}]: the chat template changes this answer's text or closes it with no special token, so its "
        "tokens cannot be told; use rows made by generate"
    )


def _start_of(tokenizer: Any, ids: list[int], first: int, stop: int, content: str) -> int | None:
    """Where in ids[first:stop] the content begins, if all that follows is the content; else None."""
    wanted = _comparable(content)
    for start in range(first, min(stop, first + LONGEST_LEAD + 1)):
        text = tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)
        if _comparable(text) == wanted:
            return start
    return None


def _comparable(text: str) -> str:
    """Templates and tokenizers may strip, join blanks or compose characters; the rest has to agree."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _render(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> list[int]:
    try:
        return encode_chat(tokenizer, messages, add_generation_prompt)
    except UsageError as error:
        raise RowError(str(error).splitlines()[0]) from error
