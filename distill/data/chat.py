"""Which tokens of a chat are the assistant's. Found from the template's structure, never from token values alone."""

import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

from decode.errors import UsageError
from decode.prompts import encode_chat, encode_prompt
from distill.data.formats import Messages, Prompt, RowError

LONGEST_LEAD = 32
"""Tokens that a template may put between its generation prompt and the answer's text, an empty thought say."""


class Answers(NamedTuple):
    """A chat in tokens."""

    ids: list[int]
    mask: list[bool]
    num_rewritten: int
    """Answers that the template shortens in the middle of the chat; their tokens are not supervised."""


def encode_answers(tokenizer: Any, messages: Messages) -> Answers:
    """Ids of a chat and a mask, both [T]: true for each assistant turn's content and its end-of-turn token.

    An answer begins where the chat rendered up to it, with the generation prompt, ends; that part has to be a prefix
    of the whole. It ends with the first special token before which its text is complete, and before the next answer
    is asked for. Of an answer that is not the last, a template may keep the end only, and drop the thoughts before
    it: the target never says that in that place, so it is context and not supervised. Raises RowError where the
    template keeps none of these rules, or where there is no assistant turn.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RowError("messages: there is no assistant turn, so nothing to supervise")
    ids = _render(tokenizer, messages, False)
    mask, num_rewritten = [False] * len(ids), 0
    borders = [*(_first_of(tokenizer, messages, turn, ids) for turn in turns), len(ids)]
    for turn, first, end in zip(turns, borders, borders[1:], strict=False):
        content = messages[turn]["content"]
        span = _span(tokenizer, ids[:end], first, content)
        if span is not None:
            mask[span[0] : span[1]] = [True] * (span[1] - span[0])
        elif turn != turns[-1] and _is_shortened(tokenizer, ids[:end], first, content):
            num_rewritten += 1
        else:
            raise RowError(
                f"messages[{turn}]: the chat template changes this answer's text or closes it with no special token, "
                "so its tokens cannot be told; use rows made by generate"
            )
    return Answers(ids, mask, num_rewritten)


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


def _first_of(tokenizer: Any, messages: Messages, turn: int, ids: list[int]) -> int:
    """Where the template asks for one assistant turn. Raises RowError where it renders what is before otherwise."""
    asked = _render(tokenizer, messages[:turn], True)
    if ids[: len(asked)] != asked:
        raise RowError(
            f"messages[{turn}]: the chat template does not render what comes before this answer as it does when "
            "the answer is asked for, so the answer's tokens cannot be told; use rows made by generate"
        )
    return len(asked)


def _span(tokenizer: Any, ids: list[int], first: int, content: str) -> tuple[int, int] | None:
    """First and one past the last token of an answer that is asked for at `first`; None where its text is another."""
    for stop in _closing_places(tokenizer, ids, first):
        start = _start_of(tokenizer, ids, first, stop, content)
        if start is not None:
            return start, stop + 1
    return None


def _is_shortened(tokenizer: Any, ids: list[int], first: int, content: str) -> bool:
    """Whether what stands at `first`, up to a special token, is the end of the content."""
    wanted = _comparable(content)
    texts = (_comparable(_decode(tokenizer, ids[first:stop])) for stop in _closing_places(tokenizer, ids, first))
    return any(text and wanted.endswith(text) for text in texts)


def _closing_places(tokenizer: Any, ids: list[int], first: int) -> Iterator[int]:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return (place for place in range(first, len(ids)) if ids[place] in special)


def _start_of(tokenizer: Any, ids: list[int], first: int, stop: int, content: str) -> int | None:
    """Where in ids[first:stop] the content begins, if all that follows is the content; else None."""
    wanted = _comparable(content)
    for start in range(first, min(stop, first + LONGEST_LEAD + 1)):
        if _comparable(_decode(tokenizer, ids[start:stop])) == wanted:
            return start
    return None


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _comparable(text: str) -> str:
    """Templates and tokenizers may strip, join blanks or compose characters; the rest has to agree."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _render(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> list[int]:
    try:
        return encode_chat(tokenizer, messages, add_generation_prompt)
    except UsageError as error:
        raise RowError(str(error).splitlines()[0]) from error
